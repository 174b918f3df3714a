"""What changed between two versions of a contract, and whom it breaks.

Theory of operation. Everything rests on one question: does every value of one schema surely fit another? `contains`
answers it soundly and not completely: yes is a proof, no may mean "cannot tell", and what cannot be told is breaking.

1. A schema is expanded: annotations dropped, local `$ref`s written out. What cannot be written out (a recursive `$ref`,
   an unknown keyword, another dialect) becomes an opaque node, which fits only an equal one.
2. An expanded schema is split into atoms: single values (null, true, false, each value of an enum), which the real
   validator can judge, and one atom per remaining JSON type, whose keywords are compared one by one. A nested `anyOf`
   is the union of its branches' atoms. Keywords that judge a value on their own (`oneOf`, `not`, `if`, ...) form the
   atom's residue and must be equal on both sides.

Inputs must keep accepting what they accepted: contains(new, old), once the lifecycle has filled the new defaults into
top-level fields. Inputs are read closed, as the contract loader reads them. Outputs must stay within what was promised:
contains(old, new), where an old consumer reads the fields it knows and passes over others, so `additionalProperties:
false` binds it to nothing.

Classification walks both schemas to say what changed in words, then asks the two questions above about the whole.
# INVARIANT: a difference is never put in a smaller class than the sets of valid instances show.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal, cast

from interlock.core.errors import Failure
from interlock.core.schema import Json, close, compile_validator, resolve_ref
from interlock.core.versions import bump_between, may_break

Level = Literal["major", "minor", "patch"]
Side = Literal["input", "output", "behaviour"]
Node = bool | Json
Document = Mapping[str, Any] | bool

RANK: Mapping[str, int] = {"none": 0, "patch": 1, "minor": 2, "major": 3}

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_MOST_NODES = 5_000  # of an expanded schema; references can double its size at every step
_DEEPEST = 48
_LISTED = 10  # changes named in a message; the details hold all of them
_OPAQUE = "$opaque"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ANNOTATIONS = _words(
    "title description examples example default deprecated readOnly writeOnly discriminator contentEncoding"
    " contentMediaType contentSchema $comment $schema $id $anchor $defs definitions"
)
# Where schemas lie within a schema.
_ONE = _words("not if then else items contains propertyNames additionalProperties")
_LIST = _words("allOf anyOf oneOf prefixItems")
_MAP = _words("properties dependentSchemas")
# Judged on their own, whatever the other keywords say.
_RESIDUE = _words(
    "allOf oneOf not if then else contains minContains maxContains propertyNames dependentRequired dependentSchemas"
)
_WHOLE = _RESIDUE | {"anyOf", "enum", "const", _OPAQUE}  # cannot be compared field by field
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "number": _words("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf format"),
    "string": _words("minLength maxLength pattern format"),
    "array": _words("minItems maxItems uniqueItems items prefixItems format"),
    "object": _words("properties required additionalProperties minProperties maxProperties format"),
}
_KNOWN = frozenset({"type", "enum", "const", "anyOf"}).union(_RESIDUE, *_KEYWORDS.values())
_BOUNDS: Mapping[int, Mapping[str, bool]] = {
    1: {"minimum": False, "exclusiveMinimum": True},
    -1: {"maximum": False, "exclusiveMaximum": True},
}
_UNORDERED = frozenset({"required", "enum", "type"})
_TYPES = ("null", "boolean", "number", "string", "array", "object")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """What a version promises: its two schemas, and whether consumers tolerate values they do not know."""

    input: Document = True
    output: Document = True
    tolerant_output: bool = False
    declared_behaviour_change: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """One difference, its class, where it is and what it is."""

    level: Level
    side: Side
    pointer: str
    what: str

    def __str__(self) -> str:
        return f"{self.level}: {self.side} `{self.pointer or '/'}` {self.what}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The class of a new version and every change that was found; `patch` means that no schema changed."""

    level: Level
    changes: tuple[Change, ...]


class Outcome(StrEnum):
    FULL_MATCH = "FULL_MATCH"
    PARTIAL_MATCH = "PARTIAL_MATCH"
    INCOMPATIBLE = "INCOMPATIBLE"


@dataclass(frozen=True, slots=True)
class Negotiation:
    """Whether a tool offers what an agent expects, and which parts it does not."""

    outcome: Outcome
    missing: tuple[str, ...] = ()


# The questions


def contains(wide: Document, narrow: Document) -> bool:
    """Whether every value valid under `narrow` is surely valid under `wide`. No may mean that it cannot be told."""
    return _within(_expand(wide), _expand(narrow))


def input_compatible(old: Document, new: Document) -> bool:
    """Whether the new input keeps every old field and accepts, once defaults are filled, all that the old one did."""
    old, new = _closed(old), _closed(new)
    return _input_safe(_expand(old), _expand(new), _defaults(new))


def output_compatible(old: Document, new: Document, *, tolerant: bool = False) -> bool:
    """Whether the new output keeps every old field and lies within what old consumers were promised."""
    return _output_safe(_expand(old), _expand(new), tolerant=tolerant)


def classify(old: Surface, new: Surface) -> Difference:
    """The class of the difference between a version and its predecessor, with the changes that make it so."""
    changes = [*_input_changes(old.input, new.input), *_output_changes(old, new)]
    if new.declared_behaviour_change:
        changes.append(Change("major", "behaviour", "", "is declared to have changed"))
    if new.tolerant_output and not old.tolerant_output:
        changes.append(Change("major", "output", "", "asks consumers to tolerate values they do not know"))
    changes.sort(key=lambda change: (-RANK[change.level], change.side, change.pointer))
    return Difference(changes[0].level if changes else "patch", tuple(changes))


def require_bump(old_version: str, new_version: str, difference: Difference, breaking_changes: bool) -> None:
    """Refuse (E3103) a version that rises less than its changes demand, or that hides a breaking one.

    While the major version stays 0, a minor bump may break; in all else 0.y.z is held to the same rule.
    """
    bump = bump_between(old_version, new_version)
    enough = RANK[bump] >= RANK[difference.level]
    if difference.level == "major":
        enough = may_break(old_version, new_version)
    if not enough:
        step = f"a {bump} bump" if bump != "none" else "no step up"
        raise _refusal(
            f"`{old_version}` to `{new_version}` is {step}, but the changes need a {difference.level} one", difference
        )
    if difference.level == "major" and not breaking_changes:
        raise _refusal(f"`{new_version}` breaks callers but states breaking_changes false", difference)


def negotiate(expected: Document, offered: Document) -> Negotiation:
    """Whether a tool offers every part an agent expects: the same field, taking at least the values expected.

    The expected schema's `required` are the required parts, its other properties the optional ones.
    """
    wanted, given = _object(_expand(expected)), _object(_expand(offered))
    parts: dict[str, Node] = wanted.get("properties", {})
    required: list[str] = wanted.get("required", [])
    there: dict[str, Node] = given.get("properties", {})
    names = [*parts, *(name for name in required if name not in parts)]
    missing = tuple(name for name in names if name not in there or not _offers(there[name], parts.get(name)))
    # Parts that are not listed as properties (a union of objects) cannot be counted: they are offered whole or not.
    unsaid = bool(wanted.keys() & {"anyOf", "oneOf", "allOf", "enum", "const", _OPAQUE})
    if set(missing) & set(required) or (unsaid and not contains(offered, expected)):
        return Negotiation(Outcome.INCOMPATIBLE, missing)
    return Negotiation(Outcome.PARTIAL_MATCH if missing else Outcome.FULL_MATCH, missing)


def _offers(offered: Node, expected: Node | None) -> bool:
    return expected is None or _within(offered, expected)


def _refusal(message: str, difference: Difference) -> Failure:
    changes = [str(change) for change in difference.changes]
    more = f"; and {len(changes) - _LISTED} more" if len(changes) > _LISTED else ""
    listed = "; ".join(changes[:_LISTED]) + more
    return Failure("E3103", f"{message}: {listed}" if changes else message, details={"changes": changes})


# Compatibility of whole schemas


def _input_safe(old: Node, new: Node, defaults: Mapping[str, Any]) -> bool:
    filled = _filled(old, defaults)
    return filled is not None and not any(_removed(old, new)) and _within(new, filled)


def _output_safe(old: Node, new: Node, *, tolerant: bool) -> bool:
    return not any(_removed(old, new)) and _within(_consumer_view(old, tolerant=tolerant), new)


def _filled(old: Node, defaults: Mapping[str, Any]) -> Node | None:
    """A schema of all that `old` accepts once the defaults are filled in; None where that cannot be written."""
    if old is False or not defaults:
        return old
    base = _object(old)
    if base.keys() & _WHOLE:
        return None
    properties: Json = dict(base.get("properties", {}))
    required: list[str] = base.get("required", [])
    others: Node = base.get("additionalProperties", True)
    fresh = [name for name in defaults if name not in required]
    for name in fresh:
        properties[name] = {"anyOf": [properties.get(name, others), {"const": defaults[name]}]}
    result: Json = {**base, "properties": properties, "required": [*required, *fresh]}
    if "maxProperties" in base:
        result["maxProperties"] = base["maxProperties"] + len(fresh)
    return result


def _consumer_view(node: Node, *, tolerant: bool) -> Node:
    """An output as an old consumer holds it: unknown fields are passed over, unknown words too where it tolerates them.

    Only where opening a part opens the whole: not below `not`, `oneOf` or a condition.
    """
    if isinstance(node, bool):
        return node
    view: Json = {}
    for key, value in node.items():
        if key == "properties":
            view[key] = {name: _consumer_view(part, tolerant=tolerant) for name, part in value.items()}
        elif key in ("anyOf", "prefixItems"):
            view[key] = [_consumer_view(part, tolerant=tolerant) for part in value]
        elif key in ("items", "additionalProperties"):
            view[key] = _consumer_view(value, tolerant=tolerant)
        else:
            view[key] = value
    if view.get("additionalProperties") is False:
        del view["additionalProperties"]
    words = view.get("enum")
    if tolerant and words and all(isinstance(word, str) for word in words):
        del view["enum"]
        view.setdefault("type", "string")
    return view


def _removed(old: Node, new: Node, pointer: str = "") -> Iterator[str]:
    """Pointers of the fields that the old schema declares and the new one does not, at any depth."""
    before, after = _fields(old), _fields(new)
    for name, part in before.items():
        at = f"{pointer}/{name}"
        if name not in after:
            yield at
        else:
            yield from _removed(part, after[name], at)
    old_items, new_items = (_object(node).get("items", True) for node in (old, new))
    if old_items is not True:
        yield from _removed(old_items, new_items, f"{pointer}/*")


def _fields(node: Node) -> dict[str, Node]:
    """The fields that a schema declares, those of its unions and intersections included."""
    if isinstance(node, bool):
        return {}
    found: dict[str, Node] = dict(node.get("properties", {}))
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in node.get(key, ()):
            for name, part in _fields(branch).items():
                found.setdefault(name, part)
    return found


# Changes, in words


@dataclass(frozen=True, slots=True)
class _Reading:
    """How one side is judged: whether a part may take another's place, and what callers are told of it."""

    side: Side
    safe: Callable[[Node, Node], bool]
    worse: str
    better: str
    broken: str


_INPUT = _Reading(
    "input", lambda old, new: _within(new, old), "is tightened", "is relaxed", "may refuse what it accepted"
)
_OUTPUT_TEXT = ("may hold what was not promised", "stays within what was promised", "may leave what was promised")


def _input_changes(old_document: Document, new_document: Document) -> Iterator[Change]:
    old_document, new_document = _closed(old_document), _closed(new_document)
    old, new = _expand(old_document), _expand(new_document)
    was, now = _defaults(old_document), _defaults(new_document)
    if _same(old, new) and _key(was) == _key(now):
        return
    fields = _fields(new)
    valid = {name: value for name, value in now.items() if name in fields and _holds(fields[name], value)}
    found = [*_walk(old, new, _INPUT, "", valid), *_default_changes(old, new, was, now)]
    yield from _completed(found, old, new, _INPUT, safe=_input_safe(old, new, now))


def _output_changes(old_surface: Surface, new_surface: Surface) -> Iterator[Change]:
    tolerant = old_surface.tolerant_output
    old, new = _expand(old_surface.output), _expand(new_surface.output)
    if _same(old, new):
        return
    reading = _Reading("output", lambda o, n: _within(_consumer_view(o, tolerant=tolerant), n), *_OUTPUT_TEXT)
    found = list(_walk(old, new, reading, "", {}))
    yield from _completed(found, old, new, reading, safe=_output_safe(old, new, tolerant=tolerant))


def _completed(found: list[Change], old: Node, new: Node, reading: _Reading, *, safe: bool) -> Iterator[Change]:
    """The changes found, the fields removed, and what the walk overlooked but the whole shows."""
    gone = [Change("major", reading.side, at, "is removed") for at in _removed(old, new)]
    yield from (*gone, *found)
    if not safe and not any(change.level == "major" for change in (*gone, *found)):
        yield Change("major", reading.side, "", reading.broken)
    elif not found and not gone and not _equivalent(old, new):
        yield Change("minor", reading.side, "", reading.better)


def _default_changes(old: Node, new: Node, was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """What an omitted field means is behaviour: it may be settled, not changed."""
    for name in sorted(was.keys() | now.keys()):
        if name not in _fields(old) or name not in _fields(new):
            continue
        if name not in was:
            yield Change("minor", "input", f"/{name}", f"now has the default {_short(now[name])}")
        elif name not in now:
            yield Change("major", "input", f"/{name}", f"no longer has the default {_short(was[name])}")
        elif _key(was[name]) != _key(now[name]):
            what = f"has the default {_short(now[name])} where it was {_short(was[name])}"
            yield Change("major", "input", f"/{name}", what)


def _walk(old: Node, new: Node, reading: _Reading, pointer: str, filled: Mapping[str, Any]) -> Iterator[Change]:
    """The changes between two schemas, as deep as both have the same plain form."""
    if _same(old, new):
        return
    before, after = _object(old), _object(new)
    if _plain(before, "object") and _plain(after, "object"):
        yield from _object_changes(before, after, reading, pointer, filled)
    elif _plain(before, "array") and _plain(after, "array"):
        yield from _walk(before.get("items", True), after.get("items", True), reading, f"{pointer}/*", {})
        yield from _leaf(_shell(before), _shell(after), reading, pointer)
    elif branches := _changed_branch(before, after):
        yield from _walk(*branches, reading, pointer, {})
    else:
        yield from _leaf(old, new, reading, pointer)


def _changed_branch(old: Json, new: Json) -> tuple[Node, Node] | None:
    """The one branch in which two unions differ, such as the object in an optional one."""
    if not old.keys() == new.keys() == {"anyOf"} or len(old["anyOf"]) != len(new["anyOf"]):
        return None
    changed = [(was, now) for was, now in zip(old["anyOf"], new["anyOf"], strict=True) if not _same(was, now)]
    return changed[0] if len(changed) == 1 else None


def _object_changes(
    old: Json, new: Json, reading: _Reading, pointer: str, filled: Mapping[str, Any]
) -> Iterator[Change]:
    before, after = old.get("properties", {}), new.get("properties", {})
    for name, part in after.items():
        at = f"{pointer}/{name}"
        if name in before:
            yield from _walk(before[name], part, reading, at, {})
        elif name not in new.get("required", ()) or reading.side == "output":
            yield Change("minor", reading.side, at, "is new")
    yield from _required_changes(old, new, reading, pointer, filled)
    others = [{"type": "object", "additionalProperties": each.get("additionalProperties", True)} for each in (old, new)]
    yield from _leaf(others[0], others[1], reading, pointer)
    yield from _leaf(_shell(old), _shell(new), reading, pointer)


def _required_changes(
    old: Json, new: Json, reading: _Reading, pointer: str, filled: Mapping[str, Any]
) -> Iterator[Change]:
    was, now = (set[str](each.get("required", ())) for each in (old, new))
    declared = new.get("properties", {})
    for name in sorted(now - was):
        at = f"{pointer}/{name}"
        if reading.side == "output":
            yield Change("minor", "output", at, "is now always there")
        elif name in filled:
            yield Change("minor", "input", at, "is now required and has a default")
        else:
            yield Change("major", "input", at, "is now required and has no default that is filled in")
    for name in sorted((was - now) & declared.keys()):
        level: Level = "major" if reading.side == "output" else "minor"
        yield Change(level, reading.side, f"{pointer}/{name}", "is no longer required")


def _leaf(old: Node, new: Node, reading: _Reading, pointer: str) -> Iterator[Change]:
    """The change between two parts that are compared whole."""
    if _equivalent(old, new):
        return
    safe = reading.safe(old, new)
    what = f"{reading.better if safe else reading.worse}: {_described(old, new)}"
    yield Change("minor" if safe else "major", reading.side, pointer, what)


def _described(old: Node, new: Node) -> str:
    if isinstance(old, bool) or isinstance(new, bool) or _OPAQUE in old or _OPAQUE in new:
        return "the schema is another"
    changed = [key for key in sorted(old.keys() | new.keys()) if _key(old.get(key)) != _key(new.get(key))]
    return ", ".join(f"`{key}` {_said(old, key)} became {_said(new, key)}" for key in changed)


def _said(schema: Json, key: str) -> str:
    return _short(schema[key]) if key in schema else "unsaid"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"


def _plain(schema: Json, kind: str) -> bool:
    return schema.get("type") == kind and not schema.keys() & {"enum", "const", "anyOf", _OPAQUE}


def _shell(schema: Json) -> Json:
    """An object or array without what the walk compares part by part."""
    parts = {"properties", "required", "additionalProperties", "items"}
    return {key: value for key, value in schema.items() if key not in parts}


def _equivalent(old: Node, new: Node) -> bool:
    return _same(old, new) or (_within(old, new) and _within(new, old))


def _object(node: Node) -> Json:
    return {} if isinstance(node, bool) else node


# Expansion


def _closed(document: Document) -> Document:
    return document if isinstance(document, bool) else close(copy.deepcopy(dict(document)))


def _defaults(document: Document) -> dict[str, Any]:
    """The defaults that the lifecycle fills: those of top-level fields."""
    if isinstance(document, bool):
        return {}
    root = dict(document)
    found = {name: resolve_ref(root, part) for name, part in _parts(resolve_ref(root, root)).items()}
    return {name: part["default"] for name, part in found.items() if "default" in part}


def _parts(node: Json) -> dict[str, Json]:
    properties: Json = node.get("properties", {})
    return {name: part for name, part in properties.items() if isinstance(part, dict)}


def _expand(document: Document) -> Node:
    """The schema without annotations and references; an invalid one is refused with E3105."""
    compile_validator(document)
    if isinstance(document, bool):
        return document
    root = dict(document)
    dialect: Any = root.get("$schema", _DIALECT)
    try:
        if isinstance(dialect, str) and dialect.rstrip("#") == _DIALECT:
            return _Expansion(root).expand(root, ())
    except _TooLarge:
        pass
    return {_OPAQUE: _key(document)}


class _TooLarge(Exception):  # noqa: N818 - it never leaves this module
    """The expansion would be larger or deeper than is worth comparing."""


class _Expansion:
    """One expansion: the root that references point into, and how much may still be written."""

    def __init__(self, root: Json) -> None:
        self.root = root
        self.left = _MOST_NODES

    def expand(self, node: Any, trail: tuple[str, ...], depth: int = 0) -> Node:
        """A subschema without annotations, its references written out; the trail holds those being written."""
        self.left -= 1
        if self.left < 0 or depth > _DEEPEST:
            raise _TooLarge
        if not isinstance(node, dict):
            return bool(node)
        source = cast("Json", node)
        if "$ref" in source:
            return self._referred(source, trail, depth)
        if source.keys() - _KNOWN - _ANNOTATIONS - _extensions(source) or (depth and "$id" in source):
            return self._opaque(source)
        expanded = {key: self._part(key, value, trail, depth + 1) for key, value in _assertions(source).items()}
        only = expanded.get("allOf", ())
        return only[0] if len(expanded) == len(only) == 1 else expanded

    def _part(self, key: str, value: Any, trail: tuple[str, ...], depth: int) -> Any:
        if key in _ONE:
            return self.expand(value, trail, depth)
        if key in _LIST:
            return [self.expand(each, trail, depth) for each in value]
        if key in _MAP:
            return {name: self.expand(each, trail, depth) for name, each in value.items()}
        if key in _UNORDERED and isinstance(value, list):
            return sorted(cast("list[Any]", value), key=_key)
        return value

    def _referred(self, node: Json, trail: tuple[str, ...], depth: int) -> Node:
        ref = node["$ref"]
        target = self._target(ref)
        if target is None or ref in trail:
            return self._opaque(node)
        written = self.expand(target, (*trail, ref), depth + 1)
        beside = {key: value for key, value in node.items() if key != "$ref"}
        if not _assertions(beside):
            return written
        rest = self.expand(beside, trail, depth + 1)
        return {"allOf": [written, rest]}

    def _target(self, ref: str) -> Any:
        match ref.split("/"):
            case ["#", "$defs" | "definitions" as place, name]:
                place_found: Json = self.root.get(place, {})
                return place_found.get(name.replace("~1", "/").replace("~0", "~"))
            case _:
                return None

    def _opaque(self, node: Json) -> Json:
        """A node that equals only itself, together with all that it may refer to."""
        definitions = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
        near = f"{_key(_stripped(node))} within {_key(_stripped(definitions))}"
        local = near.count('"$ref":"#/$defs/') + near.count('"$ref":"#/definitions/')
        if near.count('"$ref":') == local and "$dynamicRef" not in near:
            return {_OPAQUE: near}
        return {_OPAQUE: f"{near} within {_key(_stripped(self.root))}"}


def _stripped(node: Any) -> Any:
    """A schema without annotations, its references left as they are."""
    if not isinstance(node, dict):
        return node
    kept: Json = {}
    for key, value in cast("Json", node).items():
        if key in ("$defs", "definitions", *_MAP, "patternProperties") and isinstance(value, dict):
            kept[key] = {name: _stripped(each) for name, each in cast("Json", value).items()}
        elif key in _LIST and isinstance(value, list):
            kept[key] = [_stripped(each) for each in cast("list[Any]", value)]
        elif key in _ONE:
            kept[key] = _stripped(value)
        elif key in ("$id", "$anchor") or (key not in _ANNOTATIONS and not key.startswith("x-")):
            kept[key] = value
    return kept


def _extensions(node: Json) -> set[str]:
    return {key for key in node if key.startswith("x-")}


def _assertions(node: Json) -> Json:
    return {key: value for key, value in node.items() if key not in _ANNOTATIONS and not key.startswith("x-")}


def _key(value: Any) -> str:
    """A text that two JSON values share only if they are the same."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _same(one: Node, other: Node) -> bool:
    return _key(one) == _key(other)


# Containment


@dataclass(frozen=True, slots=True)
class _Atom:
    """A piece of a schema: one value, or the values of one type under that type's keywords."""

    kind: str
    keywords: Json
    residue: frozenset[str] = frozenset()
    integral: bool = False
    value: Any = None

    def of(self, key: str, unsaid: Any) -> Any:
        return self.keywords.get(key, unsaid)


def _within(wide: Node, narrow: Node) -> bool:
    if wide is True or _same(wide, narrow):
        return True
    pieces = _atoms(wide)
    return all(
        _holds(wide, atom.value) or _excluded(narrow, atom.value)
        if atom.kind == "value"
        else any(_covers(piece, atom) for piece in pieces)
        for atom in _atoms(narrow)
    )


def _atoms(node: Node, residue: frozenset[str] = frozenset()) -> list[_Atom]:
    """The pieces whose union is the schema."""
    schema = _object(node)
    if node is False:
        return []
    if _OPAQUE in schema:
        return [_Atom("opaque", schema, residue)]
    if "const" in schema or "enum" in schema:
        values: list[Any] = [schema["const"]] if "const" in schema else schema["enum"]
        return [_Atom("value", {}, residue, value=value) for value in values]
    alone = schema.keys() & _RESIDUE
    if schema.keys() - alone > {"anyOf"}:
        alone |= schema.keys() & {"anyOf"}
    if alone:
        residue |= {_key({key: schema[key] for key in alone})}
    if "anyOf" in schema.keys() - alone:
        return [atom for branch in schema["anyOf"] for atom in _atoms(branch, residue)]
    return list(_typed(schema, residue))


def _typed(schema: Json, residue: frozenset[str]) -> Iterator[_Atom]:
    said: Any = schema.get("type", _TYPES)
    types: set[str] = {said} if isinstance(said, str) else set(said)
    for kind in _TYPES:
        integral = kind == "number" and "number" not in types and "integer" in types
        if kind not in types and not integral:
            continue
        if kind == "null":
            yield _Atom("value", {}, residue, value=None)
        elif kind == "boolean":
            yield from (_Atom("value", {}, residue, value=value) for value in (True, False))
        else:
            keywords = {key: schema[key] for key in _KEYWORDS[kind] if key in schema}
            yield _Atom(kind, keywords, residue, integral)


def _holds(schema: Node, value: Any) -> bool:
    """Whether the value is surely valid under the expanded schema."""
    text = _key(schema)
    return f'"{_OPAQUE}"' not in text and bool(_validator(text).is_valid(value))


def _excluded(schema: Node, value: Any) -> bool:
    """Whether the value is surely not valid under the expanded schema."""
    text = _key(schema)
    return f'"{_OPAQUE}"' not in text and not _validator(text).is_valid(value)


@lru_cache(maxsize=512)
def _validator(text: str) -> Any:
    return compile_validator(json.loads(text))


def _covers(wide: _Atom, narrow: _Atom) -> bool:
    """Whether one atom contains another of the same kind."""
    if wide.kind != narrow.kind or wide.residue != narrow.residue:
        return False
    if wide.kind == "opaque":
        return wide.keywords == narrow.keywords
    if "format" in wide.keywords and wide.keywords["format"] != narrow.of("format", None):
        return False
    return _COVERS[wide.kind](wide, narrow)


def _covers_number(wide: _Atom, narrow: _Atom) -> bool:
    step, other = wide.of("multipleOf", None), narrow.of("multipleOf", None)
    whole = narrow.integral or (other is not None and other == int(other))
    if (wide.integral and not whole) or (step is not None and not _divides(step, other, whole)):
        return False
    return _reaches(_bound(wide, 1), _bound(narrow, 1)) and _reaches(_bound(wide, -1), _bound(narrow, -1))


def _divides(step: float, other: float | None, whole: bool) -> bool:
    """Whether multiples of `other` are multiples of `step`; fractions, on which validators err, only if equal."""
    if other is None or step == other:
        return step == other or (step == 1 and whole)
    return step == int(step) and other == int(other) and other % step == 0


def _bound(atom: _Atom, sign: int) -> tuple[Any, bool] | None:
    """The lower bound (sign 1), or the upper one negated (sign -1), and whether it is itself excluded."""
    said = _BOUNDS[sign]
    bounds = [(sign * atom.keywords[key], strict) for key, strict in said.items() if key in atom.keywords]
    if not bounds:
        return None
    value, strict = max(bounds)
    if atom.integral:
        return (math.floor(value) + 1 if strict else math.ceil(value)), False
    return value, strict


def _reaches(wide: tuple[Any, bool] | None, narrow: tuple[Any, bool] | None) -> bool:
    return wide is None or (narrow is not None and wide <= narrow)


def _covers_string(wide: _Atom, narrow: _Atom) -> bool:
    pattern = wide.of("pattern", None)
    return _sized(wide, narrow, "Length") and pattern in (None, narrow.of("pattern", None))


def _sized(wide: _Atom, narrow: _Atom, what: str, least: int = 0, most: float = math.inf) -> bool:
    """Whether sizes lie within; `least` and `most` are what else is known of the narrow one's."""
    low, high = max(narrow.of(f"min{what}", 0), least), min(narrow.of(f"max{what}", math.inf), most)
    return bool(wide.of(f"min{what}", 0) <= low and high <= wide.of(f"max{what}", math.inf))


def _covers_array(wide: _Atom, narrow: _Atom) -> bool:
    most = narrow.of("maxItems", math.inf)
    if not _sized(wide, narrow, "Items"):
        return False
    if wide.of("uniqueItems", False) and not narrow.of("uniqueItems", False) and most > 1:
        return False
    places = max(len(wide.of("prefixItems", ())), len(narrow.of("prefixItems", ())))
    # The place after the last prefix stands for all that follow.
    return all(_within(_item(wide, place), _item(narrow, place)) for place in range(places + 1) if place < most)


def _item(atom: _Atom, place: int) -> Node:
    prefix = atom.of("prefixItems", ())
    return prefix[place] if place < len(prefix) else atom.of("items", True)


def _covers_object(wide: _Atom, narrow: _Atom) -> bool:
    required: set[str] = set(narrow.of("required", ()))
    if not required.issuperset(wide.of("required", ())):
        return False
    fields: Iterable[str] = wide.of("properties", {}).keys() | narrow.of("properties", {}).keys()
    most = len(narrow.of("properties", {})) if narrow.of("additionalProperties", True) is False else math.inf
    return (
        _sized(wide, narrow, "Properties", len(required), most)
        and _within(wide.of("additionalProperties", True), narrow.of("additionalProperties", True))
        and all(_within(_field(wide, name), _field(narrow, name)) for name in fields)
    )


def _field(atom: _Atom, name: str) -> Node:
    return atom.of("properties", {}).get(name, atom.of("additionalProperties", True))


_COVERS: Mapping[str, Callable[[_Atom, _Atom], bool]] = {
    "number": _covers_number,
    "string": _covers_string,
    "array": _covers_array,
    "object": _covers_object,
}

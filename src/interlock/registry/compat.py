"""The difference between two versions of a contract, and whether it breaks callers or consumers.

This module classifies a change: its class, and the version bump it requires. Everything rests on one question, does
every value of one schema surely fit another, which `containment` answers for schemas that `expansion` has expanded. If
it cannot be decided, the change is breaking.

Inputs must keep accepting what they accepted: contains(new, old), once the lifecycle has filled the new defaults into
top-level fields. Inputs are read closed, as the contract loader reads them. Outputs must stay within what was promised:
contains(old, new), where an old consumer reads the fields it knows and ignores others, so `additionalProperties: false`
does not bind it.

Classification walks both schemas to describe what changed, then asks the two questions above about the whole.
INVARIANT: a difference is never put in a smaller class than the sets of valid instances show.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from interlock.contract.versions import bump_between, may_break
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.schema import Json
from interlock.registry.containment import equivalent, holds, within
from interlock.registry.expansion import (
    OPAQUE,
    RESIDUE,
    Document,
    Node,
    closed,
    expand,
    filled_defaults,
    key_of,
    object_of,
    same,
)

Level = Literal["major", "minor", "patch"]
Side = Literal["input", "output", "behaviour"]

RANK: Mapping[str, int] = {"none": 0, "patch": 1, "minor": 2, "major": 3}

_LISTED = 10  # changes named in a message; the details hold all of them
_WHOLE = RESIDUE | {"anyOf", "enum", "const", OPAQUE}  # cannot be compared field by field


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSurface:
    """The promises of a version: its two schemas, and whether consumers tolerate unknown values."""

    input: Document = True
    output: Document = True
    tolerant_output: bool = False
    declared_behaviour_change: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """One difference: its class, its place and its description."""

    level: Level
    side: Side
    pointer: str
    what: str

    def __str__(self) -> str:
        return f"{self.level}: {self.side} `{self.pointer or '/'}` {self.what}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The class of a new version and every change found; `patch` means that no schema changed."""

    level: Level
    changes: tuple[Change, ...]


# The questions


def classify(old: VersionSurface, new: VersionSurface) -> Difference:
    """Classify the difference between a version and its predecessor, with the changes that cause it."""
    changes = [*_input_changes(old.input, new.input), *_output_changes(old, new)]
    if new.declared_behaviour_change:
        changes.append(Change("major", "behaviour", "", "is declared to have changed"))
    if new.tolerant_output and not old.tolerant_output:
        changes.append(Change("major", "output", "", "asks consumers to tolerate values they do not know"))
    changes.sort(key=lambda change: (-RANK[change.level], change.side, change.pointer))
    return Difference(changes[0].level if changes else "patch", tuple(changes))


def require_bump(old_version: str, new_version: str, difference: Difference, breaking_changes: bool) -> None:
    """Refuse (E3103) a version whose number rises less than its changes require, or that hides a breaking one.

    While the major version stays 0, a minor bump may break; otherwise 0.y.z follows the same rule.
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


def _refusal(message: str, difference: Difference) -> Failure:
    changes = [str(change) for change in difference.changes]
    more = f"; and {len(changes) - _LISTED} more" if len(changes) > _LISTED else ""
    listed = "; ".join(changes[:_LISTED]) + more
    return Failure("E3103", f"{message}: {listed}" if changes else message, details={"changes": changes})


# Compatibility of whole schemas


def _input_safe(old: Node, new: Node, defaults: Mapping[str, Any]) -> bool:
    """Whether the new input keeps every old field and accepts, once defaults are filled, all that the old one did."""
    filled = _filled(old, defaults)
    return filled is not None and not any(_removed(old, new)) and within(new, filled)


def _output_safe(old: Node, new: Node, *, tolerant: bool) -> bool:
    """Whether the new output keeps every old field and lies within what old consumers were promised."""
    return not any(_removed(old, new)) and within(_consumer_view(old, tolerant=tolerant), new)


def _filled(old: Node, defaults: Mapping[str, Any]) -> Node | None:
    """Return a schema of all that `old` accepts once the defaults are filled in; None if it cannot be written."""
    if old is False or not defaults:
        return old
    base = object_of(old)
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
    """An output as an old consumer reads it: unknown fields are ignored, and unknown words too where it tolerates them.

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
    old_items, new_items = (object_of(node).get("items", True) for node in (old, new))
    if old_items is not True:
        yield from _removed(old_items, new_items, f"{pointer}/*")


def _fields(node: Node) -> dict[str, Node]:
    """The fields that a schema declares, those of its unions and intersections included."""
    if isinstance(node, bool):
        return {}
    fields: dict[str, Node] = dict(node.get("properties", {}))
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in node.get(key, ()):
            for name, part in _fields(branch).items():
                fields.setdefault(name, part)
    return fields


# Changes, in words


@dataclass(frozen=True, slots=True)
class _Reading:
    """Rules for judging one side: whether a part may replace another, and the words for callers."""

    side: Side
    safe: Callable[[Node, Node], bool]
    worse: str
    better: str
    broken: str


_INPUT = _Reading(
    "input", lambda old, new: within(new, old), "is tightened", "is relaxed", "may refuse what it accepted"
)
_OUTPUT_TEXT = ("may hold what was not promised", "stays within what was promised", "may leave what was promised")


def _input_changes(old_document: Document, new_document: Document) -> Iterator[Change]:
    old_document, new_document = closed(old_document), closed(new_document)
    old, new = expand(old_document), expand(new_document)
    was, now = filled_defaults(old_document), filled_defaults(new_document)
    if same(old, new) and key_of(was) == key_of(now):
        return
    fields = _fields(new)
    valid = {name: value for name, value in now.items() if name in fields and holds(fields[name], value)}
    changes = [*_walk(old, new, _INPUT, "", valid), *_default_changes(old, new, was, now)]
    yield from _completed(changes, old, new, _INPUT, safe=_input_safe(old, new, now))


def _output_changes(old_surface: VersionSurface, new_surface: VersionSurface) -> Iterator[Change]:
    tolerant = old_surface.tolerant_output
    old, new = expand(old_surface.output), expand(new_surface.output)
    if same(old, new):
        return
    reading = _Reading("output", lambda o, n: within(_consumer_view(o, tolerant=tolerant), n), *_OUTPUT_TEXT)
    changes = list(_walk(old, new, reading, "", {}))
    yield from _completed(changes, old, new, reading, safe=_output_safe(old, new, tolerant=tolerant))


def _completed(changes: list[Change], old: Node, new: Node, reading: _Reading, *, safe: bool) -> Iterator[Change]:
    """Return the changes found, the fields removed, and what the walk missed but the whole shows."""
    gone = [Change("major", reading.side, at, "is removed") for at in _removed(old, new)]
    yield from (*gone, *changes)
    if not safe and not any(change.level == "major" for change in (*gone, *changes)):
        yield Change("major", reading.side, "", reading.broken)
    elif not changes and not gone and not equivalent(old, new):
        yield Change("minor", reading.side, "", reading.better)


def _default_changes(old: Node, new: Node, was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """Report changes of defaults. The meaning of an omitted field is behaviour: a default may be added, not changed."""
    for name in sorted(was.keys() | now.keys()):
        if name not in _fields(old) or name not in _fields(new):
            continue
        if name not in was:
            yield Change("minor", "input", f"/{name}", f"now has the default {_short(now[name])}")
        elif name not in now:
            yield Change("major", "input", f"/{name}", f"no longer has the default {_short(was[name])}")
        elif key_of(was[name]) != key_of(now[name]):
            what = f"has the default {_short(now[name])} where it was {_short(was[name])}"
            yield Change("major", "input", f"/{name}", what)


def _walk(old: Node, new: Node, reading: _Reading, pointer: str, filled: Mapping[str, Any]) -> Iterator[Change]:
    """Report the changes between two schemas, as deep as both have the same plain form."""
    if same(old, new):
        return
    before, after = object_of(old), object_of(new)
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
    """Return the one branch in which two unions differ, such as the object in an optional one."""
    if not old.keys() == new.keys() == {"anyOf"} or len(old["anyOf"]) != len(new["anyOf"]):
        return None
    changed = [(was, now) for was, now in zip(old["anyOf"], new["anyOf"], strict=True) if not same(was, now)]
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
    """Report the change between two parts that are compared whole."""
    if equivalent(old, new):
        return
    safe = reading.safe(old, new)
    what = f"{reading.better if safe else reading.worse}: {_described(old, new)}"
    yield Change("minor" if safe else "major", reading.side, pointer, what)


def _described(old: Node, new: Node) -> str:
    if isinstance(old, bool) or isinstance(new, bool) or OPAQUE in old or OPAQUE in new:
        return "the schema is another"
    changed = [key for key in sorted(old.keys() | new.keys()) if key_of(old.get(key)) != key_of(new.get(key))]
    return ", ".join(f"`{key}` {_shown_value(old, key)} became {_shown_value(new, key)}" for key in changed)


def _shown_value(schema: Json, key: str) -> str:
    return _short(schema[key]) if key in schema else "not stated"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"


def _plain(schema: Json, kind: str) -> bool:
    return schema.get("type") == kind and not schema.keys() & {"enum", "const", "anyOf", OPAQUE}


def _shell(schema: Json) -> Json:
    """Return an object or array without the parts that the walk compares separately."""
    parts = {"properties", "required", "additionalProperties", "items"}
    return {key: value for key, value in schema.items() if key not in parts}

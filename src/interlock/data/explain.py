"""Explains what is wrong with an input or a schema, so that a model or its developer can correct it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

from interlock.core.record import NamedTuple
from interlock.data.bounds import size_of
from interlock.data.fragments import LANGUAGES
from interlock.data.schema import MASK, Fault, Json, Schema, pointer, properties_of, resolve_ref

SENSITIVITIES = frozenset({"pii", "secret", "credential", "confidential"})

_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


# The number of faults reported for one value; a last entry says that there are more. Names from callers are cut.
MOST_FAULTS = 100
_LONGEST_STEP = 200
# Lists and objects with more bytes than this are not converted to text for a quote.
_QUOTABLE = 4096


def input_faults(schema: Schema, value: Any, noun: str = "parameter") -> list[Fault]:
    """List the faults of an input, one actionable entry each. `noun` is the word for one of its members.

    At most MOST_FAULTS are listed, so the answer stays small whatever was sent.
    """
    faults = (fault for error in schema.errors(value) for fault in _explain(schema, error, noun))
    some = set(islice(faults, MOST_FAULTS))
    more = [] if next(faults, None) is None else [Fault("", f"more is wrong than these {MOST_FAULTS} faults")]
    return sorted(some) + more


def output_faults(schema: Schema, value: Any, *, below: int = 0) -> list[Fault]:
    """List the faults of a result: the path, the broken rule and the kind of the value, never the value itself.

    `below`: how many members deep the result is in the value. They are left out of the paths.
    """
    errors = schema.errors(value)
    return sorted({Fault(pointer(_cut(list(one.instance_path)[below:])), _rule(one) + _kind(one)) for one in errors})


def _explain(schema: Schema, error: Any, noun: str) -> Iterator[Fault]:
    where: list[Any] = list(error.instance_path)
    kind: str = error.kind.name
    part = schema.part(where)
    secret = schema.is_sensitive(where, part) or (schema.has_sensitive and type(error.instance) in (dict, list))
    shown = MASK if secret else f"`{brief(error.instance)}`"
    if kind in {"additionalProperties", "unevaluatedProperties"}:
        for name in error.kind.unexpected:
            yield Fault(_place([*where, name]), _unknown(schema, part, name, noun))
    elif kind == "falseSchema" and where:
        # Not named: callers do not learn which fields are reserved for the runtime.
        yield Fault(_place(where[:-1]), "a field that callers may not set was sent")
    elif kind == "required":
        path = [*where, error.kind.property]
        yield Fault(_place(path), f"missing; {_hint(schema.part(path))}")
    elif kind in {"type", "anyOf", "oneOfNotValid"}:
        yield Fault(_place(where), f"{shown} is not {type_words(part)}; {_hint(part)}")
    elif kind == "enum":
        choices = ", ".join(f"`{choice}`" for choice in part.get("enum", []))
        yield Fault(_place(where), f"{shown} is not one of {choices}" if choices else f"{shown} is not a listed value")
    else:
        yield Fault(_place(where), "; ".join(filter(None, [f"{shown} {_rule(error)}", _example(part)])))


def _place(path: Sequence[Any]) -> str:
    """Return the pointer to a place. Long names and all but the first and last of many steps are cut."""
    steps = _cut(path)
    return pointer(steps if len(steps) <= 20 else [*steps[:10], "…", *steps[-9:]])


def _cut(path: Sequence[Any]) -> list[Any]:
    """Cut the long names in a path, which come from callers and upstreams."""
    return [one if isinstance(one, int) or len(one) <= _LONGEST_STEP else one[:_LONGEST_STEP] + "…" for one in path]


def _unknown(schema: Schema, part: Json, name: str, noun: str) -> str:
    known = [known for known in properties_of(part) if known not in schema.internal]
    near = difflib.get_close_matches(name[:_LONGEST_STEP], known, n=1)
    if near:
        return f"`{brief(name)}` is not a {noun}; did you mean `{near[0]}`?"
    none = "the tool takes none" if noun == "parameter" else "there is none"
    listing = "there are " + ", ".join(f"`{known}`" for known in known) if known else none
    return f"`{brief(name)}` is not a {noun}; {listing}"


def _rule(error: Any) -> str:
    """Return the broken rule in the validator's words, without the value."""
    message = str(error.message)
    return message.removeprefix(MASK).strip() if message.startswith(MASK) else f"breaks the rule `{error.kind.name}`"


def _kind(error: Any) -> str:
    if error.kind.name != "type":
        return ""
    value = error.instance
    kind = next((name for known, name in _PYTHON if isinstance(value, known)), "null")
    return f"; it is {_TYPES[kind]}"


_PYTHON: tuple[tuple[type, str], ...] = (
    (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"),
)  # fmt: skip


def _hint(part: Json) -> str:
    return _example(part) or f"send {type_words(part)}"


def _example(part: Json) -> str:
    examples = part.get("examples")
    if "x-sensitivity" in part or not isinstance(examples, list) or not examples:
        return ""
    return f"for example `{brief(cast('list[Any]', examples)[0])}`"


def type_words(part: Json) -> str:
    """Return the type that a schema asks for, in plain words."""
    kind = part.get("type")
    if isinstance(kind, list):
        return " or ".join(_TYPES.get(str(one), str(one)) for one in cast("list[Any]", kind))
    branches = part.get("anyOf") or part.get("oneOf")
    if kind is None and isinstance(branches, list):
        return " or ".join(type_words(cast("Json", branch)) for branch in cast("list[Any]", branches))
    return _TYPES.get(str(kind), "a value of the documented form")


def brief(value: Any) -> str:
    """Shorten a value so that it can be quoted in a message."""
    if value.__class__ in (list, dict) and size_of(value, _QUOTABLE) > _QUOTABLE:
        return "[…]" if value.__class__ is list else "{…}"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def authoring_faults(document: Mapping[str, Any]) -> list[Fault]:
    """List what an input schema written for Interlock still lacks, for each property at any depth."""
    root = dict(document)
    faults: list[Fault] = []
    if root.get("type") != "object":
        faults.append(Fault("/type", "an input schema must have type `object`"))
    faults.extend(_property_faults(root, _Spot(root, "", "", ())))
    # One definition may be used in several places and lack the same in each.
    return list(dict.fromkeys(faults))


class _Spot(NamedTuple):
    """A subschema: its position, the argument it describes (`order.lines[].sku`), and known values of that."""

    part: Json
    at: str
    name: str
    examples: Sequence[Any]
    trail: tuple[str, ...] = ()


_MOST_SPOTS = 10_000
_MOST_UNDOCUMENTED = 20


def undocumented(document: Mapping[str, Any]) -> tuple[str, ...]:
    """List the properties of the input schema of a discovered tool that have no description or no example.

    A tool that was written for Interlock would have been refused.
    """
    root = dict(document)
    found: dict[str, None] = {}
    for spot, given in filter(None, _properties(root, _Spot(root, "", "", ()))):
        if not str(spot.part.get("description") or "").strip():
            found[f"`{spot.name}` has no description"] = None
        if not spot.part.get("examples") and not given:
            found[f"`{spot.name}` has no example"] = None
    listed = tuple(found)
    more = len(listed) - _MOST_UNDOCUMENTED
    return listed if more <= 0 else (*listed[:_MOST_UNDOCUMENTED], f"and {more:,} more")


def _property_faults(root: Json, top: _Spot) -> Iterator[Fault]:
    for one in _properties(root, top):
        if one is None:
            words = f"the input schema has more than {_MOST_SPOTS} parts, which are not all looked at; make it smaller"
            yield Fault("", words)
        else:
            yield from _wanting(root, *one)


def _properties(root: Json, top: _Spot) -> Iterator[tuple[_Spot, Sequence[Any]] | None]:
    """Iterate over the properties of a schema at any depth, each with its values in the examples of the object around
    it. The last one is None if there are too many parts to look at.
    """
    waiting = [top]
    for _ in range(_MOST_SPOTS):
        if not waiting:
            return
        spot = waiting.pop()
        for name, raw in properties_of(spot.part).items():
            given = [one[name] for one in _members(spot.examples) if name in one]
            inner = _Spot(raw, f"{spot.at}{pointer(['properties', name])}", f"{spot.name}.{name}".lstrip("."), given)
            resolved = _resolved(root, inner._replace(trail=spot.trail))
            if resolved is None:
                continue  # described where it is used first
            own = resolved.part.get("examples")
            yield resolved, given
            known = [*cast("list[Any]", own), *given] if isinstance(own, list) else given
            waiting.append(resolved._replace(examples=known))
        waiting.extend(filter(None, (_resolved(root, one) for one in _inside(spot))))
    yield None


def _members(values: Sequence[Any]) -> list[Json]:
    return [cast("Json", one) for one in values if isinstance(one, dict)]


def _resolved(root: Json, spot: _Spot) -> _Spot | None:
    """Follow the reference of a place; None if it leads back to a place that is being visited."""
    ref = spot.part.get("$ref")
    if not isinstance(ref, str):
        return spot
    if ref in spot.trail:
        return None
    return spot._replace(part=resolve_ref(root, spot.part), trail=(*spot.trail, ref))


def _inside(spot: _Spot) -> Iterator[_Spot]:
    """Return the subschemas for parts or alternatives of a value that are not properties by themselves."""
    part, at, name, examples, trail = spot
    for word in ("anyOf", "oneOf", "allOf"):
        for index, child in enumerate(_list(part.get(word))):
            if isinstance(child, dict):
                yield _Spot(cast("Json", child), f"{at}/{word}/{index}", name, examples, trail)
    lists = [cast("list[Any]", one) for one in examples if isinstance(one, list)]
    for index, child in enumerate(_list(part.get("prefixItems"))):
        if isinstance(child, dict):
            known = [one[index] for one in lists if len(one) > index]
            yield _Spot(cast("Json", child), f"{at}/prefixItems/{index}", f"{name}[{index}]", known, trail)
    if isinstance(part.get("items"), dict):
        yield _Spot(part["items"], f"{at}/items", f"{name}[]", [item for one in lists for item in one], trail)
    values = [value for one in _members(examples) for value in one.values()]
    if isinstance(part.get("additionalProperties"), dict):
        yield _Spot(part["additionalProperties"], f"{at}/additionalProperties", f"{name}.*", values, trail)
    patterns: Any = part.get("patternProperties")
    for pattern, child in cast("Json", patterns).items() if isinstance(patterns, dict) else ():
        if isinstance(child, dict):
            yield _Spot(cast("Json", child), at + pointer(["patternProperties", pattern]), f"{name}.*", values, trail)


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _wanting(root: Json, spot: _Spot, given: Sequence[Any]) -> Iterator[Fault]:
    """List what one property lacks. `given`: its values in the examples of the object around it."""
    part, at, name = spot.part, spot.at, spot.name
    if not str(part.get("description", "")).strip():
        yield Fault(at, f"`{name}` needs a description: Annotated[…, Field(description=…)]")
    yield from _example_faults(root, name, part, at, given)
    yield from _extension_faults(name, part, at)


def _example_faults(root: Json, name: str, part: Json, at: str, given: Sequence[Any]) -> Iterator[Fault]:
    examples = part.get("examples")
    if not isinstance(examples, list) or not examples:
        if not given or examples is not None:
            whole = f", or a value in an example of `{name.rpartition('.')[0]}`" if "." in name else ""
            yield Fault(at, f"`{name}` needs an example: Annotated[…, Field(examples=[…])]{whole}")
        return
    inner = Schema({**part, "$defs": root.get("$defs", {})})
    for example in cast("list[Any]", examples):
        if not inner.valid(example):
            yield Fault(f"{at}/examples", f"the example `{brief(example)}` of `{name}` does not fit its own schema")


def _extension_faults(name: str, part: Json, at: str) -> Iterator[Fault]:
    sensitivity = part.get("x-sensitivity", "pii")
    if not isinstance(sensitivity, str) or sensitivity not in SENSITIVITIES:
        choices = ", ".join(sorted(SENSITIVITIES))
        yield Fault(f"{at}/x-sensitivity", f"x-sensitivity of `{name}` must be one of {choices}")
    cost = part.get("x-token-cost", 0)
    if isinstance(cost, bool) or not isinstance(cost, int) or cost < 0:
        yield Fault(f"{at}/x-token-cost", f"x-token-cost of `{name}` must be a whole number of tokens")
    if part.get("x-fragment", "sql") not in LANGUAGES:
        yield Fault(f"{at}/x-fragment", f"x-fragment of `{name}` must be one of {', '.join(sorted(LANGUAGES))}")
    if not isinstance(part.get("x-internal", False), bool):
        yield Fault(f"{at}/x-internal", f"x-internal of `{name}` must be true or false")

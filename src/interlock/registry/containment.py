"""Decides whether every value of one schema surely fits another.

This module compares two expanded schemas as sets of values; it knows nothing of versions, callers or changes.
`contains` is sound but not complete: yes is a proof, no may mean "cannot tell".

An expanded schema is split into atoms: single values (null, true, false, each value of an enum), which the real
validator can judge, and one atom per remaining JSON type, whose keywords are compared one by one. A nested `anyOf` is
the union of its branches' atoms. Keywords that judge a value on their own (`oneOf`, `not`, `if`, ...) form the atom's
residue and must be equal on both sides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from interlock.core.record import dataclass
from interlock.data.schema import Json, compile_validator
from interlock.registry.expansion import KEYWORDS, OPAQUE, RESIDUE, Document, Node, expand, key_of, object_of, same

_BOUNDS: Mapping[int, Mapping[str, bool]] = {
    1: {"minimum": False, "exclusiveMinimum": True},
    -1: {"maximum": False, "exclusiveMaximum": True},
}
_TYPES = ("null", "boolean", "number", "string", "array", "object")


def contains(wide: Document, narrow: Document) -> bool:
    """Whether every value valid under `narrow` is surely valid under `wide`.

    False may mean that it cannot be decided.
    """
    return within(expand(wide), expand(narrow))


def within(wide: Node, narrow: Node) -> bool:
    """Whether every value of the expanded `narrow` is surely one of the expanded `wide`."""
    if wide is True or same(wide, narrow):
        return True
    pieces = _atoms(wide)
    return all(
        holds(wide, atom.value) or refuses(narrow, atom.value)
        if atom.kind == "value"
        else any(_covers(piece, atom) for piece in pieces)
        for atom in _atoms(narrow)
    )


def equivalent(old: Node, new: Node) -> bool:
    """Whether two expanded schemas surely hold the same values."""
    return same(old, new) or (within(old, new) and within(new, old))


def holds(schema: Node, value: Any) -> bool:
    """Whether the value is surely valid under the expanded schema."""
    text = key_of(schema)
    return f'"{OPAQUE}"' not in text and bool(_validator(text).is_valid(value))


@dataclass(frozen=True, slots=True)
class _Atom:
    """A piece of a schema: one value, or the values of one type under that type's keywords."""

    kind: str
    keywords: Json
    residue: frozenset[str] = frozenset()
    integral: bool = False
    value: Any = None

    def of(self, key: str, default: Any) -> Any:
        return self.keywords.get(key, default)


def _atoms(node: Node, residue: frozenset[str] = frozenset()) -> list[_Atom]:
    """Split a schema into atoms whose union is the schema."""
    schema = object_of(node)
    if node is False:
        return []
    if OPAQUE in schema:
        return [_Atom("opaque", schema, residue)]
    if "const" in schema or "enum" in schema:
        values: list[Any] = [schema["const"]] if "const" in schema else schema["enum"]
        return [_Atom("value", {}, residue, value=value) for value in values]
    alone = schema.keys() & RESIDUE
    if schema.keys() - alone > {"anyOf"}:
        alone |= schema.keys() & {"anyOf"}
    if alone:
        residue |= {key_of({key: schema[key] for key in alone})}
    if "anyOf" in schema.keys() - alone:
        return [atom for branch in schema["anyOf"] for atom in _atoms(branch, residue)]
    return list(_typed(schema, residue))


def _typed(schema: Json, residue: frozenset[str]) -> Iterator[_Atom]:
    allowed: Any = schema.get("type", _TYPES)
    types: set[str] = {allowed} if isinstance(allowed, str) else set(allowed)
    for kind in _TYPES:
        integral = kind == "number" and "number" not in types and "integer" in types
        if kind not in types and not integral:
            continue
        if kind == "null":
            yield _Atom("value", {}, residue, value=None)
        elif kind == "boolean":
            yield from (_Atom("value", {}, residue, value=value) for value in (True, False))
        else:
            keywords = {key: schema[key] for key in KEYWORDS[kind] if key in schema}
            yield _Atom(kind, keywords, residue, integral)


def refuses(schema: Node, value: Any) -> bool:
    """Whether the value is surely not valid under the expanded schema."""
    text = key_of(schema)
    return f'"{OPAQUE}"' not in text and not _validator(text).is_valid(value)


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
    """Return the lower bound (sign 1), or the upper one negated (sign -1), and whether it is itself excluded."""
    keywords = _BOUNDS[sign]
    bounds = [(sign * atom.keywords[key], strict) for key, strict in keywords.items() if key in atom.keywords]
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
    return all(within(_item(wide, place), _item(narrow, place)) for place in range(places + 1) if place < most)


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
        and within(wide.of("additionalProperties", True), narrow.of("additionalProperties", True))
        and all(within(_field(wide, name), _field(narrow, name)) for name in fields)
    )


def _field(atom: _Atom, name: str) -> Node:
    return atom.of("properties", {}).get(name, atom.of("additionalProperties", True))


_COVERS: Mapping[str, Callable[[_Atom, _Atom], bool]] = {
    "number": _covers_number,
    "string": _covers_string,
    "array": _covers_array,
    "object": _covers_object,
}

"""The kinds of values that a schema admits: `string`, `null`, `array` and so on, as its words alone tell them.

Types, `enum`, `const`, references and combinations (`anyOf`, `oneOf`, `allOf`) are followed. Where the words say
nothing, a schema admits every kind: the answer may name too many kinds, and never too few.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from interlock.data.schema import Json, resolve_ref

KINDS = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})

# Schemas inside each other that are followed. What is deeper admits every kind.
_DEEPEST = 8


def kinds_of_value(value: Any) -> frozenset[str]:
    """The kinds that a JSON value is of. A whole number is an `integer`, also if it is written with a fraction."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, float):
        return frozenset({"number", "integer"}) if value.is_integer() else frozenset({"number"})
    for type_, kind in ((str, "string"), (int, "integer"), (dict, "object"), (list, "array")):
        if isinstance(value, type_):
            return frozenset({kind})
    return frozenset({"null"})


def kinds(document: Json, schema: Any, depth: int = 0) -> frozenset[str]:
    """The kinds of values that a schema within a document admits. `number` is never without `integer`."""
    if schema is False:
        return frozenset()
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return KINDS
    node = resolve_ref(document, cast("Json", schema))
    found = KINDS
    stated: Any = node.get("type")
    if stated is not None:
        types: set[Any] = set(cast("list[Any]", stated)) if isinstance(stated, list) else {stated}
        found = KINDS & (types | ({"integer"} if "number" in types else set()))
    for values in (node.get("enum"), [node["const"]] if "const" in node else None):
        if isinstance(values, list):
            found &= frozenset[str]().union(*map(kinds_of_value, cast("list[Any]", values)))
    for word in ("anyOf", "oneOf"):
        if branches := _branches(node, word):
            found &= frozenset[str]().union(*(kinds(document, one, depth + 1) for one in branches))
    for one in _branches(node, "allOf"):
        found &= kinds(document, one, depth + 1)
    return found


def items_of(document: Json, schema: Any) -> Json:
    """A schema that admits every item of the lists that a schema within a document admits."""
    found = list(_items(document, schema, 0))
    return {} if not found or any(not isinstance(one, dict) for one in found) else {"anyOf": found}


def _items(document: Json, schema: Any, depth: int) -> Iterator[Any]:
    if "array" not in kinds(document, schema, depth):
        return
    node = resolve_ref(document, cast("Json", schema)) if isinstance(schema, dict) else {}
    listed = [*_branches(node, "prefixItems"), *_branches(node, "items")]
    branches = [one for word in ("anyOf", "oneOf", "allOf") for one in _branches(node, word)]
    if "items" in node or listed:
        yield from listed
        if not isinstance(node.get("items"), list):
            yield node.get("items", True)
    elif not branches or depth > _DEEPEST:
        yield True
    for one in branches if depth <= _DEEPEST else ():
        yield from _items(document, one, depth + 1)


def _branches(node: Json, word: str) -> list[Any]:
    branches: Any = node.get(word)
    return cast("list[Any]", branches) if isinstance(branches, list) else []

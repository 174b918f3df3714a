"""Lossless conversion of text arguments to the schema's types.

Models often send numbers and booleans as text. If the text denotes exactly one value of the requested type, it is
converted and the change is recorded; anything else is left for validation to refuse. Nothing is ever rounded, cut or
guessed, and a value that already fits is never changed.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, cast

from interlock.core.expressions import expression
from interlock.core.record import NamedTuple
from interlock.data.schema import Json, Schema, pointer, property_of, resolve_ref

_INTEGER = expression(r"[+-]?\d{1,4000}\Z", re.ASCII)
_NUMBER = expression(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?\Z", re.ASCII)
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class Coercion(NamedTuple):
    """One value converted to another type."""

    pointer: str
    before: Any
    after: Any


class Coerced(NamedTuple):
    value: Any
    changes: tuple[Coercion, ...]


def coerce(schema: Schema, value: Any) -> Coerced:
    """Convert text wherever the schema asks for another type and nothing is lost."""
    changes: list[Coercion] = []
    coerced = _coerce(schema.document, schema.document, value, [], changes)
    return Coerced(coerced, tuple(changes))


def _coerce(root: Json, node: Any, value: Any, path: list[Any], changes: list[Coercion]) -> Any:
    if not isinstance(node, dict) or len(path) > 100:
        return value
    part = resolve_ref(root, cast("Json", node))
    if isinstance(value, str):
        after = _convert(root, part, value)
        if after is not None:
            changes.append(Coercion(pointer(path), value, after))
            return after
        return value
    if isinstance(value, dict):
        return _coerce_object(root, only_alternative(root, part, "object"), cast("Json", value), path, changes)
    if isinstance(value, list):
        items = cast("list[Any]", value)
        inner = only_alternative(root, part, "array")
        first: list[Any] = inner.get("prefixItems") or []
        rest = inner.get("items")
        coerced = [
            _coerce(root, first[i] if i < len(first) else rest, item, [*path, i], changes)
            for i, item in enumerate(items)
        ]
        return coerced if any(new is not old for new, old in zip(coerced, items, strict=True)) else items
    return value


def _coerce_object(root: Json, part: Json, value: Json, path: list[Any], changes: list[Coercion]) -> Json:
    others = part.get("additionalProperties")
    coerced: Json = {}
    for name, item in value.items():
        known = property_of(part, name)
        coerced[name] = _coerce(root, others if known is None else known, item, [*path, name], changes)
    return coerced if any(coerced[name] is not item for name, item in value.items()) else value


def only_alternative(root: Json, part: Json, kind: str) -> Json:
    """Return the one alternative that an object or a list can mean, as in `Point | None`; else the schema itself."""
    branches = part.get("anyOf") or part.get("oneOf")
    if "type" in part or not isinstance(branches, list):
        return part
    resolved = [
        resolve_ref(root, cast("Json", branch)) for branch in cast("list[Any]", branches) if branch not in (True, False)
    ]
    kinds = [_kinds(root, branch) for branch in resolved]
    fitting = [branch for branch, admitted in zip(resolved, kinds, strict=True) if kind in admitted]
    return only_alternative(root, fitting[0], kind) if len(fitting) == 1 and all(kinds) else part


def _convert(root: Json, part: Json, text: str) -> Any:
    """Return the one value that the text denotes under the schema, or None if it may stay text or denotes nothing."""
    kinds = _kinds(root, part)
    if "string" in kinds or not kinds:
        return None
    # INVARIANT: at most one of the requested types may match the text, otherwise the choice would be a guess.
    values = {kind: value for kind in kinds if (value := _parsed(kind, text)) is not None}
    if kinds >= {"integer", "number"} and "integer" in values:
        values.pop("number", None)
    return next(iter(values.values())) if len(values) == 1 else None


def _kinds(root: Json, part: Json) -> frozenset[str]:
    """Return the types that a schema admits; an alternative without a type admits text."""
    kind = part.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(str(one) for one in cast("list[Any]", kind))
    branches = part.get("anyOf") or part.get("oneOf")
    if not isinstance(branches, list):
        return frozenset()
    kinds = [_kinds(root, resolve_ref(root, cast("Json", branch))) for branch in cast("list[Any]", branches)]
    return frozenset({"string"}) if not all(kinds) else frozenset[str]().union(*kinds)


def _parsed(kind: str, text: str) -> int | float | bool | None:
    if kind == "integer":
        return int(text) if _INTEGER.match(text) else None
    if kind == "number":
        return _number(text)
    if kind == "boolean":
        return _BOOLEANS.get(text.lower())
    return None


def _number(text: str) -> int | float | None:
    if _INTEGER.match(text):
        return int(text)
    if not _NUMBER.match(text):
        return None
    try:
        exact = Decimal(text)
        value = float(exact)
    except (InvalidOperation, OverflowError, ValueError):
        return None
    # Lossless means that writing the float again gives the number that was sent.
    return value if value not in (float("inf"), float("-inf")) and Decimal(repr(value)) == exact else None

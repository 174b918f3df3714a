"""The schema of a piece of a value, made of the schema of the whole."""

from __future__ import annotations

from typing import Any, cast

Json = dict[str, Any]

_ABOUT_THE_WHOLE = frozenset(
    {"required", "minProperties", "dependentRequired", "dependentSchemas", "if", "then", "else"}
)
_MOST_CHOICES = 100


def piece_of(schema: Json) -> Json:
    """The schema of a piece of what `schema` describes. All that a piece may hold is described by `schema` too."""
    shared = {name: schema[name] for name in ("$schema", "$defs", "definitions") if name in schema}
    pieces: list[Any] = []
    waiting: list[Any] = [{name: value for name, value in schema.items() if name not in shared}]
    while waiting and len(pieces) < _MOST_CHOICES:
        whole = waiting.pop()
        pieces.append(whole)
        if not isinstance(whole, dict):
            continue
        members = cast("Json", whole)
        ref = str(members.get("$ref", "")).split("/")
        if len(ref) == 3 and ref[0] == "#" and ref[1] in shared:
            waiting.append(shared[ref[1]].get(ref[2]))
        waiting += [*members.get("anyOf", ()), *members.get("oneOf", ())]
        pieces += members.get("prefixItems", ())
        if "items" in members:
            pieces.append(members["items"])
        if _ABOUT_THE_WHOLE & members.keys():
            pieces.append({name: value for name, value in members.items() if name not in _ABOUT_THE_WHOLE})
        if members.get("type") == "string":
            pieces.append({"type": "string"})
    return {**shared, "anyOf": pieces}

"""Prepares foreign JSON Schemas for use: removes what upstreams may not state, and moves references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.data.nesting import DEEPEST
from interlock.data.schema import Json, require_schema

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_NODES = frozenset(
    {
        "items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties",
        "propertyNames", "not", "if", "then", "else", "contentSchema",
    }
)  # fmt: skip


def rewrite(schema: Any, change: Callable[[Json], Json], *, deep: int = 0) -> Any:
    """Copy a schema and apply `change` to every subschema, innermost first. Values and names are left alone."""
    if deep > DEEPEST:
        raise Failure("E3105", "its schema is nested too deeply")
    if not isinstance(schema, dict):
        return schema
    copied: Json = {}
    for word, value in cast("Json", schema).items():
        if word in _MAPS and isinstance(value, dict):
            inner = cast("Json", value).items()
            copied[word] = {name: rewrite(part, change, deep=deep + 1) for name, part in inner}
        elif word in _LISTS and isinstance(value, list):
            copied[word] = [rewrite(part, change, deep=deep + 1) for part in cast("list[Any]", value)]
        elif word in _NODES:
            copied[word] = rewrite(value, change, deep=deep + 1)
        else:
            copied[word] = value
    return change(copied)


def rebased(schema: Json, base: str) -> Json:
    """Rewrite a schema's references for its place at the pointer `base` within another."""

    def change(node: Json) -> Json:
        ref = node.get("$ref")
        if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
            node["$ref"] = f"#{base}{ref[1:]}"
        return node

    return cast("Json", rewrite(schema, change))


# Control characters, direction marks, and invisible characters.
_HIDDEN = expression(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """Remove invisible characters. INVARIANT: a model reads nothing about a tool that its operator could not read."""
    return _HIDDEN.sub("", text)


_OURS = ("x-internal", "x-sensitivity", "x-token-cost")
_TEXTS = ("description", "title", "$comment")
_FLAGS = ("deprecated", "readOnly", "writeOnly")


def _disarmed(node: Json) -> Json:
    """Remove keywords that Interlock would act upon, and annotations of an invalid form.

    INVARIANT: no upstream hides a parameter, or has a value kept from the log or shown in it, by a mark in its schema.
    """
    for word in _OURS:
        node.pop(word, None)
    for word, form in (*((word, str) for word in _TEXTS), *((word, bool) for word in _FLAGS)):
        if word in node and not isinstance(node[word], form):
            del node[word]
        elif form is str and word in node:
            node[word] = visible(node[word])
    for word in ("examples", "required"):
        if word in node and not isinstance(node[word], list):
            del node[word]
    return node


_DIALECT = expression(r"https?://json-schema\.org/(draft-0[467]|draft/(2019-09|2020-12))/schema#?\Z")


Shared = dict[int, tuple[Any, Any]]


def cleaned(schema: Json, what: str, shared: Shared | None = None) -> Json:
    """Clean a schema so that it can be compiled. One of an unknown dialect is read as the current one.

    Operations of an OpenAPI document have most definitions in common. `shared` holds those that are cleaned already, by
    the identity of what they were made from: the schemas that are cleaned with it share them, and nothing may change
    them.
    """
    fit = cast("Json", rewrite(schema, _disarmed)) if shared is None else _sharing(schema, shared)
    fit.pop("$id", None)
    if "$schema" in fit and not _DIALECT.match(str(fit["$schema"])):
        del fit["$schema"]
    try:
        require_schema(fit)
    except Failure as failure:
        raise Failure("E3105", f"its {what} schema cannot be used: {failure.message}") from None
    return fit


def _sharing(schema: Json, shared: Shared) -> Json:
    definitions: Any = schema.get("$defs")
    if not isinstance(definitions, dict) or "$ref" in schema:  # what it refers to is going to be its root
        return cast("Json", rewrite(schema, _disarmed))
    fit = cast("Json", rewrite({**schema, "$defs": {}}, _disarmed))
    for name, part in cast("Json", definitions).items():
        if id(part) not in shared:
            shared[id(part)] = part, rewrite(part, _disarmed, deep=1)
        fit["$defs"][name] = shared[id(part)][1]
    return fit


# The result of an MCP tool: blocks of content, and structured content if it declared some.
_BLOCKS: Json = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "type": {"type": "string"},
            "text": {"type": "string"},
            "data": {"type": "string"},
            "mimeType": {"type": "string"},
            "uri": {"type": "string"},
            "resource": {"type": "object"},
        },
        "required": ["type"],
    },
}


def mcp_result(structured: Json | None) -> Json:
    """The schema of an MCP tool's value, around the schema of its structured content."""
    properties: Json = {
        "content": _BLOCKS,
        "structuredContent": {},
        "_meta": {"type": "object"},
    }
    schema: Json = {"type": "object", "properties": properties, "required": ["content"]}
    if structured is not None:
        inner = rebased(structured, "/properties/structuredContent")
        dialect = inner.pop("$schema", None)
        if dialect is not None:
            schema = {"$schema": dialect, **schema}
        properties["structuredContent"] = inner
        schema["required"] = ["content", "structuredContent"]
    return schema

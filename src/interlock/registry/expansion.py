"""Expands schemas so that two of them can be compared.

This module reads one schema: its keywords, its references, the defaults that are filled in, and the text that
identifies equal ones. Comparing two is the job of `containment`, judging the difference that of `compat`.

Expansion drops annotations and writes out local `$ref`s. A part that cannot be written out (a recursive `$ref`, an
unknown keyword, another dialect) becomes an opaque node, which fits only an equal one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from interlock.data.schema import Json, close, compile_validator, copied, resolve_ref

Node = bool | Json
Document = Mapping[str, Any] | bool

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_MOST_NODES = 5_000  # of an expanded schema; references can double its size at every step
_DEEPEST = 48
OPAQUE = "$opaque"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ANNOTATIONS = _words(
    "title description examples example default deprecated readOnly writeOnly discriminator contentEncoding"
    " contentMediaType contentSchema $comment $schema $id $anchor $defs definitions"
)
# Keywords whose values are schemas.
_ONE = _words("not if then else items contains propertyNames additionalProperties")
_LIST = _words("allOf anyOf oneOf prefixItems")
_MAP = _words("properties dependentSchemas")
# Keywords that are judged on their own, independently of the others.
RESIDUE = _words(
    "allOf oneOf not if then else contains minContains maxContains propertyNames dependentRequired dependentSchemas"
)
KEYWORDS: Mapping[str, frozenset[str]] = {
    "number": _words("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf format"),
    "string": _words("minLength maxLength pattern format"),
    "array": _words("minItems maxItems uniqueItems items prefixItems format"),
    "object": _words("properties required additionalProperties minProperties maxProperties format"),
}
_KNOWN = frozenset({"type", "enum", "const", "anyOf"}).union(RESIDUE, *KEYWORDS.values())
_UNORDERED = frozenset({"required", "enum", "type"})


def closed(document: Document) -> Document:
    """Close a schema like the contract loader: objects that do not mention other fields accept none."""
    return document if isinstance(document, bool) else close(copied(dict(document)))


def filled_defaults(document: Document) -> dict[str, Any]:
    """The defaults that the lifecycle fills in: those of top-level fields."""
    if isinstance(document, bool):
        return {}
    root = dict(document)
    parts = {name: resolve_ref(root, part) for name, part in _parts(resolve_ref(root, root)).items()}
    return {name: part["default"] for name, part in parts.items() if "default" in part}


def _parts(node: Json) -> dict[str, Json]:
    properties: Json = node.get("properties", {})
    return {name: part for name, part in properties.items() if isinstance(part, dict)}


def expand(document: Document) -> Node:
    """Return the schema without annotations and references; an invalid one is refused with E3105."""
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
    return {OPAQUE: key_of(document)}


class _TooLarge(Exception):  # noqa: N818 - it never leaves this module
    """The expansion is too large or too deep to be compared."""


class _Expansion:
    """One expansion: the root that references point into, and the size that is left."""

    def __init__(self, root: Json) -> None:
        self.root = root
        self.left = _MOST_NODES

    def expand(self, node: Any, trail: tuple[str, ...], depth: int = 0) -> Node:
        """Expand a subschema: without annotations, references written out; the trail holds those being written."""
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
            return sorted(cast("list[Any]", value), key=key_of)
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
        """Make a node that equals only itself, together with all that it may refer to."""
        definitions = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
        near = f"{key_of(_stripped(node))} within {key_of(_stripped(definitions))}"
        local = near.count('"$ref":"#/$defs/') + near.count('"$ref":"#/definitions/')
        if near.count('"$ref":') == local and "$dynamicRef" not in near:
            return {OPAQUE: near}
        return {OPAQUE: f"{near} within {key_of(_stripped(self.root))}"}


def _stripped(node: Any) -> Any:
    """Return a schema without annotations, its references unchanged."""
    if not isinstance(node, dict):
        return node
    stripped: Json = {}
    for key, value in cast("Json", node).items():
        if key in ("$defs", "definitions", *_MAP, "patternProperties") and isinstance(value, dict):
            stripped[key] = {name: _stripped(each) for name, each in cast("Json", value).items()}
        elif key in _LIST and isinstance(value, list):
            stripped[key] = [_stripped(each) for each in cast("list[Any]", value)]
        elif key in _ONE:
            stripped[key] = _stripped(value)
        elif key in ("$id", "$anchor") or (key not in _ANNOTATIONS and not key.startswith("x-")):
            stripped[key] = value
    return stripped


def _extensions(node: Json) -> set[str]:
    return {key for key in node if key.startswith("x-")}


def _assertions(node: Json) -> Json:
    return {key: value for key, value in node.items() if key not in _ANNOTATIONS and not key.startswith("x-")}


def key_of(value: Any) -> str:
    """Return a text that two JSON values share only if they are the same."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def same(one: Node, other: Node) -> bool:
    """Whether two expanded schemas are written the same."""
    return key_of(one) == key_of(other)


def object_of(node: Node) -> Json:
    """Return the keywords of a schema; plain true and false have none."""
    return {} if isinstance(node, bool) else node

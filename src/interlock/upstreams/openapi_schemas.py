"""Schemas of OpenAPI documents as JSON Schema 2020-12, each with the definitions it refers to.

A request is described in full, because its arguments are checked before anything is sent. A response may lead, from
reference to reference, to nearly everything that a document defines: in some documents a thousand schemas for each of
hundreds of operations. The schema of a response therefore has at most `MOST_RESPONSE_PARTS` parts in its tool. The
definitions nearest to the response are kept whole; those beyond keep their type and description. What they hold is
checked by the connector, against the document, whose definitions all operations share (`openapi_results`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast
from urllib.parse import unquote

from interlock.core.errors import Failure
from interlock.data.schema import Json, compile_validator
from interlock.upstreams.schemas import rewrite

MOST_RESPONSE_PARTS = 300

_NOT_OF_SCHEMAS = ("example", "discriminator", "xml", "externalDocs", "nullable")
_DESCRIBING = frozenset({"type", "properties", "required", "description", "title", "$schema", "deprecated", "$comment"})
_SHALLOW = ("type", "description", "title", "enum", "const", "format", "deprecated")


def unquoted(step: str) -> str:
    """One step of a reference, as the name it stands for."""
    return unquote(step).replace("~1", "/").replace("~0", "~")


def mapping(value: Any) -> Json:
    return cast("Json", value) if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


class Fields:
    """The arguments of a tool: one object, whatever parts of the request its properties go to."""

    def __init__(self) -> None:
        self._properties: Json = {}
        self._required: list[str] = []

    def add(self, name: str, where: str, schema: Json, *, required: bool) -> str:
        """Return the argument for a name; if it is taken, the part of the request is appended, and a
        number if need be.
        """
        argument, number = name, 2
        if argument in self._properties:
            argument = f"{name}_{where}"
        while argument in self._properties:
            argument, number = f"{name}_{where}_{number}", number + 1
        self._properties[argument] = schema
        if required:
            self._required.append(argument)
        return argument

    def schema(self) -> Json:
        schema: Json = {"type": "object", "properties": self._properties}
        if self._required:
            schema["required"] = self._required
        return schema | {"additionalProperties": False}


class Unmapped(Exception):  # noqa: N818 - an outcome of reading one operation, caught where they are listed
    """The reason why one operation cannot become a tool."""


class Scribe:
    """Writes the schemas of a document as JSON Schema, for one direction: requests or responses.

    A schema that others refer to is written once, and shared by all operations: nothing may change it.
    """

    def __init__(self, target: Callable[[str], Any], *, old: bool, request: bool) -> None:
        self._target = target
        self._old = old
        self._request = request
        self._unsent = "readOnly" if request else "writeOnly"
        self._names: dict[str, str] = {}
        self._definitions: Json = {}
        self._refers: dict[str, list[str]] = {}  # by name, the names that a definition refers to, in order
        self._failed: dict[str, Exception] = {}
        self._parts: dict[str, int] = {}
        self._digests: dict[str, bytes] = {}
        self._waiting: list[tuple[str, Any]] = []
        self._met: list[str] = []

    def schema(self, node: Any) -> Json:
        """A schema of the document as JSON Schema, whose references lead to `#/$defs`."""
        schema, _ = self._write(node)
        # One after the other: schemas may refer to each other in chains that are longer than the stack.
        while self._waiting:
            name, target = self._waiting.pop()
            try:
                self._definitions[name], self._refers[name] = self._write(target)
            except (Unmapped, Failure, RecursionError) as error:
                self._failed[name] = error
        return schema

    def resolved(self, schema: Json) -> Json:
        """A written schema, or the definition it consists of."""
        for _ in range(50):
            name = _definition_name(schema)
            if name is None:
                break
            schema = self._definition(name)
        return schema

    def plain_object(self, schema: Json, *, required: bool) -> Json | None:
        """Return the schema of a body whose properties can be arguments of their own; None if that would lose
        something.
        """
        target = self.resolved(schema)
        words = {word for word in target if not word.startswith("x-")}
        shut = target.get("additionalProperties", False) is False
        if target.get("type", "object") != "object" or not target.get("properties") or not shut:
            return None
        if words - _DESCRIBING - {"additionalProperties"} or (target.get("required") and not required):
            return None
        return target

    def finished(self, schema: Json, *, most: int | None = None) -> tuple[Json, bool]:
        """The schema with its definitions, and whether all of them are whole: with `most`, only those are that are
        nearest to the schema and have so many parts together. A schema that is only a reference is its definition.
        """
        schema = self.resolved(schema)
        left = None if most is None else most - parts_of(schema)
        definitions: Json = {}
        whole = True
        waiting = [name for name in references_of(schema) if name in self._definitions]
        for name in waiting:  # grows while it is read
            if name in definitions:
                continue
            if left is None:
                definitions[name] = self._definition(name)
            elif name in self._failed or self._parts_of(name) > left:
                definitions[name], whole = _shallow(self._definitions[name]), False
                continue
            else:
                definitions[name], left = self._definitions[name], left - self._parts_of(name)
            waiting += [one for one in self._refers[name] if one not in definitions]
        return schema | ({"$defs": dict(sorted(definitions.items()))} if definitions else {}), whole

    def fingerprint(self, schema: Json) -> str:
        """The digest of a schema with everything that it refers to; empty if a part of that cannot be written."""
        names = dict.fromkeys(references_of(schema))
        waiting = list(names)
        for name in waiting:  # grows while it is read
            if name in self._failed or name not in self._definitions:
                return ""
            more = [one for one in self._refers[name] if one not in names]
            names.update(dict.fromkeys(more))
            waiting += more
        whole = hashlib.sha256(_written(schema))
        for name in sorted(names):
            if name not in self._digests:
                self._digests[name] = hashlib.sha256(_written([name, self._definitions[name]])).digest()
            whole.update(self._digests[name])
        return whole.hexdigest()

    def definitions(self) -> Json:
        """Every definition that was written."""
        return {name: part for name, part in self._definitions.items() if name not in self._failed}

    def _definition(self, name: str) -> Json:
        """A definition; raises the reason if it cannot be written."""
        if name in self._failed:
            raise self._failed[name]
        return self._definitions[name]

    def _parts_of(self, name: str) -> int:
        if name not in self._parts:
            self._parts[name] = parts_of(self._definitions[name])
        return self._parts[name]

    def _write(self, node: Any) -> tuple[Json, list[str]]:
        if isinstance(node, bool):
            return ({} if node else {"not": {}}), []
        self._met = []
        schema = cast("Json", rewrite(mapping(node), self._node))
        return schema, list(dict.fromkeys(self._met))

    def _node(self, node: Json) -> Json:
        ref = node.get("$ref")
        if isinstance(ref, str):
            name = self._name(ref)
            self._met.append(name)
            beside = {} if self._old else {word: value for word, value in node.items() if word != "$ref"}
            return {"$ref": f"#/$defs/{name}", **beside}
        example, nullable = node.get("example"), node.get("nullable") is True
        node = {word: value for word, value in node.items() if word not in _NOT_OF_SCHEMAS}
        # Examples help to make a request; in answers they only take space.
        if example is not None and "examples" not in node:
            node["examples"] = [example]
        if not self._request or not isinstance(node.get("examples"), list):
            node.pop("examples", None)
        if "pattern" in node and not _is_pattern(node["pattern"]):
            del node["pattern"]  # of another kind of regular expression; the service checks it itself
        self._drop_unsent(node)
        _typed(node)
        if self._old:
            _bounded(node)
            return _nullable(node) if nullable else node
        return node

    def _drop_unsent(self, node: Json) -> None:
        """Remove properties that only responses have from requests, and vice versa."""
        properties = mapping(node.get("properties"))
        unsent = [name for name, part in properties.items() if mapping(part).get(self._unsent) is True]
        if unsent:
            node["properties"] = {name: part for name, part in properties.items() if name not in unsent}
            node["required"] = [name for name in sequence(node.get("required")) if name not in unsent]
        if not node.get("required", True):
            del node["required"]

    def _name(self, ref: str) -> str:
        """Return the name under which the target of a reference is stored; it is written when first met."""
        if ref in self._names:
            return self._names[ref]
        target = self._target(ref)
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", unquoted(ref.rpartition("/")[2])) or "part"
        name, number = plain, 2
        while name in self._definitions:
            name, number = f"{plain}_{number}", number + 1
        self._names[ref] = name
        self._definitions[name], self._refers[name] = {}, []
        self._waiting.append((name, target))
        return name


def _written(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()  # integers of any length, unlike orjson


def _definition_name(schema: Json) -> str | None:
    ref = schema.get("$ref")
    return ref.removeprefix("#/$defs/") if isinstance(ref, str) and len(schema) == 1 else None


def parts_of(value: Any) -> int:
    """The number of objects and lists in a value."""
    parts, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            parts += 1
            waiting.extend(cast("Json", one).values())
        elif isinstance(one, list):
            parts += 1
            waiting.extend(cast("list[Any]", one))
    return parts


def references_of(schema: Any) -> list[str]:
    """The names of the definitions that a schema refers to, in their order."""
    found: dict[str, None] = {}
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            members = cast("Json", one)
            ref = members.get("$ref")
            if isinstance(ref, str):
                found[ref.removeprefix("#/$defs/")] = None
            waiting.extend(reversed(members.values()))
        elif isinstance(one, list):
            waiting.extend(reversed(cast("list[Any]", one)))
    return list(found)


def _shallow(schema: Json) -> Json:
    """The facts of a schema that need no other: what it is, and not what it holds."""
    return {word: schema[word] for word in _SHALLOW if word in schema}


@lru_cache(maxsize=10_000)
def _usable(pattern: str) -> bool:
    try:
        compile_validator({"pattern": pattern})
    except Failure:
        return False
    return True


def _is_pattern(pattern: Any) -> bool:
    return isinstance(pattern, str) and _usable(pattern)


_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})


def _typed(node: Json) -> None:
    """Remove a type that JSON Schema does not have: `file`, `any` and others that documents use."""
    kind = node.get("type")
    if isinstance(kind, str) and kind not in _TYPES:
        del node["type"]


def _bounded(node: Json) -> None:
    """Convert bounds: OpenAPI 3.0 marks a bound as exclusive; JSON Schema has exclusive bounds."""
    for word, plain in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(word), bool):
            exclusive = node.pop(word)
            if exclusive and plain in node:
                node[word] = node.pop(plain)


def _nullable(node: Json) -> Json:
    kind = node.get("type")
    if isinstance(kind, str):
        node["type"] = [kind, "null"]
        if isinstance(node.get("enum"), list) and None not in node["enum"]:
            node["enum"] = [*node["enum"], None]
        return node
    notes = {word: node.pop(word) for word in ("description", "title") if word in node}
    return {"anyOf": [node, {"type": "null"}], **notes} if node else notes

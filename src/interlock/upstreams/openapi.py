"""OpenAPI documents as definitions. Nothing here opens a connection.

Every operation becomes one definition. Its input schema has one argument for each parameter and, where the
body is a plain object, for each of the body's properties; otherwise the body is one argument. Which argument goes
where is in `native`, so that a call needs the document no more:

    {"protocol": "openapi", "method": "GET", "path": "/pets/{id}", "servers": ["https://…"],
     "parameters": [{"name": "id", "in": "path", "style": "simple", "explode": false, "argument": "id"}],
     "body": {"media": "application/json", "required": true, "argument": "body"},       # or "properties": […]
     "responses": {"200": "json", "204": "none"},                                       # or "text"
     "security": [[{"id": "key", "type": "apiKey", "in": "header", "name": "X-Key", "scopes": []}]]}

Schemas are written as JSON Schema 2020-12, whichever version of OpenAPI they were in, each with the definitions it
refers to. What cannot be mapped without guessing is refused, by name and with the reason; the rest goes on.

`build` makes the request of a call from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import unquote, urljoin

from interlock.call.connector import Definition, Discovered
from interlock.core.errors import Failure
from interlock.data.documents import Doubled, Malformed, read_json, read_yaml
from interlock.data.schema import Json
from interlock.upstreams.request import PLACE, Request, build, is_json
from interlock.upstreams.schemas import rewrite

__all__ = ["METHODS", "Request", "build", "parse", "read"]

METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
_STYLES = {
    "path": ("simple",),
    "query": ("form", "spaceDelimited", "pipeDelimited", "deepObject"),
    "header": ("simple",),
    "cookie": ("form",),
}
_IGNORED_HEADERS = frozenset({"accept", "content-type", "authorization"})  # as the specification says
_OWN_HEADERS = frozenset(
    {
        "host", "connection", "content-length", "cookie", "keep-alive", "proxy-authorization", "te", "trailer",
        "transfer-encoding", "upgrade", "expect",
    }
)  # fmt: skip
_FORM = "application/x-www-form-urlencoded"
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")


class _Unmapped(Exception):  # noqa: N818 - an outcome of reading one operation, caught where they are listed
    """The reason why one operation cannot become a tool."""


def read(document: Json | str | bytes, *, base_url: str | None = None) -> Discovered:
    """Read the operations of an OpenAPI 3 document. `base_url` is the base of its relative servers."""
    root = parse(document)
    version = str(root.get("openapi", root.get("swagger", "")))
    if not re.match(r"3\.[0-2](\.|\Z)", version):
        stated = f"it says `{version[:20]}`" if version else "it names no version"
        raise Failure("E3105", f"an OpenAPI 3.0 or 3.1 document is needed, and {stated}; convert it first")
    reader = _Reader(root, base_url, old=version.startswith("3.0"))
    tools: list[Definition] = []
    refused: list[tuple[str, str]] = []
    names: set[str] = set()
    for path, method, item, operation in reader.operations():
        plain = f"{method}_{path.strip('/') or 'root'}"
        name = str(operation.get("operationId") or plain)
        if name in names:
            name = plain
        names.add(name)
        try:
            tools.append(reader.definition(name, path, method, item, operation))
        except _Unmapped as reason:
            refused.append((name, str(reason)))
        except Failure as failure:
            refused.append((name, failure.message))
        except RecursionError:
            refused.append((name, "its schemas are nested too deeply"))
    info = _mapping(root.get("info"))
    about = {"title": info.get("title"), "version": info.get("version"), "openapi": version, "servers": reader.servers}
    return Discovered(tools, refused, about)


def parse(document: Json | str | bytes) -> Json:
    """Parse a document in JSON or YAML; refuses with E3105."""
    parsed: Any = document
    if isinstance(document, str | bytes):
        try:
            parsed = read_json(document)
        except Doubled as error:
            raise Failure("E3105", f"the document says two things at once: {error}") from None
        except Malformed:
            parsed = _from_yaml(document)
    if not isinstance(parsed, Mapping):
        raise Failure("E3105", "an OpenAPI document is an object")
    return cast("Json", parsed)


def _from_yaml(text: str | bytes) -> Any:
    try:
        documents = read_yaml(text)
        # Only aliases of aliases make more values of a text than it has letters.
        return _plain(documents[0], [len(text)]) if len(documents) == 1 else None
    except (Malformed, RecursionError) as error:
        raise Failure("E3105", f"the document is neither JSON nor YAML: {error}") from None


def _plain(value: Any, left: list[int]) -> Any:
    """Convert YAML values to JSON: names become text (`200:` is not), and dates too."""
    left[0] -= 1
    if left[0] < 0:
        raise Failure("E3105", "the document unfolds into one that is too large; write it without aliases")
    if isinstance(value, dict):
        return {str(name): _plain(part, left) for name, part in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [_plain(part, left) for part in cast("list[Any]", value)]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _mapping(value: Any) -> Json:
    return cast("Json", value) if isinstance(value, dict) else {}


def _sequence(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


class _Reader:
    """One document, read operation by operation."""

    def __init__(self, root: Json, base_url: str | None, *, old: bool) -> None:
        self._root = root
        self._base = base_url
        self.old = old
        # A document that names no server means the root of where it was found.
        self.servers = self._servers(root.get("servers")) or ([urljoin(base_url, "/")] if base_url else [])

    def operations(self) -> Iterator[tuple[str, str, Json, Json]]:
        for path, raw in _mapping(self._root.get("paths")).items():
            try:
                item = self.resolved(raw)
            except _Unmapped:
                continue
            for method in METHODS:
                if isinstance(item.get(method), dict):
                    yield path, method, item, cast("Json", item[method])

    def definition(self, name: str, path: str, method: str, item: Json, operation: Json) -> Definition:
        _check_path(path)
        scribe = _Scribe(self, request=True)
        fields = _Fields()
        parameters = [self._parameter(scribe, fields, one) for one in self._parameters(item, operation)]
        missing = set(PLACE.findall(path)) - {one["name"] for one in parameters if one["in"] == "path"}
        if missing:
            raise _Unmapped(f"its path has `{{{min(missing)}}}`, which is not among its parameters")
        native: Json = {
            "protocol": "openapi",
            "operation_id": operation.get("operationId"),
            "method": method.upper(),
            "path": path,
            "servers": self._servers(operation.get("servers")) or self._servers(item.get("servers")) or self.servers,
            "parameters": parameters,
        }
        if operation.get("requestBody") is not None:
            native["body"] = self._body(scribe, fields, self.resolved(operation["requestBody"]))
        output, native["responses"] = self._responses(method, operation)
        native["security"] = self._security(operation)
        words = [str(operation[part]).strip() for part in ("summary", "description") if operation.get(part)]
        hints: Json = {"method": method.upper()} | ({"deprecated": True} if operation.get("deprecated") is True else {})
        return Definition(
            name=name,
            description="\n\n".join(dict.fromkeys(words)),
            input_schema=scribe.finished(fields.schema()),
            output_schema=output,
            native=native,
            hints=hints,
            title=str(operation.get("summary") or "").strip() or None,
        )

    def resolved(self, node: Any) -> Json:
        """Follow references to their final node."""
        for _ in range(50):
            target = _mapping(node)
            ref = target.get("$ref")
            if not isinstance(ref, str):
                return target
            node = self.target(ref)
        raise _Unmapped("its references lead round in a circle")

    def target(self, ref: str) -> Any:
        if not ref.startswith("#/"):
            raise _Unmapped(f"it refers to another document, `{ref[:80]}`; bundle the documents into one")
        target: Any = self._root
        for step in ref[2:].split("/"):
            name = _unquoted(step)
            if isinstance(target, list):
                target = dict(enumerate(cast("list[Any]", target))).get(int(name) if name.isdecimal() else -1)
            else:
                target = _mapping(target).get(name)
        if target is None:
            raise _Unmapped(f"it refers to `{ref[:80]}`, which is not in the document")
        return target

    def _servers(self, entries: Any) -> list[str]:
        servers: list[str] = []
        for server in (_mapping(one) for one in _sequence(entries)):
            variables = _mapping(server.get("variables"))
            url = PLACE.sub(
                lambda match, known=variables: str(_mapping(known.get(match[1])).get("default", match[0])),
                str(server.get("url") or "/"),
            )
            servers.append(urljoin(self._base, url) if self._base else url)
        return servers

    def _parameters(self, item: Json, operation: Json) -> list[Json]:
        """Return the parameters of the path and of the operation, which wins; in the order path,
        query, header, cookie.
        """
        parameters: dict[tuple[str, str], Json] = {}
        for raw in (*_sequence(item.get("parameters")), *_sequence(operation.get("parameters"))):
            one = self.resolved(raw)
            name, where = one.get("name"), one.get("in")
            if not isinstance(name, str) or not isinstance(where, str) or where not in _STYLES:
                raise _Unmapped("it has a parameter without a name, or in neither path, query, header nor cookie")
            if where != "header" or name.lower() not in _IGNORED_HEADERS:
                parameters[name, where] = one
        order = list(_STYLES)
        return sorted(parameters.values(), key=lambda one: order.index(one["in"]))

    def _parameter(self, scribe: _Scribe, fields: _Fields, one: Json) -> Json:
        name, where = str(one["name"]), str(one["in"])
        if where == "header" and (name.lower() in _OWN_HEADERS or not _TOKEN.match(name)):
            raise _Unmapped(f"it lets the caller set the header `{name}`, which is not the caller's to set")
        content = _mapping(one.get("content"))
        if content:
            media, described = next(iter(content.items()))
            if not is_json(media):
                raise _Unmapped(f"its parameter `{name}` is written as `{media}`, which is not supported")
            style, schema = "json", _mapping(described).get("schema", {})
        else:
            style, schema = str(one.get("style") or _STYLES[where][0]), one.get("schema", {})
            if style not in _STYLES[where]:
                raise _Unmapped(f"its parameter `{name}` has the style `{style}`, which is not supported in a {where}")
        part = scribe.schema(schema)
        for word in ("description", "deprecated"):
            if word in one:
                part[word] = one[word]
        required = where == "path" or one.get("required") is True
        argument = fields.add(name, where, part, required=required)
        explode = one["explode"] if isinstance(one.get("explode"), bool) else style == "form"
        mapped: Json = {"name": name, "in": where, "style": style, "explode": explode, "argument": argument}
        return mapped | ({"reserved": True} if one.get("allowReserved") is True else {})

    def _body(self, scribe: _Scribe, fields: _Fields, body: Json) -> Json:
        content = _mapping(body.get("content"))
        media = next((media for media in content if is_json(media)), None) or next(
            (media for media in content if media.split(";")[0].strip().lower() == _FORM), None
        )
        if media is None:
            listing = ", ".join(f"`{media}`" for media in content) or "nothing"
            raise _Unmapped(f"its body is {listing}; only JSON and {_FORM} are supported")
        described = _mapping(content[media])
        required = body.get("required") is True
        native: Json = {"media": "application/json" if "*" in media else media, "required": required}
        schema = scribe.schema(described.get("schema", {}))
        plain = scribe.plain_object(schema, required=required)
        if plain is None:
            words = str(body.get("description") or "").strip()
            if words:
                schema["description"] = words
            if not is_json(media) and schema.get("type") not in (None, "object"):
                raise _Unmapped("its body is a form that is not an object")
            return native | {"argument": fields.add("body", "body", schema, required=required)}
        encoding = _mapping(described.get("encoding"))
        needed = _sequence(plain.get("required"))
        properties: list[Json] = []
        for name, part in _mapping(plain.get("properties")).items():
            argument = fields.add(name, "body", _mapping(part), required=name in needed)
            how = _mapping(encoding.get(name))
            style = {word: how[word] for word in ("style", "explode") if word in how}
            if style.get("style", "form") not in _STYLES["query"] or not isinstance(style.get("explode", True), bool):
                raise _Unmapped(f"its form writes `{name}` in the style `{style.get('style')}`, which is not supported")
            properties.append({"name": name, "argument": argument, **style})
        return native | {"properties": properties}

    def _responses(self, method: str, operation: Json) -> tuple[Json, Json]:
        """Return the schema of a success, and how each status is read."""
        scribe = _Scribe(self, request=False)
        modes: Json = {}
        schemas: list[Json] = []
        silent: list[str] = []
        others: list[str] = []
        for status, raw in _mapping(operation.get("responses")).items():
            if not re.match(r"2([0-9]{2}|XX)\Z", status.upper()):
                continue
            content = _mapping(self.resolved(raw).get("content"))
            media = next((media for media in content if is_json(media)), None)
            schema: Any = _mapping(content[media]).get("schema") if media is not None else None
            if method == "head" or status in ("204", "205"):
                modes[status] = "none"
            elif schema is not None:
                modes[status] = "json"
                schemas.append(scribe.schema(schema))
            elif media is not None or not content:
                silent.append(status)
            elif any(media.startswith("text/") for media in content):
                modes[status] = "text"
                schemas.append({"type": "string"})
            else:
                others += content
        if others and not schemas:
            raise _Unmapped(f"its success response is `{others[0]}`, which is neither JSON nor text")
        if not modes or (silent and not schemas):
            raise _Unmapped("its success response has no schema; the document must say what it gives back")
        modes |= dict.fromkeys(silent, "none")
        if "none" in modes.values():
            schemas.append({"type": "null"})
        distinct = [schema for index, schema in enumerate(schemas) if schema not in schemas[:index]]
        return scribe.finished(distinct[0] if len(distinct) == 1 else {"anyOf": distinct}), modes

    def _security(self, operation: Json) -> list[list[Json]]:
        """Return the alternatives, each a list of schemes that are needed together."""
        schemes = _mapping(_mapping(self._root.get("components")).get("securitySchemes"))
        alternatives: list[list[Json]] = []
        for alternative in _sequence(operation.get("security", self._root.get("security"))):
            together: list[Json] = []
            for name, scopes in _mapping(alternative).items():
                scheme = self.resolved(schemes.get(name))
                facts = {word: scheme[word] for word in ("type", "in", "name", "scheme") if word in scheme}
                together.append({"id": name, **facts, "scopes": _sequence(scopes)})
            alternatives.append(together)
        return alternatives


def _check_path(path: str) -> None:
    bare = PLACE.sub("x", path)
    if not bare.startswith("/") or re.search(r"[\x00-\x20?#\\{}\x7f]|%2f|%2e|%5c", bare, re.IGNORECASE):
        raise _Unmapped("its path is not a plain one")
    if any(segment in (".", "..") for segment in bare.split("/")):
        raise _Unmapped("its path leads out of itself")


def _unquoted(step: str) -> str:
    return unquote(step).replace("~1", "/").replace("~0", "~")


class _Fields:
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


_NOT_OF_SCHEMAS = ("example", "discriminator", "xml", "externalDocs", "nullable")
_DESCRIBING = frozenset({"type", "properties", "required", "description", "title", "$schema", "deprecated", "$comment"})


class _Scribe:
    """Converts schemas of a document to JSON Schema, and collects the definitions they refer to."""

    def __init__(self, reader: _Reader, *, request: bool) -> None:
        self._reader = reader
        self._request = request
        self._unsent = "readOnly" if request else "writeOnly"
        self._names: dict[str, str] = {}
        self._definitions: Json = {}

    def schema(self, node: Any) -> Json:
        if isinstance(node, bool):
            return {} if node else {"not": {}}
        return cast("Json", rewrite(_mapping(node), self._written))

    def finished(self, schema: Json) -> Json:
        """The schema with its definitions. (What they refer to in turn was collected with them.)"""
        return schema | ({"$defs": dict(sorted(self._definitions.items()))} if self._definitions else {})

    def plain_object(self, schema: Json, *, required: bool) -> Json | None:
        """Return the schema of a body whose properties can be arguments of their own; None if that would lose
        something.
        """
        ref = schema.get("$ref")
        target = _mapping(self._definitions.get(str(ref).rpartition("/")[2])) if ref is not None else schema
        words = {word for word in target if not word.startswith("x-")}
        shut = target.get("additionalProperties", False) is False
        if target.get("type", "object") != "object" or not target.get("properties") or not shut:
            return None
        if words - _DESCRIBING - {"additionalProperties"} or (target.get("required") and not required):
            return None
        return target

    def _written(self, node: Json) -> Json:
        ref = node.get("$ref")
        if isinstance(ref, str):
            beside = {} if self._reader.old else {word: value for word, value in node.items() if word != "$ref"}
            return {"$ref": f"#/$defs/{self._name(ref)}", **beside}
        example, nullable = node.get("example"), node.get("nullable") is True
        node = {word: value for word, value in node.items() if word not in _NOT_OF_SCHEMAS}
        # Examples help to make a request; in answers they only take space.
        if example is not None and "examples" not in node:
            node["examples"] = [example]
        if not self._request or not isinstance(node.get("examples"), list):
            node.pop("examples", None)
        self._drop_unsent(node)
        if self._reader.old:
            _bounded(node)
            return _nullable(node) if nullable else node
        return node

    def _drop_unsent(self, node: Json) -> None:
        """Remove properties that only responses have from requests, and vice versa."""
        properties = _mapping(node.get("properties"))
        unsent = [name for name, part in properties.items() if _mapping(part).get(self._unsent) is True]
        if unsent:
            node["properties"] = {name: part for name, part in properties.items() if name not in unsent}
            node["required"] = [name for name in _sequence(node.get("required")) if name not in unsent]
        if not node.get("required", True):
            del node["required"]

    def _name(self, ref: str) -> str:
        """Return the name under which the target of a reference is stored; it is written when first met."""
        if ref in self._names:
            return self._names[ref]
        target = self._reader.target(ref)
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", _unquoted(ref.rpartition("/")[2])) or "part"
        name, number = plain, 2
        while name in self._definitions:
            name, number = f"{plain}_{number}", number + 1
        self._names[ref] = name
        self._definitions[name] = {}  # a schema may refer to itself
        self._definitions[name] = self.schema(target)
        return name


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

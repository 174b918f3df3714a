"""OpenAPI documents as definitions. Nothing here opens a connection.

Every operation becomes one definition. Its input schema has one argument for each parameter and, where the
body is a plain object, for each of the body's properties; otherwise the body is one argument. Which argument goes
where is in `native`, so that a call needs the document no more:

    {"protocol": "openapi", "method": "GET", "path": "/pets/{id}", "query": "v=2", "servers": ["https://…"],
     "parameters": [{"name": "id", "in": "path", "style": "simple", "explode": false, "argument": "id"}],
     "body": {"media": "application/json", "required": true, "argument": "body"},       # or "properties": […]
     "responses": {"200": "json", "204": "none"},                                       # see `openapi_content`
     "whole_result": "9f86d0…",                                                         # see `openapi_results`
     "security": [[{"id": "key", "type": "apiKey", "in": "header", "name": "X-Key", "scopes": []}]]}

Schemas are written as JSON Schema 2020-12, whichever version of OpenAPI they were in, each with the definitions it
refers to (`openapi_schemas`). What cannot be mapped without guessing is refused, by name and with the reason; the rest
goes on.

`build` makes the request of a call from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain, count
from typing import Any, cast
from urllib.parse import quote, unquote, urljoin

import orjson

from interlock.call.connector import Definition, Discovered
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import NamedTuple
from interlock.data.documents import Doubled, Malformed, plain, read_json, read_yaml
from interlock.data.schema import Json
from interlock.upstreams.openapi_content import Responses, body_of, responses_of
from interlock.upstreams.openapi_schemas import Fields, Scribe, Unmapped, mapping, sequence, unquoted
from interlock.upstreams.request import PATH_STYLES, PLACE, QUERY_STYLES, Request, build, is_json
from interlock.upstreams.swagger import upgraded

__all__ = ["METHODS", "Request", "build", "parse", "read", "results", "servers_of"]

METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
_STYLES = {
    "path": PATH_STYLES,
    "query": QUERY_STYLES,
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
_SET_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "keep-alive", "te", "expect"})
_EXPRESSION = expression(r"\{([^{}]+)\}")
_TOKEN = expression(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")


def read(document: Json | str | bytes, *, base_url: str | None = None) -> Discovered:
    """Read the operations of an OpenAPI 3 or Swagger 2.0 document. `base_url` is the base of its relative servers."""
    reader, version = _reader_of(document, base_url)
    tools: list[Definition] = []
    refused: list[tuple[str, str]] = []
    names: set[str] = set()
    for path, method, item, operation in reader.operations(refused):
        spelled = f"{method}_{path.strip('/') or 'root'}"
        name = str(operation.get("operationId") or spelled)
        candidates = chain((name, spelled), (f"{spelled}_{number}" for number in count(2)))
        name = next(one for one in candidates if one not in names)
        names.add(name)
        try:
            tools.append(reader.definition(name, path, method, item, operation))
        except Unmapped as reason:
            refused.append((name, str(reason)))
        except Failure as failure:
            refused.append((name, failure.message))
        except RecursionError:
            refused.append((name, "its schemas are nested too deeply"))
    info = mapping(reader.root.get("info"))
    about = {"title": info.get("title"), "version": info.get("version"), "openapi": version, "servers": reader.servers}
    said: Any = info.get("description")
    return Discovered(tools, refused, about, said if isinstance(said, str) else "")


def results(document: Json | str | bytes, *, base_url: str | None = None) -> Json:
    """The whole schemas of the results that tools hold in part, as one: of an object that has the result by its key."""
    reader, _ = _reader_of(document, base_url)
    properties: Json = {}
    for _, method, _, operation in reader.operations([]):
        try:
            found = reader.responses(method, operation)
        except (Unmapped, Failure, RecursionError):
            continue  # it is no tool
        if found.key:
            properties[found.key] = found.stated
    return {"type": "object", "properties": properties, "$defs": reader.result_definitions}


def _reader_of(document: Json | str | bytes, base_url: str | None) -> tuple[_Reader, str]:
    """Return the reader of a document, and the version that it states; E3105 for another."""
    root = parse(document)
    version = str(root.get("openapi", root.get("swagger", "")))
    if re.match(r"2\.0?\Z", version):
        root = upgraded(root, base_url)
    elif not re.match(r"3\.[0-2](\.|\Z)", version):
        stated = f"it says `{version[:20]}`" if version else "it names no version"
        raise Failure("E3105", f"an OpenAPI 3 or Swagger 2.0 document is needed, and {stated}; convert it first")
    return _Reader(root, base_url, old=version.startswith(("2", "3.0"))), version


def servers_of(root: Json) -> list[str]:
    """The addresses of the service that a parsed document names, with the defaults of their variables."""
    return _Reader(upgraded(root) if "swagger" in root else root, None, old=True).servers


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
    try:
        orjson.dumps(parsed)
    except TypeError:  # made in Python, with values that JSON cannot hold
        parsed = plain(parsed)
    return cast("Json", parsed)


def _from_yaml(text: str | bytes) -> Any:
    try:
        documents = read_yaml(text)
        # Only aliases of aliases make more values of a text than it has letters.
        return plain(documents[0], most=len(text)) if len(documents) == 1 else None
    except (Malformed, RecursionError) as error:
        raise Failure("E3105", f"the document is neither JSON nor YAML: {error}") from None


class _Reader:
    """One document, read operation by operation."""

    def __init__(self, root: Json, base_url: str | None, *, old: bool) -> None:
        self.root = root
        self._base = base_url
        self.old = old
        self._requests = Scribe(self.target, old=old, request=True)
        self._answers = Scribe(self.target, old=old, request=False)
        # A document that names no server means the root of where it was found.
        self.servers = self._servers(root.get("servers")) or ([urljoin(base_url, "/")] if base_url else [])

    def operations(self, refused: list[tuple[str, str]]) -> Iterator[tuple[str, str, Json, Json]]:
        for path, raw in mapping(self.root.get("paths")).items():
            try:
                item = self.resolved(raw)
            except Unmapped as reason:
                refused.append((path, str(reason)))
                continue
            for method in METHODS:
                if isinstance(item.get(method), dict):
                    yield path, method, item, cast("Json", item[method])

    def definition(self, name: str, path: str, method: str, item: Json, operation: Json) -> Definition:
        route = _route(path)
        fields = Fields()
        parameters = [self._parameter(fields, one) for one in self._parameters(item, operation, route)]
        native: Json = {
            "protocol": "openapi",
            "operation_id": operation.get("operationId"),
            "method": method.upper(),
            "path": route.path,
            "servers": self._servers(operation.get("servers")) or self._servers(item.get("servers")) or self.servers,
            "parameters": parameters,
        }
        if route.query:
            native["query"] = route.query
        if operation.get("requestBody") is not None:
            body = body_of(self._requests, fields, self.resolved(operation["requestBody"]))
            native |= {} if body is None else {"body": body}
        found = self.responses(method, operation)
        native["responses"] = found.modes
        if found.key:
            native["whole_result"] = found.key
        native["security"] = self._security(operation)
        words = [str(operation[part]).strip() for part in ("summary", "description") if operation.get(part)]
        hints: Json = {"method": method.upper()} | ({"deprecated": True} if operation.get("deprecated") is True else {})
        return Definition(
            name=name,
            description="\n\n".join(dict.fromkeys(words)) or f"{method.upper()} {path}",
            input_schema=self._requests.finished(fields.schema())[0],
            output_schema=found.schema,
            native=native,
            hints=hints,
            title=str(operation.get("summary") or "").strip() or None,
            notes=found.notes,
        )

    def responses(self, method: str, operation: Json) -> Responses:
        return responses_of(self._answers, self.resolved, method, operation)

    @property
    def result_definitions(self) -> Json:
        """The definitions that the schemas of the responses read so far refer to."""
        return self._answers.definitions()

    def resolved(self, node: Any) -> Json:
        """Follow references to their final node."""
        for _ in range(50):
            target = mapping(node)
            ref = target.get("$ref")
            if not isinstance(ref, str):
                return target
            node = self.target(ref)
        raise Unmapped("its references lead round in a circle")

    def target(self, ref: str) -> Any:
        if not ref.startswith("#/"):
            raise Unmapped(f"it refers to another document, `{ref[:80]}`; bundle the documents into one")
        target: Any = self.root
        for step in ref[2:].split("/"):
            name = unquoted(step)
            if isinstance(target, list):
                target = dict(enumerate(cast("list[Any]", target))).get(int(name) if name.isdecimal() else -1)
            else:
                target = mapping(target).get(name)
        if target is None:
            raise Unmapped(f"it refers to `{ref[:80]}`, which is not in the document")
        return target

    def _servers(self, entries: Any) -> list[str]:
        servers: list[str] = []
        for server in (mapping(one) for one in sequence(entries)):
            variables = mapping(server.get("variables"))
            url = PLACE.sub(
                lambda match, known=variables: str(mapping(known.get(match[1])).get("default", match[0])),
                str(server.get("url") or "/"),
            )
            servers.append(urljoin(self._base, url) if self._base else url)
        return servers

    def _parameters(self, item: Json, operation: Json, route: _Route) -> list[Json]:
        """Return the parameters of the path and of the operation, which wins; in the order path,
        query, header, cookie.
        """
        parameters: dict[tuple[str, str], Json] = {}
        for raw in (*sequence(item.get("parameters")), *sequence(operation.get("parameters"))):
            one = self.resolved(raw)
            name, where = one.get("name"), one.get("in")
            if not isinstance(name, str) or not isinstance(where, str) or where not in _STYLES:
                raise Unmapped("it has a parameter without a name, or in neither path, query, header nor cookie")
            if where == "path":
                name = name.strip("+*")
                if name not in route.places and name in route.asked:
                    where = "query"
            if where != "header" or self._is_argument(name, one):
                parameters[name, where] = {**one, "name": name, "in": where}
        # A place in the path must be filled, whether the document describes it or not.
        for name in route.places:
            parameters.setdefault((name, "path"), {"name": name, "in": "path", "schema": {"type": "string"}})
        for name in sorted(route.asked):
            parameters.setdefault((name, "query"), {"name": name, "in": "query", "schema": {"type": "string"}})
        order = list(_STYLES)
        return sorted(parameters.values(), key=lambda one: order.index(one["in"]))

    def _is_argument(self, name: str, header: Json) -> bool:
        """Whether a header is an argument, and not one that the connection sets."""
        if name.lower() in _IGNORED_HEADERS:
            return False
        if name.lower() not in _OWN_HEADERS and _TOKEN.match(name):
            return True
        if name.lower() in _SET_HEADERS or header.get("required") is not True:
            return False
        raise Unmapped(f"it needs the header `{name}`, which is not the caller's to set")

    def _parameter(self, fields: Fields, one: Json) -> Json:
        name, where = str(one["name"]), str(one["in"])
        content = mapping(one.get("content"))
        if content:
            media, described = next(iter(content.items()))
            if not is_json(media):
                raise Unmapped(f"its parameter `{name}` is written as `{media}`, which is not supported")
            style, schema = "json", mapping(described).get("schema", {})
        else:
            style, schema = str(one.get("style") or _STYLES[where][0]), one.get("schema", {})
            if style not in _STYLES[where]:
                raise Unmapped(f"its parameter `{name}` has the style `{style}`, which is not supported in a {where}")
        part = self._requests.schema(schema)
        for word in ("description", "deprecated"):
            if word in one:
                part[word] = one[word]
        if "examples" not in part and "example" in one:
            part["examples"] = [one["example"]]
        required = where == "path" or one.get("required") is True
        argument = fields.add(name, where, part, required=required)
        explode = one["explode"] if isinstance(one.get("explode"), bool) else style == "form"
        mapped: Json = {"name": name, "in": where, "style": style, "explode": explode, "argument": argument}
        return mapped | ({"reserved": True} if one.get("allowReserved") is True else {})

    def _security(self, operation: Json) -> list[list[Json]]:
        """Return the alternatives, each a list of schemes that are needed together."""
        schemes = mapping(mapping(self.root.get("components")).get("securitySchemes"))
        alternatives: list[list[Json]] = []
        for alternative in sequence(operation.get("security", self.root.get("security"))):
            together: list[Json] = []
            for name, scopes in mapping(alternative).items():
                scheme = self.resolved(schemes.get(name))
                facts = {word: scheme[word] for word in ("type", "in", "name", "scheme") if word in scheme}
                together.append({"id": name, **facts, "scopes": sequence(scopes)})
            alternatives.append(together)
        return alternatives


class _Route(NamedTuple):
    """The address of an operation: its path with placeholders for arguments, and the query that its path contains."""

    path: str
    query: str
    asked: frozenset[str]  # the names of arguments that belong to the query

    @property
    def places(self) -> list[str]:
        return list(dict.fromkeys(PLACE.findall(self.path)))


def _route(path: str) -> _Route:
    """Read the path of an operation.

    Some documents tell operations on one path apart by a fragment, which is not sent, or write query parameters into
    the path: `/search?kind=a&q={q}`, `/search{?q}`.
    """
    asked: set[str] = set()

    def expression(match: re.Match[str]) -> str:
        if match[1][0] in "?&":
            asked.update(name.rstrip("*") for name in match[1][1:].split(","))
            return ""
        return f"{{{match[1].lstrip('+/').rstrip('+*')}}}"

    plain = _EXPRESSION.sub(expression, path.partition("#")[0])
    plain, _, query = plain.partition("?")
    pairs: list[str] = []
    for pair in query.split("&"):
        if PLACE.search(pair):
            asked.update(PLACE.findall(pair))
        elif pair:
            pairs.append(quote(pair, safe="=%:/?@!$'()*,;~"))
    if re.search(r"[\x00-\x1f\\\x7f]", plain) or "://" in plain:
        raise Unmapped("its path holds a backslash, a control character or the address of a server")
    plain = "/" + plain.lstrip("/")
    if any(unquote(segment) in (".", "..") for segment in PLACE.sub("x", plain).split("/")):
        raise Unmapped("its path leads out of itself")
    places = PLACE.split(plain)
    fixed = [
        quote(text, safe="/%:@!$&'()*+,;=~-._") if at % 2 == 0 else f"{{{text}}}" for at, text in enumerate(places)
    ]
    return _Route("".join(fixed), "&".join(pairs), frozenset(asked))

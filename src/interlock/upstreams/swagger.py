"""Swagger 2.0 documents, rewritten as OpenAPI 3.0, which the rest of `openapi` reads.

Only what reading operations needs is rewritten: servers, parameters, bodies, responses, security schemes, and the
references to them. Schemas stay where they are in the document; their words are those of OpenAPI 3.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from interlock.data.schema import Json
from interlock.upstreams.openapi_schemas import mapping, sequence, unquoted
from interlock.upstreams.request import FORM, MULTIPART, kind_of_media

_METHODS = ("get", "put", "post", "delete", "options", "head", "patch")
_BESIDE_SCHEMA = frozenset(
    {"name", "in", "description", "required", "allowEmptyValue", "collectionFormat", "schema", "deprecated"}
)
_REWRITTEN = ("parameters", "consumes", "produces", "schemes")
_LISTS: dict[str, Json] = {
    "csv": {"style": "form", "explode": False},
    "ssv": {"style": "spaceDelimited", "explode": False},
    "pipes": {"style": "pipeDelimited", "explode": False},
    "multi": {"style": "form", "explode": True},
}
_FLOWS = {"accessCode": "authorizationCode", "application": "clientCredentials"}


def upgraded(root: Json, base_url: str | None = None) -> Json:
    """Return a Swagger 2.0 document as OpenAPI 3.0. `base_url` says where the document is."""

    def resolved(node: Any) -> Json:
        """Follow a reference within the document, once."""
        ref = mapping(node).get("$ref")
        if not isinstance(ref, str) or not ref.startswith("#/"):
            return mapping(node)
        target: Any = root
        for step in ref[2:].split("/"):
            target = mapping(target).get(unquoted(step))
        return mapping(target)

    paths: Json = {}
    for path, raw in mapping(root.get("paths")).items():
        item = resolved(raw)
        shared = [resolved(one) for one in sequence(item.get("parameters"))]
        paths[path] = {
            method: _operation(root, mapping(item[method]), shared, resolved)
            for method in _METHODS
            if isinstance(item.get(method), dict)
        }
    schemes = {name: _scheme(mapping(one)) for name, one in mapping(root.get("securityDefinitions")).items()}
    same = {word: root[word] for word in root if word not in ("swagger", "paths", "host", "basePath", "schemes")}
    return same | {
        "openapi": "3.0.0",
        "servers": _servers(root, base_url),
        "paths": paths,
        "components": {"securitySchemes": schemes},
    }


def _servers(root: Json, base_url: str | None) -> list[Json]:
    """The addresses of the service. What the document leaves out is as where the document was found."""
    base = urlsplit(base_url or "")
    host, path = str(root.get("host") or base.netloc), str(root.get("basePath") or "/")
    schemes = [str(one) for one in sequence(root.get("schemes"))] or [base.scheme or "https"]
    if not host:
        return [{"url": path}]
    safest = sorted(schemes, key=lambda scheme: scheme != "https")
    return [{"url": f"{scheme}://{host}{path}"} for scheme in safest if scheme in ("http", "https")]


def _operation(root: Json, operation: Json, shared: list[Json], resolved: Callable[[Any], Json]) -> Json:
    own = [resolved(one) for one in sequence(operation.get("parameters"))]
    stated = {(one.get("name"), one.get("in")): one for one in (*shared, *own)}.values()
    consumes = [str(one) for one in sequence(operation.get("consumes", root.get("consumes")))]
    produces = [str(one) for one in sequence(operation.get("produces", root.get("produces")))] or ["application/json"]
    changed: Json = {word: value for word, value in operation.items() if word not in _REWRITTEN}
    changed["parameters"] = [_parameter(one) for one in stated if one.get("in") not in ("body", "formData")]
    body = next((one for one in stated if one.get("in") == "body"), None)
    form = [one for one in stated if one.get("in") == "formData"]
    if body is not None:
        described = {"schema": body.get("schema", {})}
        facts = {word: body[word] for word in ("description", "required") if word in body}
        changed["requestBody"] = facts | {"content": dict.fromkeys(consumes or ["application/json"], described)}
    elif form:
        changed["requestBody"] = _form(form, consumes)
    changed["responses"] = {
        str(status): _response(resolved(one), produces) for status, one in mapping(operation.get("responses")).items()
    }
    return changed


def _schema(one: Json) -> Json:
    """The schema that is written among the other words of a parameter."""
    schema = {word: value for word, value in one.items() if word not in _BESIDE_SCHEMA}
    if schema.get("type") == "file":
        schema |= {"type": "string", "format": "binary"}
    return schema


def _parameter(one: Json) -> Json:
    members = {word: one[word] for word in ("name", "in", "description", "required", "deprecated") if word in one}
    style: Json = {}
    if one.get("type") == "array" and one.get("in") == "query":
        style = _LISTS.get(str(one.get("collectionFormat") or "csv"), _LISTS["csv"])
    return {**members, **style, "schema": _schema(one)}


def _form(fields: list[Json], consumes: list[str]) -> Json:
    files = any(one.get("type") == "file" for one in fields)
    allowed = [kind for kind in map(kind_of_media, consumes) if kind in (FORM, MULTIPART)]
    media = MULTIPART if files else next(iter(allowed), FORM)
    properties: Json = {}
    encoding: Json = {}
    for one in fields:
        name = str(one.get("name"))
        notes = {word: one[word] for word in ("description", "deprecated") if word in one}
        properties[name] = _schema(one) | notes
        if one.get("type") == "array" and media == FORM:
            encoding[name] = _LISTS.get(str(one.get("collectionFormat") or "csv"), _LISTS["csv"])
    required = [str(one.get("name")) for one in fields if one.get("required") is True]
    schema: Json = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    return {"required": bool(required), "content": {media: {"schema": schema, "encoding": encoding}}}


def _response(one: Json, produces: list[str]) -> Json:
    """A response, with its schema for every media type that the operation produces."""
    if "schema" not in one:
        return {"description": one.get("description", "")}
    schema = mapping(one["schema"])
    if schema.get("type") == "file":
        schema = {**schema, "type": "string", "format": "binary"}
    return {"description": one.get("description", ""), "content": {media: {"schema": schema} for media in produces}}


def _scheme(one: Json) -> Json:
    kind = one.get("type")
    if kind == "basic":
        return {"type": "http", "scheme": "basic"}
    if kind == "oauth2":
        flow = str(one.get("flow"))
        urls = {word: one[word] for word in ("authorizationUrl", "tokenUrl", "scopes") if word in one}
        return {"type": "oauth2", "flows": {_FLOWS.get(flow, flow): urls}}
    return one

"""Bodies of requests and responses in OpenAPI documents: which media type is used, and how it is written and read.

A request body is sent as the first of JSON, a form, a multipart form, text and bytes that the document allows. Bytes
are arguments in base64. A response is read as `json`, `text`, `file` (bytes, which become an artifact), `none`, or
`any`: as the media type of the answer says, where the document does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interlock.core.expressions import expression
from interlock.core.record import NamedTuple
from interlock.data.schema import Json
from interlock.upstreams.openapi_schemas import (
    MOST_RESPONSE_PARTS,
    Fields,
    Scribe,
    Unmapped,
    mapping,
    sequence,
)
from interlock.upstreams.request import FORM, MULTIPART, QUERY_STYLES, is_json, kind_of_media

UNCHECKED = "the schema of its result: the document has none, so results are not checked"
PARTLY_CHECKED = "a schema of its result that can be read: the document's is large, so results are checked in part"

_TEXTS = frozenset(
    {
        "application/xml", "application/yaml", "application/x-yaml", "application/javascript", "application/graphql",
        "application/x-ndjson", "application/csv", "application/sql", "image/svg+xml",
    }
)  # fmt: skip
# What a call gives back in place of bytes: its file, which is an artifact of the result.
FILE: Json = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "mediaType": {"type": "string"},
        "size": {"type": "integer"},
    },
    "required": ["path", "mediaType", "size"],
}


def is_text(media: str) -> bool:
    """Whether a media type is text that is not JSON."""
    kind = kind_of_media(media)
    return kind.startswith("text/") or kind in _TEXTS or kind.endswith("+xml")


def _is_bytes(schema: Json) -> bool:
    return schema.get("format") == "binary"


# Requests


def body_of(scribe: Scribe, fields: Fields, body: Json) -> Json | None:
    """Add the arguments of a request body, and return how they are sent; None if it has no content."""
    content = mapping(body.get("content"))
    if not content:
        return None
    required = body.get("required") is True
    media = _chosen(content)
    described, kind = mapping(content[media]), kind_of_media(media)
    schema = scribe.schema(described.get("schema", {}))
    if is_json(media) and not _is_bytes(scribe.resolved(schema)):
        native: Json = {"media": "application/json" if "*" in media else media, "required": required}
        return native | _fields_of(scribe, fields, body, schema, {}, required=required)
    if kind in (FORM, MULTIPART):
        encoding = mapping(described.get("encoding"))
        return {"media": kind, "required": required} | _fields_of(
            scribe, fields, body, schema, encoding, required=required, form=kind
        )
    raw: Json = {"type": "string"}
    notes = mapping(scribe.resolved(schema))
    words = str(body.get("description") or notes.get("description") or "").strip()
    if words:
        raw["description"] = words
    if is_text(media):
        written = "text"
    else:
        written, media = "base64", "application/octet-stream" if "*" in media else media
        raw["contentEncoding"] = "base64"
    raw["contentMediaType"] = kind_of_media(media)
    return {
        "media": media,
        "required": required,
        "argument": fields.add("body", "body", raw, required=required),
        "written": written,
    }


def _chosen(content: Json) -> str:
    """The media type to send: the first of JSON, a form, anything (as JSON), a multipart form, text, and the others."""
    ranks: list[Callable[[str], bool]] = [
        lambda media: is_json(media) and "*" not in media,
        lambda media: kind_of_media(media) == FORM,
        lambda media: kind_of_media(media) == MULTIPART,
        is_json,
        is_text,
        lambda media: "*" not in media,
    ]
    return next((media for rank in ranks for media in content if rank(media)), next(iter(content)))


def _fields_of(
    scribe: Scribe, fields: Fields, body: Json, schema: Json, encoding: Json, *, required: bool, form: str = ""
) -> Json:
    plain = scribe.plain_object(schema, required=required)
    if plain is None:
        whole = scribe.resolved(schema)
        if form and whole.get("type") not in (None, "object"):
            raise Unmapped("its body is a form that is not an object")
        words = str(body.get("description") or "").strip()
        schema = {**schema, "description": words} if words else schema
        native: Json = {"argument": fields.add("body", "body", schema, required=required)}
        files = [name for name, part in mapping(whole.get("properties")).items() if _holds_bytes(scribe, part)]
        return native | ({"files": files} if files and form == MULTIPART else {})
    needed = sequence(plain.get("required"))
    properties: list[Json] = []
    for name, part in mapping(plain.get("properties")).items():
        how = mapping(encoding.get(name))
        sent: Json = {word: how[word] for word in ("style", "explode") if word in how}
        if form and (sent.get("style", "form") not in QUERY_STYLES or not isinstance(sent.get("explode", True), bool)):
            raise Unmapped(f"its form writes `{name}` in the style `{sent.get('style')}`, which is not supported")
        if form == MULTIPART:
            sent = {}
            media = str(how.get("contentType") or "").split(",")[0].strip()
            if media and "*" not in media:
                sent["media"] = media
            if _holds_bytes(scribe, part):
                sent["file"] = True
                part = _in_base64(scribe, part)
        argument = fields.add(name, "body", mapping(part), required=name in needed)
        properties.append({"name": name, "argument": argument, **sent})
    return {"properties": properties}


def _holds_bytes(scribe: Scribe, part: Any) -> bool:
    """Whether a field of a form is a file, or a list of files."""
    whole = scribe.resolved(mapping(part))
    if whole.get("type") == "array":
        whole = scribe.resolved(mapping(whole.get("items")))
    return _is_bytes(whole) or (
        "contentMediaType" in whole and "contentEncoding" not in whole and whole.get("type") in (None, "string")
    )


def _in_base64(scribe: Scribe, part: Any) -> Json:
    whole = scribe.resolved(mapping(part))
    if whole.get("type") == "array":
        return {**whole, "items": _in_base64(scribe, whole.get("items"))}
    members = {
        word: whole[word] for word in ("description", "title", "deprecated", "contentMediaType") if word in whole
    }
    return {"type": "string", **members, "contentEncoding": "base64"}


# Responses

_SUCCESS = expression(r"2([0-9]{2}|XX)\Z")


class Responses(NamedTuple):
    """The successes of an operation: the schema that its tool holds, how each status is read, and what is open.

    `key` is the digest of the whole schema if the tool holds a part of it, and `stated` is that schema, which refers to
    definitions of the document.
    """

    schema: Json
    modes: Json
    stated: Json
    notes: tuple[str, ...] = ()
    key: str = ""


def responses_of(scribe: Scribe, resolved: Callable[[Any], Json], method: str, operation: Json) -> Responses:
    """Read the responses of an operation."""
    modes: Json = {}
    schemas: list[Json] = []
    silent: list[str] = []
    for stated, raw in mapping(operation.get("responses")).items():
        status = stated.upper()
        if not _SUCCESS.match(status):
            continue
        content = mapping(resolved(raw).get("content"))
        if method == "head" or status in ("204", "205"):
            modes[status] = "none"
            continue
        mode, schema = _read_as(scribe, content)
        if schema is None:
            silent.append(status)
        else:
            modes[status] = mode
            schemas.append(schema)
    if not schemas and (silent or not modes):
        modes |= dict.fromkeys(silent or ["2XX"], "any")
        return Responses({}, modes, {}, (UNCHECKED,))
    modes |= dict.fromkeys(silent, "none")
    if "none" in modes.values():
        schemas.append({"type": "null"})
    distinct = [schema for index, schema in enumerate(schemas) if schema not in schemas[:index]]
    stated_one = distinct[0] if len(distinct) == 1 else {"anyOf": distinct}
    schema, whole = scribe.finished(stated_one, most=MOST_RESPONSE_PARTS)
    if whole:
        return Responses(schema, modes, stated_one)
    key = scribe.fingerprint(stated_one)
    return Responses(schema, modes, stated_one, () if key else (PARTLY_CHECKED,), key)


def _read_as(scribe: Scribe, content: Json) -> tuple[str, Json | None]:
    """The format in which a response is read, and its schema; None if the document has no content for it."""
    media = next((media for media in content if is_json(media) and "*" not in media), None) or next(
        (media for media in content if is_json(media)), None
    )
    if media is not None:
        stated = mapping(content[media]).get("schema")
        if stated is None:
            return "any", None
        schema = scribe.schema(stated)
        if _is_bytes(scribe.resolved(schema)):
            return "file", FILE
        return ("any" if "*" in media else "json"), schema
    if not content:
        return "any", None
    return ("text", {"type": "string"}) if any(is_text(media) for media in content) else ("file", FILE)

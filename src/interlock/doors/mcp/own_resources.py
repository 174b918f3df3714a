"""Resources of Interlock's own: results that were kept instead of sent, parts of them, and traces of calls.

    payload:ID                              a result
    payload:ID?at=/items&start=0&stop=20    a part of it
    trace:ID                                the trace of a call

Each is for the caller that made the call.
"""

from __future__ import annotations

import base64
from typing import Final
from urllib.parse import parse_qsl

from interlock.api.service import Service
from interlock.call.artifacts import is_file
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.core.threads import WALKS
from interlock.data.canonical import encode
from interlock.data.schema import Json
from interlock.window.reading import Part, asked

TEMPLATE: Final[Json] = {
    "uriTemplate": "payload:{id}{?at,query,start,stop,tokens}",
    "name": "part_of_a_result",
    "title": "Part of a result",
    "description": (
        "A part of a result that was kept instead of sent: at a JSON pointer, by a JMESPath expression, from one item"
        " or character to another, within so many tokens."
    ),
    "mimeType": "application/json",
}


def is_own(uri: str) -> bool:
    return uri.startswith(("payload:", "trace:"))


async def read_own(service: Service, uri: str, caller: Caller) -> Json:
    """The content of a resource. E3702 if the caller made no such call."""
    if uri.startswith("trace:"):
        return _json(encode(await service.calls.trace(uri.removeprefix("trace:"), caller)))
    ref, question, query = uri.partition("?")
    if question:
        part = await service.app.read_part(ref, _part(query), caller=caller)
        return _json(await WALKS.run(encode, part))
    body = await service.app.read_payload(uri, caller=caller)
    return _file(body) if is_file(uri) else _json(body)


def _part(query: str) -> Part:
    """The part that the query of an address asks for; E3004 if it cannot be read."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=5)
        given: Json = dict(pairs)
        given |= {name: int(given[name]) for name in ("start", "stop", "tokens") if name in given}
        return asked(**given)
    except (ValueError, TypeError):
        words = "send at, query, start, stop or tokens, percent-encoded; the last three are whole numbers"
        raise Failure("E3004", "the address names no part", resolution=words) from None


def _json(body: bytes) -> Json:
    return {"mimeType": "application/json", "text": body.decode()}


def _file(body: bytes) -> Json:
    """A file that a tool left: text where it is text, and no claim as to what kind of text."""
    try:
        return {"mimeType": "text/plain", "text": body.decode()}
    except UnicodeDecodeError:
        return {"mimeType": "application/octet-stream", "blob": base64.b64encode(body).decode()}

"""Refusals that the MCP SDK makes itself, with the envelope that every failure has.

The SDK refuses some requests before any handler is asked: another method or media type, no protocol version that both
know, a session that is not there. It answers with a bare status, with plain text, or with a JSON-RPC error that has no
data, or data of the protocol's own. All answers of the SDK pass through here on their way out. A refusal leaves as a
JSON-RPC error with its own status, whose `data` holds the envelope beside what the protocol has there. Streams and
results pass as they are.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, cast

import orjson
from mcp import types

from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.doors.mcp.calling import no_trace
from interlock.http.asgi import Message, Send, answer

_JSON = b"application/json"
# By their status: the code, where it is not that of a malformed request, and what a client can do about it.
_CODES = {403: "E3206", 404: "E3702", 429: "E3407", 500: "E3000", 503: "E3001"}
_WORDS = {
    405: ("this HTTP method is not served at /mcp", "send requests by POST; open a stream by GET within a session"),
    406: ("the client must accept what /mcp answers with", "send `accept: application/json, text/event-stream`"),
    404: ("there is no such session", "open a new session with `initialize`"),
    409: ("the session has a stream open already", "use the stream that is open, or end it first"),
}
# Faults that the SDK explains with the words of its parser, which quote the request.
_QUOTING = ("Parse error", "Validation error")


class Enveloped:
    """A `send` for the SDK: what it refuses leaves with an envelope."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Message | None = None
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            # INVARIANT: the head of an answer that may be a refusal is held until its body is known.
            if message["status"] >= HTTPStatus.BAD_REQUEST or _media(message) == _JSON:
                self._head = message
                return
        elif self._head is not None and message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            head, self._head = self._head, None
            body = _refusal(head["status"], bytes(self._body))
            if body is not None:
                head = _headed(head, len(body))
            await self._send(head)
            await self._send({**message, "body": bytes(self._body) if body is None else body})
            return
        await self._send(message)


async def refuse(send: Send, status: int, failure: Failure, *headers: tuple[bytes, bytes]) -> None:
    """Refuse a request before the SDK sees it, in the same form."""
    error = {"code": _jsonrpc(status), "message": failure.message, "data": failure.envelope(no_trace())}
    await answer(send, status, orjson.dumps({"jsonrpc": "2.0", "id": None, "error": error}), headers)


def method_not_served() -> Failure:
    words, help_with = _WORDS[405]
    return Failure("E3004", words, resolution=help_with)


def asked_elsewhere() -> Failure:
    """The refusal of an answer to a question that another server asked."""
    return Failure(
        "E3411",
        "another server asked this question, so this one cannot take the answer",
        resolution="let the load balancer send requests with the same `Mcp-Session-Id` to the same server, or use"
        " protocol version 2026-07-28",
    )


def _refusal(status: int, body: bytes) -> bytes | None:
    """The body of a refusal, with the envelope; None where it needs none."""
    if status < HTTPStatus.BAD_REQUEST and b'"error"' not in body:
        return None
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    answer = cast("Json", document) if isinstance(document, dict) else {}
    if "result" in answer or ("error" not in answer and status < HTTPStatus.BAD_REQUEST):
        return None
    error = answer.get("error")
    if isinstance(error, dict) and "errorCode" in error:
        return None  # a failure of ours, in the form of the other doors
    fault: Json = dict(cast("Json", error)) if isinstance(error, dict) else {"code": _jsonrpc(status)}
    data: Any = fault.get("data")
    if isinstance(data, dict) and "errorCode" in data:
        return None
    return orjson.dumps({"jsonrpc": "2.0", "id": answer.get("id"), "error": _enveloped(status, fault)})


def enveloped(error: types.ErrorData) -> types.ErrorData:
    """A JSON-RPC error of the SDK with the envelope in its `data`, for wires without HTTP statuses."""
    fault: Json = error.model_dump(by_alias=True, exclude_unset=True)
    data: Any = fault.get("data")
    if isinstance(data, dict) and "errorCode" in data:
        return error
    status = HTTPStatus.SERVICE_UNAVAILABLE if error.code == types.CONNECTION_CLOSED else HTTPStatus.BAD_REQUEST
    return types.ErrorData.model_validate(_enveloped(status, fault))


def _enveloped(status: int, fault: Json) -> Json:
    """A fault with the words and the envelope of a failure, beside what the protocol has in its data."""
    data, failure = fault.get("data"), _failure(status, fault)
    members = cast("Json", data) if isinstance(data, dict) else {}
    return {**fault, "message": failure.message, "data": {**members, **failure.envelope(no_trace())}}


def _failure(status: int, fault: Json) -> Failure:
    of_status, help_with = _WORDS.get(status, ("the request is refused", None))
    words = str(fault.get("message") or of_status)
    for quoting in _QUOTING:
        if words.startswith(quoting):
            words = f"{quoting}: the body is not a JSON-RPC message that MCP knows"
    known = fault.get("code") == types.METHOD_NOT_FOUND  # a method that is not there is no session that is not there
    code = "E3004" if known else _CODES.get(status, "E3004" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "E3000")
    return Failure(code, words) if help_with is None or known else Failure(code, words, resolution=help_with)


def _jsonrpc(status: int) -> int:
    return types.INVALID_REQUEST if status < HTTPStatus.INTERNAL_SERVER_ERROR else types.INTERNAL_ERROR


def _media(head: Message) -> bytes:
    return next((value.partition(b";")[0].strip() for name, value in head["headers"] if name == b"content-type"), b"")


def _headed(head: Message, size: int) -> Message:
    """The head of an answer whose body is JSON of another length."""
    others = [one for one in head["headers"] if one[0].lower() not in (b"content-type", b"content-length")]
    return {**head, "headers": [*others, (b"content-type", _JSON), (b"content-length", str(size).encode())]}

"""Helpers of all HTTP endpoints: read a body within bounds, parse it, answer with JSON."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import orjson

from interlock.core.errors import Failure
from interlock.core.threads import INPUTS
from interlock.data.bounds import LARGE_INPUT, MOST_REQUEST_VALUES, check_values, exactly
from interlock.data.schema import Json

P = ParamSpec("P")
T = TypeVar("T")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY = 4 << 20
# A larger body is read in a thread.
LARGE_BODY = LARGE_INPUT
MOST_COMING = 256 << 20
_JSON = (b"content-type", b"application/json")


class Disconnected(Exception):  # noqa: N818 - not an error: the client has gone
    """The client went away before its request was whole."""


def header(scope: Scope, name: bytes) -> str | None:
    """A header's value; the first one, if it was sent twice."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


def headers(scope: Scope) -> dict[bytes, bytes]:
    """All headers; of one that was sent twice, the first value."""
    return dict(reversed(scope["headers"]))


def text(sent: Mapping[bytes, bytes], name: bytes) -> str | None:
    """A header's value as text; None if it was not sent."""
    value = sent.get(name)
    return None if value is None else value.decode("latin-1")


async def read_body(receive: Receive, *, most: int = MAX_BODY) -> bytes:
    """The whole body. E3309 if it is too large, E3001 if too much comes at once; the connection bounds its time."""
    message = await _next(receive)
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(body) > most:
            raise too_large(most)
        return body
    parts, size = [body], len(body)
    try:
        _coming.size += size
        while message.get("more_body", False):
            if size > most:
                raise too_large(most)
            if _coming.size > MOST_COMING:
                raise Failure("E3001", "too much is being sent to this server at once", retry_after_ms=1000)
            message = await _next(receive)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            _coming.size += len(parts[-1])
    finally:
        _coming.size -= size
    if size > most:
        raise too_large(most)
    return b"".join(parts)


class _Coming:
    """Bounds the memory of incomplete bodies of all requests together: they need no token."""

    size = 0


_coming = _Coming()


async def _next(receive: Receive) -> Message:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise Disconnected
    return message


def document(body: bytes, most_values: int = MOST_REQUEST_VALUES) -> Any:
    """The JSON value of a body. E3004 for what is none: JSON has no NaN, and no text that is not Unicode.

    E3004 also for a body of more values than `most_values`, or with a whole number of more than 308 digits.
    """
    try:
        check_values(body, most_values)
        return exactly(body)
    except orjson.JSONDecodeError as error:
        raise Failure("E3004", f"the body is not valid JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError):
        raise Failure(
            "E3004", "the body is not valid JSON, or nested too deep, or a number in it is too long"
        ) from None


async def read_document(body: bytes, most_values: int) -> Any:
    """`document`, beside the event loop where the body is large."""
    return await read_with(document, body, most_values)


async def read_with(read: Callable[Concatenate[bytes, P], T], body: bytes, *args: P.args, **named: P.kwargs) -> T:
    """Read a body, beside the event loop where it is large."""
    if len(body) <= LARGE_BODY:
        return read(body, *args, **named)
    return await INPUTS.run(read, body, *args, **named)


async def check_body(body: bytes, most_values: int) -> None:
    """Refuse (E3004) a large body of too many values, or with a number that is too long, beside the event loop."""
    await INPUTS.run(check_values, body, most_values)


def too_large(most: int) -> Failure:
    """The refusal of a request that is too large, at every door: 413 over HTTP, with the envelope."""
    return Failure("E3309", f"the request is larger than {most} bytes")


def server_ended() -> Failure:
    """The failure for requests that are cancelled because the server stops."""
    return Failure(
        "E3001",
        "this server ended before the request did",
        resolution="a call that was under way is on record; send it again with the same idempotency key",
        unsettled=True,
    )


async def answer(
    send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (), *, kind: bytes | None = None
) -> None:
    """A whole response; JSON unless it says otherwise."""
    kinds = _JSON if kind is None else (b"content-type", kind)
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [kinds, length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, failure: Failure, trace_id: str = "") -> None:
    """A failure that no call was made for."""
    document = refusal(failure, trace_id or os.urandom(16).hex())
    await answer(send, failure.row.http, orjson.dumps(document), retry_after(failure))


def refusal(failure: Failure, trace_id: str) -> Json:
    """The one form in which a failure leaves over HTTP."""
    return {"error": failure.envelope(trace_id), "detail": f"{failure.code}: {failure.message}"}


def retry_after(failure: Failure) -> tuple[tuple[bytes, bytes], ...]:
    if failure.retry_after_ms is None:
        return ()
    return ((b"retry-after", str(-(-failure.retry_after_ms // 1000)).encode()),)


def replay(body: bytes, receive: Receive) -> Receive:
    """A body that was read already, for an application that reads it itself; afterwards the real thing."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again

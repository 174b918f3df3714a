"""What the HTTP doors share: reading a body within bounds, answering with JSON, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import orjson

from interlock.core.errors import Failure
from interlock.core.schema import Json

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY = 4 << 20
BODY_S = 30.0
_JSON = (b"content-type", b"application/json")


class Disconnected(Exception):  # noqa: N818 - not an error: the client has gone
    """The client went away before its request was whole."""


def header(scope: Scope, name: bytes) -> str | None:
    """A header's value; the first one, if it was sent twice."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


async def read_body(receive: Receive, *, most: int = MAX_BODY) -> bytes:
    """The whole body. E3004 if it is too large, E3002 if it does not come."""
    within_s = BODY_S
    message = await _next(receive, within_s)
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(body) > most:
            raise too_large(most)
        return body
    parts, size = [body], len(body)
    deadline = asyncio.get_running_loop().time() + within_s
    while message.get("more_body", False):
        if size > most:
            raise too_large(most)
        message = await _next(receive, deadline - asyncio.get_running_loop().time())
        parts.append(message.get("body", b""))
        size += len(parts[-1])
    if size > most:
        raise too_large(most)
    return b"".join(parts)


async def _next(receive: Receive, within_s: float) -> Message:
    try:
        async with asyncio.timeout(max(0.0, within_s)):
            message = await receive()
    except TimeoutError:
        raise Failure("E3002", "the request's body did not come in time") from None
    if message["type"] == "http.disconnect":
        raise Disconnected
    return message


def too_large(most: int) -> Failure:
    return Failure("E3004", f"the request's body is larger than {most} bytes")


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
    await answer(send, failure.row.http, orjson.dumps(refusal(failure, trace_id)), retry_after(failure))


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

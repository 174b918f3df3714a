"""Answers a call with server-sent events, for clients that ask for them: its progress, then its answer.

    event: progress    data: {"percent": 50.0, "message": "half of it", …}
    event: answer      data: {"status": 200, "body": …}

The body is the one that the client would get otherwise, and the status that of its response. A client that goes away
does not end the call, as without a stream. Of progress that comes faster than the client reads, the latest is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from interlock.data.canonical import encode
from interlock.data.schema import Json
from interlock.http.asgi import Receive, Scope, Send
from interlock.http.route import Reply, ResponseStream, guarded

# How long a stream is silent at most: what sits between may cut a connection on which nothing moves.
SILENCE_S = 15.0
EVENTS = b"text/event-stream"
_HEADERS = [(b"content-type", EVENTS), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]

Make = Callable[[Callable[[Json], None]], Awaitable[Reply]]


def streamed(make: Make, may_hear: Callable[[], bool]) -> ResponseStream:
    """The answer to a call that `make` makes. Progress is sent while `may_hear`: a token may expire."""

    async def app(_: Scope, __: Receive, send: Send) -> None:
        news: asyncio.Queue[Json] = asyncio.Queue(1)
        making = asyncio.ensure_future(make(lambda record: _replace(news, record)))
        try:
            with contextlib.suppress(OSError):  # the client went away
                await _send(making, news, may_hear, send)
            await making
        finally:
            making.cancel()  # only a server that stops ends the call

    return ResponseStream(guarded(app))


def _replace(news: asyncio.Queue[Json], record: Json) -> None:
    if news.full():
        news.get_nowait()
    news.put_nowait(record)


async def _send(
    making: asyncio.Future[Reply], news: asyncio.Queue[Json], may_hear: Callable[[], bool], send: Send
) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    coming = asyncio.ensure_future(news.get())
    try:
        while not making.done():
            await asyncio.wait({making, coming}, timeout=SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                event, coming = coming.result(), asyncio.ensure_future(news.get())
                if may_hear():
                    await _write(send, b"event: progress\ndata: " + encode(event))
            elif not making.done():
                await _write(send, b": nothing new")
    finally:
        coming.cancel()
    reply = making.result()
    data = b'{"status":%d,"body":%b}' % (reply.status, reply.body)
    await send({"type": "http.response.body", "body": b"event: answer\ndata: " + data + b"\n\n"})


async def _write(send: Send, frame: bytes) -> None:
    await send({"type": "http.response.body", "body": frame + b"\n\n", "more_body": True})

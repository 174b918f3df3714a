"""Watches calls that take long: their clients may give up on them, and are kept waiting by comments until then.

A client of the modern era cancels by closing its connection. Most calls end before anybody could: a client is watched
only after some time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from interlock.http.asgi import Receive, Scope, Send
from interlock.http.route import Reply, ResponseStream, guarded, send_reply

if TYPE_CHECKING:
    from interlock.doors.mcp.calling import RunningCall

PING_AFTER_S = 15.0
_SSE = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"connection", b"keep-alive"),
    (b"x-accel-buffering", b"no"),
]


async def watched(
    call: RunningCall, answer: Callable[[], Awaitable[Reply]], after_s: float = 0.0
) -> Reply | ResponseStream:
    """The answer to a call that its client may give up on: a stream if it has not ended after `after_s`."""
    if after_s > 0:
        # `asyncio.wait` does the same at several times the cost.
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake(_: Any = None) -> None:
            if not waiter.done():
                waiter.set_result(None)

        call.task.add_done_callback(wake)
        timer = loop.call_later(after_s, wake)
        try:
            await waiter
        except asyncio.CancelledError:
            call.give_up()
            raise
        finally:
            timer.cancel()
    if call.task.done():
        return await answer()

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await _watch(call, answer, receive, send)

    return ResponseStream(guarded(app))


async def _watch(call: RunningCall, answer: Callable[[], Awaitable[Reply]], receive: Receive, send: Send) -> None:
    """Answer when the call is done, unless its client goes first: then the call is cancelled, on record."""
    gone = asyncio.ensure_future(receive())
    streaming = False
    try:
        while True:
            await asyncio.wait({call.task, gone}, timeout=PING_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
            if call.task.done() or gone.done():
                break
            if not streaming:
                streaming = True
                await send({"type": "http.response.start", "status": 200, "headers": _SSE})
            await send({"type": "http.response.body", "body": b": ping\r\n\r\n", "more_body": True})
        if not call.task.done():
            return
        made = await answer()
        if streaming:
            await send({"type": "http.response.body", "body": b"event: message\r\ndata: " + made.body + b"\r\n\r\n"})
        else:
            await send_reply(send, made)
    finally:
        gone.cancel()
        call.give_up()

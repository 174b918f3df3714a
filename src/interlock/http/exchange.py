"""One HTTP request and its answer, between the connection, which reads and writes, and the route that answers.

A route's reply is written in one piece. An ASGI application's answer whose length is known is held until its body is
there, and written in one piece; others are sent as they come.
"""

from __future__ import annotations

import asyncio
import http
import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import orjson

from interlock.core.errors import Failure
from interlock.http.asgi import Disconnected, Message, Scope, refusal, server_ended, too_large
from interlock.http.request_cache import CachedHead
from interlock.http.route import NO_BODY, Handler, Reply, Route, respond

if TYPE_CHECKING:
    from uvicorn.server import ServerState

# Of a body, what is kept before somebody reads it.
_AHEAD = 64 << 10
_STATUS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}
_STATUS[499] = b"HTTP/1.1 499 Client Closed Request\r\n"  # not registered, but the table of errors has it

_log = logging.getLogger("interlock.doors")


class Wire(Protocol):
    """The connection, as far as one request needs it."""

    transport: asyncio.Transport
    server: ServerState
    # To be awaited before more is written, while the client has not read enough; else None.
    writable: asyncio.Event | None

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def answered(self, exchange: Exchange) -> None:
        """An answer is out."""
        ...


class Exchange:
    """One request and its answer, as a route sees them."""

    __slots__ = (
        "_asked", "_body", "_chunked", "_failure", "_given", "_gone", "_head", "_hung_up", "_late", "_left",
        "_news", "_unread", "_wire", "begun", "cached", "done", "keep_alive", "scope", "task", "whole",
    )  # fmt: skip

    task: asyncio.Task[None]

    def __init__(self, wire: Wire, scope: Scope, keep_alive: bool, whole: bool = False) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.whole = whole
        self._wire = wire
        # What came of the body and nobody has read yet, in pieces: a body may come byte by byte.
        self._body: list[bytes] = []
        self._unread = 0
        self._head = b""
        self.done = self.begun = self._asked = self._given = self._late = self._gone = self._hung_up = False
        self._chunked = False
        self._news: asyncio.Event | None = None
        self._failure: Failure | None = None
        # The request's head, if the connection has cached it.
        self.cached: CachedHead | None = None
        # What is to come of a body whose length was said.
        self._left: int | None = 0

    async def run(self, route: Route, handler: Handler | None = None, body: bytes = b"") -> None:
        """Have the route answer; or the handler that it prepared for the same head, with the whole body."""
        try:
            if handler is None:
                answer, handler = await respond(route, self.scope, self.receive)
                if self.cached is not None:
                    self.cached.handler = handler
            else:
                self._given = True
                try:
                    if len(body) > handler.max_body:
                        raise too_large(handler.max_body)  # noqa: TRY301 - refused as one that is still being read
                    answer = await handler(body)
                except Exception as error:  # noqa: BLE001 - an endpoint answers whatever happens
                    answer = handler.refuse(error)
            if isinstance(answer, Reply):
                await self._reply(answer)
            else:
                if self.cached is not None and self.scope is self.cached.scope:
                    self.scope = self.cached.scope_for(len(body))
                await answer.app(self.scope, self.receive, self.send)
        except Disconnected:
            pass
        except asyncio.CancelledError:
            # Nobody cancels a request but a server that ends and has waited long enough.
            self._failure = server_ended()
            raise
        except Exception:  # noqa: BLE001 - whatever an application does, its client is told
            _log.exception("a request failed")
        finally:
            # Until here, whoever ends the server waits for the request.
            self._wire.server.tasks.discard(self.task)
            if not self.done and not self._gone:
                self._break_off()

    # The request, as the connection reads it

    def feed(self, body: bytes) -> None:
        self._body.append(body)
        self._unread += len(body)
        if self._unread > _AHEAD:
            self._wire.pause_reading()
        self._tell()

    def end(self) -> None:
        self.whole = True
        self._tell()

    def give_up(self) -> None:
        self._late = True
        self._tell()

    def lose(self) -> None:
        self._gone = True
        self._tell()

    def hang_up(self) -> None:
        """The client has no more to say and may have gone: whoever watches for that is told, and may still answer."""
        self._hung_up = True
        self._tell()

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()

    async def receive(self) -> Message:
        """The next part of the body; when all is read, the news that the client has gone or the answer is out."""
        if not self.whole and not self._asked and not self.begun:
            self._asked = True
            self._ask_for_body()
        while not (self._gone or self.done):
            if self._body or (self.whole and not self._given):
                body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
                self._body, self._unread, self._given = [], 0, self.whole
                return {"type": "http.request", "body": body, "more_body": not self.whole}
            if self._hung_up:
                break
            if self._late:
                raise Failure("E3002", "the request's body did not come in time")
            self._wire.resume_reading()
            news = self._news = self._news or asyncio.Event()
            news.clear()
            await news.wait()
        return {"type": "http.disconnect"}

    def _ask_for_body(self) -> None:
        """Some clients send a body only when it is wanted."""
        if any(name == b"expect" and value.lower() == b"100-continue" for name, value in self.scope["headers"]):
            self._wire.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # The answer, as the application gives it

    async def send(self, message: Message) -> None:
        while not self._gone and (writable := self._wire.writable) is not None:
            await writable.wait()
        if self._gone:
            return
        if message["type"] == "http.response.start" and not self.begun:
            self._start(message["status"], message.get("headers", ()))
        elif message["type"] == "http.response.body" and self.begun and not self.done:
            self._say(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"an application may not send {message['type']} here")

    async def _reply(self, reply: Reply) -> None:
        """Send a whole answer, with the bytes that a `send` of its head and its body would give it."""
        wire = self._wire
        while not self._gone and (writable := wire.writable) is not None:
            await writable.wait()
        if self._gone:
            return
        status, body, headers = reply
        about = b"" if status in NO_BODY else b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        further = _lines(headers) if headers else b""
        closing = b"" if self.keep_alive else b"connection: close\r\n"
        if self.scope["method"] == "HEAD":
            body = b""
        common = _common.lines if _common.headers is wire.server.default_headers else _common_headers(wire)
        wire.transport.write(b"".join((_STATUS[status], common, about, further, closing, b"\r\n", body)))
        self.begun = self.done = True
        if self._news is not None:
            self._news.set()
        wire.answered(self)

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.begun = True
        length: int | None = None
        closes = False
        lines = [_STATUS[status], _common_headers(self._wire)]
        for name, value in headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                closes = b"close" in value.lower()
            elif name == b"transfer-encoding":
                continue
            lines.append(b"%b: %b\r\n" % (name, value))
        if closes:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close\r\n")
        streams = length is None and status not in NO_BODY and self.scope["method"] != "HEAD"
        # To older clients a stream is what comes until the connection ends.
        self._chunked = streams and self.scope["http_version"] == "1.1"
        if self._chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        head = b"".join(lines)
        if not _has_lines(head, len(lines) - 1 + lines[1].count(b"\n")):
            self.begun = False
            raise RuntimeError("a header's value is not of one line")
        self._left = None if streams else length or 0
        if length is None:
            self._wire.transport.write(head)
        else:
            self._head = head

    def _say(self, body: bytes, *, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            body, self._left = b"", 0
        elif self._chunked:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"" if more else b"0\r\n\r\n")
        elif self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (self._left > 0 and not more):
                raise RuntimeError("an answer is not of the length it said")
        if self._head:
            body, self._head = self._head + body, b""
        if body:
            self._wire.transport.write(body)
        if not more:
            self.done = True
            self._tell()
            self._wire.answered(self)

    def _break_off(self) -> None:
        """An application ended without an answer, or in the middle of one."""
        if self._hung_up or (self.begun and not self._head):
            self._wire.transport.close()
            return
        self.begun, self._head, self.keep_alive = False, b"", False
        failure = self._failure or Failure("E3000", "something went wrong inside Interlock")
        body = orjson.dumps(refusal(failure, os.urandom(16).hex()))
        headers = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)))
        self._start(failure.row.http, headers)
        self._say(body, more=False)


class _Common:
    """The headers that every answer has, and the same as they are sent. uvicorn makes new ones each second."""

    headers: object = None
    lines = b""


_common = _Common()


def _common_headers(wire: Wire) -> bytes:
    headers = wire.server.default_headers
    if headers is not _common.headers:
        _common.headers, _common.lines = headers, b"".join(b"%b: %b\r\n" % one for one in headers)
    return _common.lines


def _lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers as they are sent."""
    lines = [b"%b: %b\r\n" % one for one in headers]
    text = b"".join(lines)
    if not _has_lines(text, len(lines)):
        raise RuntimeError("a header's value is not of one line")
    return text


def _has_lines(text: bytes, count: int) -> bool:
    """Whether header lines are as many as they should be.

    A line break in a value would be a header, or an answer, of somebody else's making.
    """
    return text.count(b"\n") == count == text.count(b"\r") and 0 not in text

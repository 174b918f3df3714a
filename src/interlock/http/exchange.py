"""One HTTP request and its answer, between the connection, which reads and writes, and the route that answers.

A route's reply is written in one piece. An ASGI application's answer whose length is known is held until its body is
there, and written in one piece; others are sent as they come.
"""

from __future__ import annotations

import asyncio
import http
import logging
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import orjson

from interlock.core.errors import Failure
from interlock.http.asgi import Disconnected, Message, Scope, refusal, server_ended, too_large
from interlock.http.request_cache import CachedHead
from interlock.http.route import NO_BODY, Handler, PerRequest, Reply, Route, respond

if TYPE_CHECKING:
    from uvicorn.server import ServerState

# Bytes of a body that are held before an application reads them.
_MOST_UNREAD = 64 << 10
_STATUS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}
_STATUS[499] = b"HTTP/1.1 499 Client Closed Request\r\n"  # not registered, but the table of errors has it

_NONE: PerRequest = {}

_log = logging.getLogger("interlock.doors")


class ClientConnection(Protocol):
    """The connection, as far as one request needs it."""

    transport: asyncio.Transport
    server: ServerState
    # To be awaited before more is written, while the client has not read enough; otherwise None.
    writable: asyncio.Event | None

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def answered(self, exchange: Exchange) -> None:
        """Continue after an answer has been sent."""
        ...


class Exchange:
    """One request and its answer, as a route sees them."""

    __slots__ = (
        "_body", "_body_delivered", "_body_requested", "_bytes_left", "_changed", "_chunked", "_connection",
        "_disconnected", "_failure", "_half_closed", "_head", "_timed_out", "_unread", "cached", "complete", "done",
        "keep_alive", "scope", "started", "task", "values",
    )  # fmt: skip

    task: asyncio.Task[None]

    def __init__(self, connection: ClientConnection, scope: Scope, keep_alive: bool, complete: bool = False) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.complete = complete
        self._connection = connection
        # Received pieces of the body that are not read yet: a body may arrive byte by byte.
        self._body: list[bytes] = []
        self._unread = 0
        self._head = b""
        self.started = self.done = self._chunked = False
        self._body_requested = self._body_delivered = self._timed_out = False
        self._disconnected = self._half_closed = False
        self._changed: asyncio.Event | None = None
        self._failure: Failure | None = None
        # The request's head, if the connection has cached it.
        self.cached: CachedHead | None = None
        # The values of that head in this request.
        self.values: Sequence[bytes] = ()
        # Bytes that are still to be sent of an answer with a stated length.
        self._bytes_left: int | None = 0

    async def run(
        self, route: Route, handler: Handler | None = None, body: bytes = b"", sent: PerRequest = _NONE
    ) -> None:
        """Have the route answer; or the handler of a cached head, with the body and the headers of this one request."""
        try:
            if handler is None:
                answer, handler = await respond(route, self.scope, self.receive)
                if self.cached is not None:
                    self.cached.handler = handler
            else:
                self._body_delivered = True
                try:
                    if len(body) > handler.max_body:
                        raise too_large(handler.max_body)  # noqa: TRY301 - refused as one that is still being read
                    answer = await handler(body, sent)
                except Exception as error:  # noqa: BLE001 - an endpoint answers whatever happens
                    answer = handler.refuse(error, sent)
            if isinstance(answer, Reply):
                await self._reply(answer)
            else:
                if self.cached is not None and self.scope is self.cached.scope:
                    self.scope = self.cached.scope_for(self.values)
                await answer.app(self.scope, self.receive, self.send)
        except Disconnected:
            pass
        except asyncio.CancelledError:
            # Only a server that stops cancels requests, after it has waited long enough.
            self._failure = server_ended()
            raise
        except Exception:  # noqa: BLE001 - whatever an application does, its client gets an answer
            _log.exception("a request failed")
        finally:
            # Until here, the shutdown of the server waits for the request.
            self._connection.server.tasks.discard(self.task)
            if not self.done and not self._disconnected:
                self._abort()

    # The request, as the connection reads it

    def feed(self, body: bytes) -> None:
        self._body.append(body)
        self._unread += len(body)
        if self._unread > _MOST_UNREAD:
            self._connection.pause_reading()
        self._notify()

    def end(self) -> None:
        self.complete = True
        self._notify()

    def time_out(self) -> None:
        self._timed_out = True
        self._notify()

    def disconnect(self) -> None:
        self._disconnected = True
        self._notify()

    def half_close(self) -> None:
        """Note the end of the client's input: it may have disconnected. The application may still answer."""
        self._half_closed = True
        self._notify()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()

    async def receive(self) -> Message:
        """The next part of the body; after that, `http.disconnect` when the client has gone or the answer was sent."""
        if not self.complete and not self._body_requested and not self.started:
            self._body_requested = True
            self._ask_for_body()
        while not (self._disconnected or self.done):
            if self._body or (self.complete and not self._body_delivered):
                body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
                self._body, self._unread, self._body_delivered = [], 0, self.complete
                return {"type": "http.request", "body": body, "more_body": not self.complete}
            if self._half_closed:
                break
            if self._timed_out:
                raise Failure("E3002", "the request's body did not come in time")
            self._connection.resume_reading()
            changed = self._changed = self._changed or asyncio.Event()
            changed.clear()
            await changed.wait()
        return {"type": "http.disconnect"}

    def _ask_for_body(self) -> None:
        """Send `100 Continue` to a client that waits for it before it sends the body."""
        if any(name == b"expect" and value.lower() == b"100-continue" for name, value in self.scope["headers"]):
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # The answer, as the application gives it

    async def send(self, message: Message) -> None:
        while not self._disconnected and (writable := self._connection.writable) is not None:
            await writable.wait()
        if self._disconnected:
            return
        if message["type"] == "http.response.start" and not self.started:
            self._start(message["status"], message.get("headers", ()))
        elif message["type"] == "http.response.body" and self.started and not self.done:
            self._send_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"an application may not send {message['type']} here")

    async def _reply(self, reply: Reply) -> None:
        """Send a complete answer, with the bytes that a `send` of its head and its body would give it."""
        connection = self._connection
        while not self._disconnected and (writable := connection.writable) is not None:
            await writable.wait()
        if self._disconnected:
            return
        status, body, headers = reply
        about = b"" if status in NO_BODY else b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        further = _lines(headers) if headers else b""
        closing = b"" if self.keep_alive else b"connection: close\r\n"
        if self.scope["method"] == "HEAD":
            body = b""
        common = _common.lines if _common.headers is connection.server.default_headers else _common_headers(connection)
        connection.transport.write(b"".join((_STATUS[status], common, about, further, closing, b"\r\n", body)))
        self.started = self.done = True
        if self._changed is not None:
            self._changed.set()
        connection.answered(self)

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.started = True
        length: int | None = None
        closes = False
        lines = [_STATUS[status], _common_headers(self._connection)]
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
        # An HTTP/1.0 client reads a stream until the connection is closed.
        self._chunked = streams and self.scope["http_version"] == "1.1"
        if self._chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        head = b"".join(lines)
        if not _has_lines(head, len(lines) - 1 + lines[1].count(b"\n")):
            self.started = False
            raise RuntimeError("a header's value is not of one line")
        self._bytes_left = None if streams else length or 0
        if length is None:
            self._connection.transport.write(head)
        else:
            self._head = head

    def _send_body(self, body: bytes, *, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            body, self._bytes_left = b"", 0
        elif self._chunked:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"" if more else b"0\r\n\r\n")
        elif self._bytes_left is not None:
            self._bytes_left -= len(body)
            if self._bytes_left < 0 or (self._bytes_left > 0 and not more):
                raise RuntimeError("an answer does not have the length that it stated")
        if self._head:
            body, self._head = self._head + body, b""
        if body:
            self._connection.transport.write(body)
        if not more:
            self.done = True
            self._notify()
            self._connection.answered(self)

    def _abort(self) -> None:
        """Answer in place of an application that ended without an answer, or cut off an answer that it began."""
        if self._half_closed or (self.started and not self._head):
            self._connection.transport.close()
            return
        self.started, self._head, self.keep_alive = False, b"", False
        failure = self._failure or Failure("E3000", "something went wrong inside Interlock")
        body = orjson.dumps(refusal(failure, os.urandom(16).hex()))
        headers = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)))
        self._start(failure.row.http, headers)
        self._send_body(body, more=False)


class _Common:
    """The headers that every answer has, and the same as they are sent. uvicorn makes new ones each second."""

    headers: object = None
    lines = b""


_common = _Common()


def _common_headers(connection: ClientConnection) -> bytes:
    headers = connection.server.default_headers
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

    A line break in a value would let its author add headers or a whole answer.
    """
    return text.count(b"\n") == count == text.count(b"\r") and 0 not in text

"""One HTTP connection: uvicorn's, with bounds on what a client may make it wait for, keep or leave open.

    head ──► body ──► answer          a bound on the size and time of a head, here; of a body, where it is read
      │        │         └─ not read by the client: STALLED_S, then the connection is cut
      │        └─ still coming when the answer is out: LINGER_S
      └─ never comes: HEAD_S

A client that sends nothing, sends its request byte by byte or without end, or asks and never reads would otherwise hold
a connection, and what waits to be sent on it, for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD = 64 << 10
HEAD_S = 15.0
LINGER_S = 5.0
STALLED_S = 60.0
MAX_CONNECTIONS = 4096


class Connection(HttpToolsProtocol):
    """Counts what comes before a request's headers are complete, and how long everything takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._in_body = False
        self._head = 0
        self._refused = False
        self._answering: RequestResponseCycle | None = None
        self._hurry: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as in uvicorn
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._end(b"503 Service Unavailable")
            return
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._calm()
        self.resume_writing()
        # uvicorn tells the newest request only, and one that came before it may still be answered.
        if self._answering is not None and self._answering is not self.cycle:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    # Reading

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_head:
            self._head += len(data)
            if self._hurry is None:
                self._watch_head()
        super().data_received(data)
        if self._in_head and self._head > MAX_HEAD:
            self._refused = True
            self._end(b"431 Request Header Fields Too Large")

    def on_header(self, name: bytes, value: bytes) -> None:
        # What follows a body is no header: it would come after everybody has looked, and without a bound.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._calm()
        super().on_headers_complete()
        # We speak nothing but HTTP, and what follows cannot be read as that any more, not even this request's body.
        if self._upgrades():
            self.cycle.keep_alive = False
        # Behind a stream without end nothing would be answered, nor would anybody see that the client has gone.
        if self._answering is not None and self._answering is not self.cycle and is_news(self._answering.scope):
            self.transport.close()

    def _upgrades(self) -> bool:
        return cast("Any", self.parser).should_upgrade()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        # Idle between requests is uvicorn's affair (timeout_keep_alive); the next byte starts our clock.
        self._in_head, self._in_body, self._head = True, False, 0
        if self._answering is None or self._answering.response_complete:
            self._calm()

    # Answering

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._calm()
            self._hurry = self.loop.call_later(LINGER_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    # Ending

    def shutdown(self) -> None:
        """Begin to end: at once where nobody waits for an answer, or for one that is not about to come."""
        cycle = self._answering
        if cycle is None or cycle.response_complete or cycle.more_body or is_news(cycle.scope):
            self.transport.close()
        else:
            cycle.keep_alive = False

    def _watch_head(self) -> None:
        self._hurry = self.loop.call_later(HEAD_S, self._late)

    def _late(self) -> None:
        if self._answering is not None and not self._answering.response_complete:
            self._watch_head()  # the next request may wait while this one is answered, and we may not be reading it
        else:
            self._end(b"408 Request Timeout")

    def _calm(self) -> None:
        if self._hurry is not None:
            self._hurry.cancel()
            self._hurry = None

    def _end(self, status: bytes) -> None:
        self._calm()
        if self.transport.is_closing():
            return
        self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        if self._refused and self.transport.can_write_eof():
            # To close on a client that still sends would take the answer from it.
            self.transport.write_eof()
            self._hurry = self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self.transport.close()


def is_news(scope: Any) -> bool:
    """Whether a request asks to be told of things for as long as they happen: no call hangs on it."""
    path: str = scope["path"]
    return (scope["method"] == "GET" and (path == "/mcp" or path.endswith("/events"))) or (
        (b"mcp-method", b"subscriptions/listen") in scope["headers"]
    )

"""One HTTP connection: uvicorn's, with bounds on the head of a request and on how many connections there are.

A client that sends nothing, sends its request line byte by byte, or sends headers without end would otherwise hold a
connection for ever. Bodies are bounded where they are read.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 << 10
HEAD_S = 15.0
MAX_CONNECTIONS = 4096


class Connection(HttpToolsProtocol):
    """Counts what comes before a request's headers are complete, and how long that takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head = 0
        self._hurry: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as in uvicorn
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._end(b"503 Service Unavailable")
            return
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._calm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head += len(data)
            if self._hurry is None:
                self._watch_head()
        super().data_received(data)
        if self._in_head and self._head > MAX_HEAD:
            self._end(b"431 Request Header Fields Too Large")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._calm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        # Idle between requests is uvicorn's affair (timeout_keep_alive); the next byte starts our clock.
        self._in_head, self._head = True, 0

    def _watch_head(self) -> None:
        self._hurry = self.loop.call_later(HEAD_S, self._end, b"408 Request Timeout")

    def _calm(self) -> None:
        if self._hurry is not None:
            self._hurry.cancel()
            self._hurry = None

    def _end(self, status: bytes) -> None:
        self._calm()
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()

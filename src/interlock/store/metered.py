"""HTTP/1 answers that are handed to the parser in bounded parts, on connections that end when they are flooded.

The library parses whatever has arrived at once, up to 256 KiB. That is 40,000 chunks of one byte, or 10,000 answers
`100 Continue`, in one turn of the event loop, and there is no end to them. Here the parser gets a small part first.
Where most of it was payload, the rest follows at once, so an honest answer costs nothing more. Where it was not, the
rest follows part by part, and what is not payload is counted: a connection that sends much more of it than payload is
cut.

A connection that sends anything while no request waits for an answer is cut as well. The library would give it to the
next request as its answer.

Loaded with the first session: the library is slow to load.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

_PART = 4096
# Heads, sizes of chunks and answers before the answer: so many bytes, and as many as there are of payload.
MOST_OVERHEAD = 1 << 18


class Flooded(aiohttp.ClientConnectionError):
    """The other side sent next to nothing in very many pieces."""


class MeteredHandler(ResponseHandler):
    """A client's connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._unread = bytearray()
        self._scheduled = False
        self._overhead = 0
        self._answered = False

    @property
    def should_close(self) -> bool:
        return bool(self._unread) or super().should_close

    def set_response_params(self, *args: Any, **named: Any) -> None:
        self._overhead = 0  # another request
        self._answered = False
        super().set_response_params(*args, **named)

    def feed_data(self, data: Any, size: int = 0) -> None:
        self._answered = self._answered or data[0].code >= 200
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        done = self._answered and (self._payload is None or self._payload.is_eof())
        if data and done and self.transport is not None:
            self._should_close = True
            self.transport.abort()
            return
        if not data or (len(data) <= _PART and not self._unread):
            self._feed(data)
            return
        self._unread += data
        if not self._scheduled:
            self._pass_on()

    def resume_reading(self, *args: Any, **named: Any) -> None:
        super().resume_reading(*args, **named)
        if self._unread:
            self._later()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._unread and self._overhead <= MOST_OVERHEAD:
            rest, self._unread = bytes(self._unread), bytearray()
            self._feed(rest)
        self._unread.clear()
        super().connection_lost(exc)

    def _later(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._pause_transport_reading()
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        self._pass_on()

    def _pass_on(self) -> None:
        """Hand on a part; the rest too if the part was mostly payload."""
        while self._unread:
            if self._reading_paused:  # whoever reads the payload has enough of it
                self._pause_transport_reading()
                return
            part = bytes(self._unread[:_PART])
            del self._unread[:_PART]
            dense = self._feed(part)
            if self._unread and dense:
                rest, self._unread = bytes(self._unread), bytearray()
                self._feed(rest)
            elif self._unread:
                self._later()
                return
        if not self._reading_paused and not self._buffer_paused:
            self._resume_transport_reading()

    def _feed(self, data: bytes) -> bool:
        """Have some bytes parsed; whether most of them were payload."""
        before, had = self._payload, 0 if self._payload is None else self._payload.total_bytes
        super().data_received(data)
        payload = self._payload
        total = 0 if payload is None else payload.total_bytes
        gained = total - had if payload is before else total
        self._overhead += max(0, len(data) - gained)
        if self._overhead > MOST_OVERHEAD + total and self.transport is not None:
            self._unread.clear()
            self.set_exception(Flooded())
            if payload is not None:
                payload.set_exception(Flooded())
            self.transport.abort()
        return 2 * gained >= len(data)

"""Bytes and HTTP events of one end of a connection, and pumping in two directions."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import h11

if TYPE_CHECKING:
    from interlock.executors.egress.streams import Streams

PIECE = 64 * 2**10
_FAREWELL_PIECES = 64
_EVENTS_A_TURN = 32


class RefusedError(Exception):
    """A refused request. The status is for the client, reason and code for the record."""

    def __init__(self, reason: str, *, status: int = 403, limit: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.limit = limit


class TunnelStream:
    """One end of a connection. Counters are called after bytes were read and before they are written."""

    def __init__(self, streams: Streams, on_read: Callable[[int], None], on_write: Callable[[int], None]) -> None:
        self._reader, self._writer = streams
        self._on_read = on_read
        self._on_write = on_write

    async def read(self) -> bytes:
        data = await self._reader.read(PIECE)
        self._on_read(len(data))
        return data

    async def write(self, data: bytes) -> None:
        self._on_write(len(data))
        self._writer.write(data)
        await self._writer.drain()

    def end(self) -> None:
        """Signal that nothing more will be written."""
        self._writer.write_eof()

    async def farewell(self, last_words: bytes, seconds: float) -> None:
        """Close it so that the other side can read what was written: unread bytes of theirs would
        otherwise destroy it.
        """
        try:
            async with asyncio.timeout(seconds):
                if last_words:
                    self._writer.write(last_words)
                self.end()
                for _ in range(_FAREWELL_PIECES):
                    if not await self._reader.read(PIECE):
                        break
        except OSError:
            pass  # gone already, or slow to close
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop it at once, with everything that is still to be written."""
        self._writer.transport.abort()

    def reset(self) -> None:
        """Close it with a reset, so that it is not taken for an orderly end."""
        connection: socket.socket = self._writer.get_extra_info("socket")
        if not self._writer.transport.is_closing():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()


class Peer:
    """One end of an HTTP conversation: a stream, and the state machine that reads and writes it."""

    def __init__(self, role: type[h11.CLIENT] | type[h11.SERVER], stream: TunnelStream, head_bytes: int) -> None:
        self.stream = stream
        self.http = h11.Connection(role, max_incomplete_event_size=head_bytes)
        self._ended = False
        self._events = 0

    async def hear(self) -> h11.Event | type[h11.PAUSED]:
        """Return the next event of the other end.

        RefusedError for an invalid client, OSError for an invalid upstream.
        """
        try:
            while True:
                event = self.http.next_event()
                self._events += 1
                if self._events % _EVENTS_A_TURN == 0:
                    # Many small pieces are read without waiting: yield to others in between.
                    await asyncio.sleep(0)
                if event is not h11.NEED_DATA:
                    return event  # pyright: ignore[reportReturnType] - a sentinel that is a class does not narrow
                data = await self.stream.read()
                self._ended = self._ended or not data
                self.http.receive_data(data)
        except h11.RemoteProtocolError:
            if self.http.our_role is h11.CLIENT or self._ended:
                raise ConnectionError("the other end broke off or does not speak HTTP") from None
            raise RefusedError("what was sent is not a request that can be read in one way only", status=400) from None

    async def send(self, event: h11.Event) -> None:
        data = self.http.send(event)
        if data:
            await self.stream.write(data)


async def until(goal: Coroutine[Any, Any, None], aside: Coroutine[Any, Any, None]) -> None:
    """Run both until the first is done or either fails."""
    main, side = asyncio.create_task(goal), asyncio.create_task(aside)
    try:
        await asyncio.wait((main, side), return_when=asyncio.FIRST_COMPLETED)
        if not main.done():
            side.result()
        await main
    finally:
        main.cancel()
        side.cancel()
        await asyncio.gather(main, side, return_exceptions=True)


async def pump(source: TunnelStream, sink: TunnelStream) -> None:
    """Pass bytes on until their end, and the end too."""
    while data := await source.read():
        await sink.write(data)
    sink.end()

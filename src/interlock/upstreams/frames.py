"""WebSocket connections that pass a bounded number of frames to the library in one turn of the event loop.

The library parses everything that has arrived at once, up to 256 KiB, and answers each ping. If the frames are small,
that is more than 100,000 in one turn. Here the frames are found in the bytes first (only their lengths are read),
counted, and passed on a few at a time. A connection that exceeds its allowance is cut.

Imported when the first connection is opened, because the library is slow to load.
"""

from __future__ import annotations

import asyncio
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.protocol import State

from interlock.upstreams.response_limits import PER_TURN, Allowance

_HEAD_END = b"\r\n\r\n"


class MeteredConnection(ClientConnection):
    """A client's connection under an allowance."""

    def __init__(self, *args: Any, allowance: Allowance, **options: Any) -> None:
        super().__init__(*args, **options)
        self.allowance = allowance
        self.flooded = False
        self._unread = bytearray()
        self._payload_left = 0
        self._scheduled = False
        self._held = False  # set by the library, which has more messages than were read
        self._paused = False
        self._tail = b""  # the last bytes of the handshake's answer that were passed on

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.recv_messages.pause = self._hold
        self.recv_messages.resume = self._go_on

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if not self._scheduled and not self._held:
            self._pass_on()
        self._flow()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread.clear()
        super().connection_lost(exc)

    def _hold(self) -> None:
        self._held = True
        self._flow()

    def _go_on(self) -> None:
        self._held = False
        self._later()
        self._flow()

    def _later(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if not self._held:
            self._pass_on()
        self._flow()

    def _flow(self) -> None:
        """Read from the network only while nothing waits here."""
        wanted = self._held or self._scheduled
        if wanted != self._paused and not self.transport.is_closing():
            self._paused = wanted
            (self.transport.pause_reading if wanted else self.transport.resume_reading)()

    def _pass_on(self) -> None:
        """Pass on the frames of one turn, and schedule the rest."""
        if self.transport.is_closing():
            self._unread.clear()
            return
        if self.protocol.state is State.CONNECTING:
            ready, frames = self._head(), 0
        elif self.protocol.state is State.OPEN or self.protocol.state is State.CLOSING:
            ready, frames = self._whole_frames()
        else:
            ready, frames = len(self._unread), 0
        if not ready:
            return
        if not self.allowance.take(frames, ready):
            self.flooded = True
            self._unread.clear()
            self.transport.abort()
            return
        part = bytes(self._unread[:ready])
        del self._unread[:ready]
        super().data_received(part)
        if self._unread:
            self._later()

    def _head(self) -> int:
        """Return the number of bytes that belong to the answer of the handshake: frames may follow it at once."""
        seen = self._tail + self._unread
        end = seen.find(_HEAD_END)
        ready = len(self._unread) if end < 0 else end + len(_HEAD_END) - len(self._tail)
        self._tail = bytes(seen[: len(self._tail) + ready][-len(_HEAD_END) + 1 :])
        return ready

    def _whole_frames(self) -> tuple[int, int]:
        """Return the number of bytes to pass on, and of frames that begin in them.

        A frame header is passed on whole.
        """
        unread, size = self._unread, len(self._unread)
        at = min(self._payload_left, size)
        self._payload_left -= at
        frames = 0
        while frames < PER_TURN and size - at >= 2:
            length, head = unread[at + 1] & 0x7F, 2
            if length >= 126:
                head = 4 if length == 126 else 10
                if size - at < head:
                    break
                length = int.from_bytes(unread[at + 2 : at + head])
            if unread[at + 1] & 0x80:
                head += 4  # masked, which a server must not do: the library ends the connection
            frames += 1
            end = at + head + length
            if end > size:
                self._payload_left = end - size
                return size, frames
            at = end
        return at, frames

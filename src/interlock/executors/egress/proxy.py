"""The proxy of one call: its listener, its connections, and the record of both."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable

from interlock.core.clock import Clock
from interlock.executors.egress.policy import EgressPolicy, EgressRefusal, Limits, Seen
from interlock.executors.egress.streams import Streams
from interlock.net.addresses import Resolve, resolve_by_system

Dial = Callable[[str, int], Awaitable[Streams]]

_PASSING = frozenset({errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PAUSE_S = 0.1

logger = logging.getLogger(__name__)


async def dial_directly(address: str, port: int) -> Streams:
    """A connection to an address, through no other proxy."""
    return await asyncio.open_connection(address, port)


class Egress:
    """Lets one call connect where its policy allows, through a listener that only that call can reach.

    `on_begin` is called for every request before it leaves, `on_event` for every refusal at once and for every request
    when it is over. Both are recorded: `requests` whole, `refusals` up to a limit, with `refused` counting them all.
    """

    def __init__(
        self,
        policy: EgressPolicy,
        *,
        clock: Clock,
        on_event: Callable[[EgressRefusal | Seen], None],
        on_begin: Callable[[Seen], None] | None = None,
        resolve: Resolve = resolve_by_system,
        dial: Dial = dial_directly,
        limits: Limits | None = None,
    ) -> None:
        self.policy = policy
        self.clock = clock
        self.resolve = resolve
        self.dial = dial
        self.limits = limits or Limits()
        self.refusals: list[EgressRefusal] = []
        self.refused = 0
        self.requests: list[Seen] = []
        self.wire_bytes = 0
        self._on_event = on_event
        self._on_begin = on_begin
        self._accepting: asyncio.Task[None] | None = None
        self._closed = False

    async def serve(self, listener: socket.socket) -> None:
        """Serve connections until `close`. The listener belongs to us from here on, and is closed at the end.

        INVARIANT: the tool has no copy of the listener. A holder of a copy could make it blocking, and block us.
        """
        with listener:
            if self._closed:
                return
            listener.setblocking(False)
            self._accepting = asyncio.create_task(self._accept(listener))
            try:
                await asyncio.wait((self._accepting,))
            finally:
                await self.close()
            if not self._accepting.cancelled():
                self._accepting.result()

    async def close(self) -> None:
        """Cut every connection and accept no more. The record stays."""
        self._closed = True
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait((self._accepting,))

    def refuse(self, refusal: EgressRefusal) -> None:
        self.refused += 1
        if len(self.refusals) < self.limits.refusals:
            self.refusals.append(refusal)
        self._on_event(refusal)

    def begin(self, seen: Seen) -> None:
        # INVARIANT: a request is in `requests` before a byte of it leaves.
        self.requests.append(seen)
        if self._on_begin is not None:
            self._on_begin(seen)

    def end(self, seen: Seen) -> None:
        self._on_event(seen)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        room = asyncio.Semaphore(self.limits.connections)
        async with asyncio.TaskGroup() as connections:
            while True:
                await room.acquire()
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:
                    if error.errno not in _PASSING:
                        raise
                    room.release()
                    await asyncio.sleep(_PAUSE_S)
                    continue
                task = connections.create_task(self._converse(connection))
                # The socket is closed here even if the task was cancelled before it began.
                task.add_done_callback(lambda _, connection=connection: (connection.close(), room.release()))

    async def _converse(self, connection: socket.socket) -> None:
        from interlock.executors.egress.conversation import Conversation

        try:
            await Conversation(self, await asyncio.open_connection(sock=connection)).hold()
        except OSError:
            pass  # the client went away, or its time was up
        except Exception:
            logger.exception("a connection through the egress proxy was cut by an unforeseen error")

"""A load balancer for tests: a TCP port in front of several servers, as HAProxy or a Service of Kubernetes is one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count

import httpx

_AT_ONCE = 65_536
_ASK_EVERY_S = 0.02


class Balancer:
    """Passes connections on to the servers whose `/ready` says yes, one after the other.

    A connection that a server refuses is passed on to another one: nothing was sent yet. Nothing else is tried again.
    """

    def __init__(self) -> None:
        self.port = 0
        # The ports of the servers that get new connections, and the number of connections that each has.
        self.ready: set[int] = set()
        self.open: Counter[int] = Counter()
        # How many of these carry a stream of an MCP client, which ends when its server does.
        self.streams: Counter[int] = Counter()
        self._turn = count()
        self._changed = asyncio.Condition()
        self._asking: dict[int, asyncio.Task[None]] = {}

    def add(self, port: int) -> None:
        """Ask a server from now on whether it is ready."""
        self._asking[port] = asyncio.create_task(self._ask(port))

    async def remove(self, port: int) -> None:
        """Forget a server."""
        self._asking[port].cancel()
        await asyncio.wait([self._asking.pop(port)])
        await self._note(self.ready.discard, port)

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait until something is so that this balancer knows."""
        async with self._changed:
            await self._changed.wait_for(reached)

    async def _note(self, change: Callable[[int], object], port: int) -> None:
        async with self._changed:
            change(port)
            self._changed.notify_all()

    async def _ask(self, port: int) -> None:
        async with httpx.AsyncClient(timeout=60, headers={"connection": "close"}) as client:
            while True:
                try:
                    yes = (await client.get(f"http://127.0.0.1:{port}/ready")).status_code == 200
                except httpx.HTTPError:
                    yes = False
                if yes != (port in self.ready):
                    await self._note(self.ready.add if yes else self.ready.discard, port)
                await asyncio.sleep(_ASK_EVERY_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port, streams = 0, 0

        async def look(data: bytes) -> None:
            nonlocal streams
            if data.startswith(b"GET /mcp ") and not streams:
                streams = 1
                await self._note(lambda port: self.streams.update([port]), port)

        def ended(port: int) -> None:
            self.open.subtract([port])
            self.streams[port] -= streams

        try:
            port, theirs, ours = await self._connect()
            await self._note(lambda port: self.open.update([port]), port)
            await asyncio.gather(_pass_on(reader, ours, look), _pass_on(theirs, writer))
        finally:
            writer.close()
            if port:
                await asyncio.shield(self._note(ended, port))

    async def _connect(self) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            await self.until(lambda: bool(self.ready))
            ports = sorted(self.ready)
            port = ports[next(self._turn) % len(ports)]
            with suppress(ConnectionRefusedError):
                return port, *await asyncio.open_connection("127.0.0.1", port)


async def _unseen(_: bytes) -> None:
    return None


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, look: Callable[[bytes], Awaitable[None]] = _unseen
) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(_AT_ONCE):
            await look(data)
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def balancing(*ports: int) -> AsyncGenerator[Balancer]:
    """A balancer in front of some servers, once all of them are ready."""
    balancer = Balancer()
    server = await asyncio.start_server(balancer._serve, "127.0.0.1")  # pyright: ignore[reportPrivateUsage]
    balancer.port = server.sockets[0].getsockname()[1]
    for port in ports:
        balancer.add(port)
    try:
        await balancer.until(lambda: balancer.ready == set(ports))
        yield balancer
    finally:
        for port in [*balancer._asking]:  # pyright: ignore[reportPrivateUsage]
            await balancer.remove(port)
        server.close()
        await server.wait_closed()

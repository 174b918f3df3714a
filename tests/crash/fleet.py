"""Three servers on one PostgreSQL store and one Redis server, and what can happen to them: the faults of a chaos run.

Each node has its own data directory, its own way to the database (a proxy) and its own wall clock. A node that dies is
started again, as a supervisor does, for as long as the fleet is up. What nodes write to stderr is kept in a file each.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import psycopg

from tests.support.cli import Cli
from tests.support.cluster import Node, prepare
from tests.support.postgres import Server
from tests.support.proxy import Proxy
from tests.support.redis import Server as Redis

NODES = 3
TOOLS = Path(__file__).with_name("fleet_tools.py")
FARTHEST_S = 6 * 3600  # by which a clock is set wrong
START_S = 600.0  # within which a node has to serve again
_OF = "position(%s IN convert_from(report, 'UTF8')) > 0"  # the data directory of a lease


class FleetNode(Node):
    """A server that is started again when it dies, with its own way to the database and its own wall clock."""

    def __init__(self, number: int, place: Path, server: Server, address: str, redis: Redis) -> None:
        self.number = number
        self.proxy = Proxy(server.place / ".s.PGSQL.5432", seed=number)
        self._clock = place / f"clock-{number}"
        self.set_clock(0)
        schema = address.rpartition("&options=")[2]
        way = f"postgresql://postgres@127.0.0.1:{self.proxy.port}/postgres?sslmode=disable&gssencmode=disable"
        chosen = {
            "INTERLOCK_STORE": f"{way}&options={schema}",
            "INTERLOCK_REDIS": redis.url,
            "CHAOS_PLACE": str(place),
            "CHAOS_CLOCK": str(self._clock),
        }
        super().__init__(Cli(place / str(number), chosen))
        self.in_flight = 0
        # Held by what happens to this node, so that one thing does at a time.
        self.busy = asyncio.Lock()

    def set_clock(self, shift_s: float) -> None:
        # Written in place: the node has these bytes mapped.
        descriptor = os.open(self._clock, os.O_WRONLY | os.O_CREAT)
        os.pwrite(descriptor, struct.pack("q", int(shift_s * 1e9)), 0)
        os.close(descriptor)

    async def start_again(self) -> None:
        """Start the server, again and again while it cannot: its database may be away."""
        async with asyncio.timeout(START_S):
            while not await asyncio.to_thread(self.start):  # noqa: ASYNC110 - each try takes its time
                await asyncio.sleep(0.1)


class Fleet:
    """The nodes, their database, and the faults that they can have. `happened` counts those."""

    def __init__(
        self,
        place: Path,
        server: Server,
        address: str,
        redis: Redis,
        nodes: list[FleetNode],
        token: str,
        seed: int,
        *,
        hastened: bool,
    ) -> None:
        self.place = place
        self.nodes = nodes
        self.token = token
        self._server = server
        self._redis = redis
        self._address = address
        self._hastened = hastened
        self._random = random.Random(seed)
        self._down, self._redis_down = asyncio.Lock(), asyncio.Lock()
        self.happened = Counter[str]()
        self._began = time.monotonic()
        self.history: list[str] = []

    def lines(self, file: str) -> list[str]:
        path = self.place / file
        return path.read_text().splitlines() if path.exists() else []

    async def strike(self, kind: str) -> None:
        """Let something happen, and wait until it is over. Connections, clocks and nodes are as before then."""
        self.note(f"begins: {kind}")
        await FAULTS[kind](self)
        self.happened[kind] += 1
        self.note(f"is over: {kind}")

    def note(self, line: str) -> None:
        """Add a line to the history of the run, which is printed of a run that fails."""
        self.history.append(f"{time.monotonic() - self._began:9.3f} {line}")

    def _any(self) -> FleetNode:
        free = [node for node in self.nodes if not node.busy.locked()]
        at_work = [node for node in free if node.in_flight]
        return self._random.choice(at_work or free or self.nodes)

    def _chosen(self) -> FleetNode:
        node = self._random.choice(self.nodes)
        self.note(f"it is node {node.number}")
        return node

    async def _pause(self, most_s: float) -> None:
        await asyncio.sleep(self._random.uniform(0, most_s))

    async def kill(self) -> None:
        node = self._any()
        async with node.busy:
            self.note(f"node {node.number} is killed")
            await asyncio.to_thread(node.end)
            await asyncio.to_thread(self._end_lease, node)
            await node.start_again()

    async def replace(self, node: FleetNode, rest: str) -> None:
        """Start a node again that was taken for dead, as it says itself. On a slow machine that may be so by chance."""
        async with node.busy:
            if node.rest == rest:
                self.note(f"node {node.number} was taken for dead, and is started again")
                await asyncio.to_thread(node.end)
                await node.start_again()

    async def stop(self) -> None:
        """Stop a process for longer than its lease, so that the others take it for dead. Then it goes on, fenced."""
        node = self._any()
        async with node.busy:
            self.note(f"node {node.number} is stopped")
            node.signal(signal.SIGSTOP)
            try:
                await asyncio.to_thread(self._end_lease, node)
                await asyncio.to_thread(self._lease_over, node)
            finally:
                self.note(f"node {node.number} goes on")
                with suppress(ProcessLookupError):  # its kernel has ended it, because a tool had locks
                    node.signal(signal.SIGCONT)
            await self._pause(1.0)
            await asyncio.to_thread(node.end)
            await node.start_again()

    def _end_lease(self, node: FleetNode) -> None:
        """Take the leases of a data directory none of whose processes runs, as if they had run out."""
        if self._hastened:
            with suppress(psycopg.Error):  # the server is being restarted: then the lease runs out by itself
                self._ask(f"DELETE FROM instance WHERE {_OF} RETURNING 1", node)

    def _lease_over(self, node: FleetNode) -> None:
        """Wait until no process of a data directory has a lease, looking as another process does."""
        alive, patience = True, threading.Event()
        while alive:
            with suppress(psycopg.Error):  # the server is being restarted
                alive = self._ask(f"SELECT 1 FROM instance WHERE {_OF} AND interlock_alive(id)", node)
            patience.wait(0.2)

    def _ask(self, statement: str, node: FleetNode) -> bool:
        with psycopg.connect(self._address, autocommit=True) as connection:
            return bool(connection.execute(statement.encode(), (f'"{node.cli.home}"',)).fetchall())

    async def restart_server(self) -> None:
        async with self._down:
            how = self._random.choice(("immediate", "fast"))
            await asyncio.to_thread(self._server.stop, how)
            await self._pause(0.5)
            await asyncio.to_thread(self._server.start)

    async def kill_redis(self) -> None:
        """End Redis as a crash would, and start it again, empty."""
        async with self._redis_down:
            await asyncio.to_thread(self._redis.kill)
            await self._pause(1.0)
            await asyncio.to_thread(self._redis.start)

    async def flush_redis(self) -> None:
        """Drop all that Redis knows, its clients too."""
        async with self._redis_down:
            await asyncio.to_thread(self._redis.ask, "FLUSHALL")
            await asyncio.to_thread(self._redis.ask, "CLIENT", "KILL", "TYPE", "pubsub")

    async def stop_redis(self) -> None:
        """Stop the process of Redis for longer than a node waits for its answer. Then it goes on."""
        async with self._redis_down:
            self._redis.signal(signal.SIGSTOP)
            await self._pause(5.0)
            self._redis.signal(signal.SIGCONT)

    async def cut(self) -> None:
        """Cut all connections of a node, and those that it makes in the next moment at any byte."""
        proxy = self._chosen().proxy
        proxy.cutting = 20_000
        proxy.cut_all()
        await self._pause(1.0)
        proxy.cutting = 0

    async def drop(self) -> None:
        """Let nothing through between a node and the database. Then the bytes arrive late, or the connections end."""
        proxy = self._chosen().proxy
        proxy.silence()
        await self._pause(3.0)
        if self._random.random() < 0.5:
            proxy.cut_all()
        proxy.resume()

    async def delay(self) -> None:
        proxy = self._chosen().proxy
        proxy.delay_s = 0.05
        await self._pause(2.0)
        proxy.delay_s = 0.0

    async def set_clock(self) -> None:
        """Set the wall clock of one node wrong. It stays so until it is set again, also if the node is killed."""
        farthest = self._random.choice((-FARTHEST_S, FARTHEST_S))
        shift_s = self._random.choice((farthest, self._random.uniform(-FARTHEST_S, FARTHEST_S)))
        node = self._chosen()
        self.note(f"the clock of node {node.number} is wrong by {shift_s:.0f} s")
        node.set_clock(shift_s)


# What can happen, by the word that the table of a run has for it.
FAULTS: dict[str, Callable[[Fleet], Awaitable[None]]] = {
    "nodes killed": Fleet.kill,
    "nodes stopped beyond their lease": Fleet.stop,
    "database restarted": Fleet.restart_server,
    "Redis killed": Fleet.kill_redis,
    "Redis flushed": Fleet.flush_redis,
    "Redis stopped": Fleet.stop_redis,
    "connections cut": Fleet.cut,
    "packets dropped": Fleet.drop,
    "packets delayed": Fleet.delay,
    "clocks set wrong": Fleet.set_clock,
}


@asynccontextmanager
async def fleet(place: Path, settings: str, seed: int, *, hastened: bool = False) -> AsyncGenerator[Fleet]:
    """Three nodes on a new store, on servers of their own. `settings` are those of each data directory.

    With `hastened` the leases of nodes that are killed or stopped run out at once.
    """
    with ExitStack() as stack:
        server = Server()
        stack.callback(server.remove)
        redis = Redis()
        stack.callback(redis.remove)
        address = server.new_schema()
        nodes = [FleetNode(number, place, server, address, redis) for number in range(NODES)]
        for node in nodes:
            stack.callback(node.proxy.close)
            stack.callback(node.end)
        token = await asyncio.to_thread(prepare, [node.cli for node in nodes], TOOLS, "fleet.*", settings)
        await asyncio.gather(*(node.start_again() for node in nodes))
        yield Fleet(place, server, address, redis, nodes, token, seed, hastened=hastened)

"""Three servers on one PostgreSQL store of their own, and what can happen to them: the faults of a chaos run.

Each node has its own data directory, its own way to the database (a proxy) and its own wall clock. A node that dies is
started again, as a supervisor does, for as long as the fleet is up. What nodes write to stderr is kept in a file each.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import struct
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psycopg

from tests import warm
from tests.cli.conftest import Cli
from tests.support.postgres import Server
from tests.support.proxy import Proxy

NODES = 3
TOOLS = Path(__file__).with_name("fleet_tools.py")
WORDS = ("serve", "--port", "0", "--no-grpc", "--no-token", "--json")
NOT_COPIED = shutil.ignore_patterns("anchors.jsonl", "instances", "*.lock")
FARTHEST_S = 120  # by which a clock is set wrong
_OF = "position(%s IN convert_from(report, 'UTF8')) > 0"  # the data directory of a lease


class Node:
    """A server that is started again when it dies."""

    def __init__(self, number: int, place: Path, server: Server, address: str) -> None:
        self.number = number
        self.proxy = Proxy(server.place / ".s.PGSQL.5432", seed=number)
        self._clock = place / f"clock-{number}"
        self.set_clock(0)
        schema = address.rpartition("&options=")[2]
        way = f"postgresql://postgres@127.0.0.1:{self.proxy.port}/postgres?sslmode=disable&gssencmode=disable"
        chosen = {
            "INTERLOCK_STORE": f"{way}&options={schema}",
            "CHAOS_PLACE": str(place),
            "CHAOS_CLOCK": str(self._clock),
        }
        self.cli = Cli(place / str(number), chosen)
        self.said = place / f"stderr-{number}"
        self.rest = ""
        self.in_flight = 0
        self._process: warm.Started | None = None
        self._readers: list[threading.Thread] = []
        # Held by what happens to this node, so that one thing does at a time.
        self.busy = asyncio.Lock()

    def set_clock(self, shift_s: float) -> None:
        # Written in place: the node has these bytes mapped.
        descriptor = os.open(self._clock, os.O_WRONLY | os.O_CREAT)
        os.pwrite(descriptor, struct.pack("q", int(shift_s * 1e9)), 0)
        os.close(descriptor)

    async def start(self) -> None:
        """Start the server, again and again while it cannot: its database may be away."""
        while not await asyncio.to_thread(self._started):  # noqa: ASYNC110 - each try takes its time
            await asyncio.sleep(0.1)

    def _started(self) -> bool:
        self._process = process = warm.start(WORDS, self.cli.environment, self.cli.path)
        reader = threading.Thread(target=self._keep, args=(process,), daemon=True)
        reader.start()
        self._readers.append(reader)
        said = ""
        while line := process.stdout.readline().decode():
            said += line
            if line.endswith("}\n"):
                self.rest = json.loads(said).get("rest", "")  # or an error
                break
        if self.rest:
            return True
        self.end()
        return False

    def _keep(self, process: warm.Started) -> None:
        with self.said.open("ab") as file:
            while line := process.stderr.readline():
                file.write(line)
                file.flush()

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill the server and wait until it is gone."""
        process, self._process, self.rest = self._process, None, ""
        if process is None:
            return
        process.kill()
        process.wait()
        for reader in self._readers:
            reader.join()
        self._readers = []
        process.__exit__()


class Fleet:
    """The nodes, their database, and the faults that they can have. `happened` counts those."""

    def __init__(
        self, place: Path, server: Server, address: str, nodes: list[Node], token: str, seed: int, *, hastened: bool
    ) -> None:
        self.place = place
        self.nodes = nodes
        self.token = token
        self._server = server
        self._address = address
        self._hastened = hastened
        self._random = random.Random(seed)
        self._down = asyncio.Lock()
        self.happened = Counter[str]()

    def lines(self, file: str) -> list[str]:
        path = self.place / file
        return path.read_text().splitlines() if path.exists() else []

    async def strike(self, kind: str) -> None:
        """Let something happen, and wait until it is over. Connections, clocks and nodes are as before then."""
        await FAULTS[kind](self)
        self.happened[kind] += 1

    def _any(self) -> Node:
        free = [node for node in self.nodes if not node.busy.locked()]
        at_work = [node for node in free if node.in_flight]
        return self._random.choice(at_work or free or self.nodes)

    async def _pause(self, most_s: float) -> None:
        await asyncio.sleep(self._random.uniform(0, most_s))

    async def kill(self) -> None:
        node = self._any()
        async with node.busy:
            await asyncio.to_thread(node.end)
            await asyncio.to_thread(self._pass_time, node)
            await node.start()

    async def replace(self, node: Node, rest: str) -> None:
        """Start a node again that was taken for dead, as it says itself. On a slow machine that may be so by chance."""
        async with node.busy:
            if node.rest == rest:
                await asyncio.to_thread(node.end)
                await node.start()

    async def stop(self) -> None:
        """Stop a process for longer than its lease, so that the others take it for dead. Then it goes on, fenced."""
        node = self._any()
        async with node.busy:
            node.signal(signal.SIGSTOP)
            try:
                await asyncio.to_thread(self._pass_time, node)
                await asyncio.to_thread(self._lease_over, node)
            finally:
                node.signal(signal.SIGCONT)
            await self._pause(1.0)
            await asyncio.to_thread(node.end)
            await node.start()

    def _pass_time(self, node: Node) -> None:
        """Make it 15 seconds later for the leases of a data directory none of whose processes runs."""
        if self._hastened:
            with suppress(psycopg.Error):  # the server is being restarted: then it takes 15 seconds
                self._ask(f"UPDATE instance SET until_ms = 1 WHERE {_OF} RETURNING 1", node)

    def _lease_over(self, node: Node) -> None:
        """Wait until no process of a data directory has a lease, looking as another process does."""
        alive, patience = True, threading.Event()
        while alive:
            with suppress(psycopg.Error):  # the server is being restarted
                alive = self._ask(f"SELECT 1 FROM instance WHERE {_OF} AND interlock_alive(id)", node)
            patience.wait(0.2)

    def _ask(self, statement: str, node: Node) -> bool:
        with psycopg.connect(self._address, autocommit=True) as connection:
            return bool(connection.execute(statement.encode(), (f'"{node.cli.home}"',)).fetchall())

    async def restart_server(self) -> None:
        async with self._down:
            how = self._random.choice(("immediate", "fast"))
            await asyncio.to_thread(self._server.stop, how)
            await self._pause(0.5)
            await asyncio.to_thread(self._server.start)

    async def cut(self) -> None:
        """Cut all connections of a node, and those that it makes in the next moment at any byte."""
        proxy = self._random.choice(self.nodes).proxy
        proxy.cutting = 20_000
        proxy.cut_all()
        await self._pause(1.0)
        proxy.cutting = 0

    async def drop(self) -> None:
        """Let nothing through between a node and the database. Then the bytes arrive late, or the connections end."""
        proxy = self._random.choice(self.nodes).proxy
        proxy.silence()
        await self._pause(3.0)
        if self._random.random() < 0.5:
            proxy.cut_all()
        proxy.resume()

    async def delay(self) -> None:
        proxy = self._random.choice(self.nodes).proxy
        proxy.delay_s = 0.05
        await self._pause(2.0)
        proxy.delay_s = 0.0

    async def set_clock(self) -> None:
        """Set the wall clock of one node wrong. It stays so until another one is wrong."""
        for node in self.nodes:
            node.set_clock(0)
        self._random.choice(self.nodes).set_clock(self._random.uniform(-FARTHEST_S, FARTHEST_S))


# What can happen, by the word that the table of a run has for it.
FAULTS: dict[str, Callable[[Fleet], Awaitable[None]]] = {
    "nodes killed": Fleet.kill,
    "nodes stopped beyond their lease": Fleet.stop,
    "database restarted": Fleet.restart_server,
    "connections cut": Fleet.cut,
    "packets dropped": Fleet.drop,
    "packets delayed": Fleet.delay,
    "clocks set wrong": Fleet.set_clock,
}


@asynccontextmanager
async def fleet(place: Path, settings: str, seed: int, *, hastened: bool = False) -> AsyncGenerator[Fleet]:
    """Three nodes on a new store, on a server of their own. `settings` are those of each data directory.

    With `hastened` the leases of nodes that were killed run out at once, as far as the database lets them.
    """
    server = Server()
    address = server.new_schema()
    nodes = [Node(number, place, server, address) for number in range(NODES)]
    try:
        token = await asyncio.to_thread(_prepare, nodes, settings)
        await asyncio.gather(*(node.start() for node in nodes))
        yield Fleet(place, server, address, nodes, token, seed, hastened=hastened)
    finally:
        try:
            for node in nodes:
                await asyncio.to_thread(node.end)
                await asyncio.to_thread(node.proxy.close)
        finally:
            server.remove()


def _prepare(nodes: list[Node], settings: str) -> str:
    """Make the data directories and admit the tools: a token for them."""
    first = nodes[0].cli
    first.home.mkdir(parents=True)
    (first.home / "settings.toml").write_text(settings)
    added = first("tools", "add", str(TOOLS))
    assert added.code == 0, added.err
    issued = first("token", "issue", "--agent", "tester", "--tool", "fleet.*", "--ttl", "24h")
    assert issued.code == 0, issued.err
    for other in nodes[1:]:
        shutil.copytree(first.home, other.cli.home, ignore=NOT_COPIED)
    return issued.out.strip()

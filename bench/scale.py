"""`scale`: governed durable calls per second on SQLite and on PostgreSQL with one node and two, beside job queues.

Everything that is measured is a process of its own (`bench/scale_worker.py`) and takes turns with the others: in every
round each works for a moment, in random order. The PostgreSQL server is one that waits for the disk. Its CPU time is
counted beside that of the processes, because a statement that grows slower grows there.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

from bench import flat, soak
from bench.measure import Plan, number, times
from bench.report import Table, verdict
from bench.scale_tools import look, post
from interlock import Interlock
from interlock.audit.tail import accept, unsigned_tail
from interlock.core.clock import Clock
from interlock.store.homes import home_at
from interlock.store.postgres.connection import Connection
from interlock.store.transaction import Transaction
from tests.support.postgres import Server

CALLERS = 64
ROUNDS, QUICK_ROUNDS = 9, 3
SLICE_S, QUICK_SLICE_S = 2.0, 0.7
# What a server has by itself, so that a commit is on the disk.
OPTIONS = "listen_addresses= shared_buffers=256MB max_wal_size=4GB max_connections=200"
NOT_COPIED = shutil.ignore_patterns("anchors.jsonl", "instances", "*.lock")
SQLITE, ONE, TWO = "Interlock, SQLite", "Interlock, PostgreSQL, one node", "Interlock, PostgreSQL, two nodes"
PROCRASTINATE, DBOS = "procrastinate, insert and finish", "DBOS, a workflow of one step"
_LAST = "SELECT seq, hash, call, body FROM journal WHERE kind = 'closed' ORDER BY seq DESC LIMIT 1"
_COLUMNS = ("seq", "kind", "call", "body", "hash")
_CHUNK = 50_000


@dataclass(slots=True)
class Worker:
    """A process that makes calls on request."""

    process: asyncio.subprocess.Process

    async def work(self, name: str, callers: int, seconds: float) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name} {callers} {seconds}\n".encode())
        return await self.answer()

    async def answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise SystemExit("a process that is measured has ended; its error is above")
        return json.loads(line)


@dataclass(slots=True)
class Contender:
    """Processes that do the same work at once, and what each round found: calls per second, and CPU µs per call."""

    name: str
    work: str
    workers: Sequence[Worker]
    callers: int = CALLERS
    rates: list[float] = field(default_factory=list[float])
    costs: list[float] = field(default_factory=list[float])
    server_costs: list[float] = field(default_factory=list[float])

    async def take_turn(self, seconds: float, server: Server) -> None:
        before = _server_cpu_s(server)
        share = self.callers // len(self.workers)
        found = await asyncio.gather(*(one.work(self.work, share, seconds) for one in self.workers))
        calls = sum(one["calls"] for one in found)
        self.rates.append(calls / max(one["wall_s"] for one in found))
        self.costs.append(sum(one["cpu_s"] for one in found) / calls * 1e6)
        self.server_costs.append((_server_cpu_s(server) - before) / calls * 1e6)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def cost(self) -> float:
        return statistics.median(self.costs)

    @property
    def server_cost(self) -> float:
        return statistics.median(self.server_costs)


async def run(plan: Plan) -> list[Table]:
    with tempfile.TemporaryDirectory(prefix="interlock-bench-", ignore_cleanup_errors=True) as directory:
        place = Path(directory)
        server = Server(OPTIONS, tempfile.gettempdir())
        try:
            return [await _rates(plan, place, server), await _memory(place, server), await _flat(plan, place, server)]
        finally:
            server.remove()


async def _rates(plan: Plan, place: Path, server: Server) -> Table:
    address = server.new_schema()
    homes = [place / name for name in ("sqlite", "one", "two")]
    await _prepare(homes[0], "")
    await _prepare(homes[1], address)
    shutil.copytree(homes[1], homes[2], ignore=NOT_COPIED)
    with server.connect() as connection:
        for name in ("procrastinate", "dbos"):
            connection.execute(f"CREATE DATABASE {name}".encode())
    async with AsyncExitStack() as stack:
        sqlite = await stack.enter_async_context(_worker("interlock", "", homes[0]))
        nodes = [await stack.enter_async_context(_worker("interlock", address, home)) for home in homes[1:]]
        field = [Contender(SQLITE, work, [sqlite]) for work in ("read", "write")]
        field += [Contender(ONE, work, nodes[:1]) for work in ("read", "write")]
        field += [Contender(TWO, work, nodes) for work in ("read", "write")]
        for name, kind in ((PROCRASTINATE, "procrastinate"), (DBOS, "dbos")):
            its = server.address.replace("/postgres?", f"/{kind}?")
            field.append(Contender(name, "write", [await stack.enter_async_context(_worker(kind, its))]))
        await _measure(field, plan, server)
    yardstick = max(one.rate for one in field if one.name in (PROCRASTINATE, DBOS))
    rows = [
        (
            f"{one.name}: {one.work}",
            f"{one.rate:,.0f}",
            number(one.cost),
            number(one.server_cost) if one.name != SQLITE else "",
            times(one.rate / yardstick) if one.work == "write" else "",
        )
        for one in field
    ]
    columns = (f"{CALLERS} callers", "per second", "CPU µs", "CPU µs, server", "of the faster queue")
    note = "A job of a queue is inserted and finished; a governed write has its intent and its outcome on record."
    return Table("Durable calls", columns, rows, f"{_load()} {note}")


async def _memory(place: Path, server: Server) -> Table:
    rows: list[tuple[str, ...]] = []
    for name, address in (("SQLite", ""), ("PostgreSQL", server.new_schema())):
        home = place / f"idle-{name}"
        await _prepare(home, address)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "interlock.cli", "--home", str(home), "serve", "--port", "0", "--no-grpc", "--json",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "INTERLOCK_STORE": address},
        )  # fmt: skip
        assert process.stdout is not None
        try:
            await process.stdout.readline()
            rows.append((name, f"{soak.Served(process.pid, 0, '', '').rss_kib() / 1024:.0f}"))
        finally:
            process.terminate()
            await process.wait()
    return Table("Memory of a server without calls", ("store", "RSS MiB"), rows)


async def _flat(plan: Plan, place: Path, server: Server) -> Table:
    sizes = (10, 100_000 if plan.quick else 1_000_000)
    field: list[Contender] = []
    async with AsyncExitStack() as stack:
        for size in sizes:
            address, home = server.new_schema(), place / f"rows-{size}"
            await _prepare(home, address)
            await asyncio.to_thread(fill, home, address, size)
            worker = await stack.enter_async_context(_worker("interlock", address, home))
            field += [
                Contender(str(size), work, [worker], callers) for work in ("read", "write") for callers in (1, 64)
            ]
        await _measure(field, plan, server)
    rows: list[tuple[str, ...]] = []
    for small, large in zip(field[: len(field) // 2], field[len(field) // 2 :], strict=True):
        costs = [one.cost + one.server_cost for one in (small, large)]
        growth = costs[1] / costs[0]
        goal = f"<= {flat.FLAT_WITHIN}x"
        name = f"{small.work}, {small.callers} callers"
        rows.append((name, *map(number, costs), goal, times(growth), verdict(growth <= flat.FLAT_WITHIN)))
    columns = ("CPU µs per call, with the server", *(f"{size:,} rows" for size in sizes), "goal", "growth", "")
    return Table("Journal rows on PostgreSQL", columns, rows, "The short journal grows by what is measured.")


async def _measure(field: list[Contender], plan: Plan, server: Server) -> None:
    order = random.Random(1)
    rounds, seconds = (QUICK_ROUNDS, QUICK_SLICE_S) if plan.quick else (ROUNDS, SLICE_S)
    for turn in range(rounds + 1):
        for one in order.sample(field, len(field)):
            await one.take_turn(seconds, server)
            if turn == 0:  # to warm up
                one.rates.clear()
                one.costs.clear()
                one.server_costs.clear()


async def _prepare(home: Path, address: str) -> None:
    """A data directory with the tools, and one read and one write on record."""
    async with Interlock.open(home, store=address) as lock:
        await lock.add(look, post)
        (await lock.call("scale.post", {"name": "first"}, key="first")).unwrap()
        (await lock.call("scale.look", {"name": "first"})).unwrap()


@asynccontextmanager
async def _worker(kind: str, address: str, home: Path | str = "") -> AsyncGenerator[Worker]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.scale_worker", kind, address, str(home),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        worker = Worker(process)
        await worker.answer()  # it is ready
        yield worker
    finally:
        process.kill()
        await process.wait()


def fill(path: Path, address: str, rows: int) -> None:
    """Bring the journal of a store that nobody has open to so many records: copies of its last one, chained, signed."""
    with closing(Connection(address)) as connection:
        seq, head, call, body = connection.one(_LAST)
        transaction = Transaction(connection, seq, bytes(head), 0)
        connection.execute("BEGIN")
        for start in range(seq, rows, _CHUNK):
            for record in range(start, min(start + _CHUNK, rows)):
                copy = f"{record:026d}"
                transaction.append("closed", copy, bytes(body).replace(call.encode(), copy.encode()))
            connection.copy_in("journal", _COLUMNS, transaction.rows)
            transaction.rows.clear()
        connection.execute("COMMIT")
        connection.execute("ANALYZE journal")
    home = home_at(path, address)
    tail = unsigned_tail(home)
    if tail.fault is not None:
        accept(home, tail, reason="copies of a record", by="local:bench", now_ms=Clock().now_ms())


def _server_cpu_s(server: Server) -> float:
    """CPU time of the processes of a server, those that have ended included."""
    postmaster = (server.place / "data" / "postmaster.pid").read_text().split()[0]
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if path.parent.name == postmaster:
            ticks += sum(map(int, fields[11:15]))
        elif fields[1] == postmaster:
            ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _load() -> str:
    one, five, _ = os.getloadavg()
    return f"Load of the machine at the end, over one and five minutes: {one:.1f}, {five:.1f}."

"""`scale`: governed durable calls per second on SQLite and on PostgreSQL with one node and two, beside job queues.

SQLite is compared with how it was before there was another store, memory is that of a server without calls, and the
last table has the cost of calls with ten records in the journal and with a million. A run takes about ten minutes.

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
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench import flat, ledger, soak
from bench.measure import Plan, number, times
from bench.report import Table, verdict
from bench.scale_tools import look, post
from hatch_build import compile_module
from interlock import Interlock
from interlock.store.homes import home_at
from tests.support.postgres import Server

CALLERS = 64
ROUNDS, QUICK_ROUNDS = 9, 3
SLICE_S, QUICK_SLICE_S = 2.0, 0.7
# Many short rounds, because a small difference is looked for.
AGAINST_ROUNDS, AGAINST_SLICE_S = 25, 0.6
# The commit before the work on PostgreSQL began. It needs a package that only the environment for benchmarks has.
BEFORE = "a3ba78fd~1"
WITHIN = 1.03
FLAT_SLICE_S = 1.0
# What a server has by itself, so that a commit is on the disk.
OPTIONS = "listen_addresses= shared_buffers=256MB max_wal_size=4GB max_connections=200"
NOT_COPIED = shutil.ignore_patterns("anchors.jsonl", "instances", "*.lock")
SQLITE, ONE, TWO = "Interlock, SQLite", "Interlock, PostgreSQL, one node", "Interlock, PostgreSQL, two nodes"
PROCRASTINATE, DBOS = "procrastinate, insert and finish", "DBOS, a workflow of one step"


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
            found = [await _against(plan, plan.against or BEFORE, place, server)]
            found += [await _rates(plan, place, server), await _memory(place, server)]
            return [*found, await _flat(plan, place, server)]
        finally:
            server.remove()


async def _against(plan: Plan, commit: str, place: Path, server: Server) -> Table:
    """Compare calls on SQLite with those of another commit, by CPU time, round by round."""
    title, before = "SQLite before and now", place / "before"
    if not await asyncio.to_thread(_check_out, commit, before):
        if plan.against:
            raise SystemExit(f"`{commit}` is no commit of this repository")
        return Table(title, note=f"Not measured: the history of this repository does not reach back to {commit}.")
    homes = [place / name for name in ("against", "now")]
    async with AsyncExitStack() as stack:
        variables = {"PYTHONPATH": str(before / "src")}
        then = await stack.enter_async_context(_worker("interlock", "", homes[0], variables))
        now = await stack.enter_async_context(_worker("interlock", "", homes[1]))
        field = [
            Contender(f"{work}, {_so_many(callers)}", work, [worker], callers)
            for work in ("read", "write")
            for callers in (1, CALLERS)
            for worker in (then, now)
        ]
        await _measure(field, plan, server, QUICK_ROUNDS if plan.quick else AGAINST_ROUNDS, AGAINST_SLICE_S)
    rows: list[tuple[str, ...]] = []
    for old, new in zip(field[::2], field[1::2], strict=True):
        growth = statistics.median(ours / theirs for ours, theirs in zip(new.costs, old.costs, strict=True))
        goal = f"<= {WITHIN}x"
        rows.append((old.name, number(old.cost), number(new.cost), goal, f"{growth:.3f}x", verdict(growth <= WITHIN)))
    columns = ("CPU µs per call", commit, "now", "goal", "median of the rounds", "")
    return Table(title, columns, rows, _load())


def _check_out(commit: str, place: Path) -> bool:
    """Put the sources of a commit into a directory, with the compiled module, as they are installed; False if none."""
    root = Path(__file__).parents[1]
    place.mkdir()
    archived = subprocess.run(("git", "-C", str(root), "archive", commit, "src"), stdout=subprocess.PIPE, check=False)
    if archived.returncode:
        return False
    subprocess.run(("tar", "-x", "-C", str(place)), input=archived.stdout, check=True)
    source = place / "src" / "interlock" / "data" / "_walk.c"
    why = compile_module(source, source.with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))) if source.exists() else ""
    if why:
        raise SystemExit(f"{source.name} of {commit} cannot be compiled, so the comparison would not be fair: {why}")
    return True


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
        field += [
            Contender(TWO, work, nodes, callers) for callers in (CALLERS, 2 * CALLERS) for work in ("read", "write")
        ]
        for name, kind in ((PROCRASTINATE, "procrastinate"), (DBOS, "dbos")):
            its = server.address.replace("/postgres?", f"/{kind}?")
            field.append(Contender(name, "write", [await stack.enter_async_context(_worker(kind, its))]))
        await _measure(field, plan, server)
    yardstick = max(one.rate for one in field if one.name in (PROCRASTINATE, DBOS))
    rows = [
        (
            f"{one.name}: {one.work}",
            str(one.callers),
            f"{one.rate:,.0f}",
            number(one.cost),
            number(one.server_cost) if one.name != SQLITE else "",
            times(one.rate / yardstick) if one.work == "write" else "",
        )
        for one in field
    ]
    columns = ("", "callers", "per second", "CPU µs", "CPU µs, server", "of the faster queue")
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
            await asyncio.to_thread(ledger.fill, home_at(home, address), size)
            worker = await stack.enter_async_context(_worker("interlock", address, home))
            field += [
                Contender(str(size), work, [worker], callers) for work in ("read", "write") for callers in (1, 64)
            ]
        await _measure(field, plan, server, seconds=QUICK_SLICE_S if plan.quick else FLAT_SLICE_S)
    rows: list[tuple[str, ...]] = []
    for small, large in zip(field[: len(field) // 2], field[len(field) // 2 :], strict=True):
        costs = [one.cost + one.server_cost for one in (small, large)]
        growth = costs[1] / costs[0]
        goal = f"<= {flat.FLAT_WITHIN}x"
        name = f"{small.work}, {_so_many(small.callers)}"
        rows.append((name, *map(number, costs), goal, times(growth), verdict(growth <= flat.FLAT_WITHIN)))
    columns = ("CPU µs per call, with the server", *(f"{size:,} rows" for size in sizes), "goal", "growth", "")
    return Table("Journal rows on PostgreSQL", columns, rows, "The short journal grows by what is measured.")


async def _measure(field: list[Contender], plan: Plan, server: Server, rounds: int = 0, seconds: float = 0.0) -> None:
    order = random.Random(1)
    rounds = rounds or (QUICK_ROUNDS if plan.quick else ROUNDS)
    seconds = seconds or (QUICK_SLICE_S if plan.quick else SLICE_S)
    for turn in range(rounds + 1):
        for one in order.sample(field, len(field)):
            await one.take_turn(seconds, server)
            if turn == 0:  # to warm up
                one.rates.clear()
                one.costs.clear()
                one.server_costs.clear()


async def _prepare(home: Path, address: str) -> None:
    """A data directory with the tools, and one read and one write on record."""
    async with Interlock.open(home, store=address) as app:
        await app.add(look, post)
        (await app.call("scale.post", {"name": "first"}, key="first")).unwrap()
        (await app.call("scale.look", {"name": "first"})).unwrap()


@asynccontextmanager
async def _worker(
    kind: str, address: str, home: Path | str = "", variables: Mapping[str, str] | None = None
) -> AsyncGenerator[Worker]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.scale_worker", kind, address, str(home),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "INTERLOCK_STORE": "", **(variables or {})},
    )  # fmt: skip
    try:
        worker = Worker(process)
        await worker.answer()  # it is ready
        yield worker
    finally:
        with suppress(ProcessLookupError):  # it has ended by itself
            process.kill()
        await process.wait()


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


def _so_many(callers: int) -> str:
    return "1 caller" if callers == 1 else f"{callers} callers"


def _load() -> str:
    one, five, _ = os.getloadavg()
    return f"Load of the machine at the end, over one and five minutes: {one:.1f}, {five:.1f}."

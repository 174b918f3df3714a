"""`sandbox`: an isolated call beside a bare interpreter's start and beside hostile calls, and what a spare costs."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from bench import sandbox_siege
from bench.measure import Plan, number, times
from bench.report import Table, verdict
from interlock.executors.sandbox.job import PythonJob
from interlock.executors.sandbox.supervisor import Sandbox

BARE, RESULT, EVIDENCE, COLD = "python3 -I -c pass", "to a result", "with exit evidence", "no spare child"
BUBBLEWRAP, GVISOR = "bubblewrap", "gVisor"
GOALS = {(RESULT, 50): 10.0, (RESULT, 99): 4.0, (EVIDENCE, 50): 4.0}
CALLERS = 8
# A pool is warm when it has had the time that callers leave it in practice.
PAUSE_S = 0.02
JOB = PythonJob(source="def main(x):\n    return x + 1\n", entry="main", arguments={"x": 1})
Call = Callable[[], Awaitable[None]]


async def run(plan: Plan) -> list[Table]:
    rounds = 40 if plan.quick else 200
    async with (
        await Sandbox.open(backends=("zygote",), spares=CALLERS) as warm,
        await Sandbox.open(backends=("zygote",), spares=0) as cold,
    ):
        if warm.backend is None:
            return [Table("Sandbox", note=f"nothing isolates here: {(await warm.describe())[0].why_not}")]
        calls: dict[str, Call] = {
            BARE: _bare,
            RESULT: lambda: _isolated(warm, exit_evidence=False),
            EVIDENCE: lambda: _isolated(warm, exit_evidence=True),
            COLD: lambda: _isolated(cold, exit_evidence=False),
        }
        samples = await _compare(calls, rounds)
        tables = [_latency(samples), await _throughput(warm, rounds), await _memory(warm)]
    tables.append(await sandbox_siege.run(1 if plan.quick else 4))
    tables.append(await _others(rounds // 8))
    return tables


async def _bare() -> None:
    subprocess.run((sys.executable, "-I", "-c", "pass"), check=True)  # noqa: ASYNC221 - nothing else is to run


async def _isolated(sandbox: Sandbox, *, exit_evidence: bool) -> None:
    outcome = await sandbox.run(JOB, exit_evidence=exit_evidence)
    if outcome.value != 2:
        raise SystemExit(f"the sandbox answered {outcome}")


async def _compare(calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    order = random.Random(1)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            await asyncio.sleep(PAUSE_S)
            started = time.perf_counter()
            await calls[name]()
            samples[name].append((time.perf_counter() - started) * 1e3)
    return samples


def _latency(samples: Mapping[str, list[float]]) -> Table:
    rows: list[tuple[str, ...]] = []
    for name, values in samples.items():
        for percentile in (50, 99):
            value, bare = _percentile(values, percentile), _percentile(samples[BARE], percentile)
            goal = GOALS.get((name, percentile))
            said = ("", "") if goal is None else (f">= {goal:.0f}x", verdict(bare / value >= goal))
            rows.append((f"{name}, p{percentile}", number(value), times(bare / value), *said))
    note = "Wall time; every call in namespaces, cgroups and a filter of its own, used once."
    return Table("Sandbox: one call", ("", "ms", "against bare", "goal", ""), rows, note)


def _percentile(values: list[float], percentile: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percentile - 1]


async def _throughput(sandbox: Sandbox, rounds: int) -> Table:
    async def caller() -> None:
        for _ in range(rounds // 4):
            await _isolated(sandbox, exit_evidence=False)

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    rate = CALLERS * (rounds // 4) / (time.perf_counter() - started)
    return Table(f"Sandbox: {CALLERS} callers at once", ("", "calls/s"), [("to a result", number(rate))])


async def _memory(sandbox: Sandbox) -> Table:
    """The memory of a spare child that it shares with no other process."""
    await asyncio.sleep(0.5)
    assert sandbox.backend is not None
    own = [_private_kib(pid) for pid in _below(os.getpid())]
    found = statistics.median(one for one in own if one)
    return Table("Sandbox: memory of a spare child", ("", "KiB of its own"), [("median", number(found))])


def _below(pid: int) -> list[int]:
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        for child in map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()):
            found += [child, *_below(child)]
    return found


def _private_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


async def _others(rounds: int) -> Table:
    calls: dict[str, Call] = {BARE: _bare}
    opened: list[Sandbox] = []
    missing: list[str] = []
    for name, backend, program in ((BUBBLEWRAP, "bubblewrap", "bwrap"), (GVISOR, "gvisor", "runsc")):
        sandbox = await Sandbox.open(backends=(backend,)) if shutil.which(program) else None
        if sandbox is None or sandbox.backend is None:
            missing.append(f"{name} does not run here")
            continue
        opened.append(sandbox)
        calls[name] = lambda sandbox=sandbox: _isolated(sandbox, exit_evidence=False)
    samples = await _compare(calls, max(rounds, 5))
    for sandbox in opened:
        await sandbox.close()
    bare = _percentile(samples[BARE], 50)
    rows = [
        (name, number(_percentile(values, 50)), times(bare / _percentile(values, 50)))
        for name, values in samples.items()
    ]
    return Table("Sandbox: one program start a call", ("", "ms, p50", "against bare"), rows, "; ".join(missing))

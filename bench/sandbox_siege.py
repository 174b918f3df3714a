"""Measures a good call while hostile ones burn what they can get: one of each kind alone, and twenty at once."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

from bench.measure import number, times
from bench.report import Table, verdict
from interlock.executors.sandbox.allowance import Allowance
from interlock.executors.sandbox.job import GIB, MIB, Limits, PythonJob
from interlock.executors.sandbox.supervisor import Sandbox

GOAL = 2.0
AT_ONCE = 20
SAMPLES = 20
PAUSE_S = 0.02
LIMITS = Limits(memory_bytes=128 * MIB, pids=32, tmp_bytes=32 * MIB, wall_s=1.0)
GOOD = PythonJob(source="def main(x):\n    return x + 1\n", entry="main", arguments={"x": 1})
HOSTILE = {
    "processor": "while True: pass",
    "memory": "kept = []\n    while True: kept.append(os.urandom(1 << 20))",
    "storage": "for i in range(10**6): open(f'/tmp/{i}', 'wb', 0).write(b'x' * (1 << 20))",
    "forks": "while True:\n        try:\n            if os.fork() == 0: continue\n        except OSError: pass",
    "output": "while True: os.write(1, b'x' * 65536)",
}


async def run(rounds: int) -> Table:
    jobs = {
        name: PythonJob(source=f"import os\ndef main():\n    {body}\n", entry="main", limits=LIMITS)
        for name, body in HOSTILE.items()
    }
    waves = {name: [job] for name, job in jobs.items()}
    waves[f"{AT_ONCE} at once"] = [*jobs.values()] * (AT_ONCE // len(jobs))
    everybody = Allowance(cores=64, memory_bytes=64 * GIB)
    quiet: list[float] = []
    beside: dict[str, list[float]] = {name: [] for name in waves}
    async with await Sandbox.open(backends=("zygote",), spares=8, allowance=everybody) as sandbox:
        await asyncio.gather(_good(sandbox), sandbox.run(jobs["output"]))
        for _ in range(rounds):
            for name, wave in waves.items():
                quiet += [await _good(sandbox) for _ in range(SAMPLES // len(waves) + 1)]
                beside[name] += await _under(sandbox, wave)
    return _table(quiet, beside)


async def _under(sandbox: Sandbox, wave: Sequence[PythonJob]) -> list[float]:
    """Good calls while the wave runs, and again with a new one until there are enough."""
    found: list[float] = []
    while len(found) < SAMPLES:
        hostile = [asyncio.create_task(sandbox.run(job)) for job in wave]
        while not all(one.done() for one in hostile):
            found.append(await _good(sandbox))
        if any(one.result().status == "ok" for one in hostile):
            raise SystemExit("a hostile call ended well")
    return found


async def _good(sandbox: Sandbox) -> float:
    """Milliseconds of one call."""
    await asyncio.sleep(PAUSE_S)
    started = time.perf_counter()
    outcome = await sandbox.run(GOOD)
    if outcome.value != 2:
        raise SystemExit(f"the sandbox answered {outcome}")
    return (time.perf_counter() - started) * 1e3


def _table(quiet: list[float], beside: dict[str, list[float]]) -> Table:
    alone = statistics.median(quiet)
    rows: list[tuple[str, ...]] = [("nobody", number(alone), "1.00x", "", "")]
    for name, values in beside.items():
        ratio = statistics.median(values) / alone
        rows.append((name, number(ratio * alone), times(ratio), f"<= {GOAL:.0f}x", verdict(ratio <= GOAL)))
    note = "Wall time of a good call to its result. Holds on a machine where only the hostile calls are busy."
    return Table("Sandbox: a call beside hostile ones", ("beside", "ms, p50", "against nobody", "goal", ""), rows, note)

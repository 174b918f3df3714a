"""CPU time per call, measured so that a noisy machine does not decide who wins.

Contenders take turns: in every round each runs one slice, in random order, so that whatever slows the machine for a
while slows all of them. The figure is the median over the rounds. CPU time is that of the whole process: work left to
a thread counts, and a contender that answers before its work is done is waited for within its own slice (`settle`).
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Call = Callable[[], Awaitable[Any]]

WARM_S = 0.03
# Each slice ends with what settling costs, a commit for ours: among fewer calls it would show in the figure.
MIN_CALLS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """The duration of a measurement, and the rows to measure."""

    quick: bool
    rounds: int
    slice_s: float
    # The rows to measure, where a section can leave others out.
    rows: Sequence[str] = ()
    # `search`: a folder with labelled sets, in place of ours.
    folder: Path | None = None
    # `scale`: a commit to compare with.
    against: str = ""

    @classmethod
    def of(cls, *, quick: bool, rows: Sequence[str] = (), folder: Path | None = None, against: str = "") -> Plan:
        rounds, slice_s = (5, 0.04) if quick else (11, 0.14)
        return cls(quick, rounds, slice_s, rows, folder, against)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Something that can be called, by so many callers at once."""

    name: str
    call: Call
    callers: int = 1
    settle: Call | None = None
    answer: Callable[[Any], Any] = lambda raw: raw

    async def check(self, expected: Any) -> None:
        """Refuse to measure a contender that does not do the work."""
        found = self.answer(await self.call())
        if found != expected:
            raise SystemExit(f"{self.name} answered {str(found)[:200]!r}, not {str(expected)[:200]!r}")


@dataclass(frozen=True, slots=True)
class Figure:
    """CPU µs per call: the median over the rounds, the quartiles around it, and how many calls made a sample."""

    us: float
    low: float
    high: float
    calls: int

    @classmethod
    def of(cls, samples: Sequence[float], calls: int = 1) -> Figure:
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(middle, low, high, calls)

    def __str__(self) -> str:
        return number(self.us)

    @property
    def spread(self) -> str:
        return f"{number(self.low)}–{number(self.high)}"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x"


async def compare(contenders: Sequence[Contender], plan: Plan, seed: int = 1) -> dict[str, Figure]:
    """Let the contenders take turns; the CPU time per call of each."""
    order = random.Random(seed)
    calls = {contender.name: await _slice_size(contender, plan.slice_s) for contender in contenders}
    # What was imported for one contender must not be walked by the collector at another's cost.
    gc.collect()
    gc.freeze()
    samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(plan.rounds):
        for contender in order.sample(contenders, len(contenders)):
            gc.collect()
            cpu_s, _ = await _run(contender, calls[contender.name])
            samples[contender.name].append(cpu_s / calls[contender.name] * 1e6)
    gc.unfreeze()
    return {name: Figure.of(values, calls[name]) for name, values in samples.items()}


async def _slice_size(contender: Contender, slice_s: float) -> int:
    """Warm the contender up and find how many calls fill a slice."""
    calls, wall_s = contender.callers, 0.0
    while wall_s < WARM_S:
        calls *= 2
        # The best of three: one slow fsync must not pass for the cost of a few calls.
        wall_s = min([(await _run(contender, calls))[1] for _ in range(3)])
    wanted = max(MIN_CALLS, 4 * contender.callers, round(calls * slice_s / wall_s))
    return wanted - wanted % contender.callers


async def _run(contender: Contender, calls: int) -> tuple[float, float]:
    """CPU and wall time of so many calls, shared among the contender's callers."""
    call = contender.call

    async def caller(count: int) -> None:
        for _ in range(count):
            await call()

    wall, cpu = time.perf_counter(), time.process_time()
    if contender.callers == 1:
        await caller(calls)
    else:
        await asyncio.gather(*(caller(calls // contender.callers) for _ in range(contender.callers)))
    if contender.settle is not None:
        await contender.settle()
    return time.process_time() - cpu, time.perf_counter() - wall


def process_clock(pid: int) -> int:
    """The clock that counts a process's CPU time (clock_getcpuclockid(3), which Python does not have)."""
    return (~pid << 3) | 2

"""`calls`: CPU time per call, ours governed and journalled, the peers' as they are.

The peers run with one caller, where they are cheapest: none of them waits for anything, so more callers add only the
switching between tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bench import ours, peers
from bench.measure import Contender, Figure, Plan, compare, times
from bench.payloads import PAYLOADS, Payload
from bench.report import Table, verdict
from interlock import Interlock

BATCHED = "Interlock, batched, 1 caller"
DURABLE = "Interlock, durable, 1 caller"
DURABLE_MANY = f"Interlock, durable, {ours.MANY} callers"


@dataclass(frozen=True, slots=True)
class Goal:
    """The factor by which one of our ways to call must be cheaper than a peer."""

    ours: str
    peer: str
    at_least: float


GOALS = (
    Goal(BATCHED, peers.LANGCHAIN, 10.0),
    Goal(DURABLE_MANY, peers.LANGCHAIN, 6.0),
    Goal(DURABLE_MANY, peers.MANAGER, 1.0),
)


async def run(plan: Plan) -> list[Table]:
    figures: dict[str, Mapping[str, Figure]] = {}
    async with AsyncExitStack() as stack:
        batched = await stack.enter_async_context(ours.opened("batched"))
        durable = await stack.enter_async_context(ours.opened("durable"))
        for payload in PAYLOADS:
            figures[payload.name] = await _measure(batched, durable, payload, plan)
    return [*(_costs(payload, figures[payload.name]) for payload in PAYLOADS), goals(figures)]


async def _measure(batched: Interlock, durable: Interlock, payload: Payload, plan: Plan) -> Mapping[str, Figure]:
    field: list[Contender] = [
        peers.bare(payload),
        ours.contender(batched, payload, BATCHED),
        ours.contender(durable, payload, DURABLE),
        ours.contender(durable, payload, DURABLE_MANY, ours.MANY),
        *await peers.contenders(payload),
    ]
    for contender in field:
        await contender.check(payload.expected)
    figures = await compare(field, plan)
    for contender in field:
        await contender.check(payload.expected)
    return figures


def _costs(payload: Payload, figures: Mapping[str, Figure]) -> Table:
    batched, durable = figures[BATCHED].us, figures[DURABLE_MANY].us
    rows = [
        (name, str(figure), figure.spread, f"{figure.calls:,}", times(figure.us / batched), times(figure.us / durable))
        for name, figure in figures.items()
    ]
    columns = ("", "CPU µs/call", "quartiles", "calls/slice", "to batched", "to durable")
    return Table(payload.title, columns, rows, f"Ratios are to batched, 1 caller, and to durable, {ours.MANY} callers.")


def goals(figures: Mapping[str, Mapping[str, Figure]], how: str = "") -> Table:
    rows: list[tuple[str, ...]] = []
    for goal in GOALS:
        for payload, found in figures.items():
            ratio = found[goal.peer].us / found[goal.ours].us
            words = f"{goal.ours.removeprefix('Interlock, ')} against {goal.peer}"
            rows.append((words, payload, f">= {goal.at_least:g}x", times(ratio), verdict(ratio >= goal.at_least)))
    return Table(f"Goals: times cheaper than the peer{how}", ("", "payload", "goal", "measured", ""), rows)

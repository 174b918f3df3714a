"""Scores of selections over tasks: precision, recall, wrong tools, tokens, cost and latency.

INVARIANT: what a task costs is defined here and nowhere else: the price of the tokens that a model reads to choose, and
the cost of the call of the tool that was chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean
from typing import Any

from interlock.core.record import dataclass
from interlock.search.evaluation import recall


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """A task, with the tools that it needs (of each group one is enough), and what was selected for it.

    `call_cost` is what a call of the chosen tool costs, and `latency_ms` how long it takes, where that was measured.
    """

    needed: Sequence[Collection[str]]
    candidates: Sequence[str]
    chosen: str | None
    tokens: int
    call_cost: float = 0.0
    latency_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Means over tasks. `wrong` is the part of tasks for which a tool was chosen that they do not need.

    `latency_ms` is the mean of the tasks whose chosen tool was measured; None where there are none.
    """

    tasks: int
    precision: float
    recall: float
    wrong: float
    without: float
    tokens: float
    cost: float
    latency_ms: float | None = None

    def document(self) -> dict[str, Any]:
        return {
            "tasks": self.tasks,
            "precision": round(self.precision, 4),
            "recall": round(self.recall, 4),
            "wrong_tool_rate": round(self.wrong, 4),
            "no_tool_rate": round(self.without, 4),
            "tokens_per_task": round(self.tokens, 1),
            "cost_per_task": round(self.cost, 6),
            "latency_ms_per_task": None if self.latency_ms is None else round(self.latency_ms, 1),
        }


def report(outcomes: Sequence[TaskOutcome], token_price: float) -> Report:
    """Means over tasks; zeros where there are none. `token_price` is that of a million tokens."""
    if not outcomes:
        return Report(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    measured = [one.latency_ms for one in outcomes if one.latency_ms is not None]
    return Report(
        len(outcomes),
        fmean(_precision(one) for one in outcomes),
        fmean(recall(one.candidates, one.needed) for one in outcomes),
        fmean(one.chosen is not None and not _needs(one, one.chosen) for one in outcomes),
        fmean(one.chosen is None for one in outcomes),
        fmean(one.tokens for one in outcomes),
        fmean(cost_of(one, token_price) for one in outcomes),
        fmean(measured) if measured else None,
    )


def cost_of(one: TaskOutcome, token_price: float) -> float:
    """The cost of a task: the tokens that a model reads for it, and the call of the tool that was chosen."""
    return one.tokens * token_price / 1_000_000 + one.call_cost


def _needs(one: TaskOutcome, tool: str) -> bool:
    return any(tool in group for group in one.needed)


def _precision(one: TaskOutcome) -> float:
    """The part of the candidates that the task needs; 0 where there is none."""
    return sum(_needs(one, tool) for tool in one.candidates) / max(len(one.candidates), 1)

"""The operator's numeric limits: budgets, rate limits, prices, and the thresholds of loop detection.

    [[budgets]]                      [[rate_limits]]
    per = "tenant"                   per = "caller"
    limit = 5.0                      limit = 100
    period_s = 86400                 window_s = 60

Amounts are in units of one currency, the operator's choice; internally they are whole millionths of it, so that sums
are exact.
"""

from __future__ import annotations

import fnmatch
from functools import cached_property, lru_cache
from typing import Literal, Self

import pydantic

from interlock.core.amounts import MAX_AMOUNT
from interlock.core.formatting import quantity, span


@lru_cache(maxsize=4096)
def _covers(pattern: str, tool: str) -> bool:
    return fnmatch.fnmatchcase(tool, pattern)


class _Rule(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class Budget(_Rule):
    """A limit on the total cost of calls.

    Periods follow one another from 1970 on and each begins with the whole limit. Without a period a budget lasts as
    long as its subject: that of a task or a session is removed after 90 days without a call, that of a tenant or a
    caller never.
    """

    per: Literal["call", "task", "session", "tenant", "caller"]
    limit: float = pydantic.Field(ge=0, le=MAX_AMOUNT)
    tools: str = "*"
    period_s: int | None = pydantic.Field(default=None, ge=1)

    @pydantic.model_validator(mode="after")
    def _period_fits(self) -> Self:
        if self.per == "call" and self.period_s is not None:
            raise ValueError("a budget per call has no period")
        return self

    @cached_property
    def name(self) -> str:
        """The budget's name in a refusal."""
        tools = "" if self.tools == "*" else f" for {self.tools}"
        period = "" if self.period_s is None else f" and {span(self.period_s * 1000)}"
        return f"{quantity(self.limit)} per {self.per}{period}{tools}"

    def covers(self, tool: str) -> bool:
        return _covers(self.tools, tool)


class RateLimit(_Rule):
    """A limit on the number of calls admitted in any window of a given length."""

    per: Literal["caller", "tool", "service", "tenant"]
    limit: int = pydantic.Field(ge=1, le=10_000)
    window_s: float = pydantic.Field(ge=0.001, le=86_400)
    tools: str = "*"

    @cached_property
    def name(self) -> str:
        """The limit's name in a refusal."""
        tools = "" if self.tools == "*" else f" for {self.tools}"
        return f"{self.limit} calls per {self.per} in {span(self.window_s * 1000)}{tools}"

    def covers(self, tool: str) -> bool:
        return _covers(self.tools, tool)


class Prices(_Rule):
    """Prices of metered use: a second of CPU, a second of running, the peak memory of an isolated call as GiB for as
    long as it ran, a person's decision on a call.
    """

    cpu_s: float = pydantic.Field(default=0.0, ge=0, le=MAX_AMOUNT)
    wall_s: float = pydantic.Field(default=0.0, ge=0, le=MAX_AMOUNT)
    memory_gib_s: float = pydantic.Field(default=0.0, ge=0, le=MAX_AMOUNT)
    human_review: float = pydantic.Field(default=0.0, ge=0, le=MAX_AMOUNT)

    @property
    def metered(self) -> bool:
        """Whether anything that a meter measures has a price."""
        return bool(self.cpu_s or self.wall_s or self.memory_gib_s)


class LoopLimits(_Rule):
    """The number of calls in a window from which on a caller counts as caught in a loop.

    Causes alerts, never refusals.
    """

    identical: int = pydantic.Field(default=100, ge=1)
    calls: int = pydantic.Field(default=10_000, ge=1)
    window_s: float = pydantic.Field(default=60.0, gt=0, le=86_400)

"""Budgets, as endpoints show them: spent, reserved for running calls, and left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from interlock.authority import budgets
from interlock.authority.budgets import Use, task_cost
from interlock.core.amounts import MILLION, millionths
from interlock.core.clock import iso
from interlock.store.failures import store_failure
from interlock.store.port import Reader, StoreError

if TYPE_CHECKING:
    from interlock.api.audit import Audit
    from interlock.api.parts import Parts
    from interlock.call.allowances import Budget
    from interlock.call.context import Caller
    from interlock.data.schema import Json

__all__ = ["Budgets", "charge", "overview", "shown", "task_cost"]

# The number of callers listed for each budget: those that have used the most.
MOST = 100
# What those whom a budget counts together are named by, in the order of `Use.subject`.
_NAMES = {
    "call": (),
    "task": ("tenant", "task"),
    "session": ("tenant", "caller", "session"),
    "tenant": ("tenant",),
    "caller": ("tenant", "caller"),
}
Within = Callable[["Budget"], "tuple[str, ...] | None"]


class Budgets:
    """Budgets: the cost that calls may still have."""

    def __init__(self, parts: Parts, audit: Audit) -> None:
        self._parts = parts
        self._audit = audit
        self._one_looks = asyncio.Lock()

    async def show(self, *, by: Caller, door: str, task: str | None = None, every: bool = False) -> list[Json]:
        """The rest of each budget for the caller, their tenant, and a task that they name.

        With `every`, what is left for anybody in their tenant, for local auditors anywhere; which is on record.
        """
        if every:
            await self._audit.note("budgets", {}, by=by, door=door)
            whole = () if by.tenant == "local" else (by.tenant,)
            return await self._overview(lambda _: whole)
        own = by.tenant, by.id
        theirs = {"tenant": own[:1], "caller": own, "session": own, "task": None if task is None else (by.tenant, task)}
        return await self._overview(lambda budget: theirs.get(budget.per))

    async def _overview(self, within: Within) -> list[Json]:
        """Sessions and tasks may be there by the million; looking through them holds up no call."""
        async with self._one_looks:
            every, now_ms = self._parts.settings.budgets, self._parts.clock.now_ms()
            return await self._parts.readers.read(lambda reader: shown(reader, every, within, now_ms))


async def charge(parts: Parts, task: str, *, part: str, amount: float, session: str, key: str, by: Caller) -> None:
    """Add what a task used besides calls (llm_inference, retrieval) to its cost. The same key counts once."""
    now_ms = parts.clock.now_ms()
    held = budgets.budget_keys(parts.settings.budgets, caller=by, session=session, task=task, tool="", now_ms=now_ms)
    unit = budgets.charge(
        f"charge:{task}:{key}", part, amount, held, task=task, session=session, tenant=by.tenant, by=by.id
    )
    for overrun in await parts.journal.commit(unit):
        facts = {"alert": "BUDGET_OVERRUN", "task": task, **overrun.document()}
        parts.observer.announce("tool.alert", "", "", **facts)


def overview(parts: Parts, within: Within) -> list[Json]:
    """List all budgets, each with its use.

    `within` returns the prefixes of the names whose use is shown; None shows nobody's.
    """
    try:
        with closing(parts.home.reading()) as connection:
            return shown(connection, parts.settings.budgets, within, parts.clock.now_ms())
    except StoreError as error:
        raise store_failure(error, "read") from None


def shown(reader: Reader, every: Sequence[Budget], within: Within, now_ms: int) -> list[Json]:
    """List these budgets with their use, as `overview` does, read with `reader`."""
    return [_shown(reader, budget, within(budget), now_ms) for budget in every]


def _shown(reader: Reader, budget: Budget, within: tuple[str, ...] | None, now_ms: int) -> Json:
    found = [] if within is None else budgets.uses(reader, budget, now_ms=now_ms, within=within, most=MOST)
    ends_ms = budgets.ends_ms(budget, now_ms)
    return {
        "budget": budget.name,
        **budget.model_dump(),
        "ends_at": None if ends_ms is None else iso(ends_ms),
        "used": [_used(budget, one) for one in found],
    }


def _used(budget: Budget, use: Use) -> Json:
    left = millionths(budget.limit) - use.spent - use.held
    amounts = {"spent": use.spent / MILLION, "held": use.held / MILLION, "left": left / MILLION}
    return {**dict(zip(_NAMES[budget.per], use.subject, strict=True)), **amounts}

"""Budgets: limits on the total cost of calls, enforced also for concurrent calls.

Theory of operation. A budget's row states what is *spent* and what is *held*. Before a call runs, its estimate is held
in every budget that covers it, in one transaction: if one of them has no room, nothing is written; so concurrent calls
cannot share the same room. When the call ends, the hold is removed and the actual cost is spent, more or less than the
estimate. A call without an estimate holds nothing, and is refused once a budget is used up.

    hold:    spent + held + estimate <= limit, for every budget ──► held += estimate
    settle:  held -= estimate, spent += actual                  ──► the budgets that are overrun now

A process that dies leaves its holds behind. If a call had written its intent, it may have run and its hold counts as
spent; if not, it did not run and the hold is released.

INVARIANT: `held` of a budget is the sum of its holds, and as long as estimates are kept, spent + held <= limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from interlock.call.cost import TASK_PARTS, Cost
from interlock.core.amounts import MAX_AMOUNT, MILLION, millionths
from interlock.core.errors import Failure
from interlock.core.formatting import quantity, wait
from interlock.core.record import NamedTuple
from interlock.store import budgets as table
from interlock.store import ledger, records

if TYPE_CHECKING:
    from interlock.call.allowances import Budget
    from interlock.call.context import Caller
    from interlock.store.port import Reader, Transaction, Unit

EVICT_AT_ONCE = 1000
# How long a budget without a period outlives the last call of its task or session.
IDLE_MS = 90 * 86_400_000


class Allowance(NamedTuple):
    """A budget as it applies to one call. A limit per call needs no row, so it has no key.

    `until_ms` is when its row may be removed, `renews_ms` when its period begins again; None if never.
    """

    key: str | None
    limit: int
    until_ms: int | None
    name: str
    renews_ms: int | None = None


class Overrun(NamedTuple):
    """A budget of which more is spent than allowed."""

    name: str
    limit: int
    spent: int

    def document(self) -> dict[str, Any]:
        return {"budget": self.name, "limit": self.limit / MILLION, "spent": self.spent / MILLION}


class Booked(NamedTuple):
    """The effect of a cost: the budgets that it overran, and the new state of each budget that it changed.

    The latter are in the record of the same write, so that the verifier knows the amounts: the key of each, how much is
    spent, and when its row may be removed.
    """

    overrun: tuple[Overrun, ...] = ()
    rows: tuple[tuple[str, int, int | None], ...] = ()


class Use(NamedTuple):
    """The use of a budget by one of its subjects, which is named from the tenant on."""

    subject: tuple[str, ...]
    spent: int
    held: int


def budget_keys(
    budgets: Sequence[Budget], *, caller: Caller, session: str, task: str, tool: str, now_ms: int
) -> tuple[Allowance, ...]:
    """Collect every budget that covers a call. Where rules share a row, the lowest limit applies."""
    # INVARIANT: callers choose the names of sessions and tasks; whatever name they choose, they stay in their tenant.
    subjects: dict[str, tuple[str, ...]] = {
        "call": (),
        "task": (caller.tenant, task),
        "session": (caller.tenant, caller.id, session),
        "tenant": (caller.tenant,),
        "caller": (caller.tenant, caller.id),
    }
    allowances: dict[str, Allowance] = {}
    for budget in budgets:
        if not budget.covers(tool):
            continue
        start_ms, until_ms = _period(budget, now_ms)
        subject = subjects[budget.per]
        key = orjson.dumps([budget.per, budget.tools, budget.period_s, start_ms, *subject]).decode()
        limit = millionths(budget.limit)
        if key not in allowances or limit < allowances[key].limit:
            renews_ms = None if budget.period_s is None else until_ms
            allowances[key] = Allowance(key if subject else None, limit, until_ms, budget.name, renews_ms)
    return tuple(allowances.values())


def _period(budget: Budget, now_ms: int) -> tuple[int, int | None]:
    """Return when the present period of a budget began and when its row may be removed."""
    if budget.period_s is not None:
        start_ms = now_ms - now_ms % (budget.period_s * 1000)
        return start_ms, start_ms + budget.period_s * 1000
    return 0, now_ms + IDLE_MS if budget.per in ("task", "session") else None


def ends_ms(budget: Budget, now_ms: int) -> int | None:
    """Return when the present period of a budget ends; None if it has none."""
    return None if budget.period_s is None else _period(budget, now_ms)[1]


def uses(reader: Reader, budget: Budget, *, now_ms: int, within: Sequence[str] = (), most: int) -> list[Use]:
    """Return the current use of a budget, the largest first; only of subjects whose names begin with `within`."""
    start_ms, _ = _period(budget, now_ms)
    beginning = orjson.dumps([budget.per, budget.tools, budget.period_s, start_ms]).decode().removesuffix("]")
    first = ",".join((beginning, orjson.dumps(list(within)).decode()[1:-1]))
    rows = table.most_used(reader, first, most)
    return [Use(tuple(orjson.loads(key)[4:]), spent, held) for key, spent, held in rows]


def used(reader: Reader, allowance: Allowance) -> int:
    """Return how much of a budget is spent or held now."""
    return 0 if allowance.key is None else sum(table.balance(reader, allowance.key) or ())


def check(transaction: Transaction, allowances: Sequence[Allowance], amount: int) -> None:
    """Refuse (E3210) a call that would exceed a budget, and every call once one is used up. Writes nothing."""
    full: list[tuple[Allowance, int, int]] = []
    for allowance in allowances:
        spent, held = 0, 0
        if allowance.key is not None:
            spent, held = table.balance(transaction, allowance.key) or (0, 0)
        left = allowance.limit - spent - held
        if amount > left or left <= 0:
            full.append((allowance, spent, held))
    if full:
        renews_ms = _renewed(tuple(allowance for allowance, _, _ in full), amount)
        wait_ms = None if renews_ms is None else max(renews_ms - transaction.now_ms, 1)
        raise _exceeded(*full[0], amount, wait_ms)


def _renewed(full: Sequence[Allowance], amount: int) -> int | None:
    """Return when the last of these budgets has room for an amount again; None if one never has."""
    # An amount above the limit exceeds the next period too, and a budget of zero is always used up.
    times = [one.renews_ms if max(amount, 1) <= one.limit else None for one in full]
    return None if None in times else max(time for time in times if time is not None)


def hold(transaction: Transaction, call_id: str, owner: str, allowances: Sequence[Allowance], amount: int) -> None:
    """Hold an estimate in every budget, or refuse (E3210) before anything is written. A call holds once."""
    check(transaction, allowances, amount)
    if not amount:
        return
    for key, _, until_ms, *_ in allowances:
        if key is None:
            continue
        table.add(transaction, key, 0, amount, until_ms)
        table.insert_hold(transaction, call_id, key, amount, owner)


def held_for(transaction: Transaction, call_id: str) -> int:
    """Return what a call holds. It is the same amount in all budgets, so any of its rows has it."""
    return table.held_by(transaction, call_id)


def settle(
    transaction: Transaction,
    call_id: str,
    actual: Cost,
    allowances: Sequence[Allowance],
    *,
    task: str,
    session: str,
    tenant: str,
) -> Booked:
    """Spend the actual cost of a call in place of its hold, and store the cost.

    The allowances are those it was admitted under. A call is settled once: one whose cost is stored is left unchanged.
    A call without a cost leaves no row.
    """
    total = actual.total
    if total and not _store(transaction, call_id, actual, task=task, session=session, tenant=tenant):
        return Booked()
    held = 0
    if allowances:
        held = table.held_by(transaction, call_id)
        if held:
            table.delete_holds(transaction, call_id)
    return _spend(transaction, allowances, total, held)


def charge(
    charge_id: str,
    part: str,
    amount: float,
    allowances: Sequence[Allowance],
    *,
    task: str,
    session: str,
    tenant: str,
    by: str,
) -> Unit[tuple[Overrun, ...]]:
    """Unit that adds inference or retrieval to a task, and to the budgets that cover it. The same id counts once.

    It has been used already, so nothing is refused; the next call is. E3004 for another part or a negative amount.
    """
    if part not in TASK_PARTS:
        raise Failure("E3004", f"`{part}` cannot be charged to a task; the parts are {', '.join(TASK_PARTS)}")
    if not 0 <= amount <= MAX_AMOUNT:
        raise Failure("E3004", f"a charge is an amount between 0 and {MAX_AMOUNT:.0f}")
    cost = Cost(**{part: millionths(amount)})

    def unit(transaction: Transaction) -> tuple[Overrun, ...]:
        if not _store(transaction, charge_id, cost, task=task, session=session, tenant=tenant):
            return ()
        body = records.plain(
            "authority", charge_id, transaction.now_ms, act="cost.charged", by=by, tenant=tenant, task=task, part=part,
            millionths=cost.total,
        )  # fmt: skip
        booked = _spend(transaction, [one for one in allowances if one.key is not None], cost.total, 0)
        transaction.append("authority", charge_id, records.with_budgets(body, booked.rows))
        return booked.overrun

    return unit


def release_orphans(alive: Callable[[str], bool]) -> Unit[list[str]]:
    """Unit that ends the holds of dead processes: as spent if the call may have run, else as never held."""

    def unit(transaction: Transaction) -> list[str]:
        holds = table.holds(transaction)
        living = {owner: alive(owner) for owner in {one.owner for one in holds}}
        orphans = [one for one in holds if not living[one.owner]]
        for hold in orphans:
            call, key, amount, _ = hold
            began = ledger.of_kind(transaction, call, "intent")
            table.end_hold(transaction, hold, amount if began else 0)
            if began:
                row = table.spent(transaction, key)
                intent = orjson.loads(began[0])
                actors = {name: intent.get(name) for name in ("callerId", "agentId", "tenant")}
                body = records.plain(
                    "authority", call, transaction.now_ms, act="hold.spent", by="interlock", millionths=amount, **actors
                )
                transaction.append(
                    "authority", call, records.with_budgets(body, [(key, row.spent, row.until_ms)] if row else [])
                )
        return sorted({one.call for one in orphans})

    return unit


def evict(transaction: Transaction) -> int:
    """Remove budgets whose period is over and in which nothing is held, a bounded number at a time."""
    return table.delete_ended(transaction, transaction.now_ms, EVICT_AT_ONCE)


def task_cost(reader: Reader, task: str, *, tenant: str) -> Cost:
    """Return the cost of a task: every call made for it, nested ones included, and what was charged to it."""
    return Cost(**table.parts_of_task(reader, task, tenant))


def _store(tx: Transaction, call_id: str, cost: Cost, *, task: str, session: str, tenant: str) -> bool:
    """Store a cost under its id; False if there is one already."""
    parts = orjson.dumps(cost.parts).decode()
    return table.insert_cost(tx, call_id, task=task, session=session, tenant=tenant, total=cost.total, parts=parts)


def _spend(tx: Transaction, allowances: Sequence[Allowance], amount: int, held: int) -> Booked:
    """Spend an amount in place of what was held."""
    overrun: list[Overrun] = []
    rows: list[tuple[str, int, int | None]] = []
    if not amount and not held:
        return Booked()
    for key, limit, until_ms, name, _ in allowances:
        spent = amount
        if key is not None:
            table.add(tx, key, amount, -held, until_ms)
            row = table.spent(tx, key)
            assert row is not None  # it was written just now
            spent, until_ms = row
            rows.append((key, spent, until_ms))
        if spent > limit:
            overrun.append(Overrun(name, limit, spent))
    return Booked(tuple(overrun), tuple(rows) if amount else ())


def _exceeded(allowance: Allowance, spent: int, held: int, amount: int, wait_ms: int | None) -> Failure:
    limit = allowance.limit / MILLION
    facts = {"limit": limit, "spent": spent / MILLION, "held": held / MILLION, "needed": amount / MILLION}
    so_far = f"{quantity(facts['spent'])} is spent and {quantity(facts['held'])} set aside"
    if allowance.key is None:
        words = f"this call would cost {quantity(facts['needed'])}"
    elif amount:
        words = f"{so_far}, and this call needs {quantity(facts['needed'])}"
    else:
        words = f"{so_far}, so it is used up"
    return Failure(
        "E3210",
        f"the budget of {allowance.name} does not allow it: {words}",
        details={"budget": allowance.name, **facts},
        retry_after_ms=wait_ms,
        resolution=None if wait_ms is None else f"there is room again in {wait(wait_ms)}; an operator can allow more",
    )

"""Checks that costs and budgets still agree with the journal.

A cost is in the record that closes its call, or in the one that charges a task. A record that spends from budgets
states the amount spent of each afterwards, so the row of a budget must agree with the last record about it.
Reservations of running calls are on no record: there, one table must be the sum of the other.

A budget whose period is over may be gone, and may begin again. Rows that no record names were written by an older
version and are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from interlock.audit import agreement
from interlock.core.amounts import millionths
from interlock.store import verify_reads

if TYPE_CHECKING:
    from interlock.data.schema import Json
    from interlock.store.port import Reader


def disagreements(reader: Reader, purged_through: int, now_ms: int) -> Iterator[tuple[int, str]]:
    """Yield differences between these tables and the records: the seq of the newest record concerned,
    or 0, and a text.
    """
    spent: dict[str, tuple[int, Any, Any]] = {}
    has_costs = verify_reads.has_costs(reader)
    for seq, kind, call, body in verify_reads.records_of_costs(reader):
        record = agreement.parsed(body)
        if not isinstance(record, dict):
            continue
        known = cast("Json", record)
        for budget, amount, until_ms in known.get("budgets") or ():
            spent[budget] = (seq, amount, until_ms)
        wanted = _recorded(kind, known)
        if wanted and has_costs:
            yield from _compare_cost(reader, seq, call, wanted)
    if has_costs and purged_through == 0:
        for call in verify_reads.unrecorded_costs(reader):
            yield 0, f"the cost of call {call} is in the tables and on no record"
    yield from _compare_budgets(reader, spent, now_ms)


def _recorded(kind: str, record: Json) -> dict[str, int]:
    """Return the cost that a record stores, by parts; empty if it stores none."""
    if kind == "authority":
        amount: Any = record.get("millionths")
        charged = record.get("act") == "cost.charged" and isinstance(amount, int) and amount
        return {str(record.get("part")): int(amount)} if charged else {}
    cost = record.get("cost")
    parts = cast("Json", cost) if isinstance(cost, dict) else {}
    return {part: millionths(amount) for part, amount in parts.items() if part != "total" and amount}


def _compare_cost(reader: Reader, seq: int, call: str, wanted: dict[str, int]) -> Iterator[tuple[int, str]]:
    row = verify_reads.cost(reader, call)
    if row is None:
        yield (
            seq,
            f"the cost of call {call} is missing in the tables, on record it is {sum(wanted.values())} millionths",
        )
        return
    total, parts = row[0], agreement.parsed(row[1])
    if total != sum(wanted.values()) or parts != wanted:
        yield seq, f"the cost of call {call} is {total!r} millionths in the tables ({parts!r}), on record {wanted!r}"


def _compare_budgets(
    reader: Reader, recorded: dict[str, tuple[int, Any, Any]], now_ms: int
) -> Iterator[tuple[int, str]]:
    held: dict[str, Any] = {}
    for budget, amount in verify_reads.holds(reader):
        held[budget] = held.get(budget, 0) + amount
    for budget, spent, amount in verify_reads.spends(reader):
        wanted = held.pop(budget, 0)
        if amount != wanted:
            yield 0, f"the budget {budget} sets {amount!r} millionths aside, and calls hold {wanted!r}"
        if type(spent) is not int or spent < 0:
            yield 0, f"of the budget {budget} {spent!r} millionths are spent, which cannot be"
        seq, on_record, until_ms = recorded.pop(budget, (0, spent, None))
        if spent != on_record and _lasts(until_ms, now_ms):
            yield (
                seq,
                f"of the budget {budget} {spent!r} millionths are spent in the tables, on record {on_record!r}",
            )
    for budget in held:
        yield 0, f"a call holds room in the budget {budget}, which is missing in the tables"
    for budget, (seq, on_record, until_ms) in recorded.items():
        if _lasts(until_ms, now_ms):
            yield (
                seq,
                f"the budget {budget} is missing in the tables, on record {on_record!r} millionths of it are spent",
            )


def _lasts(until_ms: Any, now_ms: int) -> bool:
    """Whether the row of a budget must still exist."""
    return not isinstance(until_ms, int) or until_ms > now_ms

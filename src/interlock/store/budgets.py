"""Tables `spend`, `hold` and `cost`: the use of budgets, and what calls cost. All amounts are in millionths.

A row of `spend` is one budget in one period: what is spent of it and what running calls hold of it. A row of `hold` is
what one running call holds of one budget. A row of `cost` is what one call or charge did cost, by part.

INVARIANT: `held` of a budget is the sum of its rows in `hold`.
"""

from __future__ import annotations

import orjson

from interlock.core.record import NamedTuple
from interlock.store.port import Reader, Transaction


class Balance(NamedTuple):
    """The spent and the held amount of a budget."""

    spent: int
    held: int


class Spent(NamedTuple):
    """The spent amount of a budget, and when its row may be removed (None: never)."""

    spent: int
    until_ms: int | None


class Use(NamedTuple):
    """A budget's key with what is spent and held of it."""

    budget: str
    spent: int
    held: int


class Hold(NamedTuple):
    """The amount that a call of a process (`owner`) holds of a budget."""

    call: str
    budget: str
    amount: int
    owner: str


# Budgets


def balance(reader: Reader, budget: str) -> Balance | None:
    row = reader.one("SELECT spent, held FROM spend WHERE budget = ?", (budget,))
    return None if row is None else Balance._make(row)


def spent(reader: Reader, budget: str) -> Spent | None:
    row = reader.one("SELECT spent, until_ms FROM spend WHERE budget = ?", (budget,))
    return None if row is None else Spent._make(row)


def most_used(reader: Reader, prefix: str, most: int) -> list[Use]:
    """The budgets whose keys begin with a prefix, those with the most spent and held first."""
    rows = reader.all(
        "SELECT budget, spent, held FROM spend WHERE budget >= ? AND budget < ?"
        " ORDER BY spent + held DESC, budget LIMIT ?",
        (prefix, f"{prefix}\U0010ffff", most),
    )
    return [Use._make(row) for row in rows]


def add(transaction: Transaction, budget: str, spent: int, held: int, until_ms: int | None) -> None:
    """Add to what is spent and held of a budget. Its row stays until the latest time that was given."""
    transaction.execute(
        "INSERT INTO spend (budget, spent, held, until_ms) VALUES (?, ?, ?, ?) ON CONFLICT (budget) DO UPDATE SET"
        " spent = spend.spent + excluded.spent, held = spend.held + excluded.held, until_ms = CASE"
        " WHEN spend.until_ms IS NULL OR spend.until_ms > excluded.until_ms THEN spend.until_ms"
        " ELSE excluded.until_ms END",
        (budget, spent, held, until_ms),
    )


def end_hold(transaction: Transaction, hold: Hold, spent: int) -> None:
    """Take a hold out of what is held of its budget, add to what is spent of it, and remove the hold."""
    transaction.execute(
        "UPDATE spend SET spent = spent + ?, held = held - ? WHERE budget = ?", (spent, hold.amount, hold.budget)
    )
    transaction.execute("DELETE FROM hold WHERE call = ? AND budget = ?", (hold.call, hold.budget))


def delete_ended(transaction: Transaction, now_ms: int, most: int) -> int:
    """Remove budgets whose time is over and of which nothing is held, at most so many; returns how many went."""
    return transaction.execute(
        "DELETE FROM spend WHERE budget IN (SELECT budget FROM spend WHERE until_ms <= ? AND held = 0 LIMIT ?)",
        (now_ms, most),
    ).rowcount


# Holds


def insert_hold(transaction: Transaction, call: str, budget: str, amount: int, owner: str) -> None:
    transaction.execute(
        "INSERT INTO hold (call, budget, amount, owner) VALUES (?, ?, ?, ?)", (call, budget, amount, owner)
    )


def held_by(reader: Reader, call: str) -> int:
    """Return what a call holds of each of its budgets, which is the same amount in all of them; 0 if
    it holds nothing.
    """
    row = reader.one("SELECT amount FROM hold WHERE call = ? LIMIT 1", (call,))
    return 0 if row is None else row[0]


def holds(reader: Reader) -> list[Hold]:
    return [Hold._make(row) for row in reader.all("SELECT call, budget, amount, owner FROM hold")]


def delete_holds(transaction: Transaction, call: str) -> None:
    transaction.execute("DELETE FROM hold WHERE call = ?", (call,))


# Costs


def insert_cost(
    transaction: Transaction, call: str, *, task: str, session: str, tenant: str, total: int, parts: str
) -> bool:
    """Store a cost under its id, its parts as a JSON object; False where there is one already."""
    return bool(
        transaction.execute(
            "INSERT INTO cost (call, task, session, tenant, total, parts) VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT DO NOTHING",
            (call, task, session, tenant, total, parts),
        ).rowcount
    )


def parts_of_task(reader: Reader, task: str, tenant: str) -> dict[str, int]:
    """Return the cost of a task, by part."""
    sums: dict[str, int] = {}
    for (parts,) in reader.each("SELECT parts FROM cost WHERE task = ? AND tenant = ?", (task, tenant)):
        for part, amount in orjson.loads(parts).items():
            sums[part] = sums.get(part, 0) + amount
    return dict(sorted(sums.items()))

"""Facts: the table `fact`, which holds small values by name.

A name is a word of its own (`registry_epoch`) or a prefix and what the fact is about (`begun:` and the id of a call).
A family of facts with the prefix `begun:` is the range of names from `begun:` to before `begun;`.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlock.store.port import Reader, Transaction


def get(reader: Reader, name: str) -> str | None:
    """The value of a fact; None where there is none."""
    row = reader.one("SELECT value FROM fact WHERE name = ?", (name,))
    return None if row is None else row[0]


def some(reader: Reader, names: Sequence[str]) -> dict[str, str]:
    """Return the facts with these names, by name. Names without a fact are left out."""
    statement = f"SELECT name, value FROM fact WHERE name IN ({_marks(names)})"  # noqa: S608 - marks
    return dict(reader.all(statement, names))


def put(transaction: Transaction, name: str, value: str) -> None:
    """Set a fact, whether it is there already or not."""
    transaction.execute(
        "INSERT INTO fact (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        (name, value),
    )


def put_once(transaction: Transaction, name: str, value: str) -> bool:
    """Set a fact that is not there yet. Returns whether it was set."""
    statement = "INSERT INTO fact (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING"
    return transaction.execute(statement, (name, value)).rowcount > 0


def increase(transaction: Transaction, name: str) -> None:
    """Raise a fact that counts, such as an epoch, by one. The first value is 1."""
    transaction.execute(
        "INSERT INTO fact (name, value) VALUES (?, '1')"
        " ON CONFLICT (name) DO UPDATE SET value = CAST(CAST(fact.value AS INTEGER) + 1 AS TEXT)",
        (name,),
    )


def remove(transaction: Transaction, name: str) -> None:
    transaction.execute("DELETE FROM fact WHERE name = ?", (name,))


def between(reader: Reader, first: str, end: str) -> list[tuple[str, str]]:
    """The facts whose names are in a range, with `first` and without `end`: name and value."""
    return reader.all("SELECT name, value FROM fact WHERE name >= ? AND name < ?", (first, end))


def first_between(reader: Reader, first: str, end: str, most: int) -> list[str]:
    """The names of the first facts in a range, up to `most` of them."""
    rows = reader.all("SELECT name FROM fact WHERE name >= ? AND name < ? ORDER BY name LIMIT ?", (first, end, most))
    return [name for (name,) in rows]


def between_with(reader: Reader, first: str, end: str, values: Sequence[str]) -> list[tuple[str, str]]:
    """The facts whose names are in a range and whose values are among some: name and value."""
    statement = f"SELECT name, value FROM fact WHERE name >= ? AND name < ? AND value IN ({_marks(values)})"  # noqa: S608 - marks
    return reader.all(statement, (first, end, *values))


def remove_with(transaction: Transaction, name: str, values: Sequence[str]) -> bool:
    """Remove a fact whose value is among some. Returns whether it was there."""
    statement = f"DELETE FROM fact WHERE name = ? AND value IN ({_marks(values)})"  # noqa: S608 - marks
    return transaction.execute(statement, (name, *values)).rowcount > 0


def _marks(values: Sequence[str]) -> str:
    return ", ".join("?" * len(values))

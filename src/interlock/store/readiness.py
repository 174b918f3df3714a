"""Reads and writes by which a process finds out whether it can serve calls."""

from __future__ import annotations

from interlock.store import facts
from interlock.store.port import Reader, Transaction


def ask(reader: Reader) -> None:
    """Ask the database something that it can always answer."""
    reader.one("SELECT 1")


def write(transaction: Transaction) -> None:
    """Replace the one row that is there for this: it is written to disk, and nothing grows."""
    facts.put(transaction, "ready_ms", str(transaction.now_ms))


def upstream_states(reader: Reader) -> dict[str, str]:
    """The state of every upstream, by name."""
    return dict(reader.all("SELECT name, state FROM upstream ORDER BY name"))

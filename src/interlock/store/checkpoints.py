"""Checkpoints: the table `checkpoint`, which holds how far calls have come, as their tools saved it.

Checkpoints are numbered within each call, from 1 on. `body` is the state, packed and encrypted; `size` and `sha256`
are those of the state itself. `redacted` is a JSON list of the places that were taken out of the state before.
"""

from __future__ import annotations

from collections.abc import Iterable

from interlock.core.record import NamedTuple
from interlock.store.port import Reader, Transaction

_COLUMNS = "call, seq, owner, tool, version, type, label, at_ms, size, sha256, redacted, body"


class CheckpointRow(NamedTuple):
    call: str
    seq: int
    owner: str
    tool: str
    version: str
    type: str
    label: str
    at_ms: int
    size: int
    sha256: str
    redacted: str
    body: bytes


def next_number(reader: Reader, call: str) -> int:
    """The number that the next checkpoint of a call gets."""
    return reader.one("SELECT coalesce(max(seq), 0) + 1 FROM checkpoint WHERE call = ?", (call,))[0]


def insert(transaction: Transaction, row: CheckpointRow) -> None:
    transaction.execute(
        f"INSERT INTO checkpoint ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608 - constant
        row,
    )


def of_call(reader: Reader, call: str, *, after: int = 0, limit: int | None = None) -> list[CheckpointRow]:
    """The checkpoints of a call with numbers greater than `after`, oldest first; all of them by default."""
    statement = f"SELECT {_COLUMNS} FROM checkpoint WHERE call = ? AND seq > ? ORDER BY seq"  # noqa: S608 - constant
    if limit is None:
        rows = reader.all(statement, (call, after))
    else:
        rows = reader.all(f"{statement} LIMIT ?", (call, after, limit))
    return list(map(CheckpointRow._make, rows))


def to_archive(reader: Reader, until_ms: int, most: int) -> list[tuple[str, int]]:
    """Call and number of the oldest checkpoints at milestones up to a time, at most so many.

    Of calls that have ended; and of those whose records retention has removed.
    """
    return reader.all(
        "SELECT call, seq FROM checkpoint WHERE type = 'macro' AND at_ms <= ?"
        " AND (EXISTS (SELECT 1 FROM journal WHERE journal.call = checkpoint.call AND kind = 'closed')"
        " OR NOT EXISTS (SELECT 1 FROM journal WHERE journal.call = checkpoint.call))"
        " ORDER BY at_ms, call, seq LIMIT ?",
        (until_ms, most),
    )


def remove(transaction: Transaction, places: Iterable[tuple[str, int]]) -> None:
    for place in places:
        transaction.execute("DELETE FROM checkpoint WHERE call = ? AND seq = ?", place)


def put_back(transaction: Transaction, row: CheckpointRow) -> bool:
    """Insert a checkpoint that is not there; whether it was not."""
    return (
        transaction.execute(
            f"INSERT INTO checkpoint ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608 - constant
            " ON CONFLICT (call, seq) DO NOTHING",
            row,
        ).rowcount
        > 0
    )


def owners(reader: Reader, call: str) -> set[str]:
    """The owners of a call, as its checkpoints name them: one, or none."""
    return {owner for (owner,) in reader.all("SELECT DISTINCT owner FROM checkpoint WHERE call = ?", (call,))}

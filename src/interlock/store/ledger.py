"""Reads of the table `journal`: the records of calls, as they were written.

A record is canonical JSON. `kind` and `call` are columns as well, so that the records of a call are found by an index.
Only the journal itself writes to this table.
"""

from __future__ import annotations

from collections.abc import Iterator

from interlock.store.port import Reader


def of_call(reader: Reader, call: str) -> list[bytes]:
    """Every record of a call, oldest first."""
    return [body for (body,) in reader.all("SELECT body FROM journal WHERE call = ? ORDER BY seq", (call,))]


def of_kind(reader: Reader, call: str, kind: str) -> list[bytes]:
    """The records of a kind about a call, oldest first."""
    statement = "SELECT body FROM journal WHERE call = ? AND kind = ? ORDER BY seq"
    return [body for (body,) in reader.all(statement, (call, kind))]


def newest_of_kind(reader: Reader, call: str, kind: str) -> bytes | None:
    """The newest record of a kind about a call."""
    statement = "SELECT body FROM journal WHERE call = ? AND kind = ? ORDER BY seq DESC LIMIT 1"
    row = reader.one(statement, (call, kind))
    return None if row is None else row[0]


def first_of_call(reader: Reader, call: str) -> bytes | None:
    """The first record of a call."""
    row = reader.one("SELECT body FROM journal WHERE call = ? ORDER BY seq LIMIT 1", (call,))
    return None if row is None else row[0]


def progress(reader: Reader, call: str) -> tuple[str, bytes] | None:
    """The newest record that says how far a call has come (`started`, `pending` or `closed`): kind and record."""
    return reader.one(
        "SELECT kind, body FROM journal WHERE call = ? AND kind IN ('started', 'pending', 'closed')"
        " ORDER BY seq DESC LIMIT 1",
        (call,),
    )


def is_closed(reader: Reader, call: str) -> bool:
    """Whether a call has its closing record."""
    return reader.one("SELECT 1 FROM journal WHERE call = ? AND kind = 'closed'", (call,)) is not None


def session_changes(reader: Reader) -> list[bytes]:
    """The records of changes to the state of sessions, oldest first."""
    rows = reader.all(
        "SELECT body FROM journal WHERE kind = 'mutation' AND instr(body, CAST('\"sessionState\":' AS BLOB))"
        " ORDER BY seq"
    )
    return [body for (body,) in rows]


def from_place(reader: Reader, seq: int) -> Iterator[tuple[str, bytes]]:
    """Kind and record of everything from a place on, in order."""
    return reader.each("SELECT kind, body FROM journal WHERE seq >= ? ORDER BY seq", (seq,))

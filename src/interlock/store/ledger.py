"""Reads of the table `journal`: the records of calls, as they were written.

A record is canonical JSON. `kind` and `call` are columns as well, so that the records of a call are found by an index.
Only the journal itself writes to this table.
"""

from __future__ import annotations

from collections.abc import Iterator

from interlock.core.record import NamedTuple
from interlock.store.expressions import contains, member
from interlock.store.last_head import SignedHead
from interlock.store.port import Reader

_PARTS = ", ".join(member("body", name) for name in ("toolId", "version", "error_code", "versionSpec"))
_ATTEMPT = f"SELECT call, {_PARTS} FROM journal"  # noqa: S608 - constant


class Attempt(NamedTuple):
    """The tool that the closing record of a call names. A call that was refused early has no version; `spec` is the
    range of versions that it asked for.
    """

    call: str
    tool: str
    version: str | None
    error: str | None
    spec: str | None


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


_CHANGES_A_SESSION = contains("body", '"sessionState":')


def session_changes(reader: Reader) -> list[bytes]:
    """The records of changes to the state of sessions, oldest first."""
    rows = reader.all(
        f"SELECT body FROM journal WHERE kind = 'mutation' AND {_CHANGES_A_SESSION} ORDER BY seq"  # noqa: S608 - constant
    )
    return [body for (body,) in rows]


def from_place(reader: Reader, seq: int) -> Iterator[tuple[str, bytes]]:
    """Kind and record of everything from a place on, in order."""
    return reader.each("SELECT kind, body FROM journal WHERE seq >= ? ORDER BY seq", (seq,))


# Parts of the journal


class Placed(NamedTuple):
    """A record with its place and hash."""

    seq: int
    hash: bytes
    body: bytes


class Exported(NamedTuple):
    """A record with its place and hash and, where its place was signed, the signature."""

    seq: int
    hash: bytes
    body: bytes
    at_ms: int | None
    key_id: str | None
    signature: bytes | None


def placed_of_call(reader: Reader, call: str) -> list[Placed]:
    """Every record of a call, oldest first."""
    rows = reader.all("SELECT seq, hash, body FROM journal WHERE call = ? ORDER BY seq", (call,))
    return list(map(Placed._make, rows))


def calls_with_prefix(reader: Reader, prefix: str, tenant: str | None, most: int) -> list[str]:
    """Ids of calls that begin with a text; with `tenant`, those that have a record of it."""
    rows = reader.all(
        "SELECT DISTINCT call FROM journal WHERE call >= ? AND call < ?"  # noqa: S608 - constant
        f" AND (CAST(? AS TEXT) IS NULL OR {member('body', 'tenant')} = ?) LIMIT ?",
        (prefix, prefix + "\U0010ffff", tenant, tenant, most),
    )
    return [call for (call,) in rows]


def behind(reader: Reader, after: int, *, kind: str | None, call: str | None, most: int) -> Iterator[Placed]:
    """Records behind a place, in order; those of a kind or a call, where given."""
    rows = reader.each(
        "SELECT seq, hash, body FROM journal WHERE seq > ? AND kind = coalesce(?, kind)"
        " AND call = coalesce(?, call) ORDER BY seq LIMIT ?",
        (after, kind, call, most),
    )
    return map(Placed._make, rows)


def exported(reader: Reader, after: int, upto: int, most: int) -> list[Exported]:
    """Records behind a place, up to another with that, in order, with their signatures."""
    rows = reader.all(
        "SELECT j.seq, j.hash, j.body, a.at_ms, a.key_id, a.signature FROM journal j LEFT JOIN anchor a USING (seq)"
        " WHERE j.seq > ? AND j.seq <= ? ORDER BY j.seq LIMIT ?",
        (after, upto, most),
    )
    return list(map(Exported._make, rows))


def segment_ending(reader: Reader, seq: int) -> SignedHead | None:
    """The signed head of the removed records that end at a place; None where none end there."""
    row = reader.one("SELECT last_seq, hash, at_ms, key_id, signature FROM segment WHERE last_seq = ?", (seq,))
    return None if row is None else SignedHead(*row)


def attempts_of_calls(reader: Reader, first: str, *, through: int, most: int) -> list[Attempt]:
    """The closed calls from an id on, in order of id, at most so many; of records up to number `through`."""
    # Calls are named by ULIDs, which sort by time and begin with 0 to 7; other records have other names.
    rows = reader.all(
        f"{_ATTEMPT} WHERE call >= ? AND call < '8' AND kind = 'closed' AND seq <= ? ORDER BY call LIMIT ?",
        (first, through, most),
    )
    return [Attempt._make(row) for row in rows]


def attempts_after(reader: Reader, seq: int) -> Iterator[Attempt]:
    """The calls that were closed after a record."""
    return map(Attempt._make, reader.each(f"{_ATTEMPT} WHERE seq > ? AND kind = 'closed'", (seq,)))


def newest_closed(reader: Reader, most: int) -> Iterator[bytes]:
    """The newest closing records, at most so many, the newest first."""
    rows = reader.each("SELECT body FROM journal WHERE kind = 'closed' ORDER BY seq DESC LIMIT ?", (most,))
    return (body for (body,) in rows)

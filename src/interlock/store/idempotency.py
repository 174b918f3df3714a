"""Idempotency keys: the table `reservation`, with one row per key in its window.

`scope` is a digest of the key and of everything that it is looked up within; it is the primary key. `state` is one of:
- `executing`: the call has its intent on disk and no outcome yet. `owner` is the process that runs it.
- `done`: `result` is the sealed outcome that a call under the same key gets until `expires_ms`.
- `unknown`: the call was cut off between intent and outcome. A person settles it; no passage of time does.
A row is deleted when its call had no effect, or when its window has passed.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlock.core.record import NamedTuple
from interlock.store.port import EarlyRow, Reader, Transaction


class Reservation(NamedTuple):
    """The row of a key, for a call that asks for the same key."""

    version: str
    input_hash: str
    state: str
    call: str
    owner: str
    reserved_ms: int
    expires_ms: int
    result: bytes | None


class Executing(NamedTuple):
    """A key whose call has no outcome yet."""

    scope: bytes
    call: str
    owner: str
    tool: str
    version: str
    key: str
    caller: str
    input_hash: str


class Unknown(NamedTuple):
    """A key whose call waits for a person to settle it."""

    call: str
    tool: str
    version: str
    key: str
    caller: str
    reserved_ms: int


class OfCall(NamedTuple):
    """The row that a call holds, for a person who settles it."""

    scope: bytes
    tool: str
    version: str
    key: str
    caller: str
    state: str
    reserved_ms: int
    expires_ms: int


# One key


def find(reader: Reader, scope: bytes) -> Reservation | None:
    row = reader.one(
        "SELECT version, input_hash, state, call, owner, reserved_ms, expires_ms, result FROM reservation"
        " WHERE scope = ?",
        (scope,),
    )
    return None if row is None else Reservation._make(row)


def state(reader: Reader, scope: bytes) -> tuple[str, int] | None:
    """The state of a key and the end of its window."""
    return reader.one("SELECT state, expires_ms FROM reservation WHERE scope = ?", (scope,))


def state_of_call(reader: Reader, scope: bytes, call: str) -> str | None:
    """The state of a key that a call holds; None where the call does not hold it."""
    row = reader.one("SELECT state FROM reservation WHERE scope = ? AND call = ?", (scope, call))
    return None if row is None else row[0]


def has_outcome(reader: Reader, scope: bytes, now_ms: int) -> bool:
    """Whether a key is done and in its window."""
    statement = "SELECT 1 FROM reservation WHERE scope = ? AND state = 'done' AND expires_ms > ?"
    return reader.one(statement, (scope, now_ms)) is not None


class NewKey(NamedTuple):
    """The row of a key that is given to a call."""

    scope: bytes
    tool: str
    version: str
    key: str
    caller: str
    input_hash: str
    call: str
    owner: str
    window_ms: int


# Most calls ask for a new key, and nothing stands against it. One statement finds that out and reserves the keys of all
# calls of a batch; a call that gets no row finds out why.
_RESERVE_NEW = (
    "INSERT INTO reservation (scope, tool, version, key, caller, input_hash, call, owner, reserved_ms, expires_ms,"
    " state, result) SELECT column1, column2, column3, column4, column5, column6, column7, column8, now_ms,"
    " now_ms + column9, 'executing', NULL FROM (SELECT CAST(? AS BIGINT) AS now_ms) AS clock, (VALUES {rows}) AS new"
    " WHERE NOT EXISTS (SELECT 1 FROM ticket WHERE scope = column10 AND state IN ('PENDING', 'APPROVED'))"
    " AND NOT EXISTS (SELECT 1 FROM payload_use WHERE (scope = column11 AND bytes >= column12)"
    " OR (scope = column13 AND bytes >= column14) OR (scope = column15 AND bytes >= column16))"
    " ON CONFLICT (scope) DO NOTHING RETURNING call"
)


def new_key(key: NewKey, ticket_scope: bytes, quotas: Sequence[tuple[str, int]]) -> EarlyRow:
    """Return the row of a key for a call that is about to run.

    It is not inserted if the key has a row, if a ticket of `ticket_scope` is open, or if the bytes that are stored for
    one of the three scopes in `quotas` have reached the number beside it.
    """
    one, two, three = quotas
    return EarlyRow(_RESERVE_NEW, key.call, (*key, ticket_scope, *one, *two, *three))


def reserve(transaction: Transaction, key: NewKey) -> None:
    """Give a key to a call that is about to run, in place of a row whose window has passed."""
    now_ms = transaction.now_ms
    transaction.execute(
        "INSERT INTO reservation (scope, tool, version, key, caller, input_hash, call, owner, reserved_ms,"
        " expires_ms, state, result) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'executing', NULL)"
        " ON CONFLICT (scope) DO UPDATE SET tool = excluded.tool, version = excluded.version, key = excluded.key,"
        " caller = excluded.caller, input_hash = excluded.input_hash, state = excluded.state, call = excluded.call,"
        " owner = excluded.owner, reserved_ms = excluded.reserved_ms, expires_ms = excluded.expires_ms,"
        " result = excluded.result",
        (*key[:-1], now_ms, now_ms + key.window_ms),
    )


def finish(transaction: Transaction, scope: bytes, call: str, state: str, result: bytes | None) -> None:
    """Give the key of a call its state and its outcome."""
    transaction.later(
        "UPDATE reservation SET state = new.column3, result = CAST(new.column4 AS BLOB) FROM (VALUES {rows}) AS new"
        " WHERE reservation.scope = new.column1 AND reservation.call = new.column2",
        (scope, call, state, result),
    )


def finish_until(transaction: Transaction, scope: bytes, call: str, result: bytes, expires_ms: int) -> None:
    """Give the key of a call its outcome, and a window that ends at `expires_ms`."""
    transaction.execute(
        "UPDATE reservation SET state = 'done', result = ?, expires_ms = ? WHERE scope = ? AND call = ?",
        (result, expires_ms, scope, call),
    )


def mark_unknown(transaction: Transaction, scope: bytes, call: str) -> None:
    transaction.execute("UPDATE reservation SET state = 'unknown' WHERE scope = ? AND call = ?", (scope, call))


def release(transaction: Transaction, scope: bytes, call: str) -> None:
    """Free the key of a call that had no effect."""
    transaction.execute("DELETE FROM reservation WHERE scope = ? AND call = ?", (scope, call))


# Many keys


def executing(reader: Reader) -> list[Executing]:
    rows = reader.all(
        "SELECT scope, call, owner, tool, version, key, caller, input_hash FROM reservation WHERE state = 'executing'"
    )
    return list(map(Executing._make, rows))


def executing_owners(reader: Reader) -> list[str]:
    """The processes that hold keys of calls without an outcome."""
    return [owner for (owner,) in reader.all("SELECT DISTINCT owner FROM reservation WHERE state = 'executing'")]


def runners(reader: Reader, call: str, note: str) -> list[str]:
    """The processes that run a call, by its key or by the fact `note` (the note of a read that has begun)."""
    rows = reader.all(
        "SELECT owner FROM reservation WHERE call = ? AND state = 'executing'"
        " UNION SELECT value FROM fact WHERE name = ?",
        (call, note),
    )
    return [owner for (owner,) in rows]


def unknown(reader: Reader) -> list[Unknown]:
    """Every key whose call waits for a person, oldest first."""
    rows = reader.all(
        "SELECT call, tool, version, key, caller, reserved_ms FROM reservation WHERE state = 'unknown'"
        " ORDER BY reserved_ms, call"
    )
    return list(map(Unknown._make, rows))


def of_call(reader: Reader, call: str) -> OfCall | None:
    row = reader.one(
        "SELECT scope, tool, version, key, caller, state, reserved_ms, expires_ms FROM reservation WHERE call = ?",
        (call,),
    )
    return None if row is None else OfCall._make(row)


def ended(reader: Reader, owner: str) -> list[tuple[str, str, str]]:
    """The keys of a process whose calls run no more, oldest first: tool and version, call, state."""
    return reader.all(
        "SELECT tool || '@' || version, call, state FROM reservation WHERE owner = ? AND state != 'executing'"
        " ORDER BY reserved_ms",
        (owner,),
    )


def evict(transaction: Transaction, now_ms: int, stepped_ms: int, surely_ms: int, most: int) -> int:
    """Delete up to `most` done keys whose window has passed. Returns how many.

    The window of a key that was reserved until `stepped_ms` must have passed at `surely_ms`.
    """
    return transaction.execute(
        "DELETE FROM reservation WHERE scope IN (SELECT scope FROM reservation WHERE state = 'done'"
        " AND expires_ms <= ? AND (reserved_ms > ? OR expires_ms <= ?) LIMIT ?)",
        (now_ms, stepped_ms, surely_ms, most),
    ).rowcount

"""Tickets: the table `ticket`, with one row per call that a person must decide on.

`scope` is the row of the call's idempotency key; a call that is sent again has the same scope. `state` is one of
PENDING, APPROVED, USED, DENIED, AUTO_DENIED, LAPSED and VOID; the first two are open. `chain` and `head` are JSON.
`sealed` holds what is needed to go on with the call and `edited` the input as its reviewer changed it, both encrypted;
they are wiped when the ticket is no longer open. `params`, `preview` and `changed` are encrypted too; rows of an older
version hold them as text.
"""

from __future__ import annotations

from interlock.core.record import NamedTuple
from interlock.store.port import Reader, Transaction


class TicketRow(NamedTuple):
    id: str
    call: str
    scope: bytes
    tool: str
    version: str
    operation: str
    tenant: str
    caller: str
    requester: str
    digest: str
    policy: str
    reason: str
    state: str
    step: int
    chain: str
    params: bytes | str
    preview: bytes | str
    head: str
    sealed: bytes | None
    created_ms: int
    expires_ms: int
    resolved_ms: int | None
    resolved_by: str | None
    comment: str | None
    edited: bytes | None
    changed: bytes | str | None


class Resolution(NamedTuple):
    """A ticket that was decided on, by a person or by time: its last state, and when it began and ended to wait."""

    tool: str
    state: str
    created_ms: int
    ended_ms: int


_COLUMNS = ", ".join(TicketRow._fields)
_SELECT = f"SELECT {_COLUMNS} FROM ticket"  # noqa: S608 - constant
_INSERT = f"INSERT INTO ticket ({_COLUMNS}) VALUES ({', '.join('?' * len(TicketRow._fields))})"  # noqa: S608 - constant
_WIPE = ", sealed = NULL, edited = CASE WHEN edited IS NULL THEN NULL ELSE x'' END"


# Reading


def find(reader: Reader, ticket: str) -> TicketRow | None:
    row = reader.one(f"{_SELECT} WHERE id = ?", (ticket,))
    return None if row is None else TicketRow._make(row)


def with_part(reader: Reader, part: str) -> list[TicketRow]:
    """The tickets whose id begins (after its prefix `apr_`) or ends with a text: two of them at most."""
    rows = reader.all(
        f"{_SELECT} WHERE substr(id, 5, CAST(? AS INTEGER)) = ? OR substr(id, length(id) + 1 - CAST(? AS INTEGER)) = ?"
        " LIMIT 2",
        (len(part), part, len(part), part),
    )
    return list(map(TicketRow._make, rows))


def newest(reader: Reader, scope: bytes) -> TicketRow | None:
    """The newest ticket of a scope."""
    # An open ticket is newer than all others of its scope, also than those of the same millisecond.
    newest_first = "ORDER BY created_ms DESC, CASE WHEN state IN ('PENDING', 'APPROVED') THEN 0 ELSE 1 END, id DESC"
    row = reader.one(f"{_SELECT} WHERE scope = ? {newest_first} LIMIT 1", (scope,))
    return None if row is None else TicketRow._make(row)


def pending(reader: Reader) -> list[TicketRow]:
    """The tickets that wait for a person, oldest first."""
    return list(map(TicketRow._make, reader.all(f"{_SELECT} WHERE state = 'PENDING' ORDER BY created_ms")))


def recent(reader: Reader) -> list[TicketRow]:
    """The newest 500 tickets, in any state, newest first."""
    return list(map(TicketRow._make, reader.all(f"{_SELECT} ORDER BY created_ms DESC LIMIT 500")))


def of_call(reader: Reader, call: str) -> list[TicketRow]:
    """The tickets of a call, oldest first."""
    return list(map(TicketRow._make, reader.all(f"{_SELECT} WHERE call = ? ORDER BY created_ms, id", (call,))))


def approved(reader: Reader) -> list[TicketRow]:
    """The tickets that were approved and not used yet."""
    return list(map(TicketRow._make, reader.all(f"{_SELECT} WHERE state = 'APPROVED'")))


def open_tickets(reader: Reader) -> list[TicketRow]:
    """The tickets that are pending or approved, oldest first."""
    rows = reader.all(f"{_SELECT} WHERE state IN ('PENDING', 'APPROVED') ORDER BY created_ms")
    return list(map(TicketRow._make, rows))


def any_open(reader: Reader) -> bool:
    """Whether any ticket is pending or approved."""
    return reader.one("SELECT 1 FROM ticket WHERE state IN ('PENDING', 'APPROVED') LIMIT 1") is not None


def any_due(reader: Reader, now_ms: int) -> bool:
    """Whether the time of any open ticket is up."""
    statement = "SELECT 1 FROM ticket WHERE state IN ('PENDING', 'APPROVED') AND expires_ms <= ? LIMIT 1"
    return reader.one(statement, (now_ms,)) is not None


def open_in_scope(reader: Reader, scope: bytes) -> list[TicketRow]:
    rows = reader.all(f"{_SELECT} WHERE scope = ? AND state IN ('PENDING', 'APPROVED')", (scope,))
    return list(map(TicketRow._make, rows))


def open_of_call(reader: Reader, call: str) -> TicketRow | None:
    row = reader.one(f"{_SELECT} WHERE call = ? AND state IN ('PENDING', 'APPROVED')", (call,))
    return None if row is None else TicketRow._make(row)


def count_pending(reader: Reader, tenant: str, requester: str, now_ms: int, scope: bytes) -> int:
    """Count the calls of a requester that wait for a person, without those of a scope and those that have expired."""
    return reader.one(
        "SELECT COUNT(*) FROM ticket WHERE state = 'PENDING' AND tenant = ? AND requester = ? AND expires_ms > ?"
        " AND scope != ?",
        (tenant, requester, now_ms, scope),
    )[0]


def resolutions(reader: Reader) -> list[Resolution]:
    """Every decision that was made."""
    rows = reader.all(
        "SELECT tool, state, created_ms, coalesce(resolved_ms, expires_ms) FROM ticket"
        " WHERE resolved_ms IS NOT NULL OR state = 'AUTO_DENIED'"
    )
    return list(map(Resolution._make, rows))


# Writing


def insert(transaction: Transaction, row: TicketRow) -> None:
    transaction.execute(_INSERT, row)


def resolve(
    transaction: Transaction,
    ticket: str,
    *,
    at_ms: int,
    by: str,
    comment: str,
    edited: bytes | None,
    changed: bytes | None,
) -> None:
    """Note who decided on a ticket, and what they changed of the input."""
    transaction.execute(
        "UPDATE ticket SET resolved_ms = ?, resolved_by = ?, comment = ?, edited = ?, changed = ? WHERE id = ?",
        (at_ms, by, comment, edited, changed, ticket),
    )


def move(transaction: Transaction, ticket: str, before: str, after: str, *, wipe: bool) -> bool:
    """Move a ticket from one state to another. Returns False where it was not in the state `before`.

    `wipe` removes what was sealed. That the input was edited still shows: `edited` is then empty, not NULL.
    """
    moved = transaction.execute(
        f"UPDATE ticket SET state = ?{_WIPE if wipe else ''} WHERE id = ? AND state = ?",  # noqa: S608 - constant
        (after, ticket, before),
    )
    return moved.rowcount == 1


def escalate(transaction: Transaction, ticket: str) -> None:
    """Go on to the next step of the ticket's chain of approvers."""
    transaction.execute("UPDATE ticket SET step = step + 1 WHERE id = ?", (ticket,))

"""Notifications: the table `notification`, with one row per ticket, step of its chain and channel.

`state` is one of:
- `due`: not tried yet.
- `sending`: the process `owner` is sending it. When that process has died, another one takes the row over.
- `retry`: to be tried again from `next_ms` on; `error` says why.
- `sent`, `failed`, `dropped`: at its end.
The message is made from the ticket when it is sent; `body` is empty but for rows of an older version.
"""

from __future__ import annotations

from interlock.core.record import NamedTuple
from interlock.store.port import Reader, Transaction


class Undelivered(NamedTuple):
    """A notification that did not reach its channel, or not yet."""

    id: str
    ticket: str
    step: int
    channel: str
    state: str
    attempts: int
    next_ms: int
    error: str


class DueRow(NamedTuple):
    """A notification that may be sent now, with the state and the expiry of its ticket."""

    id: str
    ticket: str
    step: int
    channel: str
    body: str
    attempts: int
    expires_ms: int
    state: str
    owner: str | None
    ticket_state: str


class Lane(NamedTuple):
    """A channel with notifications that may be sent now, by state and owner."""

    channel: str
    state: str
    owner: str | None


# Reading


def undelivered(reader: Reader, ticket: str | None, limit: int) -> list[Undelivered]:
    """The notifications that failed or are being tried again, of one ticket or of all, the latest first."""
    rows = reader.all(
        "SELECT id, ticket, step, channel, state, attempts, next_ms, error FROM notification"
        " WHERE error IS NOT NULL AND state IN ('retry', 'sending', 'failed') AND ticket = coalesce(?, ticket)"
        " ORDER BY ticket DESC, step DESC, channel LIMIT ?",
        (ticket, limit),
    )
    return list(map(Undelivered._make, rows))


def lanes(reader: Reader, now_ms: int) -> list[Lane]:
    """The channels that have something to send, or being sent."""
    rows = reader.all(
        "SELECT DISTINCT channel, state, owner FROM notification"
        " WHERE state IN ('due', 'retry', 'sending') AND next_ms <= ?",
        (now_ms,),
    )
    return list(map(Lane._make, rows))


def due(reader: Reader, channel: str, now_ms: int) -> list[DueRow]:
    """Return the notifications that a channel has to send or is sending, the longest due first; 100 rows at most."""
    rows = reader.all(
        "SELECT n.id, n.ticket, n.step, n.channel, n.body, n.attempts, coalesce(t.expires_ms, 0),"
        " n.state, n.owner, coalesce(t.state, 'VOID') FROM notification n LEFT JOIN ticket t ON t.id = n.ticket"
        " WHERE n.channel = ? AND n.state IN ('due', 'retry', 'sending') AND n.next_ms <= ?"
        " ORDER BY n.next_ms, n.id LIMIT 100",
        (channel, now_ms),
    )
    return list(map(DueRow._make, rows))


def owner(reader: Reader, notification: str) -> str | None:
    """The process that is sending a notification."""
    row = reader.one("SELECT owner FROM notification WHERE id = ?", (notification,))
    return None if row is None else row[0]


def sent_channels(reader: Reader, ticket: str) -> list[str]:
    """The channels by which notifications of a ticket were sent, by name."""
    rows = reader.all(
        "SELECT DISTINCT channel FROM notification WHERE ticket = ? AND state = 'sent' ORDER BY 1", (ticket,)
    )
    return [channel for (channel,) in rows]


# Writing


def insert_due(transaction: Transaction, ticket: str, step: int, channel: str, now_ms: int) -> None:
    """Leave a notification for a ticket's step and channel, unless there is one."""
    transaction.execute(
        "INSERT INTO notification (id, ticket, step, channel, body, state, attempts, next_ms, owner,"
        " error) VALUES (?, ?, ?, ?, '', 'due', 0, ?, NULL, NULL) ON CONFLICT (id) DO NOTHING",
        (f"{ticket}.{step}.{channel}", ticket, step, channel, now_ms),
    )


def claim(transaction: Transaction, notification: str, owner: str) -> None:
    """Give a notification to the process that is about to send it."""
    transaction.execute(
        "UPDATE notification SET state = 'sending', owner = ?, attempts = attempts + 1 WHERE id = ?",
        (owner, notification),
    )


def retry(transaction: Transaction, notification: str, next_ms: int, error: str) -> None:
    """Let a notification be tried again from `next_ms` on."""
    transaction.execute(
        "UPDATE notification SET state = 'retry', owner = NULL, next_ms = ?, error = ? WHERE id = ?",
        (next_ms, error, notification),
    )


def finish(transaction: Transaction, notification: str, state: str, error: str | None) -> None:
    """Bring a notification to its end: `sent`, `failed` or `dropped`."""
    transaction.execute(
        "UPDATE notification SET state = ?, owner = NULL, error = ? WHERE id = ?", (state, error, notification)
    )

"""Tables `breaker` and `suspension`: the services that are not called for now, as all processes on the home know it.

A breaker has a row while it is open or half open; a closed one has none. A suspension is a service that asked not to be
called until a time; its row is removed when that time has passed. Every other change raises the epoch of services.
"""

from __future__ import annotations

import orjson

from interlock.core.record import NamedTuple
from interlock.store import epochs, facts
from interlock.store.port import Reader, Transaction

_FAILURES = "failures:"  # and the name of a breaker
SUSPENDED = "suspended"  # the state of an `Impaired` service that has a suspension


class BreakerRow(NamedTuple):
    """A breaker that is not closed."""

    state: str
    since_ms: int
    until_ms: int


class Impaired(NamedTuple):
    """A service with a breaker that is not closed, or with a suspension."""

    service: str
    state: str
    since_ms: int
    until_ms: int


def impaired(reader: Reader) -> list[Impaired]:
    """Every breaker and every suspension."""
    rows = reader.all(
        "SELECT service, state, since_ms, until_ms FROM breaker"
        " UNION ALL SELECT service, 'suspended', 0, until_ms FROM suspension"
    )
    return [Impaired._make(row) for row in rows]


def find(reader: Reader, service: str) -> BreakerRow | None:
    row = reader.one("SELECT state, since_ms, until_ms FROM breaker WHERE service = ?", (service,))
    return None if row is None else BreakerRow._make(row)


def count_failure(transaction: Transaction, service: str, most: int, window_ms: int) -> int:
    """Count a failure if the breaker is closed.

    Returns how many there were in the window in all processes, up to `most`.
    """
    if find(transaction, service) is not None:
        return 0
    name, now_ms = f"{_FAILURES}{service}", transaction.now_ms
    known: list[int] = orjson.loads(facts.get(transaction, name) or "[]")
    times = [*(at for at in known if at > now_ms - window_ms), now_ms][-most:]
    facts.put(transaction, name, orjson.dumps(times).decode())
    return len(times)


def put(transaction: Transaction, service: str, row: BreakerRow, reason: str) -> None:
    """Store a breaker, in place of the row that it had. Its failures have counted."""
    facts.remove(transaction, f"{_FAILURES}{service}")
    transaction.execute(
        "INSERT INTO breaker (service, state, since_ms, until_ms, reason) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (service) DO UPDATE SET state = excluded.state, since_ms = excluded.since_ms,"
        " until_ms = excluded.until_ms, reason = excluded.reason",
        (service, *row, reason),
    )
    epochs.advance(transaction, epochs.SERVICES)


def delete(transaction: Transaction, service: str) -> None:
    transaction.execute("DELETE FROM breaker WHERE service = ?", (service,))
    epochs.advance(transaction, epochs.SERVICES)


def end_open(transaction: Transaction, service: str, since_ms: int, until_ms: int) -> None:
    """Set the end of a breaker's wait, if it is still the one that has been open since `since_ms`."""
    transaction.execute(
        "UPDATE breaker SET until_ms = ? WHERE service = ? AND state = 'open' AND since_ms = ?",
        (until_ms, service, since_ms),
    )
    epochs.advance(transaction, epochs.SERVICES)


def suspend(transaction: Transaction, service: str, until_ms: int) -> None:
    """Suspend a service. Only a later time replaces another."""
    transaction.execute(
        "INSERT INTO suspension (service, until_ms) VALUES (?, ?)"
        " ON CONFLICT (service) DO UPDATE SET until_ms = excluded.until_ms"
        " WHERE suspension.until_ms < excluded.until_ms",
        (service, until_ms),
    )
    epochs.advance(transaction, epochs.SERVICES)


def suspended_until(reader: Reader, service: str) -> int | None:
    """The end of a service's suspension; None where it has none."""
    row = reader.one("SELECT until_ms FROM suspension WHERE service = ?", (service,))
    return None if row is None else row[0]


def delete_suspensions(transaction: Transaction, until_ms: int) -> None:
    """Remove the suspensions that end at a time or before it."""
    transaction.execute("DELETE FROM suspension WHERE until_ms <= ?", (until_ms,))

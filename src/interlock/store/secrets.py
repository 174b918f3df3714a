"""Table `secret`: credentials, each sealed on its own. Several slots under one name form a pool.

A sealed value is bound to its name, slot, time of creation and end: a row whose other columns were changed does not
open any more. `key_id` names the sealing key, so that rows under an older one are found. Storing and removing a
credential raises the epoch of secrets: it changes which tools can be called.
"""

from __future__ import annotations

from collections.abc import Iterator

from interlock.core.record import NamedTuple
from interlock.store import epochs
from interlock.store.port import Reader, Transaction


class CredentialEntry(NamedTuple):
    """A credential without its value."""

    name: str
    slot: str
    created_ms: int
    expires_ms: int | None
    resting_until_ms: int


class Sealed(NamedTuple):
    """A credential with its sealed value."""

    name: str
    slot: str
    sealed: bytes
    created_ms: int
    expires_ms: int | None
    resting_until_ms: int


class CredentialSlot(NamedTuple):
    """One slot of a credential, with its sealed value."""

    slot: str
    sealed: bytes
    created_ms: int
    expires_ms: int | None
    resting_until_ms: int


def entries(reader: Reader) -> list[CredentialEntry]:
    """Every credential, by name and slot."""
    rows = reader.all("SELECT name, slot, created_ms, expires_ms, resting_until_ms FROM secret ORDER BY name, slot")
    return [CredentialEntry._make(row) for row in rows]


def expiries(reader: Reader) -> list[int]:
    """The times at which credentials expire."""
    return [at_ms for (at_ms,) in reader.all("SELECT expires_ms FROM secret WHERE expires_ms IS NOT NULL")]


def slots(reader: Reader, name: str) -> list[CredentialSlot]:
    """The slots of a credential, in order."""
    rows = reader.all(
        "SELECT slot, sealed, created_ms, expires_ms, resting_until_ms FROM secret WHERE name = ? ORDER BY slot",
        (name,),
    )
    return [CredentialSlot._make(row) for row in rows]


def slot_names(reader: Reader, name: str) -> list[str]:
    return [slot for (slot,) in reader.all("SELECT slot FROM secret WHERE name = ?", (name,))]


def sealed_by_others(reader: Reader, key_id: str) -> Iterator[Sealed]:
    """The credentials that are sealed under another key than this."""
    rows = reader.each(
        "SELECT name, slot, sealed, created_ms, expires_ms, resting_until_ms FROM secret WHERE key_id <> ?", (key_id,)
    )
    return map(Sealed._make, rows)


def put(
    transaction: Transaction,
    name: str,
    slot: str,
    *,
    key_id: str,
    sealed: bytes,
    created_ms: int,
    expires_ms: int | None,
) -> None:
    """Store a credential that does not rest, in place of one that is there."""
    transaction.execute(
        "INSERT INTO secret (name, slot, key_id, sealed, created_ms, expires_ms, resting_until_ms)"
        " VALUES (?, ?, ?, ?, ?, ?, 0)"
        " ON CONFLICT (name, slot) DO UPDATE SET key_id = excluded.key_id, sealed = excluded.sealed,"
        " created_ms = excluded.created_ms, expires_ms = excluded.expires_ms,"
        " resting_until_ms = excluded.resting_until_ms",
        (name, slot, key_id, sealed, created_ms, expires_ms),
    )
    epochs.advance(transaction, epochs.SECRETS)


def reseal(transaction: Transaction, name: str, slot: str, *, key_id: str, sealed: bytes) -> None:
    """Replace the sealed value of a credential."""
    transaction.execute(
        "UPDATE secret SET key_id = ?, sealed = ? WHERE name = ? AND slot = ?", (key_id, sealed, name, slot)
    )


def rest(transaction: Transaction, name: str, slot: str, until_ms: int) -> None:
    """Let a slot rest until a time. Only a later time replaces another."""
    transaction.execute(
        "UPDATE secret SET resting_until_ms = ? WHERE name = ? AND slot = ? AND resting_until_ms < ?",
        (until_ms, name, slot, until_ms),
    )


def delete(transaction: Transaction, name: str, slot: str) -> None:
    transaction.execute("DELETE FROM secret WHERE name = ? AND slot = ?", (name, slot))
    epochs.advance(transaction, epochs.SECRETS)

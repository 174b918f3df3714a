"""Table `identity`: people, agents and services by their DID. Rows are changed and revoked, never removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from interlock.core.record import NamedTuple
from interlock.store.port import Reader, Transaction

if TYPE_CHECKING:
    from interlock.call.context import CallerKind

_COLUMNS = "did, kind, name, tenant, trust, groups, state"


class StoredIdentity(NamedTuple):
    """One identity. `groups` is a JSON array of names; `state` is active or revoked."""

    did: str
    kind: CallerKind
    name: str
    tenant: str
    trust: int
    groups: str
    state: Literal["active", "revoked"]


def find(reader: Reader, did: str) -> StoredIdentity | None:
    row = reader.one(f"SELECT {_COLUMNS} FROM identity WHERE did = ?", (did,))  # noqa: S608 - a constant
    return None if row is None else StoredIdentity._make(row)


def search(reader: Reader, name_or_did: str, tenant: str) -> list[StoredIdentity]:
    """The identity of a DID, in any tenant, and the active ones of a name in one tenant."""
    rows = reader.all(
        f"SELECT {_COLUMNS} FROM identity WHERE did = ? OR (name = ? AND tenant = ? AND state = 'active')",  # noqa: S608 - a constant
        (name_or_did, name_or_did, tenant),
    )
    return [StoredIdentity._make(row) for row in rows]


def all_identities(reader: Reader) -> list[StoredIdentity]:
    """Every identity, in the order of registration."""
    rows = reader.all(f"SELECT {_COLUMNS} FROM identity ORDER BY registered_ms, did")  # noqa: S608 - a constant
    return [StoredIdentity._make(row) for row in rows]


def state(reader: Reader, did: str) -> str | None:
    """The state of an identity; None where there is none."""
    row = reader.one("SELECT state FROM identity WHERE did = ?", (did,))
    return None if row is None else row[0]


def insert(transaction: Transaction, row: StoredIdentity, registered_ms: int) -> None:
    transaction.execute(
        f"INSERT INTO identity ({_COLUMNS}, registered_ms) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608 - a constant
        (*row, registered_ms),
    )


def update(transaction: Transaction, row: StoredIdentity) -> None:
    """Change all of an identity but its DID and state."""
    transaction.execute(
        "UPDATE identity SET kind = ?, name = ?, tenant = ?, trust = ?, groups = ? WHERE did = ?",
        (row.kind, row.name, row.tenant, row.trust, row.groups, row.did),
    )


def revoke(transaction: Transaction, did: str) -> None:
    transaction.execute("UPDATE identity SET state = 'revoked' WHERE did = ?", (did,))

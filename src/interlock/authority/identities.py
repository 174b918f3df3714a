"""Registered identities: people, agents and services by their DID, and the operator's statements about them.

A token names its holder; the holder's kind, tenant, trust and groups are stated only by the operator, here or in an
external registry behind `DidRegistry`. An unknown or revoked identity is refused whatever token it presents.

A DID is unique in the world; a name is unique among the active identities of its tenant, so tenants neither take names
from one another nor learn which are taken.

A revoked identity does not come back: its row stays, and a row among the revocations voids every token that it holds or
that was delegated through it. Every change raises `identity_epoch`, so that each process on the home notices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import orjson

from interlock.call.capability import is_did, scope_fault
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.store import epochs, records, tokens
from interlock.store import identities as table

if TYPE_CHECKING:
    from interlock.call.context import CallerKind
    from interlock.data.schema import Json
    from interlock.store.port import Store, Transaction, Unit

T = TypeVar("T")
KINDS: tuple[CallerKind, ...] = ("human", "agent", "service")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Somebody who may hold a token. Trust runs from 0 to 100."""

    did: str
    kind: CallerKind = "agent"
    name: str = ""
    tenant: str = "local"
    trust: int = 0
    groups: frozenset[str] = frozenset()
    state: Literal["active", "revoked"] = "active"

    def document(self) -> Json:
        """The identity for people and programs."""
        return {
            "did": self.did,
            "name": self.name,
            "kind": self.kind,
            "tenant": self.tenant,
            "trust": self.trust,
            "groups": sorted(self.groups),
            "state": self.state,
        }


class DidRegistry(Protocol):
    """Lookup of identities. One that cannot be reached raises E3001."""

    async def look_up(self, did: str) -> Identity | None: ...


class LocalIdentities:
    """The identities of this home."""

    def __init__(self, journal: Store) -> None:
        self._journal = journal

    async def look_up(self, did: str) -> Identity | None:
        row = await self._journal.read(lambda reader: table.find(reader, did))
        return None if row is None else identity_of(row)

    async def find(self, name_or_did: str, tenant: str = "local") -> Identity | None:
        """Find an identity by its DID, in any tenant, or the tenant's active one of this name.

        E3004 if several have the name.
        """
        rows = await self._journal.read(lambda reader: table.search(reader, name_or_did, tenant))
        if len(rows) > 1:
            raise Failure("E3004", f"several identities are named `{name_or_did}`; say which by its DID")
        return identity_of(rows[0]) if rows else None

    async def all(self) -> list[Identity]:
        """Return all identities, in the order of registration."""
        return [identity_of(row) for row in await self._journal.read(table.all_identities)]

    async def register(self, identity: Identity, *, by: str) -> Identity:
        """Register an identity; E3004 if it is invalid, E3103 if the DID is known already."""
        check(identity)

        def unit(transaction: Transaction) -> Identity:
            if table.state(transaction, identity.did) is not None:
                words = f"`{identity.did}` is registered already, or was and is revoked"
                advice = "use it as it is; in place of a revoked one, register another DID"
                raise Failure("E3103", words, resolution=advice)
            table.insert(transaction, _row(identity)._replace(state="active"), transaction.now_ms)
            _note(transaction, "identity.registered", identity, by)
            return identity

        return await self._commit(unit)

    async def update(self, identity: Identity, *, by: str) -> Identity:
        """Change the statements about a registered identity; E3207 if it is unknown or revoked."""
        check(identity)

        def unit(transaction: Transaction) -> Identity:
            _active(transaction, identity.did)
            table.update(transaction, _row(identity))
            _note(transaction, "identity.updated", identity, by)
            return identity

        return await self._commit(unit)

    async def revoke(self, did: str, *, reason: str, by: str) -> None:
        """Revoke an identity and every token that it holds or passed on, for good; E3207 if it is not known."""

        def unit(transaction: Transaction) -> None:
            _active(transaction, did)
            void_identity(transaction, did, reason=reason, by=by)

        await self._commit(unit)

    async def _commit(self, unit: Unit[T]) -> T:
        """Commit a change, and let it count in this process before it is answered."""
        done = await self._journal.commit(unit)
        await self._journal.changes.look()
        return done


def void_identity(transaction: Transaction, did: str, *, reason: str, by: str) -> None:
    """Void everything that a DID holds or passed on; the identity too, if it is one of this home."""
    table.revoke(transaction, did)
    epochs.advance(transaction, epochs.IDENTITIES)
    void(transaction, "did", did, reason=reason, by=by)
    body = records.plain("authority", did, transaction.now_ms, act="identity.revoked", by=by, reason=reason)
    transaction.append("authority", did, body)


def void(transaction: Transaction, kind: Literal["jti", "did", "key"], ref: str, *, reason: str, by: str) -> None:
    """Add a revocation. The first reason given stays."""
    tokens.revoke(transaction, kind, ref, at_ms=transaction.now_ms, by=by, reason=reason)


def check(identity: Identity) -> None:
    """Refuse (E3004) an identity that cannot be registered."""
    faults = [fault for group in sorted(identity.groups) if (fault := scope_fault(group)) is not None]
    if not is_did(identity.did):
        faults.append(f"`{identity.did[:200]}` is not a DID, as in did:key:z6Mk…")
    if identity.kind not in KINDS:
        faults.append(f"the kind is one of {', '.join(KINDS)}")
    if not 0 <= identity.trust <= 100:
        faults.append("trust is a whole number from 0 to 100")
    if not identity.tenant or len(identity.name) > 200:
        faults.append("a tenant is needed, and a name has at most 200 characters")
    if any(character < " " or "\x7f" <= character <= "\x9f" for character in identity.name + identity.tenant):
        faults.append("names and tenants have no control characters")
    if faults:
        raise Failure("E3004", f"the identity cannot be registered: {'; '.join(faults)}")


def _active(transaction: Transaction, did: str) -> None:
    state = table.state(transaction, did)
    if state != "active":
        raise Failure("E3207", f"`{did}` is not registered" if state is None else f"`{did}` is revoked")


def _note(transaction: Transaction, act: str, identity: Identity, by: str) -> None:
    epochs.advance(transaction, epochs.IDENTITIES)
    body = records.plain(
        "authority",
        identity.did,
        transaction.now_ms,
        act=act,
        by=by,
        identityKind=identity.kind,
        name=identity.name,
        tenant=identity.tenant,
        trust=identity.trust,
        groups=sorted(identity.groups),
    )
    transaction.append("authority", identity.did, body)


def _row(identity: Identity) -> table.StoredIdentity:
    groups = orjson.dumps(sorted(identity.groups)).decode()
    return table.StoredIdentity(
        identity.did, identity.kind, identity.name, identity.tenant, identity.trust, groups, identity.state
    )


def identity_of(row: table.StoredIdentity) -> Identity:
    did, kind, name, tenant, trust, groups, state = row
    return Identity(
        did=did, kind=kind, name=name, tenant=tenant, trust=trust, groups=frozenset(orjson.loads(groups)), state=state
    )

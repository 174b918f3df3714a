"""Operations on identities: list, register and revoke people, agents and services that may hold tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.api.rights import require, require_here, same_place
from interlock.authority.identities import Identity, check
from interlock.core.errors import Failure
from interlock.core.threads import DISK

if TYPE_CHECKING:
    from collections.abc import Collection

    from interlock.api.parts import Parts
    from interlock.call.context import Caller, CallerKind
    from interlock.data.schema import Json


class Identities:
    """Lists, registers and revokes identities, for callers with `tokens:issue`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def list(self, *, by: Caller) -> list[Json]:
        """The identities of the caller's tenant, revoked ones included; in the tenant `local`, those of all."""
        require(by, "tokens:issue", "listing identities")
        return [one.document() for one in await self._parts.identities.all() if same_place(by, one.tenant)]

    async def add(
        self,
        *,
        by: Caller,
        did: str | None = None,
        name: str = "",
        kind: CallerKind = "agent",
        trust: int = 0,
        groups: Collection[str] = (),
        tenant: str = "local",
    ) -> Json:
        """Register an identity. Without a DID a did:key is made, whose private key stays in the data directory.

        `warnings` says whether others have or had the name.
        """
        require_here(by, "tokens:issue", "registering an identity")
        warnings = await self._warnings(did, name, tenant)
        if did is None:
            made = await make_identity(
                self._parts, by=by, name=name, kind=kind, trust=trust, groups=frozenset(groups), tenant=tenant
            )
        else:
            stated = Identity(did=did, name=name, kind=kind, trust=trust, groups=frozenset(groups), tenant=tenant)
            made = await self._parts.identities.register(stated, by=by.acting)
        return {**made.document(), "warnings": warnings}

    async def revoke(self, who: str, *, by: Caller, reason: str) -> Json:
        """Revoke the identity of a DID, or of a name in `local`, with every token that it holds or delegated."""
        require_here(by, "tokens:issue", "revoking an identity")
        known = await self._find(who)
        did = who if known is None else known.did
        await self._parts.identities.revoke(did, reason=reason, by=by.acting)
        return {"did": did, "name": "" if known is None else known.name, "state": "revoked"}

    async def _warnings(self, did: str | None, name: str, tenant: str) -> list[str]:
        known = await self._parts.identities.all() if name else []
        named = [one for one in known if (one.name, one.tenant) == (name, tenant) and one.did != did]
        if active := [one.did for one in named if one.state == "active"]:
            others = " and ".join(active)
            return [f"{name} is already the name of {others}; commands that take a name refuse this one: write the DID"]
        return [revoked_before(name)] if named else []

    async def _find(self, who: str) -> Identity | None:
        """The identity of a name or DID. E3004, with what to type, where several have the name."""
        identities = self._parts.identities
        try:
            return await identities.find(who)
        except Failure as failure:
            known = await identities.all()
            active = [one.did for one in known if (one.name, one.tenant, one.state) == (who, "local", "active")]
            if failure.code != "E3004" or len(active) < 2:
                raise
            advice = f"name the one that you mean: interlock identities revoke {active[0]} --reason WHY"
            words = f"{len(active)} identities are named `{who}`: {', '.join(active)}"
            raise Failure("E3004", words, details={"dids": active}, resolution=advice) from None


async def make_identity(parts: Parts, *, by: Caller, **facts: Any) -> Identity:
    """Register an identity under a new did:key, whose private key is stored in the data directory."""
    from interlock.authority.dids import make_did_key
    from interlock.authority.keys import keep_private, make_private

    private = make_private("EdDSA")
    made = Identity(did=make_did_key(private.public_key()), **facts)
    check(made)  # before its key is stored
    path = parts.home.keys / "identities" / f"{made.did.rpartition(':')[2]}.pem"
    await DISK.run(keep_private, path, private)
    return await parts.identities.register(made, by=by.acting)


async def named_here(parts: Parts, name: str, kind: CallerKind) -> Identity:
    """The identity of a name in `local`, whether or not other tenants have it too; a new name gets a new did:key."""
    return await parts.identities.find(name) or await make_identity(parts, by=parts.caller, name=name, kind=kind)


def revoked_before(name: str) -> str:
    """The warning about a new identity under the name of a revoked one."""
    return (
        f"an identity named {name} was revoked; this is a new one with a DID of its own, and the tokens of the old one"
        " stay refused: see interlock identities list"
    )

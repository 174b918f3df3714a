"""Operations on capability tokens: issue, delegate, inspect and revoke."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from interlock.api.identities import make_identity
from interlock.api.rights import require, same_place
from interlock.authority.delegation import delegate_offline
from interlock.authority.identities import Identity
from interlock.authority.keys import load_private
from interlock.call.capability import AS_ABOVE, ToolGrant, is_did
from interlock.call.context import Caller, CallerKind
from interlock.core.errors import Failure
from interlock.data.schema import Json

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.api.parts import Parts


class Tokens:
    """Issues, delegates, inspects and revokes tokens, for callers who may."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def issue(
        self,
        *,
        by: Caller,
        agent: str | None = None,
        person: str | None = None,
        user: str | None = None,
        tools: Sequence[str] | None = None,
        scopes: Sequence[str] = (),
        resources: Sequence[str] | None = None,
        constraints: Mapping[str, Any] | None = None,
        ttl_s: int = 3600,
    ) -> Json:
        """Issue a token for an agent or a person. An issuer with a token delegates it: the new one grants no more."""
        require(by, "tokens:issue", "issuing a token")
        if (agent is None) == (person is None):
            raise Failure("E3004", "say who holds the token: `agent` or `person`, and not both")
        if person is not None and by.capability is not None:
            raise Failure("E3206", "a token cannot be passed on to a person; the operator issues theirs")
        registered: list[str] = []
        holder = await self._somebody(agent or person or "", "human" if agent is None else "agent", by, registered)
        behalf = None if user is None else await self._somebody(user, "human", by, registered)
        text = await self._parts.tokens.issue(
            subject=holder.did,
            user=None if behalf is None else behalf.did,
            scopes=scopes,
            tools=tool_grants(["*"] if tools is None else tools),
            resources=resources,
            constraints=constraints,
            ttl_s=ttl_s,
            by=by,
        )
        again = await self._had_before(registered, by)
        picture = await self._parts.tokens.inspect(text, by=by)
        return {"token": text, "registered": registered, "reissued": again, **picture}

    async def _had_before(self, registered: list[str], by: Caller) -> list[str]:
        """Of these new names, those that an identity of the caller's tenant had before it was revoked."""
        known = await self._parts.identities.all() if registered else []
        revoked = {one.name for one in known if one.tenant == by.tenant and one.state == "revoked"}
        return [name for name in registered if name in revoked]

    async def delegate(
        self,
        token: str,
        *,
        by: Caller,
        to: str,
        tools: Sequence[str] | None = None,
        scopes: Sequence[str] | None = None,
        resources: Sequence[str] | None = None,
        constraints: Mapping[str, Any] | None = None,
        ttl_s: int | None = None,
        key_file: Path | None = None,
    ) -> Json:
        """Delegate a token, narrowed. Holding it is the right to; only registering a new name needs `tokens:issue`.

        With `key_file`, the private key of the token's holder, it is signed with that instead of this server's key.
        """
        private = None if key_file is None else load_private(key_file)
        registered: list[str] = []
        narrowing: Json = {
            "subject": (await self._somebody(to, "agent", by, registered)).did,
            "scopes": scopes,
            "tools": None if tools is None else tool_grants(tools),
            "resources": resources,
            "constraints": constraints,
            "ttl_s": ttl_s,
        }
        if private is None:
            text = await self._parts.tokens.delegate(token, by=by, **narrowing)
        else:
            text = delegate_offline(token, private=private, clock=self._parts.clock, **narrowing)
        again = await self._had_before(registered, by)
        picture = await self._parts.tokens.inspect(text, by=by)
        return {"token": text, "registered": registered, "reissued": again, **picture}

    async def inspect(self, token: str, *, by: Caller) -> Json:
        """Whether a token is valid, and why not; each link of its chain, with its holder and what it grants."""
        return await self._parts.tokens.inspect(token, by=by)

    async def revoke(self, ref: str, *, by: Caller, reason: str, foreign: bool = False) -> Json:
        """Revoke a token, a link of a chain, an identity or a signing key, and everything that depends on it.

        An id that was never seen here is refused unless `foreign` is set, so that a mistyped one revokes nothing.
        """
        require(by, "tokens:issue", "revoking")
        known = await self._parts.identities.find(ref, by.tenant)
        if by.tenant != "local" and (known is None or known.tenant != by.tenant):
            raise Failure("E3206", "outside the tenant `local`, only identities of one's own tenant can be revoked")
        ref = ref if known is None else known.did
        return {"revoked": await self._parts.tokens.revoke(ref, reason=reason, by=by, unseen=foreign)}

    async def _somebody(self, who: str, kind: CallerKind, by: Caller, registered: list[str]) -> Identity:
        """An identity by its DID or its name in the caller's tenant.

        A new name gets a did:key of its own, which needs the right to issue tokens, and is added to `registered`.
        """
        known = await self._parts.identities.find(who, by.tenant)
        if known is not None and same_place(by, known.tenant):
            return known
        # INVARIANT: a token never takes its holder into another tenant.
        if known is None and is_did(who) and by.governs("tokens:issue"):
            raise Failure("E3207", f"`{who}` is not registered; interlock identities add {who}")
        if known is not None or is_did(who) or "tokens:issue" not in by.scopes:
            raise Failure("E3207", f"nobody is known as `{who}`; an operator registers identities")
        if by.tenant == "local":
            await refuse_namesake(self._parts, who)
        registered.append(who)
        return await make_identity(self._parts, by=by, name=who, kind=kind, tenant=by.tenant)


async def refuse_namesake(parts: Parts, name: str) -> None:
    """Refuse (E3207) to register a name in `local` implicitly if an identity of another tenant has it already.

    The caller may mean that identity. INVARIANT: only for callers of `local`, who see all identities; callers of other
    tenants do not learn which names are taken.
    """
    bearers = [one for one in await parts.identities.all() if one.name == name and one.state == "active"]
    if bearers:
        whose = ", ".join(f"of {one.tenant}: {one.did}" for one in bearers)
        raise Failure("E3207", f"`{name}` is {whose}; name it by its DID, or register another `{name}` in local first")


def tool_grants(tools: Sequence[str]) -> list[ToolGrant]:
    """The grants of `TOOL` or `TOOL@RANGE`. Without a range: all versions that the issuer may grant."""
    pairs = [tool.partition("@") for tool in tools]
    if empty := [name for name, at, within in pairs if at and not within]:
        raise Failure("E3004", f"`{empty[0]}@` names no range of versions; write `{empty[0]}` for all of them")
    return [ToolGrant(name, within if at else AS_ABOVE) for name, at, within in pairs]

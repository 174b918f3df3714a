"""Capability tokens: issued, delegated, verified, revoked.

A token is a JWT. Its own claims state the last link of a delegation chain, and `act` states the links above it, nearest
first (`call.capability` has the algebra):

    iss aud iat │ sub jti nbf exp tools scopes resources constraints │ act {sub jti nbf exp tools … act {…}}

A claim that is none of these is refused, since it may restrict the token. Of a trusted issuer, claims that only inform
(`authority.keys` lists them) and those that the operator names are passed over.

Two kinds of hands may sign one. Our issuer, or one that the operator trusts, answers for the whole chain; where it
passes a token on, `via` names the keys that vouched for that one. Or the holder of a token passes it on by himself,
without asking anybody: then `iss` is his DID, the signature is by that DID's key, and `proof` is the token he holds.
The proof is verified first, by the same rules; only what an issuer once signed leads to a key, so nobody unknown can
make us fetch anything.

    issuer ─signs─► token of A ─A signs, with it as proof─► token of B ─B signs, …─► token of C

INVARIANT: whatever the path, every link is within the one above it, every subject is known and stands there once, and
nothing on the path (link, subject, key) is revoked.

A holder who passes a token on holds the new one first, so that must not give them more authority. A caller has the
least trust of the agents and services on the chain, the groups that all of them are in, and is a person only where a
person holds a token of one link. Nobody passes a token on to a person.

`authority.chains` proves a token, `authority.verifier` makes a caller of it, and this module issues and revokes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from interlock.authority import jws
from interlock.authority.chains import SIGNED_BY, Chains
from interlock.authority.delegation import chain_claims, check_new, narrowed
from interlock.authority.dids import DidResolver
from interlock.authority.identities import DidRegistry, void, void_identity
from interlock.authority.keys import Algorithm, IssuerKeys, SigningKey
from interlock.authority.revocations import Revocations, never_seen, seen_link
from interlock.authority.trusted_issuers import TrustedIssuers
from interlock.authority.verifier import Verifier
from interlock.call.capability import Link, ToolGrant, is_did, is_jti, ranged, read_above, read_link
from interlock.call.context import Caller
from interlock.core.clock import Clock, iso, new_id
from interlock.core.errors import Failure
from interlock.store import facts, records

if TYPE_CHECKING:
    from interlock.store.port import Reader, Store, Transaction

MAX_TTL_S = 86_400
ISSUE_SCOPE = "tokens:issue"


class Tokens:
    """The issuer of a home, and by `verifier` its verifier."""

    def __init__(
        self,
        *,
        journal: Store,
        clock: Clock,
        keys: IssuerKeys,
        registry: DidRegistry,
        trusted: TrustedIssuers | None = None,
        resolver: DidResolver | None = None,
        issuer: str = "interlock",
        audience: str = "interlock",
        max_ttl_s: int = MAX_TTL_S,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._keys = keys
        self._registry = registry
        self.trusted = trusted or TrustedIssuers((), clock=clock)
        self._issuer = issuer
        self._audience = audience
        self._max_ttl_s = max_ttl_s
        if is_did(issuer) or self.trusted.get(issuer) is not None:
            raise Failure("E3108", f"`{issuer}` cannot be our issuer's name: it is a DID or another issuer's")
        revocations = Revocations()
        chains = Chains(
            journal=journal,
            clock=clock,
            keys=keys,
            trusted=self.trusted,
            resolver=resolver or DidResolver(clock=clock),
            revocations=revocations,
            issuer=issuer,
            audience=audience,
            max_ttl_s=max_ttl_s,
        )
        self._changes = journal.changes
        self.verifier = Verifier(
            clock=clock, chains=chains, revocations=revocations, registry=registry, changes=journal.changes,
            key_names=keys.names,
        )  # fmt: skip

    # Issuing

    async def issue(
        self,
        *,
        subject: str,
        by: Caller,
        user: str | None = None,
        scopes: Sequence[str] = (),
        tools: Sequence[ToolGrant] = (ToolGrant("*"),),
        ttl_s: int = 3600,
        resources: Sequence[str] | None = None,
        constraints: Mapping[str, Any] | None = None,
    ) -> str:
        """Issue a token for a subject, on behalf of a user if one is named. Needs the scope `tokens:issue`.

        An issuer that acts by a token of its own delegates that token: the new one is below it and may hold no more.
        People get theirs from somebody without a token: the local operator.
        """
        _require(by)
        above: tuple[Link, ...] = ()
        via: tuple[str, ...] = ()
        if by.capability is not None:
            self.verifier.check(by.capability)
            above, via = by.capability.links, by.capability.keys
        now_s = self._clock.now_ms() // 1000
        link = Link(
            jti=self._new_id(),
            subject=subject,
            scopes=frozenset(scopes),
            tools=ranged(tools, above[-1] if above else None),
            not_before=now_s,
            expires=now_s + ttl_s,
            resources=None if resources is None else tuple(resources),
            constraints=dict(constraints or {}),
        )
        subjects = (None, subject, above[0].subject) if above else (None, subject)
        users = () if user in subjects else (replace(link, jti=self._new_id(), subject=cast("str", user)),)
        return await self._sign((*above, *users, link), via, "token.issued", by)

    async def delegate(
        self,
        parent_token: str,
        *,
        subject: str,
        by: Caller,
        scopes: Sequence[str] | None = None,
        tools: Sequence[ToolGrant] | None = None,
        resources: Sequence[str] | None = None,
        constraints: Mapping[str, Any] | None = None,
        ttl_s: int | None = None,
    ) -> str:
        """Delegate a token to a subject, narrowed. What is omitted stays unchanged; more than it holds is E3206.

        Holding the token is the right to delegate it.
        """
        parent = (await self.verifier.verify(parent_token)).capability
        assert parent is not None
        link = narrowed(
            parent.leaf,
            subject=subject,
            jti=self._new_id(),
            now_s=self._clock.now_ms() // 1000,
            scopes=scopes,
            tools=tools,
            resources=resources,
            constraints=constraints,
            ttl_s=ttl_s,
        )
        return await self._sign((*parent.links, link), parent.keys, "token.delegated", by)

    async def _sign(self, links: tuple[Link, ...], via: tuple[str, ...], act: str, by: Caller) -> str:
        """Sign the token of a chain, after the checks that verification will make, and record it."""
        check_new(links, self._max_ttl_s)
        await self.verifier.identities(links)
        await self.check_signer()
        key = self._keys.active() if self._keys.names() else await self._keys.made(self._keys.active)
        leaf = links[-1]
        claims = {"iss": self._issuer, "aud": self._audience, "iat": leaf.not_before, **chain_claims(links)}
        if via:
            claims["via"] = list(dict.fromkeys(via))
        token = jws.sign(claims, key.private, key.kid)

        def unit(transaction: Transaction) -> None:
            body = records.plain(
                "authority",
                leaf.jti,
                transaction.now_ms,
                act=act,
                by=by.id,
                subject=leaf.subject,
                chain=[{"subject": link.subject, "jti": link.jti} for link in links[:-1]],
                tools=[str(grant) for grant in leaf.tools],
                scopes=sorted(leaf.scopes),
                resources=None if leaf.resources is None else list(leaf.resources),
                constraints=dict(leaf.constraints),
                expires=iso(leaf.expires * 1000),
                key=key.kid,
            )
            transaction.append("authority", leaf.jti, body)
            facts.put(transaction, SIGNED_BY, key.kid)

        await self._journal.commit(unit)
        return token

    async def check_signer(self) -> None:
        """Refuse (E3804) if the key that has signed until now is lost: a new one is made only on request."""
        (await self.signer_check())()

    async def signer_check(self) -> Callable[[], None]:
        """The same check as a function. It looks at the key files, and may run on another thread."""
        revocations = self.verifier.revocations

        def look(reader: Reader) -> tuple[str | None, set[str]]:
            newer = {one.ref for one in revocations.newer(reader) if one.kind == "key"}
            return facts.get(reader, SIGNED_BY), newer

        signed_by, newer = await self._journal.read(look)
        return partial(self._keys.check, signed_by, revocations.keys | newer)

    def _new_id(self) -> str:
        return new_id(self._clock.now_ms(), self._clock.random_bytes(8))

    # Revoking

    async def revoke(self, ref: str, *, reason: str, by: Caller, unseen: bool = False) -> str:
        """Revoke a token, a link (`jti`, or its beginning), an identity (DID) or a key (`kid`), and all that depends on
        it.

        An unknown reference is refused (E3207), because it may be a typing error, unless `unseen` confirms it. Needs
        the scope `tokens:issue`. Returns a description of what was revoked.
        """
        _require(by)
        if is_did(ref):
            if not unseen and await self._registry.look_up(ref) is None:
                raise never_seen(ref, "no identity")
            await self._journal.commit(lambda tx: void_identity(tx, ref, reason=reason, by=by.id))
            await self._changes.look()
            return f"identity {ref}"
        if ref.startswith("ey") and jws.FORM.match(ref):
            ref = await self._jti_of(ref)
        elif "#" in ref or self._keys.find(ref) is not None:
            if not unseen and not await self._signs_here(ref):
                raise never_seen(ref, "no key")
            await self._void_key(ref, reason, by)
            return f"key {ref}"
        elif not unseen:
            ref = await self._journal.read(partial(seen_link, ref=ref))
        elif not is_jti(ref):
            raise Failure("E3004", f"`{ref[:60]}` cannot be the id of a link")

        def unit(transaction: Transaction) -> None:
            void(transaction, "jti", ref, reason=reason, by=by.id)
            body = records.plain("authority", ref, transaction.now_ms, act="token.revoked", by=by.id, reason=reason)
            transaction.append("authority", ref, body)

        await self._journal.commit(unit)
        await self._changes.look()
        return f"link {ref}"

    async def _signs_here(self, kid: str) -> bool:
        """Whether a key is ours, a trusted issuer's, or that of a registered identity."""
        owner = kid.partition("#")[0]
        if self._keys.find(kid) is not None or self.trusted.get(owner) is not None:
            return True
        return is_did(owner) and await self._registry.look_up(owner) is not None

    async def _jti_of(self, token: str) -> str:
        """Return the id of a token that is, or was, valid: nobody can have another's token revoked by a forgery."""
        try:
            await self.verifier.verify(token)
        except Failure as failure:
            if failure.code not in ("E3201", "E3207"):
                raise
        return str(jws.take_apart(token).claims["jti"])

    async def rotate_key(self, algorithm: Algorithm | None = None, *, by: Caller, first: bool = False) -> SigningKey:
        """Make a new signing key; with `first`, only if there is none yet. Needs the scope `tokens:issue`."""
        _require(by)
        if first:
            await self.check_signer()
        make = partial(self._keys.init, algorithm or "RS256") if first else partial(self._keys.rotate, algorithm)

        async def make_on_record() -> SigningKey:
            key = await self._keys.made(make)

            def unit(transaction: Transaction) -> None:
                body = records.plain(
                    "authority", key.kid, transaction.now_ms, act="key.made", by=by.acting, algorithm=key.algorithm
                )
                transaction.append("authority", key.kid, body)
                facts.put(transaction, SIGNED_BY, key.kid)

            await self._journal.commit(unit)
            return key

        # A key that is made goes on record, even if nobody waits for it any more.
        key = await asyncio.shield(make_on_record())
        await self._changes.look()
        return key

    async def retire_key(self, kid: str, *, reason: str, by: Caller) -> None:
        """Retire a key of ours that no longer signs; what it signed is void. Needs the scope `tokens:issue`."""
        _require(by)
        self._keys.retirable(kid)
        await self._void_key(kid, reason, by)

    async def _void_key(self, kid: str, reason: str, by: Caller) -> None:
        """Revoke a key. One of ours that still signs is replaced first: there is always a key that signs."""
        own = self._keys.all()
        if own and own[-1].kid == kid:
            await self.rotate_key(by=by)

        def unit(transaction: Transaction) -> None:
            void(transaction, "key", kid, reason=reason, by=by.acting)
            body = records.plain("authority", kid, transaction.now_ms, act="key.revoked", by=by.acting, reason=reason)
            transaction.append("authority", kid, body)

        await self._journal.commit(unit)
        if self._keys.find(kid) is not None:
            self._keys.retire(kid)
        await self._changes.look()

    # Looking

    async def inspect(self, token: str, *, by: Caller) -> dict[str, Any]:
        """Describe a token for people: whether it is valid and why not, its chain, its grants, the time left.

        The subjects' identities and revocations are shown only for a correctly signed token, and to callers of the
        subject's tenant or of `local`.
        """
        code, why, signed = "", "", False
        try:
            proven = await self.verifier.chains.prove(token)
            signed = True
            await self.verifier.renew(proven.capability(b""))
        except Failure as failure:
            code, why = failure.code, failure.message
        picture: dict[str, Any] = {"valid": not code, "code": code or None, "why": why or None, "chain": []}
        try:
            opened = jws.take_apart(token)
            links = (*read_above(opened.claims.get("act")), read_link(opened.claims))
        except Failure:
            return picture
        leaf = links[-1]
        return picture | {
            "issuer": opened.iss,
            "algorithm": opened.algorithm,
            "kid": opened.kid,
            "seconds_left": max(0, leaf.expires - self._clock.now_ms() // 1000),
            "chain": [
                {**(await self._standing_of(link, by) if signed else _UNTOLD), **_picture(link)} for link in links
            ],
        }

    async def _standing_of(self, link: Link, by: Caller) -> dict[str, Any]:
        """Return what is known here of a verified link, as far as the caller may know it."""
        try:
            identity = await self._registry.look_up(link.subject)
        except Failure:
            identity = None
        if by.tenant not in ("local", None if identity is None else identity.tenant):
            return _UNTOLD
        known = {} if identity is None else {"name": identity.name, "kind": identity.kind, "tenant": identity.tenant}
        return {
            **_UNTOLD,
            **known,
            "revoked": self.verifier.revocations.has(link),
        }


_UNTOLD: dict[str, Any] = {"name": None, "kind": None, "tenant": None, "revoked": None}


def _picture(link: Link) -> dict[str, Any]:
    return {
        "subject": link.subject,
        "jti": link.jti,
        "tools": [str(grant) for grant in link.tools],
        "scopes": sorted(link.scopes),
        "resources": None if link.resources is None else list(link.resources),
        "constraints": dict(link.constraints),
        "not_before": iso(link.not_before * 1000),
        "expires": iso(link.expires * 1000),
    }


def _require(by: Caller) -> None:
    if ISSUE_SCOPE not in by.scopes:
        raise Failure("E3206", f"issuing and revoking tokens needs the scope `{ISSUE_SCOPE}`")

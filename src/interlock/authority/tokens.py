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

Whoever passes a token on holds the new one first, so passing it on must not make anybody more than he is. A caller has
the least trust of the agents and services on the chain, the groups that all of them are in, and is a person only where
a person holds a token of one link. Nobody passes a token on to a person.

Verifying costs some hundred microseconds, so the outcome is remembered by the token's digest for a minute at most. What
is revoked is a set in memory. When anything changes, in whichever process (a revocation, an identity, a key), the set
grows and everything remembered is forgotten: the store's reader of changes sees to it. While it cannot read, tokens are
accepted for as long as `max_stale_s` says, and then refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import orjson

from interlock.authority import jws
from interlock.authority.delegation import chain_claims, check_new, check_once, narrowed
from interlock.authority.dids import DidResolver
from interlock.authority.identities import DidRegistry, Identity, void, void_identity
from interlock.authority.keys import (
    Algorithm,
    IssuerKeys,
    PublicKey,
    SigningKey,
    TrustedIssuers,
)
from interlock.call.capability import (
    DEEPEST,
    LINK_CLAIMS,
    Capability,
    Link,
    ToolGrant,
    is_did,
    is_jti,
    ranged,
    read_above,
    read_link,
    widenings,
)
from interlock.call.context import Caller
from interlock.core.clock import Clock, iso, new_id
from interlock.core.errors import Failure
from interlock.store import facts, ledger, records
from interlock.store import tokens as table
from interlock.store.port import Reader, Store, Transaction

MAX_TTL_S = 86_400
REMEMBER_S = 60.0
REMEMBERED = 10_000
ISSUE_SCOPE = "tokens:issue"

# Claims besides those of a link: of every token, of one that an issuer signed, and of one that its holder passed on.
_AROUND = frozenset({"iss", "aud", "iat"})
_OF_ISSUERS = frozenset({"via"})
_OF_HOLDERS = frozenset({"proof"})

# The fact that names the key that signed last, so that the loss of the key files is noticed.
SIGNED_BY = "issuer_key"
_KEEP_IT = (
    "keep the token and send the request again later; the operator restores keys/issuer from a backup or moves the home"
    " back, and sees what is wrong with: interlock doctor"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proven:
    """A chain that an issuer vouches for, and its audience."""

    issuer: str
    audience: str
    links: tuple[Link, ...]
    keys: tuple[str, ...]
    ignored: frozenset[str] = frozenset()  # claims of the issuer's own token that may be ignored

    def capability(self, digest: bytes) -> Capability:
        return Capability(digest=digest.hex(), issuer=self.issuer, links=self.links, keys=self.keys)


# A program sends the same token with call after call, and it is the longest text of each. (The last few tokens are held
# in memory for this, as their senders hold them too; verified ones are remembered only by their digests.)
@lru_cache(maxsize=64)
def token_digest(token: str) -> bytes:
    """The digest by which a verified token is cached."""
    return hashlib.sha256(token.encode(errors="replace")).digest()


class Tokens:
    """The issuer and verifier of a home."""

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
        self._trusted = trusted or TrustedIssuers((), clock=clock)
        self._resolver = resolver or DidResolver(clock=clock)
        self._issuer = issuer
        self._audience = audience
        self._max_ttl_s = max_ttl_s
        if is_did(issuer) or self._trusted.get(issuer) is not None:
            raise Failure("E3108", f"`{issuer}` cannot be our issuer's name: it is a DID or another issuer's")
        self._remembered: dict[bytes, tuple[Caller, float]] = {}
        # Capabilities that depend on nothing revoked, until something is; with the period in which they hold, in ms.
        self._sound: dict[str, tuple[Capability, int, int]] = {}
        self._void_links: set[str] = set()
        self._void_subjects: set[str] = set()
        self._void_keys: set[str] = set()
        self._through = 0
        self._epoch = 0
        self._changes = journal.changes
        self._changes.watch(("revocations", "identities"), self._load, self._changed, also=keys.names)

    # Verifying

    def known(self, token: str) -> Caller | None:
        """The caller of a recently verified token; None if `verify` has to check it."""
        return self.recall(token_digest(token))

    def recall(self, digest: bytes) -> Caller | None:
        """The same by the token's digest."""
        now = self._clock.monotonic()
        if now >= self._changes.fresh_until:
            self._changes.catch_up()
        cached = self._remembered.get(digest)
        return cached[0] if cached is not None and now < cached[1] else None

    async def verify(self, token: str) -> Caller:
        """Verify a token and return its caller.

        E3201 expired, not valid yet or revoked; E3202 signature, algorithm or key; E3203 malformed, or wider than the
        link above it; E3207 an unknown subject; E3001 keys or identities that are unavailable.
        """
        self._catch_up()
        epoch = self._epoch
        proven = await self._prove(token)
        digest = token_digest(token)
        caller = await self.renew(proven.capability(digest))
        if epoch == self._epoch:
            self._remember(digest, caller, proven.links[-1].expires)
        return caller

    async def renew(self, capability: Capability) -> Caller:
        """Return the caller of a capability that was verified before, by the present state of identities."""
        # Checked before the registry is asked, so that a revocation is reported as such; and after it, since it may
        # have taken time.
        self.check(capability)
        caller = _caller(capability, await self._identities(capability.links))
        self.check(capability)
        return caller

    def check(self, capability: Capability) -> None:
        """Refuse (E3201) a capability outside its period, or that depends on anything revoked. Runs for every call."""
        self._catch_up()
        # The last link has the narrowest period.
        leaf, now_ms = capability.links[-1], self._clock.now_ms()
        if now_ms >= leaf.expires * 1000:
            raise Failure("E3201", f"the token expired at {iso(leaf.expires * 1000)}")
        if now_ms < leaf.not_before * 1000:
            raise Failure("E3201", f"the token is not valid before {iso(leaf.not_before * 1000)}")
        for link in capability.links:
            if link.jti in self._void_links:
                raise Failure("E3201", f"the token is revoked: its link `{link.jti}` is")
            if link.subject in self._void_subjects:
                raise Failure("E3201", f"the token is revoked: the identity `{link.subject}` is")
        for key in capability.keys:
            if key in self._void_keys:
                raise Failure("E3201", f"the token is revoked: the key `{key}` that signed it is")
        if len(self._sound) >= REMEMBERED:
            self._sound.clear()
        self._sound[capability.digest] = (capability, leaf.not_before * 1000, leaf.expires * 1000)

    def is_sound(self, capability: Capability, now: float, now_ms: int) -> bool:
        """Whether a capability that was checked before still holds; if False, `check` has to run."""
        known = self._sound.get(capability.digest)
        if known is None or known[0] is not capability or now >= self._changes.fresh_until:
            return False
        return known[1] <= now_ms < known[2]

    def _remember(self, digest: bytes, caller: Caller, expires: int) -> None:
        if len(self._remembered) >= REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        left_s = expires - self._clock.now_ms() / 1000
        self._remembered[digest] = (caller, self._clock.monotonic() + min(REMEMBER_S, left_s))

    def _catch_up(self) -> None:
        if self._clock.monotonic() >= self._changes.fresh_until:
            self._changes.catch_up()

    def _load(self, reader: Reader) -> list[table.Revocation]:
        return table.revocations_after(reader, self._through)

    def _changed(self, revocations: list[table.Revocation]) -> None:
        """Apply new revocations, and drop cached verifications."""
        sets = {"jti": self._void_links, "did": self._void_subjects, "key": self._void_keys}
        for seq, kind, ref in revocations:
            sets[kind].add(ref)
            self._through = max(self._through, seq)
        self._remembered.clear()
        self._sound.clear()
        self._epoch += 1

    async def _prove(self, token: str, depth: int = 1) -> _Proven:
        """Return the chain of a token after checking signatures, claims and narrowing all the way up."""
        opened = jws.take_apart(token)
        claims = opened.claims
        above = read_above(claims.get("act"))
        if is_did(opened.iss):
            parent = await self._parent(opened, above, depth)
            key = await self._holder_key(opened)
            proven = replace(parent, keys=(*parent.keys, key.kid), ignored=_OF_HOLDERS)
        else:
            if "proof" in claims:
                raise Failure("E3203", "the token is malformed: only a token signed by a DID has a `proof`")
            key, proven = await self._issuer_key(opened)
        jws.verify(token, opened, key)
        # INVARIANT: a restriction that is not understood is not ignored. `cnf`, for example, binds a token to a key.
        if unknown := sorted(claims.keys() - LINK_CLAIMS - _AROUND - proven.ignored):
            raise Failure("E3203", f"the token has claims that are not understood here: {', '.join(unknown)[:200]}")
        link = self._link(claims, proven.audience)
        if is_did(opened.iss) and not link.jti.startswith(f"{above[-1].jti}/"):
            # Otherwise a holder could take another link's id, and with it its count of uses.
            raise Failure("E3203", "the token is malformed: its `jti` must be its parent's, a slash and more")
        links = (*above, link)
        if len(links) > DEEPEST:
            raise Failure("E3203", f"the delegation chain is deeper than {DEEPEST} links")
        self._check_chain(links)
        return replace(proven, links=links)

    async def _parent(self, opened: jws.Opened, above: tuple[Link, ...], depth: int) -> _Proven:
        """Verify the proof of a token that its holder signed: it must be the holder's, and the chain above it."""
        proof = opened.claims.get("proof")
        if not isinstance(proof, str):
            raise Failure("E3203", "the token is malformed: one that is signed by a DID needs the `proof` it hangs on")
        if depth >= DEEPEST:
            raise Failure("E3203", f"the delegation chain is deeper than {DEEPEST} links")
        parent = await self._prove(proof, depth + 1)
        if parent.links[-1].subject != opened.iss:
            raise Failure("E3203", "the token's proof belongs to somebody else than who signed it")
        if parent.links != above:
            raise Failure("E3203", "the token's `act` does not say what its proof says")
        return parent

    async def _holder_key(self, opened: jws.Opened) -> PublicKey:
        keys = await self._resolver.resolve(opened.iss, opened.kid)
        fitting = [key for key in keys if opened.kid is None or opened.kid == key.kid]
        if len(fitting) != 1:
            raise Failure("E3202", "the token's `kid` names no single key of the DID that signed it")
        return fitting[0]

    async def _issuer_key(self, opened: jws.Opened) -> tuple[PublicKey, _Proven]:
        iss, kid = opened.iss, opened.kid
        if kid is None:
            raise Failure("E3202", "the token's header names no key (`kid`)")
        if iss == self._issuer:
            key, name, audience, ignored = self._own_key(kid, opened.claims), kid, self._audience, _OF_ISSUERS
        else:
            issuer = self._trusted.get(iss)
            if issuer is None:
                raise Failure("E3202", f"the token's issuer `{iss[:200]}` is not trusted here")
            key, name, audience = await self._trusted.find(iss, kid), f"{iss}#{kid}", issuer.audience
            ignored = _OF_ISSUERS | issuer.ignored_claims
            if key is not None and key.algorithm not in issuer.algorithms:
                raise Failure("E3202", f"`{key.algorithm}` is not among the algorithms of the issuer `{iss}`")
        if key is None:
            raise Failure("E3202", "the token is signed by a key that its issuer does not have, or has retired")
        keys = (*_via(opened.claims), name)
        return key, _Proven(issuer=iss, audience=audience, links=(), keys=keys, ignored=ignored)

    def _own_key(self, kid: str, claims: Mapping[str, Any]) -> PublicKey | None:
        """Return a key of this home's issuer; None for one that it never had or has retired.

        E3001 if that cannot be determined, because key files are missing, damaged or readable by others: the token may
        be valid, and its holder must not discard it.
        """
        try:
            key = self._keys.find(kid)
            missing = None if key is not None else self._missing(kid, claims.get("jti"))
        except Failure as failure:
            if failure.code not in ("E3801", "E3804"):
                raise
            key, missing = None, failure.message
        if missing is not None:
            raise Failure("E3001", f"tokens cannot be checked here: {missing}", resolution=_KEEP_IT)
        return key

    def _missing(self, kid: str, jti: Any) -> str | None:
        """Return why a missing key may be a valid one of ours; None if it cannot be."""
        if kid in self._void_keys:
            return None
        if not self._keys.names():
            return "this home has no key of its issuer"
        return f"the issuer's key `{kid}` is missing and was not retired" if self._has_signed(kid, jti) else None

    def _has_signed(self, kid: str, jti: Any) -> bool:
        """Whether the journal shows that a key was the issuer's: it signs now, was made here, or signed this token."""
        reader = self._journal.reader
        if facts.get(reader, SIGNED_BY) == kid:
            return True
        about = [kid, jti] if isinstance(jti, str) else [kid]
        for ref in about:
            for body in ledger.of_kind(reader, ref[:200], "authority"):
                record = orjson.loads(body)
                if record.get("key") == kid or (ref == kid and record.get("act") == "key.made"):
                    return True
        return False

    def _link(self, claims: Mapping[str, Any], audience: str) -> Link:
        """Read the token's own link, after checking the claims around it."""
        link = read_link(claims)
        if claims.get("aud") not in (audience, [audience]):
            raise Failure("E3203", f"the token is for another audience than `{audience}`")
        issued: Any = claims.get("iat")
        if issued.__class__ is not int:
            raise Failure("E3203", "the token is malformed: `iat` must be a whole number of seconds")
        if issued * 1000 > self._clock.now_ms():
            raise Failure("E3201", "the token is not valid yet: it was issued in the future")
        if link.expires - issued > self._max_ttl_s:
            raise Failure("E3203", f"the token lives longer than the {self._max_ttl_s} seconds that are allowed")
        return link

    def _check_chain(self, links: Sequence[Link]) -> None:
        check_once(links)
        for link in links:
            if link.expires - link.not_before > self._max_ttl_s:
                raise Failure("E3203", f"a link lives longer than the {self._max_ttl_s} seconds that are allowed")
        for parent, child in pairwise(links):
            more = widenings(parent, child)
            if more:
                raise Failure(
                    "E3203", f"the link of `{child.subject}` holds more than the one above it: {'; '.join(more)}"
                )

    async def _identities(self, links: Sequence[Link]) -> list[Identity]:
        """Return all identities of the chain, root first; E3207 for an unknown or revoked one."""
        identities = [await self._known(link.subject) for link in links]
        if len(identities) > 1 and identities[-1].kind == "human":
            raise Failure("E3206", f"a token cannot be passed on to a person, and `{identities[-1].did}` is one")
        if len({identity.tenant for identity in identities}) > 1:
            raise Failure("E3206", "the delegation chain leads from one tenant into another")
        return identities

    async def _known(self, did: str) -> Identity:
        identity = await self._registry.look_up(did)
        if identity is None:
            raise Failure("E3207", f"the identity `{did}` is not registered here")
        if identity.state != "active":
            raise Failure("E3207", f"the identity `{did}` is revoked")
        return identity

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
            self.check(by.capability)
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
        parent = (await self.verify(parent_token)).capability
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
        await self._identities(links)
        self.check_signer()
        key = self._keys.active()
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

    def check_signer(self) -> None:
        """Refuse (E3804) if the key that has signed until now is lost: a new one is made only on request."""
        reader = self._journal.reader
        signed_by = facts.get(reader, SIGNED_BY)
        # Read here and not applied: this may run on another thread.
        newer = table.revocations_after(reader, self._through)
        self._keys.check(signed_by, self._void_keys | {one.ref for one in newer if one.kind == "key"})

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
                raise _never_seen(ref, "no identity")
            await self._journal.commit(lambda tx: void_identity(tx, ref, reason=reason, by=by.id))
            self._changes.look()
            return f"identity {ref}"
        if ref.startswith("ey") and jws.FORM.match(ref):
            ref = await self._jti_of(ref)
        elif "#" in ref or self._keys.find(ref) is not None:
            if not unseen and not await self._signs_here(ref):
                raise _never_seen(ref, "no key")
            await self._void_key(ref, reason, by)
            return f"key {ref}"
        elif not unseen:
            ref = self._seen_link(ref)
        elif not is_jti(ref):
            raise Failure("E3004", f"`{ref[:60]}` cannot be the id of a link")

        def unit(transaction: Transaction) -> None:
            void(transaction, "jti", ref, reason=reason, by=by.id)
            body = records.plain("authority", ref, transaction.now_ms, act="token.revoked", by=by.id, reason=reason)
            transaction.append("authority", ref, body)

        await self._journal.commit(unit)
        self._changes.look()
        return f"link {ref}"

    async def _signs_here(self, kid: str) -> bool:
        """Whether a key is ours, a trusted issuer's, or that of a registered identity."""
        owner = kid.partition("#")[0]
        if self._keys.find(kid) is not None or self._trusted.get(owner) is not None:
            return True
        return is_did(owner) and await self._registry.look_up(owner) is not None

    def _seen_link(self, ref: str) -> str:
        """Return the id of a link that was issued here, or derived from one; or the only one that begins so."""
        part = ref.strip().rstrip("….")
        root = part.partition("/")[0]
        reader = self._journal.reader
        matching = table.given_out(reader, root, *_GIVEN)
        if not matching and len(part) >= _SHORTEST:
            # Links above the last one of a chain are on record within the record of the last.
            bodies = table.authority_bodies_with(reader, f'"jti":"{part}'.encode())
            chains: list[list[dict[str, str]]] = [orjson.loads(body).get("chain", []) for body in bodies]
            matching = {link["jti"] for chain in chains for link in chain if link["jti"].startswith(part)}
        if part in matching or (root in matching and is_jti(part)):
            return part
        if len(matching) == 1 and len(part) >= _SHORTEST and "/" not in part:
            return matching.pop()
        if len(matching) > 1 and len(part) >= _SHORTEST:
            raise Failure("E3004", f"more than one link begins with `{part[:60]}`; write more of it")
        raise _never_seen(ref, "no link")

    async def _jti_of(self, token: str) -> str:
        """Return the id of a token that is, or was, valid: nobody can have another's token revoked by a forgery."""
        try:
            await self.verify(token)
        except Failure as failure:
            if failure.code not in ("E3201", "E3207"):
                raise
        return str(jws.take_apart(token).claims["jti"])

    async def rotate_key(self, algorithm: Algorithm | None = None, *, by: Caller, first: bool = False) -> SigningKey:
        """Make a new signing key; with `first`, only if there is none yet. Needs the scope `tokens:issue`."""
        _require(by)
        if first:
            self.check_signer()
        key = self._keys.init(algorithm or "RS256") if first else self._keys.rotate(algorithm)

        def unit(transaction: Transaction) -> None:
            body = records.plain(
                "authority", key.kid, transaction.now_ms, act="key.made", by=by.id, algorithm=key.algorithm
            )
            transaction.append("authority", key.kid, body)
            facts.put(transaction, SIGNED_BY, key.kid)

        await self._journal.commit(unit)
        self._changes.look()
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
            void(transaction, "key", kid, reason=reason, by=by.id)
            body = records.plain("authority", kid, transaction.now_ms, act="key.revoked", by=by.id, reason=reason)
            transaction.append("authority", kid, body)

        await self._journal.commit(unit)
        if self._keys.find(kid) is not None:
            self._keys.retire(kid)
        self._changes.look()

    # Looking

    async def inspect(self, token: str, *, by: Caller) -> dict[str, Any]:
        """Describe a token for people: whether it is valid and why not, its chain, its grants, the time left.

        The subjects' identities and revocations are shown only for a correctly signed token, and to callers of the
        subject's tenant or of `local`.
        """
        code, why, signed = "", "", False
        try:
            proven = await self._prove(token)
            signed = True
            await self.renew(proven.capability(b""))
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
            "revoked": link.jti in self._void_links or link.subject in self._void_subjects,
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


_SHORTEST = 6  # characters of a link's id that may stand for it
_GIVEN = (b'"act":"token.issued"', b'"act":"token.delegated"')


def _never_seen(ref: str, what: str) -> Failure:
    words = f"{what} `{ref[:60]}` was ever seen here, so nothing was revoked"
    return Failure("E3207", words, resolution="name what is meant, or say that it is foreign")


def _require(by: Caller) -> None:
    if ISSUE_SCOPE not in by.scopes:
        raise Failure("E3206", f"issuing and revoking tokens needs the scope `{ISSUE_SCOPE}`")


def _caller(capability: Capability, identities: Sequence[Identity]) -> Caller:
    """Make the caller. INVARIANT: delegation raises no trust, adds no group and makes nobody a person or a service."""
    acting = identities[-1]
    alone = len(identities) == 1 and acting.kind == "human"
    hands = [acting] if alone else [one for one in identities if one.kind != "human"]
    return Caller(
        id=capability.root.subject,
        tenant=acting.tenant,
        agent=None if alone else acting.did,
        scopes=capability.leaf.scopes,
        kind=acting.kind if len({one.kind for one in hands}) == 1 else "agent",
        trust=min(one.trust for one in hands),
        groups=frozenset[str].intersection(*(one.groups for one in hands)),
        capability=capability,
        passed_on=len(hands) > 1,
    )


def _via(claims: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that vouched for a token which its issuer delegated. They can only void it, never validate it."""
    names: Any = claims.get("via", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in cast("list[Any]", names)):
        raise Failure("E3203", "the token is malformed: `via` must be a list of names of keys")
    return tuple(cast("list[str]", names))

"""Proving a token: the signatures, the claims and the chain of delegation all the way up.

Two kinds of hands may sign a token (`authority.tokens` explains them): an issuer, which answers for the whole chain, or
the holder of a token, who passes it on with that token as `proof`. The proof is verified first, by the same rules; only
what an issuer once signed leads to a key, so nobody unknown can make us fetch anything.

Nothing here asks whether a link, a subject or a key is revoked, or who a subject is: `authority.verifier` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import orjson

from interlock.authority import jws
from interlock.authority.delegation import check_once
from interlock.authority.dids import DidResolver
from interlock.authority.keys import IssuerKeys, PublicKey
from interlock.authority.revocations import Revocations
from interlock.authority.trusted_issuers import TrustedIssuers
from interlock.call.capability import DEEPEST, LINK_CLAIMS, Capability, Link, is_did, read_above, read_link, widenings
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.store import facts, ledger
from interlock.store.port import Reader, Store

# Claims besides those of a link: of every token, of one that an issuer signed, and of one that its holder passed on.
_AROUND = frozenset({"iss", "aud", "iat"})
_OF_ISSUERS = frozenset({"via"})
_OF_HOLDERS = frozenset({"proof"})

# The fact that names the key that signed last, so that the loss of the key files is noticed.
SIGNED_BY = "issuer_key"
_KEEP_IT = (
    "keep the token and send the request again later; the operator restores keys/issuer from a backup or moves the data"
    " directory back, and sees what is wrong with: interlock doctor"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """A chain that an issuer vouches for, and its audience."""

    issuer: str
    audience: str
    links: tuple[Link, ...]
    keys: tuple[str, ...]
    ignored: frozenset[str] = frozenset()  # claims of the issuer's own token that may be ignored

    def capability(self, digest: bytes) -> Capability:
        return Capability(digest=digest.hex(), issuer=self.issuer, links=self.links, keys=self.keys)


class Chains:
    """Proves tokens of our issuer, of trusted issuers and of their holders."""

    def __init__(
        self,
        *,
        journal: Store,
        clock: Clock,
        keys: IssuerKeys,
        trusted: TrustedIssuers,
        resolver: DidResolver,
        revocations: Revocations,
        issuer: str,
        audience: str,
        max_ttl_s: int,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._keys = keys
        self._trusted = trusted
        self._resolver = resolver
        self._revocations = revocations
        self._issuer = issuer
        self._audience = audience
        self._max_ttl_s = max_ttl_s

    async def prove(self, token: str, depth: int = 1) -> Proven:
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

    async def _parent(self, opened: jws.Opened, above: tuple[Link, ...], depth: int) -> Proven:
        """Verify the proof of a token that its holder signed: it must be the holder's, and the chain above it."""
        proof = opened.claims.get("proof")
        if not isinstance(proof, str):
            raise Failure("E3203", "the token is malformed: one that is signed by a DID needs the `proof` it hangs on")
        if depth >= DEEPEST:
            raise Failure("E3203", f"the delegation chain is deeper than {DEEPEST} links")
        parent = await self.prove(proof, depth + 1)
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

    async def _issuer_key(self, opened: jws.Opened) -> tuple[PublicKey, Proven]:
        iss, kid = opened.iss, opened.kid
        if kid is None:
            raise Failure("E3202", "the token's header names no key (`kid`)")
        if iss == self._issuer:
            key, name, audience, ignored = await self._own_key(kid, opened.claims), kid, self._audience, _OF_ISSUERS
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
        return key, Proven(issuer=iss, audience=audience, links=(), keys=keys, ignored=ignored)

    async def _own_key(self, kid: str, claims: Mapping[str, Any]) -> PublicKey | None:
        """Return a key of this data directory's issuer; None for one that it never had or has retired.

        E3001 if that cannot be determined, because key files are missing, damaged or readable by others: the token may
        be valid, and its holder must not discard it.
        """
        try:
            key = self._keys.find(kid)
            missing = None if key is not None else await self._missing(kid, claims.get("jti"))
        except Failure as failure:
            if failure.code not in ("E3801", "E3804"):
                raise
            key, missing = None, failure.message
        if missing is not None:
            raise Failure("E3001", f"tokens cannot be checked here: {missing}", resolution=_KEEP_IT)
        return key

    async def _missing(self, kid: str, jti: Any) -> str | None:
        """Return why a missing key may be a valid one of ours; None if it cannot be."""
        if kid in self._revocations.keys:
            return None
        if not self._keys.names():
            return "this data directory has no key of its issuer"
        signed = await self._journal.read(lambda reader: _has_signed(reader, kid, jti))
        return f"the issuer's key `{kid}` is missing and was not retired" if signed else None

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


def _has_signed(reader: Reader, kid: str, jti: Any) -> bool:
    """Whether the journal shows that a key was the issuer's: it signs now, was made here, or signed this token."""
    if facts.get(reader, SIGNED_BY) == kid:
        return True
    # A name with a NUL character is in no record, and not every database can be asked for it.
    about = [name for name in (kid, jti) if isinstance(name, str) and "\0" not in name]
    for ref in about:
        for body in ledger.of_kind(reader, ref[:200], "authority"):
            record = orjson.loads(body)
            if record.get("key") == kid or (ref == kid and record.get("act") == "key.made"):
                return True
    return False


def _via(claims: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that vouched for a token which its issuer delegated. They can only void it, never validate it."""
    names: Any = claims.get("via", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in cast("list[Any]", names)):
        raise Failure("E3203", "the token is malformed: `via` must be a list of names of keys")
    return tuple(cast("list[str]", names))

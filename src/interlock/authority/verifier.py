"""Verifying tokens: the caller of a token, and whether a capability still holds.

Verifying costs some hundred microseconds, so the outcome is remembered by the token's digest for a minute at most. What
is revoked is a set in memory. When anything changes, in whichever process (a revocation, an identity, a key), the set
grows and everything remembered is forgotten: the store's reader of changes sees to it. While it cannot read, tokens are
accepted for as long as `max_stale_s` says, and then refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from interlock.authority.chains import Chains
from interlock.authority.identities import DidRegistry, Identity
from interlock.authority.revocations import Revocations
from interlock.call.capability import Capability, Link
from interlock.call.context import Caller
from interlock.core.clock import Clock, iso
from interlock.core.errors import Failure
from interlock.core.shared_work import SharedWork
from interlock.store import tokens as table
from interlock.store.port import Changes

REMEMBER_S = 60.0
REMEMBERED = 10_000


# A program sends the same token with call after call, and it is the longest text of each. (The last few tokens are held
# in memory for this, as their senders hold them too; verified ones are remembered only by their digests.)
@lru_cache(maxsize=64)
def token_digest(token: str) -> bytes:
    """The digest by which a verified token is cached."""
    return hashlib.sha256(token.encode(errors="replace")).digest()


class Verifier:
    """Verifies tokens, and remembers for a while which ones it has verified."""

    def __init__(
        self,
        *,
        clock: Clock,
        chains: Chains,
        revocations: Revocations,
        registry: DidRegistry,
        changes: Changes,
        key_names: Callable[[], object],
    ) -> None:
        self._clock = clock
        self._registry = registry
        self.chains = chains
        self.revocations = revocations
        self._remembered: dict[bytes, tuple[Caller, float]] = {}
        # Capabilities that depend on nothing revoked, until something is; with the period in which they hold, in ms.
        self._sound: dict[str, tuple[Capability, int, int]] = {}
        self._epoch = 0
        self._verifying = SharedWork[Caller]()
        self._changes = changes
        changes.watch(("revocations", "identities"), revocations.newer, self._changed, also=key_names)

    def known(self, token: str) -> Caller | None:
        """The caller of a recently verified token; None if `verify` has to check it."""
        return self.recall(token_digest(token))

    def recall(self, digest: bytes) -> Caller | None:
        """The same by the token's digest."""
        now = self._clock.monotonic()
        if now >= self._changes.fresh_until and not self._changes.try_catch_up():
            return None
        cached = self._remembered.get(digest)
        return cached[0] if cached is not None and now < cached[1] else None

    async def verify(self, token: str) -> Caller:
        """Verify a token and return its caller.

        E3201 expired, not valid yet or revoked; E3202 signature, algorithm or key; E3203 malformed, or wider than the
        link above it; E3207 an unknown subject; E3001 keys or identities that are unavailable.
        """
        await self._changes.caught_up()
        digest = token_digest(token)
        # INVARIANT: who asks after a change is not told what was found out before it.
        return await self._verifying.do((digest, self._epoch), partial(self._verify, token, digest))

    async def _verify(self, token: str, digest: bytes) -> Caller:
        known = self.recall(digest)
        if known is not None:
            return known  # it was verified while this request waited
        epoch = self._epoch
        proven = await self.chains.prove(token)
        caller = await self.renew(proven.capability(digest))
        if epoch == self._epoch:
            self._remember(digest, caller, proven.links[-1].expires)
        return caller

    async def renew(self, capability: Capability) -> Caller:
        """Return the caller of a capability that was verified before, by the present state of identities."""
        # Checked before the registry is asked, so that a revocation is reported as such; and after it, since it may
        # have taken time.
        await self._changes.caught_up()
        self.check(capability)
        caller = _caller(capability, await self.identities(capability.links))
        self.check(capability)
        return caller

    def check(self, capability: Capability) -> None:
        """Refuse (E3201) a capability outside its period, or that depends on anything revoked. Runs for every call."""
        if self._clock.monotonic() >= self._changes.fresh_until:
            self._changes.catch_up()
        known, now_ms = self._sound.get(capability.digest), self._clock.now_ms()
        if known is not None and known[0] is capability and known[1] <= now_ms < known[2]:
            return  # checked before, and nothing was revoked since
        # The last link has the narrowest period.
        leaf = capability.links[-1]
        if now_ms >= leaf.expires * 1000:
            raise Failure("E3201", f"the token expired at {iso(leaf.expires * 1000)}")
        if now_ms < leaf.not_before * 1000:
            raise Failure("E3201", f"the token is not valid before {iso(leaf.not_before * 1000)}")
        self.revocations.refuse(capability)
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

    def _changed(self, revocations: list[table.Revocation]) -> None:
        """Apply new revocations, and drop cached verifications."""
        self.revocations.add(revocations)
        self._remembered.clear()
        self._sound.clear()
        self._epoch += 1

    async def identities(self, links: Sequence[Link]) -> list[Identity]:
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

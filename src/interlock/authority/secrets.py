"""Credentials: stored encrypted, lent to one call at a time, void and wiped when it ends.

Theory of operation. A tool's manifest names the credentials it needs (`credential:github/token`). When a call of it
starts, `open_lease` fetches just these from a source, and the call holds them in a `Lease` no longer than it may run. A
rotated credential reaches the next call, never a running one. `close` zeroes the values and, if they were issued for
this call alone, has the issuer revoke them. A later use raises E3603.

Two sources exist: the embedded store below (one encrypted row per credential) and Vault (`vault`). Both answer in the
same four ways: E3601 unreachable, E3602 absent, E3603 expired, E3604 cannot be decrypted. Several slots under one name
form a pool: the first that is not resting is used, and one that met a rate limit rests for a while.

A value is shown by `reveal` and by nothing else: not by repr, format, JSON, copying or pickling. The bytes Interlock
holds are zeroed at the end; text that `reveal` returned belongs to its caller, so results and messages go through
`privacy.scrub` before they leave the call.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, cast

import orjson

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import NamedTuple
from interlock.core.threads import DISK
from interlock.store import facts, records
from interlock.store import secrets as table
from interlock.store.port import Store, Transaction
from interlock.store.sealing import LASTING, SEALED_BY, Box, key_id_of, keys_in_use, seal_again

_log = logging.getLogger("interlock.secrets")

PERMISSION = "credential:"
MAX_VALUE = 65_536
LONGEST_REST_MS = 86_400_000

# No part may begin with a dot: a name is also a path in Vault.
_NAME = expression(r"(?=.{1,200}\Z)[a-z0-9_-][a-z0-9_.-]*(/[a-z0-9_-][a-z0-9_.-]*)*", re.ASCII)
_SLOT = expression(r"[a-z0-9_-]{1,50}", re.ASCII)


class Credential:
    """One secret value, for as long as it is valid. Only `reveal` shows it."""

    __slots__ = ("_clock", "_ends", "_value", "_wiped", "expires_ms", "issued", "name", "slot", "version")

    def __init__(
        self,
        value: bytes,
        *,
        name: str,
        slot: str,
        version: str,
        clock: Clock,
        expires_ms: int | None = None,
        issued: str | None = None,
    ) -> None:
        """Make a credential. `issued` is the issuer's own reference if it was made for one call."""
        self.name = name
        self.slot = slot
        self.version = version
        self.expires_ms = expires_ms
        self.issued = issued
        self._clock = clock
        self._value = bytearray(value)
        self._ends = float("inf")
        self._wiped = False

    def reveal(self) -> str:
        """Return the value; E3603 once its call has ended or it has expired."""
        if self._clock.monotonic() >= self._ends:
            raise Failure("E3603", f"the credential `{self.name}` was lent to a call whose time is over")
        if self.expires_ms is not None and self._clock.now_ms() >= self.expires_ms:
            raise Failure("E3603", f"the credential `{self.name}` has expired; store a new one")
        return self._text()

    def texts(self) -> list[str]:
        """The texts that must not appear in any output: the value, and each field if an issuer gave several."""
        value = self._text()
        if self.issued is None or not value.startswith("{"):
            return [value]
        fields = cast("dict[str, Any]", orjson.loads(value))
        return [value, *(field for field in fields.values() if isinstance(field, str))]

    def end_at(self, monotonic: float) -> None:
        """Make it void at a point in time, if it is not void sooner."""
        self._ends = min(self._ends, monotonic)

    def wipe(self) -> None:
        """Zero the value, for good."""
        # INVARIANT: the mark is set first, so that a concurrent reader never takes zeros for the value.
        self._wiped = True
        self._value[:] = bytes(len(self._value))

    def _text(self) -> str:
        text = self._value.decode()
        if self._wiped:
            raise Failure("E3603", f"the credential `{self.name}` was lent to a call that has ended")
        return text

    def __repr__(self) -> str:
        return f"<credential {self.name} [{self.slot}]>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a credential can be neither copied nor stored")


class SecretSource(Protocol):
    """A source of credentials."""

    async def fetch(self, name: str, lifetime_s: float | None = None) -> Credential:
        """Return the credential that is in force now; E3601 unreachable, E3602 absent, E3603 expired, E3604
        undecryptable.

        `lifetime_s` states how long it is needed. A source that issues credentials lets it end then.
        """
        ...

    async def rest(self, name: str, slot: str, ms: int) -> None:
        """Do not use one slot of a pool for a while, because its service limits its rate."""
        ...

    async def release(self, credential: Credential) -> None:
        """Have a credential that was issued for one call revoked."""
        ...

    async def close(self) -> None: ...


# Leases


async def open_lease(source: SecretSource, names: Sequence[str], *, lifetime_s: float, clock: Clock) -> Lease:
    """Fetch the credentials of one call, for its duration. If one is unavailable, none is held."""
    lease = Lease(source, clock.monotonic() + lifetime_s)
    try:
        for name in dict.fromkeys(names):
            check_name(name)
            lease.add(await source.fetch(name, lifetime_s))
    except BaseException:
        await lease.close()
        raise
    return lease


class Lease:
    """The credentials of one call, and of no other."""

    __slots__ = ("_closed", "_credentials", "_ends", "_log_again", "_source")

    def __init__(self, source: SecretSource, ends: float) -> None:
        self._source = source
        self._ends = ends
        self._credentials: dict[str, Credential] = {}
        self._closed = False
        self._log_again: Callable[[], None] | None = None

    def add(self, credential: Credential) -> None:
        credential.end_at(self._ends)
        self._credentials[credential.name] = credential
        if self._log_again is None:
            from interlock.telemetry.logs import withhold  # most commands lend no credentials

            self._log_again = withhold(self.values)

    def __getitem__(self, name: str) -> Credential:
        credential = self._credentials.get(name)
        if credential is None:
            raise Failure("E3206", f"the tool's manifest does not name the credential; add `{PERMISSION}{name}` to it")
        return credential

    def __iter__(self) -> Iterator[str]:
        return iter(self._credentials)

    @property
    def closed(self) -> bool:
        """Whether its credentials are void: output of its call can no longer be scrubbed."""
        return self._closed

    def __repr__(self) -> str:
        return f"<lease of {', '.join(self._credentials) or 'nothing'}>"

    def values(self) -> list[str]:
        """Every text to be scrubbed from what leaves the call. Also available after expiry, but not once it is closed:
        an empty list must not be taken for "nothing to hide".
        """
        return [text for credential in self._credentials.values() for text in credential.texts()]

    async def rate_limited(self, name: str, ms: int) -> None:
        """Let the credential of this call rest: its service answered that the rate limit is reached."""
        await self._source.rest(name, self[name].slot, ms)

    def wipe(self) -> None:
        """Void and zero everything at once."""
        for credential in self._credentials.values():
            credential.wipe()
        if self._log_again is not None:
            self._log_again()
            self._log_again = None

    async def close(self) -> None:
        """Wipe, then revoke what was issued for this call alone. An issuer that fails does not fail the call."""
        self.wipe()
        issued = [] if self._closed else [one for one in self._credentials.values() if one.issued is not None]
        self._closed = True
        if issued:
            # A call that is cancelled at this moment must not leave a valid credential behind.
            await asyncio.shield(self._release(issued))

    async def _release(self, issued: list[Credential]) -> None:
        for credential in issued:
            try:
                await self._source.release(credential)
            except Failure as failure:
                _log.warning("the credential %s could not be revoked and ends by itself: %s", credential.name, failure)


# The embedded store


class StoredCredential(NamedTuple):
    """The public facts of a stored credential: everything but its value."""

    name: str
    slot: str
    created_ms: int
    expires_ms: int | None
    resting_until_ms: int


class Secrets:
    """The embedded store: one encrypted row per name and slot."""

    def __init__(self, journal: Store, box: Box, clock: Clock) -> None:
        self._journal = journal
        self._box = box
        self._clock = clock

    async def set(self, name: str, value: str, *, by: str, slot: str = "main", expires_ms: int | None = None) -> None:
        """Store a credential, in place of an existing one. `expires_ms` is a point in time."""
        check_name(name)
        if not _SLOT.fullmatch(slot):
            raise Failure("E3004", "a slot is named by up to 50 of the characters `a-z 0-9 _ -`")
        plain = _plain(value)

        def unit(transaction: Transaction) -> None:
            now_ms = transaction.now_ms
            if expires_ms is not None and expires_ms <= now_ms:
                raise Failure("E3004", f"the credential `{name}` would have expired before it is stored")
            sealed = self._box.seal(plain, purpose="secret", about=_place(name, slot, now_ms, expires_ms))
            table.put(
                transaction, name, slot, key_id=key_id_of(sealed), sealed=sealed, created_ms=now_ms,
                expires_ms=expires_ms,
            )  # fmt: skip
            _note(transaction, "secret.set", by, name=name, slot=slot, expires_ms=expires_ms)

        await self._journal.commit(unit)
        await self._journal.changes.look()

    async def remove(self, name: str, *, by: str, slot: str | None = None) -> int:
        """Remove a credential, or one slot of it; returns the number of slots removed. E3602 if there is none."""

        def unit(transaction: Transaction) -> int:
            gone = [slot_name for slot_name in table.slot_names(transaction, name) if slot is None or slot_name == slot]
            if not gone:
                which = f"`{name}`" if slot is None else f"`{name}` [{slot}]"
                words = "see which there are: interlock secrets list"
                raise Failure("E3602", f"there is no credential {which} to forget", resolution=words)
            for slot_name in gone:
                table.delete(transaction, name, slot_name)
                _note(transaction, "secret.removed", by, name=name, slot=slot_name)
            return len(gone)

        count = await self._journal.commit(unit)
        await self._journal.changes.look()
        return count

    async def names(self) -> list[StoredCredential]:
        """Every stored credential, without its value."""
        return [StoredCredential._make(entry) for entry in await self._journal.read(table.entries)]

    async def fetch(self, name: str, lifetime_s: float | None = None) -> Credential:
        """Return the first slot that neither rests nor has expired."""
        try:
            pool = await self._journal.read(lambda reader: table.slots(reader, name))
        except Failure as failure:
            raise Failure("E3601", f"the store of credentials cannot be read: {failure.message}") from None
        if not pool:
            raise Failure("E3602", f"there is no credential `{name}`; store it with `interlock secrets set {name}`")
        choice = [PoolSlot(one.slot, one.expires_ms, one.resting_until_ms) for one in pool]
        slot = first_ready(name, choice, self._clock.now_ms())
        _, sealed, created_ms, expires_ms, _ = next(one for one in pool if one.slot == slot)
        try:
            value = self._box.open(sealed, purpose="secret", about=_place(name, slot, created_ms, expires_ms))
        except Failure as failure:
            raise Failure(failure.code, f"the credential `{name}` [{slot}]: {failure.message}") from None
        return Credential(
            value, name=name, slot=slot, version=str(created_ms), expires_ms=expires_ms, clock=self._clock
        )

    async def rest(self, name: str, slot: str, ms: int) -> None:
        """Do not use a slot for some milliseconds, in every process."""

        def unit(transaction: Transaction) -> None:
            until_ms = transaction.now_ms + min(ms, LONGEST_REST_MS)
            table.rest(transaction, name, slot, until_ms)
            _note(transaction, "secret.resting", "interlock", name=name, slot=slot, until_ms=until_ms)

        await self._journal.commit(unit)

    async def release(self, credential: Credential) -> None:
        """Nothing to revoke: stored credentials outlive the call."""

    async def close(self) -> None:
        """Nothing is held open: the journal belongs to another owner."""

    async def rotate_key(self, *, by: str, others: Callable[[], int] | None = None) -> list[StoredCredential]:
        """Seal everything under a new sealing key and drop the old one. Returns what could not be opened and stays
        unchanged.

        If it is killed at any moment, everything is readable as before; rotating again finishes the work. `others`
        tells how many processes use the store with a ring of keys of their own. They have to end first (E3109): they
        would go on with the old key.
        """
        await _refuse_others(others)
        current = await DISK.run(self._box.rotate)
        if others is not None:
            await self._journal.commit(lambda transaction: facts.put(transaction, SEALED_BY, current))
            await _refuse_others(others)  # one that comes from now on is refused
        left = await self.reseal_all(by=by)
        for place in LASTING:
            after: str | bytes | None = place.before
            while after is not None:
                after = await self._journal.commit(seal_again(self._box, place, after))

        def drop_old_keys(transaction: Transaction) -> None:
            # The key file is no part of the transaction. During the transaction no key can come into use, and dropping
            # unused keys is right however often it is done and whatever becomes of the transaction.
            self._box.retire(keys_in_use(transaction))

        await self._journal.commit(drop_old_keys)
        return left

    async def reseal_all(self, *, by: str) -> list[StoredCredential]:
        """Seal everything that is under an older sealing key under the current one.

        Returns what could not be opened.
        """

        # Looked up here: others may add a key at any moment, and a unit must do the same whenever it runs.
        current = self._box.current

        def unit(transaction: Transaction) -> list[StoredCredential]:
            left: list[StoredCredential] = []
            sealed_anew: list[tuple[str, str, bytes]] = []
            for name, slot, sealed, created_ms, expires_ms, resting in table.sealed_by_others(transaction, current):
                place = _place(name, slot, created_ms, expires_ms)
                try:
                    value = self._box.open(sealed, purpose="secret", about=place)
                except Failure:
                    left.append(StoredCredential(name, slot, created_ms, expires_ms, resting))
                    continue
                sealed_anew.append((name, slot, self._box.seal(value, purpose="secret", about=place)))
            for name, slot, anew in sealed_anew:
                table.reseal(transaction, name, slot, key_id=key_id_of(anew), sealed=anew)
            _note(transaction, "secret.key_rotated", by, key_id=current, sealed=len(sealed_anew), left=len(left))
            return left

        return await self._journal.commit(unit)


class PoolSlot(NamedTuple):
    """One slot of a pool, with what matters for the choice."""

    slot: str
    expires_ms: int | None
    resting_until_ms: int


def first_ready(name: str, pool: Sequence[PoolSlot], now_ms: int) -> str:
    """Return the first usable slot; E3603 if all have expired, E3504 if the others all rest."""
    live = [one for one in pool if one.expires_ms is None or one.expires_ms > now_ms]
    if not live:
        raise Failure("E3603", f"the credential `{name}` has expired; store a new one")
    ready = [one.slot for one in live if one.resting_until_ms <= now_ms]
    if ready:
        return ready[0]
    soonest = min(one.resting_until_ms for one in live)
    raise Failure("E3504", f"every credential `{name}` is rate-limited", retry_after_ms=soonest - now_ms)


def check_name(name: str) -> None:
    """Refuse (E3004) an invalid name of a credential."""
    if not _NAME.fullmatch(name):
        raise Failure(
            "E3004", "a credential is named like `github/token`: `a-z 0-9 _ . -` in parts that do not begin with a dot"
        )


def _plain(value: str) -> bytes:
    # The message never quotes the value.
    try:
        plain = value.encode()
    except UnicodeEncodeError:
        plain = b""
    if not plain or len(plain) > MAX_VALUE:
        raise Failure("E3004", f"a credential is text of 1 to {MAX_VALUE} bytes")
    return plain


def _place(name: str, slot: str, created_ms: int, expires_ms: int | None) -> str:
    """The place that a sealed value is bound to: in another row or with a later expiry it does not open."""
    return f"{name} {slot} {created_ms} {expires_ms}"


def _note(transaction: Transaction, act: str, by: str, **facts: Any) -> None:
    ref = f"secret:{facts['name']}" if "name" in facts else "secret"
    transaction.append("authority", ref, records.plain("authority", ref, transaction.now_ms, act=act, by=by, **facts))


async def _refuse_others(others: Callable[[], int] | None) -> None:
    """Refuse (E3109) to change the sealing key while processes with another ring of keys use the store."""
    count = 0 if others is None else await DISK.run(others)
    if count:
        advice = (
            "stop the processes on the other machines, change the key, copy keys/secrets.key there, start them again"
        )
        words = f"{count} process{'' if count == 1 else 'es'} of other data directories use this store with the old key"
        raise Failure("E3109", words, resolution=advice)

"""Credentials: kept encrypted, lent to one call at a time, void and wiped when it ends.

Theory of operation. A tool's manifest names the credentials it needs (`credential:github/token`). When a call of it
starts, `open_lease` fetches just these from a source, and the call holds them in a `Lease` no longer than it may run.
What is rotated meanwhile reaches the next call, never a running one. `close` zeroes the values and, where they
were issued for this call alone, has the issuer revoke them. Whoever uses one later is told E3603.

Two sources exist: the embedded store below (one encrypted row per credential) and Vault (`vault`). Both answer in the
same four ways: E3601 unreachable, E3602 absent, E3603 expired, E3604 cannot be decrypted. Several slots under one name
form a pool: the first that is not resting is used, and one that met a rate limit rests for a while.

A value is shown by `reveal` and by nothing else: not by repr, format, JSON, copying or pickling. The bytes Interlock
holds are zeroed at the end; text that `reveal` handed out belongs to whoever asked for it, so results and messages
go through core/scrub before they leave the call.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import orjson

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.threads import DISK
from interlock.store import records
from interlock.store import secrets as table
from interlock.store.port import Store, Transaction
from interlock.store.sealing import LASTING, Box, key_id_of, keys_in_use, seal_again
from interlock.telemetry.logs import withhold

_log = logging.getLogger("interlock.secrets")

PERMISSION = "credential:"
MAX_VALUE = 65_536
LONGEST_REST_MS = 86_400_000

# No part may begin with a dot: a name is also a path at a vault.
_NAME = re.compile(r"(?=.{1,200}\Z)[a-z0-9_-][a-z0-9_.-]*(/[a-z0-9_-][a-z0-9_.-]*)*", re.ASCII)
_SLOT = re.compile(r"[a-z0-9_-]{1,50}", re.ASCII)


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
        """`issued` is the issuer's own reference where the credential was made for one call."""
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
        """The value; E3603 once its call has ended or its time is over."""
        if self._clock.monotonic() >= self._ends:
            raise Failure("E3603", f"the credential `{self.name}` was lent to a call whose time is over")
        if self.expires_ms is not None and self._clock.now_ms() >= self.expires_ms:
            raise Failure("E3603", f"the credential `{self.name}` has expired; store a new one")
        return self._text()

    def texts(self) -> list[str]:
        """What must not be seen in any output: the value, and each field where an issuer gave several."""
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
        # INVARIANT: the mark comes first, so that a thread that reads meanwhile never takes zeros for the value.
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
    """Where credentials come from."""

    async def fetch(self, name: str, lifetime_s: float | None = None) -> Credential:
        """The credential that is in force now; E3601 unreachable, E3602 absent, E3603 expired, E3604 undecryptable.

        `lifetime_s` says how long it is needed. A source that issues credentials has it end then.
        """
        ...

    async def rest(self, name: str, slot: str, ms: int) -> None:
        """Leave one of a pool alone for a while: its service limits its rate."""
        ...

    async def release(self, credential: Credential) -> None:
        """Have a credential that was issued for one call revoked."""
        ...

    async def close(self) -> None: ...


# What a call gets


async def open_lease(source: SecretSource, names: Sequence[str], *, lifetime_s: float, clock: Clock) -> Lease:
    """Fetch credentials for one call that may take so long. Whatever keeps one from being had, none is kept."""
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
        self._log_again = self._log_again or withhold(self.values)

    def __getitem__(self, name: str) -> Credential:
        credential = self._credentials.get(name)
        if credential is None:
            raise Failure("E3206", f"the tool's manifest does not name the credential; add `{PERMISSION}{name}` to it")
        return credential

    def __iter__(self) -> Iterator[str]:
        return iter(self._credentials)

    @property
    def closed(self) -> bool:
        """Whether its credentials are void: what its call says from now on cannot be scrubbed any more."""
        return self._closed

    def __repr__(self) -> str:
        return f"<lease of {', '.join(self._credentials) or 'nothing'}>"

    def values(self) -> list[str]:
        """Every text to be scrubbed from what leaves the call. Also after its time is over, but not once it is closed:
        nobody may take an empty list for "nothing to hide"."""
        return [text for credential in self._credentials.values() for text in credential.texts()]

    async def rate_limited(self, name: str, ms: int) -> None:
        """Let the credential this call was lent rest: its service answered that the rate limit is reached."""
        await self._source.rest(name, self[name].slot, ms)

    def wipe(self) -> None:
        """Void and zero everything at once."""
        for credential in self._credentials.values():
            credential.wipe()
        if self._log_again is not None:
            self._log_again()
            self._log_again = None

    async def close(self) -> None:
        """Wipe, then have revoked what was issued for this call alone. An issuer that fails does not fail the call."""
        self.wipe()
        issued = [] if self._closed else [one for one in self._credentials.values() if one.issued is not None]
        self._closed = True
        if issued:
            # A call that is cancelled at this very moment must not leave a credential valid behind it.
            await asyncio.shield(self._release(issued))

    async def _release(self, issued: list[Credential]) -> None:
        for credential in issued:
            try:
                await self._source.release(credential)
            except Failure as failure:
                _log.warning("the credential %s could not be revoked and ends by itself: %s", credential.name, failure)


# The embedded store


class Kept(NamedTuple):
    """What may be known of a stored credential: everything but its value."""

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
        """Store a credential, in the place of one that is there. `expires_ms` is a point in time."""
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

    async def remove(self, name: str, *, by: str, slot: str | None = None) -> int:
        """Forget a credential, or one slot of it; returns how many slots went. E3602 when there is none."""

        def unit(transaction: Transaction) -> int:
            gone = [found for found in table.slot_names(transaction, name) if slot is None or found == slot]
            if not gone:
                which = f"`{name}`" if slot is None else f"`{name}` [{slot}]"
                words = "see which there are: interlock secrets list"
                raise Failure("E3602", f"there is no credential {which} to forget", resolution=words)
            for found in gone:
                table.delete(transaction, name, found)
                _note(transaction, "secret.removed", by, name=name, slot=found)
            return len(gone)

        return await self._journal.commit(unit)

    def names(self) -> list[Kept]:
        """Every stored credential, without its value."""
        return [Kept._make(entry) for entry in table.entries(self._journal.reader)]

    async def fetch(self, name: str, lifetime_s: float | None = None) -> Credential:
        """The first slot that neither rests nor has expired."""
        try:
            pool = table.slots(self._journal.reader, name)
        except Failure as failure:
            raise Failure("E3601", f"the store of credentials cannot be read: {failure.message}") from None
        if not pool:
            raise Failure("E3602", f"there is no credential `{name}`; store it with `interlock secrets set {name}`")
        choice = [Slot(one.slot, one.expires_ms, one.resting_until_ms) for one in pool]
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
        """Pass a slot over until so many milliseconds have gone by, in every process."""

        def unit(transaction: Transaction) -> None:
            until_ms = transaction.now_ms + min(ms, LONGEST_REST_MS)
            table.rest(transaction, name, slot, until_ms)
            _note(transaction, "secret.resting", "interlock", name=name, slot=slot, until_ms=until_ms)

        await self._journal.commit(unit)

    async def release(self, credential: Credential) -> None:
        """Nothing to revoke: what is stored here outlives the call."""

    async def close(self) -> None:
        """Nothing is held open: the journal is somebody else's."""

    async def rotate_key(self, *, by: str) -> list[Kept]:
        """Seal everything under a new key and drop the old one. Returns what could not be opened and stays as it was.

        Killed at any moment, everything is readable as before; rotating again finishes the work.
        """
        await DISK.run(self._box.rotate)
        left = await self.reseal_all(by=by)
        for place in LASTING:
            after: str | bytes | None = place.before
            while after is not None:
                after = await self._journal.commit(seal_again(self._box, place, after))

        def drop_old_keys(transaction: Transaction) -> None:
            # The key file is no part of the transaction. Within it nothing can come into use, and to drop the keys
            # that are not in use is right however often it is done and whatever becomes of the transaction.
            self._box.retire(keys_in_use(transaction))

        await self._journal.commit(drop_old_keys)
        return left

    async def reseal_all(self, *, by: str) -> list[Kept]:
        """Seal everything that is under an older key under the current one. Returns what could not be opened."""

        # Looked up here: others may add a key at any moment, and a unit does the same whenever it runs.
        current = self._box.current

        def unit(transaction: Transaction) -> list[Kept]:
            left: list[Kept] = []
            sealed_anew: list[tuple[str, str, bytes]] = []
            for name, slot, sealed, created_ms, expires_ms, resting in table.sealed_by_others(transaction, current):
                place = _place(name, slot, created_ms, expires_ms)
                try:
                    value = self._box.open(sealed, purpose="secret", about=place)
                except Failure:
                    left.append(Kept(name, slot, created_ms, expires_ms, resting))
                    continue
                sealed_anew.append((name, slot, self._box.seal(value, purpose="secret", about=place)))
            for name, slot, anew in sealed_anew:
                table.reseal(transaction, name, slot, key_id=key_id_of(anew), sealed=anew)
            _note(transaction, "secret.key_rotated", by, key_id=current, sealed=len(sealed_anew), left=len(left))
            return left

        return await self._journal.commit(unit)


class Slot(NamedTuple):
    """One of a pool, as far as choosing goes."""

    slot: str
    expires_ms: int | None
    resting_until_ms: int


def first_ready(name: str, pool: Sequence[Slot], now_ms: int) -> str:
    """The first slot that can be used; E3603 when all have expired, E3504 when the others all rest."""
    live = [one for one in pool if one.expires_ms is None or one.expires_ms > now_ms]
    if not live:
        raise Failure("E3603", f"the credential `{name}` has expired; store a new one")
    ready = [one.slot for one in live if one.resting_until_ms <= now_ms]
    if ready:
        return ready[0]
    soonest = min(one.resting_until_ms for one in live)
    raise Failure("E3504", f"every credential `{name}` is rate-limited", retry_after_ms=soonest - now_ms)


def check_name(name: str) -> None:
    """Refuse (E3004) what cannot be a credential's name."""
    if not _NAME.fullmatch(name):
        raise Failure(
            "E3004", "a credential is named like `github/token`: `a-z 0-9 _ . -` in parts that do not begin with a dot"
        )


def _plain(value: str) -> bytes:
    # The words never quote the value.
    try:
        plain = value.encode()
    except UnicodeEncodeError:
        plain = b""
    if not plain or len(plain) > MAX_VALUE:
        raise Failure("E3004", f"a credential is text of 1 to {MAX_VALUE} bytes")
    return plain


def _place(name: str, slot: str, created_ms: int, expires_ms: int | None) -> str:
    """What a sealed value is bound to: moved to another row or given a longer life, it does not open."""
    return f"{name} {slot} {created_ms} {expires_ms}"


def _note(transaction: Transaction, act: str, by: str, **facts: Any) -> None:
    ref = f"secret:{facts['name']}" if "name" in facts else "secret"
    transaction.append("authority", ref, records.plain("authority", ref, transaction.now_ms, act=act, by=by, **facts))

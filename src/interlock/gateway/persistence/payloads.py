"""Payloads: results and files of calls that are too large, or too private, for a record."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from interlock.core.errors import Failure
from interlock.core.threads import WALKS
from interlock.gateway.persistence.pieces import Pieces, Sealed
from interlock.store import idempotency as idempotency_rows
from interlock.store import payloads
from interlock.store.payloads import Payload

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.call.phases import Call
    from interlock.settings import Settings
    from interlock.store.port import Reader, Store, Transaction, Unit
    from interlock.store.sealing import Box

_DAY_MS = 86_400_000
# Payloads of this many bytes or more are encrypted and decrypted in a thread.
_LARGE = 256_000
# The settings of the quotas, in their order.
_QUOTAS = ("payload_bytes_per_caller", "payload_bytes_per_tenant", "payload_bytes")


def owner_of(caller: Caller) -> str:
    """Return the owner of a payload."""
    return f"{caller.tenant}/{caller.id}"


class PayloadStore:
    """Stores and reads the payloads of calls, within the quotas."""

    def __init__(self, journal: Store, settings: Settings, box: Box, pieces: Pieces) -> None:
        self._journal = journal
        self._settings = settings
        self._box = box
        self._pieces = pieces

    async def read(self, ref: str) -> bytes | None:
        """Read the payload with this reference. None where it has expired or was discarded.

        A payload in clear text is as long as its row says. Pieces are read one per turn of the event loop, and a large
        payload is decrypted in a thread.
        """
        found = await self._journal.read(lambda reader: payloads.content(reader, ref))
        if found is None or found.body is None or len(found.body) == found.size:
            return None if found is None else found.body
        parts = [found.body]
        for number in range(1, found.pieces + 1):
            await asyncio.sleep(0)
            piece = await self._journal.read(partial(payloads.piece, ref=ref, number=number))
            if piece is None:
                if await self.has(ref):
                    raise Failure(
                        "E3604", f"a part of the payload `{ref}` is missing; restore the data directory from a backup"
                    )
                return None  # expired or discarded meanwhile
            parts.append(piece)
        opening = partial(self._opened, ref, parts)
        return opening() if found.size < _LARGE else await WALKS.run(opening)

    def _opened(self, ref: str, parts: list[bytes]) -> bytes:
        sealed = parts[0] if len(parts) == 1 else b"".join(parts)
        return self._box.open(sealed, purpose="payload", about=ref)

    async def has(self, ref: str) -> bool:
        """Whether anything is stored under a reference now."""
        return await self._journal.read(lambda reader: payloads.has_body(reader, ref))

    def quotas(self, caller: Caller) -> tuple[tuple[str, int], ...]:
        """Return how many bytes may be stored for the caller, the tenant and the data directory."""
        settings = self._settings
        return (
            (f"caller:{caller.tenant}/{caller.id}", settings.payload_bytes_per_caller),
            (f"tenant:{caller.tenant}", settings.payload_bytes_per_tenant),
            ("home", settings.payload_bytes),
        )

    def check_room(self, reader: Reader, caller: Caller, size: int) -> None:
        """Refuse (E3407) what would not fit into the quotas of the caller, the tenant and the data directory.

        It is checked in the transaction that stores, so concurrent calls cannot exceed a quota together.
        """
        settings, quotas = self._settings, self.quotas(caller)
        used = payloads.bytes_used(reader, [scope for scope, _ in quotas])
        for (scope, most), name in zip(quotas, _QUOTAS, strict=True):
            if used.get(scope, 0) + size > most:
                raise Failure(
                    "E3407",
                    f"large results of {used.get(scope, 0):,} bytes are kept, and `{name}` allows {most:,}",
                    details={"quota": name, "used": used.get(scope, 0), "most": most, "wanted": size},
                    resolution=f"ask for less, page through it, or wait until results have expired"
                    f" ({settings.payload_days} days); an operator can raise {name}",
                )

    def why_withheld(self, reader: Reader, caller: Caller, bodies: Mapping[str, bytes]) -> str:
        """Return why what a write leaves behind is not stored; empty if it fits into the quotas.

        The write has had its effect: its outcome is recorded in any case, with references that say why they refer to
        nothing.
        """
        try:
            self.check_room(reader, caller, sum(map(len, bodies.values())))
        except Failure as failure:
            return f"withheld: {failure.message}"
        return ""

    async def write_ahead(self, caller: Caller, bodies: Mapping[str, bytes], *, strict: bool) -> Mapping[str, Sealed]:
        """Encrypt payloads in a thread and write the pieces of large ones. Does nothing if all are small.

        Nothing is written that has no room: `strict` raises that (E3407), otherwise the unit that stores the payloads
        decides. A failure of the store is left to that unit too, which then writes them whole.
        """
        size = sum(map(len, bodies.values()))
        if size < _LARGE:
            return {}
        try:
            await self._journal.read(partial(self.check_room, caller=caller, size=size))
        except Failure:
            if strict:
                raise
            return {}
        sealed = await WALKS.run(lambda: {ref: self._sealed(ref, body) for ref, body in bodies.items()})
        return {ref: Sealed(body, await self._pieces.write(ref, body)) for ref, body in sealed.items()}

    def abandon(self, bodies: Mapping[str, bytes]) -> None:
        """Have the pieces of payloads removed, unless a row refers to them: the unit for that has failed."""
        self._pieces.abandon(*(ref for ref, body in bodies.items() if len(body) >= _LARGE))

    def _sealed(self, ref: str, body: bytes) -> bytes:
        return self._box.seal(body, purpose="payload", about=ref)

    def store(
        self,
        transaction: Transaction,
        call: Call,
        bodies: Mapping[str, bytes],
        withheld: str,
        ahead: Mapping[str, Sealed],
        for_the_key: str | None,
    ) -> None:
        """Store the payloads of a call; or, where they are withheld, the reason.

        `ahead` contains those that were encrypted already, and maybe written in pieces. A payload's size is that of its
        content. Nobody is told of the payload `for_the_key`: it is stored for replays only, until the window of the
        call's idempotency key has passed.
        """
        assert call.request.caller is not None
        owner, until_ms = owner_of(call.request.caller), transaction.now_ms + self._settings.payload_days * _DAY_MS
        for ref, body in bodies.items():
            stored = Sealed(None, 0)
            if not withheld:
                stored = self._pieces.take(transaction, ref, ahead.get(ref)) or Sealed(self._sealed(ref, body), 0)
            if not stored.pieces and ref in ahead and ahead[ref].pieces:
                payloads.release_pieces(transaction, ref)
            its_end_ms = _end_of_key(transaction, call) if ref == for_the_key else until_ms
            _insert_until(transaction, ref, call.id, owner, stored, len(body), its_end_ms, withheld)

    async def why_gone(self, ref: str) -> str:
        """Return the reason why nothing is stored under a reference."""
        reason = await self._journal.read(lambda reader: payloads.reason(reader, ref)) or ""
        return reason if reason.startswith(("withheld", "discarded")) else "the payload is no longer kept"

    def discard(self, call: str) -> Unit[None]:
        """Return a unit that removes the result and the files of a call. Its rows stay and say so; its undo stays."""
        return lambda transaction: payloads.discard(transaction, call)


def _end_of_key(transaction: Transaction, call: Call) -> int:
    """Return the end of the window of a call's idempotency key."""
    assert call.more.scope is not None
    row = idempotency_rows.state(transaction, call.more.scope)
    assert row is not None
    return row[1]


def insert(tx: Transaction, ref: str, call: str, owner: str, sealed: Sealed, size: int, days: int) -> None:
    _insert_until(tx, ref, call, owner, sealed, size, tx.now_ms + days * _DAY_MS)


def _insert_until(
    tx: Transaction, ref: str, call: str, owner: str, sealed: Sealed, size: int, until_ms: int, reason: str = ""
) -> None:
    payloads.insert(tx, Payload(ref, call, owner, sealed.body, size, tx.now_ms, until_ms, reason, sealed.pieces))

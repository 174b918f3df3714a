"""Pieces of large payloads, written before the unit that closes a call, which then takes them over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.store import payloads
from interlock.store.port import Reader, Store, Transaction
from interlock.store.sealing import Box

_log = logging.getLogger("interlock.gateway")


class Sealed(NamedTuple):
    """An encrypted payload, and how many pieces of it are written. None: it is not stored."""

    body: bytes | None
    pieces: int


class Pieces:
    """Writes the pieces of encrypted payloads, and removes those that no row refers to."""

    def __init__(self, journal: Store, box: Box, writer: str) -> None:
        self._journal = journal
        self._box = box
        # The id of this process as the writer of pieces, and payloads whose pieces no row refers to.
        self._writer = writer
        self._abandoned: set[str] = set()

    async def write(self, ref: str, sealed: bytes) -> int:
        """Write the pieces of a payload. Returns how many there are; 0 where it is small or they cannot be written."""
        pieces = payloads.pieces(sealed)
        try:
            for number, piece in enumerate(pieces, 1):
                unit = partial(payloads.add_piece, ref=ref, number=number, piece=piece, writer=self._writer)
                await self._journal.commit_large(unit)
        except Failure as failure:
            _log.warning("the pieces of `%s` could not be written: %s", ref, failure.message)
            self._abandoned.add(ref)
            return 0
        except BaseException:
            self._abandoned.add(ref)
            raise
        return len(pieces)

    def take(self, transaction: Transaction, ref: str, ahead: Sealed | None) -> Sealed | None:
        """Return a payload that was encrypted ahead, as its row contains it; None if it must be encrypted again."""
        # INVARIANT: nothing is stored under a key that was retired after it was sealed.
        if ahead is None or ahead.body is None or not self._box.holds(ahead.body):
            return None
        if ahead.pieces and payloads.take_pieces(transaction, ref, self._writer):
            return Sealed(payloads.head(ahead.body), ahead.pieces)
        return Sealed(ahead.body, 0)

    def abandon(self, *refs: str) -> None:
        """Have the pieces of payloads removed, unless a row refers to them."""
        self._abandoned.update(refs)

    async def release(self, alive: Callable[[str], bool]) -> None:
        """Mark pieces for removal that no row will refer to: abandoned ones, and those of dead processes."""
        abandoned = frozenset(self._abandoned)

        def useless(reader: Reader) -> list[str]:
            return [
                ref
                for ref, writer in payloads.unfinished(reader)
                if not alive(writer) or (writer == self._writer and ref in abandoned)
            ]

        def unit(transaction: Transaction) -> None:
            # Checked inside the write: a closing that was merely slow may have taken them over.
            for ref in useless(transaction):
                payloads.release_pieces(transaction, ref)

        if await self._journal.read(useless):
            await self._journal.commit(unit)
        self._abandoned -= abandoned

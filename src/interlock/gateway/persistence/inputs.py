"""Inputs of calls that are stored for people who look into a call later, where the settings say so."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from interlock.core.record import NamedTuple
from interlock.core.threads import WALKS
from interlock.data.bounds import LARGE_INPUT
from interlock.data.canonical import decode, encode
from interlock.gateway import inputs
from interlock.gateway.persistence.payloads import PayloadStore, insert, owner_of
from interlock.gateway.persistence.pieces import Pieces, Sealed
from interlock.store import payloads

if TYPE_CHECKING:
    from interlock.call.phases import Call
    from interlock.data.schema import Json
    from interlock.settings import Settings
    from interlock.store.port import Reader, Store, Transaction
    from interlock.store.sealing import Box


class SentInputs(NamedTuple):
    """The inputs of a call as they are to be stored, encrypted already if they are large; or why they are not."""

    ref: str
    body: bytes
    sealed: Sealed | None
    withheld: str = ""


class InputStore:
    """Stores and reads the inputs of calls."""

    def __init__(self, journal: Store, settings: Settings, box: Box, payloads: PayloadStore, pieces: Pieces) -> None:
        self._journal = journal
        self._settings = settings
        self._box = box
        self._payloads = payloads
        self._pieces = pieces
        # Otherwise only inputs that something has changed are stored.
        self.keeps_all = settings.keep_inputs == "always"

    def wanted(self, call: Call) -> bool:
        """Whether the inputs of a call are to be stored, by the setting and by what changed them."""
        mode = self._settings.keep_inputs
        return mode == "always" or (mode == "changed" and inputs.worth_keeping(call))

    async def prepare(self, call: Call, *, waits: bool = False) -> SentInputs | None:
        """Return the inputs of a call, ready to be stored; None if they are not to be stored.

        Large ones are encoded and encrypted in a thread. A call that `waits` for an approval ends in a unit that knows
        only its ticket, so its inputs are stored with the ticket. If it runs, its closing replaces them: a reviewer may
        have changed them.
        """
        if call.request.caller is None or not call.model_input or not self.wanted(call):
            return None
        ref, size = f"inputs:{call.id}", len(call.model_input)
        if waits or call.more.approval is not None or call.known:
            # A call that waited can end more than once under its id: one that is refused for a while is tried again.
            ref = f"{ref}.{os.urandom(8).hex()}"
        if size > inputs.LARGEST_STORED and self._settings.keep_inputs != "always":
            return SentInputs(ref, b"", None, inputs.TOO_LARGE)
        if size <= LARGE_INPUT:
            return SentInputs(ref, encode(inputs.to_keep(call)), None)
        body, sealed = await WALKS.run(self._sealed, call, ref)
        return SentInputs(ref, body, Sealed(sealed, await self._pieces.write(ref, sealed)))

    def _sealed(self, call: Call, ref: str) -> tuple[bytes, bytes]:
        body = encode(inputs.to_keep(call))
        return body, self._box.seal(body, purpose="inputs", about=ref)

    def store(self, transaction: Transaction, call: Call, sent: SentInputs | None) -> Json:
        """Store the inputs of a call, encrypted. Returns what the closing record says if they are not stored.

        They are left out if a quota has no room for them: the call itself is more important.
        """
        caller = call.request.caller
        if sent is None or caller is None:
            return {}
        ref = sent.ref
        if "." in ref:
            payloads.replace_inputs(transaction, call.id)
        withheld = self.withheld(transaction, call, sent)
        stored = None if withheld else self._pieces.take(transaction, ref, sent.sealed)
        if sent.sealed is not None and sent.sealed.pieces and (stored is None or not stored.pieces):
            payloads.release_pieces(transaction, ref)
        if withheld:
            return withheld
        stored = stored or Sealed(self._box.seal(sent.body, purpose="inputs", about=ref), 0)
        insert(transaction, ref, call.id, owner_of(caller), stored, len(sent.body), self._settings.payload_days)
        return {}

    def withheld(self, reader: Reader, call: Call, sent: SentInputs | None) -> Json:
        """Return what a record says about inputs that should be stored and cannot be; empty if they can."""
        if sent is None or call.request.caller is None:
            return {}
        withheld = sent.withheld or self._payloads.why_withheld(reader, call.request.caller, {sent.ref: sent.body})
        return {"inputsWithheld": withheld} if withheld else {}

    def abandon(self, sent: SentInputs | None) -> None:
        """Have pieces that no row refers to removed, after the unit that stores the inputs has run or failed."""
        if sent is not None and sent.sealed is not None and sent.sealed.pieces:
            self._pieces.abandon(sent.ref)

    async def find(self, call: str) -> Callable[[], Json] | None:
        """Return a function that decrypts the stored inputs of a call, on any thread; None if there are none."""

        def work(reader: Reader) -> tuple[str, bytes | None] | None:
            ref = payloads.inputs_of(reader, call)
            return None if ref is None else (ref, payloads.whole(reader, ref))

        ref, body = await self._journal.read(work) or ("", None)
        return None if body is None else lambda: decode(self._box.open(body, purpose="inputs", about=ref))

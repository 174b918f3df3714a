"""Stores the data that undoing a call needs, before its success is reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.core.errors import Failure
from interlock.data.canonical import decode, encode
from interlock.gateway.persistence.payloads import insert, owner_of
from interlock.gateway.persistence.pieces import Sealed
from interlock.store import payloads

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.call.phases import Ran
    from interlock.data.schema import Json
    from interlock.gateway.redaction import CallRedaction
    from interlock.settings import Settings
    from interlock.store.port import Store, Transaction
    from interlock.store.sealing import Box


class UndoStore:
    """Stores and reads what undoing calls needs."""

    def __init__(self, journal: Store, redaction: CallRedaction, settings: Settings, box: Box) -> None:
        self._journal = journal
        self._redaction = redaction
        self._settings = settings
        self._box = box

    @staticmethod
    def compensation(ran: Ran) -> Json | None:
        """Return the call that would undo this one, stored before success is reported; None if there is none.

        A call that is not verified has one if its tool stated the arguments.
        """
        tool, contract, more = ran.tool, ran.tool.contract, ran.more
        if more.source != "compute" or ran.request.operation != "invoke" or not contract.manifest.compensable:
            return None
        arguments = more.compensation
        if arguments is None and "compensate" in tool.bound.handlers:
            arguments = tool.bound.undo_arguments(ran.input, ran.value)
        if arguments is None:
            return None
        session = ran.request.session
        return {"tool": contract.address, "version": contract.version, "session": session, "arguments": arguments}

    async def read(self, call: str, caller: Caller) -> Json:
        """Return what undoing a call needs, as stored when the call succeeded; only for the caller that made it."""
        ref = f"undo:{call}"
        row = await self._journal.read(lambda reader: payloads.owned(reader, ref))
        if row is None or row.body is None or row.owner != owner_of(caller):
            advice = "check the id; only the caller that made a call may undo it"
            raise Failure("E3702", f"nothing is stored that could undo call {call}", resolution=advice)
        return decode(self._box.open(row.body, purpose="undo", about=ref))

    def store(self, transaction: Transaction, call: str, caller: Caller, undo: Json, hidden: list[str]) -> None:
        """Store what undoing a call needs. `hidden` are the private values that the undo must not show either."""
        ref = f"undo:{call}"
        sealed = self._box.seal(encode({**undo, "hidden": hidden}), purpose="undo", about=ref, within=transaction)
        insert(transaction, ref, call, owner_of(caller), Sealed(sealed, 0), len(sealed), self._settings.undo_days)

    async def store_now(self, ran: Ran) -> None:
        """Store what undoing a call needs although the call did not succeed, so that it can be undone now or later."""
        undo, caller = self.compensation(ran), ran.request.caller
        if undo is None:
            return
        assert caller is not None
        hidden = self._redaction.private_values(ran)
        await self._journal.commit(lambda transaction: self.store(transaction, ran.id, caller, undo, hidden))

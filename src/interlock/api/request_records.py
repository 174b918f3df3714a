"""Requests of selections and searches in the store, from which the router of a tenant learns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from interlock.core.clock import new_id
from interlock.data.bounds import check_unicode
from interlock.gateway.persistence.payloads import insert, owner_of
from interlock.gateway.persistence.pieces import Sealed
from interlock.selection.stages import MOST_REMAINING, MOST_REQUEST
from interlock.store import records

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.call.context import Caller
    from interlock.store.port import Transaction

# The text of a stored request, and what it is sealed for.
REQUEST: Final = "request:"
PURPOSE: Final = "request"


async def note_search(parts: Parts, request: str, tools: Sequence[str], caller: Caller) -> None:
    """Put a search on record with the first tools that it found, and store its request encrypted."""
    check_unicode("a search", request)
    search = new_id(parts.clock.now_ms(), parts.clock.random_bytes(10))
    candidates = list(tools[:MOST_REMAINING])

    def unit(transaction: Transaction) -> None:
        who = {"callerId": caller.id, "agentId": caller.agent, "tenant": caller.tenant}
        body = records.plain("search", search, transaction.now_ms, **who, candidates=candidates)
        transaction.append("search", search, body)
        seal_request(parts, transaction, search, request[:MOST_REQUEST], caller)

    await parts.journal.commit(unit)


def seal_request(parts: Parts, transaction: Transaction, made: str, request: str, caller: Caller) -> None:
    """Store the request of a selection or search encrypted."""
    ref, text = f"{REQUEST}{made}", request.encode()
    sealed = parts.box.seal(text, purpose=PURPOSE, about=ref, within=transaction)
    # A size of 0: requests are short, and do not use up the quota for the results of their caller.
    insert(transaction, ref, made, owner_of(caller), Sealed(sealed, 0), 0, parts.settings.payload_days)

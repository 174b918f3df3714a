"""Selections in the store: the record of each, its request, and what the journal says about the tools of a tenant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from interlock.gateway.persistence.payloads import insert, owner_of
from interlock.gateway.persistence.pieces import Sealed
from interlock.selection.stages import MOST_KEPT
from interlock.store import calls, records

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.api.selection import Selection
    from interlock.call.context import Caller
    from interlock.store.port import Reader, Transaction

# The text of a stored request, and what it is sealed for.
REQUEST: Final = "request:"
PURPOSE: Final = "request"
# Records in which it is looked up how often calls of a tool succeed and what they cost.
_LOOKED_THROUGH: Final = 5000


def store(parts: Parts, transaction: Transaction, made: Selection, caller: Caller, session: str) -> None:
    """Put a selection on record, and store its request encrypted unless that is switched off."""
    transaction.append("selection", made.id, _record(made, caller, session, transaction.now_ms))
    if parts.settings.selection_requests == "sealed":
        ref, text = f"{REQUEST}{made.id}", made.request.encode()
        sealed = parts.box.seal(text, purpose=PURPOSE, about=ref, within=transaction)
        # A size of 0: requests are short, and do not use up the quota for the results of their caller.
        insert(transaction, ref, made.id, owner_of(caller), Sealed(sealed, 0), 0, parts.settings.payload_days)


def _record(made: Selection, caller: Caller, session: str, now_ms: int) -> bytes:
    """The record of a selection. It holds names of tools, and nothing of the request."""
    intent, verdict = made.intent, made.verdict
    return records.plain(
        "selection",
        made.id,
        now_ms,
        callerId=caller.id,
        agentId=caller.agent,
        tenant=caller.tenant,
        session=session,
        intent=None if intent is None else {"kind": intent.kind, "confidence": round(intent.confidence, 4)},
        stages=[{"stage": one.name, "before": one.before, "after": len(one.tools), **one.facts} for one in made.stages],
        candidates=[one.tool for one in made.candidates],
        left={one.name: list(one.tools[:MOST_KEPT]) for one in made.stages if one.name not in ("intent", "hierarchy")},
        chosen=made.chosen,
        refused=made.refused is not None,
        gate=None if verdict is None else {"answer": verdict.answer, "check": verdict.check, "reason": verdict.reason},
        tokens=made.tokens,
    )


def sums(tenant: str, reader: Reader) -> dict[str, calls.Sum]:
    """Calls, failures and cost of the tools of a tenant, by name, in the last records."""
    first, last = calls.ends(reader)
    wanted = calls.Filter(tenant=tenant)
    least = max(first, last - _LOOKED_THROUGH + 1)
    found = calls.sums(reader, least, last, wanted, of="toolId", order="calls", most=_LOOKED_THROUGH)
    return {one.name: one for one in found}

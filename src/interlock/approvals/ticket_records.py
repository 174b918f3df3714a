"""Records in the journal about tickets, and of calls that a ticket ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from interlock.core.clock import iso
from interlock.core.errors import CODES
from interlock.store import records
from interlock.store.port import EndedCall

if TYPE_CHECKING:
    from interlock.approvals.mechanism import Mechanism
    from interlock.approvals.ticket import Ticket
    from interlock.contract.standard.states import State
    from interlock.data.schema import Json
    from interlock.store.port import Transaction


_MECHANISMS: Mapping[str, Mechanism] = {
    "approved": "human_review", "denied": "human_review", "auto_denied": "timeout", "lapsed": "timeout",
}  # fmt: skip


def add_record(transaction: Transaction, ticket: Ticket, act: str, **facts: Any) -> None:
    """Record what happened to a ticket."""
    if act in _MECHANISMS:
        facts["mechanism"] = _MECHANISMS[act]
    body: Json = {
        "act": act, "approvalTicketId": ticket.id, "toolId": ticket.tool, "version": ticket.version,
        **actors(ticket), **facts,
    }  # fmt: skip
    transaction.append("approval", ticket.call, records.plain("approval", ticket.call, transaction.now_ms, **body))


def actors(ticket: Ticket) -> Json:
    """The caller of a ticket, in the words of records."""
    return {"tenant": ticket.tenant, "callerId": ticket.caller, "agentId": ticket.head.get("agentId")}


def add_closing(
    transaction: Transaction, ticket: Ticket, outcome: Json | None, why: str, code: str, state: State
) -> None:
    """Record the end of a call that will not run. `outcome` is that of its ticket."""
    row = CODES[code]
    body = {
        **ticket.head, "kind": "closed", "timestamp": iso(transaction.now_ms), "approvalTicketId": ticket.id,
        "authDecision": "DENY" if state == "denied" else "REQUIRES_APPROVAL", "status": "ERROR",
        "errorCode": row.error_code.value, "error_code": code, "error_class": row.error_class.value,
        "states": [*ticket.head.get("states", ()), "awaiting_approval", state],
        "source": "synthetic", "outputSummary": None, "sideEffects": [], "latencyMs": None, "reason": why,
        **({} if outcome is None else {"approval": outcome}),
    }  # fmt: skip
    transaction.close(EndedCall(ticket.call, ticket.ref, state, code), records.encode(body))

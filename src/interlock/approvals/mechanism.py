"""The mechanism by which an approval was decided, and the rule or person behind it.

    auto            a rule allowed the call; no person was asked
    standing        a person agreed in advance
    human_review    a person decided on the call's ticket
    timeout         the ticket expired before anybody decided, or before the call ran

The same object is in the result (`metadata.approval`), in the record that closes the call, in the record of the intent
and in the details of a refusal. Calls that need no approval, such as reads that no rule asks about, have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from interlock.call.phases import Decision
    from interlock.data.schema import Json

Mechanism = Literal["auto", "standing", "human_review", "timeout"]


def auto(decision: Decision) -> Json:
    """Approval by a rule."""
    return {"mechanism": "auto", "outcome": "approved", "rule": ", ".join(decision.rules) or decision.reason}


def standing(approval: str, by: str) -> Json:
    """Approval in advance; the rule is the standing approval that was used."""
    return {"mechanism": "standing", "outcome": "approved", "rule": approval, "by": by}


def human_review(ticket: str, by: str | None, *, approved: bool) -> Json:
    """Decision of a person on a ticket."""
    outcome = "approved" if approved else "denied"
    return {"mechanism": "human_review", "outcome": outcome, "by": by, "ticketId": ticket}


def timeout(ticket: str, rule: str) -> Json:
    """Denial because a ticket expired."""
    return {"mechanism": "timeout", "outcome": "denied", "rule": rule, "ticketId": ticket}

"""Tickets and approvals in advance, made of the documents in which a server tells of them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, cast

from interlock.approvals.offer import advance_command
from interlock.approvals.standing import Standing
from interlock.approvals.ticket import Shown, Step, Ticket
from interlock.contract.argument_bounds import is_any, is_each, is_range, is_set, is_text
from interlock.data.schema import Json


def ticket_of(document: Json) -> Ticket:
    """The ticket that a document tells of, as far as pages show it."""
    asked_ms = _ms(document["requestedAt"])
    steps = cast("list[Json]", document["escalationChain"])
    edit = cast("Json | None", document.get("edit"))
    changed: Json | None = None
    if edit is not None:
        names = [one["argument"] for one in edit["changes"]]
        changed = {"params": edit["params"], "preview": edit["preview"], "names": names}
    return Ticket(
        id=document["id"],
        call=document["invocation_id"],
        scope=b"",
        tool=document["toolId"],
        version=document["version"],
        operation=document["operation"],
        tenant="",
        caller=document["callerId"],
        requester=document["requestedBy"],
        digest=document["input_digest"],
        policy=document["policy"],
        reason=document["reason"],
        chain=tuple(Step(one["group"], _ms(one["at"]) - asked_ms) for one in steps),
        shown=Shown(document["params"], document["preview"], changed),
        head={"mutationClass": document.get("mutation_class")},
        sealed=None,
        expires_ms=_ms(document["expiresAt"]),
        created_ms=asked_ms,
        state=document["status"],
        step=max(sum(bool(one["notified"]) for one in steps) - 1, 0),
        resolved_ms=None if document["resolvedAt"] is None else _ms(document["resolvedAt"]),
        resolved_by=document["resolvedBy"],
        comment=document["comment"],
        edited=b"" if document["user_modified"] else None,
    )


def standing_of(document: Json) -> Standing:
    """The standing approval that a document tells of."""
    return Standing(
        id=document["id"],
        tenant=document["tenant"],
        tool=document["tool"],
        versions=document["versions"],
        arguments=document["arguments"],
        caller=document["caller"],
        uses=document["uses"],
        expires_ms=_ms(document["expiresAt"]),
        granted_by=document["grantedBy"],
        used=document["used"],
        revoked_ms=0 if document["revoked"] else None,
    )


def _ms(stamp: Any) -> int:
    return round(datetime.fromisoformat(str(stamp)).timestamp() * 1000)


def kind_of_bound(pattern: Any) -> Literal["set", "text", "range", "each", "any", "pattern"]:
    """The form in which an approval in advance bounds an argument."""
    if is_set(pattern):
        return "set"
    if is_text(pattern):
        return "text"
    if is_each(pattern):
        return "each"
    if is_any(pattern):
        return "any"
    return "range" if is_range(pattern) else "pattern"


def grant_command(ticket: Ticket, caller: str) -> str | None:
    """The command that agrees in advance to calls like that of a ticket; None if no bounds fit its arguments."""
    return advance_command(ticket, caller)

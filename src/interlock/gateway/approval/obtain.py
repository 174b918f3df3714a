"""Obtain the approval of a call that needs one: a standing approval, an earlier decision, or a new ticket."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from interlock.approvals import mechanism, standing, tickets
from interlock.approvals.ticket import Ticket
from interlock.authority.approval_gate import APPROVAL_TIER
from interlock.authority.facts import in_normal_form
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.canonical import digest
from interlock.data.schema import Json
from interlock.store import idempotency
from interlock.telemetry.trace import Recording

if TYPE_CHECKING:
    from interlock.call.phases import Call, Checked, Decision, Granted
    from interlock.core.clock import Clock
    from interlock.gateway.approval.new_ticket import NewTickets
    from interlock.gateway.approval.waiting_call import WaitingCalls
    from interlock.gateway.observe import Observer
    from interlock.store.port import Store, Transaction


@dataclass(frozen=True, slots=True)
class Obtained:
    """The outcome of a search for an approval: an open ticket, or an approval, perhaps of an edited input."""

    ticket: Ticket | None = None
    edited: Json | None = None
    by: str = ""
    agreed: str | None = None  # digest of the edited input, after the hooks, when it was approved


class ApprovalRequests:
    """Finds approvals, and opens tickets for calls that have none."""

    def __init__(
        self, *, journal: Store, tickets: NewTickets, waiting: WaitingCalls, observer: Observer, clock: Clock
    ) -> None:
        self._journal = journal
        self._tickets = tickets
        self._waiting = waiting
        self._observer = observer
        self._clock = clock

    async def obtain(self, checked: Checked, decision: Decision, to_preview: Granted) -> Obtained:
        """Return an approval that the call can use, or its ticket; raises E3209 if the call was denied or timed out.

        `to_preview` is a grant for the preview that a reviewer is shown.
        """
        call = checked
        call.move("awaiting_approval")
        if await self._use_standing(checked):
            call.move("approved")
            return Obtained()
        ticket = await self._tickets.find_or_open(checked, decision, to_preview)
        if ticket is None:
            call.move("approved")
            self._add_use(call, _refuse_used)
            return Obtained()
        call.extend().approval_outcome = ticket.outcome()
        no = ticket.rejection()
        if no is not None:
            raise no
        if ticket.state == "PENDING":
            # INVARIANT: a call keeps one id, however often it is sent while a person decides.
            call.id = ticket.call
            if isinstance(call.more.span, Recording):
                call.more.span.event("approval_requested", ticketId=ticket.id, group=ticket.approvers[-1])
            self._observer.emit("tool.permission.requested", call, **ticket.pending())
            return Obtained(ticket)
        call.move("approved")
        call.extend().approval = ticket.id
        seen = digest(self._waiting.open(ticket).agreed_preview)
        call.extend().agreed = {"approvedBy": ticket.resolved_by, "previewDigest": seen}
        if ticket.state == "USED":
            # It ran, and its outcome is under its key. If the key is free by now, the approval is used up.
            self._add_use(call, _refuse_used)
            if call.request.own_key is None:
                row = await self._journal.read(partial(idempotency.of_call, call=ticket.call))
                call.extend().collects = None if row is None else row.scope
            return Obtained()
        call.id = ticket.call
        self._add_use(call, lambda transaction: tickets.use(transaction, ticket, call.id))
        if call.own_id != ticket.call and call.request.own_key is None and checked.tool.key_from != "caller":
            # It was sent again, and is answered with what comes of it. Otherwise it was continued by itself.
            self._add_use(call, lambda transaction: tickets.mark_collected(transaction, ticket.id))
        assert ticket.sealed is not None
        agreed = self._waiting.unseal(ticket.sealed if ticket.edited is None else ticket.edited, ticket.id)
        # An edited input has a preview of its own, and the preview of the original input does not apply to it.
        call.extend().previewed = {"promised": agreed["promised"]}
        if ticket.edited is None:
            return Obtained()
        return Obtained(edited=agreed["arguments"], by=ticket.resolved_by or "", agreed=agreed.get("agreed"))

    async def _use_standing(self, checked: Checked) -> bool:
        call, tool = checked, checked.tool
        assert call.request.caller is not None
        if call.request.operation != "invoke":
            return False  # an approval of calls of a tool is none of undoing them
        if call.request.caller.passed_on:
            return False  # nor of requests that others pass on to the caller
        if tool.tier >= APPROVAL_TIER:
            return False  # every call with full access needs an approval of its own
        look = partial(
            standing.find,
            caller=call.request.caller,
            tool=tool.contract.address,
            version=tool.contract.version,
            arguments=checked.input,
            now_ms=self._clock.now_ms(),
            normal=partial(in_normal_form, tool.contract),
        )
        found = await self._journal.read(look)
        if found is None:
            return False
        outcome = mechanism.standing(found.id, found.granted_by)
        call.extend().approval, call.extend().approval_outcome = found.id, outcome
        # Approved in advance, within bounds, without a preview.
        call.extend().agreed = {"approvedBy": found.granted_by, "previewDigest": None}

        def use(transaction: Transaction) -> None:
            # INVARIANT: the record of a call that was refused the use names no approval. A unit may be run again.
            call.more.approval, call.more.approval_outcome = None, None
            standing.use(transaction, found, call.id)
            call.more.approval, call.more.approval_outcome = found.id, outcome

        self._add_use(call, use)
        return True

    def _add_use(self, call: Call, use: Callable[[Transaction], None]) -> None:
        call.extend().uses = [*(call.more.uses or ()), use]


def _refuse_used(_: Transaction) -> None:
    raise Failure("E3410", "the approval was used; send the call again to ask for a new one", retry_after_ms=10)

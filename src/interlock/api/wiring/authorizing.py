"""Build what decides about calls: tokens, policy, approvals."""

from __future__ import annotations

from interlock.api.wiring.shared import Outside, Shared
from interlock.gateway.approval.edited_input import EditedInputs
from interlock.gateway.approval.new_ticket import NewTickets
from interlock.gateway.approval.obtain import ApprovalRequests
from interlock.gateway.approval.waiting_call import WaitingCalls
from interlock.gateway.authorize import Authorizer
from interlock.gateway.execution.preview import Previews


class Authorizing:
    """The Authorize phase."""

    def __init__(self, outside: Outside, shared: Shared, previews: Previews) -> None:
        journal, clock, settings, observer = outside.journal, outside.clock, outside.settings, shared.observer
        self.waiting_calls = WaitingCalls(outside.box)
        tickets = NewTickets(
            journal=journal,
            preview=previews.look,
            inputs=shared.storage.inputs,
            view=shared.reviewer_view,
            settings=settings,
            clock=clock,
            box=outside.box,
            waiting=self.waiting_calls,
            channels=outside.channels,
        )
        approvals = ApprovalRequests(
            journal=journal, tickets=tickets, waiting=self.waiting_calls, observer=observer, clock=clock
        )
        self.authorizer = Authorizer(
            grant=outside.grant,
            engine=outside.engine,
            verifier=outside.tokens.verifier,
            approvals=approvals,
            allowances=shared.allowances,
            observer=observer,
            judge=shared.judge,
            edited=EditedInputs(shared.hooks, clock),
        )

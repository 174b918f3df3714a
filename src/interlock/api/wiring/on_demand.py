"""The parts that make calls and review them, built on first use: many commands need neither.

    shared parts ◄── the gateway ◄── reviews, approved calls

A process that makes no call has nothing of them to finish, to report or to look after.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import TYPE_CHECKING

from interlock.approvals.reviewers import is_alone
from interlock.gateway.approval.sweep import sweep

if TYPE_CHECKING:
    from interlock.api.wiring.reviewing import Reviewing
    from interlock.api.wiring.shared import Outside, Shared
    from interlock.authority.tokens import Tokens
    from interlock.call.context import Caller
    from interlock.call.phases import Reason, Request
    from interlock.call.prepared import ToolFacts
    from interlock.call.results import Result
    from interlock.core.errors import Failure
    from interlock.data.schema import Json
    from interlock.gateway.approval.resume import ApprovedCalls
    from interlock.gateway.approval.review import Reviews
    from interlock.gateway.approval.standing import StandingApprovals
    from interlock.gateway.hooks import Hooks
    from interlock.gateway.invoke import Gateway
    from interlock.gateway.judge import CallCheck
    from interlock.gateway.persistence.storage import CallStorage
    from interlock.upstreams.states import UpstreamStates


# many methods: a line for each part that is built on first use, and for what does not need to build one
class OnDemand:
    """The gateway and the reviews of one open data directory, over the parts that exist from the start.

    `revive` returns a caller with the authority they have now.
    """

    def __init__(self, outside: Outside, shared: Shared, revive: Callable[[Caller], Awaitable[Caller]]) -> None:
        self._outside = outside
        self._shared = shared
        self._revive = revive

    @cached_property
    def gateway(self) -> Gateway:
        """The phases of a call. Many commands make none, so they are loaded and connected on first use."""
        from interlock.api.wiring.gateway import build_gateway

        gateway = build_gateway(self._outside, self._shared)
        for name, share in gateway.runner.loads().items():
            self._shared.telemetry.alerts.watch(name, share)
        return gateway

    def check_of(self, request: Request, tool: ToolFacts, arguments: Json) -> CallCheck:
        """Return the checks of a call that is not made."""
        from interlock.gateway.judge import CallCheck

        shared = self._shared
        return CallCheck(shared.judge, shared.allowances, request, tool, arguments, self._outside.clock)

    @property
    def makes_calls(self) -> bool:
        """Whether the gateway was used. If not, there is nothing of it to be finished or looked at."""
        return "gateway" in vars(self)

    @property
    def tokens(self) -> Tokens:
        """Issues and verifies tokens."""
        return self._outside.tokens

    @property
    def hooks(self) -> Hooks:
        """The hooks around calls."""
        return self._shared.hooks

    @property
    def storage(self) -> CallStorage:
        """The stores of what calls leave besides records."""
        return self._shared.storage

    @cached_property
    def _reviewing(self) -> Reviewing:
        from interlock.api.wiring.reviewing import Reviewing

        return Reviewing(self._outside, self.gateway, self._revive)

    @property
    def approvals(self) -> Reviews:
        """The tickets of calls that wait for a person, and the decisions on them."""
        return self._reviewing.reviews

    @property
    def approved_calls(self) -> ApprovedCalls:
        """Calls that continue after an approval."""
        return self._reviewing.approved_calls

    @cached_property
    def standing_approvals(self) -> StandingApprovals:
        """The approvals that people gave in advance."""
        from interlock.gateway.approval.standing import StandingApprovals

        outside = self._outside
        return StandingApprovals(
            journal=outside.journal,
            catalog=outside.catalog,
            settings=outside.settings,
            clock=outside.clock,
            view=self._shared.reviewer_view,
        )

    @cached_property
    def upstream_states(self) -> UpstreamStates:
        """Whether upstreams answer. To ask that takes no connection to them, and no gateway."""
        from interlock.upstreams.states import UpstreamStates

        return UpstreamStates(self._outside.journal, self._outside.clock)

    async def is_alone(self, by: Caller) -> bool:
        """Whether a local person has stated that nobody else decides on this machine."""
        return await self._outside.journal.read(lambda reader: is_alone(reader, by))

    async def sweep_tickets(self) -> None:
        """Deny tickets that have timed out, and escalate those that wait too long."""
        await sweep(self._outside.journal, self._outside.channels, self._shared.observer)

    async def write_unrecorded(self) -> None:
        """Write the outcomes that could not be recorded before. Without a call there are none."""
        if self.makes_calls:
            await self.gateway.write_unrecorded()

    async def make(self, request: Request) -> Result:
        """Make a call as a request states it."""
        return await self.gateway.invoke(request)

    async def decline(self, request: Request, failure: Failure) -> Result:
        """Refuse a call before its first phase, as a result and on record."""
        return await self.gateway.decline(request, failure)

    def cancel_here(self, call_id: str, reason: Reason) -> str:
        """End a call that this process runs. Answers canceled, unsupported or finished."""
        return self.gateway.cancellation.cancel(call_id, reason)

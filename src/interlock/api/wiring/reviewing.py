"""Build what people decide with: reviews, and the calls that continue after an approval."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from interlock.gateway.approval.resume import ApprovedCalls
from interlock.gateway.approval.review import Reviews

if TYPE_CHECKING:
    from interlock.api.wiring.shared import Outside
    from interlock.call.context import Caller
    from interlock.gateway.invoke import Gateway


class Reviewing:
    """Reviews and approved calls. `revive` returns a caller with the authority they have now."""

    def __init__(self, outside: Outside, gateway: Gateway, revive: Callable[[Caller], Awaitable[Caller]]) -> None:
        journal, catalog, settings, clock = outside.journal, outside.catalog, outside.settings, outside.clock
        waiting = gateway.waiting_calls
        self.reviews = Reviews(
            gateway=gateway,
            waiting=waiting,
            journal=journal,
            catalog=catalog,
            settings=settings,
            channels=outside.channels,
        )
        self.approved_calls = ApprovedCalls(
            gateway=gateway, waiting=waiting, journal=journal, clock=clock, revive=revive
        )

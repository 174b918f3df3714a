"""The operations that endpoints offer to authenticated callers.

    endpoint ──► Service ──► the operations of this package ──► gateway

An endpoint translates a wire format into these methods and their answers back; it decides nothing. Each method takes
the caller that `authenticate` has named and checks their rights itself, so that no endpoint can forget to (see
`rights`). It returns a document that every wire format can carry. The functions beside these classes check nothing: the
command line uses them too, for the owner of the data directory.

    calls, tools, providers               for agents: make calls and follow them, see the available tools
    budgets                               for agents and auditors: what calls may still cost
    approvals                             for people who decide on calls
    registration, upstreams               for operators: which tools there are
    tokens, administration                for operators: who may call them, by which keys, and unfinished calls
    policy, audit, health                 for those who govern, audit and operate the server
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from interlock.api.administration import Administration
from interlock.api.approvals import Approvals
from interlock.api.audit import Audit
from interlock.api.authentication import Authentication, bearer
from interlock.api.budgets import Budgets
from interlock.api.calls import Ask, Calls, native_id
from interlock.api.events import Events
from interlock.api.health import Health
from interlock.api.listing import Listing
from interlock.api.policy import Policy
from interlock.api.providers import Providers
from interlock.api.surface_view import SurfaceViews
from interlock.api.tools import Page
from interlock.api.upstreams import Upstreams

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.api.registration import Registration
    from interlock.call.context import Caller
    from interlock.call.results import Result

__all__ = ["Ask", "Page", "Service", "bearer", "native_id"]


class Service:
    """One Interlock, as its endpoints see it."""

    def __init__(self, app: Interlock) -> None:
        self.app = app
        self.tools = app.tools
        self.surface_views = SurfaceViews(app, self.tools)
        self.surfaces = self.surface_views.surfaces
        self.calls = Calls(app, self.surfaces)
        self.listing = Listing(app)
        self.providers = Providers(app, self.tools, self.calls)
        self.approvals = Approvals(app)
        self.administration = Administration(app)
        self.tokens = self.administration.tokens
        self.policy = Policy(app)
        self.audit = Audit(app)
        self.events = Events(app, self.audit)
        self.budgets = Budgets(app, self.audit)
        self.upstreams = Upstreams(app)
        self.health = Health(app)
        self.authentication = authentication = Authentication(app)
        self.known, self.recall = authentication.known, authentication.recall
        self.authenticate, self.refusal = authentication.authenticate, authentication.refusal

    @cached_property
    def registration(self) -> Registration:
        """Operations that admit tools. What judges them takes longer to load than all else."""
        from interlock.api.registration import Registration

        return Registration(self.app, self.app.admissions)

    async def undo(self, call_id: str, *, by: Caller, key: str, door: str, trace: str | None = None) -> Result:
        """Run the compensation that a call of this caller stored. Governed like any call."""
        return await self.app.records.undo(call_id, by=by, key=key, door=door, trace_id=trace)

    async def close(self, within_s: float = 10.0) -> None:
        """End what was started in the background."""
        self.authentication.refusals.close()
        await self.calls.close(within_s)

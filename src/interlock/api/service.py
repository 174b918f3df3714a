"""What every door offers, said once: who may ask, and what is done.

    door ──► Service ──► Interlock ──► gateway

A door translates a wire into these methods and their answers back; it decides nothing. Each method takes the caller
that `authenticate` has named and checks their rights itself, so that no door can forget to (see `rights`). What it
gives back is a document that every wire can carry. The functions beside these classes check nothing: the command line
has them too, for whoever owns the home.

    calls, tools, providers               for agents: make calls and follow them, see the tools there are
    budgets                               for agents and auditors: what calls may still cost
    approvals                             for people who decide on calls
    registration, upstreams, tokens       for operators: what there is to call, and who may
    policy, audit, health                 for those who govern, look and keep it running
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.api.approvals import Approvals
from interlock.api.audit import Audit
from interlock.api.budgets import Budgets
from interlock.api.calls import Ask, Calls, native_id
from interlock.api.events import Events
from interlock.api.failed_authentication import Refusals
from interlock.api.health import Health
from interlock.api.listing import Listing
from interlock.api.policy import Policy
from interlock.api.providers import Providers
from interlock.api.registration import Registration
from interlock.api.tokens import Tokens
from interlock.api.tools import Page, Tools
from interlock.api.upstreams import Upstreams
from interlock.authority.tokens import token_digest
from interlock.call.context import Caller
from interlock.call.results import Result
from interlock.core.errors import Failure

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock

__all__ = ["Ask", "Page", "Service", "bearer", "native_id"]


class Service:
    """One Interlock, as seen from its doors."""

    def __init__(self, lock: Interlock) -> None:
        self.lock = lock
        self.calls = Calls(lock)
        self.listing = Listing(lock)
        self.tools = Tools(lock)
        self.providers = Providers(lock, self.tools, self.calls)
        self.registration = Registration(lock)
        self.approvals = Approvals(lock)
        self.tokens = Tokens(lock)
        self.policy = Policy(lock)
        self.audit = Audit(lock)
        self.events = Events(lock, self.audit)
        self.budgets = Budgets(lock, self.audit)
        self.upstreams = Upstreams(lock)
        self.health = Health(lock)
        self.refusals = Refusals(lock.gateway.telemetry)

    def known(self, authorization: str | None) -> Caller | None:
        """The caller of an `Authorization` header that was verified before; None where `authenticate` must."""
        digest = bearer(authorization)
        return None if digest is None else self.recall(digest)

    def recall(self, digest: bytes) -> Caller | None:
        """The same for whoever has found out the token's digest (`bearer`) already."""
        return self.lock.tokens.recall(digest)

    async def authenticate(self, authorization: str | None) -> Caller:
        """Who is behind an `Authorization` header. E3212 without one; E3201, E3202, E3203 or E3207 for a bad one."""
        try:
            return await self.lock.caller_of(_token(authorization))
        except Failure as failure:
            self.refusals.note(failure)
            raise

    def refusal(self, caller: Caller) -> Failure | None:
        """Why the token of a caller who was authenticated before holds no longer; None while it does."""
        try:
            if caller.capability is not None:
                self.lock.tokens.check(caller.capability)
        except Failure as failure:
            self.refusals.note(failure)
            return failure
        return None

    async def undo(self, call_id: str, *, by: Caller, key: str, door: str, trace: str | None = None) -> Result:
        """Run the compensation that a call of this caller stored. Governed like any call."""
        if not self.lock.ownership.has_call(by, call_id):
            raise Failure("E3702", f"no call `{call_id}` of yours is on record")
        return await self.lock.undo(call_id, key=key, caller=by, door=door, trace_id=trace)

    async def close(self, within_s: float = 10.0) -> None:
        """End what was started in the background."""
        self.refusals.close()
        await self.calls.close(within_s)


def bearer(authorization: str | None) -> bytes | None:
    """The digest of the token in an `Authorization` header; None if there is none in it."""
    if authorization is None or authorization[:7].lower() != "bearer ":
        return None
    return token_digest(authorization[7:])


def _token(authorization: str | None) -> str:
    if authorization is None:
        raise Failure("E3212", "send a token: `Authorization: Bearer …` (interlock token issue makes one)")
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Failure("E3203", "the authorization header must read `Bearer TOKEN`")
    return token.strip()

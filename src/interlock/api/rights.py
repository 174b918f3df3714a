"""Who may do what through a door: the scopes they hold, and the tenant they are of.

    tools:admin      register and deprecate tools, upstreams       policy:read     see, check and explain the policy
    tokens:issue     issue and revoke tokens                       policy:admin    change it
    audit:read       read the journal, which is recorded           approvals       by the groups that a ticket names

Callers of the tenant `local` run the place and see all of it; others see what is their tenant's. The tools, the
upstreams and the policy are everybody's: whatever scopes another tenant holds, they are not for it to see or change.
"""

from __future__ import annotations

from interlock.call.context import Caller
from interlock.core.errors import Failure


def require(by: Caller, scope: str, what: str) -> None:
    """Refuse (E3206) what the caller holds no scope for."""
    if scope not in by.scopes:
        raise Failure("E3206", f"{what} needs the scope `{scope}`")


def require_here(by: Caller, scope: str, what: str) -> None:
    """Refuse (E3206) what is done to the whole place, unless the caller is one of those who run it."""
    require(by, scope, what)
    if not by.governs(scope):
        raise Failure("E3206", f"{what} is for callers of the tenant `local`, who run this place")


def same_place(by: Caller, tenant: str | None) -> bool:
    """Whether something of a tenant is there for a caller."""
    return by.tenant in ("local", tenant)

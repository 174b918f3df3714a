"""The rights of callers: the scopes that they hold, and the tenant that they belong to.

    tools:admin      register and deprecate tools, upstreams       policy:read     see, check and explain the policy
    tokens:issue     tokens, identities, signing keys              policy:admin    change it, see the settings
    audit:read       read the journal, which is recorded           approvals       by the groups that a ticket names
    calls:reconcile  settle calls whose outcome is unknown

Callers of the tenant `local` operate the server and see all of it; others see what belongs to their tenant. Tools,
upstreams and the policy are shared by all tenants, so other tenants can neither see nor change them, whatever scopes
they hold.
"""

from __future__ import annotations

from interlock.call.context import Caller
from interlock.core.errors import Failure


def require(by: Caller, scope: str, what: str) -> None:
    """Refuse (E3206) an operation if the caller does not hold the scope that it needs."""
    if scope not in by.scopes:
        # Callers with a token get scopes from its issuer, others from principals.toml.
        grant = "" if by.capability is not None else ", which principals.toml in the data directory can grant"
        raise Failure("E3206", f"{what} needs the scope `{scope}`{grant}")


def require_here(by: Caller, scope: str, what: str) -> None:
    """Refuse (E3206) an operation on the whole server, unless the caller is one of its operators."""
    require(by, scope, what)
    if not by.governs(scope):
        raise Failure("E3206", f"{what} is for callers of the tenant `local`, who operate this server")


def same_place(by: Caller, tenant: str | None) -> bool:
    """Whether a caller may see what belongs to a tenant."""
    return by.tenant in ("local", tenant)

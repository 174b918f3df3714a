"""The operations of the wide API, by subject. They translate and do nothing else; the service says who may do what."""

from interlock.doors.rest.routes import (
    administration,
    approvals,
    audit,
    budgets,
    calls,
    health,
    policy,
    surface,
    tokens,
    tools,
    upstreams,
    window,
)

__all__ = ["ROUTERS"]

# In the order of the document. Of two operations that fit a path, the first answers.
ROUTERS = tuple(
    one.router
    for one in (
        window, surface, tools, calls, approvals, budgets, tokens, administration, policy, audit, upstreams, health,
    )
)  # fmt: skip

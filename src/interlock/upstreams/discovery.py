"""Looks at an upstream: asks for the tools that it offers, within limits, with its secrets if it asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from interlock.call.connector import Connector, Discovered, secret_of
from interlock.call.phases import Lease
from interlock.core.errors import Failure
from interlock.upstreams.decisions import bounded
from interlock.upstreams.repository import Upstream

T = TypeVar("T")

LOOK_LIMIT_S = 120.0
MAX_TOOLS = 5000

Lend = Callable[[tuple[str, ...], float], Awaitable[Lease]]


async def discover(known: Upstream, connector: Connector, lend: Lend) -> Discovered:
    """Return the tools that an upstream offers now, within limits."""
    try:
        async with asyncio.timeout(LOOK_LIMIT_S):
            discovered = await with_secrets(known, connector.discover, lend)
    except TimeoutError:
        raise Failure("E3503", f"`{known.name}` did not say in {LOOK_LIMIT_S:.0f} s what it offers") from None
    if len(discovered.tools) + len(discovered.refused) > MAX_TOOLS:
        raise Failure("E3407", f"`{known.name}` offers more than {MAX_TOOLS} tools, which nobody could look at")
    return bounded(discovered)


async def with_secrets(known: Upstream, look: Callable[[Mapping[str, str]], Awaitable[T]], lend: Lend) -> T:
    """Look at an upstream. Secrets are lent for it only if it asks for them."""
    try:
        return await look({})
    except Failure as failure:
        if failure.code != "E3602" or not known.credentials:
            raise
    names = {name: secret_of(name, None) for name in known.credentials}
    lease = await lend(tuple(names.values()), LOOK_LIMIT_S)
    try:
        return await look({name: lease[secret].reveal() for name, secret in names.items()})
    finally:
        await lease.close()

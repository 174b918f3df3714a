"""Ownership of calls: who may read a call, wait for it, cancel it, continue it or undo it.

A call belongs to whom it was made for: a tenant, and the person or system at the beginning of the delegation chain.
Callers who act for the same owner share its calls only as far as their tokens reach.

A token that is bound to resources reaches a call in two cases: the call was made with this very token, or the record of
the call names resources and the token covers all of them. It does not see a call whose record names none. Resources are
recorded for writes, and for every call that was made with a token bound to resources.

INVARIANT: nobody sees or touches a call that their own token would not have let them make. They are told that there is
no such call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from interlock.core.errors import Failure
from interlock.store import ledger
from interlock.store.calls import facts_in

if TYPE_CHECKING:
    from interlock.call.capability import Capability
    from interlock.call.context import Caller
    from interlock.data.schema import Json
    from interlock.registry.catalog import Catalog
    from interlock.store.port import Store

# A call that was refused with this code did nothing and reveals nothing, and its caller must learn why.
_REFUSED = ("E3204", "E3206")


class Ownership:
    """Decides which callers own the calls of one data directory."""

    def __init__(self, journal: Store, catalog: Catalog, environment: str) -> None:
        self._journal = journal
        self._catalog = catalog
        self._environment = environment

    async def history(self, call_id: str) -> list[Json]:
        """Return every record of a call, oldest first."""
        return [orjson.loads(body) for body in await self._journal.read(lambda reader: ledger.of_call(reader, call_id))]

    async def has(self, caller: Caller, facts: Json) -> bool:
        """Whether a call with these recorded facts belongs to a caller."""
        if (facts.get("tenant"), facts.get("callerId")) != (caller.tenant, caller.id):
            return False
        return await self.reaches(caller, facts)

    async def has_call(self, caller: Caller, call_id: str) -> bool:
        """Whether a call belongs to a caller, by all of its records."""
        return await self.has(caller, facts_in(await self.history(call_id)))

    async def reaches(self, caller: Caller, facts: Json) -> bool:
        """Whether a caller's token could have made the call with these recorded facts."""
        capability, version = caller.capability, facts.get("version")
        if capability is None:
            return True
        if capability.bound and not _covers_resources(capability, facts):
            return False
        if version is None or facts.get("error_code") in _REFUSED:
            return True  # nothing ran
        from interlock.gateway import token_checks  # most callers have no token

        try:
            contract = (await self._catalog.exact(facts.get("toolId", ""), version)).contract
            token_checks.check_tool(capability, contract, self._environment)
        except Failure:
            return False
        return True


def _covers_resources(capability: Capability, facts: Json) -> bool:
    """Whether a token that is bound to resources made a call, or covers every resource in its records."""
    if facts.get("token") == capability.leaf.jti:
        return True
    resources: list[str] = facts.get("resources") or []
    return bool(resources) and all(map(capability.covers_resource, resources))

"""Whose a call is: who may look at it, wait for it, call it off, go on with it or undo it.

A call belongs to whom it was made for: a tenant, and the person or system that the chain of delegation begins with.
Those who act for the same one share its calls only as far as their tokens go.

A token that is bound to resources reaches a call in two cases: the call was made with this very token, or the record of
the call names resources and the token covers all of them. A call whose record names none is not there for such a token.
Resources are recorded for writes, and for every call that was made with a token bound to resources.

INVARIANT: nobody sees or touches a call that their own token would not have let them make. To them there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from interlock.call.capability import Capability
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.gateway import token_checks
from interlock.registry.catalog import Catalog
from interlock.store import ledger
from interlock.store.port import Store

# A call that was refused for this did nothing and shows nothing, and whoever made it must hear why.
_REFUSED = ("E3204", "E3206")


class Ownership:
    """Tells whose the calls of one home are."""

    def __init__(self, journal: Store, catalog: Catalog, environment: str) -> None:
        self._reader = journal.reader
        self._catalog = catalog
        self._environment = environment

    def history(self, call_id: str) -> list[Json]:
        """Every record of a call, oldest first."""
        return [orjson.loads(body) for body in ledger.of_call(self._reader, call_id)]

    def has(self, caller: Caller, facts: Json) -> bool:
        """Whether a call that such facts are on record of is a caller's."""
        if (facts.get("tenant"), facts.get("callerId")) != (caller.tenant, caller.id):
            return False
        return self.reaches(caller, facts)

    def has_call(self, caller: Caller, call_id: str) -> bool:
        """Whether a call is a caller's, by all that is on record of it."""
        return self.has(caller, facts_in(self.history(call_id)))

    def reaches(self, caller: Caller, facts: Json) -> bool:
        """Whether a caller's token could have made the call that these facts are on record of."""
        capability, version = caller.capability, facts.get("version")
        if capability is None:
            return True
        if capability.bound and not _covers_resources(capability, facts):
            return False
        if version is None or facts.get("error_code") in _REFUSED:
            return True  # nothing ran
        try:
            contract = self._catalog.exact(facts.get("toolId", ""), version).contract
            token_checks.check_tool(capability, contract, self._environment)
        except Failure:
            return False
        return True


def _covers_resources(capability: Capability, facts: Json) -> bool:
    """Whether a token that is bound to resources made a call, or covers every resource on record of it."""
    if facts.get("token") == capability.leaf.jti:
        return True
    resources: list[str] = facts.get("resources") or []
    return bool(resources) and all(map(capability.covers_resource, resources))


def facts_in(told: Sequence[Json]) -> Json:
    """What the records of a call say of it. The latest word counts; what was said about its approval is apart.

    Of resources every word counts: a reviewer may have changed which ones the call names.
    """
    facts: Json = {}
    resources: dict[str, None] = {}
    for record in told:
        if record.get("kind") != "approval":
            facts |= {name: value for name, value in record.items() if value is not None}
            resources |= dict.fromkeys(record.get("resources") or ())
    return facts | ({"resources": list(resources)} if resources else {})

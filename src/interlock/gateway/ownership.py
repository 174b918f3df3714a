"""Whose a call is: who may look at it, wait for it, call it off, go on with it or undo it.

A call belongs to whom it was made for: a tenant, and the person or system that the chain of delegation begins with.
Those who act for the same one share its calls only as far as their tokens go.

INVARIANT: nobody sees or touches a call that their own token would not have let them make. To them there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from interlock.core.context import Caller
from interlock.core.errors import Failure
from interlock.core.schema import Json
from interlock.gateway import cover
from interlock.registry.catalog import Catalog
from interlock.store.journal import Journal

# A call that was refused for this did nothing and shows nothing, and whoever made it must hear why.
_REFUSED = ("E3204", "E3206")


class Ownership:
    """Tells whose the calls of one home are."""

    def __init__(self, journal: Journal, catalog: Catalog, environment: str) -> None:
        self._journal = journal
        self._catalog = catalog
        self._environment = environment

    def history(self, call_id: str) -> list[Json]:
        """Every record of a call, oldest first."""
        rows = self._journal.read("SELECT body FROM journal WHERE call = ? ORDER BY seq", (call_id,))
        return [orjson.loads(body) for (body,) in rows]

    def has(self, caller: Caller, facts: Json) -> bool:
        """Whether a call that such facts are on record of is a caller's."""
        if (facts.get("tenant"), facts.get("callerId")) != (caller.tenant, caller.id):
            return False
        return self.reaches(caller, facts.get("toolId", ""), facts.get("version"), facts.get("error_code"))

    def has_call(self, caller: Caller, call_id: str) -> bool:
        """Whether a call is a caller's, by all that is on record of it."""
        return self.has(caller, facts_in(self.history(call_id)))

    def reaches(self, caller: Caller, tool: str, version: str | None, refused: str | None = None) -> bool:
        """Whether a call of a version lies within a caller's token. Where none was chosen, nothing ran: it does."""
        if caller.capability is None or version is None or refused in _REFUSED:
            return True
        try:
            cover.check_tool(caller.capability, self._catalog.exact(tool, version).contract, self._environment)
        except Failure:
            return False
        return True


def facts_in(told: Sequence[Json]) -> Json:
    """What the records of a call say of it. The latest word counts; what was said about its approval is apart."""
    facts: Json = {}
    for record in told:
        if record.get("kind") != "approval":
            facts |= {name: value for name, value in record.items() if value is not None}
    return facts

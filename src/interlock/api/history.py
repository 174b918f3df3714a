"""A call in the journal: all its records, and what follows from them.

Records of the kind `approval` have what people decided about a call. Those about the decision have the id of the call.
Those about a message to approvers, and about an approval that was given in advance, have the id of the approval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, cast

import orjson

from interlock.call.artifacts import Artifact, recalled
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.store import ledger

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.approvals.ticket import Ticket
    from interlock.call.context import Caller
    from interlock.data.schema import Json
    from interlock.store.port import Reader


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One record and its place in the chain."""

    seq: int
    hash: str
    record: Json

    @property
    def kind(self) -> str:
        return str(self.record.get("kind"))

    @property
    def at(self) -> str:
        return str(self.record.get("timestamp"))

    def document(self) -> Json:
        return {"seq": self.seq, "hash": self.hash, "record": self.record}


@dataclass(frozen=True, slots=True)
class History:
    """Every record of one call, in order."""

    call: str
    entries: tuple[HistoryEntry, ...]
    # What reviewers were shown, by ticket.
    previews: Mapping[str, Json]
    # The preview of the input as reviewers edited it, by ticket.
    edits: Mapping[str, Json]

    def last(self, kind: str) -> Json:
        return next(iter(reversed(self.all(kind))), cast("Json", {}))

    def all(self, kind: str) -> list[Json]:
        return [entry.record for entry in self.entries if entry.kind == kind]

    @property
    def facts(self) -> Json:
        """All facts about the call: each from the last record that has it."""
        merged: Json = {}
        for entry in self.entries:
            if entry.kind == "approval":
                continue  # speaks of a person's act, not of the call
            merged |= {name: value for name, value in entry.record.items() if value is not None}
        return merged

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """The files that the call left."""
        return recalled(self.facts.get("artifacts", ()))

    @property
    def tool(self) -> str:
        facts = self.facts
        version = facts.get("version")
        return f"{facts.get('toolId', '?')}@{version}" if version else str(facts.get("toolId", "?"))

    @property
    def state(self) -> str:
        closed, settled = self.last("closed"), self.last("settled")
        if settled:
            return "settled: it happened" if settled.get("happened") else "settled: it did not happen"
        if self.last("late"):
            return "ended late"
        if not closed:
            return self._standstill()
        states: list[str] = closed.get("states") or ["closed"]
        return f"{states[-1]}, outcome unknown" if closed.get("outcome") == "unknown" else states[-1]

    def _standstill(self) -> str:
        """The state of a call without an outcome on record."""
        acts = [record["act"] for record in self.all("approval") if record["act"] in ("approved", "used")]
        if not self.last("pending") or acts[-1:] == ["used"]:
            return "running or cut off"
        return "approved, not gone on with yet" if acts else "awaiting_approval"


async def find(
    parts: Parts, name: str, by: Caller | None = None, opened: Callable[[Ticket], Ticket] | None = None
) -> History:
    """The call of this id, or the only one whose id begins so. E3702 when there is none, or more than one.

    INVARIANT: a caller of another tenant learns of that tenant's calls only.
    """
    tenant = None if by is None or by.tenant == "local" else by.tenant
    return await parts.journal.read(lambda reader: find_in(reader, name, tenant, opened))


async def story(parts: Parts, call_id: str, *, by: Caller, door: str) -> History:
    """All that is on record of a call, with what its reviewers saw. That it was read is itself recorded."""
    from interlock.api.audit import Audit
    from interlock.api.rights import require

    require(by, "audit:read", "reading the audit journal")
    history = await find(parts, call_id, by, lambda ticket: ticket.opened(parts.box))
    await Audit(parts).note("explain", {"subject": history.call}, by=by, door=door)
    return history


def find_in(
    reader: Reader, name: str, tenant: str | None = None, opened: Callable[[Ticket], Ticket] | None = None
) -> History:
    """The same from a database, for a caller who sees the calls of every tenant, or of one."""
    rows = ledger.placed_of_call(reader, name)
    if tenant is not None and all(entry.record.get("tenant") != tenant for entry in _entries(rows)):
        rows = []
    prefix = name.rstrip("….").upper()
    if not rows and len(prefix) < SHORTEST:
        raise too_short(name)
    if not rows:
        found = ledger.calls_with_prefix(reader, prefix, tenant, 5)
        if len(found) > 1:
            raise Failure("E3702", f"`{name}` is the beginning of {', '.join(found)} and maybe more")
        if found:
            return find_in(reader, found[0], tenant, opened)
    if not rows:
        raise Failure("E3702", f"no call `{name}` in this journal; see interlock calls list")
    entries = _entries(rows)
    for ticket in tickets_in(entries):
        entries += _entries(ledger.placed_of_call(reader, ticket))
    asked: list[Ticket] = []
    if opened is not None:
        from interlock.approvals.tickets import of_call

        asked = [opened(ticket) for ticket in of_call(reader, name)]
    return History(
        name,
        in_order(name, entries),
        {ticket.id: ticket.preview for ticket in asked},
        {ticket.id: ticket.agreed_preview for ticket in asked if ticket.changed is not None},
    )


def tickets_in(entries: Iterable[HistoryEntry]) -> set[str]:
    """The tickets that records of a call name."""
    return {str(entry.record["approvalTicketId"]) for entry in entries if entry.record.get("approvalTicketId")}


def in_order(call: str, entries: Iterable[HistoryEntry]) -> tuple[HistoryEntry, ...]:
    """The records of a call and of its tickets in order, without what other calls used of the tickets."""
    return tuple(sorted((one for one in entries if _about(one, call)), key=lambda entry: entry.seq))


# Ids begin with the time: less than this is much the same for all.
SHORTEST = 6


def too_short(name: str) -> Failure:
    """The refusal of an id that was shortened so far that it says nothing."""
    return Failure(
        "E3702",
        f"`{name}` is too short to tell which call is meant; give at least {SHORTEST} characters of its id",
        resolution="find the id with interlock calls list",
    )


def _entries(rows: Iterable[ledger.Placed]) -> list[HistoryEntry]:
    return [HistoryEntry(seq, digest.hex(), orjson.loads(body)) for seq, digest, body in rows]


def _about(entry: HistoryEntry, call: str) -> bool:
    """Whether a record of an approval belongs to this call's story: not what other calls used of it."""
    return entry.record.get("used_by", call) == call

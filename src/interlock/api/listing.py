"""Which calls there are: what runs now, what waits for a person, what has ended, and which tools or callers lead.

Calls that run or wait are in small tables. Those that have ended are read from the journal backwards: an index of them
would cost every call a row. The place of a call is the number of a record: of its first one while it runs or waits, of
its closing one when it has ended. So one number says where a page ended, for both. A page looks through a bounded
number of records and of running calls on a reading thread. Records are in the order of their times, so a span of time
is found by bisection.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson

from interlock.contract.standard.states import STATES
from interlock.core.clock import iso, new_id
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.store import calls, identities, ledger
from interlock.store.calls import facts_in
from interlock.store.port import Reader

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.call.context import Caller

Json = dict[str, Any]
PAGE: Final = 100
# How many records a page looks through at most, and a summary.
LOOKED_THROUGH: Final = 50_000
SUMMED_UP: Final = 200_000
# How many calls that run or wait a page looks through at most.
LIVE_LOOKED_THROUGH: Final = 1000
_DAY_MS: Final = 86_400_000
_ALL: Final = 2**62

Lead = Literal["failures", "cost", "calls"]
LEADS: Final[tuple[Lead, ...]] = ("failures", "cost", "calls")
# What a call can be listed as: a state of its own, `closed` if its record has none, or that nobody knows how it ended
# (`unknown`), which a person may have settled since.
STATES_OF_CALLS: Final = (*STATES, "closed", "unknown", "settled")
_STATES = {"running": "running", "PENDING": "awaiting_approval", "APPROVED": "approved"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which calls somebody wants to see. `caller` is the id or the registered name of the caller, or of the agent that
    acted for it. Times are ISO 8601 in UTC, `since` included, `until` not.
    """

    state: str | None = None
    error: str | None = None
    tool: str | None = None
    caller: str | None = None
    since: str | None = None
    until: str | None = None

    def fits(self, line: Json) -> bool:
        """Whether a call is among them."""
        return (
            self.state in (None, line["state"])
            and self.error in (None, line["error_code"], line["error"])
            and self.tool in (None, line["tool"], line["tool"].partition("@")[0])
            and self.caller in (None, line["caller"], line["agent"])
            and (self.since is None or line["at"] >= self.since)
            and (self.until is None or line["at"] < self.until)
        )

    def check(self) -> None:
        """Refuse (E3004) a state that there is not."""
        if self.state is not None and self.state not in STATES_OF_CALLS:
            raise Failure("E3004", f"`state` is one of {', '.join(STATES_OF_CALLS)}")

    def document(self) -> Json:
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


def moment(text: str | None, name: str) -> str | None:
    """A time as records write it, read from ISO 8601 with its zone (E3004)."""
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
        if at.tzinfo is not None:
            return iso(round(at.timestamp() * 1000))
    except (ValueError, OverflowError):
        pass
    raise Failure("E3004", f"`{name}` is a time in ISO 8601 with its zone, as in 2026-07-01T12:00:00Z")


def every_call(
    reader: Reader, wanted: Wanted, *, before: int | None = None, limit: int = PAGE
) -> tuple[list[Json], int | None]:
    """The same as `Listing.page`, for a person at the data directory itself, who sees all of it."""
    wanted.check()
    found, place = _page(wanted, _Seen(None, None), before, limit, reader)
    return [line for line, _ in found], place


def top_of_all(reader: Reader, lead: Lead, *, now_ms: int, since: str | None, until: str | None, limit: int) -> Json:
    """The same as `Listing.top`, for a person at the data directory itself."""
    return _top(lead, _Seen(None, None), since or iso(now_ms - _DAY_MS), until, limit, reader)


class Listing:
    """The calls of one data directory that a caller may see."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def page(
        self, wanted: Wanted, *, by: Caller, before: int | None = None, limit: int = PAGE
    ) -> tuple[list[Json], int | None]:
        """Calls, newest first, and the place to go on from; None at the end.

        Calls that run or wait are among them, in the order in which they began. One that ends while somebody turns the
        pages moves to the front and may be missed. A page may hold fewer than `limit`, even none, and still have more
        after it: so many records were looked through.
        """
        wanted.check()
        await self._note("calls", wanted.document(), by)
        found, place = await self._parts.readers.read(partial(_page, wanted, _seen_by(by), before, limit))
        if _audits(by):
            return [line for line, _ in found], place
        return [line for line, facts in found if await self._parts.ownership.has(by, facts)], place

    async def top(
        self, lead: Lead, *, by: Caller, since: str | None = None, until: str | None = None, limit: int = 10
    ) -> Json:
        """Which tools fail most or are called most, or who spent most, in a span of time: the last day unless said.

        Needs `audit:read`. At most the last 200,000 records of the span are counted; `since` in the answer tells from
        when on.
        """
        if not _audits(by):
            raise Failure("E3206", "summaries of calls need the scope `audit:read`")
        since = since or iso(self._parts.clock.now_ms() - _DAY_MS)
        await self._note("calls.top", {"by": lead, "since": since}, by)
        return await self._parts.readers.read(partial(_top, lead, _seen_by(by), since, until, limit))

    async def _note(self, what: str, sought: Json, by: Caller) -> None:
        """Reading the calls of others is reading the journal, which is on record before anything is shown."""
        if not _audits(by):
            return
        from interlock.store import records  # not needed to list calls, and it loads every model of a call

        clock = self._parts.clock
        ref = new_id(clock.now_ms(), clock.random_bytes(10))
        body = records.plain("audit.read", ref, clock.now_ms(), by=by.acting, what=what, sought=sought)
        await self._parts.journal.append("audit.read", ref, body)


def _audits(by: Caller) -> bool:
    return "audit:read" in by.scopes


@dataclass(frozen=True, slots=True)
class _Seen:
    """The calls that a reader may see. None stands for every tenant, or every caller."""

    tenant: str | None
    caller: str | None


def _seen_by(by: Caller) -> _Seen:
    if _audits(by):
        return _Seen(None if by.tenant == "local" else by.tenant, None)
    return _Seen(by.tenant, by.id)


_Line = tuple[Json, Json]


def _page(
    wanted: Wanted, seen: _Seen, before: int | None, limit: int, reader: Reader
) -> tuple[list[_Line], int | None]:
    if wanted.caller is not None:
        named = identities.search(reader, wanted.caller, seen.tenant or "local")
        wanted = replace(wanted, caller=named[0].did) if named else wanted
    live, begun = _live(wanted, seen, before, limit, reader)
    ended, closed = _ended(wanted, seen, before, limit, reader)
    # Where a call has ended meanwhile, its end is what counts.
    known = {line["invocation_id"]: (seq, line, facts) for seq, line, facts in (*live, *ended)}
    # Beyond the place where either was looked through no further, the order of both is not known yet.
    place = max((one for one in (begun, closed) if one is not None), default=None)
    rows = [row for row in known.values() if place is None or row[0] >= place]
    rows.sort(key=lambda row: row[0], reverse=True)
    if len(rows) > limit:
        rows = rows[:limit]
        place = rows[-1][0]
    names = _names(reader, {line[who] for _, line, _ in rows for who in ("caller", "agent")})
    for _, line, _ in rows:
        line["caller_name"], line["agent_name"] = names[line["caller"]], names[line["agent"]]
    return [(line, facts) for _, line, facts in rows], place


def _names(reader: Reader, ids: Iterable[str | None]) -> dict[str | None, str | None]:
    """The names that identities were registered under."""
    found = {one: None if one is None else identities.find(reader, one) for one in ids}
    return {one: None if identity is None else identity.name or None for one, identity in found.items()}


_Row = tuple[int, Json, Json]


def _live(wanted: Wanted, seen: _Seen, before: int | None, limit: int, reader: Reader) -> tuple[list[_Row], int | None]:
    """Calls that run, and calls that wait for a person, newest first, and the place to go on from; None at the end."""
    begun = calls.live(reader, _ALL if before is None else before, LIVE_LOOKED_THROUGH)
    rows: list[_Row] = []
    for call, state, at_ms, seq in begun:
        facts = facts_in(_records_of(reader, call))
        at = iso(at_ms) if at_ms is not None else facts.get("timestamp", "")
        line = _line(call, at, facts, _STATES[state])
        if wanted.fits(line) and _is_seen(seen, facts):
            rows.append((seq, line, facts))
            if len(rows) == limit:
                return rows, seq
    return rows, begun[-1].place if len(begun) == LIVE_LOOKED_THROUGH else None


def _ended(
    wanted: Wanted, seen: _Seen, before: int | None, limit: int, reader: Reader
) -> tuple[list[_Row], int | None]:
    first, last = _span(reader, wanted.since, wanted.until)
    if before is not None:
        last = min(last, before - 1)
    least = max(first, last - LOOKED_THROUGH + 1)
    rows = calls.closed(reader, least, last, _filter(wanted, seen), limit)
    found: list[_Row] = []
    for seq, call, body in rows:
        record: Json = orjson.loads(body)
        records = _records_of(reader, call)
        state = (record.get("states") or ["closed"])[-1]
        if record.get("outcome") == "unknown":
            state = "settled" if any(one.get("kind") in ("settled", "late") for one in records) else "unknown"
        line = _line(call, record["timestamp"], record, state)
        if wanted.fits(line):
            found.append((seq, line, facts_in(records)))
    if len(rows) == limit:
        return found, rows[-1].place
    return found, least if least > first else None


def _filter(wanted: Wanted, seen: _Seen) -> calls.Filter:
    """The conditions that the store can check."""
    unsure = wanted.state in ("unknown", "settled")
    return calls.Filter(
        tenant=seen.tenant,
        owner=seen.caller,
        caller=wanted.caller,
        tool=None if wanted.tool is None else wanted.tool.partition("@")[0],
        error=wanted.error,
        outcome="unknown" if unsure else None,
        state=None if unsure else wanted.state,
    )


def _span(reader: Reader, since: str | None, until: str | None) -> tuple[int, int]:
    """The first and the last record of a span of time."""
    first, last = calls.ends(reader)
    begin = first if since is None else _first_from(reader, since, first, last)
    end = last if until is None else _first_from(reader, until, first, last) - 1
    return begin, end


def _first_from(reader: Reader, at: str, first: int, last: int) -> int:
    """The first record that is not older than a time; one behind the last if all are."""
    low, high = first, last + 1
    while low < high:
        middle = (low + high) // 2
        row = calls.next_from(reader, middle)
        if row is None or (row[1] or "") >= at:
            high = middle
        else:
            low = row[0] + 1
    return low


def _records_of(reader: Reader, call: str) -> list[Json]:
    return [orjson.loads(body) for body in ledger.of_call(reader, call)]


def _is_seen(seen: _Seen, facts: Json) -> bool:
    return seen.tenant in (None, facts.get("tenant")) and seen.caller in (None, facts.get("callerId"))


def _line(call: str, at: str, facts: Json, state: str) -> Json:
    version = facts.get("version")
    cost: Any = facts.get("cost") or {}
    caller, agent = str(facts.get("callerId")), facts.get("agentId")
    return {
        "invocation_id": call,
        "at": at,
        "tool": f"{facts.get('toolId')}@{version}" if version else str(facts.get("toolId")),
        "caller": caller,
        "caller_name": None,
        # A caller that acts for itself has no agent.
        "agent": None if agent == caller else agent,
        "agent_name": None,
        "tenant": facts.get("tenant"),
        "key": facts.get("idempotencyKey"),
        "state": state,
        "error_code": facts.get("error_code"),
        "error": facts.get("errorCode"),
        "source": facts.get("source"),
        "latency_ms": facts.get("latencyMs"),
        "cost": cost.get("total"),
    }


def _top(lead: Lead, seen: _Seen, since: str, until: str | None, limit: int, reader: Reader) -> Json:
    first, last = _span(reader, since, until)
    least = max(first, last - SUMMED_UP + 1)
    of = "callerId" if lead == "cost" else "toolId"
    rows = calls.sums(reader, least, last, _filter(Wanted(), seen), of=of, order=lead, most=limit)
    if least > first:
        since = calls.time_of(reader, least) or since
    names = _names(reader, [row.name for row in rows]) if lead == "cost" else {}
    top = [
        {
            **({"caller": name, "caller_name": names[name]} if lead == "cost" else {"tool": name}),
            "calls": calls,
            "failures": failures,
            "cost": cost,
        }
        for name, calls, failures, cost, _ in rows
    ]
    return {"by": lead, "since": since, "until": until, "top": top}

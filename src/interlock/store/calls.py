"""Lists of calls: those that run or wait, and those that have ended.

Calls that run have an idempotency key in the table `reservation`, or a fact (reads, and calls in the background).
Calls that wait for a person have a row in `ticket`. Calls that have ended are read from their closing records in the
table `journal`, which are in the order of their times. The place of a call is the number of a record: of its first one
while it runs or waits, of its closing one when it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from interlock.core.record import NamedTuple, dataclass
from interlock.store.expressions import amount, last_element, member
from interlock.store.port import Reader

Json = dict[str, Any]
_TIME = member("body", "timestamp")
# The prefix of the fact about a running read or background call, which names the call. Its value is the process.
BEGUN = "begun:"
# The prefix of the fact about a background call that has what its closing record needs if its process dies before the
# journal has anything of it.
ASKED = "asked:"


class Live(NamedTuple):
    """A call that runs (`running`) or waits (the state of its ticket). `at_ms` is None where only its records tell."""

    call: str
    state: str
    at_ms: int | None
    place: int


class Closed(NamedTuple):
    """The closing record of a call."""

    place: int
    call: str
    body: bytes


class Sum(NamedTuple):
    """The calls of one tool or caller. `latency_ms` is the mean of those that succeeded; None where none did."""

    name: str
    calls: int
    failures: int
    cost: float
    latency_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Conditions on closing records; None is no condition. `owner` is the caller, `caller` the caller or its agent."""

    tenant: str | None = None
    owner: str | None = None
    caller: str | None = None
    tool: str | None = None
    error: str | None = None
    outcome: str | None = None
    state: str | None = None


def live(reader: Reader, before: int, most: int) -> list[Live]:
    """Calls that run or wait, at places before one, newest first."""
    rows = reader.all(
        "SELECT * FROM (SELECT call, state, at, (SELECT min(seq) FROM journal WHERE journal.call = one.call) AS seq"
        " FROM (SELECT call, 'running' AS state, reserved_ms AS at FROM reservation WHERE state = 'executing'"
        " UNION ALL SELECT call, state, created_ms FROM ticket WHERE state IN ('PENDING', 'APPROVED')"
        " UNION ALL SELECT substr(name, CAST(? AS INTEGER)), 'running', NULL FROM fact WHERE name >= ? AND name < ?"
        ") AS one) AS placed WHERE seq < ? ORDER BY seq DESC LIMIT ?",
        (len(BEGUN) + 1, BEGUN, BEGUN + "\U0010ffff", before, most),
    )
    return list(map(Live._make, rows))


def closed(reader: Reader, first: int, last: int, wanted: Filter, most: int) -> list[Closed]:
    """Closing records at the places from one to another, newest first."""
    where, values = _conditions(wanted)
    rows = reader.all(
        "SELECT seq, call, body FROM journal WHERE seq BETWEEN ? AND ? AND kind = 'closed'"  # noqa: S608 - our words
        f"{where} ORDER BY seq DESC LIMIT ?",
        (first, last, *values, most),
    )
    return list(map(Closed._make, rows))


def sums(
    reader: Reader,
    first: int,
    last: int,
    wanted: Filter,
    *,
    of: Literal["callerId", "toolId"],
    order: Literal["failures", "cost", "calls"],
    most: int,
) -> list[Sum]:
    """Calls, failures, cost and latency per caller or tool at the places from one to another, the highest first."""
    where, values = _conditions(wanted)
    rows = reader.all(
        "SELECT * FROM (SELECT name, count(*) AS calls, sum(failed) AS failures, coalesce(sum(cost), 0) AS cost,"  # noqa: S608 - our words
        " avg(CASE WHEN failed = 0 THEN latency_ms END) AS latency_ms FROM ("
        f"SELECT {member('body', of)} AS name,"
        f" CASE WHEN {member('body', 'error_code')} IS NULL THEN 0 ELSE 1 END AS failed,"
        f" {amount('body', 'cost.total')} AS cost, {amount('body', 'latencyMs')} AS latency_ms FROM journal"
        f" WHERE seq BETWEEN ? AND ? AND kind = 'closed'{where}) AS one"
        f" GROUP BY name) AS summed WHERE {order} > 0 ORDER BY {order} DESC, name LIMIT ?",
        (first, last, *values, most),
    )
    return list(map(Sum._make, rows))


def _conditions(wanted: Filter) -> tuple[str, list[str]]:
    """The conditions that SQL can check, so that few records are read whole."""
    conditions: list[tuple[str, str | None]] = [
        (f"{member('body', 'tenant')} = ?", wanted.tenant),
        (f"{member('body', 'callerId')} = ?", wanted.owner),
        (f"? IN ({member('body', 'callerId')}, {member('body', 'agentId')})", wanted.caller),
        (f"{member('body', 'toolId')} = ?", wanted.tool),
        (f"? IN ({member('body', 'error_code')}, {member('body', 'errorCode')})", wanted.error),
        (f"{member('body', 'outcome')} = ?", wanted.outcome),
        (f"{last_element('body', 'states')} = ?", wanted.state),
    ]
    used = [(words, value) for words, value in conditions if value is not None]
    return "".join(f" AND {words}" for words, _ in used), [value for _, value in used]


# Places and times


def ends(reader: Reader) -> tuple[int, int]:
    """The first and the last place of the journal; 1 and 0 when it is empty."""
    # Each by itself, as SQLite uses no index for both at once.
    (first,) = reader.one("SELECT coalesce(min(seq), 1) FROM journal")
    (last,) = reader.one("SELECT coalesce(max(seq), 0) FROM journal")
    return first, last


def next_from(reader: Reader, place: int) -> tuple[int, str | None] | None:
    """The first record at a place or behind it: its place and time."""
    return reader.one(f"SELECT seq, {_TIME} FROM journal WHERE seq >= ? ORDER BY seq LIMIT 1", (place,))  # noqa: S608 - our words


def time_of(reader: Reader, place: int) -> str | None:
    """The time of a record."""
    row = reader.one(f"SELECT {_TIME} FROM journal WHERE seq = ?", (place,))  # noqa: S608 - our words
    return None if row is None else row[0]


def facts_in(records: Sequence[Json]) -> Json:
    """Return the facts in the records of a call. The latest value counts; approvals are kept apart.

    All resources count that were ever recorded: a reviewer may have changed which ones the call names.
    """
    facts: Json = {}
    resources: dict[str, None] = {}
    for record in records:
        if record.get("kind") != "approval":
            facts |= {name: value for name, value in record.items() if value is not None}
            resources |= dict.fromkeys(record.get("resources") or ())
    return facts | ({"resources": list(resources)} if resources else {})

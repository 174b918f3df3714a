"""`parts`: where the time of a durable call goes, beside what no governed call can do without.

Each part is measured alone, done as barely as our libraries do it, and apart from the others. What is left of the
whole call is what it takes to decide, to bound, to count and to tell, and what Python takes to get from one to the
next. What a goal leaves for that, beside the parts, says how far it can be reached while they are done so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from bench import calls, ours, peers
from bench.measure import Contender, Plan, compare, number
from bench.payloads import PAYLOADS, Payload
from bench.report import Table
from interlock import Interlock
from interlock.call.prepared import Prepared
from interlock.data.canonical import canonical, encode
from interlock.executors.function import bind
from interlock.privacy.redact import Redactor

WHOLE = "the whole call, durable, 128 callers"
RECORD = "its record in the journal's chain and on disk, and the wait for it"


REST = "everything else: deciding, bounding, counting, telling"


async def run(plan: Plan) -> list[Table]:
    found: dict[str, list[float]] = {}
    goals: list[tuple[str, ...]] = []
    async with ours.opened("durable") as app:
        for payload in PAYLOADS:
            theirs = [one for one in await peers.contenders(payload) if one.name in (peers.LANGCHAIN, peers.MANAGER)]
            field = await _contenders(app, payload)
            figures = {name: figure.us for name, figure in (await compare([*field, *theirs], plan)).items()}
            whole, parts = figures[WHOLE], sum(figures[one.name] for one in field) - figures[WHOLE]
            for one in field[:-1]:
                found.setdefault(one.name, []).append(figures[one.name])
            found.setdefault(REST, []).append(whole - parts)
            found.setdefault(WHOLE, []).append(whole)
            goals += [_goal(payload, goal, figures, parts) for goal in calls.GOALS if goal.ours == calls.DURABLE_MANY]
    columns = ("CPU µs", *(payload.name for payload in PAYLOADS))
    rows = [(name, *map(number, figures)) for name, figures in found.items()]
    return [
        Table("Where the time of a call goes", columns, rows),
        Table("What the goals leave beside the parts", ("CPU µs", "payload", "allowed", "parts", "left"), goals),
    ]


def _goal(payload: Payload, goal: calls.Goal, figures: dict[str, float], parts: float) -> tuple[str, ...]:
    allowed = figures[goal.peer] / goal.at_least
    words = f"{goal.at_least:g}x cheaper than {goal.peer}" if goal.at_least > 1 else f"as cheap as {goal.peer}"
    return words, payload.name, number(allowed), number(parts), f"{allowed - parts:.1f}"


async def _contenders(app: Interlock, payload: Payload) -> list[Contender]:
    whole = ours.contender(app, payload, WHOLE, ours.MANY)
    result = await whole.call()
    await app.journal.drain()
    [(body,)] = app.journal.reader.all("SELECT body FROM journal WHERE call = ?", (result.invocation_id,))
    tool = await app.catalog.prepared(f"bench.{payload.function.__name__}", None)
    redactor = Redactor().for_schema(tool.contract.output.document)
    given, given_back = payload.arguments, payload.expected
    return [
        Contender(name="the function", call=lambda: payload.function(**given)),
        _part("the input checked, copied, in its one form, and its digest", lambda: _taken(tool, given)),
        _part(
            "the output held against its schema, and encoded",
            lambda: ((tool.fits_fast or tool.contract.output.fits)(given_back), encode(given_back)),
        ),
        _part("the output searched for what is private", lambda: redactor.apply(given_back)),
        Contender(
            name=RECORD,
            call=lambda: app.journal.append("closed", result.invocation_id, body),
            callers=ours.MANY,
            settle=app.journal.drain,
        ),
        whole,
    ]


def _taken(tool: Prepared, given: Any) -> tuple[str, Any]:
    """As the fast path takes it: in one step, or step by step if nothing was compiled."""
    taken = None if tool.take is None else tool.take(given)
    if taken is None:
        assert tool.fits_input(given)
        taken = canonical(given), bind(tool.bound, given)
    return hashlib.sha256(taken[0]).hexdigest(), taken[1]


def _part(name: str, work: Callable[[], Any]) -> Contender:
    async def call() -> Any:
        return work()

    return Contender(name=name, call=call)

"""`parts`: where the time of a durable call goes, beside what no governed call can do without.

Each part is measured alone, done as barely as it can be. What is left of the whole call is what its phases take to
decide, to bound, to count and to tell, and what Python takes to get from one to the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from bench import ours
from bench.measure import Contender, Plan, compare, number
from bench.payloads import PAYLOADS, Payload
from bench.report import Table
from interlock import Interlock
from interlock.core.canonical import canonical, encode
from interlock.core.redact import Redactor

WHOLE = "the whole call, durable, 128 callers"
RECORD = "its record in the journal's chain and on disk, and the wait for it"


async def run(plan: Plan) -> list[Table]:
    found: dict[str, list[float]] = {}
    async with ours.opened("durable") as lock:
        for payload in PAYLOADS:
            figures = await compare(await _contenders(lock, payload), plan)
            parts = {name: figure.us for name, figure in figures.items()}
            whole = parts.pop(WHOLE)
            parts |= {"everything else: the phases themselves": whole - sum(parts.values()), WHOLE: whole}
            for name, us in parts.items():
                found.setdefault(name, []).append(us)
    columns = ("CPU µs", *(payload.name for payload in PAYLOADS))
    rows = [(name, *map(number, figures)) for name, figures in found.items()]
    return [Table("Where the time of a call goes", columns, rows)]


async def _contenders(lock: Interlock, payload: Payload) -> list[Contender]:
    whole = ours.contender(lock, payload, WHOLE, ours.MANY)
    result = await whole.call()
    await lock.journal.drain()
    [(body,)] = lock.journal.read("SELECT body FROM journal WHERE call = ?", (result.invocation_id,))
    tool = lock.catalog.prepared(f"bench.{payload.function.__name__}", None)
    redactor = Redactor().for_schema(tool.contract.output.document)
    given, given_back = payload.arguments, payload.expected
    return [
        Contender(name="the function", call=lambda: payload.function(**given)),
        _part("the input in its one form, and its digest", lambda: hashlib.sha256(canonical(given)).hexdigest()),
        _part("the input held against its schema", lambda: tool.fits_input(given)),
        _part(
            "the output held against its schema, and encoded",
            lambda: (tool.fits_output(given_back), encode(given_back)),
        ),
        _part("the output searched for what is private", lambda: redactor.apply(given_back)),
        Contender(
            name=RECORD,
            call=lambda: lock.journal.append("closed", result.invocation_id, body),
            callers=ours.MANY,
            settle=lock.journal.drain,
        ),
        whole,
    ]


def _part(name: str, work: Callable[[], Any]) -> Contender:
    async def call() -> Any:
        return work()

    return Contender(name=name, call=call)

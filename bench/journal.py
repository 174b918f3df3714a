"""`journal`: what a durable call costs on a short and on a long journal."""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from bench import flat, ledger, ours
from bench.measure import Contender, Plan, compare
from bench.payloads import PAYLOADS
from bench.report import Table
from interlock import Interlock
from interlock.store.home import Home

SMALL = PAYLOADS[0]
LONE, MANY = "durable, 1 caller", f"durable, {ours.MANY} callers"


async def run(plan: Plan) -> list[Table]:
    sizes = (10, 100_000 if plan.quick else 1_000_000)
    field: list[Contender] = []
    async with AsyncExitStack() as stack:
        for size in sizes:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="interlock-bench-")))
            await prepare(home, size)
            app = await stack.enter_async_context(Interlock.open(home))
            await app.add(ours.declared(SMALL))
            field.append(ours.contender(app, SMALL, flat.name(LONE, size)))
            field.append(ours.contender(app, SMALL, flat.name(MANY, size), ours.MANY))
        for contender in field:
            await contender.check(SMALL.expected)
        figures = await compare(field, plan)
    note = "The short journal grows by what is measured; the long one starts at its size."
    return [flat.table("Journal rows", "rows", sizes, (LONE, MANY), figures, note)]


async def prepare(home: Path, rows: int) -> None:
    """A home with one tool, one real call, and copies of its record."""
    async with Interlock.open(home) as app:
        await app.add(ours.declared(SMALL))
        await ours.contender(app, SMALL, "first").check(SMALL.expected)
    ledger.fill(Home(home), rows)

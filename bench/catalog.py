"""`catalog`: what a call costs among few and among many registered tools."""

from __future__ import annotations

from contextlib import AsyncExitStack

from bench import flat, ours
from bench.measure import Contender, Plan, compare
from bench.payloads import PAYLOADS
from bench.report import Table
from interlock import Interlock
from interlock.data.canonical import digest
from interlock.registry import admission
from interlock.registry.admission import TrialEvidence

SIZES = (10, 10_000)
SMALL = PAYLOADS[0]
WARM, COLD, COLD_BARE = (
    "by address",
    "by address, after the registry changed",
    "by bare name, after the registry changed",
)


async def run(plan: Plan) -> list[Table]:
    field: list[Contender] = []
    async with AsyncExitStack() as stack:
        for size in SIZES:
            app = await stack.enter_async_context(ours.opened("batched"))
            await fill(app, size)
            field.extend(_ways(app, size))
        for contender in field:
            await contender.check(SMALL.expected)
        figures = await compare(field, plan)
    return [flat.table("Registered tools", "tools", SIZES, (WARM, COLD, COLD_BARE), figures)]


def _ways(app: Interlock, size: int) -> list[Contender]:
    async def call_anew(tool: str) -> object:
        await app.catalog.forget()
        return await app.call(tool, SMALL.arguments)

    def cold(way: str, tool: str) -> Contender:
        return Contender(
            name=flat.name(way, size),
            call=lambda: call_anew(tool),
            settle=app.journal.drain,
            answer=lambda result: result.unwrap(),
        )

    return [
        ours.contender(app, SMALL, flat.name(WARM, size)),
        cold(COLD, "bench.add"),
        cold(COLD_BARE, "add"),
    ]


async def fill(app: Interlock, size: int) -> None:
    """Publish copies of the small tool until so many are registered. Nothing is bound to them: nobody calls them."""
    pattern = ours.declared(SMALL).manifest
    for number in range(size - len(PAYLOADS)):
        manifest = pattern.model_copy(update={"tool_id": f"copy_{number}"})
        content = digest(manifest.document())
        pretend = TrialEvidence(content, True, "bench", "")
        app.journal.post(admission.publish(manifest, content, "library:", pretend, "bench"))
    await app.journal.drain()
    [(found,)] = app.journal.reader.all("SELECT count(*) FROM tool_version")
    if found != size:
        raise SystemExit(f"{found} tools were registered, not {size}")

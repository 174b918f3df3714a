"""Writes that were stopped on their way: nobody is told to send again what may be done already."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest_asyncio

from interlock import BatchPolicy, Context, Effect, Failure, Interlock, Preview, tool
from interlock.gateway import reconcile
from interlock.telemetry.alerts import Alert
from interlock.testing import FakeClock
from tests import sample
from tests.sample import flaky
from tests.support.calls import admit


@pytest_asyncio.fixture
async def timed(home: Path) -> AsyncGenerator[tuple[Interlock, FakeClock]]:
    """A data directory whose time passes when a test says so."""
    clock = FakeClock()
    async with Interlock.open(home, clock=clock.clock) as app:
        yield app, clock


async def test_a_write_that_was_stopped_on_its_way_is_never_called_retryable(
    timed: tuple[Interlock, FakeClock],
) -> None:
    app, clock = timed
    begun = asyncio.Event()

    @tool(
        version="1.0.0", mutation_class="write_reversible", namespace="demo", effects=[Effect("x:{name}", "UPDATE")],
        concurrency_safe=True, isolated_calls=True,
    )  # fmt: skip
    async def strand(name: sample.Name) -> str:
        """Change something, or not, and never come back."""
        begun.set()
        await asyncio.Event().wait()
        return name

    @strand.preview
    def _(name: str) -> Preview:
        return Preview(impact=name)

    @strand.compensate
    async def _(name: str) -> None:
        return None

    @tool(version="1.0.0", mutation_class="read_only", namespace="demo")
    async def over(ctx: Context) -> None:
        """Make a write below that does not come back."""
        await ctx.call("demo.strand", {"name": "below"}, key="below", timeout_s=1)

    @tool(version="1.0.0", mutation_class="read_only", namespace="demo", concurrency_safe=True, external_io=False)
    async def fall() -> int:
        """Fail once others run."""
        await begun.wait()
        raise Failure("E3411", "not now")

    await admit(app, strand, over, fall)
    heard: list[Alert] = []
    app.gateway.telemetry.alerts.listeners.append(heard.append)
    asked = app.gateway.with_id(app.request("demo.strand", {"name": "cancelled"}, key="cancelled"))
    running = asyncio.create_task(app.gateway.invoke(asked))
    await begun.wait()
    assert await app.cancel(asked.id or "") == "canceled"
    cancelled = await running
    begun.clear()
    both = [app.request("demo.fall", {}), app.request("demo.strand", {"name": "sibling"}, key="sibling")]
    results = await app.batch(both, BatchPolicy(sibling_failure="cancel_siblings"))
    begun.clear()
    over_it = asyncio.create_task(app.call("demo.over"))
    await begun.wait()
    clock.advance(2)
    below = await over_it
    sibling = results[1]
    again = await app.call("demo.strand", name="sibling", key="sibling")
    assert again.error is not None
    assert again.error.code == "E3409"
    blocked = {str(row[0]) for row in app.journal.reader.all("SELECT call FROM reservation WHERE state = 'unknown'")}
    assert len(blocked) == 3
    assert sorted((one.name, one.severity, one.invocation_id) for one in heard) == sorted(
        ("OUTCOME_UNKNOWN", "critical", call) for call in blocked
    )
    for result, expected in ((cancelled, "E3703"), (sibling, "E3412"), (below, "E3402")):
        failure = result.error
        assert failure is not None
        assert (failure.code, failure.retryable) == (expected, False)
        assert failure.resolution == "settle it with interlock calls reconcile"
        assert failure.details is not None
        stranded = failure.details["invocation_id"]
        assert f"interlock calls reconcile {stranded}" in failure.message
        assert failure.evidence_refs == (f"journal:{stranded}",)
        await reconcile.reconcile(
            app.journal, app.caller, stranded, seal=app.gateway.storage.outcomes.seal, happened=False
        )


async def test_a_stopped_write_that_did_nothing_may_be_sent_again(app: Interlock) -> None:
    flaky.failures = [Failure("E3502", "the far side is away")]
    failure = (await app.call("demo.unsteady", name="a", key="k")).error
    assert failure is not None
    assert (failure.retryable, failure.resolution) == (True, "wait, then send the call again")
    assert (await app.call("demo.unsteady", name="a", key="k")).ok

"""The metrics are those of the table, and their values are what one works out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Caller, Failure, Interlock
from interlock.telemetry.metrics import LATENCY_MS, METRICS, WINDOW_S, Metrics
from interlock.testing import FakeClock
from tests import sample
from tests.sample import flaky
from tests.support import traced_tools as tools
from tests.support.metrics import of, render, scraped
from tests.support.traced import attach

# The clause, as it is written.
REQUIRED = {
    "tool.invocation.count": ("counter", {"toolId", "version", "status", "mutationClass"}),
    "tool.invocation.latency_ms": ("histogram", {"toolId", "version", "timeoutClass"}),
    "tool.invocation.cost": ("counter", {"toolId", "version", "costCategory"}),
    "tool.invocation.retries": ("counter", {"toolId", "version"}),
    "tool.invocation.timeout_rate": ("gauge", {"toolId", "version", "timeoutClass"}),
    "tool.idempotency.replay_rate": ("gauge", {"toolId"}),
    "tool.approval.pending_count": ("gauge", {"toolId", "approverGroup"}),
    "tool.approval.resolution_time_ms": ("histogram", {"toolId", "resolution"}),
    "tool.schema.validation_failure_rate": ("gauge", {"toolId", "phase"}),
}
Samples = Mapping[str, Mapping[frozenset[tuple[str, str]], float]]


@pytest.mark.proves("OBS-03")
async def test_the_table_is_the_clause() -> None:
    assert {row.name: (row.type, set(row.labels)) for row in METRICS if row.name in REQUIRED} == REQUIRED
    text = (await Metrics(lambda: 0.0).render()).decode()
    for name, (kind, _) in REQUIRED.items():
        assert f"# TYPE {name.replace('.', '_')} {kind}\n" in text


@pytest.mark.proves("OBS-03")
async def test_scripted_calls_give_the_values_that_one_works_out_by_hand(home: Path) -> None:
    fake = FakeClock()
    async with Interlock.open(home, clock=fake.clock, housekeeping=False) as app:
        attach(app)

        async def taking(seconds: float, text: str) -> None:
            tools.meanwhile = lambda: fake.advance(seconds)
            await app.call("seen.slow", text=text)

        for seconds in (0.0002, 0.003, 0.003, 0.04):
            await taking(seconds, "a")
        assert not (await app.call("seen.slow", text=7)).ok  # bad input
        assert not (await app.call("seen.liar", text="b")).ok  # bad output
        assert (await app.call("seen.liar", text="a")).ok
        assert (await app.call("seen.worker", password="x")).ok  # costs 0.25 and 0.5
        assert (await app.call("seen.worker", password="y")).ok
        for _ in range(4):
            assert (await app.call("demo.increment", name="n", key="k")).ok  # one run, three replays
        assert not (await app.call("secret.customer-name", a=1)).ok
        app.gateway.telemetry.metrics.retried(await app.catalog.prepared("demo.increment", None))
        samples = await render(app)

    slow = {"toolId": "seen.slow", "version": "1.0.0"}
    count = "tool_invocation_count"
    assert of(samples, count, **slow, status="succeeded", mutationClass="read_only") == 4
    assert of(samples, count, **slow, status="validation_failed", mutationClass="read_only") == 1
    assert of(samples, count, toolId="unknown", version="", status="failed", mutationClass="") == 1
    assert of(samples, count, toolId="demo.increment", version="1.0.0", status="succeeded", mutationClass="write_reversible") == 4  # fmt: skip # noqa: E501

    latency = {**slow, "timeoutClass": "standard"}
    assert of(samples, "tool_invocation_latency_ms_count", **latency) == 5
    assert of(samples, "tool_invocation_latency_ms_sum", **latency) == pytest.approx(0.2 + 3 + 3 + 40, abs=0.01)
    bucket = "tool_invocation_latency_ms_bucket"
    assert [of(samples, bucket, **latency, le=le) for le in ("0.1", "0.25", "2.5", "5.0", "25.0", "50.0", "+Inf")] == [
        1, 2, 2, 4, 4, 5, 5,
    ]  # fmt: skip

    cost = {"toolId": "seen.worker", "version": "1.0.0"}
    assert of(samples, "tool_invocation_cost", **cost, costCategory="external_api") == 0.5
    assert of(samples, "tool_invocation_cost", **cost, costCategory="token") == 1.0
    assert of(samples, "tool_invocation_retries", toolId="demo.increment", version="1.0.0") == 1
    assert of(samples, "tool_invocation_timeout_rate", **latency) == 0.0
    assert of(samples, "tool_idempotency_replay_rate", toolId="demo.increment") == 0.75
    assert of(samples, "tool_schema_validation_failure_rate", toolId="seen.slow", phase="input") == 0.2
    assert of(samples, "tool_schema_validation_failure_rate", toolId="seen.liar", phase="output") == 0.5


@pytest.mark.supports("OBS-03")
async def test_calls_that_ran_out_of_time_are_a_share_of_all(app: Interlock) -> None:
    await asyncio.gather(
        app.call("seen.crash", how="hang", timeout_s=0.01), *(app.call("seen.crash", how="a") for _ in range(3))
    )
    labels = {"toolId": "seen.crash", "version": "1.0.0", "timeoutClass": "standard"}
    assert of(await render(app), "tool_invocation_timeout_rate", **labels) == 0.25


@pytest.mark.proves("OBS-03")
async def test_tickets_are_counted_from_the_store_whichever_process_decides(home: Path) -> None:
    fake = FakeClock()
    boss = Caller(id="boss", groups=frozenset({"approvers"}))
    async with Interlock.open(home, clock=fake.clock, housekeeping=False) as app:
        attach(app)
        found = [await app.call("demo.send", to="a", key=f"k{n}") for n in range(4)]
        ticket = [one.metadata["pending"]["ticketId"] for one in found]
        assert of(await render(app), "tool_approval_pending_count", toolId="demo.send", approverGroup="approvers") == 4
        fake.advance(3)
        async with Interlock.open(home, clock=fake.clock, housekeeping=False) as other:
            await other.approvals.approve(ticket[0], by=boss)
            fake.advance(7)
            await other.approvals.deny(ticket[1], by=boss)
        (await app.approved_calls.resume(ticket[0])).unwrap()
        samples = await render(app)
        assert of(samples, "tool_approval_pending_count", toolId="demo.send", approverGroup="approvers") == 2
        name = "tool_approval_resolution_time_ms"
        assert of(samples, f"{name}_sum", toolId="demo.send", resolution="approved") == 3000
        assert of(samples, f"{name}_bucket", toolId="demo.send", resolution="approved", le="1000.0") == 0
        assert of(samples, f"{name}_bucket", toolId="demo.send", resolution="approved", le="5000.0") == 1
        assert of(samples, f"{name}_sum", toolId="demo.send", resolution="denied") == 10_000
        fake.advance(10 * 86_400)
        await app.approvals.sweep()
        samples = await render(app)
        assert of(samples, f"{name}_count", toolId="demo.send", resolution="auto_denied") == 2
        assert "tool_approval_pending_count" not in samples


@pytest.mark.proves("OBS-03")
async def test_no_label_holds_what_a_caller_sent(app: Interlock) -> None:
    secret = 'zq"9\n\\'
    for tool in (secret, f"demo.{secret}", f"demo.add@{secret}", "demo.add"):
        for arguments in ({secret: secret}, {"a": secret}, {"a": 1}):
            await app.call(
                tool,
                arguments,
                key=secret,
                session=secret,
                task=secret,
                trace_id=secret,
                version=secret,
                door="library",
            )
            await app.call(tool, arguments, caller=Caller(id=secret, tenant=secret))
    text = await app.gateway.telemetry.metrics.render()
    assert b"\ntool_invocation_count{" in text
    assert b"zq" not in text
    assert {dict(labels)["toolId"] for labels in scraped(text)["tool_invocation_count"]} == {"unknown", "demo.add"}


@given(st.lists(st.floats(0.05, 400_000), min_size=1, max_size=200))
def test_quantiles_can_be_derived_to_the_width_of_a_bucket(values: list[float]) -> None:
    from interlock.telemetry.metrics import _Histogram  # pyright: ignore[reportPrivateUsage]

    histogram = _Histogram(LATENCY_MS)
    for value in values:
        histogram.observe(value)
    assert sum(histogram.counts) == len(values)
    assert histogram.sum == pytest.approx(sum(values))
    edges = (0.0, *LATENCY_MS, float("inf"))
    for quantile in (0.5, 0.95, 0.99):
        rank = max(1, round(quantile * len(values)))
        true = sorted(values)[rank - 1]
        total, place = 0, 0
        while total < rank:
            total += histogram.counts[place]
            place += 1
        assert edges[place - 1] <= true <= edges[place]


async def test_shares_are_of_the_last_quarter_of_an_hour(home: Path) -> None:
    fake = FakeClock()
    async with Interlock.open(home, clock=fake.clock, housekeeping=False) as app:
        attach(app)

        async def share() -> float:
            return of(await render(app), "tool_schema_validation_failure_rate", toolId="demo.add", phase="input")

        async def calls(good: int, bad: int) -> None:
            for _ in range(good):
                await app.call("demo.add", a=1)
            for _ in range(bad):
                await app.call("demo.add", a="x")

        await calls(0, 4)
        assert await share() == 1.0
        fake.advance(WINDOW_S / 2)
        await calls(4, 0)
        assert await share() == 0.5
        fake.advance(WINDOW_S)
        await calls(3, 1)
        assert await share() == 0.25
        fake.advance(WINDOW_S)
        assert await share() == 0.0


async def test_signals_and_limits_are_told_as_well() -> None:
    metrics = Metrics(lambda: 0.0)
    metrics.signals["ROLLBACK_FAILED"] += 2
    metrics.limits = lambda: {"memory": 0.25}
    samples = scraped(await metrics.render())
    assert of(samples, "interlock_signal_count", signal="ROLLBACK_FAILED") == 2
    assert of(samples, "interlock_limit_used", limit="memory") == 0.25


async def test_how_long_changes_of_other_processes_were_not_read_is_a_limit_too(app: Interlock) -> None:
    app.journal.changes.start()
    app.journal.changes.catch_up()
    assert of(await render(app), "interlock_limit_used", limit="unread changes") >= 0.0


async def test_a_call_that_failed_for_its_own_reasons_is_no_bad_input(app: Interlock) -> None:
    sample.flaky.failures = [Failure("INVALID_INPUT", "no")]
    result: Any = await app.call("demo.unsteady", name="a", key="k")
    assert result.state == "failed"
    assert of(await render(app), "tool_schema_validation_failure_rate", toolId="demo.unsteady", phase="input") == 0.0


@pytest.mark.proves("OBS-03")
async def test_every_call_that_is_sent_again_is_counted(home: Path) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        attach(app)
        soon = Failure("E3502", "not now", retry_after_ms=1)
        flaky.failures = [soon, soon]
        assert (await app.call_with_retries("demo.unsteady", name="n", key="k")).ok
        samples = await render(app)
    assert of(samples, "tool_invocation_retries", toolId="demo.unsteady", version="1.0.0") == 2

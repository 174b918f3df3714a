"""Every call is a tree of spans: the right shape whatever happens, none left open, and readable by who made it."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import orjson
import pytest

from interlock import Caller, Failure, Interlock
from interlock.data.schema import Json
from interlock.testing import FakeClock
from tests import sample
from tests.support import checkpoint_tools
from tests.support import traced_tools as tools
from tests.support.calls import admit
from tests.support.traced import traced

FORBIDDEN = """
@id("not-slow")
forbid (principal, action == Action::"seen.slow", resource);
"""
WHOLE = ["Validate", "Authorize", "Execute", "Verify", "Return"]


@pytest.mark.proves("OBS-01")
async def test_a_call_is_a_span_with_one_child_for_each_phase(home: Path) -> None:
    async with traced(home) as one:
        result = await one.app.call("demo.add", a=1, b=2)
        (tree,) = one.trees()
    assert tree.shape == ("tool.invoke", WHOLE)
    assert tree.attributes["tool.id"] == "demo.add"
    assert tree.attributes["tool.version"] == "1.0.0"
    assert tree.attributes["tool.status"] == "succeeded"
    assert tree.attributes["tool.cost"] == 0.0
    assert tree.attributes["tool.invocation_id"] == result.invocation_id
    assert 0 < result.metadata["latency_ms"] <= tree.attributes["tool.latency_ms"]
    assert tree.span.context is not None
    assert f"{tree.span.context.trace_id:032x}" == result.trace_id
    assert tree.span.parent is None
    assert tree["Execute"].events == ["tool.invocation.started", "tool.execution.completed"]
    assert tree["Return"].events == ["tool.invocation.succeeded"]
    times = [(child.span.start_time or 0, child.span.end_time or 0) for child in tree.children]
    assert all(start <= end for start, end in times)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(times))
    assert times[-1][1] == tree.span.end_time


@pytest.mark.proves("OBS-01")
async def test_a_span_carries_what_the_call_cost(home: Path) -> None:
    async with traced(home) as one:
        await one.app.call("seen.worker", password="x")
        (tree,) = one.trees()
    assert tree.attributes["tool.cost"] == 0.75


@pytest.mark.supports("LIFE-19")
@pytest.mark.proves("OBS-01")
async def test_a_failure_names_what_failed_on_its_phase_and_on_the_whole(home: Path) -> None:
    policy = home / "policy.cedar"
    policy.write_text(policy.read_text() + FORBIDDEN)
    async with traced(home) as one:
        app = one.app

        async def shape(tool: str, /, **arguments: Any) -> Any:
            key = arguments.pop("key", None)
            timeout_s = arguments.pop("timeout_s", None)
            await app.call(tool, arguments, key=key, timeout_s=timeout_s)
            (tree,) = one.trees()
            return tree.shape

        assert await shape("demo.nothing", a=1) == ("tool.invoke!TOOL_NOT_FOUND", ["Return"])
        assert await shape("demo.add", a="x") == (
            "tool.invoke!INVALID_INPUT", ["Validate!INVALID_INPUT", "Return"],
        )  # fmt: skip
        assert await shape("seen.slow", text="a") == (
            "tool.invoke!AUTHORIZATION_DENIED", ["Validate", "Authorize!AUTHORIZATION_DENIED", "Return"],
        )  # fmt: skip
        assert await shape("seen.crash", how="raise") == (
            "tool.invoke!EXECUTION_FAILED", ["Validate", "Authorize", "Execute!EXECUTION_FAILED", "Return"],
        )  # fmt: skip
        assert await shape("seen.crash", how="hang", timeout_s=1) == (
            "tool.invoke!DEADLINE_EXCEEDED", ["Validate", "Authorize", "Execute!DEADLINE_EXCEEDED", "Return"],
        )  # fmt: skip
        assert await shape("seen.liar", text="b") == (
            "tool.invoke!OUTPUT_SCHEMA_VIOLATION",
            ["Validate", "Authorize", "Execute", "Verify!OUTPUT_SCHEMA_VIOLATION", "Return"],
        )
        assert await shape("seen.boast", name="b", key="k1") == (
            "tool.invoke!SIDE_EFFECT_INCONSISTENCY",
            ["Validate", "Authorize", "Execute", "Verify!SIDE_EFFECT_INCONSISTENCY", "Return"],
        )


@pytest.mark.proves("OBS-01")
@pytest.mark.parametrize(
    ("tool", "arguments", "status", "error", "cost"),
    [
        ("demo.nothing", {"a": 1}, "failed", ("TOOL_NOT_FOUND", "E3101"), 0.0),
        ("demo.add", {"a": "x"}, "validation_failed", ("INVALID_INPUT", "E3301"), 0.0),
        ("seen.slow", {"text": "a"}, "denied", ("AUTHORIZATION_DENIED", "E3206"), 0.0),
        ("seen.spend", {"how": "raise"}, "failed", ("EXECUTION_FAILED", "E3401"), 0.75),
        ("seen.spend", {"how": "hang"}, "timed_out", ("DEADLINE_EXCEEDED", "E3402"), 0.75),
        ("seen.spend", {"how": "b"}, "failed", ("INTERNAL_TOOL_ERROR", "E3303"), 0.75),
    ],
)
async def test_the_span_of_a_failed_call_carries_tool_status_latency_and_cost(
    home: Path, tool: str, arguments: Json, status: str, error: tuple[str, str], cost: float
) -> None:
    policy = home / "policy.cedar"
    policy.write_text(policy.read_text() + FORBIDDEN)
    async with traced(home) as one:
        result = await one.app.call(tool, arguments, timeout_s=0.5 if arguments.get("how") == "hang" else None)
        assert not result.ok
        (tree,) = one.trees()
        (told, *_) = one.tracer.of(result.trace_id, one.app.caller)
    known = tool != "demo.nothing"
    facts = tree.attributes
    assert (facts["tool.id"], facts["tool.version"]) == ((tool, "1.0.0") if known else ("unknown", ""))
    assert (facts["tool.status"], facts["error.type"], facts["error.code"]) == (status, *error)
    assert facts["tool.cost"] == cost
    assert facts["tool.invocation_id"] == result.invocation_id
    assert 0 < result.metadata["latency_ms"] <= facts["tool.latency_ms"]
    assert (told["name"], told["attributes"]) == ("tool.invoke", facts)


@pytest.mark.supports("OBS-01")
async def test_what_was_asked_for_is_not_told_where_there_is_no_such_tool(home: Path) -> None:
    async with traced(home) as one:
        await one.app.call("secret.sauce", a=1)
        (tree,) = one.trees()
    assert tree.attributes["tool.id"] == "unknown"
    assert "secret" not in tree.span.to_json()


@pytest.mark.proves("OBS-01")
async def test_calls_that_a_tool_makes_hang_under_its_execution(home: Path) -> None:
    async with traced(home) as one:
        app = one.app
        assert (await app.call("seen.outer", depth=2)).unwrap() == 3
        (tree,) = one.trees()
    for depth in range(4):
        assert [child.span.name for child in tree.children] == WHOLE
        assert tree.attributes["tool.id"] == ("seen.outer" if depth < 3 else "demo.add")
        if depth < 3:
            (tree,) = tree["Execute"].children


@pytest.mark.proves("OBS-01")
async def test_progress_parts_and_the_end_are_events_of_the_execution_and_hold_nothing_private(home: Path) -> None:
    async with traced(home) as one:
        app = one.app
        assert (await app.call("seen.worker", password="hunter2hunter2")).ok
        (tree,) = one.trees()
    assert tree["Execute"].events == [
        "tool.invocation.started",
        "tool.invocation.progress",
        "tool.invocation.progress",
        "tool.invocation.partial_result",
        "tool.execution.completed",
    ]
    half = dict(tree["Execute"].span.events[2].attributes or {})
    assert half == {"sequence": 2, "percent": 50.0, "message": half["message"]}
    assert "hunter2" not in "".join(child.span.to_json() for child in [tree, *tree.children])


@pytest.mark.supports("OBS-01")
async def test_an_undone_write_hangs_under_the_verification_that_asked_for_it(home: Path) -> None:
    async with traced(home) as one:
        assert not (await one.app.call("seen.slip", name="b", key="k")).ok
        (tree,) = one.trees()
    (undo,) = tree["Verify"].children
    assert undo.shape == ("tool.invoke", WHOLE)


@pytest.mark.supports("OBS-01")
async def test_a_call_that_waits_for_a_person_ends_its_span_and_goes_on_in_the_same_trace(home: Path) -> None:
    async with traced(home) as one:
        app = one.app
        pending = await app.call("demo.send", to="a", key="k")
        assert pending.pending
        (waiting,) = one.trees()
        ticket = pending.metadata["pending"]["ticketId"]
        await app.approvals.approve(ticket, by=Caller(id="boss", groups=frozenset({"approvers"})))
        done = await app.wait(pending)
        (tree,) = one.trees()
    assert waiting.shape == ("tool.invoke", ["Validate", "Authorize"])
    assert waiting.attributes["tool.status"] == "awaiting_approval"
    assert tree.shape == ("tool.invoke", WHOLE)
    assert done.ok
    assert waiting.span.context is not None
    assert tree.span.context is not None
    assert waiting.span.context.trace_id == tree.span.context.trace_id
    assert one.tracer.open == 0


@pytest.mark.proves("OBS-01", "LIFE-19")
async def test_no_span_is_open_after_a_thousand_calls_of_every_kind(home: Path) -> None:
    dice = random.Random(5)
    async with traced(home) as one:
        app = one.app

        async def cancelled() -> None:
            task = asyncio.ensure_future(app.call("seen.crash", how="hang"))
            for _ in range(dice.randrange(6)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        kinds = [
            lambda: app.call("demo.add", a=1),
            lambda: app.call("demo.add", a="x"),
            lambda: app.call("demo.none"),
            lambda: app.call("seen.crash", how="raise"),
            lambda: app.call("seen.crash", how="exit"),
            lambda: app.call("seen.crash", how="hang", timeout_s=0.001),
            lambda: app.call("seen.liar", text="b"),
            lambda: app.call("seen.outer", depth=1),
            lambda: app.call("demo.increment", name="n", key=f"k{dice.randrange(50)}"),
            lambda: app.gateway.decline(app.request("demo.add", {"a": 1}), Failure("E3412", "no")),
            cancelled,
        ]
        for _ in range(40):
            await asyncio.gather(*(dice.choice(kinds)() for _ in range(25)), return_exceptions=True)
        await app.journal.drain()
        assert one.tracer.open == 0
        spans = one.take()
    ids = {span.context.span_id for span in spans if span.context is not None}
    assert sum(span.name == "tool.invoke" for span in spans) >= 1000
    assert all(span.end_time is not None and span.end_time >= (span.start_time or 0) for span in spans)
    assert all(span.parent is None or span.parent.span_id in ids for span in spans)


async def test_a_sink_that_fails_costs_the_trace_and_nothing_else(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with traced(home) as one:
        one.tracer.sinks[:] = [lambda spans: 1 // 0]  # type: ignore[list-item]
        assert (await one.app.call("demo.add", a=1)).ok
    assert "a trace was lost" in caplog.text


async def test_a_call_that_is_sent_again_after_a_person_agreed_has_the_id_it_had_then(home: Path) -> None:
    async with traced(home) as one:
        pending = await one.app.call("demo.send", to="a", key="k")
        ticket = pending.metadata["pending"]["ticketId"]
        await one.app.approvals.approve(ticket, by=Caller(id="boss", groups=frozenset({"approvers"})))
        one.take()
        sent = await one.app.call("demo.send", to="a", key="k")
        (tree,) = one.trees()
        assert sent.invocation_id == pending.invocation_id == tree.attributes["tool.invocation_id"]
        assert one.tracer.open == 0


async def test_a_traced_call_is_on_record_like_any_other(home: Path) -> None:
    async with traced(home) as one:
        for session in ("wide", "größe"):
            result = await one.app.call("demo.increment", name="n", key=f"k{len(session)}", session=session)
            assert result.ok
            body = one.app.journal.reader.all(
                "SELECT body FROM journal WHERE call = ? AND kind = 'closed'", (result.invocation_id,)
            )
            record: Json = orjson.loads(body[0][0])
            assert record["phases"] == ["request", "validate", "authorize", "execute", "verify", "return"]
            assert record["states"][-1] == "succeeded"


# Sampling


@pytest.mark.supports("OBS-01")
async def test_a_trace_is_recorded_whole_or_not_at_all_and_by_its_own_id(home: Path) -> None:
    async with traced(home, trace_ratio=0.5) as one:
        app = one.app
        results = [await app.call("seen.outer", depth=1) for _ in range(64)]
        seen = {f"{span.context.trace_id:032x}" for span in one.take() if span.context is not None}
    expected = {result.trace_id for result in results if int(result.trace_id[16:], 16) < 2**63}
    assert seen == expected
    assert 0 < len(seen) < 64


@pytest.mark.supports("OBS-01")
async def test_the_caller_decides_for_a_trace_that_it_began(home: Path) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with traced(home, trace_ratio=0.000001) as one:
        app = one.app
        await app.call("seen.outer", depth=1, trace_id=f"00-{trace}-00f067aa0ba902b7-00")
        assert one.take() == []
        await app.call("seen.outer", depth=1, trace_id=f"00-{trace}-00f067aa0ba902b7-01")
        (tree,) = one.trees()
    assert tree.span.context is not None
    assert f"{tree.span.context.trace_id:032x}" == trace
    assert tree.span.parent is not None
    assert tree.span.parent.span_id == 0x00F067AA0BA902B7
    assert tree.span.parent.is_remote


async def test_nothing_is_traced_unless_it_is_asked_for(home: Path) -> None:
    async with Interlock.open(home) as app:
        app.catalog.attach(sample.add)
        request = app.request("demo.add", {"a": 1})
        assert app.gateway.telemetry.tracer is None
        assert (await app.gateway.invoke(request)).ok


# Reading back


@pytest.mark.proves("OBS-01")
async def test_callers_read_their_own_traces_back_and_nobody_elses(home: Path) -> None:
    async with traced(home) as one:
        app = one.app
        ann, bob = Caller(id="local:ann"), Caller(id="local:bob")
        auditor = Caller(id="local:eve", scopes=frozenset({"audit:read"}))
        mine = await app.call("demo.add", a=1, caller=ann, trace_id="my-own.trace:1")
        assert mine.trace_id == "my-own.trace:1"
        found = one.tracer.of("my-own.trace:1", ann)
        assert [span["name"] for span in found] == ["tool.invoke", *WHOLE]
        assert {span["trace_id"] for span in found} == {found[0]["trace_id"]}
        assert found[0]["attributes"]["tool.invocation_id"] == mine.invocation_id
        assert one.tracer.of("my-own.trace:1", bob) == []
        assert len(one.tracer.of("my-own.trace:1", auditor)) == len(found)


async def test_only_the_latest_calls_are_kept_and_nothing_of_what_they_were_called_with(home: Path) -> None:
    async with traced(home, traces_kept=3) as one:
        results = [await one.app.call("demo.echo", value=f"private-{n}") for n in range(5)]
        caller = one.app.caller
        kept = [bool(one.tracer.of(result.trace_id, caller)) for result in results]
        assert kept == [False, False, True, True, True]
        assert "private" not in str([one.tracer.of(result.trace_id, caller) for result in results])


@pytest.mark.supports("OBS-01")
async def test_spans_are_timed_by_the_clock_of_the_call(home: Path) -> None:
    fake = FakeClock()
    tools.meanwhile = lambda: fake.advance(2)
    async with traced(home, clock=fake.clock) as one:
        began = fake.now_ms
        assert (await one.app.call("seen.slow", text="a")).ok
        (tree,) = one.trees()
    assert tree.span.start_time == began * 1_000_000
    assert tree.span.end_time == (began + 2000) * 1_000_000
    assert tree.attributes["tool.latency_ms"] == 2000.0
    execute = tree["Execute"].span
    assert (execute.end_time or 0) - (execute.start_time or 0) == 2_000_000_000
    assert tree["Verify"].span.start_time == tree["Verify"].span.end_time == execute.end_time


@pytest.mark.proves("OBS-01")
async def test_checkpoints_are_events_of_the_execution(home: Path) -> None:
    async with traced(home) as one:
        await admit(one.app, checkpoint_tools.awaits)
        script = [["insist", "begun", 1], ["progress", "half way"], ["insist", "phase_complete", [2]]]
        assert (await one.app.call("check.awaits", {"script": script})).ok
        (tree,) = one.trees()
    seen = [(event.name, dict(event.attributes or {})) for event in tree["Execute"].span.events]
    assert [facts for name, facts in seen if name == "tool.checkpoint"] == [
        {"label": "begun", "sequence": 1, "bytes": 1},
        {"label": "phase_complete", "sequence": 2, "bytes": 3},
    ]
    assert (seen[0][0], seen[-1][0]) == ("tool.invocation.started", "tool.execution.completed")

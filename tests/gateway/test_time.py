"""Deadlines, cancellation, progress and partial results."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from interlock import Context, Deadline, Effect, Failure, Interlock, Preview, tool
from interlock.call.results import Result
from interlock.contract.manifest import RetryPolicy
from interlock.contract.standard import ToolProgress
from interlock.gateway.hooks import Hook, HookResult, Seen
from interlock.gateway.reconcile import unknown_calls
from interlock.registry.source import load
from interlock.resilience.retry import Pacing, call_with_retries, delay_s
from interlock.testing import FakeClock
from tests import sample
from tests.sample import Number, Text
from tests.support import isolated_tools as cell
from tests.support.calls import admit, code, records, slow_write, until
from tests.support.each import each
from tests.support.programs import manifest, written


@tool(version="1.0.0", mutation_class="read_only", namespace="slow", concurrency_safe=True)
async def waits(ctx: Context) -> str:
    """Wait until told otherwise."""
    waiting.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        stopped.set()
        raise
    return "never"


@tool(version="1.0.0", mutation_class="read_only", namespace="slow")
async def ignores() -> str:
    """Wait, whatever anybody says."""
    while True:
        try:
            await released.wait()
            return "at last"
        except asyncio.CancelledError:
            continue


@tool(version="1.0.0", mutation_class="read_only", namespace="slow", timeout_class="interactive", external_io=False)
async def computes() -> str:
    """Wait in the caller's own task."""
    await asyncio.Event().wait()
    return "never"


@tool(version="1.0.0", mutation_class="read_only", namespace="slow", cancellable=False)
async def stubborn(ctx: Context) -> str:
    """Cannot be cancelled by contract."""
    waiting.set()
    await released.wait()
    return "done"


@tool(version="1.0.0", mutation_class="read_only", namespace="slow", timeout_class="long_running", timeout_s=100)
def climbs(ctx: Context, steps: Number) -> int:
    """Report progress from threads."""

    def climb() -> None:
        for step in range(steps):
            ctx.progress(f"step {step}", percent=step * 30, current_step=step)

    threads = [threading.Thread(target=climb) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ctx.partial(steps // 2)
    return steps


@tool(version="1.0.0", mutation_class="read_only", namespace="slow")
async def nests(ctx: Context, wanted: Number = 0) -> list[float]:
    """Call another tool, for which it may want more time, and say how much each of the two had."""
    child = await ctx.call("slow.remaining", timeout_s=wanted or None)
    return [ctx.remaining_s, child]


@tool(version="1.0.0", mutation_class="read_only", namespace="slow")
async def remaining(ctx: Context) -> float:
    """The time that is left."""
    return ctx.remaining_s


@tool(version="1.0.0", mutation_class="read_only", namespace="slow", timeout_class="standard", timeout_s=1)
async def brief() -> str:
    """Need less time than its class would give it."""
    return "done"


# How long tests look for a moment in which nothing else keeps the machine busy.
TRIES_S = 120.0
waiting = asyncio.Event()
released = asyncio.Event()
stopped = asyncio.Event()
unblocked = threading.Event()


async def publish_slow_tools(app: Interlock) -> None:
    global waiting, released, stopped
    waiting, released, stopped = asyncio.Event(), asyncio.Event(), asyncio.Event()
    from tests.support.calls import publish

    for one in (waits, ignores, computes, stubborn, climbs, nests, remaining, brief):
        await app.journal.commit(publish(one))
        app.catalog.attach(one)


@pytest.fixture
async def slow(app: Interlock) -> Interlock:
    await publish_slow_tools(app)
    return app


@pytest.fixture
async def timed(home: Path) -> AsyncGenerator[tuple[Interlock, FakeClock]]:
    """The same tools, where time passes when a test says so."""
    clock = FakeClock()
    async with Interlock.open(home, clock=clock.clock) as app:
        app.catalog.attach(sample.add)
        await publish_slow_tools(app)
        yield app, clock


@pytest.mark.shows("Python function", "deadline")
@pytest.mark.proves("LIFE-10")
@pytest.mark.parametrize("name", ["slow.waits", "slow.ignores", "slow.computes"])
async def test_a_call_is_answered_at_its_deadline_even_if_the_tool_does_not_listen(slow: Interlock, name: str) -> None:
    result = await asyncio.wait_for(slow.call(name, timeout_s=0.1), 60)  # the tools do not end by themselves
    assert code(result) == "E3402"
    assert result.error is not None
    assert (result.error.row.error_code, result.error.retryable) == ("DEADLINE_EXCEEDED", True)
    assert result.state == "timed_out"
    assert result.source == "synthetic"
    if name == "slow.waits":
        assert stopped.is_set(), "the tool was stopped"
    released.set()


@pytest.mark.proves("LIFE-10")
async def test_a_childs_deadline_never_lies_beyond_its_parents(slow: Interlock) -> None:
    for wanted in (0, 3600):
        own, child = (await slow.call("slow.nests", {"wanted": wanted}, timeout_s=4)).unwrap()
        assert own <= 4
        assert child <= 4
        assert child >= own, "the child was asked earlier; both have the same deadline"
    budget = Deadline(at=slow.clock.monotonic() + 3)
    assert (await slow.call("slow.remaining", deadline=budget, timeout_s=4)).unwrap() <= 3
    assert (await slow.call("slow.remaining", timeout_s=3600)).unwrap() <= 5.0
    spent = await slow.call("slow.remaining", deadline=Deadline(at=slow.clock.monotonic() - 1))
    assert code(spent) == "E3402"


@pytest.mark.proves("LIFE-10")
async def test_a_requested_timeout_does_not_pass_the_longest_that_a_manifest_states(
    slow: Interlock, tmp_path: Path
) -> None:
    limits: dict[str, Any] = {"timeout_class": "long_running", "timeout_default": 2, "timeout_max": 30}
    _, tools = load(written(tmp_path / "naps.json", manifest("naps", ["sleep", "1"], restart_safe=True, **limits)))
    await admit(slow, *tools)
    for wanted, most in ((None, 2), (20, 20), (31, 30), (3600, 30)):
        call = await slow.gateway.checked(slow.request("prog.naps", {}, timeout_s=wanted))
        assert call.deadline - call.started == pytest.approx(most, abs=1e-6)


@pytest.mark.proves("LIFE-10")
async def test_a_child_has_what_its_parent_has_left_of_the_callers_budget(home: Path) -> None:
    clock = FakeClock()

    @tool(version="1.0.0", mutation_class="read_only", namespace="slow")
    async def spends(ctx: Context) -> list[float]:
        """Call another tool, and once more after a while."""
        left = [await ctx.call("slow.remaining")]
        clock.advance(1.25)
        return [*left, await ctx.call("slow.remaining")]

    async with Interlock.open(home, clock=clock.clock, housekeeping=False) as app:
        await admit(app, spends, remaining)
        # Of a total of 10 s, 7 s are gone when the caller asks.
        budget = Deadline(at=clock.monotonic_s + 10)
        clock.advance(7)
        left = (await app.call("slow.spends", deadline=budget)).unwrap()
        assert left == [pytest.approx(3.0), pytest.approx(1.75)]


async def _hangs(seen: Seen) -> None:
    await asyncio.Event().wait()


async def _does_not_listen(seen: Seen) -> None:
    while not released.is_set():
        try:
            await released.wait()
        except asyncio.CancelledError:
            continue


def _blocks_its_thread(seen: Seen) -> None:
    unblocked.wait(60)


@pytest.mark.proves("LIFE-10")
@pytest.mark.parametrize("run", [_hangs, _does_not_listen, _blocks_its_thread])
@pytest.mark.parametrize("when", ["pre", "post"])
async def test_a_hook_that_hangs_ends_the_call_at_its_deadline(
    timed: tuple[Interlock, FakeClock], when: Any, run: Any
) -> None:
    app, clock = timed
    unblocked.clear()
    # Nearly all of the call's time is gone when the next hook begins.
    app.hook(Hook(id="delays", when=when, run=lambda _: clock.advance(4.9)))
    app.hook(Hook(id="hangs", when=when, run=run, timeout_s=3600))
    try:
        result = await asyncio.wait_for(app.call("demo.add", {"a": 1, "b": 2}, timeout_s=5), 60)
    finally:
        released.set()
        unblocked.set()
    assert (code(result), result.state) == ("E3402", "timed_out")
    assert result.error is not None
    assert (result.error.row.error_code, result.error.retryable) == ("DEADLINE_EXCEEDED", True)
    assert "`hangs`" in result.error.message


@pytest.mark.proves("LIFE-10")
async def test_a_write_that_had_not_begun_at_its_deadline_may_be_sent_again(
    timed: tuple[Interlock, FakeClock],
) -> None:
    app, clock = timed
    await admit(app, sample.increment)
    app.hook(Hook(id="delays", when="pre", run=lambda _: clock.advance(4.9)))
    app.hook(Hook(id="hangs", when="pre", run=_hangs, timeout_s=3600))
    result = await asyncio.wait_for(app.call("demo.increment", {"name": "a"}, key="k", timeout_s=5), 60)
    assert result.error is not None
    assert (result.error.code, result.error.retryable, result.error.unsettled) == ("E3402", True, False)
    app.gateway.hooks.registered.clear()
    again = await app.call("demo.increment", {"name": "a"}, key="k")
    assert (again.ok, again.replayed, sample.world.counters) == (True, False, {"a": 1})


@pytest.mark.proves("LIFE-10")
async def test_a_write_that_waits_for_another_until_its_deadline_says_so_and_may_be_sent_again(
    slow: Interlock,
) -> None:
    entered = threading.Event()
    await admit(slow, slow_write(entered, restart_safe=False))
    first = asyncio.create_task(slow.call("demo.pay", key="one", timeout_s=60))
    await until(entered.is_set)
    for key, expected in (("two", "E3410"), ("one", "E3408")):  # it waits for the resource, or for its own key
        result = await asyncio.wait_for(slow.call("demo.pay", key=key, timeout_s=0.05), 60)
        assert result.error is not None
        assert (result.error.code, result.error.retryable, result.error.unsettled) == (expected, True, False)
        assert (result.error.row.error_code, result.state) == ("CONFLICT", "failed")
    sample.world.release.set()
    assert ((await first).unwrap(), sample.world.runs) == ("paid", 1)


@pytest.mark.supports("LIFE-10")
@pytest.mark.parametrize("end", ["deadline", "cancelled", "stopped"])
async def test_a_write_whose_post_hook_is_cut_short_is_known_to_be_done(home: Path, end: str) -> None:
    """The tool has returned and its effect is confirmed, so nobody has to look whether it happened."""
    begun, clock = asyncio.Event(), FakeClock()

    async def holds(seen: Seen) -> HookResult | None:
        begun.set()
        if end == "stopped":
            return HookResult(stop="not in this house")
        await asyncio.Event().wait()
        return None

    async with Interlock.open(home, clock=clock.clock, housekeeping=False) as app:
        app.catalog.attach(sample.increment)
        if end == "deadline":
            # Nearly all of the call's time is gone when the next hook begins.
            app.hook(Hook(id="delays", when="post", run=lambda _: clock.advance(4.95)))
        app.hook(Hook(id="holds", when="post", run=holds, timeout_s=3600))
        alerts: list[str] = []
        app.listen(lambda event: alerts.append(event.data["alert"]) if event.type == "tool.alert" else None)
        task = asyncio.create_task(app.call("demo.increment", {"name": "a"}, key="k", timeout_s=5))
        await asyncio.wait_for(begun.wait(), 30)
        if end == "cancelled":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            result = await asyncio.wait_for(task, 30)
            assert code(result) == {"deadline": "E3402", "stopped": "E3211"}[end]
            assert result.error is not None
            assert (result.error.details or {})["executed"] is True
            assert "carried out" in result.error.message
            assert not result.error.retryable
        assert await unknown_calls(app.journal) == []
        assert "OUTCOME_UNKNOWN" not in alerts
        assert sample.world.counters == {"a": 1}
        # The key answers with the failure, and nothing runs a second time.
        app.gateway.hooks.registered.clear()
        again = await app.call("demo.increment", {"name": "a"}, key="k")
        assert again.replayed
        assert again.error is not None
        assert ((again.error.details or {})["executed"], again.error.retryable) == (True, False)
        assert sample.world.counters == {"a": 1}
        # Its effect can be undone.
        ((call,),) = app.journal.reader.all("SELECT call FROM reservation WHERE key = 'k'")
        assert (await app.undo(call, key="u")).ok
        assert sample.world.counters == {"a": 0}


@pytest.mark.proves("LIFE-10")
@pytest.mark.parametrize("run", [_hangs, _does_not_listen, _blocks_its_thread])
async def test_a_failure_hook_that_hangs_does_not_hold_up_the_answer_at_the_deadline(
    timed: tuple[Interlock, FakeClock], run: Any
) -> None:
    app, clock = timed
    unblocked.clear()
    app.hook(Hook(id="hangs", when="failure", run=run, timeout_s=3600))
    try:
        call = asyncio.create_task(app.call("slow.waits", timeout_s=5))
        await waiting.wait()
        clock.advance(6)
        result = await asyncio.wait_for(call, 60)
    finally:
        released.set()
        unblocked.set()
    assert code(result) == "E3402"
    assert "hook `hangs` had not ended when the call did" in result.metadata["warnings"]


async def test_a_failure_hook_that_still_runs_is_cancelled_when_the_home_is_closed(
    timed: tuple[Interlock, FakeClock],
) -> None:
    app, clock = timed
    cancelled = asyncio.Event()

    async def hang(seen: Seen) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    app.hook(Hook(id="hangs", when="failure", run=hang, timeout_s=3600))
    call = asyncio.create_task(app.call("slow.waits", timeout_s=5))
    await waiting.wait()
    clock.advance(6)
    assert code(await call) == "E3402"
    assert not cancelled.is_set()
    await app.close()
    assert cancelled.is_set()


@pytest.mark.proves("LIFE-10")
@pytest.mark.parametrize(("wanted", "own", "most"), [(4.0, 2.0, 2.0), (1.5, 10.0, 1.5), (3600.0, 3600.0, 5.0)])
async def test_a_hook_is_given_no_more_time_than_its_call_has_left(
    slow: Interlock, wanted: float, own: float, most: float
) -> None:
    given: list[float] = []

    def look(seen: Seen) -> None:
        given.append(seen.remaining_s)

    for when in ("pre", "post"):
        slow.hook(Hook(id=when, when=when, run=look, timeout_s=own))
    await slow.call("slow.remaining", timeout_s=wanted)
    assert len(given) == 2
    assert all(0 < left <= most for left in given)
    if own > most:
        assert given[1] < given[0], "what the hooks before and the tool took is gone"


@pytest.mark.proves("LIFE-10")
async def test_on_a_machine_with_time_for_it_the_answer_comes_within_a_tenth_of_a_second(slow: Interlock) -> None:
    assert 0 <= await _median_late_ms(lambda: slow.call("slow.ignores", timeout_s=0.05), 0.05) < 100
    released.set()


async def _median_late_ms(call: Callable[[], Awaitable[Result]], allowed_s: float) -> float:
    """How late a call is answered, by the median of tries on an idle machine: one on which a timer goes off in time."""
    late_ms: list[float] = []
    end = time.monotonic() + TRIES_S

    async def timed(work: Awaitable[Any]) -> tuple[float, Any]:
        began = time.monotonic()
        done = await work
        return (time.monotonic() - began - allowed_s) * 1000, done

    while len(late_ms) < 3 and time.monotonic() < end:
        (late, result), (control, _) = await asyncio.gather(timed(call()), timed(asyncio.sleep(allowed_s)))
        assert code(result) == "E3402"
        if control < 20:
            late_ms.append(late)
    return median(late_ms)


@pytest.mark.proves("LIFE-10")
async def test_on_a_machine_with_time_for_it_a_sandboxed_tool_is_answered_for_within_a_tenth_of_a_second_too(
    app: Interlock,
) -> None:
    await admit(app, cell.lingers)
    assert 0 <= await _median_late_ms(lambda: app.call("cell.lingers", marker="88001", timeout_s=0.5), 0.5) < 100


@pytest.mark.proves("LIFE-10")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    of=st.sampled_from([("slow.remaining", 5.0, 5.0), ("slow.brief", 1.0, 5.0), ("slow.computes", 0.5, 0.5),
                        ("slow.climbs", 100.0, 300.0)]),
    wanted=st.none() | st.floats(0.001, 10_000), left=st.floats(-10, 10_000), outer=st.none() | st.floats(0.001, 99),
)  # fmt: skip
async def test_a_deadline_is_the_least_of_class_maximum_timeout_and_budget_and_only_shrinks(
    slow: Interlock, of: tuple[str, float, float], wanted: float | None, left: float, outer: float | None
) -> None:
    gateway, now = slow.gateway, slow.clock.monotonic()
    name, stated, class_max = of

    async def bound(timeout_s: float | None, until: float) -> float:
        arguments = {"steps": 1} if name == "slow.climbs" else {}
        request = slow.request(name, arguments, timeout_s=timeout_s, deadline=Deadline(at=until))
        call = await gateway.checked(request)
        asked_s = stated if timeout_s is None else timeout_s
        # Differences, because an uptime of weeks would allow for seconds.
        most_s = min(class_max, asked_s, until - call.started)
        assert call.deadline - call.started == pytest.approx(most_s, abs=1e-6)
        return call.deadline

    parent = await bound(outer, now + left)
    assert parent <= now + left
    assert await bound(wanted, parent) <= parent


@pytest.mark.proves("LIFE-15")
async def test_cancelling_ends_a_running_call_and_says_so_when_it_cannot(slow: Interlock) -> None:
    events: list[str] = []
    slow.listen(lambda event: events.append(event.type))
    request = slow.gateway.with_id(slow.request("slow.waits"))
    call = asyncio.create_task(slow.gateway.invoke(request))
    await waiting.wait()
    assert await slow.cancel(request.id or "") == "canceled"
    result = await call
    assert (code(result), result.state, result.source) == ("E3703", "canceled", "synthetic")
    assert await slow.cancel(request.id or "") == "finished"
    waiting.clear()
    request = slow.gateway.with_id(slow.request("slow.stubborn"))
    call = asyncio.create_task(slow.gateway.invoke(request))
    await waiting.wait()
    assert await slow.cancel(request.id or "") == "unsupported"
    released.set()
    assert (await call).unwrap() == "done"
    assert await slow.cancel("01ARZ3NDEKTSV4RRFFQ69G5FAV") == "finished"
    await slow.journal.drain()
    answers = [record["answer"] for record in records(slow, kind="cancel")]
    assert answers == ["canceled", "finished", "unsupported", "finished"]
    assert events.count("tool.invocation.cancel_requested") == 4


async def test_a_caller_that_goes_away_leaves_a_closed_call_behind(slow: Interlock) -> None:
    task = asyncio.create_task(slow.call("slow.waits"))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (record,) = records(slow)[-1:]
    assert record["states"][-1] == "canceled"


@pytest.mark.proves("LIFE-14")
async def test_progress_of_threads_is_numbered_without_gaps_and_stays_below_one_hundred(slow: Interlock) -> None:
    seen: list[dict[str, Any]] = []
    result = await slow.call("slow.climbs", {"steps": 20}, on_progress=seen.append)
    assert result.unwrap() == 20
    assert [record["sequence"] for record in seen] == list(range(1, 62))
    assert max(record["percent"] for record in seen) == 100, "570 percent were reported"
    for record in seen:
        ToolProgress.parse(record)
    assert result.metadata["parts"] == [10]


FIFTEEN = {
    "progress_id", "invocation_id", "sequence", "status", "message", "percent", "current_step", "total_steps",
    "elapsed_ms", "bytes_read", "bytes_written", "line_count", "partial_result_refs", "artifact_refs", "timestamp",
}  # fmt: skip


@tool(version="1.0.0", mutation_class="read_only", namespace="slow")
async def reports(ctx: Context) -> str:
    """Say nothing, then all there is to say, then nonsense."""
    ctx.progress()
    ctx.partial("half")
    ctx.progress(
        "read", percent=40, current_step=2, total_steps=5, bytes_read=1, bytes_written=2, line_count=3,
        artifact_refs=["report.txt"],
    )  # fmt: skip
    ctx.partial("whole")
    ctx.progress("odd", percent=-7, current_step=[1], total_steps=-1, bytes_read="x", artifact_refs=[7, "log.txt"])
    return "done"


@pytest.mark.shows("Python function", "progress")
@pytest.mark.proves("LIFE-14")
async def test_a_progress_record_has_every_field_and_what_the_tool_said(slow: Interlock) -> None:
    await admit(slow, reports)
    parts: list[dict[str, Any]] = []
    slow.listen(lambda event: parts.append(dict(event.data)) if event.type.endswith("partial_result") else None)
    seen: list[dict[str, Any]] = []
    result = await slow.call("slow.reports", on_progress=seen.append)
    assert all(set(record) == {*FIFTEEN, "schema_version"} for record in seen)
    for record in seen:
        ToolProgress.parse(record)
        assert record["invocation_id"] == result.invocation_id
        assert record["elapsed_ms"] >= 0
    assert len({record["progress_id"] for record in seen}) == 3
    names = ("message", "percent", "current_step", "total_steps", "bytes_read", "bytes_written", "line_count")
    refs = [part["ref"] for part in parts]
    assert [tuple(record[name] for name in names) for record in seen] == [
        ("", None, None, None, None, None, None), ("read", 40, 2, 5, 1, 2, 3), ("odd", 0, None, None, None, None, None),
    ]  # fmt: skip
    assert [record["status"] for record in seen] == ["running", "partial_result", "partial_result"]
    assert [record["partial_result_refs"] for record in seen] == [[], refs[:1], refs[1:]]
    assert [record["artifact_refs"] for record in seen] == [[], ["report.txt"], ["log.txt"]]


talks_on: list[Context] = []


@tool(version="1.0.0", mutation_class="read_only", namespace="slow", timeout_class="long_running", timeout_s=60)
async def leaves(ctx: Context, how: Text) -> str:
    """Keep a way to speak for somebody who does not notice that the call is over."""
    talks_on.append(ctx)
    ctx.progress("at work")
    if how == "fails":
        raise Failure("E3502", "it is down")
    if how != "returns":
        waiting.set()
        await asyncio.Event().wait()
    return how


@pytest.mark.proves("LIFE-14")
@pytest.mark.parametrize(
    ("how", "state"),
    [("returns", "succeeded"), ("fails", "failed"), ("times out", "timed_out"), ("is cancelled", "canceled")],
)
async def test_nothing_is_heard_of_a_call_behind_its_result(slow: Interlock, how: str, state: str) -> None:
    await admit(slow, leaves)
    seen: list[dict[str, Any]] = []
    events: list[str] = []
    slow.listen(lambda event: events.append(event.type))
    limit_s = 0.2 if how == "times out" else None
    request = slow.gateway.with_id(
        slow.request("slow.leaves", {"how": how}, on_progress=seen.append, timeout_s=limit_s)
    )
    call = asyncio.create_task(slow.gateway.invoke(request))
    if how == "is cancelled":
        await waiting.wait()
        await slow.cancel(request.id or "")
    result = await call
    assert result.state == state
    talker = talks_on.pop()
    talker.progress("from its own thread")
    await asyncio.to_thread(talker.progress, "from another thread")
    await asyncio.to_thread(talker.partial, "more")
    await slow.call("demo.add", a=1)
    assert [record["message"] for record in seen] == ["started", "at work"]
    assert (events.count("tool.invocation.progress"), events.count("tool.invocation.partial_result")) == (2, 0)
    behind = events[events.index("tool.result.created") + 1 :]
    assert not [one for one in behind if one.startswith(("tool.invocation.progress", "tool.invocation.partial"))]


async def test_a_slow_read_is_on_record_as_begun_before_it_ends(slow: Interlock) -> None:
    request = slow.gateway.with_id(slow.request("slow.waits"))
    call = asyncio.create_task(slow.gateway.invoke(request))
    async with asyncio.timeout(60):
        while not records(slow, request.id, kind="started"):
            await slow.call("demo.add", a=1)
    await slow.cancel(request.id or "")
    await call
    assert len(records(slow, request.id)) == 1


# Retries


class Scripted:
    """A clock, dice and a callee that do what the test says."""

    def __init__(self, outcomes: list[Failure | None]) -> None:
        self.outcomes = outcomes
        self.now = 0.0
        self.pauses: list[float] = []
        self.attempts = 0
        self.exhausted = 0

    async def attempt(self, until: float) -> Result:
        error = self.outcomes[min(self.attempts, len(self.outcomes) - 1)]
        self.attempts += 1
        return Result(
            invocation_id=str(self.attempts), tool="t@1.0.0", state="failed" if error else "succeeded", created_ms=0,
            trace_id="t", metadata={}, error=error,
        )  # fmt: skip

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def note(self, result: Result, attempts: int) -> None:
        self.exhausted += 1

    async def run(self, *, deadline: float = 1e9, **policy: Any) -> Result:
        pacing = Pacing(monotonic=lambda: self.now, sleep=self.sleep, uniform=lambda low, high: high, base_s=1.0)
        chosen = RetryPolicy.model_validate(policy)
        return await call_with_retries(self.attempt, chosen, pacing, deadline=deadline, on_exhausted=self.note)


DOWN = Failure("E3502")


@pytest.mark.proves("IDEM-10")
@pytest.mark.parametrize(
    ("outcomes", "attempts", "final"),
    [
        ([None], 1, None),
        ([DOWN, None], 2, None),
        ([DOWN, DOWN, DOWN], 3, "E3415"),
        ([Failure("E3301")], 1, "E3301"),
        ([Failure("E3206")], 1, "E3206"),
        ([Failure("E3208")], 1, "E3208"),
        ([Failure("E3401", retryable=True), None], 2, None),
        ([Failure("E3401")], 1, "E3401"),
    ],
)
async def test_only_what_may_be_repeated_is_repeated(
    outcomes: list[Failure | None], attempts: int, final: str | None
) -> None:
    script = Scripted(outcomes)
    result = await script.run(max_attempts=3)
    assert (script.attempts, code(result)) == (attempts, final)
    assert script.exhausted == (final == "E3415")
    if final == "E3415":
        assert result.error is not None
        assert result.error.details is not None
        assert result.error.details["last_error"]["error_code"] == "E3502"


@pytest.mark.proves("CONTRACT-14")
@each("row", [r.code for r in __import__("interlock.core.errors").core.errors.CODES.values()])
async def test_a_code_that_is_not_retryable_is_attempted_once_under_the_most_generous_policy(row: str) -> None:
    failure = Failure(row)
    script = Scripted([failure])
    await script.run(max_attempts=10)
    repeats = failure.retryable and row != "E3208"
    assert script.attempts == (10 if repeats else 1)


@pytest.mark.proves("IDEM-10")
@pytest.mark.proves("IDEM-11")
async def test_nothing_sleeps_past_the_deadline_and_a_wanted_delay_is_honoured() -> None:
    script = Scripted([DOWN])
    result = await script.run(max_attempts=5, deadline=0.5)
    assert (script.attempts, code(result), script.pauses) == (1, "E3502", [])
    script = Scripted([Failure("E3504", retry_after_ms=7000), None])
    await script.run(max_attempts=5)
    assert script.pauses == [7.0]
    # Shorter than what would be drawn (1 s), and longer than the longest pause of the policy.
    script = Scripted([Failure("E3504", retry_after_ms=1), None])
    await script.run(max_attempts=5)
    assert script.pauses == [0.001]
    script = Scripted([Failure("E3504", retry_after_ms=90_000), None])
    await script.run(max_attempts=5, backoff_max_seconds=60)
    assert script.pauses == [90.0]
    for refused in (404, 501):
        script = Scripted([Failure("E3502", native_error_ref=f"http:{refused}"), None])
        await script.run(max_attempts=5)
        assert script.attempts == 1
    script = Scripted([Failure("E3502", native_error_ref="http:503"), None])
    await script.run(max_attempts=5)
    assert script.attempts == 2


@pytest.mark.proves("IDEM-11")
@given(
    retry=st.integers(1, 30), multiplier=st.floats(1, 10), cap=st.integers(1, 300), base=st.floats(0.01, 5),
    seed=st.integers(0, 2**32), mode=st.sampled_from(["full", "proportional"]),
)  # fmt: skip
def test_delays_stay_within_their_bounds(
    retry: int, multiplier: float, cap: int, base: float, seed: int, mode: Any
) -> None:
    said = {"backoff_multiplier": multiplier, "backoff_max_seconds": cap, "jitter": mode}
    policy = RetryPolicy.model_validate(said)
    dice = random.Random(seed)
    pacing = Pacing(monotonic=lambda: 0, sleep=asyncio.sleep, uniform=dice.uniform, base_s=base)
    capped = min(cap, base * multiplier ** (retry - 1))
    drawn = delay_s(policy, pacing, retry)
    low, high = (0, capped) if mode == "full" else (0.8 * capped, 1.2 * capped)
    assert low - 1e-9 <= drawn <= high + 1e-9


@pytest.mark.proves("IDEM-11")
def test_a_thousand_clients_that_failed_together_do_not_come_back_together() -> None:
    dice = random.Random(1)
    policy = RetryPolicy()  # pyright: ignore[reportCallIssue] - defaults
    pacing = Pacing(monotonic=lambda: 0, sleep=asyncio.sleep, uniform=dice.uniform, base_s=10.0)
    buckets = Counter(int(delay_s(policy, pacing, 1)) for _ in range(1000))
    assert max(buckets.values()) <= 3 * 1000 / 10


@pytest.mark.proves("IDEM-10", "IDEM-11")
@pytest.mark.parametrize(("jitter", "least", "most"), [({}, 0.0, 0.1), ({"jitter": "proportional"}, 0.08, 0.12)])
async def test_a_manifest_chooses_how_its_retries_are_paced(
    app: Interlock, monkeypatch: pytest.MonkeyPatch, jitter: Any, least: float, most: float
) -> None:
    drawn: list[tuple[float, float]] = []

    def lowest(low: float, high: float) -> float:
        drawn.append((low, high))
        return low

    async def down() -> str:
        """Fail for as long as anybody asks."""
        raise Failure("E3502", "it is down")

    from tests.support.calls import publish

    paced = tool(version="1.0.0", mutation_class="read_only", namespace="slow", retry={"max_attempts": 2, **jitter})(
        down
    )
    await app.journal.commit(publish(paced))
    app.catalog.attach(paced)
    monkeypatch.setattr(random, "uniform", lowest)
    assert code(await app.call_with_retries("slow.down")) == "E3415"
    ((low, high),) = drawn
    base = 0.0 if not jitter else 0.1
    assert (base + low, base + high) == (pytest.approx(least), pytest.approx(most))


@pytest.mark.shows("Python function", "retries of reads")
@pytest.mark.proves("IDEM-10")
async def test_a_read_without_a_key_is_sent_again_within_the_limit_and_the_deadline(app: Interlock) -> None:
    runs: list[str | None] = []

    async def down(ctx: Context) -> str:
        """Fail, and ask for a pause that no deadline of its class allows."""
        runs.append(ctx.idempotency_key)
        raise Failure("E3502", "it is down", retry_after_ms=1 if len(runs) < 3 else 3_600_000)

    paced = tool(version="1.0.0", mutation_class="read_only", namespace="slow", retry={"max_attempts": 10})(down)
    await admit(app, paced)
    result = await asyncio.wait_for(app.call_with_retries("slow.down"), 60)
    assert (runs, code(result)) == ([None] * 3, "E3502"), "an hour's pause is not slept: the last error is the answer"


@pytest.mark.proves("IDEM-10")
async def test_retries_keep_the_key_and_count_as_one_call_for_the_world(app: Interlock) -> None:
    sample.flaky.failures = [Failure("RATE_LIMITED", "slow down", retry_after_ms=1), Failure("E3502", retry_after_ms=1)]
    result = await app.call_with_retries("demo.unsteady", {"name": "a"}, key="k")
    assert result.unwrap() == "a"
    assert sample.flaky.runs == 3
    assert [record["idempotencyKey"] for record in records(app)] == ["k"] * 3
    sample.flaky.failures = [Failure("E3502", retry_after_ms=1)] * 9
    gave_up = await app.call_with_retries("demo.unsteady", {"name": "b"}, key="k2")
    assert gave_up.error is not None
    assert (gave_up.error.code, gave_up.error.row.error_code) == ("E3415", "RETRY_EXHAUSTED")
    assert app.gateway.observer.metrics["RETRY_BUDGET_EXHAUSTED"] == 1


async def test_the_home_fixture_of_the_library_works(tmp_path: Path) -> None:
    from interlock.testing import app as fixture

    assert fixture is not None
    async with Interlock.open(tmp_path / "one") as one, Interlock.open(tmp_path / "two") as two:
        await one.add(sample.add)
        assert (await one.call("demo.add", a=1, b=2)).unwrap() == 3
        assert code(await two.call("demo.add", a=1, b=2)) == "E3101"


@tool(version="1.0.0", mutation_class="write_reversible", namespace="slow", effects=[Effect("x", "UPDATE")])
async def half(ctx: Context) -> str:
    """Change something, then fail in a way that looks harmless."""
    ctx.effect("x", "UPDATE", after=1)
    raise Failure("UPSTREAM_FAILURE", "the other half is down")


@half.preview
def _() -> Preview:
    return Preview()


@half.compensate
async def _(result: str) -> None:
    return None


@pytest.mark.shows("Python function", "no resent writes")
@pytest.mark.supports("IDEM-09")
async def test_a_retryable_failure_after_a_reported_change_is_not_retried_blindly(app: Interlock) -> None:
    from tests.support.calls import publish

    await app.journal.commit(publish(half))
    app.catalog.attach(half)
    await app.call("slow.half", key="k")
    assert code(await app.call("slow.half", key="k")) == "E3409"

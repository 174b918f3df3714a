"""Steps of a call that depend on others, on time and on its caller: queue, deadline, abort signal, names, records."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import pytest
import pytest_asyncio

from interlock import Context, Field, Hook, HookResult, Interlock, Seen, tool
from interlock.call import prepared
from interlock.call.events import Event
from interlock.gateway import fast_path, finish, observe
from interlock.gateway.results import map_output, record_failure, replay
from interlock.telemetry.metrics import Metrics
from interlock.telemetry.trace import Recording
from interlock.testing import FakeClock
from tests import processes, sample
from tests.support import isolated_tools as cell
from tests.support.batches import gates, others_would_have_begun, prepare, running
from tests.support.calls import admit, records, until
from tests.support.metrics import render

Timed = tuple[Interlock, FakeClock]
SEEN: list[str] = []
STARTED = threading.Event()
MAY_END = threading.Event()


@tool(version="1.0.0", mutation_class="read_only", namespace="steps", timeout_class="long_running", timeout_s=60)
def loops(ctx: Context) -> str:
    """Work in a thread until somebody says that it is to end."""
    STARTED.set()
    while not ctx.cancelled:
        threading.Event().wait(0.002)
    SEEN.append(f"aborted, {ctx.remaining_s > 0}")
    MAY_END.wait(60)
    return "ended"


@tool(version="1.0.0", mutation_class="read_only", namespace="steps")
async def gives(right: Annotated[bool, Field(description="whether it fits", examples=[True])]) -> int:
    """Give back a number, or what is none."""
    return 1 if right else cast("int", "none")


@tool(version="1.0.0", mutation_class="read_only", namespace="steps")
async def names(ctx: Context) -> dict[str, Any]:
    """The caller's own names of the call, and what becomes of a change to them."""
    first = ctx.native
    first["operation_id"] = first["more"]["deep"] = "changed"
    return ctx.native


@pytest_asyncio.fixture
async def timed(home: Path) -> AsyncGenerator[Timed]:
    """A data directory whose time passes when a test says so."""
    clock = FakeClock()
    async with Interlock.open(home, clock=clock.clock) as app:
        yield app, clock


def _hooks(app: Interlock) -> list[str]:
    """Note the hooks that run, and how many closing records their call has then."""
    ran: list[str] = []

    def noted(when: str) -> Callable[[Seen], Awaitable[None]]:
        async def look(seen: Seen) -> None:  # on the event loop, whose reader it uses
            ran.append(f"{when} {len(records(app, seen.invocation_id))}")

        return look

    for when in ("pre", "post", "failure"):
        app.hook(Hook(id=when, when=when, run=noted(when)))
    return ran


@pytest.mark.proves("LIFE-02")
@pytest.mark.parametrize("stopped", [False, True])
async def test_a_call_is_queued_after_it_is_allowed_and_before_anything_of_it_runs(
    app: Interlock, stopped: bool
) -> None:
    await prepare(app)
    ran = _hooks(app)
    heard: dict[str, list[str]] = {}
    app.listen(lambda event: heard.setdefault(event.invocation_id, []).append(event.type))
    wanted = [app.request("b.depends", {"number": number}) for number in (0, 1)]
    task = asyncio.create_task(app.batch(wanted))
    await until(lambda: running == {0} and sum("tool.permission.decided" in one for one in heard.values()) == 2)
    (second,) = [one for one, events in heard.items() if events[-1] == "tool.permission.decided"]
    (first,) = heard.keys() - {second}
    # The second has been decided about. By its input it must run alone, so it waits for the first.
    for _ in range(20):
        await app.journal.commit(lambda _: None)
    assert heard[second][-1] == "tool.permission.decided"
    assert running == {0}
    if stopped:
        assert await app.cancel(second) == "canceled"
    gates[0].set()
    if not stopped:
        await until(lambda: running == {1})
        assert "tool.result.created" in heard[first]
        gates[1].set()
    results = await task
    assert [one.state for one in results] == ["succeeded", "canceled" if stopped else "succeeded"]
    assert ("tool.invocation.started" in heard[second]) is not stopped
    assert ran.count("post 0") == (1 if stopped else 2)
    assert [len(records(app, one)) for one in (first, second)] == [1, 1]


@pytest.mark.proves("LIFE-02")
async def test_a_call_that_must_run_alone_begins_with_its_first_step_after_the_call_before_it_has_ended(
    app: Interlock,
) -> None:
    await prepare(app)
    ran = _hooks(app)
    heard: list[tuple[str, str]] = []
    app.listen(lambda event: heard.append((event.invocation_id, event.type)))
    task = asyncio.create_task(app.batch([app.request("b.alone", {"number": number}) for number in (0, 1)]))
    await until(lambda: running == {0})
    await others_would_have_begun()
    first = heard[0][0]
    assert {call for call, _ in heard} == {first}
    assert ran == ["pre 0"]
    gates[0].set()
    await until(lambda: running == {1})
    gates[1].set()
    assert [one.value for one in await task] == [0, 1]
    last = max(at for at, (call, _) in enumerate(heard) if call == first)
    assert heard[last] == (first, "tool.result.created")
    assert first not in {call for call, _ in heard[last + 1 :]}
    assert min(at for at, (call, _) in enumerate(heard) if call != first) == last + 1


@pytest.mark.proves("LIFE-02")
@pytest.mark.parametrize("cause", ["cancelled", "late"])
async def test_a_tool_is_given_a_signal_when_its_call_is_cancelled_or_out_of_time(timed: Timed, cause: str) -> None:
    app, clock = timed
    await admit(app, loops)
    ran = _hooks(app)
    SEEN.clear()
    STARTED.clear()
    MAY_END.clear()
    request = app.gateway.with_id(app.request("steps.loops", timeout_s=5 if cause == "late" else None))
    task = asyncio.create_task(app.gateway.invoke(request))
    assert await asyncio.to_thread(STARTED.wait, 60)
    if cause == "cancelled":
        MAY_END.set()
        assert await app.cancel(request.id or "") == "canceled"
    else:
        clock.advance(6)
    result = await task
    MAY_END.set()  # a tool that ends when its time is up may end in time for hooks after a success
    assert result.error is not None
    assert result.error.code == ("E3703" if cause == "cancelled" else "E3402")
    await until(lambda: SEEN != [])
    assert [f"aborted, {cause == 'cancelled'}"] == SEEN
    # Failure hooks begin before the end is recorded, where there is time left; post hooks are for calls that succeed.
    await until(lambda: len(ran) == 2)
    assert ran[0] == "pre 0"
    assert ran[1] in (("failure 0",) if cause == "cancelled" else ("failure 0", "failure 1"))
    assert len(records(app, request.id)) == 1


def _mapping(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often an output is mapped and a result is made."""
    counts: Counter[str] = Counter()

    def counted(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def taken(*given: Any, **named: Any) -> Any:
            counts[name] += 1
            return step(*given, **named)

        return taken

    for module in (finish, fast_path, record_failure, replay):
        monkeypatch.setattr(module, "Result", counted("result", module.Result))
    monkeypatch.setattr(map_output, "map_output", counted("map", map_output.map_output))
    return counts


@pytest.mark.proves("LIFE-02")
@pytest.mark.parametrize("cause", ["cancelled", "late"])
async def test_of_a_call_that_is_cut_off_no_output_is_mapped_and_one_result_is_made(
    timed: Timed, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    app, clock = timed
    await admit(app, loops)
    counts = _mapping(monkeypatch)
    STARTED.clear()
    MAY_END.clear()
    request = app.gateway.with_id(app.request("steps.loops", timeout_s=5 if cause == "late" else None))
    task = asyncio.create_task(app.gateway.invoke(request))
    assert await asyncio.to_thread(STARTED.wait, 60)
    if cause == "cancelled":
        MAY_END.set()
        assert await app.cancel(request.id or "") == "canceled"
    else:
        clock.advance(6)
    result = await task
    assert result.state == ("canceled" if cause == "cancelled" else "timed_out")
    assert counts == {"result": 1}
    MAY_END.set()


@pytest.mark.proves("LIFE-02")
@pytest.mark.parametrize("fits", [True, False])
async def test_the_output_of_a_fast_read_is_mapped_once(
    app: Interlock, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """The fast path has a mapper of its own. It leaves what does not fit the contract to that of the phases."""
    counts = _mapping(monkeypatch)
    make = prepared.fitter

    def looking(document: Any) -> Any:
        fits = make(document)
        assert fits is not None

        def look(*given: Any) -> bool:
            counts["look"] += 1
            return fits(*given)

        return look

    monkeypatch.setattr(prepared, "fitter", looking)
    await admit(app, gives)
    assert (await app.call("steps.gives", right=True)).ok  # which is decided about, so that the next may be fast
    counts.clear()
    result = await app.call("steps.gives", right=fits)
    assert (result.ok, result.value) == ((True, 1) if fits else (False, None))
    assert counts == ({"result": 1, "look": 1} if fits else {"result": 1, "look": 2, "map": 1})
    assert len(records(app, result.invocation_id)) == 1


@pytest.mark.proves("LIFE-02")
async def test_a_sandboxed_tool_is_given_its_time_a_callback_for_progress_and_an_end_when_it_is_cancelled(
    app: Interlock,
) -> None:
    await admit(app, cell.tells)
    heard: list[Any] = []
    request = app.gateway.with_id(app.request("cell.tells", {"marker": "87001"}, timeout_s=50))
    task = asyncio.create_task(app.gateway.invoke(replace(request, on_progress=heard.append)))
    await until(lambda: any(one["percent"] == 50 for one in heard))
    (told,) = [one["message"] for one in heard if one["percent"] == 50]
    left, cancelled = told.split()
    assert (0 < float(left) <= 50, cancelled) == (True, "False")
    assert any(b"87001" in line for line in processes.told("cmdline") if line.startswith(b"/bin/sleep"))
    assert await app.cancel(request.id or "") == "canceled"
    assert (await task).state == "canceled"
    await until(lambda: not any(b"87001" in one for one in processes.told("cmdline") if one.startswith(b"/bin/sleep")))


@pytest.mark.proves("LIFE-02")
async def test_a_tool_is_given_the_callers_own_names_of_its_call_here_and_in_the_sandbox(app: Interlock) -> None:
    await admit(app, names, cell.named)
    native = {"operation_id": "op-7", "more": {"deep": "x"}}
    result = await app.call("steps.names", native=native)
    assert result.unwrap() == {"operation_id": "op-7", "more": {"deep": "x"}}
    assert native["more"] == {"deep": "x"}
    assert (await app.call("cell.named", native=native)).unwrap() == "op-7"
    (record,) = records(app, result.invocation_id)
    assert record["native"] == native


@pytest.mark.proves("LIFE-02")
@pytest.mark.parametrize("fails", [False, True])
async def test_hooks_come_before_the_record_and_metrics_links_and_events_after_it(app: Interlock, fails: bool) -> None:
    ran = _hooks(app)
    counted: list[int] = []
    recorded: list[int] = []

    async def count(_: Seen) -> HookResult | None:
        counted.append(await _counted(app))
        return HookResult(stop="not like this") if fails else None

    def heard(event: Event) -> None:
        if event.type == "tool.result.created":
            recorded.append(len(records(app, event.invocation_id)))

    app.hook(Hook(id="counts", when="post", run=count))
    app.listen(heard)
    before = await _counted(app)
    result = await app.call("demo.add", a=1, b=2)
    assert result.ok is not fails
    assert ran[:2] == ["pre 0", "post 0"]
    assert (counted, recorded, await _counted(app)) == ([before], [1], before + 1)
    (record,) = records(app, result.invocation_id)
    assert (record["traceId"], record["status"]) == (result.trace_id, "ERROR" if fails else "SUCCESS")
    assert result.document()["telemetry_refs"] == [f"trace:{record['traceId']}"]


FAULTS = ["metrics", "alerts", "span", "trace", "event", "listener"]


@pytest.mark.proves("LIFE-02")
@pytest.mark.parametrize("key", [None, "k"], ids=["read", "write"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_in_telemetry_linking_or_the_last_event_leaves_the_end_of_a_call_as_it_is_on_record(
    home: Path, monkeypatch: pytest.MonkeyPatch, fault: str, key: str | None
) -> None:
    """They come after the record: what it says is what the caller is told, once, and nothing runs a second time."""
    faults: list[str] = []

    def broken(*_: Any, **__: Any) -> Any:
        faults.append(fault)
        raise ValueError("a fault was put in here")

    def hear(event: Event) -> None:
        heard.append(event.type)
        if fault == "listener" and event.type == "tool.result.created":
            broken()

    def make(**facts: Any) -> Event:
        return broken() if facts["type"] == "tool.result.created" else Event(**facts)

    heard: list[str] = []
    async with Interlock.open(home, housekeeping=False, trace_ratio=1.0) as app:
        await admit(app, sample.add, sample.increment)
        observer, tracer = app.gateway.observer, app.gateway.telemetry.tracer
        assert tracer is not None
        assert (await app.call("demo.add", {"a": 1, "b": 2})).ok  # what takes long the first time does not count
        app.listen(hear)
        owner, name = {
            "metrics": (observer, "_count"), "alerts": (app.gateway.telemetry.alerts, "look"),
            "span": (Recording, "cost"), "trace": (Recording, "end"),
            "event": (observe, "Event"), "listener": (observer, "listeners"),
        }[fault]  # fmt: skip
        if fault == "alerts":
            app.gateway.telemetry.alerts.due = 0.0
        if fault == "span":
            # The first time it is set as the span begins, the second time when the call has ended.
            sets: list[float] = []

            def set_cost(_: Recording, cost: float) -> None:
                sets.append(cost)
                if len(sets) == 2:
                    broken()

            monkeypatch.setattr(Recording, "cost", property(lambda _: 0.0, set_cost))
        elif fault != "listener":
            monkeypatch.setattr(owner, name, make if fault == "event" else broken)
        tool, arguments = ("demo.add", {"a": 1, "b": 2}) if key is None else ("demo.increment", {"name": "a"})
        result = await app.call(tool, arguments, key=key)
        assert faults == [fault]
        assert (result.state, result.value) == ("succeeded", 3 if key is None else 1)
        assert result.document()["telemetry_refs"] == [f"trace:{result.trace_id}"]
        (record,) = records(app, result.invocation_id)
        assert (record["status"], record["states"][-1]) == ("SUCCESS", "succeeded")
        last = ["tool.invocation.succeeded", *([] if fault == "event" else ["tool.result.created"])]
        assert heard[-len(last) :] == last
        assert "tool.invocation.failed" not in heard
        monkeypatch.undo()
        if key is not None:
            assert (await app.call(tool, arguments, key=key)).replayed
            assert sample.world.counters == {"a": 1}


@pytest.mark.proves("LIFE-02")
async def test_a_fault_in_counting_a_fast_read_leaves_its_end_as_it_is_on_record(
    app: Interlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await app.call("demo.add", {"a": 1, "b": 2})).ok  # which is decided about, so that the next may be fast
    faults: list[str] = []

    def broken(_: Any, tool: Any, __: float) -> None:
        faults.append(tool.ref)
        raise ValueError("a fault was put in here")

    monkeypatch.setattr(Metrics, "read", broken)
    result = await app.call("demo.add", {"a": 1, "b": 2})
    assert (faults, result.state, result.value) == (["demo.add@1.0.0"], "succeeded", 3)
    (record,) = records(app, result.invocation_id)
    assert record["status"] == "SUCCESS"


async def _counted(app: Interlock) -> int:
    """How many calls the metrics have counted."""
    samples = await render(app)
    return int(sum(samples.get("tool_invocation_count", {}).values()))

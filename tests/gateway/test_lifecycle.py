"""The six phases, seen from outside: what every call leaves behind, whatever becomes of it."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Annotated, Any

import hypothesis.strategies as st
import orjson
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from interlock import Caller, Context, Failure, Field, Hook, HookResult, Interlock, Request, Seen, tool
from interlock.api.service import Service
from interlock.audit.chain import verify
from interlock.call.phases import Granted
from interlock.contract.standard import ToolError, ToolResult
from interlock.contract.standard.states import HISTORY, MOVES, STATES, TERMINAL, State, Trail
from interlock.executors.isolated import IsolatedExecutor
from interlock.executors.site import make_executors
from interlock.gateway import finish, validate
from interlock.gateway.authorize import Authorizer
from interlock.gateway.execution.credentials import Credentials
from interlock.gateway.execution.reserve import Reservations
from interlock.gateway.hooks import Hooks
from interlock.gateway.results import map_output, record_failure, replay
from interlock.gateway.results.outputs import Outputs
from interlock.gateway.results.record_success import SuccessWriter
from interlock.registry.catalog import Catalog
from tests import sample, warm
from tests.sample import world
from tests.support import isolated_tools as cell
from tests.support import source
from tests.support.calls import SIX, admit, publish, records, turn, until
from tests.support.executors import site
from tests.support.stores import bury, lives


@pytest.fixture
async def app(home: Path) -> AsyncGenerator[Interlock]:
    """One that leaves the calls of dead processes to others."""
    async with Interlock.open(home, housekeeping=False) as opened:
        for one in sample.TOOLS:
            opened.catalog.attach(one)
        yield opened


@pytest.mark.part_of("LIFE-01", rest="composites, sagas and fallbacks, which do not exist yet")
async def test_a_successful_call_goes_through_all_six_phases_in_order(app: Interlock) -> None:
    result = await app.call("demo.add", a=1, b=2)
    assert result.unwrap() == 3
    (record,) = records(app, result.invocation_id)
    assert record["phases"] == SIX
    assert record["states"] == ["planned", "selected", "arguments_ready", "running", "succeeded"]


@pytest.mark.part_of("LIFE-01", rest="composites, sagas and fallbacks, which do not exist yet")
async def test_an_executor_runs_nothing_without_the_gateways_own_grant(app: Interlock) -> None:
    gateway = app.gateway
    checked = await gateway.checked(app.request("demo.increment", {"name": "a"}, key="k"))
    granted = await gateway._authorizer.authorize(checked)  # pyright: ignore[reportPrivateUsage]
    assert isinstance(granted, Granted)
    others = make_executors(site(app.clock))
    assert len(others) == 3
    for executor in others.values():
        with pytest.raises(Failure) as refused:
            await executor.run(granted, None)
        assert refused.value.code == "E3000"
        await executor.close()
    assert world.runs == 0


@pytest.mark.part_of("LIFE-01", rest="composites, sagas and fallbacks, which do not exist yet")
def test_only_authorize_makes_grants_and_only_execute_runs_executors() -> None:
    """A static look at the whole package: no other place grants a call, takes it for granted or calls an executor."""
    makers: set[str] = set()
    runners: set[str] = set()
    for file, node in source.nodes_with("grant", "Granted", "executor"):
        if isinstance(node, ast.Attribute) and node.attr == "grant" and isinstance(node.ctx, ast.Store):
            makers.add(file)
        if not isinstance(node, ast.Call):
            continue
        name = source.called(node)
        if name == "cast" and ast.unparse(node.args[0]) == "'Granted'":
            makers.add(file)
        if "executor" in name and name.endswith((".run", ".execute")):
            runners.add(file)
    assert makers == {"call/phases.py", "gateway/authorize.py"}  # the former sets none
    assert runners == {"gateway/execution/run_tool.py"}


@pytest.mark.proves("LIFE-08")
@pytest.mark.parametrize(
    ("tool", "arguments", "options", "code", "state"),
    [
        ("demo.nothing", {}, {}, "E3101", "failed"),
        ("demo.add@^9.0.0", {"a": 1}, {}, "E3102", "failed"),
        ("demo.add", {"a": "x"}, {}, "E3301", "validation_failed"),
        ("demo.add", {"a": "1.5"}, {}, "E3302", "validation_failed"),
        ("demo.add", {"a": float("nan")}, {}, "E3004", "schema_parse_failed"),
        ("demo.increment", {"name": "a"}, {}, "E3307", "validation_failed"),
        ("demo.unsteady", {"name": "a"}, {"key": "k", "fails": Failure("E3502")}, "E3502", "failed"),
        ("demo.unsteady", {"name": "a"}, {"key": "k", "fails": ValueError("boom")}, "E3401", "failed"),
        ("demo.add", {"a": 1}, {"caller": Caller(id="other:x")}, None, "succeeded"),
    ],
)
async def test_every_outcome_is_one_terminal_result_with_one_record(
    app: Interlock, tool: str, arguments: dict[str, Any], options: dict[str, Any], code: str | None, state: State
) -> None:
    fails = options.pop("fails", None)
    if fails is not None:
        sample.flaky.failures = [fails]
    events: list[str] = []
    app.listen(lambda event: events.append(event.type))
    result = await app.call(tool, arguments, **options)
    assert result.state == state
    assert (None if result.error is None else result.error.code) == code
    (record,) = records(app, result.invocation_id)
    assert record["states"][-1] == state
    assert events.count("tool.result.created") == 1
    document = result.document()
    ToolResult.parse(document)
    if result.error is not None:
        ToolError.parse(document["error"])


@pytest.mark.proves("AUDIT-01")
async def test_a_thousand_mixed_calls_leave_a_thousand_closing_records(app: Interlock) -> None:
    await admit(app, lingers, breaks)
    app.hook(Hook(id="no", when="pre", tools="demo.shout", run=lambda _: HookResult(permission="deny")))

    async def one(index: int) -> str:
        kind = index % 9
        if kind == 0:
            result = await app.call("demo.add", a=index)
        elif kind == 1:
            result = await app.call("demo.add", a="nonsense")
        elif kind == 2:
            result = await app.call("demo.nothing")
        elif kind == 3:
            result = await app.call("demo.increment", name="a", key=f"k{index // 18}")
        elif kind == 4:
            result = await app.call("demo.send", to="x", key=f"s{index}")
        elif kind == 5:
            result = await app.call("demo.shout", text="x")
        elif kind == 6:
            result = await app.call("demo.breaks")
        elif kind == 7:
            result = await app.call("demo.lingers", timeout_s=0.01)
        else:
            result = await app.call("demo.increment", name="a", dry_run=True)
        return result.invocation_id

    # A hundred at once, so that a busy machine answers each within its five seconds.
    ids = [id_ for start in range(0, 1000, 100) for id_ in await asyncio.gather(*map(one, range(start, start + 100)))]
    waiting = records(app, kind="pending")
    closed = [*records(app), *waiting]
    assert sorted(record["call"] for record in closed) == sorted(ids)
    assert all(record["states"][-1] == "awaiting_approval" for record in waiting)
    fields = {
        "timestamp", "traceId", "callerId", "agentId", "toolId", "version", "operation", "inputHash", "outputSummary",
        "mutationClass", "sideEffects", "authDecision", "approvalTicketId", "latencyMs", "status", "errorCode",
    }  # fmt: skip
    assert all(fields <= record.keys() for record in records(app))
    assert {record["status"] for record in records(app)} == {"SUCCESS", "ERROR", "TIMEOUT"}
    assert {record["authDecision"] for record in closed} == {"ALLOW", "DENY", "REQUIRES_APPROVAL", None}
    codes = Counter(record.get("error_code") for record in records(app))
    # Of one caller, a hundred calls wait for a person at most.
    assert set(codes) == {None, "E3003", "E3101", "E3206", "E3301", "E3401", "E3402"}
    assert all(count >= 111 for code, count in codes.items() if code != "E3003")
    assert {record["source"] for record in records(app)} == {"compute", "preview", "replay", "synthetic"}
    # No note of a read is left behind.
    assert app.gateway.runner.active.started.used == {}


READER = """
import asyncio, sys
from interlock import Interlock
from tests.gateway.test_lifecycle import lingers

async def main(home):
    async with Interlock.open(home, housekeeping=False) as app:
        app.catalog.attach(lingers)
        await app.call("demo.lingers")

asyncio.run(main(sys.argv[1]))
"""


@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
async def lingers() -> str:
    """Read for ever."""
    await asyncio.Event().wait()
    return "never"


@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
async def breaks() -> str:
    """Fail whenever it is called."""
    raise ValueError("it failed")


@pytest.mark.proves("LIFE-08")
async def test_a_read_whose_process_was_killed_is_closed_as_failed_by_the_next(app: Interlock, home: Path) -> None:
    await app.journal.commit(publish(lingers))
    app.catalog.attach(lingers)
    with warm.start(["-c", READER, str(home)], os.environ, Path(__file__).parents[2], python=True):  # and kill it
        await _noted(app, 1)
    bury(app.home, *(one for one in lives(app.home) if one != app.instance.id))
    (begun,) = records(app, kind="started")
    own = app.gateway.with_id(app.request("demo.lingers"))
    mine = asyncio.create_task(app.gateway.invoke(own))
    await _noted(app, 2)
    for _ in range(2):  # and once is enough
        async with Interlock.open(home, housekeeping=False):
            pass
    (closed,) = records(app, begun["call"])
    assert (closed["status"], closed["error_code"], closed["states"][-1]) == ("ERROR", "E3404", "failed")
    assert (closed["inputHash"], closed["callerId"]) == (begun["inputHash"], begun["callerId"])
    # One whose process lives is left alone, and ends by itself.
    assert records(app, own.id) == []
    assert await app.cancel(own.id or "") == "canceled"
    assert (await mine).state == "canceled"
    assert len(records(app, own.id)) == 1
    assert app.journal.reader.all("SELECT 1 FROM fact WHERE name LIKE 'begun:%'") == []


KILLED = """
import asyncio, sys
from interlock import Interlock
from interlock.gateway.execution import active_calls
from tests.gateway import test_lifecycle

active_calls.NOTE_AFTER_S = float("inf")  # however slow the machine, none has a record of its start

async def main(home, name, options):
    async with Interlock.open(home, housekeeping=False) as app:
        app.catalog.attach(getattr(test_lifecycle, name))
        if options:  # one that has ended is left as it is
            await app.call(f"demo.{name}", seconds=0)
        await app.call(f"demo.{name}", seconds=3600, **({"session": "s"} if options == "session" else {}))

asyncio.run(main(*sys.argv[1:]))
"""
Seconds = Annotated[float, Field(description="how long", examples=[1])]


def _runs(seconds: float) -> None:
    if seconds:
        print("runs", flush=True)


@tool(version="1.0.0", mutation_class="read_only", namespace="demo", timeout_class="long_running")
async def awaits(seconds: Seconds) -> str:
    """Say that it runs, and wait."""
    _runs(seconds)
    await asyncio.sleep(seconds)
    return "done"


@tool(version="1.0.0", mutation_class="read_only", namespace="demo", timeout_class="long_running")
def blocks(seconds: Seconds) -> str:
    """Say that it runs, and block a thread."""
    _runs(seconds)
    time.sleep(seconds)
    return "done"


@tool(version="1.0.0", mutation_class="read_only", namespace="demo", external_io=False)
async def computes(seconds: Seconds) -> str:
    """Say that it runs, and compute on the event loop."""
    _runs(seconds)
    time.sleep(seconds)  # noqa: ASYNC251 - it is to hold the loop
    return "done"


@pytest.mark.proves("LIFE-08")
@pytest.mark.parametrize("options", ["", "again", "session"])
@pytest.mark.parametrize("name", ["awaits", "blocks", "computes"])
async def test_a_read_that_is_killed_as_soon_as_it_runs_is_closed_as_failed_by_the_next_process(
    app: Interlock, home: Path, name: str, options: str
) -> None:
    """The first read of a kind takes the regular phases, as does one with a session. The second takes the fast path."""
    await app.journal.commit(publish({"awaits": awaits, "blocks": blocks, "computes": computes}[name]))
    words = ["-c", KILLED, str(home), name, options]
    with warm.start(words, os.environ, Path(__file__).parents[2], python=True) as process:  # and kill it
        assert await asyncio.to_thread(process.stdout.readline) == b"runs\n"
    bury(app.home, *(one for one in lives(app.home) if one != app.instance.id))
    before = records(app)
    heard: list[tuple[str, str]] = []
    for _ in range(2):  # and once is enough
        async with Interlock.open(home, housekeeping=False) as opened:
            # Nobody could listen before the data directory was open: the first who does hears of it.
            await opened.journal.commit(lambda _: None)
            opened.listen(lambda event: heard.append((event.invocation_id, event.type)))
            last = records(opened)[-1]["call"]
            ToolResult.parse(result := (await Service(opened).calls.status(last, opened.caller))["result"])
            assert (result["invocation_id"], result["error"]["error_code"]) == (last, "E3404")
    assert records(app, kind="started") == []
    closed = [one for one in records(app) if one not in before]
    if not options:
        assert before == []
    else:
        assert [one["status"] for one in before] == ["SUCCESS"]
    (failed,) = closed
    about = ("status", "error_code", "source", "toolId", "version", "outputSummary")
    assert [failed[one] for one in about] == ["ERROR", "E3404", "synthetic", f"demo.{name}", "1.0.0", None]
    assert (failed["states"][-1], failed.get("session")) == ("failed", "s" if options == "session" else None)
    assert failed["inputHash"] == hashlib.sha256(b'{"seconds":3600}').hexdigest()
    assert failed["callerId"] == app.caller.id
    assert failed["traceId"]
    assert heard == [(failed["call"], "tool.invocation.failed"), (failed["call"], "tool.result.created")]
    assert list(app.home.instances.glob("*.reads")) == []


ANSWERED = """
import asyncio, sys, threading
from interlock import Hook, Interlock
from interlock.store.writer import Writer
from tests.gateway import test_lifecycle

async def main(home, hooked, ends):
    async with Interlock.open(home, housekeeping=False, audit="batched") as app:
        app.catalog.attach(test_lifecycle.awaits)
        if hooked:  # then reads take the regular phases
            app.hook(Hook(id="looks", when="pre", run=lambda _: None))
        assert (await app.call("demo.awaits", seconds=0)).ok
        await app.journal.drain()
        written, writes = threading.Event(), Writer._write
        def held(writer, batch, patience_s, **more):
            if patience_s == 0 and not written.is_set():
                return False  # as if another process held the lock; the thread waits for it
            written.wait()
            return writes(writer, batch, patience_s, **more)
        Writer._write = held  # the disk is slow: nothing is written from here on
        for _ in range(3):
            result = await app.call("demo.awaits", seconds=0)
            assert result.ok
            print(result.invocation_id, flush=True)
        if not ends:
            threading.Event().wait()
        written.set()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.proves("LIFE-08")
@pytest.mark.parametrize("hooked", ["", "hooked"])
@pytest.mark.parametrize("ends", ["", "ends"])
async def test_reads_that_were_answered_before_a_kill_are_recorded_by_the_next_process(
    app: Interlock, home: Path, hooked: str, ends: str
) -> None:
    """In batched mode, where a read is answered before its record is written."""
    await app.journal.commit(publish(awaits))
    words = ["-c", ANSWERED, str(home), hooked, ends]
    with warm.start(words, os.environ, Path(__file__).parents[2], python=True) as process:  # and kill it
        read = process.stdout.readline
        answered = [(await asyncio.to_thread(read)).decode().strip() for _ in range(3)]
        if ends:
            assert await asyncio.to_thread(process.wait, 60) == 0
    bury(app.home, *(one for one in lives(app.home) if one != app.instance.id))
    assert [len(records(app, one)) for one in answered] == [1 if ends else 0] * 3
    for _ in range(2):  # and once is enough
        async with Interlock.open(home, housekeeping=False):
            pass
    for one in answered:
        (closed,) = records(app, one)
        assert (closed["status"], closed["states"][-1], closed["toolId"]) == ("SUCCESS", "succeeded", "demo.awaits")
    assert len(records(app)) == 4
    assert verify(app.home).intact
    assert list(app.home.instances.glob("*.reads")) == []


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("audit", ["batched", "durable"])
async def test_a_caller_who_is_alone_is_answered_before_the_record_in_batched_mode_alone(
    home: Path, audit: str, hooked: bool
) -> None:
    async with Interlock.open(home, housekeeping=False, audit=audit) as app:
        app.catalog.attach(sample.add)
        await app.journal.commit(publish(sample.add))
        if hooked:  # then reads take the regular phases
            app.hook(Hook(id="looks", when="pre", run=lambda _: None))
        for number in range(3):
            await app.journal.drain()
            await turn()  # the first record of a turn of the loop may be written where it comes up
            result = await app.call("demo.add", a=number, b=1)
            assert len(records(app, result.invocation_id)) == (0 if audit == "batched" else 1)
            await app.journal.drain()
            assert len(records(app, result.invocation_id)) == 1


async def test_an_answer_without_room_for_its_note_waits_for_its_record(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Interlock.open(home, housekeeping=False, audit="batched") as app:
        app.catalog.attach(sample.add)
        await app.journal.commit(publish(sample.add))
        started = app.gateway.runner.active.started
        part = 2000  # which has room for two closing records
        monkeypatch.setattr("interlock.store.started_reads.PART", part)
        monkeypatch.setattr(
            "interlock.store.started_reads.PARTS", 2
        )  # and the last is for records that cannot be written
        for number in range(3):
            result = await app.call("demo.add", a=number, b=1)
            assert (started.expected, result.ok) == (1, True)
            await app.journal.drain()
            await until(lambda: not started.expected)
        results = [await app.call("demo.add", a=number, b=2) for number in range(3)]
        # The third waited for its record, which was written with those of the first two.
        assert (started.expected, [len(records(app, one.invocation_id)) for one in results]) == (0, [1, 1, 1])
        monkeypatch.setattr("interlock.store.started_reads.PART", 500)  # and for none
        started.close()
        result = await app.call("demo.add", a=9, b=1)
        assert (started.expected, len(records(app, result.invocation_id))) == (0, 1)


async def test_a_read_that_has_ended_leaves_no_note(app: Interlock) -> None:
    for number in range(3):  # the first takes the regular phases, the others the fast path
        assert (await app.call("demo.add", a=number, b=1)).ok
        assert app.gateway.runner.active.started.used == {}
    assert app.gateway.runner.active.started.memory is not None


async def test_a_read_that_finds_no_room_for_its_note_is_noted_in_the_journal(
    app: Interlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlock.store.started_reads.SLOTS", 1)
    monkeypatch.setattr("interlock.gateway.execution.active_calls.NOTE_AFTER_S", float("inf"))
    await app.journal.commit(publish(lingers))
    app.catalog.attach(lingers)
    tasks: list[asyncio.Task[Any]] = []
    for count in (0, 1):
        request = app.gateway.with_id(app.request("demo.lingers"))
        tasks.append(asyncio.create_task(app.gateway.invoke(request)))
        await until(lambda call=request.id or "": app.gateway.runner.active.get(call))
        await _noted(app, count)
        assert len(records(app, kind="started")) == count
        await app.journal.drain()
    (noted,) = records(app, kind="started")
    assert noted["call"] == request.id
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(records(app)) == 2
    assert app.gateway.runner.active.started.used == {}


@pytest.mark.parametrize("damage", [b"", b"x", b"\1" * 4096, b"\1\3\0\0\0[1]" + bytes(2040), b"\0" * 4096])
async def test_notes_that_nobody_wrote_so_are_passed_over(app: Interlock, home: Path, damage: bytes) -> None:
    before = records(app)
    (app.home.instances / "01M7JQ9AJG6CC9359201E27AFF.reads").write_bytes(damage)
    async with Interlock.open(home, housekeeping=False):
        pass
    assert records(app) == before
    assert list(app.home.instances.glob("*.reads")) == []


async def test_notes_that_cannot_be_read_stay(app: Interlock, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = app.home.instances / "01M7JQ9AJG6CC9359201E27AFF.reads"
    path.symlink_to(path)
    async with Interlock.open(home, housekeeping=False):
        pass
    assert path.is_symlink()
    assert "cannot be read" in caplog.text


async def test_without_a_file_for_notes_reads_are_noted_in_the_journal_and_that_is_said_once(
    app: Interlock, caplog: pytest.LogCaptureFixture
) -> None:
    (app.home.instances / f"{app.instance.id}.reads").mkdir()
    for number in range(3):
        assert (await app.call("demo.add", a=number, b=1)).ok
    assert caplog.text.count("reads are noted in the journal") == 1
    assert [one["status"] for one in records(app)] == ["SUCCESS"] * 3
    assert len(records(app, kind="started")) == 3


async def _noted(app: Interlock, count: int) -> None:
    """Wait until so many reads are on record as begun, by whatever process."""
    async with asyncio.timeout(60):
        while len(records(app, kind="started")) < count:
            await app.journal.commit(lambda _: None)


@pytest.mark.proves("LIFE-08")
@pytest.mark.parametrize("audit", ["batched", "durable"])
async def test_a_caller_that_leaves_while_the_end_is_written_leaves_one_end(home: Path, audit: str) -> None:
    async with Interlock.open(home, housekeeping=False, audit=audit) as app:
        for one in (sample.add, sample.increment):
            app.catalog.attach(one)
        for turns in range(1, 12):
            request = app.gateway.with_id(app.request("demo.add", {"a": turns}))
            again = app.gateway.with_id(app.request("demo.increment", {"name": "a"}, key="k"))
            for one in (request, again):
                task = asyncio.create_task(app.gateway.invoke(one))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await app.journal.drain()
                assert len(records(app, one.id)) == 1, turns


async def test_the_short_closing_record_says_what_the_long_one_says(app: Interlock) -> None:
    plain = await app.call("demo.add", a=1, b=2)
    richer = await app.call("demo.add", a=1)
    (short,), (long,) = records(app, plain.invocation_id), records(app, richer.invocation_id)
    assert long.keys() - short.keys() == {"inputMutations"}
    own = {"call", "timestamp", "traceId", "inputHash", "latencyMs", "inputMutations"}
    assert {k: v for k, v in short.items() if k not in own} == {k: v for k, v in long.items() if k not in own}


@pytest.mark.proves("LIFE-03")
async def test_a_request_is_refused_without_a_caller_and_filled_up_otherwise(app: Interlock) -> None:
    nobody = await app.gateway.invoke(Request(tool="demo.add", arguments={"a": 1}, caller=None))
    assert nobody.error is not None
    assert nobody.error.code == "E3212"
    traced = await app.call("demo.add", a=1, b=1, trace_id="4bf92f3577b34da6a3ce929d0e0e4736", native={"id": 7})
    assert traced.trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert (await app.call("demo.add", a=1)).trace_id != ""
    (record,) = records(app, traced.invocation_id)
    assert record["native"] == {"id": 7}
    assert record["callerId"].startswith("local:")
    hostile = await app.call("demo.add", a=1, trace_id='"},{"')
    assert hostile.ok
    assert hostile.trace_id != '"},{"'


class Lifecycle(RuleBasedStateMachine):
    """Whatever is asked of a trail, it stays within the table and ends once."""

    def __init__(self) -> None:
        super().__init__()
        self.trail = Trail()

    @rule(state=st.sampled_from(STATES))
    def ask(self, state: State) -> None:
        before = self.trail.state
        try:
            self.trail.move(state)
        except Failure:
            assert state not in MOVES[before]
            assert self.trail.state == before
        else:
            assert state in MOVES[before]

    @precondition(lambda self: self.trail.ended)  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType]
    @rule(state=st.sampled_from(STATES))
    def ends_once(self, state: State) -> None:
        with pytest.raises(Failure):
            self.trail.move(state)
        assert sum(one in TERMINAL for one in self.trail.states) == 1


TestLifecycle = pytest.mark.proves("LIFE-04")(Lifecycle.TestCase)


def test_every_state_is_reachable_and_every_end_has_a_history() -> None:
    reached: set[State] = {"planned"}
    while True:
        more = set[State]().union(*(MOVES[state] for state in reached)) - reached
        if not more:
            break
        reached |= more
    assert reached == set(STATES)
    assert set(HISTORY) == TERMINAL


@pytest.mark.proves("LIFE-04")
@given(order=st.permutations(["cancel", "finish", "cancel"]))
def test_cancel_and_completion_in_any_order_leave_one_terminal_state(order: list[str]) -> None:
    async def scenario() -> None:
        import tempfile

        world.gate = asyncio.Event()
        with tempfile.TemporaryDirectory() as directory:
            async with Interlock.open(directory) as app:
                await app.journal.commit(publish(sample.increment))
                app.catalog.attach(sample.increment)
                request = app.gateway.with_id(app.request("demo.increment", {"name": "a"}, key="k"))
                task = asyncio.create_task(app.gateway.invoke(request))
                started = asyncio.Event()
                app.listen(lambda event: started.set() if event.type == "tool.invocation.started" else None)
                await started.wait()
                await asyncio.sleep(0)
                for step in order:
                    if step == "cancel":
                        await app.cancel(request.id or "")
                    else:
                        world.gate.set()
                    await asyncio.sleep(0)
                result = await task
                closing = records(app, request.id)
                assert len(closing) == 1
                assert closing[0]["states"][-1] == result.state
                assert result.state in ("succeeded", "canceled")
        world.gate = None

    asyncio.run(scenario())


STEPS: dict[str, tuple[Any, str]] = {
    "resolve": (Catalog, "at_hand"),
    "parse": (validate, "check_input"),
    "pre-hooks": (Hooks, "before"),
    "permission": (Authorizer, "authorize"),
    "queue": (Reservations, "reserve"),
    "credentials": (Credentials, "lend_to"),
    "sandbox": (IsolatedExecutor, "run"),
    "map": (map_output, "map_output"),
    "withholding": (Outputs, "redact"),
    "post-hooks": (Hooks, "after"),
    "redaction": (Hooks, "redact_outputs"),
    "persistence": (SuccessWriter, "write"),
}
# What is withheld from hooks is withheld before them, and what they emit is redacted after the last one.
IN_ORDER = [
    "resolve", "parse", "pre-hooks", "permission", "queue", "credentials", "sandbox", "map", "withholding",
    "post-hooks", "redaction", "persistence",
]  # fmt: skip


@pytest.mark.supports("LIFE-06")
@pytest.mark.proves("LIFE-02")
@pytest.mark.parametrize("fault", [None, *IN_ORDER])
async def test_every_step_of_a_sandboxed_write_comes_in_order_and_none_after_one_that_fails(
    app: Interlock, monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    await app.journal.commit(publish(cell.spends))
    app.catalog.attach(cell.spends)
    await app.secrets.set("cell/token", "canary", by="local:test")
    app.hook(Hook(id="looks", when="pre", run=lambda _: None))
    app.hook(Hook(id="looks too", when="post", run=lambda _: None))
    steps: list[str] = []

    def watched(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def taken(*given: Any, **named: Any) -> Any:
            steps.append(name)
            if name == fault:
                raise Failure("E3401", "a fault was put in here")
            return step(*given, **named)

        return taken

    for name, (owner, attribute) in STEPS.items():
        monkeypatch.setattr(owner, attribute, watched(name, getattr(owner, attribute)))
    heard: list[str] = []
    app.listen(lambda event: heard.append(event.type))
    result = await app.call("cell.spends", name="a", key="k")
    assert steps == IN_ORDER[: len(IN_ORDER) if fault is None else IN_ORDER.index(fault) + 1]
    assert result.ok is (fault is None)
    assert heard[-2:] == [f"tool.invocation.{'succeeded' if result.ok else 'failed'}", "tool.result.created"]
    assert len(records(app, result.invocation_id)) == 1


@pytest.mark.proves("LIFE-02")
@pytest.mark.parametrize("outcome", ["success", "failure", "timeout", "replay", "replayed failure"])
async def test_whatever_comes_of_a_call_is_made_into_a_result_once(
    app: Interlock, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    made: list[str] = []
    mapped: list[str] = []

    def counted(into: list[str], make: Callable[..., Any]) -> Callable[..., Any]:
        def one(*given: Any, **named: Any) -> Any:
            into.append(outcome)
            return make(*given, **named)

        return one

    if outcome.startswith("replay"):
        sample.flaky.failures = [ValueError()] if "failure" in outcome else []
        await app.call("demo.unsteady", name="a", key="k")
    for module in (finish, record_failure, replay):
        monkeypatch.setattr(module, "Result", counted(made, module.Result))
    monkeypatch.setattr(map_output, "map_output", counted(mapped, map_output.map_output))
    if outcome in ("failure", "timeout"):
        sample.flaky.failures = [ValueError() if outcome == "failure" else Failure("E3402")]
    await app.call("demo.unsteady", name="a", key="k")
    assert (made, mapped) == ([outcome], [outcome] if outcome == "success" else [])


@pytest.mark.proves("LIFE-02")
async def test_the_steps_inside_the_phases_happen_in_order_and_the_output_is_mapped_once(app: Interlock) -> None:
    steps: list[str] = []
    app.listen(lambda event: steps.append(event.type))
    app.hook(Hook(id="before", when="pre", run=lambda seen: steps.append("pre")))
    app.hook(Hook(id="after", when="post", run=lambda seen: steps.append("post")))
    await app.call("demo.add", a=1, b=2)
    assert steps == [
        "tool.invocation.planned", "tool.invocation.selected", "tool.invocation.arguments_ready",
        "tool.hook.pre.started", "pre", "tool.hook.pre.completed", "tool.permission.decided",
        "tool.invocation.started", "tool.hook.post.started", "post", "tool.hook.post.completed",
        "tool.invocation.succeeded", "tool.result.created",
    ]  # fmt: skip


WALK: list[str] = []


@tool(version="1.0.0", mutation_class="read_only", namespace="demo", external_io=False, aliases=["wander"])
async def walks(
    ctx: Context,
    far: Annotated[int, Field(description="how far", examples=[2])],
    slow: Annotated[bool, Field(description="whether slowly", examples=[True])] = True,
) -> int:
    """Walk some way."""
    WALK.append(f"execute {far} {slow} {ctx.remaining_s > 0} {ctx.cancelled}")
    ctx.progress("half way", percent=50)
    ctx.modify_context(place="away")
    if far == 13:
        raise ValueError("a fault of the tool")
    return far


@walks.check
def _(far: int, slow: bool) -> list[str]:
    WALK.append("check")
    return ["nobody walks so far"] if far == 99 else []


@walks.preflight
async def _(far: int, slow: bool) -> list[str]:
    WALK.append("preflight")
    return ["there is no way"] if far == 98 else []


@pytest.mark.proves("LIFE-02")
@pytest.mark.parametrize(
    ("far", "code"), [("2", None), ("99", "E3308"), ("98", "E3308"), ("13", "E3401"), ("12", "E3206")]
)
async def test_a_call_by_alias_is_checked_shown_to_hooks_run_reported_and_linked_in_order(
    app: Interlock, far: str, code: str | None
) -> None:
    """The value comes as text, and hooks see the number: the observable input is made before them."""
    await admit(app, walks)
    WALK.clear()

    def seen(name: str) -> Callable[[Seen], HookResult | None]:
        def look(shown: Seen) -> HookResult | None:
            WALK.append(f"{name} {dict(shown.input)}")
            return HookResult(permission="deny") if (name, far) == ("pre", "12") else None

        return look

    for when in ("pre", "post", "failure"):
        app.hook(Hook(id=when, when=when, run=seen(when)))
    app.listen(lambda event: WALK.append(event.type))
    result = await app.call("wander", far=far)
    input_shown = {"far": int(far), "slow": True}
    found = ["tool.invocation.planned", "tool.invocation.selected"]
    checked = ["check"] if far == "99" else ["check", "preflight"]
    before = ["tool.invocation.arguments_ready", "tool.hook.pre.started", f"pre {input_shown}"]
    decided = ["tool.hook.pre.completed", "tool.permission.decided"]
    run = ["tool.invocation.started", f"execute {far} True True False"]
    end = f"{'post' if code is None else 'failure'} {input_shown}"  # a call that was not run has neither
    steps = {
        "2": [*found, *checked, *before, *decided, *run, end],
        "99": [*found, *checked],
        "98": [*found, *checked],
        "12": [*found, *checked, *before, *decided],
        "13": [*found, *checked, *before, *decided, *run, end],
    }[far]
    taken = [one for one in WALK if one in set(steps)]
    assert taken == steps, WALK
    assert not [one for one in WALK if one.split()[0] in ("post", "failure", "execute", "check") and one not in steps]
    assert WALK[-1] == "tool.result.created"
    assert ("tool.invocation.progress" in WALK) == (far in ("2", "13"))
    assert (None if result.error is None else result.error.code) == code
    assert result.tool == "demo.walks@1.0.0"
    (record,) = records(app, result.invocation_id)
    assert (record["toolId"], record.get("error_code")) == ("demo.walks", code)
    document = result.document()
    assert document["telemetry_refs"] == [f"trace:{result.trace_id}"]
    assert document["metadata"].get("context_modifiers") == ({"place": "away"} if far in ("2", "13") else None)


@pytest.mark.supports("VALID-01")
@pytest.mark.proves("LIFE-05")
@given(arguments=st.fixed_dictionaries({"a": st.integers(-99, 99) | st.integers(-99, 99).map(str)}))
def test_replaying_the_recorded_mutations_on_the_model_input_gives_the_call_input(arguments: dict[str, Any]) -> None:
    async def scenario() -> None:
        import tempfile

        with tempfile.TemporaryDirectory() as directory:
            async with Interlock.open(directory) as app:
                await app.journal.commit(publish(sample.add))
                app.catalog.attach(sample.add)
                app.hook(Hook(id="adds", when="pre", run=lambda s: HookResult(updated_input={**s.input, "b": 7})))
                gateway = app.gateway
                sent = dict(arguments)
                checked = await gateway.checked(app.request("demo.add", sent))
                replayed = orjson.loads(checked.model_input)
                for change in checked.more.mutations:
                    replayed[change.pointer.removeprefix("/")] = change.after
                assert replayed == checked.input
                assert sent == arguments
                assert {change.source for change in checked.more.mutations} >= {"default", "hook:adds"}

    asyncio.run(scenario())


@pytest.mark.proves("LIFE-05", "LIFE-06")
async def test_a_hook_cannot_write_what_it_is_shown(app: Interlock) -> None:
    def vandal(seen: Seen) -> None:
        seen.input["a"] = 99  # pyright: ignore[reportIndexIssue] - the point of the test

    app.hook(Hook(id="vandal", when="pre", run=vandal))
    result = await app.call("demo.add", a=1, b=2)
    assert result.error is not None
    assert result.error.row.error_class == "hook_blocked"


async def _overruns(seen: Seen) -> None:
    await asyncio.Event().wait()


def _raises(seen: Seen) -> None:
    raise RuntimeError("secret detail")


def _stops(seen: Seen) -> HookResult:
    return HookResult(stop="not today")


def _spoils(seen: Seen) -> HookResult:
    return HookResult(updated_input={"a": "nonsense"})


@pytest.mark.proves("LIFE-06")
@pytest.mark.parametrize(
    ("run", "words"), [(_stops, "not today"), (_spoils, "invalid"), (_raises, "failed"), (_overruns, "too long")]
)
async def test_a_hook_that_stops_raises_overruns_or_breaks_the_input_blocks_the_call(
    app: Interlock, run: Any, words: str
) -> None:
    app.hook(Hook(id="guard", when="pre", run=run, timeout_s=0.05 if run is _overruns else 10))
    result = await app.call("demo.increment", name="a", key="k")
    assert result.state == "blocked"
    assert result.error is not None
    assert result.error.code == "E3211"
    assert words in result.error.message
    assert "secret detail" not in str(result.document())
    assert world.runs == 0


@pytest.mark.proves("LIFE-06")
async def test_a_hook_can_forbid_and_ask_but_never_permit(app: Interlock) -> None:
    app.hook(Hook(id="yes", when="pre", tools="demo.send", run=lambda s: HookResult(permission="allow")))
    assert (await app.call("demo.send", to="x", key="k")).pending
    app.hook(Hook(id="no", when="pre", tools="demo.add", run=lambda s: HookResult(permission="deny")))
    denied = await app.call("demo.add", a=1, b=2)
    assert denied.error is not None
    assert denied.error.code == "E3206"
    app.hook(Hook(id="ask", when="pre", tools="demo.increment", run=lambda s: HookResult(permission="ask")))
    assert (await app.call("demo.increment", name="a", key="k")).pending
    assert world.runs == 0


@pytest.mark.proves("LIFE-06")
async def test_hooks_add_context_and_progress_and_see_failures(app: Interlock) -> None:
    progress: list[Any] = []
    seen: list[Seen] = []
    app.hook(
        Hook(id="adds", when="pre", run=lambda s: HookResult(context=("mind the gap",), progress="looking around"))
    )
    app.hook(Hook(id="mourns", when="failure", run=seen.append))  # pyright: ignore[reportArgumentType] - append returns None
    result = await app.call("demo.add", {"a": 1, "b": 2}, on_progress=progress.append)
    told = [(one["hook"], one["output"], one["text"]) for one in result.metadata["hook_outputs"]]
    assert told == [("adds", "progress", "looking around"), ("adds", "context", "mind the gap")]
    assert [(record["message"], record["hook"]) for record in progress] == [("hook `adds`: looking around", "adds")]
    sample.flaky.failures = [Failure("E3502")]
    await app.call("demo.unsteady", name="a", key="k")
    assert [one.error.code for one in seen if one.error] == ["E3502"]


@pytest.mark.proves("LIFE-07", "VALID-01")
async def test_all_faults_are_told_at_once_in_actionable_words(app: Interlock) -> None:
    result = await app.call("demo.increment", {"nmae": "a", "by": "many"})
    assert result.error is not None
    assert result.error.details is not None
    faults = {fault["pointer"]: fault["message"] for fault in result.error.details["faults"]}
    assert faults["/nmae"] == "`nmae` is not a parameter; did you mean `name`?"
    assert faults["/name"] == "missing; for example `a`"
    assert faults["/by"] == "`many` is not a whole number; for example `1`"
    assert set(faults) == {"/nmae", "/name", "/by", "/idempotencyKey"}
    assert len(result.error.details["faults"]) == 4
    assert result.error.row.error_code == "INVALID_INPUT"
    assert records(app, result.invocation_id)[0]["phases"] == ["request", "validate", "return"]
    assert world.runs == 0


@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
async def between(low: sample.Number, high: sample.Number) -> int:
    """A number between two others."""
    world.runs += 1
    return low


@between.check
def _(low: int, high: int) -> list[str]:
    ordered = [] if low <= high else ["low must not be above high"]
    return ordered + ([] if low != 13 else ["13 is not offered"])


@between.preflight
async def _(low: int, high: int) -> list[str]:
    return [] if high != 99 else ["nothing is there"]


@pytest.mark.proves("LIFE-07")
@pytest.mark.parametrize(
    ("low", "high", "faults"),
    [
        (13, 2, ["low must not be above high", "13 is not offered"]),
        (1, 99, ["nothing is there"]),
        (13, 99, ["13 is not offered"]),  # the preflight may read and connect; it sees only input that means something
        (1, 2, None),
    ],
)
async def test_what_a_schema_cannot_say_is_checked_before_anything_is_decided(
    app: Interlock, low: int, high: int, faults: list[str] | None
) -> None:
    await app.journal.commit(publish(between))
    app.catalog.attach(between)
    result = await app.call("demo.between", low=low, high=high)
    (record,) = records(app, result.invocation_id)
    if faults is None:
        assert result.ok
        return
    assert result.error is not None
    assert result.error.details is not None
    assert [fault["message"] for fault in result.error.details["faults"]] == faults
    assert (result.error.row.error_code, world.runs) == ("INVALID_INPUT", 0)
    assert record["phases"] == ["request", "validate", "return"]


@pytest.mark.shows("Python function", "errors")
@pytest.mark.proves("CONTRACT-13")
async def test_what_a_tool_raises_never_shows_a_stack_a_path_or_a_secret(
    app: Interlock, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "sk-live-0123456789abcdef"
    for error in (
        ValueError(f"could not open /etc/interlock/private.key with {secret}"),
        Failure("E3502", f"GET /srv/app/secret.py failed, Authorization: Bearer {secret}"),
        Failure("E3401", 'Traceback (most recent call last):\n  File "/srv/x.py", line 3'),
    ):
        sample.flaky.failures = [error]
        with caplog.at_level(logging.ERROR):
            result = await app.call("demo.unsteady", name="a", key=f"k{id(error)}")
        told = str(result.document())
        assert secret not in told
        assert "/srv" not in told
        assert "/etc/" not in told
        assert "Traceback" not in told
    assert any(getattr(record, "trace_id", None) for record in caplog.records)


async def test_a_tool_that_tries_to_end_the_process_only_ends_its_own_call(app: Interlock) -> None:
    sample.flaky.failures = [SystemExit(3)]  # pyright: ignore[reportAttributeAccessIssue] - on purpose
    result = await app.call("demo.unsteady", name="a", key="k")
    assert result.error is not None
    assert result.error.code == "E3404"
    assert (await app.call("demo.add", a=1)).ok


async def test_the_policy_is_a_file_that_can_be_replaced_and_a_broken_one_denies(app: Interlock, home: Path) -> None:
    assert "write_irreversible" in (home / "policy.cedar").read_text()
    (home / "policy.cedar").write_text('@id("none") forbid (principal, action, resource);')
    app.policy._looked_at = float("-inf")  # pyright: ignore[reportPrivateUsage] - do not wait for the next look
    denied = await app.call("demo.add", a=1)
    assert denied.error is not None
    assert denied.error.policy_refs == ("none",)
    (home / "policy.cedar").write_text("permit (principal,")
    app.policy._looked_at = float("-inf")  # pyright: ignore[reportPrivateUsage]
    broken = await app.call("demo.add", {"a": 1}, caller=Caller(id="local:x"))
    assert broken.error is not None
    assert broken.error.code == "E3205"

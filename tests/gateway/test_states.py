"""The states of calls: whatever happens to them at once, and wherever their process dies."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import orjson
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from interlock import Context, Effect, Interlock, Preview, tool
from interlock.audit.invocations import invocation_of
from interlock.call.results import Result
from interlock.contract.standard.states import HISTORY, MOVES, STATES, TERMINAL
from interlock.store.homes import home_at
from interlock.testing import FakeClock
from tests import sample, warm
from tests.sample import Name
from tests.support.calls import admit, until
from tests.support.stores import bury

Json = dict[str, Any]
gates: dict[str, asyncio.Event] = {}


@tool(version="1.0.0", mutation_class="read_only", namespace="race")
async def read(ctx: Context, name: Name) -> str:
    """Give parts, then wait for the test."""
    ctx.partial(name)
    ctx.yield_result(name)
    await gates[name].wait()
    return name


@tool(version="1.0.0", mutation_class="write_reversible", namespace="race", effects=[Effect("race:{name}", "UPDATE")])
async def write(ctx: Context, name: Name) -> str:
    """Wait for the test, then change something."""
    await gates[name].wait()
    ctx.effect(f"race:{name}", "UPDATE")
    return name


@write.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


@write.compensate
async def _(result: str) -> None:
    return None


@tool(version="1.0.0", mutation_class="read_only", namespace="race", timeout_class="interactive", external_io=False)
async def quick(name: Name) -> str:
    """Wait for the test in the caller's own task."""
    await gates[name].wait()
    return name


def check(record: Json) -> None:
    """The states of a closed call: only moves of the table, one end, and the history that goes with it."""
    states = record["states"]
    assert states[0] == "planned"
    assert all(after in MOVES[before] for before, after in pairwise(states)), states
    assert [state for state in states if state in TERMINAL] == states[-1:]
    status = {"succeeded": "SUCCESS", "timed_out": "TIMEOUT"}.get(states[-1], "ERROR")
    assert record["status"] == status


# The words of the standard, not the product's own table.
TWENTY = (
    "planned", "selected", "schema_parse_failed", "arguments_ready", "validation_failed", "pre_hooks_running",
    "awaiting_approval", "approved", "denied", "queued", "running", "needs_input", "partial_result",
    "post_hooks_running", "yielded", "succeeded", "failed", "canceled", "timed_out", "blocked",
)  # fmt: skip
ENDS = {
    "schema_parse_failed": "error", "validation_failed": "error", "denied": "error", "succeeded": "success",
    "failed": "error", "canceled": "cancelled", "timed_out": "timeout", "blocked": "error",
}  # fmt: skip


@pytest.mark.proves("LIFE-04")
def test_there_are_twenty_states_and_the_published_table_lists_every_move() -> None:
    assert STATES == TWENTY
    page = (Path(__file__).parents[2] / "docs/reference/states.md").read_text()
    published = set(re.findall(r"^    (\w+) --> (\w+)$", page, re.MULTILINE))
    assert published == {(state, after) for state, moves in MOVES.items() for after in moves}
    assert {state for state in STATES if not MOVES[state]} == TERMINAL == ENDS.keys()
    assert dict(HISTORY) == ENDS


@pytest.mark.proves("LIFE-04")
@pytest.mark.parametrize(
    ("how", "state", "history"),
    [
        ("fine", "succeeded", "success"), ("wrong", "validation_failed", "error"),
        ("no JSON", "schema_parse_failed", "error"), ("unknown", "failed", "error"),
        ("slow", "timed_out", "timeout"), ("cancelled", "canceled", "cancelled"), ("refused", "denied", "error"),
    ],
)  # fmt: skip
async def test_the_history_of_a_call_is_success_error_timeout_or_cancelled(
    home: Path, how: str, state: str, history: str
) -> None:
    if how == "refused":
        (home / "policy.cedar").write_text('@id("none") forbid (principal, action, resource);')
    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app, read, quick)
        gates["a"] = asyncio.Event()
        if how in ("fine", "refused"):
            gates["a"].set()
        name = {"wrong": 7, "no JSON": float("nan")}.get(how, "a")
        options: Json = {"timeout_s": 0.05} if how == "slow" else {}
        request = app.gateway.with_id(
            app.request("race.nothing" if how == "unknown" else "race.read", {"name": name}, **options)
        )
        task = asyncio.create_task(app.gateway.invoke(request))
        if how == "cancelled":
            await until(lambda: app.gateway.runner.active.get(request.id or ""))
            assert await app.cancel(request.id or "") == "canceled"
        result = await task
        document = result.document()
        assert (document["status"], document["history_status"]) == (state, history)


class Races(RuleBasedStateMachine):
    """Calls that are cancelled, run out of time, end and are left by their callers, all at once."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._directory = tempfile.TemporaryDirectory()
        self._clock = FakeClock()
        self._tasks: dict[str, asyncio.Task[Result]] = {}
        self._ids: dict[str, str] = {}
        gates.clear()
        self._run(self._open())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, 120))

    async def _open(self) -> None:
        self._app = await Interlock.open(self._directory.name, clock=self._clock.clock, housekeeping=False)
        await admit(self._app, read, write, quick)

    async def _turns(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    @rule(kind=st.sampled_from(["read", "write", "quick"]), turns=st.integers(0, 30))
    def start(self, kind: str, turns: int) -> None:
        name = f"c{len(self._tasks)}"

        async def begin() -> None:
            gates[name] = asyncio.Event()
            key = name if kind == "write" else None
            request = self._app.gateway.with_id(self._app.request(f"race.{kind}", {"name": name}, key=key))
            self._ids[name] = request.id or ""
            self._tasks[name] = asyncio.get_running_loop().create_task(self._app.gateway.invoke(request))
            await self._turns(turns)

        self._run(begin())

    async def _do(self, what: str, name: str) -> None:
        if what == "finish":
            gates[name].set()
        elif what == "leave":
            self._tasks[name].cancel()
        else:
            reason: Literal["interruption", "discard"] = "discard" if what == "discard" else "interruption"
            await self._app.cancel(self._ids[name], reason)

    @precondition(lambda self: self._tasks)  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType]
    @rule(
        what=st.lists(st.sampled_from(["finish", "leave", "cancel", "discard"]), min_size=1, max_size=3),
        which=st.integers(0, 99), turns=st.integers(0, 5),
    )  # fmt: skip
    def happen(self, what: list[str], which: int, turns: int) -> None:
        name = list(self._tasks)[which % len(self._tasks)]

        async def do() -> None:
            for one in what:
                await self._do(one, name)
                await self._turns(turns)

        self._run(do())

    @precondition(lambda self: self._tasks)  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType]
    @rule(what=st.sampled_from(["nothing", "finish", "cancel", "leave"]), which=st.integers(0, 99))
    def run_out_of_time(self, what: str, which: int) -> None:
        """The deadline of all that run comes, and something else at the same moment."""
        name = list(self._tasks)[which % len(self._tasks)]

        async def pass_time() -> None:
            self._clock.advance(3600)
            if what != "nothing":
                await self._do(what, name)
            await asyncio.wait(self._tasks.values())

        self._run(pass_time())

    def teardown(self) -> None:
        async def end() -> list[Any]:
            for gate in gates.values():
                gate.set()
            results = await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await self._app.journal.drain()
            return results

        try:
            results = self._run(end())
            for name, result in zip(self._tasks, results, strict=True):
                closed = self._app.journal.reader.all(
                    "SELECT body FROM journal WHERE kind = 'closed' AND call = ?", (self._ids[name],)
                )
                assert len(closed) == 1, name
                record = orjson.loads(closed[0][0])
                check(record)
                if isinstance(result, Result):
                    assert result.state == record["states"][-1]
                else:
                    assert isinstance(result, asyncio.CancelledError)
                    assert record["states"][-1] in ("canceled", "succeeded", "timed_out")
            assert self._app.journal.reader.all("SELECT 1 FROM reservation WHERE state = 'executing'") == []
        finally:
            self._run(self._app.close())
            self._loop.close()
            self._directory.cleanup()


TestRaces = pytest.mark.proves("LIFE-04")(Races.TestCase)
TestRaces.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)


# A process that dies

CHILD = """
import asyncio, sys
from interlock import Interlock
from tests import sample
from tests.gateway import test_states as here

async def main(home):
    async with Interlock.open(home, housekeeping=False) as app:
        for one in (sample.increment, sample.send, here.read, here.write):
            app.catalog.attach(one)
        await app.call("demo.increment", name="a", key="done")
        await app.call("demo.send", to="x", key="waits")
        for name in ("r", "w"):
            here.gates[name] = asyncio.Event()
        await asyncio.gather(app.call("race.read", name="r"), app.call("race.write", name="w", key="cut"))

asyncio.run(main(sys.argv[1]))
"""


def invocations(app: Interlock) -> dict[str, Json]:
    """Every call on record, by its tool."""
    rows = app.journal.reader.all("SELECT call, body FROM journal ORDER BY seq")
    told: dict[str, list[Json]] = {}
    for call, body in rows:
        told.setdefault(call, []).append(orjson.loads(body))
    found = [one for records in told.values() if (one := invocation_of(records)) is not None]
    return {one["tool_id"]: one for one in found}


async def _kill_a_process(app: Interlock, home: Path) -> dict[str, Json]:
    """Have another process make calls and kill it in the midst of two; every call as it was committed before that."""
    reached = {
        "demo.increment": "succeeded", "demo.send": "awaiting_approval", "race.read": "running", "race.write": "queued",
    }  # fmt: skip
    with warm.start(["-c", CHILD, str(home)], os.environ, Path(__file__).parents[2], python=True):
        async with asyncio.timeout(120):
            while {tool: one["status"] for tool, one in invocations(app).items()} != reached:
                await app.journal.commit(lambda _: None)
        return invocations(app)


@pytest.mark.proves("LIFE-04")
async def test_after_a_crash_each_call_is_in_the_state_that_was_committed_last(home: Path) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app, read, write)
        committed = await _kill_a_process(app, home)
        assert invocations(app) == committed, "the kill changed nothing that was committed"
    bury(home_at(home))
    async with Interlock.open(home, housekeeping=False) as restarted:
        after = invocations(restarted)
        for one in ("demo.increment", "demo.send"):
            assert after[one] == committed[one], "what had ended, or waits for a person, is as it was"
        for one in ("race.read", "race.write"):
            # The process that restarted goes on from the last committed state, and only there.
            assert after[one]["status"] == "failed"
            assert "failed" in MOVES[committed[one]["status"]]
            ends = [move["state"] for move in after[one]["transitions"] if move["state"] in TERMINAL]
            assert ends == ["failed"]
        unknown = restarted.journal.reader.all("SELECT tool FROM reservation WHERE state = 'unknown'")
        assert unknown == [("race.write",)], "whether it took effect is for a person to say"
    async with Interlock.open(home, housekeeping=False) as again:
        assert invocations(again) == after, "an end never changes"
    assert sample.world.counters == {}, "nothing ran here"

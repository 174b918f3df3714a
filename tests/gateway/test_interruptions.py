"""Interruptions that are easy to get wrong, for fast reads, reads with a context and writes.

A caller that leaves while the journal writes, a tool that cancels itself or times itself out, a first step that blocks,
and the order in which several faults of one call are reported.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interlock import Context, Failure, Hook, Interlock, Seen, Tool, tool
from interlock.audit.chain import verify
from interlock.core.clock import Clock
from interlock.gateway import idempotency
from interlock.gateway.results.record_failure import FailureWriter
from interlock.registry import quarantine
from interlock.store.writer import Writer
from interlock.testing import FakeClock
from tests import sample
from tests.sample import world
from tests.support.calls import admit, code, records, until

# Where a function runs: in its caller's task, or in one of its own.
IN_CALLERS_TASK: dict[str, Any] = {"timeout_class": "interactive", "external_io": False}
IN_OWN_TASK: dict[str, Any] = {"timeout_class": "standard"}
PLACES = pytest.mark.parametrize("place", [IN_CALLERS_TASK, IN_OWN_TASK], ids=["callers-task", "own-task"])
CONTEXTS = pytest.mark.parametrize("with_context", [False, True], ids=["plain", "with-context"])


def read(body: Callable[[], Any], *, with_context: bool = False, **options: Any) -> Tool[..., Any]:
    """An async read that does what `body` does."""

    async def plain() -> str:
        """Do what the test says."""
        return await body()

    async def informed(ctx: Context) -> str:
        """Do what the test says, with a context."""
        return await body()

    function: Callable[..., Any] = informed if with_context else plain
    function.__name__ = "act"
    return tool(version="1.0.0", mutation_class="read_only", namespace="cut", **options)(function)


# The caller leaves while the journal writes


@pytest.mark.parametrize("when", ["before the answer", "with the answer"])
@pytest.mark.parametrize("inline_s", [3600.0, 0.0], ids=["on-the-loop", "writers-thread"])
@pytest.mark.parametrize("which", ["intent", "closing"])
async def test_a_write_whose_caller_leaves_during_a_commit_runs_once_and_its_key_is_not_stuck(
    app: Interlock, monkeypatch: pytest.MonkeyPatch, which: str, inline_s: float, when: str
) -> None:
    """The journal has the answer already, but the task that asked has not seen it."""
    monkeypatch.setattr("interlock.store.journal.INLINE_BELOW_S", inline_s)
    loop, perform, left = asyncio.get_running_loop(), Writer.perform, list[str]()
    request = app.gateway.with_id(app.request("demo.increment", {"name": "a"}, key="k"))

    def leave() -> None:
        if when == "before the answer" and threading.current_thread() is threading.main_thread():
            caller.cancel()
        else:
            loop.call_soon_threadsafe(caller.cancel)

    def performed(unit: Any, transaction: Any) -> Any:
        found = perform(unit, transaction)
        closes = transaction.has("closed", request.id or "")
        if not left and (isinstance(found, idempotency.Reserved) if which == "intent" else closes):
            left.append(which)
            leave()
        return found

    monkeypatch.setattr(Writer, "perform", staticmethod(performed))
    caller = asyncio.create_task(app.gateway.invoke(request))
    with pytest.raises(asyncio.CancelledError):
        await caller
    monkeypatch.undo()
    await app.journal.drain()
    assert left == [which]
    assert len(records(app, request.id)) == 1
    again = await app.call("demo.increment", {"name": "a"}, key="k", timeout_s=5)
    assert (again.unwrap(), again.replayed, world.runs) == (1, which == "closing", 1)
    assert verify(app.home).intact


# The tool and its own task


@PLACES
@CONTEXTS
@pytest.mark.parametrize("turns", [0, 1])
async def test_a_tool_that_raises_a_cancellation_fails_and_its_caller_goes_on(
    app: Interlock, place: dict[str, Any], with_context: bool, turns: int
) -> None:
    async def give_up() -> str:
        for _ in range(turns):
            await asyncio.sleep(0)
        raise asyncio.CancelledError

    await admit(app, read(give_up, with_context=with_context, **place))
    task = asyncio.current_task()
    assert task is not None
    for _ in range(2):
        result = await app.call("cut.act")
        assert (code(result), result.state) == ("E3404", "failed")
        assert task.cancelling() == 0
        assert [record["error_code"] for record in records(app, result.invocation_id)] == ["E3404"]


@PLACES
@CONTEXTS
@pytest.mark.parametrize("caught", [True, False])
async def test_a_tools_own_timeout_cancels_the_tool_and_not_its_caller(
    home: Path, place: dict[str, Any], with_context: bool, caught: bool
) -> None:
    async def give_up() -> str:
        try:
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        except TimeoutError:
            if not caught:
                raise
        return "gave up"

    task = asyncio.current_task()
    assert task is not None
    # On this clock the half second that the tool has is most of a minute, so that a busy machine does not cut it off.
    slow = Clock(monotonic=lambda: time.monotonic() / 100)
    async with Interlock.open(home, clock=slow, housekeeping=False) as app:
        await admit(app, read(give_up, with_context=with_context, **place))
        for _ in range(2):
            result = await app.call("cut.act")
            assert (code(result), result.value) == ((None, "gave up") if caught else ("E3401", None))
            assert task.cancelling() == 0
            await asyncio.sleep(0)


# The first step


@pytest.fixture
async def timed(home: Path) -> AsyncGenerator[tuple[Interlock, FakeClock]]:
    clock = FakeClock()
    async with Interlock.open(home, clock=clock.clock, housekeeping=False) as app:
        app.catalog.attach(sample.add)
        yield app, clock


@CONTEXTS
@pytest.mark.parametrize("waits", [False, True])
async def test_a_first_step_that_blocks_past_the_deadline_is_cut_off_where_it_first_waits(
    timed: tuple[Interlock, FakeClock], with_context: bool, waits: bool
) -> None:
    app, clock = timed

    async def block() -> str:
        clock.advance(3600)
        if waits:
            await asyncio.Event().wait()
        return "late"

    await admit(app, read(block, with_context=with_context, **IN_CALLERS_TASK))
    for _ in range(2):
        result = await app.call("cut.act")
        assert (code(result), result.value) == (("E3402", None) if waits else (None, "late"))


# Several faults at once


LONG = "x" * 5000


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
@pytest.mark.parametrize(
    ("changes", "wanted", "words"),
    [
        ({"tool": "demo.nothing"}, "E3101", "demo.nothing"),
        ({"tool": "demo.nothing", "arguments": {"a": float("nan")}}, "E3004", ""),
        ({"tool": "demo.nothing", "arguments": [1]}, "E3004", "arguments must be an object"),
        ({"tool": "demo.nothing", "caller": None}, "E3212", ""),
        ({"tool": "demo.nothing", "session": LONG}, "E3004", "the names of tools"),
        ({"tool": LONG}, "E3004", "the names of tools"),
        ({"tool": "demo.\ud800"}, "E3004", "valid Unicode"),
        ({"tool": "demo.nothing", "timeout_s": -1.0}, "E3101", ""),
        ({"arguments": {"a": float("nan")}, "timeout_s": -1.0}, "E3004", ""),
        ({"arguments": {"a": "x"}, "timeout_s": -1.0}, "E3004", "a timeout"),
        ({"arguments": {"a": "x"}, "session": LONG}, "E3004", "the names of tools"),
        ({"version": "^9.0.0", "arguments": {"a": float("nan")}}, "E3004", ""),
        ({"version": "^9.0.0", "arguments": {"a": "x"}}, "E3102", ""),
    ],
)
async def test_of_several_faults_the_first_in_the_order_of_the_phases_is_reported(
    app: Interlock, hooked: bool, changes: dict[str, Any], wanted: str, words: str
) -> None:
    assert (await app.call("demo.add", {"a": 1, "b": 2})).ok
    if hooked:
        app.hook(Hook(id="bystander", when="pre", tools="nobody.*", run=lambda seen: None))
    result = await app.gateway.invoke(replace(app.request("demo.add", {"a": 1, "b": 2}), **changes))
    assert code(result) == wanted
    assert result.error is not None
    assert words in result.error.message
    await app.journal.drain()
    (record,) = records(app, result.invocation_id)
    assert record["phases"] == ["request", "return"]
    assert record["error_code"] == wanted


@pytest.mark.parametrize(("arguments", "wanted"), [({"a": float("nan")}, "E3004"), ({"a": "x"}, "E3210")])
async def test_an_input_that_is_no_json_is_reported_before_a_quarantine_and_one_that_does_not_fit_after(
    app: Interlock, arguments: dict[str, Any], wanted: str
) -> None:
    prepared = await app.catalog.prepared("demo.add", None)
    await app.journal.commit(quarantine.impose(prepared.digest, prepared.ref, "a-call", "it lied"))
    await app.gateway.quarantine.look()
    await app.catalog.forget()
    assert code(await app.call("demo.add", arguments)) == wanted


# The caller leaves while a failed call is closed


@pytest.mark.parametrize("times", [1, 2])
async def test_a_failed_call_whose_caller_leaves_during_a_hook_is_closed_and_its_key_is_not_stuck(
    app: Interlock, times: int
) -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def mourn(_: Seen) -> None:
        entered.set()
        await go_on.wait()

    await admit(app, sample.unsteady)
    app.hook(Hook(id="mourns", when="failure", run=mourn, timeout_s=10))
    sample.flaky.failures = [Failure("E3401", "no", retryable=True)]
    request = app.gateway.with_id(app.request("demo.unsteady", {"name": "a"}, key="k"))
    caller = asyncio.create_task(app.gateway.invoke(request))
    await entered.wait()
    for _ in range(times):
        caller.cancel()
        await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await until(lambda: records(app, request.id))
    (closed,) = records(app, request.id)
    assert (closed["error_code"], closed["states"][-1]) == ("E3401", "failed")
    again = await app.call("demo.unsteady", {"name": "a"}, key="k", timeout_s=5)
    assert (again.ok, again.replayed, sample.flaky.runs) == (True, False, 2), again.error
    assert verify(app.home).intact


async def test_a_failed_call_that_is_called_off_while_it_is_closed_says_that_it_failed(
    app: Interlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()
    await admit(app, sample.unsteady)
    real = FailureWriter.fail

    async def slowly(*given: Any) -> Any:
        entered.set()
        await go_on.wait()
        return await real(*given)

    monkeypatch.setattr(FailureWriter, "fail", slowly)
    request = app.gateway.with_id(app.request("demo.unsteady", {"name": 7, "more": 1}, key="k"))
    caller = asyncio.create_task(app.gateway.invoke(request))
    await entered.wait()
    assert app.gateway.cancellation.cancel(request.id or "") == "canceled"
    await asyncio.sleep(0)
    go_on.set()
    result = await caller
    assert (code(result), caller.cancelling()) == ("E3301", 0)
    assert [one["error_code"] for one in records(app, request.id)] == ["E3301"]

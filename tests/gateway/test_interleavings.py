"""Whatever comes between intent and outcome: no effect is doubled or lost, and no outcome overwritten or forgotten."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from interlock import Caller, Context, Failure, Hook, Interlock, Request, Seen
from interlock.api import background
from interlock.audit.chain import verify
from interlock.store.homes import home_at
from interlock.store.port import StoreError, Transaction
from interlock.store.signing import Signer
from interlock.testing import FakeClock
from tests import sample
from tests.sample import Name, world
from tests.support.calls import admit, code, records, slow_write, turn, until, write
from tests.support.stores import busy, impatient


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a caller and see it gone."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


Timed = tuple[Interlock, FakeClock]


@pytest.fixture
async def timed(home: Path) -> AsyncGenerator[Timed]:
    """An Interlock whose time passes when told to."""
    clock = FakeClock()
    async with Interlock.open(home, clock=clock.clock) as app:
        yield app, clock


async def run_out_of_time(timed: Timed, name: str, entered: threading.Event) -> None:
    """A call whose time is up while its tool runs."""
    app, clock = timed
    call = asyncio.create_task(app.call(name, key="k", timeout_s=5))
    await until(entered.is_set)
    clock.advance(6)
    assert code(await call) == "E3402"


# The caller goes away


@pytest.mark.parametrize("restart_safe", [False, True])
async def test_a_caller_who_leaves_while_success_is_being_written_does_not_undo_the_record_of_it(
    app: Interlock, monkeypatch: pytest.MonkeyPatch, restart_safe: bool
) -> None:
    async def pay() -> int:
        """Pay, and say how often."""
        world.runs += 1
        return world.runs

    await admit(app, write(pay, restart_safe=restart_safe))
    real = app.journal.submit

    def submit(unit: Any, early: Any = None) -> Any:
        if world.runs:
            asyncio.get_running_loop().call_soon(caller.cancel)  # the closing is about to be queued
        return real(unit, early)

    monkeypatch.setattr(app.journal, "submit", submit)
    caller = asyncio.create_task(app.call("demo.pay", key="k"))
    with pytest.raises(asyncio.CancelledError):
        await caller
    monkeypatch.undo()
    await app.journal.drain()
    assert [record["states"][-1] for record in records(app)] == ["succeeded"]
    again = await app.call("demo.pay", key="k")
    assert (again.unwrap(), again.replayed, world.runs) == (1, True, 1)


async def test_a_caller_who_leaves_before_the_tool_starts_leaves_no_stuck_key(app: Interlock) -> None:
    caller = asyncio.create_task(app.call("demo.increment", name="a", key="k"))
    await turn()
    await cancelled(caller)
    again = await app.call("demo.increment", {"name": "a"}, key="k", timeout_s=30)
    assert (again.unwrap(), again.replayed) == (1, False)


@pytest.mark.parametrize("turns", range(12))
async def test_whenever_the_caller_leaves_the_effect_is_made_once_or_a_person_is_asked(
    app: Interlock, turns: int
) -> None:
    caller = asyncio.create_task(app.call("demo.increment", name="a", key="k"))
    for _ in range(turns):
        await turn()
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    before = world.runs
    again = await app.call("demo.increment", {"name": "a"}, key="k", timeout_s=30)
    assert code(again) in (None, "E3409")
    assert world.runs == (1 if again.ok else before)
    assert again.replayed == (again.ok and before == 1)


@pytest.mark.parametrize("restart_safe", [False, True])
@pytest.mark.parametrize("how", ["timeout", "cancel"])
async def test_a_write_that_runs_on_in_its_thread_keeps_its_key_until_it_has_ended(
    timed: Timed, how: str, restart_safe: bool
) -> None:
    app, entered = timed[0], threading.Event()
    await admit(app, slow_write(entered, restart_safe=restart_safe))
    if how == "timeout":
        await run_out_of_time(timed, "demo.pay", entered)
    else:
        caller = asyncio.create_task(app.call("demo.pay", key="k"))
        await until(entered.is_set)
        await cancelled(caller)
    assert code(await app.call("demo.pay", key="k")) == "E3409"
    world.release.set()
    await until(lambda: records(app, kind="late"))
    again = await app.call("demo.pay", key="k")
    assert (again.unwrap(), again.replayed, world.runs) == ("paid", True, 1)


# The outcome comes late


@pytest.mark.parametrize("restart_safe", [False, True])
async def test_a_late_outcome_is_not_overwritten_by_the_closing_of_the_call_that_did_not_wait(
    timed: Timed, restart_safe: bool
) -> None:
    app, entered = timed[0], threading.Event()

    async def mourn(seen: Seen) -> None:
        world.release.set()
        await until(lambda: records(app, kind="late"))

    await admit(app, slow_write(entered, restart_safe=restart_safe))
    app.hook(Hook(id="mourns", when="failure", run=mourn, timeout_s=10))
    await run_out_of_time(timed, "demo.pay", entered)
    await until(lambda: records(app, kind="late"))  # the hook may still wait for it: no answer waits for the hook
    again = await app.call("demo.pay", key="k")
    assert (again.unwrap(), again.replayed, world.runs) == ("paid", True, 1)


async def test_a_write_that_ends_the_process_after_its_time_ends_only_itself(timed: Timed) -> None:
    app, entered = timed[0], threading.Event()

    def leave() -> str:
        """End the process, late."""
        entered.set()
        world.release.wait(60)
        sys.exit(3)

    await admit(app, write(leave))
    await run_out_of_time(timed, "demo.leave", entered)
    world.release.set()
    await until(lambda: records(app, kind="late"))
    again = await app.call("demo.leave", key="k")
    assert (code(again), again.source) == ("E3401", "replay")


async def test_a_write_that_had_no_time_to_start_leaves_its_key_free(app: Interlock) -> None:
    first = await app.call("demo.increment", {"name": "a"}, key="k", timeout_s=0.000001)
    assert (code(first), world.runs) == ("E3402", 0)
    again = await app.call("demo.increment", name="a", key="k")
    assert (again.unwrap(), again.replayed) == (1, False)


# The effect is made and something fails afterwards


async def test_a_failed_verification_does_not_free_the_key_of_an_effect_that_was_made(app: Interlock) -> None:
    async def pay() -> int:
        """Pay at once."""
        world.runs += 1
        return world.runs

    async def look(arguments: Any, result: Any) -> None:
        raise Failure("UPSTREAM_FAILURE", "the bank does not answer")

    paying = write(pay)
    paying.verify(look)
    await admit(app, paying)
    assert code(await app.call("demo.pay", key="k")) == "E3502"
    assert code(await app.call("demo.pay", key="k")) == "E3409"
    assert world.runs == 1
    # Nobody knows whether it took effect, so nobody tries again.
    assert code(await app.call_with_retries("demo.pay", key="other")) == "E3502"
    assert world.runs == 2


async def test_a_lost_session_does_not_free_the_key_of_an_effect_made_outside_it(app: Interlock) -> None:
    world.gate = gate = asyncio.Event()

    async def pay(ctx: Context, name: Name) -> int:
        """Pay, and keep count in the session."""
        ctx.session["paid"] = ctx.session.get("paid", 0) + 1
        world.runs += 1
        await gate.wait()
        return world.runs

    await admit(app, write(pay, changes="x:{name}"))
    both = [asyncio.create_task(app.call("demo.pay", name=key, key=key)) for key in "ab"]
    await until(lambda: world.runs == 2)
    gate.set()
    results = dict(zip("ab", await asyncio.gather(*both), strict=True))
    (loser,) = (key for key, result in results.items() if not result.ok)
    assert code(results[loser]) == "E3410"
    assert code(await app.call("demo.pay", name=loser, key=loser)) == "E3409"
    assert world.runs == 2


async def _run_three_that_cannot_be_recorded(app: Interlock, home: Path, patch: pytest.MonkeyPatch) -> None:
    """Three writes make their effect while another process holds the journal's lock."""
    impatient(app.home, app.journal, patch)
    world.gate = asyncio.Event()
    started: list[str] = []
    stop = app.listen(
        lambda event: started.append(event.id) if event.type == "tool.invocation.started" else None,
    )
    calls = [asyncio.create_task(app.call("demo.increment", name=name, key=name)) for name in "abc"]
    await until(lambda: len(started) == 3)
    stop()
    with busy(app.home):
        world.gate.set()
        assert [code(result) for result in await asyncio.gather(*calls)] == ["E3409"] * 3
    assert world.counters == {"a": 1, "b": 1, "c": 1}


async def _all_three_are_replayed(app: Interlock) -> None:
    results = [await app.call("demo.increment", {"name": name}, key=name, timeout_s=30) for name in "abc"]
    assert [(result.value, result.replayed) for result in results] == [(1, True)] * 3
    assert world.counters == {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize("leaves", [False, True])
async def test_closings_that_could_not_be_written_are_owed_and_all_go_with_the_next_write(
    app: Interlock, home: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    await _run_three_that_cannot_be_recorded(app, home, monkeypatch)
    following = asyncio.create_task(app.call("demo.unsteady", name="d", key="d"))
    if leaves:
        await until(lambda: sample.flaky.runs)
        following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await app.call("demo.unsteady", name="e", key="e")
    await _all_three_are_replayed(app)


async def test_asking_again_under_a_key_whose_closing_is_owed_writes_it_first(
    app: Interlock, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _run_three_that_cannot_be_recorded(app, home, monkeypatch)
    await _all_three_are_replayed(app)


async def test_closings_that_are_owed_are_written_in_time_though_nobody_calls(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "TICKETS_EVERY_S", 0.01)
    async with Interlock.open(home) as app:
        app.catalog.attach(sample.increment)
        await _run_three_that_cannot_be_recorded(app, home, monkeypatch)
        await until(lambda: app.journal.reader.all("SELECT COUNT(*) FROM journal WHERE kind = 'closed'") == [(3,)])


async def test_closings_that_are_owed_are_written_when_the_gateway_closes(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Interlock.open(home) as app:
        app.catalog.attach(sample.increment)
        await _run_three_that_cannot_be_recorded(app, home, monkeypatch)
    async with Interlock.open(home) as app:
        app.catalog.attach(sample.increment)
        await _all_three_are_replayed(app)


@pytest.mark.parametrize("value", [2**80, "e\u0301"])
async def test_the_result_of_a_write_is_replayed_exactly(app: Interlock, value: Any) -> None:
    async def give() -> Any:
        """Give back what was agreed."""
        world.runs += 1
        return value

    await admit(app, write(give))
    first, again = [await app.call("demo.give", key="k") for _ in range(2)]
    assert (first.unwrap(), again.unwrap(), again.replayed, world.runs) == (value, value, True, 1)


async def test_a_write_whose_result_is_not_text_is_a_failure_that_stays_one(app: Interlock) -> None:
    async def give() -> str:
        """Give back what is not Unicode."""
        world.runs += 1
        return "a\ud800"

    await admit(app, write(give))
    assert [code(await app.call("demo.give", key="k")) for _ in range(2)] == ["E3303", "E3303"]
    assert world.runs == 1


async def test_two_instances_on_one_home_run_a_key_once_and_keep_one_chain(home: Path) -> None:
    async with Interlock.open(home) as one, Interlock.open(home) as two:
        for node in (one, two):
            node.catalog.attach(sample.increment)
        calls = [node.call("demo.increment", name="a", key=key) for key in "abcde" for node in (one, two)]
        results = await asyncio.gather(*calls)
    assert all(result.ok for result in results)
    assert world.counters == {"a": 5}
    assert verify(home_at(home)).intact


# Undoing


def _undo(call: str, caller: Caller, **arguments: Any) -> Request:
    return Request(
        tool="demo.increment", arguments=arguments, caller=caller, key="u", operation="compensate", parent=call
    )


async def test_a_call_is_undone_once_whatever_key_the_undo_comes_under(app: Interlock) -> None:
    done = await app.call("demo.increment", name="a", by=3, key="k")
    first, again = [await app.undo(done.invocation_id, key=key) for key in "xy"]
    assert (first.ok, again.ok, again.replayed) == (True, True, True)
    assert world.counters == {"a": 0}


async def test_an_undo_runs_with_the_stored_arguments_and_never_with_those_of_who_asks(app: Interlock) -> None:
    with pytest.raises(TypeError, match="undo"):
        app.request("demo.increment", {"name": "a", "by": 999}, operation="compensate", key="u")
    done = await app.call("demo.increment", name="a", by=3, key="k")
    assert code(await app.gateway.invoke(_undo("", app.caller, name="a", by=999))) == "E3702"
    assert world.counters == {"a": 3}
    assert (await app.gateway.invoke(_undo(done.invocation_id, app.caller, name="a", by=999))).ok
    assert world.counters == {"a": 0}


async def test_only_who_made_a_call_can_undo_it(app: Interlock) -> None:
    done = await app.call("demo.increment", name="a", key="k")
    for stranger in (Caller(id="local:stranger"), Caller(id=app.caller.id, tenant="rival")):
        assert code(await app.gateway.invoke(_undo(done.invocation_id, stranger))) == "E3702"
    assert world.counters == {"a": 1}


# The store


def test_the_signing_key_survives_a_process_killed_while_it_staged_it(tmp_path: Path) -> None:
    public = Signer(tmp_path).public
    # What kill -9 between link and unlink leaves, under the process id that the next one has as well.
    os.link(tmp_path / "journal.ed25519", tmp_path / f"journal.ed25519.{os.getpid()}")
    again = Signer(tmp_path)
    assert again.public == public
    assert (tmp_path / "journal.pub").read_text().strip() == public.hex()


async def test_the_journals_writer_survives_a_disk_that_cannot_even_roll_back(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await Interlock.open(home).start()

    def roll_back() -> None:
        raise StoreError("disk I/O error")

    def broken(transaction: Transaction) -> None:
        raise ValueError("unit")

    with monkeypatch.context() as patch:
        patch.setattr(app.journal.writer, "commit_s", 1.0)  # slow enough for the writer's own thread
        patch.setattr(app.journal.writer, "_roll_back", roll_back)
        async with asyncio.timeout(60):
            with pytest.raises(Failure) as unwritable:
                await app.journal.commit(broken)
    assert unwritable.value.code == "E3801"
    app.journal.writer._connection.execute("ROLLBACK")  # pyright: ignore[reportPrivateUsage] - the disk is well again
    async with asyncio.timeout(60):
        assert await app.journal.commit(lambda transaction: 1) == 1
        await app.close()
    assert verify(home_at(home)).intact


@pytest.mark.sqlite_only("a fake stands for a connection to a file")
async def test_a_connection_that_cannot_roll_back_is_replaced(app: Interlock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        """A fake of a connection whose disk fails between BEGIN and ROLLBACK."""

        in_transaction = True
        openings = 1

        def execute(self, statement: str, *_: Any) -> Any:
            if statement == "ROLLBACK":
                raise StoreError("disk I/O error")
            return real.execute(statement, *_)

        def close(self) -> None:
            real.close()

    def broken(transaction: Transaction) -> None:
        raise ValueError("unit")

    real = app.journal.writer._connection  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(app.journal.writer, "_connection", Failing())
    async with asyncio.timeout(60):
        with pytest.raises(ValueError, match="unit"):
            await app.journal.commit(broken)
        assert await app.journal.commit(lambda transaction: 1) == 1
    assert (await app.call("demo.increment", name="a", key="k")).ok
    current = app.journal.writer._connection  # pyright: ignore[reportPrivateUsage]
    monkeypatch.undo()
    app.journal.writer._connection = current  # pyright: ignore[reportPrivateUsage] - the fixture closes what is in use


async def test_a_call_is_undone_once_however_much_time_has_passed_and_whatever_the_session(home: Path) -> None:
    store = FakeClock(seed="store")
    async with Interlock.open(home, store_clock=store.clock) as app:
        app.catalog.attach(sample.increment)
        done = await app.call("demo.increment", name="a", key="k")
        assert (await app.undo(done.invocation_id, key="u")).ok
        store.advance(2 * 3600)
        again = await app.undo(done.invocation_id, key="u")
        request = Request(
            tool="demo.increment", arguments={}, caller=app.caller, key="v", session="other", operation="compensate",
            parent=done.invocation_id,
        )  # fmt: skip
        other = await app.gateway.invoke(request)
    assert again.replayed
    assert other.replayed
    assert world.counters == {"a": 0}

"""A clock that is set, forward or back: no key runs twice for it, and people hear of it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from interlock import Interlock
from interlock.audit.chain import verify
from interlock.call.events import Event
from interlock.core.clock import Clock
from interlock.store import timekeeping
from interlock.store.homes import home_at
from interlock.store.port import Transaction
from interlock.testing import FakeClock
from tests import sample
from tests.sample import TOOLS, world
from tests.support.calls import code

HOUR, DAY = 3_600, 86_400
WINDOW_S = HOUR  # the shortest that settings allow by default


@asynccontextmanager
async def opened(home: Path, clock: Clock, **options: Any) -> AsyncGenerator[Interlock]:
    async with Interlock.open(home, clock=clock, housekeeping=False, **options) as app:
        for one in TOOLS:
            app.catalog.attach(one)
        yield app


def step(time: FakeClock, seconds: float) -> None:
    """Set the wall clock; no time passes."""
    time.now_ms += round(seconds * 1000)


def store_time(transaction: Transaction) -> int:
    return transaction.now_ms


async def send(app: Interlock) -> str | None:
    return code(await app.call("demo.increment", name="a", key="k"))


@pytest.mark.parametrize("anew", [False, True], ids=["one process", "another process"])
@pytest.mark.parametrize("days", [10, -30], ids=["behind, then right", "right, then ahead, then right"])
async def test_a_key_does_not_run_again_because_the_clock_was_set(home: Path, days: int, anew: bool) -> None:
    time = FakeClock()
    async with opened(home, time.clock) as first:
        assert await send(first) is None
        time.advance(10)
        step(time, abs(days) * DAY)
        if not anew:
            assert await send(first) == "E3411"
    async with opened(home, time.clock) as app:
        result = await app.call("demo.increment", name="a", key="k")
        assert result.error is not None
        assert result.error.code == "E3411"
        assert "clock was set" in result.error.message
        assert "interlock calls show" in result.error.resolution
        if days < 0:
            step(time, days * DAY)
            assert await send(app) == "E3411"
        await app.maintain()
        assert world.runs == 1
        # By the uptime, the window passes as it would have without the step.
        time.advance(2 * DAY)
        await app.maintain()
        assert await send(app) is None
        assert world.runs == 2
    assert verify(home_at(home)).intact


async def test_a_key_that_is_used_after_the_step_is_not_in_doubt(home: Path) -> None:
    time = FakeClock()
    async with opened(home, time.clock) as app:
        step(time, 30 * DAY)
        assert await send(app) is None
        assert (await app.call("demo.increment", name="a", key="k")).replayed
        time.advance(2 * DAY)
        assert await send(app) is None
        assert world.runs == 2


async def test_the_store_goes_on_while_the_clock_is_behind(home: Path) -> None:
    time, seen = FakeClock(), list[int]()
    async with opened(home, time.clock) as app:
        for change in (0, -10 * DAY, 0, 0, 10 * DAY):
            step(time, change)
            time.advance(5)
            seen.append(await app.journal.commit(store_time))
    assert seen == [seen[0] + 5_000 * number for number in range(5)]


async def test_after_another_start_of_the_machine_a_clock_behind_the_store_is_not_believed(home: Path) -> None:
    before, after = FakeClock(), FakeClock()
    async with opened(home, before.clock) as app:
        before.advance(100)
        assert await send(app) is None
        last = await app.journal.commit(store_time)
    after.now_ms = 0  # an empty battery
    async with opened(home, after.clock) as app:
        assert await app.journal.commit(store_time) == last
        after.advance(60)
        assert await app.journal.commit(store_time) == last + 60_000
        assert (await app.call("demo.increment", name="a", key="k")).replayed
        after.now_ms = last + 5 * DAY * 1000  # a time server has answered
        assert await send(app) == "E3411"
    assert world.runs == 1


async def test_a_step_is_alerted_once_by_each_process_and_is_on_record_once(home: Path) -> None:
    time, heard = FakeClock(), list[Event]()
    async with opened(home, time.clock) as one, opened(home, time.clock) as other:
        for app in (one, other):
            await app.journal.commit(store_time)
            app.listen(lambda event: heard.append(event) if event.type == "tool.alert" else None)
        step(time, 3 * DAY)
        for app in (one, other, one, other):
            time.advance(2)
            assert (await app.call("demo.add", a=1)).ok
            await app.journal.commit(store_time)
            await app.journal.drain()
        found = timekeeping.steps(one.journal.reader)
    assert [event.data["alert"] for event in heard] == ["CLOCK_STEPPED"] * 2
    assert {event.data["seconds"] for event in heard} == {3 * DAY}
    assert [after - before for before, after in found] == [3 * DAY * 1000]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    moves = st.one_of(
        st.tuples(st.just("pass"), st.integers(0, 2 * HOUR)),
        st.tuples(st.just("step"), st.integers(120, 40 * DAY)),
        st.tuples(st.just("step"), st.integers(-40 * DAY, -120)),
        st.tuples(st.just("call"), st.just(0)),
        st.tuples(st.just("again"), st.just(0)),
    )
    return draw(st.lists(moves, min_size=3, max_size=25))


@given(histories())
@settings(max_examples=30)
async def test_whatever_is_done_to_the_clock_a_key_runs_once_in_its_window(
    prepared_home: Path, history: list[tuple[str, int]]
) -> None:
    sample.reset()
    with TemporaryDirectory() as place:
        home = Path(shutil.copytree(prepared_home, Path(place) / "home"))
        time = FakeClock()
        last, ran_at = 0, -1e9
        app = await Interlock.open(home, clock=time.clock, housekeeping=False)
        for what, amount in history:
            app.catalog.attach(sample.increment)
            if what == "pass":
                time.advance(amount)
            elif what == "step":
                step(time, amount)
            elif what == "again":
                await app.close()
                app = await Interlock.open(home, clock=time.clock, housekeeping=False)
            else:
                runs = world.runs
                await send(app)
                await app.maintain()
                if world.runs > runs:
                    assert time.monotonic_s - ran_at >= WINDOW_S
                    ran_at = time.monotonic_s
                now = await app.journal.commit(store_time)
                assert now >= last
                last = now
        await app.close()
        assert verify(home_at(home)).intact

"""Background tasks are kept going: a failure is logged, alerted and followed by another attempt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.core.errors import Failure
from interlock.core.seldom import MOST, Seldom
from interlock.core.supervise import FIRST_PAUSE_S, LONGEST_PAUSE_S, TELL_EVERY_S, Supervisor
from interlock.testing import FakeClock

WITHIN_S = 30.0


class Watched:
    """A supervisor whose pauses pass at once, and what it told."""

    def __init__(self) -> None:
        self.time = FakeClock(0)
        self.alerts: list[tuple[str, str]] = []
        self.changes = 0
        self.pauses: list[float] = []
        self.supervisor = Supervisor(self.time.clock, self._alert, self._changed, sleep=self._sleep)

    def _alert(self, task: str, reason: str) -> None:
        self.alerts.append((task, reason))

    def _changed(self) -> None:
        self.changes += 1

    async def _sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.time.advance(pause_s)
        await asyncio.sleep(0)


@pytest.fixture
async def watched() -> AsyncGenerator[Watched]:
    made = Watched()
    yield made
    await made.supervisor.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - whatever makes it true has no event to wait for
            await asyncio.sleep(0)


FAULTS = [TypeError("no"), Failure("E3803", "the disk is full"), asyncio.CancelledError(), RecursionError()]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
async def test_a_job_that_fails_is_alerted_and_run_again(watched: Watched, fault: BaseException) -> None:
    runs = 0

    async def step() -> None:
        nonlocal runs
        runs += 1
        if runs <= 2:
            raise fault

    watched.supervisor.every("job", 5.0, step)
    await until(lambda: runs >= 2)
    (failing,) = watched.supervisor.failing
    assert (failing.task, failing.failures in (1, 2)) == ("job", True)
    await until(lambda: runs >= 4)
    assert watched.supervisor.failing == []
    assert [task for task, _ in watched.alerts] == ["job"], "the same failure is told once a minute"
    assert watched.changes == 2, "it began to fail, and it recovered"


async def test_a_failing_job_keeps_no_other_from_running(watched: Watched) -> None:
    ran = asyncio.Event()

    async def broken() -> None:
        raise ValueError

    async def good() -> None:
        ran.set()

    watched.supervisor.every("broken", 1.0, broken)
    watched.supervisor.every("good", 1.0, good)
    await asyncio.wait_for(ran.wait(), WITHIN_S)
    assert [one.task for one in watched.supervisor.failing] == ["broken"]


async def test_pauses_double_up_to_a_minute_and_are_jittered(watched: Watched) -> None:
    async def broken() -> None:
        raise ValueError

    watched.supervisor.every("job", 0.0, broken)
    await until(lambda: len(watched.pauses) >= 12)
    for count, pause_s in enumerate(watched.pauses):
        bound = min(FIRST_PAUSE_S * 2**count, LONGEST_PAUSE_S)
        assert bound / 2 <= pause_s <= bound


async def test_a_kept_task_is_started_again_and_ends_when_it_returns(watched: Watched) -> None:
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise KeyError("gone")

    await asyncio.wait_for(watched.supervisor.keep("task", work), WITHIN_S)
    assert (runs, watched.supervisor.failing, watched.alerts) == (3, [], [("task", "KeyError")])


async def test_what_is_spawned_tells_of_its_failure_and_is_not_tried_again(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR, "interlock.background"):
        task = watched.supervisor.spawn("once", work())
        await asyncio.wait({task})
        await until(lambda: bool(watched.alerts))
    assert (runs, watched.alerts) == (1, [("once", "ZeroDivisionError")])
    assert caplog.records[0].exc_info is not None


async def test_a_task_that_is_cancelled_ends_at_once_and_quietly(watched: Watched) -> None:
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    task = watched.supervisor.keep("task", work)
    await started.wait()
    await watched.supervisor.stop()
    assert task.cancelled()
    assert watched.alerts == []


async def test_stopping_leaves_what_was_spawned_to_its_owner(watched: Watched) -> None:
    go = asyncio.Event()
    task = watched.supervisor.spawn("closing", go.wait())
    await watched.supervisor.stop()
    assert not task.done()
    go.set()
    assert await asyncio.wait_for(task, WITHIN_S)


@given(gaps=st.lists(st.floats(0, 2 * TELL_EVERY_S), max_size=50))
def test_a_key_is_allowed_once_per_period_and_no_mention_is_lost(gaps: list[float]) -> None:
    now = 0.0
    seldom = Seldom(TELL_EVERY_S, lambda: now)
    allowed: list[float] = []
    counted = held_back = 0
    for gap in gaps:
        now += gap
        found = seldom.due("key")
        if found is None:
            held_back += 1
            assert now - allowed[-1] < TELL_EVERY_S
        else:
            counted += found
            assert found == held_back
            held_back = 0
            assert not allowed or now - allowed[-1] >= TELL_EVERY_S
            allowed.append(now)
    assert counted + held_back + len(allowed) == len(gaps)


def test_the_number_of_keys_is_bounded() -> None:
    seldom = Seldom(1.0, lambda: 0.0)
    for key in range(3 * MOST):
        assert seldom.due(key) == 0
    assert seldom.due(3 * MOST - 1) is None
    assert seldom.due(0) == 0, "the oldest are forgotten"

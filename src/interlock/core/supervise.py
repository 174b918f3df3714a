"""Supervisor of the long-lived tasks of a process.

Background work that no call waits for is started here: periodic jobs (`every`), tasks that should never end (`keep`),
and work that is done once (`spawn`). Nothing awaits such work, so an exception in it would be lost. The supervisor logs
it, raises an alert and, for jobs and tasks, starts the work again after a pause. Pauses double from one failure to the
next, up to a minute, and are jittered, so that many processes on one home do not fail in step.

`failing` lists the tasks that fail at the moment. `/ready` shows it, and each process writes it into its sign of life,
where `interlock doctor` reads it.

Tasks that belong to one call, one connection or one request are awaited or ended by their owner and are not supervised
here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.record import record
from interlock.core.seldom import Seldom

_log = logging.getLogger("interlock.background")
T = TypeVar("T")

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
# A task that was started again and has run for this long counts as recovered.
STEADY_S = 60.0
# The same failure of the same task is logged with its traceback, and alerted, once in this time.
TELL_EVERY_S = 60.0


@record
class Failing:
    """A task that fails at the moment: its number of failures in a row, and the last error in one line."""

    task: str
    failures: int
    error: str


class _Task:
    """State of one supervised task."""

    __slots__ = ("error", "failures", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.failures = 0
        self.error = ""


def start_in(tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task and keep it in a set until it ends. The event loop alone would let it be collected."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


class Supervisor:
    """Starts background tasks and restarts them when they fail. Belongs to the event loop on which it is used.

    `alert` receives the name of a task and the reason why it failed. `changed` is called when a task begins to fail or
    has recovered. Both run on the loop.
    """

    def __init__(
        self,
        clock: Clock,
        alert: Callable[[str, str], None] = lambda task, reason: None,
        changed: Callable[[], None] = lambda: None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._alert = alert
        self._changed = changed
        self._seldom = Seldom(TELL_EVERY_S, clock.monotonic)
        self._tasks: dict[asyncio.Task[Any], _Task] = {}
        self._spawned: set[asyncio.Task[Any]] = set()

    @property
    def failing(self) -> list[Failing]:
        """The tasks whose last run failed and that have not recovered, by name."""
        failing = [Failing(task=one.name, failures=one.failures, error=one.error) for one in self._tasks.values()]
        return sorted((one for one in failing if one.failures), key=lambda one: one.task)

    def every(self, name: str, seconds: float, step: Callable[[], Awaitable[Any]], *, at_once: bool = True) -> None:
        """Run a step repeatedly with this pause in between; after a failure the pause is longer."""
        task = _Task(name)

        async def go_on() -> None:
            if not at_once:
                await self._sleep(seconds)
            while True:
                try:
                    await step()
                except BaseException as error:  # noqa: BLE001 - whatever it is, the next step must come
                    await self._sleep(max(seconds, self._pause_after(task, error)))
                else:
                    self._recovered(task)
                    await self._sleep(seconds)

        self._start(task, go_on())

    def keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Run a task until it returns or is cancelled; restart it when it raises."""
        task = _Task(name)

        async def go_on() -> None:
            while True:
                steady = asyncio.get_running_loop().call_later(STEADY_S, self._recovered, task)
                try:
                    return await work()
                except BaseException as error:  # noqa: BLE001 - whatever it is, the task is started again
                    pause_s = self._pause_after(task, error)
                finally:
                    steady.cancel()
                await self._sleep(pause_s)

        return self._start(task, go_on())

    def spawn(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Do some work once in the background. A failure is logged and raises an alert; the work is not repeated."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._spawned.add(task)
        task.add_done_callback(self._ended)
        return task

    async def stop(self) -> None:
        """End the jobs and the long-lived tasks. Spawned work continues, because other parts may need its result."""
        await _end(list(self._tasks))

    async def close(self) -> None:
        """End all tasks."""
        await _end([*self._tasks, *self._spawned])

    def _start(self, supervised: _Task, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=supervised.name)
        self._tasks[task] = supervised
        task.add_done_callback(self._let_go)
        return task

    def _let_go(self, task: asyncio.Task[Any]) -> None:
        ended = self._tasks.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report(ended.name, error)
        if ended.failures:
            self._changed()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._spawned.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report(task.get_name(), error)

    def _pause_after(self, supervised: _Task, error: BaseException) -> float:
        """Record a failure and return the pause before the next attempt. Re-raises what must end the task: its own
        cancellation, or an exit.
        """
        if not isinstance(error, Exception | asyncio.CancelledError):
            raise error
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
            raise error
        # A cancellation that is not this task's own came from something that it awaited, and counts as a failure.
        supervised.failures += 1
        supervised.error = _in_words(error)
        self._report(supervised.name, error)
        if supervised.failures == 1:
            self._changed()
        bound = min(FIRST_PAUSE_S * 2 ** min(supervised.failures - 1, 16), LONGEST_PAUSE_S)
        return bound * (0.5 + self._clock.random_bytes(1)[0] / 512)

    def _recovered(self, task: _Task) -> None:
        if task.failures:
            task.failures, task.error = 0, ""
            _log.info("%s works again", task.name)
            self._changed()

    def _report(self, name: str, error: BaseException) -> None:
        held_back = self._seldom.due((name, type(error)))
        if held_back is None:
            return
        # The message of a Failure explains it; any other exception is a bug and needs its traceback.
        trace = None if isinstance(error, Failure) else error
        more = f", {held_back} times more since this was last logged" if held_back else ""
        _log.error("%s failed: %s%s", name, _in_words(error), more, exc_info=trace)
        self._alert(name, _in_words(error))


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _in_words(error: BaseException) -> str:
    """Describe an error in one line. The text of an unexpected exception may contain anything, so only its type is
    given.
    """
    return f"{error.code} {error.message}" if isinstance(error, Failure) else type(error).__name__

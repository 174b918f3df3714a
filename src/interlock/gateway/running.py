"""The calls in execution: their deadlines, their cancellation, and the start records of those that take their time.

One sweep every few milliseconds looks after all of them; a timer per call would cost more than many calls do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from interlock.core.clock import Deadline
from interlock.core.context import Context
from interlock.core.errors import Failure
from interlock.core.phases import Call

SWEEP_S = 0.01
# A read that ends sooner leaves its closing record only; one that runs longer is on record as begun.
NOTE_AFTER_S = 0.05
# How long a tool that was told to stop may take to say how far it came.
GRACE_S = 0.05

Why = Literal["timeout", "canceled", "sibling"]
_CODE: dict[Why, tuple[str, str]] = {
    "timeout": ("E3402", "ran out of time"),
    "canceled": ("E3703", "was cancelled"),
    "sibling": ("E3412", "was cancelled because a sibling failed"),
}


class Running:
    """One call in execution."""

    __slots__ = ("began", "call", "cancellable", "context", "deadline", "noted", "task", "waiter", "why")

    def __init__(self, call: Call, deadline: Deadline, began: float, *, cancellable: bool) -> None:
        self.call = call
        self.deadline = deadline
        self.began = began
        self.cancellable = cancellable
        self.context: Context | None = None
        self.task: asyncio.Task[Any] | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.noted = call.intent_at is not None
        self.why: Why | None = None

    def stop(self, why: Why) -> None:
        """Cut the call off. Its caller is answered at once, whether or not the tool obeys."""
        if self.why is not None:
            return
        self.why = why
        if self.context is not None:
            self.context.cancel()
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
        if self.task is not None:
            self.task.cancel()

    def failure(self) -> Failure:
        assert self.why is not None
        code, words = _CODE[self.why]
        name = self.call.contract.ref if self.call.contract else self.call.request.tool
        return Failure(code, f"{name} {words}")


class Floor:
    """All calls in execution of one gateway."""

    def __init__(self, monotonic: Callable[[], float], note: Callable[[Call], None]) -> None:
        self._monotonic = monotonic
        self._note = note
        self._running: dict[str, Running] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._running)

    def get(self, call_id: str) -> Running | None:
        return self._running.get(call_id)

    def enter(self, running: Running) -> None:
        self._running[running.call.id] = running
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def leave(self, running: Running) -> None:
        self._running.pop(running.call.id, None)

    def _sweep(self) -> None:
        self._timer = None
        now = self._monotonic()
        for running in list(self._running.values()):
            if now >= running.deadline.at:
                running.stop("timeout")
            elif not running.noted and now - running.began >= NOTE_AFTER_S:
                running.noted = True
                self._note(running.call)
        if self._running:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


async def run_here(floor: Floor, running: Running, work: Coroutine[Any, Any, Any]) -> Any:
    """Run work in the caller's own task: the cheap way, for tools that only compute."""
    task = asyncio.current_task()
    assert task is not None
    running.task = task
    floor.enter(running)
    try:
        value = await work
    except asyncio.CancelledError:
        if running.why is None:
            raise
        task.uncancel()
        raise running.failure() from None
    finally:
        floor.leave(running)
    if running.why is not None:
        task.uncancel()
        raise running.failure()
    return value


async def run_apart(floor: Floor, running: Running, work: Coroutine[Any, Any, Any]) -> Any:
    """Run work in a task of its own, so that its caller is answered in time even if the work ignores being told."""
    loop = asyncio.get_running_loop()
    running.waiter = waiter = loop.create_future()
    running.task = task = loop.create_task(work)
    task.add_done_callback(lambda _: None if waiter.done() else waiter.set_result(None))
    floor.enter(running)
    try:
        await waiter
    except asyncio.CancelledError:
        running.stop("canceled")
        raise
    finally:
        floor.leave(running)
    if running.why is not None:
        raise running.failure()
    return task.result()

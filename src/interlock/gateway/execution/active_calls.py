"""The calls in execution: their deadlines, their cancellation, and the start records of those that take long.

One periodic sweep checks the deadlines of all calls; a timer per call would cost more than many calls do.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from interlock.call.phases import Call, Why
from interlock.core.errors import Failure
from interlock.store import records
from interlock.store.started_reads import StartedReads

_log = logging.getLogger("interlock.gateway")

SWEEP_S = 0.01
# A read that ends sooner leaves only its closing record; one that runs longer has a start record as well, so that other
# processes see it. That costs as much as all other records of a read, so reads that merely wait in a queue for a while
# must not pay for it.
NOTE_AFTER_S = 0.25
# A read on the fast path that takes longer goes on in the regular phases.
SLOW_AFTER_S = 0.1
# The time that a cancelled tool has to report its changes.
GRACE_S = 0.05

_CODE: dict[Why, tuple[str, str]] = {
    "timeout": ("E3402", "ran out of time"),
    "canceled": ("E3703", "was cancelled"),
    "sibling": ("E3412", "was cancelled because a sibling failed"),
    "discarded": ("E3703", "was discarded by its caller"),
    "expired": ("E3402", "was stopped, because the store does not answer and others may soon take its locks"),
    "fallback": ("E3413", "was discarded because its caller fell back on another answer"),
}


def cut_off(call: Call) -> Failure:
    """Return the failure of a call that was stopped."""
    assert call.more.why is not None
    code, words = _CODE[call.more.why]
    return Failure(code, f"{call.ref} {words}")


def stop(call: Call, why: Why) -> None:
    """Cut off a running call. Its caller gets an answer at once, whether or not the tool stops."""
    if call.more.why is not None:
        return
    call.extend().why = why
    if call.more.context is not None:
        call.more.context.cancel()
    if call.more.waiter is not None and not call.more.waiter.done():
        call.more.waiter.set_result(None)
    if call.more.task is not None:
        call.more.task.cancel()


class ActiveCalls:
    """All calls in execution of one gateway."""

    def __init__(
        self,
        monotonic: Callable[[], float],
        note: Callable[[Call], None],
        started: StartedReads,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._monotonic = monotonic
        self._note = note
        # For the process after this one.
        self.started = started
        self._calls: dict[str, Call] = {}
        # Reads on the fast path that have not ended: when each is to go on in the regular phases, and how it is told.
        self._reads: list[tuple[float, asyncio.Future[None]]] = []
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._calls) + sum(not waiter.done() for _, waiter in self._reads)

    def get(self, call_id: str) -> Call | None:
        return self._calls.get(call_id)

    def watch(self, waiter: asyncio.Future[None], started: float, timeout_s: float) -> None:
        """Wake the waiter for a read on the fast path once it takes long. In the regular phases it has a deadline,
        and can be cancelled by its id.
        """
        self._reads.append((started + min(timeout_s, SLOW_AFTER_S), waiter))
        if self._timer is None:
            self._arm()

    def begin(self, call: Call) -> None:
        """Note that a read starts, so that it is closed as failed if this process is killed."""
        if not self.started.begin(call.id, call.trace_id, call.input_hash, records.rest_of_start(call)):
            call.extend().noted = True
            self._note(call)

    async def run_here(self, call: Call, work: Awaitable[Any]) -> Any:
        """Run work in the caller's own task: the cheaper way, for tools that only compute."""
        task = asyncio.current_task(self._loop)
        assert task is not None
        call.more.task = task
        self._calls[call.id] = call
        if self._timer is None:
            self._arm()
        try:
            value = await work
        except asyncio.CancelledError:
            if call.more.why is not None:
                raise cut_off(call) from None
            if task.cancelling():
                raise
            raise Failure("E3404", f"{call.ref} cancelled itself") from None
        finally:
            del self._calls[call.id]
            if call.more.why is not None:
                task.uncancel()  # the cancellation was requested by `stop`, and is done
        if call.more.why is not None:
            raise cut_off(call)
        return value

    async def run_apart(self, call: Call, work: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> Any:
        """Run work in a task of its own, so that the caller gets an answer in time even if the work goes on."""
        more = call.more
        more.waiter = waiter = self._loop.create_future()
        # A fixed name: generating one takes a tenth of the time that creating the task takes.
        task = work if isinstance(work, asyncio.Task) else asyncio.Task(work, loop=self._loop, name="tool")
        more.task = task
        task.add_done_callback(lambda _: None if waiter.done() else waiter.set_result(None))
        self._calls[call.id] = call
        if self._timer is None:
            self._arm()
        try:
            await waiter
        except asyncio.CancelledError:
            stop(call, "canceled")
            raise
        finally:
            del self._calls[call.id]
        if call.more.why is not None:
            # Nobody awaits the task any more; its exception is retrieved so that asyncio logs no warning.
            task.add_done_callback(_consume)
            raise cut_off(call)
        if task.cancelled():
            raise Failure("E3404", f"{call.ref} cancelled itself")
        return task.result()

    def _arm(self) -> None:
        """Have the next sweep look at the calls that there are."""
        self._timer = self._loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        now = self._monotonic()
        self._wake_reads(now)
        try:
            for call in list(self._calls.values()):
                if now >= call.deadline:
                    stop(call, "timeout")
                elif not call.more.noted and now - call.started >= NOTE_AFTER_S:
                    call.extend().noted = True
                    self._note(call)
        except Failure as failure:
            _log.warning("the start of a call could not be noted: %s", failure.message)
        finally:
            # INVARIANT: whatever fails here, deadlines are still enforced.
            if self._calls or self._reads:
                self._arm()

    def _wake_reads(self, now: float) -> None:
        """Wake those who wait for reads that take long by now, and forget the reads that have ended."""
        left = [(at, waiter) for at, waiter in self._reads if not waiter.done()]
        for at, waiter in left:
            if now >= at:
                waiter.set_result(None)
        self._reads = [(at, waiter) for at, waiter in left if now < at]

    async def close(self) -> None:
        """Cut off the calls that still run, and wait a moment for them to be closed."""
        for _ in range(100):
            reads = bool(self._reads)
            self._wake_reads(math.inf)
            for call in list(self._calls.values()):
                stop(call, "canceled")
            if not self._calls and not reads:
                break
            await asyncio.sleep(SWEEP_S)
        if self._timer is not None:
            self._timer.cancel()


def _consume(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()

"""The threads in which sync functions run.

Theory of operation. The event loop queues jobs, threads take them, and jobs that have ended come back to the loop. The
loop is woken once for all jobs that ended since it last looked, because a wake-up is a system call and makes the thread
and the loop compete for the interpreter. Only the function itself runs in a thread. Threads are counted and started,
and those who wait are told, on the loop, so a job needs no lock.

There is a thread for every job that has not come back yet, so no function waits for another one. As with the threads of
`concurrent.futures`, functions that still run when the process ends are waited for.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any


class Job:
    """A function that is to run in a thread, and its outcome."""

    __slots__ = ("_unclaimed", "error", "finished", "listeners", "value", "waiter", "work")

    def __init__(self, work: Callable[[], Any], waiter: asyncio.Future[None]) -> None:
        self.work = work
        # Done when the job has come back. Calls await it, and may stop waiting. That does not stop the function.
        self.waiter = waiter
        # Called on the loop when the job has come back, whether or not the call still waits.
        self.listeners: list[Callable[[], None]] = []
        # Whether nothing of it runs any more.
        self.finished = False
        self.value: Any = None
        self.error: BaseException | None = None
        # Popped, which is atomic, by the thread that decides first whether the function runs.
        self._unclaimed = [True]

    def claim(self) -> bool:
        """Decide whether the function runs. True for the first who asks."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False

    def cancel(self) -> bool:
        """Keep the function from running. False if it has begun."""
        if not self.claim():
            return False
        self.error, self.finished = asyncio.CancelledError(), True
        return True

    def result(self) -> Any:
        """Return what the function returned, or raise what it raised."""
        if self.error is not None:
            raise self.error
        return self.value

    async def wait(self) -> None:
        """Wait until the job has come back."""
        if self.waiter.done():
            self.waiter = self.waiter.get_loop().create_future()  # nobody awaits the other one any more
        await self.waiter

    def come_back(self) -> None:
        """Tell that the job has ended, on the loop."""
        if not self.waiter.done():
            self.waiter.set_result(None)
        listeners, self.listeners = self.listeners, []
        for listener in listeners:
            listener()


class ToolThreads:
    """The threads of one executor. Its methods are called on the event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        # How many jobs have not come back, and those that are about to.
        self._out = 0
        self._ended: deque[Job] = deque()
        self._woken = False
        self._closed = False
        _open.add(self)

    def start(self, work: Callable[[], Any]) -> Job:
        """Run a function in a thread, in the context of the caller."""
        if self._closed:
            raise RuntimeError("the threads for functions are closed")
        loop = asyncio.get_running_loop()
        if self._out >= len(self._threads):
            name = f"{self._name}_{len(self._threads)}"
            # Daemons, so that those which wait for a job do not keep the process from ending.
            thread = threading.Thread(target=self._work, args=(loop,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        self._out += 1
        job = Job(partial(copy_context().run, work), loop.create_future())
        self._queue.put(job)
        return job

    def close(self) -> None:
        """Cancel what has not begun, and end the threads as soon as their functions return."""
        self._closed = True
        with suppress(Empty):
            while (job := self._queue.get_nowait()) is not None:
                job.cancel()
                job.come_back()
        self._end_threads()

    def finish(self) -> None:
        """Wait for the functions that still run. Called when the process ends."""
        self._end_threads()
        for thread in self._threads:
            thread.join()

    def _end_threads(self) -> None:
        for _ in self._threads:
            self._queue.put(None)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (job := self._queue.get()) is not None:
            if job.claim():
                try:
                    job.value = job.work()
                except StopIteration:
                    # It would end the coroutine that waits for the outcome.
                    job.error = RuntimeError("the function raised StopIteration")
                except BaseException as error:  # noqa: BLE001 - told to the waiter for the outcome
                    job.error = error
                job.finished = True
            self._ended.append(job)
            # A thread that waits for its next job must not keep the last one alive.
            del job
            # INVARIANT: the loop clears the flag before it looks, so what is appended after that wakes it again.
            if not self._woken:
                self._woken = True
                try:
                    loop.call_soon_threadsafe(self._bring_back)
                except RuntimeError:
                    self._woken = False  # the loop is closed, and nobody waits

    def _bring_back(self) -> None:
        self._woken = False
        while self._ended:
            self._out -= 1
            self._ended.popleft().come_back()


_open: weakref.WeakSet[ToolThreads] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    for threads in list(_open):
        threads.finish()

"""Thread pools of our own, one per purpose, so that no work waits for a thread that other work holds.

Tools and libraries use the event loop's default threads, and a tool that hangs there occupies its thread. Interlock
does not depend on them: name lookups, readiness checks and walks over large data each have a pool. Threads start when
they are first needed and stay until the process ends. A forked child has none of its parent's threads, so it starts
with new pools.

A thread that wants the interpreter back after a system call waits until the thread that holds it yields, which Python
requests after 5 ms. `SOON` shortens that for work that other processes wait for, and while a thread beside the event
loop computes. It costs throughput, because threads switch more often, so it is never active all the time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from functools import cached_property, partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from interlock.core.event_loop import running_loop

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")
P = ParamSpec("P")


SOON_S = 0.0002
LONGEST_REST_S = 0.02


class Soon:
    """While any thread is inside, a thread that wants the interpreter gets it after at most `SOON_S`.

    The switch interval belongs to the process. The previous value is restored when the last thread leaves.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._usual = 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual, SOON_S))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                sys.setswitchinterval(self._usual)


SOON = Soon()


class Threads:
    """A pool of threads for one purpose."""

    def __init__(self, name: str, most: int) -> None:
        self.name = f"interlock-{name}"
        self._most = most
        os.register_at_fork(after_in_child=self._forget)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        from concurrent.futures import ThreadPoolExecutor  # a command that reads at once starts no thread

        return ThreadPoolExecutor(self._most, thread_name_prefix=self.name)

    def _forget(self) -> None:
        self.__dict__.pop("_pool", None)

    async def run(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Do some work on a thread of this pool, in the context of the caller; at once where no event loop runs."""
        loop = running_loop()
        if loop is None:
            return work(*args, **named)
        return await loop.run_in_executor(self._pool, partial(copy_context().run, work, *args, **named))


class Computing(Threads):
    """A pool for CPU-bound work, which shares the interpreter with the event loop.

    Whatever is waiting here, the loop has half of the time: it gets the interpreter soon, and a thread rests for as
    long as it computed before it takes the next piece of work. Work that finds nothing else waiting costs no rest.
    """

    def __init__(self, name: str, most: int) -> None:
        super().__init__(name, most)
        self._counting = threading.Lock()
        self._pending = 0

    def _forget(self) -> None:
        super()._forget()
        self._counting = threading.Lock()
        self._pending = 0

    async def run(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        self._count(1)
        try:
            return await super().run(self._compute, partial(work, *args, **named))
        finally:
            # Here and not on the thread: work that is cancelled before it begins never reaches a thread.
            self._count(-1)

    def _compute(self, work: Callable[[], T]) -> T:
        began = time.thread_time()
        try:
            with SOON:
                return work()
        finally:
            if self._pending > 1:
                time.sleep(min(time.thread_time() - began, LONGEST_REST_S))

    def _count(self, more: int) -> None:
        with self._counting:
            self._pending += more


# Walks over inputs, which are bounded by what a request may hold. Several threads would keep the event loop waiting for
# one after the other, and be no faster: only one of them has the interpreter.
INPUTS = Computing("input", 1)
# CPU-bound work on results and records, which may be larger. Never use either for code that can hang.
WALKS = Computing("walk", 2)
# Reading and checking the definitions of tools, before they are admitted and before a large one is first called. What
# an upstream offers takes seconds altogether, and no result waits for it.
DEFINITIONS = Computing("definition", 1)
# A name server that does not answer occupies a thread for as long as the system's resolver waits.
LOOKUPS = Threads("lookup", 32)
# Checks of this server's own health.
CHECKS = Threads("ready", 4)
# Files and databases, which may lie on a network that hangs.
DISK = Threads("disk", 32)

"""Threads of our own, one pool per purpose, so that no work waits for a thread that other work holds.

Tools and libraries use the event loop's default threads, and one that hangs there keeps its thread. Nothing of ours
depends on them: looking up names, checking whether the server is ready and walking over large data each have a pool.
The threads are started when they are first needed and stay until the process ends. A forked child has none of its
parent's threads, so it begins with pools of its own.

A thread that wants the interpreter back after a system call waits until the thread that has it gives it up, which
Python asks of it after 5 ms. `SOON` shortens that for work that other processes wait for. It costs throughput, because
threads change places more often, so nothing uses it all the time.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cached_property, partial
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Threads:
    """A pool of threads for one purpose."""

    def __init__(self, name: str, most: int) -> None:
        self.name = f"interlock-{name}"
        self._most = most
        os.register_at_fork(after_in_child=self._forget)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._most, thread_name_prefix=self.name)

    def _forget(self) -> None:
        self.__dict__.pop("_pool", None)

    async def run(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Do some work on a thread of this pool, in the context of the caller."""
        run = partial(copy_context().run, work, *args, **named)
        return await asyncio.get_running_loop().run_in_executor(self._pool, run)


# Bounded work of the processor alone. Never use it for code that can hang.
WALKS = Threads("walk", 4)
# A name server that does not answer holds a thread for as long as the system's resolver waits.
LOOKUPS = Threads("lookup", 32)
# Checks of this server's own condition.
CHECKS = Threads("ready", 4)
# Files and databases, which may be on a network that hangs.
DISK = Threads("disk", 32)

SOON_S = 0.0002


class Soon:
    """While any thread is inside, a thread that wants the interpreter has it after `SOON_S` at the latest.

    The setting is the process's. It is put back as it was found when the last thread leaves.
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

"""Long reads of a home: on threads of their own, with connections of their own.

The event loop serves every caller, and the default threads serve name lookups and health checks. A read of many rows
uses neither: it would hold up everybody else. A few threads are enough. A long read that is made in slices gives its
thread back after each slice, so that short reads do not wait for the end of a long one.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cached_property, partial
from typing import Generic, TypeVar

from interlock.store.connection import Connection
from interlock.store.home import Home, store_failure

T = TypeVar("T")

# The work is done under the interpreter's lock: more threads would not make it faster.
THREADS = 3


class Readers:
    """The threads that read one database."""

    def __init__(self, home: Home) -> None:
        self._home = home

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, thread_name_prefix="interlock-reader")

    async def run(self, work: Callable[[], T]) -> T:
        """Do some work that takes long on a reading thread."""
        from asyncio import get_running_loop  # commands that read at once do without it

        return await get_running_loop().run_in_executor(self._threads, work)

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Read in one transaction: all that `work` reads is as it was at one moment."""
        return await self.run(partial(self._at_one_moment, work))

    async def slices(self, work: Callable[[Connection], Generator[T]]) -> AsyncGenerator[T]:
        """Run a generator that reads, piece by piece; each piece is read on a reading thread.

        There is no transaction around it: one that lasts as long as a slow client would keep the database's log from
        being cut. Other calls can change the database between two pieces.
        """
        pieces = _Pieces(self._home, work)
        try:
            while (piece := await self.run(pieces.next)) is not None:
                yield piece
        finally:
            try:
                self._threads.submit(pieces.close)
            except RuntimeError:  # the threads have ended
                pieces.close()

    def _at_one_moment(self, work: Callable[[Connection], T]) -> T:
        try:
            with closing(self._home.reading()) as connection:
                connection.execute("BEGIN")
                return work(connection)
        except sqlite3.Error as error:
            raise store_failure(error, "read") from None

    def close(self) -> None:
        """End the threads when they have finished the work that they have."""
        if "_threads" in vars(self):
            self._threads.shutdown(wait=False, cancel_futures=True)


class _Pieces(Generic[T]):
    """A long read that is under way. Its reader can be cancelled while a thread still reads a piece."""

    def __init__(self, home: Home, work: Callable[[Connection], Generator[T]]) -> None:
        self._home = home
        self._work = work
        self._lock = threading.Lock()
        self._open: tuple[Connection, Generator[T]] | None = None

    def next(self) -> T | None:
        """The next piece; None after the last."""
        try:
            with self._lock:
                if self._open is None:
                    connection = self._home.reading()
                    self._open = connection, self._work(connection)
                return next(self._open[1], None)
        except sqlite3.Error as error:
            raise store_failure(error, "read") from None

    def close(self) -> None:
        with self._lock:
            if self._open is not None:
                connection, pieces = self._open
                pieces.close()
                connection.close()

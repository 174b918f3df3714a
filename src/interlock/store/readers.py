"""Long reads of a home: on threads of their own, with connections of their own.

The event loop serves every caller, and the default threads serve name lookups and health checks. A read of many rows
uses neither: it would hold up everybody else. A few threads are enough. A long read that is made in slices gives its
thread back after each slice, so that short reads do not wait for the end of a long one.

Connections to a server are kept and used again: making one costs the server a process, and milliseconds. A file is
opened anew for each read.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from typing import Generic, TypeVar

from interlock.store.failures import store_failure
from interlock.store.home import Home
from interlock.store.port import StatementError, StoreConnection, StoreError

T = TypeVar("T")

# The work is done under the interpreter's lock: more threads would not make it faster.
THREADS = 3


class Readers:
    """The threads that read one database."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._idle: list[StoreConnection] = []
        self._closed = False

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, thread_name_prefix="interlock-reader")

    async def run(self, work: Callable[[], T]) -> T:
        """Do some work that takes long on a reading thread."""
        from asyncio import get_running_loop  # commands that read at once do without it

        return await get_running_loop().run_in_executor(self._threads, work)

    async def read(self, work: Callable[[StoreConnection], T]) -> T:
        """Read in one transaction: all that `work` reads is as it was at one moment."""
        return await self.run(partial(self._at_one_moment, work))

    async def slices(self, work: Callable[[StoreConnection], Generator[T]]) -> AsyncGenerator[T]:
        """Run a generator that reads, piece by piece; each piece is read on a reading thread.

        There is no transaction around it: one that lasts as long as a slow client would keep the database's log from
        being cut. Other calls can change the database between two pieces.
        """
        pieces = _Pieces(self, work)
        try:
            while (piece := await self.run(pieces.next)) is not None:
                yield piece
        finally:
            try:
                # The threads may end before it is their turn.
                self._threads.submit(pieces.close).add_done_callback(lambda done: done.cancelled() and pieces.close())
            except RuntimeError:  # the threads have ended
                pieces.close()

    def _at_one_moment(self, work: Callable[[StoreConnection], T]) -> T:
        try:
            connection = self._begun()
            try:
                return work(connection)
            finally:
                self.give_back(connection)
        except StoreError as error:
            raise store_failure(error, "read") from None

    def _begun(self) -> StoreConnection:
        """A connection in a transaction. The server may have ended one that was kept."""
        while True:
            pooled, connection = bool(self._idle), self.take()
            try:
                connection.execute("BEGIN")
            except BaseException as error:
                connection.close()
                if not pooled or not isinstance(error, StoreError) or isinstance(error, StatementError):
                    raise
            else:
                return connection

    def take(self) -> StoreConnection:
        """A connection to read with, until it is given back."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._home.reading()

    def give_back(self, connection: StoreConnection) -> None:
        """Keep a connection for the next read, or close it."""
        if self._home.near or len(self._idle) >= THREADS:
            connection.close()
            return
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except StoreError:
            connection.close()
            return
        self._idle.append(connection)
        if self._closed:  # meanwhile
            self._hang_up()

    def _hang_up(self) -> None:
        while self._idle:
            with suppress(IndexError):  # another thread has taken it
                self._idle.pop().close()

    def close(self) -> None:
        """End the threads when they have finished the work that they have."""
        self._closed = True
        if "_threads" in vars(self):
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._hang_up()


class _Pieces(Generic[T]):
    """A long read that is under way. Its reader can be cancelled while a thread still reads a piece."""

    def __init__(self, readers: Readers, work: Callable[[StoreConnection], Generator[T]]) -> None:
        self._readers = readers
        self._work = work
        self._lock = threading.Lock()
        self._open: tuple[StoreConnection, Generator[T]] | None = None

    def next(self) -> T | None:
        """The next piece; None after the last."""
        try:
            with self._lock:
                if self._open is None:
                    connection = self._readers.take()
                    self._open = connection, self._work(connection)
                return next(self._open[1], None)
        except StoreError as error:
            raise store_failure(error, "read") from None

    def close(self) -> None:
        with self._lock:
            if self._open is not None:
                connection, pieces = self._open
                pieces.close()
                self._readers.give_back(connection)

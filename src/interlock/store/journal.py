"""The journal: one append-only, hash-chained ledger with one writer.

Theory of operation. Whatever must be durable is handed over as a *unit*: a function that gets a transaction, may read
and write the tables beside the ledger, and appends records. Units queue on the event loop; one `flush` per turn of the
loop takes all that have come and commits them together, so callers that run at the same time share one fsync. A unit
that is alone is committed on the loop, which saves the hand-off to the writer thread, and a single record where it
comes up, if the turn has had none before it; otherwise the thread commits while the loop goes on and the next batch
gathers. Some doors let their callers in one to a turn: where batches had company lately, a flush waits a few turns for
more of it. A caller who is alone never waits. A unit that is handed over as large is committed alone and by the
thread. Where others wait too, batches of them and large units take turns: nobody waits for more than one large unit.

The chain: `hash = sha256(previous hash, seq, body)`. Several processes may share one home. The head is read inside the
write transaction (BEGIN IMMEDIATE excludes other writers), so there is one unbroken chain. The processes
take turns (`turns`), so that one that writes without a pause does not keep the others waiting.

The head is signed every so often (`anchors`). The key is loaded before anything is written: a journal that nobody can
vouch for is not begun.

This module has the queue and the batches; `writer` commits a batch, and `transaction` is what a unit is handed.

The contract of a unit. It is handed a transaction, and:
- All that it changes, it changes through the transaction: tables and records, nothing else. When it raises anything at
  all, its savepoint (or its transaction, where it is alone) is rolled back. It may refuse after it has written.
- It may run more than once: where a whole batch cannot be written, its units are written one by one. So it changes
  nothing outside: no flag, no list, no file. What the caller needs to know it returns. Two runs on the same database
  return the same value and append the same records.
- It does not begin, commit or roll back the transaction, and it does not wait.
Its error is the answer to its own caller, and to nobody else in the batch. The test suite puts a rehearsal in
the place of `Writer.perform`: every unit of every test runs twice there, and a difference is an error.

INVARIANT: when `commit` returns, what the unit wrote is on disk; when it raises, nothing of it is.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.threads import DISK, SOON
from interlock.store.changes import MAX_STALE_S, ChangeReader
from interlock.store.connection import SqliteConnection, store_error
from interlock.store.failures import store_failure
from interlock.store.home import Home
from interlock.store.journal_connection import connected, for_journal
from interlock.store.port import EarlyRow, EndedCall, Reader, ShortReader, StoreConnection, StoreError, Unit, Written
from interlock.store.signing import Signer
from interlock.store.writer import Waiting, Writer

T = TypeVar("T")
_log = logging.getLogger("interlock.journal")

CROWDED = 1000
MAX_PENDING = 20_000
# A lone unit is committed on the loop only while commits are quick; a slow disk must not stall everybody.
INLINE_BELOW_S = 0.005
# A flush waits until nothing has come for so many turns, for so long at most; a large crowd that is as large as it
# usually is, is waited for no longer. After so many batches of one unit, the crowd is over and nothing waits any more.
QUIET_TURNS = 6
LARGE = 64
# The log of the database is applied after so many large units. A commit applies it by itself at about thirty of them.
APPLY_EVERY = 8
GATHER_S = 0.005
LONELY = 8
# While other processes wait to write, a batch has at most so many units. They wait for as long as it takes to write.
MOST_IN_COMPANY = 32

_NOBODY: asyncio.Future[None] | None = None
_execute = sqlite3.Connection.execute


class _FileReader(SqliteConnection):
    """A connection for short reads on the event loop. One function for each read: calls read through it."""

    def one(self, statement: str, parameters: Sequence[Any] = (), /) -> Any:
        try:
            return _execute(self, statement, parameters).fetchone()
        except sqlite3.Error as error:
            raise store_failure(store_error(error), "read") from None

    def all(self, statement: str, parameters: Sequence[Any] = (), /) -> list[Any]:
        try:
            return _execute(self, statement, parameters).fetchall()
        except sqlite3.Error as error:
            raise store_failure(store_error(error), "read") from None

    def each(self, statement: str, parameters: Sequence[Any] = (), /) -> Iterator[Any]:
        # Read at once: a statement that is left open would keep the database's log from being cut.
        return iter(self.all(statement, parameters))


class _ServerReader:
    """The same for a server."""

    __slots__ = ("_connection",)

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection

    def one(self, statement: str, parameters: Sequence[Any] = (), /) -> Any:
        try:
            return self._connection.one(statement, parameters)
        except StoreError as error:
            raise store_failure(error, "read") from None

    def all(self, statement: str, parameters: Sequence[Any] = (), /) -> list[Any]:
        try:
            return self._connection.all(statement, parameters)
        except StoreError as error:
            raise store_failure(error, "read") from None

    def each(self, statement: str, parameters: Sequence[Any] = (), /) -> Iterator[Any]:
        return iter(self.all(statement, parameters))

    def close(self) -> None:
        self._connection.close()


def _short_reader(home: Home) -> ShortReader:
    if home.near:
        return for_journal(connected(home.database, _FileReader, patience_s=0))
    return _ServerReader(home.connect())


# many methods: the store of SQLite: the methods of the port, and the queue behind them
class Journal:
    """The writer. One per process and home; belongs to the event loop that opened it."""

    def __init__(
        self,
        home: Home,
        *,
        clock: Clock,
        signer: Signer,
        monotonic: Callable[[], float] | None = None,
        max_stale_s: float = MAX_STALE_S,
    ) -> None:
        self._home = home
        # Whether the loop may wait for a commit or a short read.
        self.near = home.near
        self.writer = Writer(home, clock=clock, signer=signer)
        self._reader = _short_reader(home)
        # For repositories that only read. Short reads only: they run where they are called.
        self.reader: Reader = self._reader
        # `monotonic` is the time of the process where `clock` is another one.
        self.changes = ChangeReader(home, monotonic=monotonic or clock.monotonic, max_stale_s=max_stale_s)
        self._loop = asyncio.get_running_loop()
        self._on_ended: Callable[[list[EndedCall]], None] = _unwatched
        self._pending: list[Waiting[Any]] = []
        # Whether so much is queued that callers should wait for the disk, whatever they were promised.
        self.crowded = False
        self._scheduled = False
        self._committing = False
        # The record that was committed where it came up in this turn of the loop: the next one may have company.
        self._on_the_spot: list[Waiting[Any]] = []
        self._company = 0
        self._usual = 0
        self._gathered = 0
        self._quiet_turns = 0
        self._gather_until = 0.0
        # How many large units wait, and whether the next batch is one of them.
        self._large = 0
        self._large_next = False
        # How many large units were committed since the log was last applied for them.
        self._unapplied = 0
        self._closed = False
        self._closing: asyncio.Future[None] | None = None
        self._batches: queue.SimpleQueue[list[Waiting[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_batches, name="interlock-journal", daemon=True)
        self._thread.start()
        self._idle = asyncio.Event()
        self._idle.set()

    # Writing

    async def commit(self, unit: Unit[T]) -> T:
        """Run a unit durably and return what it returned; raises what it raised, E3801 or E3803 when unwritable."""
        return await self.submit(unit)

    def submit(self, unit: Unit[T], early: EarlyRow | None = None) -> asyncio.Future[T]:
        """Queue a unit at once. The future has what `commit` returns. `early` is a row that the unit asks about.

        A queued unit runs even if the future is cancelled. A caller that needs its outcome although it may be
        cancelled awaits `asyncio.shield(future)`, which needs no task.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        self._enqueue(Waiting(unit, future, early=early))
        return future

    async def commit_large(self, unit: Unit[T]) -> T:
        """The same for a unit that writes some hundred kilobytes. It shares no batch, and others have their turn.

        Its caller also waits while the log is applied. Otherwise a small commit of another caller would have to do it.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        self._enqueue(Waiting(unit, future, large=True))
        self._large += 1
        done = await future
        self._unapplied += 1
        if self._unapplied >= APPLY_EVERY:
            self._unapplied = 0
            await DISK.run(self._home.apply_log)
        return done

    def append(self, kind: str, call: str, body: bytes, *, awaited: bool = True) -> asyncio.Future[None]:
        """Make one record durable: await what this returns. One that is not `awaited` goes with the next batch."""
        future: asyncio.Future[None] = asyncio.Future(loop=self._loop)
        self._enqueue(Waiting((kind, call, body), future), on_the_spot=awaited)
        return future

    def record(self, kind: str, call: str, body: bytes, listener: Written | None = None) -> None:
        """Write one record with the next batch, without waiting for the disk. The listener hears how that ended.

        A listener in place of a future needs no turn of the loop for each record, only for the batch.
        """
        self._enqueue(Waiting((kind, call, body), _NOBODY, listener))

    def post(self, unit: Unit[Any]) -> None:
        """Run a unit with the next batch, without waiting for the disk."""
        self._enqueue(Waiting(unit, None))

    def watch_clock(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Tell, on the loop, of every time that the machine's clock was found to have been set."""
        self.writer.time.on_step = lambda facts: _on_loop(self._loop, listener, facts)

    def watch_ended(self, listener: Callable[[list[EndedCall]], None]) -> None:
        """Tell, on the loop, of calls that were closed by somebody else than their task.

        The listener is called after those who wait for the commit, so what they announce about it comes first.
        """
        self._on_ended = listener

    @property
    def fill(self) -> float:
        """The fill level of the queue of writes, from zero to one."""
        return len(self._pending) / MAX_PENDING

    async def drain(self) -> None:
        """Wait until everything queued so far is on disk."""
        while self._pending or self._committing:
            await self._idle.wait()

    def _enqueue(self, waiting: Waiting[Any], *, on_the_spot: bool = False) -> None:
        if self._closed:
            raise Failure("E3801", "the journal is closed")
        queued = len(self._pending)
        if queued >= MAX_PENDING:
            raise Failure("E3803", "too many records wait for the journal", retry_after_ms=100)
        self._pending.append(waiting)
        self.crowded = queued + 1 >= CROWDED
        if self._scheduled or self._committing:
            return
        self._idle.clear()
        if on_the_spot and self.near and not self._company and not self._on_the_spot:
            self._on_the_spot.append(waiting)
            self._loop.call_soon(self._on_the_spot.clear)
            self._flush()
        else:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._company and len(self._pending) > self._large and self._gathers():
            self._loop.call_soon(self._flush)
            return
        self._scheduled = False
        batch, self._pending = self._pending, []
        if self._large:
            batch, self._pending = self._take_turns(batch)
        elif len(batch) > MOST_IN_COMPANY and self.writer.turns.contended:
            batch, self._pending = batch[:MOST_IN_COMPANY], batch[MOST_IN_COMPANY:]
        self.crowded = len(self._pending) >= CROWDED
        self._gathered = 0
        if not batch:
            self._idle.set()
            return
        self._company = LONELY if len(batch) > 1 else max(self._company - 1, 0)
        self._usual = max(len(batch), self._usual - self._usual // 8)
        alone = len(batch) == 1 and self.near and not batch[0].large
        quick = self.writer.commit_s < INLINE_BELOW_S and not self.writer.extends
        if alone and quick and self._commit_inline(batch):
            return
        self._committing = True
        self._batches.put(batch)

    def _take_turns(self, waiting: list[Waiting[Any]]) -> tuple[list[Waiting[Any]], list[Waiting[Any]]]:
        """The batch to commit now and those that wait on: all that are not large, then one large unit, and so on."""
        small = [one for one in waiting if not one.large]
        large = [one for one in waiting if one.large]
        if small and not self._large_next:
            self._large_next = True
            return small, large
        self._large_next = False
        self._large -= 1
        return large[:1], [*small, *large[1:]]

    def _gathers(self) -> bool:
        """Whether to wait another turn, because others are still coming."""
        count = len(self._pending)
        if not self._gathered:
            self._gather_until = self._loop.time() + GATHER_S
        self._quiet_turns = 0 if count > self._gathered else self._quiet_turns + 1
        self._gathered = count
        all_here = count >= LARGE and count >= self._usual
        return self._quiet_turns < (1 if all_here else QUIET_TURNS) and self._loop.time() < self._gather_until

    def _commit_inline(self, batch: list[Waiting[Any]]) -> bool:
        """Commit on the loop; False when another process holds the lock and waiting would stall the loop."""
        writer = self.writer
        if not writer.lock.acquire(blocking=False):
            return False
        try:
            if not writer.write(batch, wait=False):
                return False
        finally:
            writer.lock.release()
        self._settle(batch)
        return True

    def _write_batches(self) -> None:
        writer = self.writer
        while (batch := self._batches.get()) is not None:
            # Each statement gives the interpreter up, and other processes wait until it is had again.
            with writer.lock, SOON if writer.turns.contended else nullcontext():
                writer.write(batch)
                writer.turns.look()
            try:
                self._loop.call_soon_threadsafe(self._settle, batch)
            except RuntimeError:
                return  # the loop is gone, and so is everybody who waited
            if writer.extends:
                with writer.lock:
                    writer.extend_log()

    def _settle(self, batch: list[Waiting[Any]]) -> None:
        self._committing = False
        lost: BaseException | None = None
        for waiting in batch:
            future = waiting.future
            if future is None:
                if waiting.listener is not None:
                    record: Any = waiting.work
                    waiting.listener.written(record[2], waiting.error)
                elif waiting.error is not None:
                    lost = lost or waiting.error
                continue
            if future.done():
                continue
            if waiting.error is not None:
                future.set_exception(waiting.error)
            else:
                future.set_result(waiting.value)
        if lost is not None:
            _log.error("what nobody waited for could not be written to the journal: %s", lost)
        if self.writer.ended:
            ended, self.writer.ended = self.writer.ended, []
            # Those who wait have their turn first; behind a shield they need two.
            self._loop.call_soon(self._loop.call_soon, self._on_ended, ended)
        # The writer's thread has the list until its next one comes, and what is in it may hold much.
        batch.clear()
        if self._pending:
            if not self._scheduled:
                self._scheduled = True
                self._loop.call_soon(self._flush)
        else:
            self._idle.set()

    # Signing

    @property
    def unsigned(self) -> bool:
        """Whether records wait for a signature for longer than they should; any commit gives them one."""
        return self.writer.unsigned

    @property
    def leaves_pages(self) -> bool:
        """Whether what is removed leaves empty pages in a file, which can be given back to the disk."""
        return self.near

    def anchor(self) -> None:
        """Sign and anchor the head now."""
        self.writer.anchor()

    # Reading

    async def read(self, work: Callable[[Reader], T]) -> T:
        """Run a function that only reads, and return its value. A file is read on the event loop, so keep it short."""
        return work(self.reader) if self.near else await DISK.run(work, self.reader)

    async def close(self) -> None:
        """Write what is queued, anchor the head, let go of the file. A second call waits for the same end."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._home.stop_waiting()
        await self.drain()
        self._closed = True
        self._batches.put(None)
        await DISK.run(self._thread.join)
        await DISK.run(self.changes.stop)
        try:
            self.anchor()
        except Failure as failure:
            # A full disk or a held lock: the key was there from the beginning. The next process signs what is there.
            _log.warning("the end of the journal is not signed yet: %s", failure.message)
        finally:
            self.writer.close()
            self._reader.close()


def _unwatched(_: list[EndedCall]) -> None:
    pass


def _on_loop(loop: asyncio.AbstractEventLoop, listener: Callable[[T], None], facts: T) -> None:
    try:
        loop.call_soon_threadsafe(listener, facts)
    except RuntimeError:
        pass  # the loop is gone; it is in the log

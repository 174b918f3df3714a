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

Every so often, and when the journal is closed, the head is signed and anchored in the database, in a file beside it and
beside the keys. Removing records from the end then contradicts an anchor. The key is loaded before anything is written:
a journal that nobody can vouch for is not begun. What a killed process left unsigned, the next one signs before it
writes; more than a killed process can leave is refused (`last_head`).

The contract of a unit. It is handed a transaction, and:
- All that it changes, it changes through the transaction: tables and records, nothing else. When it raises anything at
  all, its savepoint (or its transaction, where it is alone) is rolled back. It may refuse after it has written.
- It may run more than once: where a whole batch cannot be written, its units are written one by one. So it changes
  nothing outside: no flag, no list, no file. What the caller needs to know it returns. Two runs on the same database
  return the same value and append the same records.
- It does not begin, commit or roll back the transaction, and it does not wait.
Its error is the answer to whoever handed it over, and to nobody else in the batch. The test suite puts a rehearsal in
the place of `Journal.perform`: every unit of every test runs twice there, and a difference is an error.

INVARIANT: when `commit` returns, what the unit wrote is on disk; when it raises, nothing of it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import astuple
from itertools import chain
from typing import Any, Generic, TypeGuard, TypeVar

import orjson

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.threads import DISK, SOON
from interlock.store import last_head, records
from interlock.store.changes import MAX_STALE_S, ChangeReader
from interlock.store.connection import Connection, Rows
from interlock.store.home import Home, apply_log, connect, no_room, store_failure
from interlock.store.last_head import ANCHOR_EVERY, GENESIS, anchor_line, note_anchor
from interlock.store.port import Changed, Reader, Unit
from interlock.store.signing import Signer, signed_by
from interlock.store.timekeeping import StoreTime
from interlock.store.turns import Turns

T = TypeVar("T")
_log = logging.getLogger("interlock.journal")

ANCHOR_AFTER_S = 1.0
LOCK_PATIENCE_S = 10.0
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

_INSERT = "INSERT INTO journal (seq, kind, call, body, hash) VALUES (?, ?, ?, ?, ?)"
# Each step of a statement hands the interpreter over and back. Many rows to a statement make that one hand-over.
_ROWS_AT_ONCE = 64
_INSERT_MANY = _INSERT + ", (?, ?, ?, ?, ?)" * (_ROWS_AT_ONCE - 1)
_HEAD = "SELECT seq, hash FROM journal ORDER BY seq DESC LIMIT 1"
_PURGED = "SELECT last_seq, hash FROM segment ORDER BY last_seq DESC LIMIT 1"


# Errors of a statement. All others of the database are the store's: a full disk, a lock, a damaged file.
_OF_A_STATEMENT = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.DataError, sqlite3.InterfaceError)


class Transaction(Rows):
    """A transaction of a unit: the store's time, the tables, and the end of the chain."""

    __slots__ = ("_connection", "_head", "_seq", "now_ms", "rows", "torn")

    def __init__(self, connection: Connection, seq: int, head: bytes, now_ms: int) -> None:
        self._connection = connection
        self._seq = seq
        self._head = head
        self.now_ms = now_ms
        self.rows: list[tuple[int, str, str, bytes, bytes]] = []
        # Whether a piece of work failed and could not be undone by itself: then nothing of the transaction may stay.
        self.torn = False

    @property
    def head(self) -> tuple[int, bytes]:
        return self._seq, self._head

    def append(self, kind: str, call: str, body: bytes) -> None:
        """Add a record to the chain. The body is canonical JSON and says kind and call itself."""
        self._seq = seq = self._seq + 1
        self._head = head = hashlib.sha256(self._head + seq.to_bytes(8, "big") + body).digest()
        self.rows.append((seq, kind, call, body, head))

    def execute(self, statement: str, parameters: Sequence[Any] = (), /) -> Changed:
        return self._connection.execute(statement, parameters)

    def has(self, kind: str, call: str) -> bool:
        """Whether the journal holds such a record of a call, or is about to with this transaction."""
        if any(row[1] == kind and row[2] == call for row in self.rows):
            return True
        return self.one("SELECT 1 FROM journal WHERE call = ? AND kind = ? LIMIT 1", (call, kind)) is not None

    def newest(self, kind: str, call: str) -> Iterator[dict[str, Any]]:
        """The records of a kind about a call, the newest first: those of this transaction, then the journal's."""
        for row in reversed(self.rows):
            if row[1] == kind and row[2] == call:
                yield orjson.loads(row[3])
        statement = "SELECT body FROM journal WHERE call = ? AND kind = ? ORDER BY seq DESC"
        for (body,) in self.each(statement, (call, kind)):
            yield orjson.loads(body)

    def apart(self, work: Callable[..., T], *given: Any) -> T:
        """Do a piece of work. When it raises, nothing of it is left, in the tables or the chain."""
        execute, mark = self._connection.execute, self.mark()
        execute("SAVEPOINT piece")
        try:
            done = work(*given)
        except BaseException:
            self.torn = True
            if self._connection.in_transaction:  # a full disk makes SQLite give up all of it
                execute("ROLLBACK TO piece")
                execute("RELEASE piece")
                self.rewind(mark)
                self.torn = False
            raise
        execute("RELEASE piece")
        return done

    def mark(self) -> tuple[int, int, bytes]:
        return len(self.rows), self._seq, self._head

    def rewind(self, mark: tuple[int, int, bytes]) -> None:
        length, self._seq, self._head = mark
        del self.rows[length:]


_NOBODY: asyncio.Future[None] | None = None


class _Waiting(Generic[T]):
    """A unit (or a single record) in the queue and who waits for it, if anybody does."""

    __slots__ = ("error", "future", "large", "value", "work")

    def __init__(
        self, work: Unit[T] | tuple[str, str, bytes], future: asyncio.Future[T] | None, large: bool = False
    ) -> None:
        self.work = work
        self.future = future
        self.large = large
        self.value: Any = None
        self.error: BaseException | None = None


class _Reader:
    """The journal's connection for reads. It reads on the thread of its caller, so reads must be short."""

    __slots__ = ("_connection",)

    def __init__(self, home: Home) -> None:
        self._connection = connect(home.database)

    def one(self, statement: str, parameters: Sequence[Any] = (), /) -> Any:
        try:
            return self._connection.execute(statement, parameters).fetchone()
        except sqlite3.Error as error:
            raise store_failure(error, "read") from None

    def all(self, statement: str, parameters: Sequence[Any] = (), /) -> list[Any]:
        try:
            return self._connection.execute(statement, parameters).fetchall()
        except sqlite3.Error as error:
            raise store_failure(error, "read") from None

    def each(self, statement: str, parameters: Sequence[Any] = (), /) -> Iterator[Any]:
        # Read at once: a statement that is left open would keep the database's log from being cut.
        return iter(self.all(statement, parameters))

    def close(self) -> None:
        self._connection.close()


class Journal:
    """The writer. One per process and home; belongs to the event loop that opened it."""

    @staticmethod
    def perform(unit: Unit[Any], transaction: Transaction) -> Any:
        """Run a unit. Tests put a rehearsal in this place, which holds every unit to its contract."""
        return unit(transaction)

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
        self._clock = clock
        self._signer = signer
        self._connection = home.open_database()
        # What every batch says to the database it says through this one; to make another takes its time.
        self._cursor = self._connection.cursor()
        self._turns = Turns(home.turns)
        self._lock = threading.Lock()
        self._unanchored = 0
        self._anchored_at = time.monotonic()
        # The newest signature that this process knows of: its place, and the store's time when it was made.
        self._anchored_through = self._anchored_ms = 0
        self._take_over()
        self._reader = _Reader(home)
        # For repositories that only read. Short reads only: they run where they are called.
        self.reader: Reader = self._reader
        # `monotonic` is the time of the process where `clock` is another one.
        self.changes = ChangeReader(home.database, monotonic=monotonic or clock.monotonic, max_stale_s=max_stale_s)
        self._loop = asyncio.get_running_loop()
        self._pending: list[_Waiting[Any]] = []
        self._scheduled = False
        self._committing = False
        # Whether a record was committed where it came up in this turn of the loop: whoever comes next may have company.
        self._on_the_spot = False
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
        self._commit_s = 0.0
        self._batches: queue.SimpleQueue[list[_Waiting[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_batches, name="interlock-journal", daemon=True)
        self._thread.start()
        self._idle = asyncio.Event()
        self._idle.set()

    # Writing

    async def commit(self, unit: Unit[T]) -> T:
        """Run a unit durably and return what it returned; raises what it raised, E3801 or E3803 when unwritable."""
        return await self.submit(unit)

    def submit(self, unit: Unit[T]) -> asyncio.Future[T]:
        """Queue a unit at once. The future has what `commit` returns.

        A queued unit runs even if the future is cancelled. A caller that needs its outcome although it may be
        cancelled awaits `asyncio.shield(future)`, which needs no task.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        self._enqueue(_Waiting(unit, future))
        return future

    async def commit_large(self, unit: Unit[T]) -> T:
        """The same for a unit that writes some hundred kilobytes. It shares no batch, and others have their turn.

        Its caller also waits while the log is applied. Otherwise a small commit of another caller would have to do it.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        self._enqueue(_Waiting(unit, future, large=True))
        self._large += 1
        done = await future
        self._unapplied += 1
        if self._unapplied >= APPLY_EVERY:
            self._unapplied = 0
            await DISK.run(apply_log, self._home)
        return done

    def append(self, kind: str, call: str, body: bytes) -> asyncio.Future[None]:
        """Make one record durable: await what this returns."""
        future: asyncio.Future[None] = asyncio.Future(loop=self._loop)
        self._enqueue(_Waiting((kind, call, body), future))
        return future

    def record(self, kind: str, call: str, body: bytes) -> None:
        """Write one record with the next batch, without waiting for the disk."""
        self._enqueue(_Waiting((kind, call, body), _NOBODY))

    def post(self, unit: Unit[Any]) -> None:
        """Run a unit with the next batch, without waiting for the disk."""
        self._enqueue(_Waiting(unit, None))

    def watch_clock(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Tell, on the loop, of every time that the machine's clock was found to have been set."""
        self._time.on_step = lambda facts: _on_loop(self._loop, listener, facts)

    @property
    def crowded(self) -> bool:
        """Whether so much is queued that callers should wait for the disk, whatever they were promised."""
        return len(self._pending) >= CROWDED

    @property
    def fill(self) -> float:
        """The fill level of the queue of writes, from zero to one."""
        return len(self._pending) / MAX_PENDING

    async def drain(self) -> None:
        """Wait until everything queued so far is on disk."""
        while self._pending or self._committing:
            await self._idle.wait()

    def _enqueue(self, waiting: _Waiting[Any]) -> None:
        if self._closed:
            raise Failure("E3801", "the journal is closed")
        if len(self._pending) >= MAX_PENDING:
            raise Failure("E3803", "too many records wait for the journal", retry_after_ms=100)
        self._pending.append(waiting)
        if self._scheduled or self._committing:
            return
        self._idle.clear()
        alone = not self._company and not self._on_the_spot
        if alone and waiting.future is not None and not callable(waiting.work):
            self._on_the_spot = True
            self._loop.call_soon(self._turn)
            self._flush()
        else:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _turn(self) -> None:
        self._on_the_spot = False

    def _flush(self) -> None:
        if self._company and len(self._pending) > self._large and self._gathers():
            self._loop.call_soon(self._flush)
            return
        self._scheduled = False
        batch, self._pending = self._pending, []
        if self._large:
            batch, self._pending = self._take_turns(batch)
        self._gathered = 0
        if not batch:
            self._idle.set()
            return
        self._company = LONELY if len(batch) > 1 else max(self._company - 1, 0)
        self._usual = max(len(batch), self._usual - self._usual // 8)
        alone = len(batch) == 1 and not batch[0].large
        if alone and self._commit_s < INLINE_BELOW_S and self._commit_inline(batch):
            return
        self._committing = True
        self._batches.put(batch)

    def _take_turns(self, waiting: list[_Waiting[Any]]) -> tuple[list[_Waiting[Any]], list[_Waiting[Any]]]:
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

    def _commit_inline(self, batch: list[_Waiting[Any]]) -> bool:
        """Commit on the loop; False when another process holds the lock and waiting would stall the loop."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._write_surely(batch, patience_s=0.0):
                return False
        finally:
            self._lock.release()
        self._settle(batch)
        return True

    def _write_batches(self) -> None:
        while (batch := self._batches.get()) is not None:
            # Each statement gives the interpreter up, and other processes wait until it is had again.
            with self._lock, SOON if self._turns.contended else nullcontext():
                self._write_surely(batch, patience_s=LOCK_PATIENCE_S)
            try:
                self._loop.call_soon_threadsafe(self._settle, batch)
            except RuntimeError:
                return  # the loop is gone, and so is everybody who waited

    def _settle(self, batch: list[_Waiting[Any]]) -> None:
        self._committing = False
        lost: BaseException | None = None
        for waiting in batch:
            future = waiting.future
            if future is None:
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
        # The writer's thread has the list until its next one comes, and what is in it may hold much.
        batch.clear()
        if self._pending:
            if not self._scheduled:
                self._scheduled = True
                self._loop.call_soon(self._flush)
        else:
            self._idle.set()

    def _write_surely(self, batch: list[_Waiting[Any]], *, patience_s: float) -> bool:
        """Write a batch; whatever goes wrong, everybody who waits is answered and the writer goes on."""
        try:
            return self._write(batch, patience_s=patience_s)
        except Exception:  # noqa: BLE001 - a writer that died would leave everybody waiting for ever
            _log.exception("the journal's writer failed")
            _fail(batch, Failure("E3801", "the journal cannot be written"))
            return True

    def _write(self, batch: list[_Waiting[Any]], *, patience_s: float) -> bool:
        """Commit a batch. False only when the lock was not to be had in time and patience was zero."""
        began = time.monotonic()
        try:
            if not self._turns.begin(self._cursor.execute, patience_s):
                if patience_s == 0.0:
                    return False
                _fail(batch, Failure("E3803", "another process holds the journal", retry_after_ms=100))
                return True
            self._apply(batch)
        except Exception as error:  # noqa: BLE001 - of a unit that is alone, of a record that cannot be stored, of the disk
            self._roll_back()
            if _of_the_store(error):
                _fail(batch, store_failure(error, "written"))
            else:
                self._write_singly(batch, error, patience_s)
        except BaseException:  # Ctrl-C: a transaction that stayed open would stop every later one
            self._roll_back()
            raise
        if not batch[0].large:  # which takes longer, and says little of the next batch
            self._commit_s = 0.8 * self._commit_s + 0.2 * (time.monotonic() - began)
        return True

    def _begin(self) -> None:
        if not self._turns.begin(self._cursor.execute, LOCK_PATIENCE_S):
            raise Failure("E3803", "another process holds the journal", retry_after_ms=100)

    def _apply(self, batch: list[_Waiting[Any]]) -> None:
        cursor = self._cursor
        row = cursor.execute(_HEAD).fetchone() or cursor.execute(_PURGED).fetchone() or (0, GENESIS)
        transaction = Transaction(self._connection, row[0], row[1], self._time.read())
        timed = self._time.due
        if timed:
            self._time.write(cursor.execute, self._connection)
        for waiting in batch:
            unit = waiting.work
            if not callable(unit):
                transaction.append(*unit)
                continue
            if len(batch) == 1:
                # What it raises ends the transaction, which undoes as much as a savepoint and costs nothing.
                waiting.value, waiting.error = self.perform(unit, transaction), None
                continue
            try:
                waiting.value, waiting.error = transaction.apart(self.perform, unit, transaction), None
            except Exception as error:
                if transaction.torn:
                    raise
                waiting.value, waiting.error = None, _answer(error)
        rows = transaction.rows
        whole = len(rows) - len(rows) % _ROWS_AT_ONCE
        for start in range(0, whole, _ROWS_AT_ONCE):
            cursor.execute(_INSERT_MANY, list(chain.from_iterable(rows[start : start + _ROWS_AT_ONCE])))
        if len(rows) - whole == 1:
            cursor.execute(_INSERT, rows[whole])
        elif whole < len(rows):
            cursor.executemany(_INSERT, rows[whole:])
        anchor = self._anchor_if_due(transaction)
        cursor.execute("COMMIT")
        if timed:
            self._time.written()
        if anchor is not None:
            self._note_anchor(*anchor)

    def _write_singly(self, batch: list[_Waiting[Any]], error: Exception, patience_s: float) -> None:
        if len(batch) == 1:
            batch[0].value, batch[0].error = None, _answer(error)
            return
        for waiting in batch:
            self._write([waiting], patience_s=patience_s or LOCK_PATIENCE_S)

    def _roll_back(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            # A connection that cannot roll back is of no more use.
            self._connection.close()
            self._connection = connect(self._home.database)
            self._cursor = self._connection.cursor()

    # Anchoring

    def _take_over(self) -> None:
        """Make sure that this process can sign what it writes, and that what is there was written by Interlock.

        A key that is damaged or gone must not be noticed later: calls would go on, and nothing would vouch for them.
        """
        connection = self._connection
        try:
            # While others open the same home, one of them may hold the whole of it for a moment, even against readers.
            connection.execute(f"PRAGMA busy_timeout={LOCK_PATIENCE_S * 1000:.0f}")
            self._time = StoreTime(self._clock, connection)
            # The file first: what it names is in the database before.
            ends = last_head.ends(connection, last_head.read(self._home))
            if ends.anchor is None:
                # There from the first day, so that a file that is missing later shows.
                self._home.anchors.touch(mode=0o600)
            self._signer.check(None if ends.signed is None else ends.signed.key_id)
            self._refuse_forged(ends)
            last_head.refuse_rewritten(connection, ends)
            if ends.signed is not None:
                self._anchored_through, self._anchored_ms = ends.signed.seq, ends.signed.at_ms
            has_last_head = ends.last is not None and last_head.expected(connection)
            # From here on this process writes, and waits for its turn to do so.
            connection.execute("PRAGMA busy_timeout=0")
            if not has_last_head:
                self._keep_last_head(ends)
            if ends.unsigned:
                self._unanchored = ends.unsigned
                self.anchor()
        except BaseException as error:
            self._turns.close()
            connection.close()
            if isinstance(error, sqlite3.Error):
                raise store_failure(error) from None
            if isinstance(error, OSError):
                words = f"the journal's signing key cannot be used: {error.strerror}"
                raise no_room(error) or Failure("E3801", words) from None
            raise

    def _refuse_forged(self, ends: last_head.Ends) -> None:
        """Refuse (E3804) a signed head whose signature this home's key did not make."""
        public = self._signer.public  # makes the pair where there is none
        for one, where in ((ends.last, "keys/journal.head"), (ends.anchor, "the newest anchor")):
            if one is not None and not signed_by(public, "head", one.seq, one.hash, one.at_ms, one.signature):
                advice = "keep a copy of the home as evidence and look at it: interlock audit verify"
                raise Failure("E3804", f"the signature of {where} does not verify", resolution=advice)

    def _keep_last_head(self, ends: last_head.Ends) -> None:
        """Keep a last signed head. A home of an earlier version gets one, and a record that says so."""
        connection = self._connection
        now_ms = self._time.read()
        if ends.last is None:
            first = ends.anchor
            if first is None:
                signature = self._signer.sign("head", 0, GENESIS, now_ms)
                first = last_head.SignedHead(0, GENESIS, now_ms, self._signer.key_id, signature)
                self._anchored_ms = now_ms
            try:
                last_head.write(self._home, anchor_line(*astuple(first)), first=True)
            except OSError as error:
                _log.warning("no last signed head can be kept beside the keys: %s", error.strerror)
                return
        fact = "INSERT INTO fact (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING"
        with self._lock:
            self._begin()
            if not ends.head[0]:
                connection.execute(fact, (last_head.FACT, "from the beginning"))
                connection.execute("COMMIT")
                return
            row = connection.execute(_HEAD).fetchone() or ends.head
            transaction = Transaction(connection, row[0], row[1], now_ms)
            if transaction.execute(fact, (last_head.FACT, f"from record {row[0]} on")).rowcount:
                facts = {"act": "last_head.begun", "through": row[0], "unsigned": ends.unsigned}
                transaction.append("signing", "journal", records.plain("signing", "journal", now_ms, **facts))
                connection.execute(_INSERT, transaction.rows[0])
            made = self._anchor_if_due(transaction, now=True)
            connection.execute("COMMIT")
        if made is not None:
            self._note_anchor(*made)

    @property
    def unsigned(self) -> bool:
        """Whether records wait for a signature for longer than they should; any commit gives them one."""
        return self._unanchored > 0 and time.monotonic() - self._anchored_at >= ANCHOR_AFTER_S

    def _anchor_if_due(self, transaction: Transaction, *, now: bool = False) -> tuple[int, bytes, int, bytes] | None:
        seq, head = transaction.head
        # With what others wrote meanwhile, so that however many processes write, no more than this is ever unsigned.
        self._unanchored = seq - self._anchored_through
        waited = time.monotonic() - self._anchored_at
        # The time of records counts too: what is signed late by it looks as if its signature had been removed.
        aged = not 0 <= transaction.now_ms - self._anchored_ms < ANCHOR_AFTER_S * 1000
        if not self._unanchored or not (now or self._unanchored >= ANCHOR_EVERY or waited >= ANCHOR_AFTER_S or aged):
            return None
        self._time.write(transaction.execute, self._connection)
        signature = self._signer.sign("head", seq, head, transaction.now_ms)
        added = transaction.execute(
            "INSERT INTO anchor (seq, hash, at_ms, key_id, signature) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (seq) DO NOTHING",
            (seq, head, transaction.now_ms, self._signer.key_id, signature),
        )
        if not added.rowcount:
            # Signed already, and noted by whoever did: what was counted since was not written, or not by this process.
            # INVARIANT: the time of a signature is that at which it was made. By a later one, the next record would be
            # left unsigned, and whoever opens the home then would find it made too long after the newest signature.
            row = transaction.one("SELECT at_ms FROM anchor WHERE seq = ?", (seq,))
            self._signed(seq, transaction.now_ms if row is None else row[0])
            return None
        return seq, head, transaction.now_ms, signature

    def _signed(self, seq: int, at_ms: int) -> None:
        self._unanchored = 0
        self._anchored_at = time.monotonic()
        self._anchored_through, self._anchored_ms = seq, at_ms

    def _note_anchor(self, seq: int, head: bytes, at_ms: int, signature: bytes) -> None:
        """Keep the anchor outside the database as well, where an edit of the database does not reach it."""
        self._signed(seq, at_ms)
        note_anchor(self._home, anchor_line(seq, head, at_ms, self._signer.key_id, signature))

    def anchor(self) -> None:
        """Sign and anchor the head now."""
        with self._lock:
            self._begin()
            try:
                row = self._connection.execute(_HEAD).fetchone()
                made = None
                if row is not None and self._unanchored:
                    made = self._anchor_if_due(
                        Transaction(self._connection, row[0], row[1], self._time.read()), now=True
                    )
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                self._roll_back()
                raise store_failure(error, "written") from None
        if made is not None:
            self._note_anchor(*made)

    # Reading

    async def read(self, work: Callable[[Reader], T]) -> T:
        """What a function finds that only reads. It reads on the event loop, so it must be short."""
        return work(self._reader)

    async def close(self) -> None:
        """Write what is queued, anchor the head, let go of the file. Whoever asks again waits for the same end."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
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
            self._turns.close()
            self._connection.close()
            self._reader.close()


def _fail(batch: list[_Waiting[Any]], failure: Failure) -> None:
    for waiting in batch:
        waiting.value, waiting.error = None, failure


def _on_loop(
    loop: asyncio.AbstractEventLoop, listener: Callable[[dict[str, Any]], None], facts: dict[str, Any]
) -> None:
    try:
        loop.call_soon_threadsafe(listener, facts)
    except RuntimeError:
        pass  # the loop is gone; it is in the log


def _of_the_store(error: Exception) -> TypeGuard[sqlite3.Error]:
    return isinstance(error, sqlite3.Error) and not isinstance(error, _OF_A_STATEMENT)


def _answer(error: Exception) -> Exception:
    """The error as the answer to a unit: what the store says in its own words, and nothing that a future refuses."""
    if _of_the_store(error):
        return store_failure(error, "written")
    return RuntimeError("a unit ran out of what it went through") if isinstance(error, StopIteration) else error

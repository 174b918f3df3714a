"""The writer of a journal: commits batches of units and records, in the process's turn.

It may be called on any thread, by one at a time: the caller holds `lock`. What it is handed it answers, whatever
goes wrong, so that nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import astuple
from typing import Any, Generic, TypeGuard, TypeVar

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.store import last_head, records
from interlock.store.anchors import Anchor, Anchors
from interlock.store.failures import no_room, store_failure
from interlock.store.home import Home
from interlock.store.last_head import anchor_line
from interlock.store.port import (
    EarlyRow,
    EndedCall,
    OutcomeUnknownError,
    RefusedByServerError,
    StatementError,
    StoreError,
    Unit,
    Written,
)
from interlock.store.signing import Signer
from interlock.store.timekeeping import StoreTime
from interlock.store.transaction import Transaction, head_of, insert

T = TypeVar("T")
_log = logging.getLogger("interlock.journal")

LOCK_PATIENCE_S = 10.0
# A process that has committed so often is likely to go on: the log is made as long as it gets.
EXTEND_AFTER = 64


@dataclass(slots=True, eq=False)
class Waiting(Generic[T]):
    """A unit (or a single record) in the queue and who waits for it, if anybody does."""

    work: Unit[T] | tuple[str, str, bytes]
    future: asyncio.Future[T] | None
    # Hears of a record in place of a future.
    listener: Written | None = None
    large: bool = False
    early: EarlyRow | None = None
    value: Any = None
    error: BaseException | None = None


# many methods: the steps of a commit on one connection, which no other object may use
class Writer:
    """The connection of a process that writes to its home."""

    @staticmethod
    def perform(unit: Unit[Any], transaction: Transaction) -> Any:
        """Run a unit. Tests put a rehearsal in this place, which holds every unit to its contract."""
        return unit(transaction)

    def __init__(self, home: Home, *, clock: Clock, signer: Signer) -> None:
        self._home = home
        self._clock = clock
        self._connection = home.open_database()
        # One cursor for all batches: creating one for each batch costs time.
        self._cursor = self._connection.statements()
        self._anchors = Anchors(home, signer)
        # The end of the chain that this process knew last, and by which connection that was compared with the store.
        self._known = (0, last_head.GENESIS)
        self._compared = 0
        self.turns = home.queue()
        self.lock = threading.Lock()
        # Calls that the last batch closed for somebody else than their task; the journal tells of them.
        self.ended: list[EndedCall] = []
        # How long a commit takes, on average of the last ones.
        self.commit_s = 0.0
        # A server of a database keeps its log itself.
        self._until_extended = EXTEND_AFTER if home.near else -1
        self._take_over()

    @property
    def unsigned(self) -> bool:
        """Whether records wait for a signature for longer than they should; any commit gives them one."""
        return self._anchors.unsigned

    @property
    def extends(self) -> bool:
        """Whether it is time to make the log longer, on a thread, after a batch."""
        return self._until_extended == 0

    def extend_log(self) -> None:
        """Make the log of the database as long as it gets, once. Where that fails, it grows as it is used."""
        self._until_extended = -1
        try:
            if self.turns.begin(self._cursor.execute, LOCK_PATIENCE_S):
                self._home.extend_log(self._connection)
        except StoreError as error:
            _log.debug("the log of the database could not be made longer: %s", error)
            self._roll_back()

    def write(self, batch: list[Waiting[Any]], *, wait: bool = True) -> bool:
        """Write a batch; whatever goes wrong, everybody who waits is answered and the writer goes on.

        False, and nothing is written, if another process holds the database and the caller does not want to `wait`.
        """
        try:
            return self._write(batch, LOCK_PATIENCE_S if wait else 0.0)
        except Exception:  # noqa: BLE001 - a writer that died would leave everybody waiting for ever
            _log.exception("the journal's writer failed")
            _fail(batch, Failure("E3801", "the journal cannot be written"))
            return True

    def _write(self, batch: list[Waiting[Any]], patience_s: float, *, again: bool = True) -> bool:
        """Commit a batch. False only when the lock was not to be had in time and patience was zero.

        `again`: a connection that is lost meanwhile is opened anew, once.
        """
        began = time.monotonic()
        try:
            if not self.turns.begin(self._cursor.execute, patience_s):
                if patience_s == 0.0:
                    return False
                _fail(batch, Failure("E3803", "another process holds the journal", retry_after_ms=100))
                return True
            transaction, anchor, timed = self._apply(batch)
        except Exception as error:  # noqa: BLE001 - of a unit that is alone, of a record that cannot be stored, of the disk
            self._roll_back()
            if _of_the_store(error) and self._connection.lost and again and not isinstance(error, OutcomeUnknownError):
                # Nothing of it was committed: a connection that is lost in a commit finds out before it raises.
                return self._write(batch, patience_s, again=False)
            if _of_the_store(error) and not isinstance(error, RefusedByServerError):
                _fail(batch, store_failure(error, "written"))
            else:
                self._write_singly(batch, error, patience_s)
        except BaseException:  # Ctrl-C: a transaction that stayed open would stop every later one
            self._roll_back()
            raise
        else:
            self._note(transaction, anchor, timed)
        if self._until_extended > 0:
            self._until_extended -= 1
        if not batch[0].large:  # which takes longer, and says little of the next batch
            self.commit_s = 0.8 * self.commit_s + 0.2 * (time.monotonic() - began)
        return True

    def _begin(self) -> None:
        if not self.turns.begin(self._cursor.execute, LOCK_PATIENCE_S):
            raise Failure("E3803", "another process holds the journal", retry_after_ms=100)

    def _apply(self, batch: list[Waiting[Any]]) -> tuple[Transaction, Anchor | None, bool]:
        """Run a batch and commit it. Returns what `_note` needs.

        INVARIANT: whatever this raises except `OutcomeUnknownError`, nothing of the batch is or will be in the store.
        """
        cursor = self._cursor
        transaction = Transaction(self._connection, *self._end(), self.time.read())
        timed = self.time.due
        if timed:
            self.time.write(cursor.execute, self._connection)
        if len(batch) == 1 and callable(unit := batch[0].work):
            # What it raises ends the transaction, which undoes as much as a savepoint and costs nothing.
            batch[0].value, batch[0].error = self.perform(unit, transaction), None
        else:
            self._run_all(batch, transaction)
        transaction.write_later()
        insert(cursor, transaction.rows)
        anchor = self._anchors.add_if_due(transaction, self.time)
        if transaction.notifies:
            self._home.notify(self._connection)
        cursor.execute("COMMIT")
        if self._compared == self._connection.openings:
            self._known = transaction.head
        else:
            # A server that took the place of another one knows the number of a transaction that the other one had.
            self._connection.insist(lambda: self._keep_up(transaction.head))
        return transaction, anchor, timed

    def _note(self, transaction: Transaction, anchor: Anchor | None, timed: bool) -> None:
        """Note outside of the database what a batch has committed."""
        try:
            if transaction.ended is not None:
                self.ended += transaction.committed()
            if timed:
                self.time.written()
            if anchor is not None:
                self._anchors.note(anchor)
        except Exception:  # noqa: BLE001 - what is committed must not run again, whatever is left undone after it
            _log.exception("a commit was not noted in full")

    def _end(self) -> tuple[int, bytes]:
        """The end of the chain. Refuses (E3804) a store that lacks what this process has written or read."""
        self._keep_up(self._known)
        return head_of(self._cursor)

    def _keep_up(self, known: tuple[int, bytes]) -> None:
        """Note how far the chain goes. A store that was reached anew may be another one, and is compared."""
        if self._compared != self._connection.openings:
            last_head.refuse_lost(self._connection, *known)
            self._compared = self._connection.openings
        self._known = known

    def _run_all(self, batch: list[Waiting[Any]], transaction: Transaction) -> None:
        """Insert the early rows of a batch, then run its units. One that refuses leaves nothing behind.

        Nearly all that refuse have only read, and there is nothing to undo. So one savepoint holds all units; if one
        refuses after it has written, all are undone and run again, each in a savepoint of its own.
        """
        execute, mark = self._cursor.execute, transaction.mark()
        if any(callable(waiting.work) for waiting in batch):
            execute("SAVEPOINT units")
        early = [waiting.early for waiting in batch if waiting.early is not None]
        if early:
            transaction.insert_early(early)
        if not self._run_units(batch, transaction, transaction.run):
            execute("ROLLBACK TO units")
            transaction.rewind(mark)
            transaction.early.clear()
            transaction.soiled = False
            self._run_units(batch, transaction, transaction.apart)

    def _run_units(self, batch: list[Waiting[Any]], transaction: Transaction, run: Callable[..., Any]) -> bool:
        """Run units by `run`. False if one has left something behind that has to be undone."""
        for waiting in batch:
            unit = waiting.work
            if not callable(unit):
                transaction.append(*unit)
                continue
            try:
                waiting.value, waiting.error = run(self.perform, unit, transaction), None
            except Exception as error:
                if transaction.torn:
                    raise
                if transaction.soiled or (waiting.early is not None and transaction.early.get(waiting.early.id)):
                    return False
                waiting.value, waiting.error = None, _answer(error)
        return True

    def _write_singly(self, batch: list[Waiting[Any]], error: Exception, patience_s: float) -> None:
        if len(batch) == 1:
            batch[0].value, batch[0].error = None, _answer(error)
            return
        for waiting in batch:
            self._write([waiting], patience_s or LOCK_PATIENCE_S)

    def _roll_back(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except StoreError:
            # A connection that cannot roll back is of no more use.
            self._connection = self._home.replaced(self._connection)
            self._cursor = self._connection.statements()

    def anchor(self) -> None:
        """Sign and anchor the head now, if records are not signed yet."""
        with self.lock:
            try:
                self._begin()
                made = None
                if self._anchors.pending:
                    transaction = Transaction(self._connection, *self._end(), self.time.read())
                    made = self._anchors.add_if_due(transaction, self.time, now=True)
                self._connection.execute("COMMIT")
            except StoreError as error:
                self._roll_back()
                raise store_failure(error, "written") from None
        if made is not None:
            self._anchors.note(made)

    def close(self) -> None:
        """Let go of the file."""
        self.turns.close()
        self._connection.close()

    # Taking over

    def _take_over(self) -> None:
        """Make sure that this process can sign what it writes, and that what is there was written by Interlock."""
        connection = self._connection
        try:
            # While others open the same home, one of them may hold the whole of it for a moment, even against readers.
            self._home.wait_for_locks(connection, LOCK_PATIENCE_S)
            self.time = StoreTime(self._home.clock(self._clock), connection)
            ends = self._anchors.take_over(connection)
            self._known, self._compared = ends.head, connection.openings
            has_last_head = ends.last is not None and last_head.expected(connection)
            # From here on this process writes, and waits for its turn to do so.
            self._home.wait_for_locks(connection, 0)
            if not has_last_head:
                self._keep_last_head(ends)
            if ends.unsigned:
                self.anchor()
        except BaseException as error:
            self.close()
            if isinstance(error, StoreError):
                raise store_failure(error) from None
            if isinstance(error, OSError):
                words = f"the journal's signing key cannot be used: {error.strerror}"
                raise no_room(error) or Failure("E3801", words) from None
            raise

    def _keep_last_head(self, ends: last_head.Ends) -> None:
        """Keep a last signed head. A home of an earlier version gets one, and a record that says so."""
        connection = self._connection
        now_ms = self.time.read()
        if ends.last is None:
            first = ends.anchor
            if first is None:
                first = self._anchors.first(now_ms)
            try:
                last_head.write(self._home, anchor_line(*astuple(first)), first=True)
            except OSError as error:
                _log.warning("no last signed head can be kept beside the keys: %s", error.strerror)
                return
        fact = "INSERT INTO fact (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING"
        with self.lock:
            self._begin()
            if not ends.head[0]:
                connection.execute(fact, (last_head.FACT, "from the beginning"))
                connection.execute("COMMIT")
                return
            through, head = head_of(self._cursor)
            transaction = Transaction(connection, through, head, now_ms)
            if transaction.execute(fact, (last_head.FACT, f"from record {through} on")).rowcount:
                facts = {"act": "last_head.begun", "through": through, "unsigned": ends.unsigned}
                transaction.append("signing", "journal", records.plain("signing", "journal", now_ms, **facts))
                insert(self._cursor, transaction.rows)
            made = self._anchors.add_if_due(transaction, self.time, now=True)
            connection.execute("COMMIT")
        if made is not None:
            self._anchors.note(made)


def _fail(batch: list[Waiting[Any]], failure: Failure) -> None:
    for waiting in batch:
        waiting.value, waiting.error = None, failure


def _of_the_store(error: Exception) -> TypeGuard[StoreError]:
    return isinstance(error, StoreError) and not isinstance(error, StatementError)


def _answer(error: Exception) -> Exception:
    """The error as the answer to a unit: what the store says in its own words, and nothing that a future refuses."""
    if _of_the_store(error):
        return store_failure(error, "written")
    return RuntimeError("a unit ran out of what it went through") if isinstance(error, StopIteration) else error

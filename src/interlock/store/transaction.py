"""A transaction of the journal: what a unit of work is handed.

It reads and writes the tables beside the ledger and appends records to the chain. Appended records are inserted by
`insert` when the units of a batch have run.

A row that nobody in the unit needs to see is handed over to `later`: such rows of all units are written together. They
are written before the next statement of any unit, so that it finds them.

A row that a unit depends on can be an early row: those of all units of a batch are inserted together, before the units
run. So it is as if they had been inserted a moment earlier. Of two units that want the same row, the first one gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

import orjson

from interlock.data.canonical import NO_HASH
from interlock.store.connection import Rows
from interlock.store.last_head import GENESIS, HEAD, PURGED_HEAD
from interlock.store.port import Changed, EarlyRow, EndedCall, Statements, StoreConnection

T = TypeVar("T")

_INSERT = "INSERT INTO journal (seq, kind, call, body, hash) VALUES (?, ?, ?, ?, ?)"
# Each step of a statement hands the interpreter over and back. Many rows to a statement make that one hand-over.
# While one is under way, the process holds the database, and other threads may keep the interpreter for a while.
_ROWS_AT_ONCE = 64
_INSERTS = [_INSERT + ", (?, ?, ?, ?, ?)" * further for further in range(_ROWS_AT_ONCE)]


@lru_cache(maxsize=256)
def _for_rows(statement: str, columns: int, count: int) -> str:
    """A statement of `later` for so many rows."""
    row = f"({', '.join('?' * columns)})"
    return statement.replace("{rows}", ", ".join([row] * count))


def _together(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    """The rows of one statement each. Counts are powers of two, so that there are few statements to compile."""
    start = 0
    while start < len(rows):
        count = min(_ROWS_AT_ONCE, 1 << (len(rows) - start).bit_length() - 1)
        yield rows[start : start + count]
        start += count


# many methods: those of the port, and what the writer needs to undo a unit
class Transaction(Rows):
    """A transaction of a unit: the store's time, the tables, and the end of the chain."""

    __slots__ = (
        "_changes", "_connection", "_first_later", "_head", "_later", "_looks", "_seq", "_written", "early",
        "ended", "notifies", "now_ms", "rows", "soiled", "torn",
    )  # fmt: skip

    def __init__(self, connection: StoreConnection, seq: int, head: bytes, now_ms: int) -> None:
        self._connection = connection
        self._seq = seq
        self._head = head
        self.now_ms = now_ms
        self.rows: list[tuple[int, str, str, bytes, bytes]] = []
        # Whether the early row of each unit of a batch was inserted, by its id.
        self.early: dict[str, bool] = {}
        # What functions returned that are called once.
        self._looks: dict[Callable[[], Any], Any] = {}
        # Rows that are written together, each with its statement, and how many of them have been written.
        self._later: list[tuple[str, Sequence[Any]]] = []
        self._written = 0
        # Of the unit that runs: its first row of these, and the count of changes of the database before it.
        self._first_later = 0
        self._changes = 0
        self.notifies = False  # stays set if the unit that set it is rolled back
        # Whether a piece of work failed and could not be undone by itself: then nothing of the transaction may stay.
        self.torn = False
        # Calls that a record of this transaction closes, and that no task of this process runs, by their id.
        self.ended: dict[str, EndedCall] | None = None
        # Whether a piece of work failed after it had written, and what it wrote is still there.
        self.soiled = False

    @property
    def head(self) -> tuple[int, bytes]:
        return self._seq, self._head

    def append(self, kind: str, call: str, body: bytes) -> None:
        """Add a record to the chain. The body is canonical JSON and says kind and call itself."""
        self._seq = seq = self._seq + 1
        made = NO_HASH.copy()
        made.update(self._head + seq.to_bytes(8, "big") + body)
        self._head = head = made.digest()
        self.rows.append((seq, kind, call, body, head))

    def close(self, ended: EndedCall, body: bytes) -> None:
        """Close a call that no task of this process runs. Its last events follow once this is committed."""
        self.append("closed", ended.call, body)
        if self.ended is None:
            self.ended = {}
        self.ended[ended.call] = ended

    def committed(self) -> list[EndedCall]:
        """The calls that were closed so. What a unit closed that was undone is not among them."""
        ended = self.ended or {}
        return [ended[call] for _, kind, call, *_ in self.rows if kind == "closed" and call in ended]

    def execute(self, statement: str, parameters: Sequence[Any] = (), /) -> Changed:
        if self._later:
            self.write_later()
        return self._connection.execute(statement, parameters)

    def later(self, statement: str, row: Sequence[Any], /) -> None:
        """Write a row together with rows of other units. `{rows}` in the statement stands for the values of all."""
        self._later.append((statement, row))

    def write_later(self) -> None:
        """Write the rows of `later`. One that cannot be written may be that of any unit, so nothing may stay."""
        later, self._later = self._later, []
        self._written += len(later)
        by_statement: dict[str, list[Sequence[Any]]] = {}
        for statement, row in later:
            by_statement.setdefault(statement, []).append(row)
        try:
            for statement, some in by_statement.items():
                for rows in _together(some):
                    values = list(chain.from_iterable(rows))
                    self._connection.execute(_for_rows(statement, len(rows[0]), len(rows)), values)
        except BaseException:
            self.torn = True
            raise
        if self._written <= self._first_later:  # the unit that runs has written nothing so far
            self._changes = self._connection.total_changes

    def insert_early(self, rows: Sequence[EarlyRow]) -> None:
        """Insert the early rows of a batch, before its units run."""
        by_statement: dict[str, list[EarlyRow]] = {}
        for row in rows:
            by_statement.setdefault(row.statement, []).append(row)
        for statement, some in by_statement.items():
            done = _insert_early(self, statement, some)
            self.early.update((row.id, row.id in done) for row in some)

    def inserted(self, row: EarlyRow, /) -> bool:
        known = self.early.get(row.id)
        return row.id in _insert_early(self, row.statement, (row,)) if known is None else known

    def once(self, look: Callable[[], T], /) -> T:
        if look not in self._looks:
            self._looks[look] = look()
        return self._looks[look]

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
        if self._later:
            self.write_later()
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

    def run(self, work: Callable[..., T], *given: Any) -> T:
        """Do a piece of work. When it raises, nothing of it is left if it had only read; `soiled` says otherwise."""
        connection, mark = self._connection, self.mark()
        self._changes, self._first_later = connection.total_changes, mark[3]
        try:
            return work(*given)
        except BaseException:
            self.torn = self.torn or not connection.intact
            self.soiled = connection.total_changes != self._changes
            self.rewind(mark)
            raise

    def mark(self) -> tuple[int, int, bytes, int]:
        return len(self.rows), self._seq, self._head, self._written + len(self._later)

    def rewind(self, mark: tuple[int, int, bytes, int]) -> None:
        length, self._seq, self._head, later = mark
        del self.rows[length:]
        del self._later[max(later - self._written, 0) :]


def _insert_early(transaction: Transaction, statement: str, rows: Sequence[EarlyRow]) -> set[str]:
    """Insert early rows with one statement. Returns the ids of those that were inserted."""
    done: set[str] = set()
    for some in _together(rows):
        values = [transaction.now_ms, *chain.from_iterable(row.values for row in some)]
        inserted = transaction.all(_for_rows(statement, len(some[0].values), len(some)), values)
        done.update(row_id for (row_id,) in inserted)
    return done


def head_of(cursor: Statements) -> tuple[int, bytes]:
    """The number and the hash of the last record that the database holds, or held before it was purged."""
    return cursor.execute(HEAD).fetchone() or cursor.execute(PURGED_HEAD).fetchone() or (0, GENESIS)


def insert(cursor: Statements, rows: list[tuple[int, str, str, bytes, bytes]]) -> None:
    """Write the records that a transaction has appended."""
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[start : start + _ROWS_AT_ONCE]
        cursor.execute(_INSERTS[len(some) - 1], list(chain.from_iterable(some)))

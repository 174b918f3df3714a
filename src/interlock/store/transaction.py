"""A transaction of the journal: what a unit of work is handed.

It reads and writes the tables beside the ledger and appends records to the chain. Appended records are inserted by
`insert` when the units of a batch have run.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import orjson

from interlock.store.connection import Connection, Rows
from interlock.store.last_head import GENESIS, HEAD, PURGED_HEAD
from interlock.store.port import Changed

T = TypeVar("T")

_INSERT = "INSERT INTO journal (seq, kind, call, body, hash) VALUES (?, ?, ?, ?, ?)"
# Each step of a statement hands the interpreter over and back. Many rows to a statement make that one hand-over.
# While one is under way, the process holds the database, and other threads may keep the interpreter for a while.
_ROWS_AT_ONCE = 64
_INSERTS = [_INSERT + ", (?, ?, ?, ?, ?)" * further for further in range(_ROWS_AT_ONCE)]


class Transaction(Rows):
    """A transaction of a unit: the store's time, the tables, and the end of the chain."""

    __slots__ = ("_connection", "_head", "_seq", "now_ms", "rows", "soiled", "torn")

    def __init__(self, connection: Connection, seq: int, head: bytes, now_ms: int) -> None:
        self._connection = connection
        self._seq = seq
        self._head = head
        self.now_ms = now_ms
        self.rows: list[tuple[int, str, str, bytes, bytes]] = []
        # Whether a piece of work failed and could not be undone by itself: then nothing of the transaction may stay.
        self.torn = False
        # Whether a piece of work failed after it had written, and what it wrote is still there.
        self.soiled = False

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

    def run(self, work: Callable[..., T], *given: Any) -> T:
        """Do a piece of work. When it raises, nothing of it is left if it had only read; `soiled` says otherwise."""
        connection, mark = self._connection, self.mark()
        changes = connection.total_changes
        try:
            return work(*given)
        except BaseException:
            self.torn = not connection.in_transaction
            self.soiled = connection.total_changes != changes
            self.rewind(mark)
            raise

    def mark(self) -> tuple[int, int, bytes]:
        return len(self.rows), self._seq, self._head

    def rewind(self, mark: tuple[int, int, bytes]) -> None:
        length, self._seq, self._head = mark
        del self.rows[length:]


def head_of(cursor: sqlite3.Cursor) -> tuple[int, bytes]:
    """The number and the hash of the last record that the database holds, or held before it was purged."""
    return cursor.execute(HEAD).fetchone() or cursor.execute(PURGED_HEAD).fetchone() or (0, GENESIS)


def insert(cursor: sqlite3.Cursor, rows: list[tuple[int, str, str, bytes, bytes]]) -> None:
    """Write the records that a transaction has appended."""
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[start : start + _ROWS_AT_ONCE]
        cursor.execute(_INSERTS[len(some) - 1], list(chain.from_iterable(some)))

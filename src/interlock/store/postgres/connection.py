"""Connections to a PostgreSQL database that satisfy the port's `Reader`, with the interface that the writer expects.

Errors of the driver become those of the store: `StatementError` for a row or value that does not fit and a statement
that is wrong, `StoreError` for all that concerns the server. So everything above treats both databases alike. Their
words hold no address, no user, no path and no statement.

A statement that fails leaves its transaction unusable, other than on SQLite: it can only be rolled back, all of it or
to a savepoint. `intact` says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, TypeVar

import psycopg
from psycopg import RawCursor, RawServerCursor
from psycopg.pq import TransactionStatus

from interlock.core.errors import Failure
from interlock.core.host_paths import without_paths
from interlock.store.connection import Rows
from interlock.store.port import OutcomeUnknownError, RefusedByServerError, StatementError, StoreError
from interlock.store.postgres.dialect import adapt, translate
from interlock.store.postgres.session import configure, keepalives

T = TypeVar("T")

# What the driver raises. Errors of the system come through it as they are, such as that no file can be opened any more.
_DRIVER = (psycopg.Error, OSError)
# How long to wait for a server that does not answer when a connection is made.
CONNECT_S = 10
# A statement is prepared when it is used for the second time.
_PREPARE_AFTER = 1
# How long to wait before a server that cannot be reached is tried again.
_TRY_AGAIN_S = 0.2
# Rows of a long read that are fetched at once.
_ROWS_AT_ONCE = 500
_WRITES = ("INSERT", "UPDATE", "DELETE")
_READ_ONLY = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


# many methods: all that is known of one connection, which the driver's object may not leave
class PostgresConnection(Rows):
    """A connection to one schema. With `reading`, its transactions read only, as of one moment.

    INVARIANT: a `COMMIT` that returns is on disk, and after one that raises nothing of the transaction is or will be,
    except after `OutcomeUnknownError`. Whatever is raised while the server commits, and is no refusal of the server
    itself, the number of the transaction (`xid`) tells what became of it. This waits for as long as the server cannot
    be reached, until `gives_up` says so.
    """

    def __init__(self, address: str, *, reading: bool = False, text_as_bytes: bool = False) -> None:
        self._address = address
        self._reading = reading
        # The number of the transaction that is open, as far as the caller of `BEGIN` asked for it.
        self.xid = ""
        self.gives_up: Callable[[], bool] = lambda: False
        self._text_as_bytes = text_as_bytes
        self._names = count()
        # The number of rows that statements of this connection have changed.
        self.total_changes = 0
        # How often the server was reached. Behind the same address, another one may have taken its place.
        self.openings = 0
        self._in_snapshot = False
        # INVARIANT: a connection that was closed stays so, whichever thread closed it while another one reads.
        self._closing = threading.Lock()
        # Several threads may read by one connection, and find that it is lost.
        self._opening = threading.Lock()
        self._closed = False
        self._driver = self._open()

    def _open(self) -> psycopg.Connection[Any]:
        driver = connected(self._address)
        try:
            adapt(driver, text_as_bytes=self._text_as_bytes)
            configure(driver, reading=self._reading)
        except BaseException as error:
            driver.close()
            if isinstance(error, _DRIVER):
                raise translated(error) from None
            raise
        self.openings += 1
        return driver

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open, usable or not."""
        return self._driver.pgconn.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR)

    @property
    def intact(self) -> bool:
        """Whether a transaction is open in which no statement has failed."""
        return self._driver.pgconn.transaction_status == TransactionStatus.INTRANS

    @property
    def direct(self) -> bool:
        """Whether there is no pooler between: those name a session by a number of their own."""
        return self.one("SELECT pg_backend_pid()")[0] == self._driver.info.backend_pid

    @property
    def lost(self) -> bool:
        """Whether the server, or the way to it, is gone."""
        return self._driver.closed

    def execute(self, statement: str, parameters: Sequence[Any] = (), /) -> Any:
        if statement == "BEGIN" and self._reading:
            statement = _READ_ONLY
        elif statement == "COMMIT" and self.xid:
            return self._commit()
        try:
            if (
                self._reading and self.lost and not self._closed
            ):  # since the last statement; a transaction was over with it
                self.reopen()
            cursor = self._driver.execute(translate(statement), parameters or None)
        except _DRIVER as error:
            if not isinstance(error, psycopg.Error):
                self.hang_up()  # nobody knows how far the server came
            if not (self._reading and self.lost) or self._closed or self._in_snapshot or statement == _READ_ONLY:
                raise translated(error) from None
            self.reopen()
            return self.execute(statement, parameters)
        done = cursor.statusmessage
        if done is not None and done.startswith(_WRITES):
            self.total_changes += cursor.rowcount
        if self._reading:
            self._in_snapshot = self.in_transaction
        return cursor

    def _commit(self) -> None:
        xid, self.xid = self.xid, ""
        try:
            done = self._driver.execute(b"COMMIT").statusmessage
        except Exception as error:  # noqa: BLE001 - whatever it is, the server may have committed
            if isinstance(error, psycopg.Error) and error.sqlstate and not self.lost:
                raise translated(error) from None  # the server's own answer
            self.hang_up()
            if not self.insist(lambda: self._was_committed(xid)):
                self.hang_up()
                raise StoreError("the connection to the database server was lost") from None
            return
        if done != "COMMIT":  # a statement had failed, and somebody went on
            raise StatementError("the transaction was rolled back")

    def _was_committed(self, xid: str) -> bool:
        """Whether a transaction was committed whose connection was lost."""
        (outcome,) = self.one("SELECT interlock_outcome(?)", (xid,))
        if outcome not in ("committed", "aborted", "lost"):
            raise OutcomeUnknownError(_UNKNOWN)  # so long ago that the server has forgotten it
        return outcome == "committed"

    def insist(self, work: Callable[[], T]) -> T:
        """Run a function that only reads, as often as it takes until the server has answered it.

        It is for reads that tell whether a commit counts: the caller can neither go on nor try again without them.
        """
        while True:
            try:
                if self.lost:
                    self.reopen()
                return work()
            except (Failure, OutcomeUnknownError):
                raise
            except Exception:  # noqa: BLE001 - to be told as an error of the unit, it would have to be known
                self.hang_up()
                if self.gives_up():
                    raise OutcomeUnknownError(_UNKNOWN) from None
                time.sleep(_TRY_AGAIN_S)

    def each(self, statement: str, parameters: Sequence[Any] = (), /) -> Iterator[Any]:
        if not self._reading or not self.intact:
            return iter(self.execute(statement, parameters))
        return self._in_portions(translate(statement), parameters)

    def _in_portions(self, statement: bytes, parameters: Sequence[Any]) -> Iterator[Any]:
        """Rows of a long read: few are in memory at a time."""
        try:
            with RawServerCursor(self._driver, f"rows_{next(self._names)}") as cursor:
                cursor.itersize = _ROWS_AT_ONCE
                cursor.execute(statement, parameters or None)
                yield from cursor
        except _DRIVER as error:
            raise translated(error) from None

    def copy_in(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Insert many rows, in the transaction that is open."""
        names = ", ".join(f'"{name}"' for name in columns)
        try:
            with self._driver.cursor() as cursor, cursor.copy(f'COPY "{table}" ({names}) FROM STDIN'.encode()) as copy:
                for row in rows:
                    copy.write_row(row)
        except _DRIVER as error:
            raise translated(error) from None

    def statements(self) -> PostgresConnection:
        """The connection itself: each statement has a result of its own."""
        return self

    def reopen(self) -> None:
        """Connect again if the connection is lost; uncommitted changes are lost with it."""
        with self._opening:
            if not self.lost and not self._closed:
                return  # another thread has done so
            self._driver.close()
            driver = self._open()
            with self._closing:
                if not self._closed:
                    self._driver = driver
                    return
            driver.close()
        raise StatementError("the connection is closed")

    def hang_up(self) -> None:
        """Cut the connection. It counts as lost, and can be opened again."""
        self._driver.close()

    def close(self) -> None:
        with self._closing:
            self._closed = True
        self._driver.close()


def connected(address: str) -> psycopg.Connection[Any]:
    """A connection of the driver. A way to the server that is cut without a word is noticed within some seconds."""
    try:
        return psycopg.connect(
            address,
            autocommit=True,
            cursor_factory=RawCursor,
            prepare_threshold=_PREPARE_AFTER,
            connect_timeout=CONNECT_S,
            application_name="interlock",
            client_encoding="UTF8",
            **keepalives(),
        )
    except _DRIVER as error:
        raise translated(error) from None


_LOCKED = "55P03"  # lock_not_available
_FULL = "53100"  # disk_full
_MEMORY = "53200"  # out_of_memory
_MANY = "53300"  # too_many_connections
# The driver gives no code where a connection cannot be made.
_ALL_TAKEN = ("too many connections", "too many clients", "connection slots are reserved")
# The server does so if a transaction stands still (`session.IDLE_MS`), and when it ends.
_ENDED = ("idle-in-transaction timeout", "server closed the connection unexpectedly")
_CREDENTIALS = "28"
_NOT_LET_IN = ("authentication failed", "no password supplied")


def translated(error: psycopg.Error | OSError) -> Exception:
    """An error of the driver as the store's. A text with a NUL character is the caller's fault (E3004)."""
    if isinstance(error, OSError):
        return StoreError(f"the database server cannot be reached: {(error.strerror or '').lower()}")
    state = error.sqlstate or ""
    words = without_paths(error.diag.message_primary or "")
    if state == FENCED:
        return Failure("E3801", _FENCED, resolution="end this process and start it again; its calls are closed already")
    if state == _LOCKED:
        return StoreError("database is locked")
    if state == _FULL:
        return StoreError("the disk is full: database or disk is full")
    if state == _MEMORY:
        return StoreError("the database server is out of memory")
    if state == _MANY or any(words in str(error) for words in _ALL_TAKEN):
        return StoreError("the database server has too many connections")
    if state.startswith(_CREDENTIALS) or any(words in str(error) for words in _NOT_LET_IN):
        return StoreError("the database server refuses the user of this process")
    if isinstance(error, psycopg.IntegrityError):
        return StatementError(words)
    if isinstance(error, psycopg.DataError):
        if "NUL" in str(error):
            return Failure("E3004", _NUL, resolution="remove the NUL character from the text")
        return StatementError(words or "a value does not fit its column")
    if isinstance(error, psycopg.ProgrammingError):
        return RefusedByServerError(words) if state else StatementError("the statement cannot be run")
    if any(words in str(error) for words in _ENDED):
        return StoreError("the database server has ended the connection")
    return StoreError(words or "the database server does not answer")


_UNKNOWN = "it is not known whether the last transaction was committed"
# What `interlock_enter` raises for a process that was taken for dead.
FENCED = "IL001"
_FENCED = "this process did not renew its lease in time and was taken for dead; it may not write any more"
_NUL = "a text holds a NUL character, which PostgreSQL cannot store"

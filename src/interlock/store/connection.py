"""Connections to a SQLite database that satisfy the port's `Reader` and `StoreConnection`.

INVARIANT: errors of the driver become errors of the store here and nowhere else (`store_error`). A `try` costs nothing
until something is raised; what it costs is one more function for each statement.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from interlock.store.port import StatementError, StoreError

T = TypeVar("T")

DRIVER_VERSION = sqlite3.sqlite_version
DRIVER_FITS = sqlite3.sqlite_version_info >= (3, 35)
# Errors of a statement. All others of the database are the store's: a full disk, a lock, a damaged file.
_OF_A_STATEMENT = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.DataError, sqlite3.InterfaceError)


def store_error(error: sqlite3.Error) -> StoreError:
    """Convert an error of the driver to the store's of the same kind, with the same words."""
    if isinstance(error, _OF_A_STATEMENT):
        return StatementError(str(error))
    # Where the index of its log finds no room, SQLite speaks of an I/O error; readers need that index too.
    full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_IOERR_SHMSIZE
    return StoreError(f"{error}: the disk is full" if full else str(error))


class _Executes(Protocol):
    def execute(self, statement: str, parameters: Any = ..., /) -> Any: ...


class Rows:
    """The port's reads, for a class whose `execute` returns a cursor of the driver."""

    __slots__ = ()

    def one(self: _Executes, statement: str, parameters: Sequence[Any] = (), /) -> Any:
        try:
            return self.execute(statement, parameters).fetchone()
        except sqlite3.Error as error:  # of a row; `execute` has converted its own
            raise store_error(error) from None

    def all(self: _Executes, statement: str, parameters: Sequence[Any] = (), /) -> list[Any]:
        try:
            return self.execute(statement, parameters).fetchall()
        except sqlite3.Error as error:
            raise store_error(error) from None

    def each(self: _Executes, statement: str, parameters: Sequence[Any] = (), /) -> Iterator[Any]:
        return _rows(self.execute(statement, parameters))


def _rows(cursor: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from cursor
    except sqlite3.Error as error:
        raise store_error(error) from None


class SqliteCursor(sqlite3.Cursor):
    """Executes many statements, one after the other."""

    def execute(self, statement: str, parameters: Any = (), /) -> Any:
        try:
            return super().execute(statement, parameters)
        except sqlite3.Error as error:
            raise store_error(error) from None

    def fetchone(self) -> Any:
        try:
            return super().fetchone()
        except sqlite3.Error as error:
            raise store_error(error) from None


class SqliteConnection(sqlite3.Connection, Rows):
    """A connection as a reader. Open one with `sqlite3.connect(..., factory=SqliteConnection)`."""

    # Whether the way to the database is gone: a file is always there.
    lost = False
    # How often the database was reached: a server is reached anew when the connection was lost.
    openings = 1

    def __init__(self, *given: Any, **named: Any) -> None:
        try:
            super().__init__(*given, **named)
        except sqlite3.Error as error:
            raise store_error(error) from None

    @property
    def intact(self) -> bool:
        """Whether a transaction is open that can go on. One in which a statement failed can."""
        return self.in_transaction

    def execute(self, statement: str, parameters: Any = (), /) -> sqlite3.Cursor:
        try:
            return super().execute(statement, parameters)
        except sqlite3.Error as error:
            raise store_error(error) from None

    def executemany(self, statement: str, rows: Any, /) -> sqlite3.Cursor:
        try:
            return super().executemany(statement, rows)
        except sqlite3.Error as error:
            raise store_error(error) from None

    def statements(self) -> SqliteCursor:
        # Not `cursor`, which the driver calls for each statement of the connection.
        return SqliteCursor(self)

    def reopen(self) -> None:
        """Connect again if the connection is lost."""

    def insist(self, work: Callable[[], T]) -> T:
        """Run a function that only reads. A file answers at once."""
        return work()

"""Connections to a SQLite database that satisfy the port's `Reader`."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

# Every error of the database driver. Code outside of the store catches it by this name.
StoreError = sqlite3.Error


class OutcomeUnknown(sqlite3.OperationalError):
    """Nobody can tell whether a transaction was committed. It must not be tried again."""


class Refused(sqlite3.OperationalError):
    """A server refuses one statement, for a table that is missing or a right that was not given. Others can go on."""


DRIVER_VERSION = sqlite3.sqlite_version
DRIVER_FITS = sqlite3.sqlite_version_info >= (3, 35)


class _Executes(Protocol):
    def execute(self, statement: str, parameters: Any = ..., /) -> Any: ...


class Rows:
    """The port's reads, for a class whose `execute` returns a cursor of the driver."""

    __slots__ = ()

    def one(self: _Executes, statement: str, parameters: Sequence[Any] = (), /) -> Any:
        return self.execute(statement, parameters).fetchone()

    def all(self: _Executes, statement: str, parameters: Sequence[Any] = (), /) -> list[Any]:
        return self.execute(statement, parameters).fetchall()

    def each(self: _Executes, statement: str, parameters: Sequence[Any] = (), /) -> Iterator[Any]:
        return self.execute(statement, parameters)


class SqliteConnection(sqlite3.Connection, Rows):
    """A connection as a reader. Open one with `sqlite3.connect(..., factory=Connection)`."""

    # Whether the way to the database is gone: a file is always there.
    lost = False
    # How often the database was reached: a server is reached anew when the connection was lost.
    openings = 1

    @property
    def intact(self) -> bool:
        """Whether a transaction is open that can go on. One in which a statement failed can."""
        return self.in_transaction

    def reopen(self) -> None:
        """Connect again if the connection is lost."""

    def insist(self, work: Callable[[], T]) -> T:
        """Run a function that only reads. A file answers at once."""
        return work()

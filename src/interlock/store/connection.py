"""Connections to a SQLite database that satisfy the port's `Reader`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

# Every error of the database driver. Code outside of the store catches it by this name.
StoreError = sqlite3.Error


class Connection(sqlite3.Connection):
    """A connection as a reader. Open one with `sqlite3.connect(..., factory=Connection)`."""

    def one(self, statement: str, parameters: Sequence[Any] = (), /) -> Any:
        return self.execute(statement, parameters).fetchone()

    def all(self, statement: str, parameters: Sequence[Any] = (), /) -> list[Any]:
        return self.execute(statement, parameters).fetchall()

    def each(self, statement: str, parameters: Sequence[Any] = (), /) -> Iterator[Any]:
        return self.execute(statement, parameters)

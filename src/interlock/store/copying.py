"""Copies of all rows of a store into another database: from SQLite to PostgreSQL, back, and into a backup.

The rows are read in one transaction, as they are at one moment, and go table by table into a database that is empty.
Then both sides are compared: the number of rows of each table, and a digest of them. What was copied stays unfinished
until the caller has verified it: a file has another name, and a schema on a server holds a table that says so. An
unfinished copy is not opened, and is removed when the copy is begun again.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

from interlock.core.errors import Failure
from interlock.store import schema_version
from interlock.store.columns import Columns
from interlock.store.connection import SqliteConnection
from interlock.store.failures import store_failure
from interlock.store.home import Home
from interlock.store.port import Reader, StoreError
from interlock.store.schema_version import schema_of
from interlock.store.timekeeping import reached

# Told how many rows of how many were copied.
Progress = Callable[[int, int], None]
# The number of rows of every table, and a digest of them that does not depend on their order.
Contents = dict[str, tuple[int, str]]
_AT_ONCE = 500


class Target(Protocol):
    """A database that rows are copied into."""

    @property
    def home(self) -> Home:
        """The data directory with that database, for those who verify it."""
        ...

    def fill(self, columns: Columns, rows: Iterator[Sequence[Any]]) -> None:
        """Write the rows of a table, in place of those that writing other tables has made."""
        ...

    def commit(self, now_ms: int) -> None:
        """Make everything durable. The time of the store is at least that from now on."""
        ...

    def finish(self) -> None:
        """Let the store be opened."""
        ...


def tables() -> list[Columns]:
    """Every table of a store. The sums of payloads come last: triggers change them when payloads are written."""
    import sqlalchemy as sa

    from interlock.store.tables import SEALED, metadata

    found = [
        Columns(
            table.name,
            tuple(column.name for column in table.columns),
            tuple(
                isinstance(column.type, sa.LargeBinary) or (table.name, column.name) in SEALED
                for column in table.columns
            ),
        )
        for table in metadata.sorted_tables
    ]
    return sorted(found, key=lambda one: one.table == "payload_use")


def contents(reader: Reader) -> Contents:
    """Count and digest the rows of every table, to compare two stores."""
    found: Contents = {}
    for columns in tables():
        digest = _Digest()
        for row in reader.each(columns.select):
            digest.add(row)
        found[columns.table] = digest.result
    return found


class _Digest:
    def __init__(self) -> None:
        self._rows = 0
        self._total = 0

    def add(self, row: Sequence[Any]) -> None:
        self._rows += 1
        self._total += int.from_bytes(hashlib.sha256(repr(tuple(row)).encode()).digest()[:16], "big")

    @property
    def result(self) -> tuple[int, str]:
        return self._rows, f"{self._total % (1 << 128):032x}"


@contextmanager
def filled(source: Home, target: Home, progress: Progress | None = None) -> Generator[tuple[Home, Contents]]:
    """All rows of a store in an empty database, for the caller to verify. It can be opened when the block has ended.

    E3411 where the target is not empty, E3804 where the source cannot be read or both sides differ, E3805 where its
    schema is a newer one.
    """
    try:
        with closing(source.reading()) as reader:
            reader.execute("BEGIN")
            _refuse_other_schema(source, reader)
            with _receiving(target) as receiver:
                expected = _copy(reader, receiver, progress)
                receiver.commit(reached(reader))
                with closing(receiver.home.reading()) as copy:
                    copy.execute("BEGIN")
                    _compare(expected, contents(copy))
                yield receiver.home, expected
                receiver.finish()
    except StoreError as error:
        raise store_failure(error) from None


def _receiving(target: Home) -> AbstractContextManager[Target]:
    if target.near:
        return _into_file(target)
    from interlock.store.postgres.home import PostgresHome
    from interlock.store.postgres.receiving import receiving

    return receiving(cast("PostgresHome", target))


def _refuse_other_schema(source: Home, reader: Reader) -> None:
    if not source.is_ours(reader):
        raise Failure("E3804", "the store to copy was not made by Interlock")
    schema = str(schema_of(reader))
    if schema < schema_version.SCHEMA_HEAD:
        words = f"the store to copy has schema {schema}, and this version copies {schema_version.SCHEMA_HEAD}"
        raise Failure("E3804", words, resolution="run interlock migrate up first")
    if schema > schema_version.SCHEMA_HEAD:
        words = f"the store to copy has schema {schema}; this version would leave out what it does not know"
        raise Failure("E3805", words, resolution="copy it with the newer version")


def _copy(reader: Reader, target: Target, progress: Progress | None) -> Contents:
    every = tables()
    total = sum(reader.one(f'SELECT count(*) FROM "{one.table}"')[0] for one in every)  # noqa: S608 - names
    found: Contents = {}
    done = 0
    for columns in every:
        digest = _Digest()

        def rows(columns: Columns = columns, digest: _Digest = digest) -> Iterator[Sequence[Any]]:
            nonlocal done
            for row in reader.each(columns.select):
                _refuse_clear_text(columns, row)
                digest.add(row)
                done += 1
                if progress is not None and done % _AT_ONCE == 0:
                    progress(done, total)
                yield row

        target.fill(columns, rows())
        found[columns.table] = digest.result
    if progress is not None:
        progress(total, max(total, 1))
    return found


def _refuse_clear_text(columns: Columns, row: Sequence[Any]) -> None:
    for name, binary, value in zip(columns.names, columns.binary, row, strict=True):
        if binary and isinstance(value, str):
            words = f"a row of `{columns.table}` has `{name}` in clear text, as early versions stored it"
            raise Failure("E3411", words, resolution="this store cannot be copied; it can be used where it is")


def _compare(expected: Contents, actual: Contents) -> None:
    if different := sorted(name for name in expected if expected[name] != actual.get(name)):
        words = f"the copy differs from its source in: {', '.join(different)}"
        raise Failure("E3804", words, resolution="the copy is not used; begin it again, and see interlock doctor")


class _File:
    """A SQLite file that gets its name when it is finished."""

    def __init__(self, home: Home) -> None:
        self._final = home.database
        self.home = Home(home.path)
        self.home.database = home.database.with_name(f"{home.database.name}.copy")
        for path in self._paths():
            path.unlink(missing_ok=True)
        from interlock.store import migration

        migration.create(self.home.database)
        self._connection = sqlite3.connect(self.home.database, isolation_level=None, factory=SqliteConnection)
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.execute("BEGIN IMMEDIATE")

    def _paths(self) -> Iterable[Path]:
        return (self.home.database.with_name(self.home.database.name + end) for end in ("", "-wal", "-shm", "-journal"))

    def fill(self, columns: Columns, rows: Iterator[Sequence[Any]]) -> None:
        marks = ", ".join("?" * len(columns.names))
        names = ", ".join(f'"{name}"' for name in columns.names)
        statement = f'INSERT INTO "{columns.table}" ({names}) VALUES ({marks})'  # noqa: S608 - names of the schema
        if columns.table in ("payload_use", "fact"):
            self._connection.execute(f'DELETE FROM "{columns.table}"')  # noqa: S608 - a name of the schema
        while batch := list(islice(rows, _AT_ONCE)):
            self._connection.executemany(statement, batch)

    def commit(self, now_ms: int) -> None:
        self._connection.execute("COMMIT")
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def finish(self) -> None:
        self._connection.close()
        if self._final.exists():
            raise _taken()
        self.home.database.rename(self._final)
        self.home.database = self._final

    def abandon(self) -> None:
        self._connection.close()
        for path in self._paths():
            path.unlink(missing_ok=True)


@contextmanager
def _into_file(home: Home) -> Generator[Target]:
    if home.made:
        raise _taken()
    home.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = _File(home)
    try:
        yield file
    except BaseException:
        file.abandon()
        raise


def _taken() -> Failure:
    words = "the data directory has a database in a file already; nothing was copied"
    return Failure("E3411", words, resolution="move interlock.db away, with the files whose names begin so")

"""Migrations: the steps between schemas, and the programs that can work on a schema.

A program knows one schema, the last migration it has. It migrates a store of an older schema when it opens it. On a
newer one it works where that says so: each migration names in `compatible_since` the oldest schema whose program can
work after it. What this means for all of them together is stored as a fact (`schema_version.COMPATIBLE_SINCE`), because
the older program has neither the migrations nor what they say.

So a change takes two releases: the first adds (`compatible_since` is the schema before), the second removes what the
first no longer uses. A migration that adds makes tables, indexes, and columns that may be empty or have a default. It
leaves the ledger alone, and makes no trigger on a table that was there: an older program would not know it.

A migration that can be undone has `downgrade`, and names in `loses` what is lost by it: a table or a column, with the
condition that is true for rows which have something to lose. Each step, with its note of the schema, is one
transaction.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.exc import DBAPIError

from interlock.store import migration_list
from interlock.store.connection import Rows, store_error
from interlock.store.migration_list import (
    Migration,
    at_stake,
    compatible_since,
    head,
    last_applied,
    pending_at,
    refuse_loss,
)
from interlock.store.schema_version import APPLICATION_ID, COMPATIBLE_SINCE


def create(path: Path) -> None:
    """Make a database at the schema of this program. It appears whole or not at all."""
    fresh = path.with_suffix(".new")
    for suffix in ("", "-journal", "-wal", "-shm"):
        fresh.with_name(fresh.name + suffix).unlink(missing_ok=True)
    if not _empty:
        with transaction(fresh) as connection:
            _upgrade(connection)
        _empty.append(fresh.read_bytes())
    fresh.write_bytes(_empty[0])
    fresh.chmod(0o600)
    with open(fresh, "rb") as file:
        os.fsync(file.fileno())
    fresh.replace(path)


# module state: a migrated, empty database; further homes of this process (scratch ones, mostly) open at once with it
_empty: list[bytes] = []


@contextmanager
def transaction(path: Path) -> Generator[sa.Connection]:
    """A transaction on a SQLite file in which its schema may change; a new file is made."""
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            # For a new file. A record takes about a kilobyte, and of smaller pages a quarter could be left empty.
            connection.exec_driver_sql("PRAGMA page_size=8192")
            # Likewise: what is removed can then be given back to the disk a few pages at a time.
            connection.exec_driver_sql("PRAGMA auto_vacuum=INCREMENTAL")
            # The driver would commit before each DDL statement; SQLite itself can roll DDL back.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")
            yield connection
            connection.exec_driver_sql("COMMIT")
            # Here no other process can be at it. The mode stays with the file.
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    except DBAPIError as error:
        raise (store_error(error.orig) if isinstance(error.orig, sqlite3.Error) else error) from None
    finally:
        engine.dispose()


class Migrated(Protocol):
    """A data directory whose schema is changed."""

    def changing_schema(self) -> AbstractContextManager[Any]:
        """A transaction of SQLAlchemy in which the schema may be changed. One process at a time has it."""
        ...

    def refuse_in_use(self, schema: str, target: str, oldest: str, /) -> None:
        """Refuse (E3804) to change the schema under processes that run."""
        ...


def up(home: Migrated) -> list[Migration]:
    """Bring a database to the schema of this program; returns the migrations that were applied.

    Refuses (E3804) where a process runs that could not go on. A newer schema is left as it is.
    """
    with home.changing_schema() as connection:
        schema = _schema(connection)
        if pending := pending_at(schema):
            target = pending[-1].revision
            home.refuse_in_use(schema, target, compatible_since(target))
            _upgrade(connection)
    return pending


def down(home: Migrated, lose: Collection[str] = ()) -> Migration:
    """Undo the last migration; returns it. `lose` names what may be lost by that.

    Refuses (E3411) where it cannot be undone or something would be lost that is not named, and (E3804) where a process
    runs that could not go on.
    """
    with home.changing_schema() as connection:
        schema = _schema(connection)
        last, before = last_applied(schema)
        refuse_loss({what: rows for what, rows in at_stake(last, _Rows(connection)).items() if what not in lose})
        home.refuse_in_use(schema, before, compatible_since(before))
        command.downgrade(_config(connection), before)
        _note(connection, before)
    return last


class _Rows(Rows):
    """Reads rows by a connection of SQLAlchemy."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def execute(self, statement: str, _: Sequence[Any] = (), /) -> Any:
        return self._connection.exec_driver_sql(statement)


def _schema(connection: sa.Connection) -> str:
    return connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one()


def _upgrade(connection: sa.Connection) -> None:
    command.upgrade(_config(connection), "head")
    _note(connection, head())


def _note(connection: sa.Connection, schema: str) -> None:
    """Note which programs can work on the database now."""
    for statement in note(schema):
        connection.exec_driver_sql(statement)


def note(schema: str) -> list[str]:
    """The statements that note which programs can work on a database at a schema."""
    statements = [f"DELETE FROM fact WHERE name = '{COMPATIBLE_SINCE}'"]  # noqa: S608 - a constant
    if (oldest := compatible_since(schema)) != schema:
        statements.append(f"INSERT INTO fact (name, value) VALUES ('{COMPATIBLE_SINCE}', '{oldest}')")  # noqa: S608
    return statements


def _config(connection: sa.Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migration_list.SCRIPTS))
    config.attributes["connection"] = connection
    return config

"""Connections to the SQLite file of a data directory, as the journal needs them."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from interlock.store.connection import SqliteConnection
from interlock.store.port import StoreConnection, StoreError

Connected = TypeVar("Connected", bound=SqliteConnection)

# The database's log is cut back to this size once what it holds is in the database.
LOG_BYTES = 64 * 2**20
_PRAGMA_PATIENCE_S = 10.0
# The log has 1,000 pages of 8 KiB when SQLite begins to overwrite it, and those of the batch that made it so long.
_LOG_MIB = 9
# With a cache that is too small for a transaction, SQLite writes pages to the log before the commit.
_FEW_PAGES = 10


def connect(path: Path) -> SqliteConnection:
    """A connection as the journal needs it: WAL, every commit on disk before it counts, no right to rewrite history."""
    return for_journal(connected(path, SqliteConnection, patience_s=0))


def connected(path: Path, factory: type[Connected], *, patience_s: float) -> Connected:
    """A connection that changes nothing yet, not even how the file is written."""
    return sqlite3.connect(
        path,
        timeout=patience_s,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
        factory=factory,
    )


def for_journal(connection: Connected) -> Connected:
    """Set a connection up as the journal needs it."""
    # A batch holds a savepoint. The pages that SQLite keeps to return to it would go to a file in a temporary directory
    # from the ninth on. That costs a third of reserving keys, the directory may be read-only, and nothing of the
    # database belongs there.
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        "trusted_schema=OFF",
        _REPLACING,
        "temp_store=MEMORY",
        f"journal_size_limit={LOG_BYTES}",
    ):
        _persist(connection, f"PRAGMA {pragma}")
    connection.set_authorizer(_append_only)
    return connection


def apply_log(database: Path) -> None:
    """Copy what the log of the database holds to its file, as far as no reader needs the log. Blocks; writers go on."""
    try:
        with closing(sqlite3.connect(database, timeout=0, isolation_level=None)) as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    except sqlite3.Error:
        pass  # another process does it just now, or the disk is full: then the next write says so


def extend_log(connection: StoreConnection) -> None:
    """Make the log as long as it gets, by pages that are never committed; roll the open transaction back.

    SQLite appends to the log until it has 1,000 pages, and from then on overwrites it. A commit that appends costs
    about twice one that overwrites: the file system has to write the new length of the file as well.
    """
    (pages,) = connection.one("PRAGMA cache_size")
    try:
        connection.execute(f"PRAGMA cache_size={_FEW_PAGES}")
        connection.execute("CREATE TABLE filling (content BLOB)")
        for _ in range(_LOG_MIB):
            connection.execute("INSERT INTO filling VALUES (zeroblob(?))", (2**20,))
    finally:
        connection.execute(f"PRAGMA cache_size={pages}")
        if connection.in_transaction:  # which a full disk has ended
            connection.execute("ROLLBACK")


def _persist(connection: StoreConnection, statement: str) -> None:
    """Run a pragma that may meet another process's lock for a moment.

    SQLite's own busy timeout does not cover the switch to WAL: of two connections that switch at once, one is refused
    immediately.
    """
    give_up = time.monotonic() + _PRAGMA_PATIENCE_S
    while True:
        try:
            connection.execute(statement)
            return
        except StoreError as error:
            if "locked" not in str(error) or time.monotonic() >= give_up:
                raise
        time.sleep(0.001)


# Replacing a row removes one, and meets the trigger that removing meets.
_REPLACING = "recursive_triggers=ON"
_LEDGER = frozenset({"journal", "anchor", "segment"})
_GUARDS = frozenset({"writable_schema", "recursive_triggers"})
_REWRITES = frozenset({sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE, sqlite3.SQLITE_DROP_TABLE})


def _append_only(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    # INVARIANT: the running program has no right to change or remove a record, whatever code asks it to.
    if action == sqlite3.SQLITE_PRAGMA:
        forbidden = (first or "").lower() in _GUARDS and second is not None
    elif action in (sqlite3.SQLITE_ALTER_TABLE, sqlite3.SQLITE_DROP_TRIGGER):
        forbidden = second in _LEDGER
    else:
        forbidden = action in _REWRITES and first in _LEDGER
    return sqlite3.SQLITE_DENY if forbidden else sqlite3.SQLITE_OK

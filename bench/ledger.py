"""Journals of any length: copies of one real record, chained as the journal itself chains them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from interlock import Interlock
from interlock.store.connection import Connection
from interlock.store.home import Home
from interlock.store.transaction import Transaction

_INSERT = "INSERT INTO journal (seq, kind, call, body, hash) VALUES (?, ?, ?, ?, ?)"
_LAST = "SELECT seq, hash, call, body FROM journal WHERE kind = 'closed' ORDER BY seq DESC LIMIT 1"
_CHUNK = 10_000


async def fill(home: Path, rows: int) -> None:
    """Bring a home that nobody has open, and whose last record closes a call, to so many records."""
    append(Home(home).database, rows)
    async with Interlock.open(home) as lock:
        [(found,)] = lock.journal.reader.all("SELECT count(*) FROM journal")
    if found != rows:
        raise SystemExit(f"the journal has {found} rows, not {rows}")


def append(database: Path, rows: int) -> None:
    with closing(sqlite3.connect(database, isolation_level=None, factory=Connection)) as connection:
        # A scratch file needs no way back; without one the fill is several times faster.
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-262144"):
            connection.execute(f"PRAGMA {pragma}")
        seq, head, call, body = connection.execute(_LAST).fetchone()
        transaction = Transaction(connection, seq, head, 0)
        connection.execute("BEGIN IMMEDIATE")
        for start in range(seq, rows, _CHUNK):
            for number in range(start, min(start + _CHUNK, rows)):
                copy = f"{number:026d}"
                transaction.append("closed", copy, body.replace(call.encode(), copy.encode()))
            connection.executemany(_INSERT, transaction.rows)
            transaction.rows.clear()
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode=WAL")

"""Administrative acts on the database: removing old records, accepting unsigned ones, giving pages back to the disk.

The running program has no right to delete from the ledger (journal, anchor, segment). These acts open a connection of
their own that may; triggers of the database still let no record go that no segment accounts for.

A segment stands for records that were removed: the first and the last of them, the hash that the last one had, and a
signature over it. Segments begin at record 1 and follow each other without a gap.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import cast

from interlock.core.errors import Failure
from interlock.store import transaction as units
from interlock.store.connection import SqliteConnection
from interlock.store.failures import store_failure
from interlock.store.home import Home
from interlock.store.last_head import SignedHead, anchor_line, ends
from interlock.store.port import Reader, StoreConnection, StoreError, Transaction
from interlock.store.signing import Signer
from interlock.store.turns import Turns

PAGES_AT_ONCE = 256
# A file that has more than this share of empty pages, and more than so many, gives them back to the disk.
SPARE = 0.05
SPARE_PAGES = 256
_LOCK_PATIENCE_S = 10
_INCREMENTAL = 2


class Administration(SqliteConnection):
    """A connection that may delete. It takes turns with the processes that write to the same home.

    `postgres.administration` has that of a server: a connection of the owner of the tables.
    """

    turns: Turns

    def begin(self) -> bool:
        """Begin a transaction when it is this process's turn; False when that took too long."""
        self.execute("PRAGMA busy_timeout=0")
        try:
            return self.turns.begin(self.execute, _LOCK_PATIENCE_S)
        finally:
            self.execute(f"PRAGMA busy_timeout={_LOCK_PATIENCE_S * 1000}")

    def close(self) -> None:
        super().close()
        self.turns.close()


@contextmanager
def administered(home: Home) -> Generator[Administration]:
    """A connection that may delete, within what the triggers allow. What it deletes is overwritten.

    Errors of the database are raised as failures, as of any other access.
    """
    try:
        with closing(_connect(home)) as connection:
            yield connection
    except StoreError as error:
        raise store_failure(error) from None


def _connect(home: Home) -> Administration:
    if not home.near:
        from interlock.store.postgres.administration import connect

        return cast("Administration", connect(home))
    patience_s = _LOCK_PATIENCE_S
    connection = sqlite3.connect(home.database, timeout=patience_s, isolation_level=None, factory=Administration)
    connection.turns = Turns(home.turns)
    for pragma in ("synchronous=FULL", "foreign_keys=ON", "trusted_schema=OFF", "secure_delete=ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


@contextmanager
def in_turn(connection: Administration) -> Generator[None]:
    """A transaction that writes, begun when it is this process's turn; committed, or rolled back when it raises."""
    if not connection.begin():
        raise Failure("E3803", "another process holds the journal", retry_after_ms=100)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def writing(connection: Administration, now_ms: int) -> Generator[Transaction]:
    """A transaction at the end of the chain. It is committed with the records that were appended, or rolled back."""
    with in_turn(connection):
        transaction = units.Transaction(connection, *ends(connection, None).head, now_ms)
        yield transaction
        units.insert(connection.statements(), transaction.rows)


def anchor_head(transaction: Transaction, signer: Signer) -> bytes:
    """Sign the head; returns the line that the anchors file gets once this is on disk."""
    seq, head = transaction.head
    signature = signer.sign("head", seq, head, transaction.now_ms)
    transaction.execute(
        "INSERT INTO anchor (seq, hash, at_ms, key_id, signature) VALUES (?, ?, ?, ?, ?)",
        (seq, head, transaction.now_ms, signer.key_id, signature),
    )
    return anchor_line(seq, head, transaction.now_ms, signer.key_id, signature)


# Removed records


def purged_through(reader: Reader) -> int:
    """The last record that was removed; 0 when none was."""
    return reader.one("SELECT COALESCE(MAX(last_seq), 0) FROM segment")[0]


def last_record(reader: Reader) -> int:
    """The last record that is there; 0 when none is."""
    return reader.one("SELECT COALESCE(MAX(seq), 0) FROM journal")[0]


def records_between(reader: Reader, after: int, through: int) -> Iterator[tuple[int, bytes, bytes]]:
    """Seq, body and hash of the records behind one, up to another with that."""
    return reader.each("SELECT seq, body, hash FROM journal WHERE seq > ? AND seq <= ? ORDER BY seq", (after, through))


def replace_by_segment(transaction: Transaction, first_seq: int, last: SignedHead) -> None:
    """Put a signed segment in the place of the records up to one."""
    transaction.execute(
        "INSERT INTO segment (last_seq, first_seq, hash, at_ms, key_id, signature) VALUES (?, ?, ?, ?, ?, ?)",
        (last.seq, first_seq, last.hash, last.at_ms, last.key_id, last.signature),
    )
    transaction.execute("DELETE FROM journal WHERE seq <= ?", (last.seq,))


# Empty pages


def can_give_back(connection: Reader) -> bool:
    """Whether this database can give pages back a few at a time. One of an earlier version cannot before `rewrite`."""
    return connection.one("PRAGMA auto_vacuum")[0] == _INCREMENTAL


def rewrite(connection: StoreConnection) -> None:
    """Rewrite the whole file without its empty pages. Blocks every writer."""
    connection.execute(f"PRAGMA auto_vacuum={_INCREMENTAL}")
    connection.execute("VACUUM")


def give_back(database: Reader) -> bool:
    """Give a few empty pages back to the disk, where there are many; whether there are more to give."""
    (empty,) = database.one("PRAGMA freelist_count")
    (pages,) = database.one("PRAGMA page_count")
    if empty <= max(SPARE_PAGES, SPARE * pages):
        return False
    for _ in range(min(PAGES_AT_ONCE, empty)):
        # The driver ends a statement without columns after its first step, and each step gives one page back.
        database.all("PRAGMA incremental_vacuum(1)")
    # A database of an earlier version gives nothing back; asking again would change nothing.
    return database.one("PRAGMA freelist_count")[0] < empty


def apply_log(connection: Reader) -> None:
    """Move what the log holds to the database file, as far as no reader needs it."""
    connection.all("PRAGMA wal_checkpoint(PASSIVE)")

"""How long records are kept, and how they go: from the start of the chain, past their term, leaving a signed head.

Reads have one term, everything else another, between one and seven years. A purge removes records only as long as each
is past its own term; the first that is not ends it, whatever lies behind. What goes leaves a segment: where it began
and ended, and the signed hash it ended with, from which the rest of the chain still verifies. Segment, removal, a
record of the purge and an anchor over that record are one transaction.

The running program has no right to delete from the ledger. A purge is an administrative act and opens a connection of
its own; even there a trigger lets nothing go that no segment accounts for.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime

import orjson

from interlock.core.clock import iso
from interlock.core.errors import Failure
from interlock.settings import Settings
from interlock.store import records
from interlock.store.home import Home, store_failure
from interlock.store.journal import Transaction, anchor_line, note_anchor
from interlock.store.signing import Signer

MIN_YEARS, MAX_YEARS = 1, 7
# One transaction removes this much at most, so that a running program never waits long for the file.
SEGMENT_RECORDS = 50_000
_LOCK_PATIENCE_S = 10


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the chain that was removed, and the hash it ended with."""

    first_seq: int
    last_seq: int
    hash: bytes

    @property
    def records(self) -> int:
        return self.last_seq - self.first_seq + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How many years each class of record is kept at least."""

    reads_years: int
    others_years: int

    def __post_init__(self) -> None:
        # INVARIANT: no term is shorter than a year or longer than seven, however the settings were made.
        for years in (self.reads_years, self.others_years):
            if not MIN_YEARS <= years <= MAX_YEARS:
                raise Failure("E3004", f"records are kept between {MIN_YEARS} and {MAX_YEARS} years, not `{years}`")

    @classmethod
    def of(cls, settings: Settings) -> Terms:
        return cls(reads_years=settings.retention_years, others_years=settings.retention_years_writes)


def purge(home: Home, settings: Settings, *, now_ms: int, by: str, through: int | None = None) -> tuple[Segment, ...]:
    """Remove what is past its term from the start of the chain; returns the segments that went, none if nothing is due.

    `through` asks for everything up to a record, and is refused (E3411) when something there is still in its term.
    A chain that does not verify is not purged (E3804): that would remove the evidence. Blocks; run it in a thread.
    """
    from interlock.audit.chain import verify

    verdict = verify(home)
    if not verdict.intact:
        fault = verdict.faults[0]
        where = f"the chain is broken at record {fault.seq}: " if fault.seq else ""
        raise Failure("E3804", f"nothing was purged: {where}{fault.what}")
    try:
        with closing(_administer(home)) as connection:
            limit = verdict.head[0] if through is None else through
            due = list(_due(connection, _Cutoffs.at(Terms.of(settings), now_ms), verdict.purged_through, limit))
            last = due[-1].last_seq if due else verdict.purged_through
            if through is not None and last < through:
                raise Failure("E3411", f"nothing was purged: record {last + 1} is still in its term or does not exist")
            signer = Signer(home.keys)
            for segment in due:
                _remove(connection, home, signer, segment, now_ms=now_ms, by=by)
    except sqlite3.Error as error:
        raise store_failure(error) from None
    return tuple(due)


def expire_payloads(transaction: Transaction) -> int:
    """Let go of large results whose time is over. The row stays and says so; returns how many there were."""
    statement = "UPDATE payload SET body = NULL, reason = 'expired' WHERE expires_ms <= ? AND body IS NOT NULL"
    return transaction.execute(statement, (transaction.now_ms,)).rowcount


@dataclass(frozen=True, slots=True)
class _Cutoffs:
    """Timestamps up to which records of each class are past their term. ISO 8601 in UTC sorts as text."""

    reads: str
    others: str

    @classmethod
    def at(cls, terms: Terms, now_ms: int) -> _Cutoffs:
        return cls(_years_before(now_ms, terms.reads_years), _years_before(now_ms, terms.others_years))

    def passed(self, body: bytes) -> bool:
        """Whether a record is past its term. One that does not say when it was made is kept."""
        record = orjson.loads(body)
        made = record.get("timestamp")
        if not isinstance(made, str) or len(made) != len(self.others) or not made.endswith("Z"):
            return False
        return made <= (self.reads if record.get("mutationClass") == "read_only" else self.others)


def _years_before(now_ms: int, years: int) -> str:
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    # 29 February has no counterpart in most years; the earlier day keeps more.
    day = 28 if (now.month, now.day) == (2, 29) else now.day
    then = now.replace(year=now.year - years, day=day)
    return iso(now_ms - round((now - then).total_seconds() * 1000))


def _administer(home: Home) -> sqlite3.Connection:
    """A connection that may delete, within what the triggers allow. What it deletes is overwritten."""
    connection = sqlite3.connect(home.database, timeout=_LOCK_PATIENCE_S, isolation_level=None)
    for pragma in ("synchronous=FULL", "foreign_keys=ON", "trusted_schema=OFF", "secure_delete=ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _due(connection: sqlite3.Connection, cutoffs: _Cutoffs, purged_through: int, limit: int) -> Iterator[Segment]:
    """The segments that may go: as far as every record is past its term, and no further than the limit."""
    query = "SELECT seq, body, hash FROM journal WHERE seq > ? AND seq <= ? ORDER BY seq"
    first, last, head = purged_through + 1, purged_through, b""
    for seq, body, hash_ in connection.execute(query, (purged_through, limit)):
        # INVARIANT: nothing inside its term goes, and nothing goes before what lies in front of it.
        if not cutoffs.passed(body):
            break
        last, head = seq, hash_
        if last - first + 1 == SEGMENT_RECORDS:
            yield Segment(first, last, head)
            first = last + 1
    if last >= first:
        yield Segment(first, last, head)


def _remove(
    connection: sqlite3.Connection, home: Home, signer: Signer, segment: Segment, *, now_ms: int, by: str
) -> None:
    """Put a signed segment in the place of its records, and record and anchor that this was done."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        _refuse_if_changed(connection, segment)
        signature = signer.sign("segment", segment.last_seq, segment.hash, now_ms)
        connection.execute(
            "INSERT INTO segment (last_seq, first_seq, hash, at_ms, key_id, signature) VALUES (?, ?, ?, ?, ?, ?)",
            (segment.last_seq, segment.first_seq, segment.hash, now_ms, signer.key_id, signature),
        )
        head = connection.execute("SELECT seq, hash FROM journal ORDER BY seq DESC LIMIT 1").fetchone()
        connection.execute("DELETE FROM journal WHERE seq <= ?", (segment.last_seq,))
        transaction = Transaction(connection, head[0], head[1], now_ms)
        call = f"purge:{segment.last_seq}"
        facts = {"firstSeq": segment.first_seq, "lastSeq": segment.last_seq, "hash": segment.hash.hex(), "by": by}
        transaction.append("purge", call, records.plain("purge", call, now_ms, **facts))
        connection.executemany(
            "INSERT INTO journal (seq, kind, call, body, hash) VALUES (?, ?, ?, ?, ?)", transaction.rows
        )
        anchor = anchor_head(transaction, signer)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    note_anchor(home, anchor)


def _refuse_if_changed(connection: sqlite3.Connection, segment: Segment) -> None:
    newest = connection.execute("SELECT MAX(last_seq) FROM segment").fetchone()[0] or 0
    row = connection.execute("SELECT hash FROM journal WHERE seq = ?", (segment.last_seq,)).fetchone()
    if newest != segment.first_seq - 1 or row is None or row[0] != segment.hash:
        raise Failure("E3410", "another purge ran meanwhile; what it removed is on record", retry_after_ms=100)


def anchor_head(transaction: Transaction, signer: Signer) -> bytes:
    """Sign the head; returns the line that the anchors file gets once this is on disk."""
    seq, head = transaction.head
    signature = signer.sign("head", seq, head, transaction.now_ms)
    transaction.execute(
        "INSERT INTO anchor (seq, hash, at_ms, key_id, signature) VALUES (?, ?, ?, ?, ?)",
        (seq, head, transaction.now_ms, signer.key_id, signature),
    )
    return anchor_line(seq, head, transaction.now_ms, signer.key_id, signature)

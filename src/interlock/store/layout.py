"""Checks of the physical layout: the ledger's tables, indexes and triggers are those that the migrations make.

A chain proves the rows that it is followed through, not that everybody reads those rows. A table without its primary
key holds rows that no order reaches, an incomplete index hides rows from those who look by call, a view or a trigger
answers or acts in a table's place. So the definitions must equal, word for word, those of the migrations, and SQLite's
own check must find that each index holds exactly what its table holds.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from interlock.core.record import NamedTuple
from interlock.store.port import Reader, StoreError

# Everything that belongs to the ledger; white space aside, as the migrations make it. A test holds the two equal.
_MADE = """
CREATE TABLE journal ( seq INTEGER NOT NULL, kind TEXT NOT NULL, call TEXT NOT NULL, body BLOB NOT NULL,
    hash BLOB NOT NULL, PRIMARY KEY (seq) );;
CREATE INDEX journal_call ON journal (call);;
CREATE TABLE anchor ( seq INTEGER NOT NULL, hash BLOB NOT NULL, at_ms INTEGER NOT NULL, key_id TEXT NOT NULL,
    signature BLOB NOT NULL, PRIMARY KEY (seq) );;
CREATE TABLE segment ( last_seq INTEGER NOT NULL, first_seq INTEGER NOT NULL, hash BLOB NOT NULL,
    at_ms INTEGER NOT NULL, key_id TEXT NOT NULL, signature BLOB NOT NULL, PRIMARY KEY (last_seq) );;
CREATE TRIGGER journal_never_changes BEFORE UPDATE ON journal
    BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;;
CREATE TRIGGER journal_keeps_its_term BEFORE DELETE ON journal
    WHEN OLD.seq > (SELECT COALESCE(MAX(last_seq), 0) FROM segment)
    BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;;
CREATE TRIGGER anchor_only_grows BEFORE INSERT ON anchor
    WHEN EXISTS (SELECT 1 FROM anchor WHERE seq = NEW.seq)
    BEGIN SELECT RAISE(IGNORE); END;;
CREATE TRIGGER segment_only_grows BEFORE INSERT ON segment
    WHEN EXISTS (SELECT 1 FROM segment WHERE last_seq = NEW.last_seq)
    BEGIN SELECT RAISE(ABORT, 'segments are append-only'); END;;
CREATE TRIGGER anchor_never_changes BEFORE UPDATE ON anchor
    BEGIN SELECT RAISE(ABORT, 'anchors are append-only'); END;;
CREATE TRIGGER anchor_stays BEFORE DELETE ON anchor
    BEGIN SELECT RAISE(ABORT, 'anchors are append-only'); END;;
CREATE TRIGGER segment_never_changes BEFORE UPDATE ON segment
    BEGIN SELECT RAISE(ABORT, 'segments are append-only'); END;;
CREATE TRIGGER segment_stays BEFORE DELETE ON segment
    BEGIN SELECT RAISE(ABORT, 'segments are append-only'); END
"""
LEDGER = ("journal", "anchor", "segment")


class _Object(NamedTuple):
    """A row of SQLite's schema table."""

    type: str
    name: str
    table: str
    sql: str

    def __str__(self) -> str:
        return f"the {self.type} `{self.name}`" + ("" if self.type == "table" else f" on `{self.table}`")


def _made(sql: str) -> _Object:
    words = sql.split()
    name = words[2]
    table = name if words[1] == "TABLE" else words[words.index("ON") + 1]
    return _Object(words[1].lower(), name, table, " ".join(words))


_EXPECTED = tuple(map(_made, _MADE.split(";;")))
_ADD_PAYLOAD = (
    "INSERT INTO payload_use (scope, bytes) SELECT column1, {size}"
    " FROM (VALUES ('home'), ('tenant:' || substr({row}.owner, 1, instr({row}.owner, '/') - 1)),"
    " ('caller:' || {row}.owner)) WHERE true ON CONFLICT (scope) DO UPDATE SET bytes = bytes + excluded.bytes;"
)
# Triggers that a home may have besides: one of an earlier version, such as a backup from before an upgrade has, and
# those that keep the sums for quotas, which a home of an earlier version lacks.
_OPTIONAL = (
    _made(
        "CREATE TRIGGER journal_only_grows BEFORE INSERT ON journal"
        " WHEN EXISTS (SELECT 1 FROM journal WHERE seq = NEW.seq)"
        " BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END"
    ),
    _made(
        "CREATE TRIGGER payload_stored AFTER INSERT ON payload WHEN NEW.body IS NOT NULL BEGIN "
        + _ADD_PAYLOAD.format(row="NEW", size="NEW.size")
        + " END"
    ),
    _made(
        "CREATE TRIGGER payload_expired AFTER UPDATE OF body ON payload"
        " WHEN OLD.body IS NOT NULL AND NEW.body IS NULL BEGIN "
        + _ADD_PAYLOAD.format(row="OLD", size="-OLD.size")
        + " END"
    ),
    _made(
        "CREATE TRIGGER payload_deleted AFTER DELETE ON payload WHEN OLD.body IS NOT NULL BEGIN "
        + _ADD_PAYLOAD.format(row="OLD", size="-OLD.size")
        + " END"
    ),
)


def departures(reader: Reader) -> Iterator[str]:
    """Differences from the migrations' definitions: in the ledger, and in everything that acts or answers by itself."""
    if not isinstance(reader, sqlite3.Connection):
        from interlock.store.postgres.layout import departures as of_postgres

        yield from of_postgres(reader)
        return
    objects = [
        each
        for row in reader.each("SELECT type, name, tbl_name, sql FROM sqlite_master")
        if _concerns_us(each := _Object(*map(_text, row)))
    ]
    for each in _EXPECTED:
        there = [other for other in objects if other[:2] == each[:2]]
        if not there:
            yield f"{each} is missing"
        elif there != [each]:
            yield f"{each} is not as it was made"
    ours = {each[:2] for each in _EXPECTED}
    for each in objects:
        if each[:2] not in ours and each not in _OPTIONAL:
            yield f"{each} was not made by Interlock"


def _concerns_us(each: _Object) -> bool:
    if each.type not in ("table", "index") or each.sql.upper().startswith("CREATE VIRTUAL"):
        return True
    return each.name.lower() in LEDGER or each.table.lower() in LEDGER


def count_records(reader: Reader) -> int:
    """The number of records in the table itself, whatever its indexes list."""
    return reader.one("SELECT COUNT(*) FROM journal NOT INDEXED")[0]


def count_by_call(reader: Reader) -> int:
    """The number of records that the index by call lists."""
    return reader.one("SELECT COUNT(*) FROM journal INDEXED BY journal_call")[0]


def has_table(reader: Reader, name: str) -> bool:
    """Whether this schema has a table."""
    return reader.one("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)) is not None


def has_ledger(reader: Reader) -> bool:
    """Whether the three tables of the ledger are tables, and not something else under their names."""
    query = "SELECT COUNT(*) FROM sqlite_master WHERE type = 'table' AND sql LIKE 'CREATE TABLE%' AND name IN (?, ?, ?)"
    return reader.one(query, LEDGER)[0] == len(LEDGER)


def _text(value: Any) -> str:
    """A text of the schema in one form of white space, as SQLite knows it: nothing beyond ASCII is white to it."""
    raw = b"" if value is None else value.encode() if isinstance(value, str) else bytes(value)
    return b" ".join(raw.split()).decode("utf-8", "replace")


def contradictions(reader: Reader, tables: Iterable[str] = LEDGER) -> Iterator[str]:
    """Places where SQLite finds that pages and indexes do not hold what their table holds."""
    if not isinstance(reader, sqlite3.Connection):
        return  # a server checks its pages by itself, where its checksums are switched on
    for table in tables:
        try:
            rows = list(islice(reader.each(f'PRAGMA integrity_check("{table}")'), _MOST))
        except (StoreError, UnicodeDecodeError):
            yield f"the table `{table}` cannot be checked: the file is damaged"
            continue
        for (words,) in rows:
            if (report := _text(words)) != "ok":
                yield f"the table `{table}` contradicts itself: {report}"


_MOST = 3

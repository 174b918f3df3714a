"""Watches databases: finds what a call committed by comparing schema and rows.

A database reports cheaply whether anything was committed: SQLite by its data version, Postgres by the transaction ids
it has assigned. While that is unchanged, nothing is read and the last snapshot is still valid. When it changes, every
table is compared: a small one row by row, so that inserts, updates and deletes can be distinguished; a large one by its
number of rows and a sum over the hashes of all rows. Commits that change nothing are therefore ignored.

Resource names consist of the database, the table, and parts of the table: `database:shop/orders`,
`database:shop/orders/by_date`. One change is reported for each table and operation. Changes that are not committed when
the call ends are not detected.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any, Protocol, cast

from interlock.contract.effects import Change
from interlock.contract.manifest import Operation
from interlock.core.errors import Failure
from interlock.core.record import record
from interlock.core.threads import DISK

# Tables up to this many rows are compared row by row.
SMALL_ROWS = 10_000
MOST_ROWS = 5_000_000
KEEP_BYTES = 64 << 20
BUSY_S = 5.0


@record
class Table:
    """The rows of a table: their number, the sum of their hashes and, for a small table, the hash of
    each by its key.
    """

    count: int
    total: int
    rows: Mapping[Any, Any] | None


@record
class Seen:
    """A snapshot of a database. `exists` is false if there was none."""

    stamp: Any
    exists: bool = True
    definitions: Mapping[str, str] = field(default_factory=dict[str, str])
    tables: Mapping[str, Table] = field(default_factory=dict[str, Table])
    copy: bytes | None = None


def _compare(place: str, before: Seen, now: Seen) -> list[Change]:
    if before.exists != now.exists:
        return [Change(resource=place, operation="CREATE" if now.exists else "DELETE")]
    changes: dict[tuple[str, Operation], Change] = {}

    def note(name: str, operation: Operation, was: Any, became: Any) -> None:
        resource = f"{place}/{name}".rstrip("/")
        changes[resource, operation] = Change(resource=resource, operation=operation, before=was, after=became)

    for name, then, definition in _pairs(before.definitions, now.definitions):
        operation = "CREATE" if then is None else "DELETE" if definition is None else "UPDATE"
        note(name, operation, then and {"definition": then}, definition and {"definition": definition})
    for name in sorted(before.tables.keys() & now.tables.keys()):
        for operation, rows in _row_changes(before.tables[name], now.tables[name]).items():
            note(
                name, operation, {"rows": before.tables[name].count}, {"rows": now.tables[name].count, "changed": rows}
            )
    return sorted(changes.values(), key=lambda change: (change.resource, change.operation))


def _row_changes(before: Table, now: Table) -> dict[Operation, int]:
    """Return the operations that turned one state of a table into the other, and the number of rows of each."""
    if before.rows is not None and now.rows is not None:
        counts: dict[Operation, int] = {"CREATE": 0, "UPDATE": 0, "DELETE": 0}
        for _, was, became in _pairs(before.rows, now.rows):
            counts["CREATE" if was is None else "DELETE" if became is None else "UPDATE"] += 1
        return {operation: count for operation, count in counts.items() if count}
    if before.count != now.count:
        return {"CREATE" if now.count > before.count else "DELETE": abs(now.count - before.count)}
    return {"UPDATE": 1} if before.total != now.total else {}


def _pairs(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Iterate over every key whose value differs, with both values; None if absent."""
    for key in before.keys() | now.keys():
        if before.get(key) != now.get(key):
            yield key, before.get(key), now.get(key)


def _segment(name: str) -> str:
    """Encode a name as one segment of a resource."""
    text = name.replace("%", "%25").replace("/", "%2F").replace("*", "%2A")
    return text.replace(".", "%2E") if text in (".", "..") else text


# SQLite


class SqliteWatcher:
    """Watches one SQLite file through a read-only connection of its own.

    With `keep` it holds a copy of a small database, from which `restore` brings it back.
    """

    ENGINE = "sqlite"

    def __init__(self, path: Path, *, resource: str | None = None, keep: bool = False) -> None:
        self._path = path
        self._place = (resource or f"database:{_segment(path.stem)}").rstrip("/")
        self._keep = keep
        self._connection: sqlite3.Connection | None = None
        self._opened: tuple[int, ...] | None = None
        self._last: Seen | None = None
        self._mutex = threading.Lock()

    @property
    def resources(self) -> tuple[str, ...]:
        return (self._place,)

    async def before(self) -> Seen:
        """Take a snapshot. E3405 if the database cannot be read, E3407 if it is too large."""
        return await DISK.run(self._look)

    async def after(self, before: Seen) -> list[Change]:
        """Return the changes committed since."""
        return _compare(self._place, before, await DISK.run(self._look, damaged=True))

    async def restore(self, before: Seen) -> list[Change]:
        """Restore the database, if a copy was kept; returns the differences that remain."""
        await DISK.run(self._restore, before)
        return await self.after(before)

    def close(self) -> None:
        with self._mutex:
            self._shut()

    def _look(self, *, damaged: bool = False) -> Seen:
        """Take a snapshot. After a call, a file that is no longer a database counts as removed."""
        with self._mutex:
            try:
                return self._see()
            except sqlite3.DatabaseError as error:
                self._shut()
                if damaged and not isinstance(error, sqlite3.OperationalError):
                    return Seen(stamp=None, exists=False)
                raise Failure("E3405", f"`{self._place}` cannot be watched: {error}") from None

    def _see(self) -> Seen:
        identity = _status(self._path)
        if identity is None or identity[2] == 0:
            self._shut()
            return Seen(stamp=None, exists=False)
        if self._connection is None or self._opened != identity[:2]:
            # Another file may have the name by now; a connection stays with the one it opened.
            self._shut()
            self._connection = _open(self._path, "ro")
            self._opened = identity[:2]
        connection = self._connection
        version = connection.execute("PRAGMA data_version").fetchone()[0]  # read first: it opens the log
        log = _status(self._path.with_name(self._path.name + "-wal"))
        # Opening the log may set its owner, which changes its ctime, the last of the five fields.
        stamp = (identity, None if log is None else log[:4], version)
        if self._last is None or self._last.stamp != stamp:
            connection.execute("BEGIN")
            try:
                self._last = _read(connection, stamp, keep=self._keep)
            finally:
                connection.execute("COMMIT")
        return self._last

    def _shut(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._opened = self._last = None

    def _restore(self, before: Seen) -> None:
        with self._mutex:
            self._shut()
            if not before.exists:
                self._remove()
            elif before.copy is not None:
                try:
                    _overwrite(self._path, before.copy)
                except sqlite3.OperationalError:
                    return  # in use or read-only: the remaining differences are reported
                except sqlite3.DatabaseError:
                    # It is no longer a database, so nothing in it needs protection.
                    self._remove()
                    _overwrite(self._path, before.copy)

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm", "-journal"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)


def _open(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    connection.text_factory = _as_text
    return connection


def _overwrite(path: Path, copy: bytes) -> None:
    source, target = sqlite3.connect(":memory:"), _open(path, "rwc")
    try:
        source.deserialize(copy)
        source.backup(target)
    finally:
        source.close()
        target.close()


def _as_text(stored: bytes) -> str:
    return stored.decode("utf-8", "surrogateescape")


def _status(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read(connection: sqlite3.Connection, stamp: Any, *, keep: bool) -> Seen:
    settings = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id")]
    definitions = {"": f"user_version {settings[0]}, application_id {settings[1]}"}
    tables: dict[str, Table] = {}
    budget = MOST_ROWS
    # SQLite's own tables hold statistics and counters, which follow from the other tables.
    for kind, name, table, sql in connection.execute(
        "SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_master WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
    ).fetchall():
        place = _segment(table) if kind in ("table", "view") else f"{_segment(table)}/{_segment(name)}"
        definitions[place] = sql
        if kind == "table" and not sql.upper().startswith("CREATE VIRTUAL"):
            tables[place] = _table(_rows(connection, name), budget)
            budget -= tables[place].count
    copy = _copy(connection) if keep else None
    return Seen(stamp=stamp, definitions=definitions, tables=tables, copy=copy)


def _copy(connection: sqlite3.Connection) -> bytes | None:
    pages, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    if pages * size > KEEP_BYTES:
        return None
    # Bytes 18 and 19 state whether there is a write-ahead log; a copy in memory has none.
    copy = connection.serialize()
    return copy[:18] + b"\x01\x01" + copy[20:]


def _rows(connection: sqlite3.Connection, name: str) -> Iterator[tuple[Any, int]]:
    """Return each row's key and hash. The text is hashed, because 1, 1.0 and True are equal in Python but not here."""
    quoted = _quoted(name)
    columns = connection.execute(f"PRAGMA table_info({quoted})").fetchall()
    taken = {column[1].lower() for column in columns}
    key = next((alias for alias in ("rowid", "_rowid_", "oid") if alias not in taken), "NULL")
    try:
        rows = connection.execute(f"SELECT {key}, * FROM {quoted}")  # noqa: S608 - the name is quoted
        return ((repr(row) if key == "NULL" else row[0], hash(repr(row))) for row in rows)
    except sqlite3.OperationalError:  # a table without row ids always has a key
        rows = connection.execute(f"SELECT * FROM {quoted}")  # noqa: S608 - as above
        keys = [column[0] for column in columns if column[5]]
        return ((tuple(row[key] for key in keys), hash(repr(row))) for row in rows)


def _table(rows: Iterator[tuple[Any, int]], budget: int) -> Table:
    by_key: dict[Any, int] | None = {}
    count = total = 0
    for key, value in rows:
        count += 1
        total = (total + value) & 0xFFFF_FFFF_FFFF_FFFF
        if count > budget:
            raise Failure("E3407", f"more than {MOST_ROWS} rows are to be watched; watch a smaller database")
        if by_key is not None:
            by_key[key] = value
            if count > SMALL_ROWS:
                by_key = None
    return Table(count=count, total=total, rows=by_key)


# Postgres


class Cursor(Protocol):
    def fetchall(self) -> list[tuple[Any, ...]]: ...


class DatabaseConnection(Protocol):
    """A connection in autocommit mode, as psycopg's is: `psycopg.connect(…, autocommit=True)`."""

    def execute(self, query: str, /) -> Cursor: ...

    def close(self) -> None: ...


def connect_postgres(address: str) -> DatabaseConnection:
    """Open a connection for watching, by a libpq address. No statement waits longer than five seconds for a lock."""
    import psycopg

    options = "-c statement_timeout=30000 -c default_transaction_read_only=on"
    connected = psycopg.connect(
        address, autocommit=True, connect_timeout=5, options=options, application_name="interlock"
    )
    return cast("DatabaseConnection", connected)


class PostgresWatcher:
    """Watches schemas of a Postgres database through a connection of its own, opened when needed. Cannot restore."""

    ENGINE = "postgres"

    def __init__(
        self, connect: Callable[[], DatabaseConnection], *, resource: str, schemas: Sequence[str] = ("public",)
    ) -> None:
        self._connect = connect
        self._connection: DatabaseConnection | None = None
        self._place = resource.rstrip("/")
        self._schemas = ", ".join(_literal(schema) for schema in schemas)
        self._last: Seen | None = None
        self._mutex = threading.Lock()

    @property
    def resources(self) -> tuple[str, ...]:
        return (self._place,)

    async def before(self) -> Seen:
        """Take a snapshot. E3405 if the schemas cannot be read, E3407 if they are too large."""
        return await DISK.run(self._look)

    async def after(self, before: Seen) -> list[Change]:
        """Return the changes committed since."""
        return _compare(self._place, before, await DISK.run(self._look))

    async def restore(self, before: Seen) -> list[Change]:
        """Restore nothing; returns all changes."""
        return await self.after(before)

    def _look(self) -> Seen:
        with self._mutex:
            try:
                return self._see()
            except Failure:
                raise
            except Exception as error:  # errors of the driver, whichever it is
                self._drop()
                raise Failure("E3405", f"`{self._place}` cannot be watched: {type(error).__name__}") from error

    def _see(self) -> Seen:
        ask = self._ask
        # Only writers get a transaction id. None running and none assigned since: nothing was committed.
        stamp: str = ask("SELECT pg_current_snapshot()::text")[0][0]
        if self._last is not None and self._last.stamp == stamp and stamp.endswith(":"):
            return self._last
        ask("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            stamp = ask("SELECT pg_current_snapshot()::text")[0][0]
            definitions = {
                "/".join(_segment(part) for part in parts if part): text
                for *parts, text in ask(_DEFINITIONS.format(schemas=self._schemas))
            }
            tables: dict[str, Table] = {}
            budget = MOST_ROWS
            for schema, name, key in ask(_TABLES.format(schemas=self._schemas)):
                tables[f"{_segment(schema)}/{_segment(name)}"] = table = self._table(schema, name, key, budget)
                budget -= table.count
        finally:
            if self._connection is not None:
                ask("COMMIT")
        self._last = Seen(stamp=stamp, definitions=definitions, tables=tables)
        return self._last

    def _table(self, schema: str, name: str, key: str, budget: int) -> Table:
        whole = f"{_quoted(schema)}.{_quoted(name)}"
        count, total = self._ask(_TOTAL.format(table=whole))[0]
        if int(count) > budget:
            raise Failure("E3407", f"more than {MOST_ROWS} rows are to be watched; watch a smaller database")
        rows: dict[Any, Any] | None = None
        if int(count) <= SMALL_ROWS:
            rows = {
                row_key: (value, times)
                for row_key, value, times in self._ask(_ROWS.format(table=whole, key=key or "md5(t::text)"))
            }
        return Table(count=int(count), total=int(total), rows=rows)

    def close(self) -> None:
        with self._mutex:
            self._drop()

    def _drop(self) -> None:
        """Drop a connection that may be broken; the next snapshot opens another."""
        connection, self._connection, self._last = self._connection, None, None
        if connection is not None:
            with suppress(Exception):
                connection.close()

    def _ask(self, query: str) -> list[tuple[Any, ...]]:
        if self._connection is None:
            self._connection = self._connect()
        cursor = self._connection.execute(query)
        return cursor.fetchall() if query.startswith("SELECT") else []


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# Tables, views, sequences and indexes with their columns; functions; triggers. An index or trigger is below its table.
_DEFINITIONS = """SELECT n.nspname::text, coalesce(owner.relname, c.relname)::text,
  CASE WHEN owner.oid IS NULL THEN '' ELSE c.relname::text END,
  concat_ws(' ', c.relkind::text, pg_get_indexdef(i.indexrelid), string_agg(
    concat_ws(' ', a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull), ', ' ORDER BY a.attnum))
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_index i ON i.indexrelid = c.oid LEFT JOIN pg_class owner ON owner.oid = i.indrelid
WHERE n.nspname IN ({schemas}) GROUP BY n.nspname, c.relname, c.relkind, owner.relname, owner.oid, i.indexrelid
UNION ALL SELECT n.nspname::text, concat(p.proname, '(', pg_get_function_identity_arguments(p.oid), ')'), '',
  concat('function ', md5(concat_ws(' ', p.prosrc, p.probin::text, p.prosecdef)))
FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname IN ({schemas})
UNION ALL SELECT n.nspname::text, c.relname::text, t.tgname::text, pg_get_triggerdef(t.oid)
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE NOT t.tgisinternal AND n.nspname IN ({schemas})"""

# Every table, and its primary key as an expression.
_TABLES = """SELECT n.nspname::text, c.relname::text,
  coalesce('ROW(' || string_agg('t.' || quote_ident(a.attname), ', ' ORDER BY a.attnum) || ')::text', '')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisprimary
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY(i.indkey)
WHERE c.relkind = 'r' AND n.nspname IN ({schemas}) GROUP BY n.nspname, c.relname"""

_TOTAL = "SELECT count(*), coalesce(sum(('x' || left(md5(t::text), 15))::bit(60)::bigint), 0)::text FROM {table} t"
_ROWS = "SELECT {key}, min(md5(t::text)), count(*) FROM {table} t GROUP BY 1"

"""The schema on PostgreSQL: the tables of `store.tables`, and what SQLite has built in or does in another way.

A new database is made at the current schema at once; the migrations that led there are of SQLite's history. From then
on both databases take the same migrations. Integers have 64 bits. Texts are compared by their bytes (`COLLATE "C"`), as
on SQLite, so that ranges and orders are the same.

Only here are:
- `instance`: the leases of processes (`leases`).
- `store_time`: the latest time that a transaction had, so that time never goes back, whichever node writes. It is a
  sequence, which is changed in its place. A row that every transaction changes leaves a dead one each time, and all of
  these are read as long as somebody has an old snapshot. `store_clock` is that row, for the program before.
- `lock_board`: the locks on resources (`postgres.lock_board`), in one row.
- `interlock_enter`: the beginning of each transaction that writes (`interlock_begin` is that of the program before). It
  waits for the lock that all writers of one store share, so units run one after the other on all nodes, and refuses a
  process whose lease was taken from it.
- Triggers that keep the ledger append-only, and the grants of a role that has no right to change it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from interlock.core.record import NamedTuple
from interlock.store.postgres.connection import FENCED, translated
from interlock.store.postgres.session import configure, keepalives

if TYPE_CHECKING:
    import sqlalchemy as sa
    from sqlalchemy import Table

    from interlock.store.postgres.connection import PostgresConnection

HAS_SCHEMA = "SELECT 1 FROM pg_tables WHERE schemaname = current_schema() AND tablename = 'alembic_version'"
LEDGER = ("journal", "anchor", "segment")
# A table that is there as long as a copy into this schema is not finished.
UNFINISHED_TABLE = "unfinished_copy"
# A table that is made where vectors of tools are in the database (`postgres.vectors`).
VECTORS_TABLE = "tool_vector"
UNFINISHED = f"SELECT 1 FROM pg_tables WHERE schemaname = current_schema() AND tablename = '{UNFINISHED_TABLE}'"  # noqa: S608

_FUNCTIONS = (
    """CREATE FUNCTION instr(bytea, bytea) RETURNS integer IMMUTABLE STRICT PARALLEL SAFE LANGUAGE sql
       AS 'SELECT position($2 IN $1)'""",
    """CREATE FUNCTION instr(text, text) RETURNS integer IMMUTABLE STRICT PARALLEL SAFE LANGUAGE sql
       AS 'SELECT position($2 IN $1)'""",
    """CREATE FUNCTION hex(bytea) RETURNS text IMMUTABLE STRICT PARALLEL SAFE LANGUAGE sql
       AS $$SELECT upper(encode($1, 'hex'))$$""",
    # In two steps: to make a text of the whole would fail where any part holds an escaped NUL. Only release 0.1.0rc1
    # asks for the last element of a list in this way (see `dialect`).
    r"""CREATE FUNCTION json_extract(bytea, text) RETURNS text IMMUTABLE STRICT PARALLEL SAFE LANGUAGE sql
       AS $$SELECT convert_from($1, 'UTF8')::json
            #> string_to_array(replace(substr($2, 3), '[#-1]', '.-1'), '.') #>> '{}'$$""",
    "CREATE DOMAIN blob AS bytea",
)

# Locks of one store are told from those of others by this number and the name of its schema.
_LOCK = 0x494C
# The lock that all writers share.
WRITING = f"{_LOCK}, hashtext(current_schema())"
# How long a migration waits for those who use a table that it changes.
PATIENCE_MS = 5000
# The lock of a process that makes or changes the schema.
MIGRATING = f"{_LOCK + 1}, hashtext(current_schema())"
_BEGIN = f"""
CREATE FUNCTION interlock_begin(instance_id text, OUT now_ms bigint, OUT xid text) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock({_LOCK}, hashtext(current_schema()));
    IF instance_id <> '' AND NOT EXISTS (SELECT 1 FROM instance WHERE id = instance_id) THEN
        RAISE EXCEPTION 'the lease of this process was taken from it' USING ERRCODE = '{FENCED}';
    END IF;
    UPDATE store_clock SET ms = greatest(ms, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint)
        RETURNING ms INTO now_ms;
    xid := pg_current_xact_id()::text;
END $$
"""  # noqa: S608 - constants

_ENTER = f"""
CREATE FUNCTION interlock_enter(instance_id text, OUT now_ms bigint, OUT xid text) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock({_LOCK}, hashtext(current_schema()));
    IF instance_id <> '' AND NOT EXISTS (SELECT 1 FROM instance WHERE id = instance_id) THEN
        RAISE EXCEPTION 'the lease of this process was taken from it' USING ERRCODE = '{FENCED}';
    END IF;
    now_ms := setval('store_time', greatest((SELECT last_value FROM store_time), (SELECT ms FROM store_clock),
        floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint));
    xid := pg_current_xact_id()::text;
END $$
"""  # noqa: S608 - constants

# What became of a transaction. The lock is held by one that the server still works on.
_OUTCOME = f"""
CREATE FUNCTION interlock_outcome(number text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock({_LOCK}, hashtext(current_schema()));
    RETURN pg_xact_status(number::xid8);
EXCEPTION WHEN invalid_parameter_value THEN
    RETURN 'lost';  -- this server never had it: it took the place of one that was lost
END $$
"""
# How long a process has to renew its lease.
LEASE_MS = 15_000
# Of a row of `instance`: whether that process is taken for dead by who looks. After a restart of the server, everybody
# gets the time to renew.
EXPIRED = f"""until_ms < floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint
        AND pg_postmaster_start_time() < clock_timestamp() - interval '{LEASE_MS} milliseconds'"""
# Whether a process lives. One whose lease has run out loses it here, and may not write from then on.
_ALIVE = f"""
CREATE FUNCTION interlock_alive(instance_id text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM instance WHERE id = instance_id
        AND {EXPIRED};
    RETURN EXISTS (SELECT 1 FROM instance WHERE id = instance_id);
END $$
"""  # noqa: S608 - constants
_RENEW = f"""
CREATE FUNCTION interlock_renew(instance_id text, told bytea, anew boolean, directory text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE until bigint := floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint + {LEASE_MS};
BEGIN
    IF anew THEN
        INSERT INTO instance (id, until_ms, report, place) VALUES (instance_id, until, told, directory);
    ELSE
        UPDATE instance SET until_ms = until, report = told WHERE id = instance_id;
    END IF;
    RETURN FOUND;
END $$
"""  # noqa: S608 - constants
# The board of resource locks, locked until the transaction ends, and the processes that live. Others whose lease has
# run out lose it here, as in `interlock_alive`.
_BOARD = f"""
CREATE FUNCTION interlock_board(me text, OUT version bigint, OUT document bytea, OUT living text) LANGUAGE plpgsql AS $$
BEGIN
    SELECT b.version, b.document INTO version, document FROM lock_board b FOR UPDATE;
    DELETE FROM instance WHERE id <> me
        AND {EXPIRED};
    IF NOT EXISTS (SELECT 1 FROM instance WHERE id = me) THEN
        RAISE EXCEPTION 'the lease of this process was taken from it' USING ERRCODE = '{FENCED}';
    END IF;
    SELECT coalesce(string_agg(id, ' '), '') INTO living FROM instance;
END $$
"""  # noqa: S608 - constants

_OWN_TABLES = (
    """CREATE TABLE instance (id TEXT COLLATE "C" PRIMARY KEY, until_ms BIGINT NOT NULL,
       report BYTEA, place TEXT NOT NULL)""",
    "CREATE SEQUENCE store_time",
    "CREATE TABLE store_clock (ms BIGINT NOT NULL)",
    "CREATE UNIQUE INDEX store_clock_once ON store_clock ((true))",
    "INSERT INTO store_clock (ms) VALUES (0)",
    "CREATE TABLE lock_board (version BIGINT NOT NULL, document BYTEA NOT NULL)",
    "CREATE UNIQUE INDEX lock_board_once ON lock_board ((true))",
    """INSERT INTO lock_board (version, document) VALUES (0, convert_to('{"next":1,"members":{}}', 'UTF8'))""",
    "CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)",
)

_NEVER = """
CREATE FUNCTION interlock_never() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'the ledger is append-only' USING ERRCODE = 'integrity_constraint_violation'; END $$
"""
_KEEPS = """
CREATE FUNCTION interlock_keeps_its_term() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.seq > (SELECT coalesce(max(last_seq), 0) FROM segment) THEN
        RAISE EXCEPTION 'the journal is append-only' USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN OLD;
END $$
"""
_USE = """
CREATE FUNCTION interlock_payload_use() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    before bigint := CASE WHEN TG_OP = 'INSERT' THEN 0 WHEN OLD.body IS NULL THEN 0 ELSE OLD.size END;
    after bigint := CASE WHEN TG_OP = 'DELETE' THEN 0 WHEN NEW.body IS NULL THEN 0 ELSE NEW.size END;
    holder text := CASE WHEN TG_OP = 'DELETE' THEN OLD.owner ELSE NEW.owner END;
BEGIN
    IF before <> after THEN
        INSERT INTO payload_use (scope, bytes) SELECT one, after - before FROM unnest(ARRAY['home',
            'tenant:' || substr(holder, 1, greatest(instr(holder, '/') - 1, 0)), 'caller:' || holder]) AS one
            ON CONFLICT (scope) DO UPDATE SET bytes = payload_use.bytes + excluded.bytes;
    END IF;
    RETURN NULL;
END $$
"""
_TRIGGERS = (
    "CREATE TRIGGER journal_never_changes BEFORE UPDATE ON journal FOR EACH ROW EXECUTE FUNCTION interlock_never()",
    """CREATE TRIGGER journal_keeps_its_term BEFORE DELETE ON journal
       FOR EACH ROW EXECUTE FUNCTION interlock_keeps_its_term()""",
    """CREATE TRIGGER anchor_never_changes BEFORE UPDATE OR DELETE ON anchor
       FOR EACH ROW EXECUTE FUNCTION interlock_never()""",
    """CREATE TRIGGER segment_never_changes BEFORE UPDATE OR DELETE ON segment
       FOR EACH ROW EXECUTE FUNCTION interlock_never()""",
    *(
        f"CREATE TRIGGER {table}_stays BEFORE TRUNCATE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION interlock_never()"
        for table in LEDGER
    ),
    """CREATE TRIGGER payload_used AFTER INSERT OR UPDATE OF body OR DELETE ON payload
       FOR EACH ROW EXECUTE FUNCTION interlock_payload_use()""",
)


# The triggers of the ledger and the functions that they and writers run, for those who check them.
_EVENTS = (("EACH ROW", 1), ("BEFORE", 2), ("INSERT", 4), ("DELETE", 8), ("UPDATE", 16), ("TRUNCATE", 32))


class Trigger(NamedTuple):
    """A trigger as the server describes it: its table, when it runs (`pg_trigger.tgtype`), and its function."""

    table: str
    events: int
    function: str


class Function(NamedTuple):
    """A function as the server describes it: its arguments, and its body with single spaces."""

    arguments: str
    source: str


def _trigger(text: str) -> tuple[str, Trigger]:
    words = text.split()
    head = text[: text.index(" ON ")]
    events = sum(bit for word, bit in _EVENTS if word in (text if word == "EACH ROW" else head.partition(words[2])[2]))
    return words[2], Trigger(words[words.index("ON") + 1], events, words[-1].removesuffix("()"))


def _function(text: str) -> tuple[str, Function]:
    name, _, rest = text.split("FUNCTION ", 1)[1].partition("(")
    return name, Function(" ".join(rest.partition(")")[0].split()), " ".join(text.split("$$")[1].split()))


TRIGGERS = {name: one for name, one in map(_trigger, _TRIGGERS) if one.table in LEDGER}
FUNCTIONS = dict(map(_function, (_BEGIN, _ENTER, _OUTCOME, _ALIVE, _RENEW, _BOARD, _NEVER, _KEEPS, _USE)))


def create(connection: PostgresConnection, runtime_role: str | None = None) -> None:
    """Make the schema in the transaction that is open. `runtime_role` gets the rights of a process that serves."""
    for statement in _statements():
        connection.execute(statement)
    from interlock.store import migration, migration_list

    connection.execute("INSERT INTO alembic_version (version_num) VALUES (?)", (migration_list.head(),))
    for statement in migration.note(migration_list.head()):
        connection.execute(statement)
    if runtime_role is not None:
        (schema,) = connection.one("SELECT current_schema()")
        for statement in grants(schema, runtime_role):
            connection.execute(statement)


def grants(schema: str, role: str) -> tuple[str, ...]:
    """Give a role what a process needs that serves: all tables, but of the ledger only to read it and to add to it."""
    named, space = quoted(role), quoted(schema)
    everything = f"ALL TABLES IN SCHEMA {space}"
    ledger = ", ".join(LEDGER)
    return (
        f"GRANT USAGE ON SCHEMA {space} TO {named}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {everything} TO {named}",
        f"GRANT USAGE, SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA {space} TO {named}",
        f"REVOKE UPDATE, DELETE, TRUNCATE ON {ledger} FROM {named}",
        f"REVOKE INSERT ON segment FROM {named}",
        f"REVOKE INSERT, UPDATE, DELETE ON alembic_version FROM {named}",
    )


def _statements() -> Iterator[str]:
    from sqlalchemy.dialects.postgresql.base import PGDialect
    from sqlalchemy.schema import CreateIndex, CreateTable

    from interlock.store.tables import metadata

    dialect = PGDialect()
    yield from _FUNCTIONS
    for table in metadata.sorted_tables:
        yield str(CreateTable(_adapted(table)).compile(dialect=dialect)).replace(" SERIAL ", " BIGSERIAL ")
        for index in sorted(table.indexes, key=lambda one: str(one.name)):
            yield str(CreateIndex(index).compile(dialect=dialect))
    yield from _OWN_TABLES
    yield from (_BEGIN, _ENTER, _OUTCOME, _ALIVE, _RENEW, _BOARD, _NEVER, _KEEPS, _USE)
    yield from _TRIGGERS


def _adapted(table: Table) -> Any:
    """A table with the types that its columns have on PostgreSQL."""
    import sqlalchemy as sa

    from interlock.store.tables import SEALED

    copy = table.to_metadata(sa.MetaData())
    for column in copy.columns:
        if (table.name, column.name) in SEALED:
            column.type = sa.LargeBinary()
        elif isinstance(column.type, sa.Integer) and column.autoincrement is not True:
            column.type = sa.BigInteger()
        elif isinstance(column.type, sa.Text):
            column.type = sa.Text(collation="C")
    return copy


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def remove(connection: PostgresConnection) -> None:
    """Remove everything that `create` has made, in the transaction that is open."""
    words = [statement.split() for statement in _statements()]
    tables = [each[2].strip("(") for each in words if each[:2] == ["CREATE", "TABLE"]]
    for table in (*tables, UNFINISHED_TABLE, VECTORS_TABLE):
        connection.execute(f'DROP TABLE IF EXISTS "{table}" CASCADE')
    connection.execute("DROP SEQUENCE IF EXISTS store_time")
    functions = {each[2].partition("(")[0] for each in words if each[:2] == ["CREATE", "FUNCTION"]}
    for name, function in connection.all(_FUNCTIONS_THERE):
        if name in functions:
            connection.execute(f"DROP FUNCTION {function} CASCADE")
    connection.execute("DROP DOMAIN IF EXISTS blob CASCADE")


_FUNCTIONS_THERE = """
SELECT proname::text, oid::regprocedure::text FROM pg_proc WHERE pronamespace = current_schema()::regnamespace
"""


def alone() -> tuple[str, ...]:
    """The statements by which a transaction becomes the only one that makes or changes the schema.

    Another process may work on a large store for minutes. It is waited for, longer than the settings of a session
    (`store.postgres.session`) let other statements wait.
    """
    return (
        "SET LOCAL lock_timeout = 0",
        f"SELECT pg_advisory_xact_lock({MIGRATING})",
        f"SET LOCAL lock_timeout = {PATIENCE_MS}",
    )


def make(connection: PostgresConnection, role: str | None) -> None:
    """Make the schema where there is none. Several processes may start at once: one does it."""
    connection.execute("BEGIN")
    try:
        for statement in alone():
            connection.execute(statement)
        if connection.one(HAS_SCHEMA) is None:
            create(connection, role)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _type_named(name: str, *_: Any, **__: Any) -> str:
    return name


def _opened(address: str) -> Any:
    """A connection of the driver as SQLAlchemy wants it, with the same bounds as that of a writer."""
    import psycopg

    try:
        driver = psycopg.connect(address, autocommit=True, **keepalives())
    except OSError as error:
        raise translated(error) from None
    configure(driver, reading=False)
    driver.autocommit = False
    return driver


@contextmanager
def changing(address: str, role: str | None) -> Generator[sa.Connection]:
    """A transaction in which the schema may be changed, by the owner of the tables. One process at a time has it.

    Other processes go on. Those that use a table when it is changed are waited for, but not for long: everybody who
    comes later waits as well.
    """
    import psycopg
    import sqlalchemy as sa
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.ext.compiler import compiles

    # Migrations name the types that SQLite has; here they are those that `_adapted` gives to new tables.
    for kind, name in ((sa.Integer, "BIGINT"), (sa.Text, 'TEXT COLLATE "C"')):
        compiles(kind, "postgresql")(partial(_type_named, name))
    engine = sa.create_engine("postgresql+psycopg://", creator=partial(_opened, address), poolclass=sa.NullPool)
    try:
        with engine.begin() as connection:
            for statement in alone():
                connection.exec_driver_sql(statement)
            yield connection
            if role is not None:
                schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
                for statement in grants(schema, role):
                    connection.exec_driver_sql(statement)
    except DBAPIError as error:
        raise translated(error.orig) if isinstance(error.orig, psycopg.Error) else error from None
    finally:
        engine.dispose()

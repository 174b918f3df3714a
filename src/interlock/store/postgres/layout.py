"""Checks of tables on PostgreSQL: their triggers, what stands in their place, and who may change the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from interlock.store.compared import COMPARED
from interlock.store.port import Reader
from interlock.store.postgres.schema import FUNCTIONS, LEDGER, TRIGGERS, Function, Trigger
from interlock.store.readers import THREADS

# The most connections that a process has at once for as long as it runs: the writer and the reader of the journal, the
# reader of changes, the listener, the lease, the lock board, and one per thread for long reads.
CONNECTIONS = 6 + THREADS

_TABLES = """
SELECT relname::text, relkind::text, relrowsecurity
    OR EXISTS (SELECT 1 FROM pg_rewrite WHERE ev_class = c.oid)
    OR EXISTS (SELECT 1 FROM pg_inherits WHERE c.oid IN (inhparent, inhrelid)),
    (SELECT count(*) FROM pg_index WHERE indrelid = c.oid AND NOT indisvalid)
FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
WHERE nspname = current_schema()
"""
_TRIGGERS = """
SELECT tgname::text, relname::text, tgtype, tgfoid::regproc::text, tgenabled::text,
    tgqual IS NULL AND tgnargs = 0 AND cardinality(tgattr::int2[]) = 0 FROM pg_trigger
JOIN pg_class c ON c.oid = tgrelid JOIN pg_namespace n ON n.oid = relnamespace
WHERE NOT tgisinternal AND nspname = current_schema()
"""
_FUNCTIONS = """
SELECT proname::text, pg_get_function_arguments(p.oid), prosrc,
    lanname = 'plpgsql' AND NOT prosecdef AND proconfig IS NULL AND provolatile = 'v'
FROM pg_proc p JOIN pg_namespace n ON n.oid = pronamespace JOIN pg_language l ON l.oid = prolang
WHERE nspname = current_schema()
"""
_CHANGES = """privilege_type IN ('UPDATE', 'DELETE', 'TRUNCATE', 'TRIGGER')
    OR relname = 'segment' AND privilege_type = 'INSERT'"""
# Rights on the tables of the ledger, and on columns of them, that others than their owners were given.
_GRANTS = f"""
WITH ledger AS (
    SELECT c.oid, relname, relowner, relacl FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
    WHERE nspname = current_schema() AND relname IN (?, ?, ?)
), given AS (
    SELECT relname, relowner, NULL AS attname, a.* FROM ledger, aclexplode(relacl) AS a
    UNION ALL
    SELECT relname, relowner, attname, a.* FROM ledger JOIN pg_attribute ON attrelid = ledger.oid AND NOT attisdropped,
        aclexplode(attacl) AS a
)
SELECT DISTINCT relname::text, coalesce(attname::text, ''), coalesce(rolname::text, 'PUBLIC'), privilege_type::text
FROM given LEFT JOIN pg_roles r ON r.oid = grantee WHERE grantee <> relowner AND ({_CHANGES}) ORDER BY 1, 2, 3, 4
"""  # noqa: S608 - constants
# The owner of the schema can drop every table in it. Since version 15 that of `public` is a role whose only member is
# the owner of the database.
_SCHEMA = """
SELECT CASE WHEN nspowner = (SELECT oid FROM pg_roles WHERE rolname = 'pg_database_owner')
    THEN (SELECT datdba FROM pg_database WHERE datname = current_database()) ELSE nspowner END
FROM pg_namespace WHERE nspname = current_schema()
"""
# Roles that can act as the owner of the ledger or of its schema, or change every table of the server, because they are
# members of a role that can. Before version 16, every member can; since then a membership says so. Superusers can do
# anything.
_MEMBERS = f"""
WITH ledger AS (
    SELECT relowner FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
    WHERE nspname = current_schema() AND relname IN (?, ?, ?)
)
SELECT member.rolname::text, able.rolname::text, CASE WHEN able.rolname = 'pg_write_all_data' THEN 'every'
    WHEN able.oid IN (SELECT relowner FROM ledger) THEN 'ledger' ELSE 'schema' END
FROM pg_roles able JOIN pg_roles member ON member.oid <> able.oid AND NOT member.rolsuper
    AND pg_has_role(member.oid, able.oid,
        CASE WHEN current_setting('server_version_num')::int < 160000 THEN 'MEMBER' ELSE 'USAGE, SET' END)
WHERE able.rolname = 'pg_write_all_data' OR able.oid IN (SELECT relowner FROM ledger) OR able.oid = ({_SCHEMA})
ORDER BY 1, 2
"""  # noqa: S608 - constants
_WHY = {
    "every": "which may change every table",
    "ledger": "which owns the ledger",
    "schema": "which owns the schema and may drop the ledger",
}
_SCHEMA_OWNER = f"""
SELECT rolname::text, current_schema()::text FROM pg_roles WHERE oid = ({_SCHEMA}) AND NOT rolsuper
    AND rolname <> (SELECT tableowner FROM pg_tables WHERE schemaname = current_schema() AND tablename = 'journal')
"""  # noqa: S608 - constants
_OWNERS = """
SELECT tablename::text, tableowner::text FROM pg_tables WHERE schemaname = current_schema() AND tablename IN (?, ?, ?)
    AND tableowner <> (SELECT tableowner FROM pg_tables WHERE schemaname = current_schema()
        AND tablename = 'alembic_version')
ORDER BY 1
"""


_SERVER = """
SELECT current_setting('server_version'), pg_has_role(current_user, tableowner, 'USAGE')
FROM pg_tables WHERE schemaname = current_schema() AND tablename = 'journal'
"""


_CONNECTIONS = """
SELECT least(
    current_setting('max_connections')::bigint - current_setting('superuser_reserved_connections')::bigint
        - coalesce(current_setting('reserved_connections', true), '0')::bigint,
    nullif((SELECT datconnlimit FROM pg_database WHERE datname = current_database()), -1),
    nullif((SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user AND NOT rolsuper), -1)
)
"""


_MISSING = """
SELECT tablename::text, wanted FROM pg_tables,
    unnest(CASE WHEN tablename = 'segment' OR tablename = 'alembic_version' THEN ARRAY['SELECT']
        WHEN tablename IN ('journal', 'anchor') THEN ARRAY['SELECT', 'INSERT']
        ELSE ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'] END) AS wanted
WHERE schemaname = current_schema()
    AND NOT has_table_privilege(current_user, format('%I.%I', schemaname, tablename), wanted)
UNION ALL
SELECT sequencename::text, wanted FROM pg_sequences, unnest(ARRAY['SELECT', 'UPDATE']) AS wanted
WHERE schemaname = current_schema() AND sequencename = 'store_time'
    AND NOT has_sequence_privilege(current_user, format('%I.%I', schemaname, sequencename), wanted)
ORDER BY 1, 2
"""


def missing_rights(reader: Reader) -> list[str]:
    """The rights that the role of this process lacks, although a process that serves needs them."""
    return [f"{right} on the table `{table}`" for table, right in reader.all(_MISSING)]


def server(reader: Reader) -> tuple[str, bool]:
    """The version of the server, and whether the role of this process has the rights of the ledger's owner."""
    version, owns = reader.one(_SERVER)
    return version, bool(owns)


def unsafe_settings(reader: Reader) -> list[str]:
    """Settings of the server that are off, without which what was committed may be lost or damaged when it crashes."""
    return [name for (name,) in reader.all(_UNSAFE)]


_UNSAFE = "SELECT name FROM unnest(ARRAY['fsync', 'full_page_writes']) AS name WHERE current_setting(name) = 'off'"


def connections_allowed(reader: Reader) -> int:
    """The connections that processes may have on this database, without those that the server reserves."""
    return int(reader.one(_CONNECTIONS)[0])


def departures(reader: Reader) -> Iterator[str]:
    """Differences from how the schema makes the tables, and rights to change the ledger that nobody should have."""
    tables = {_text(name): rest for name, *rest in reader.all(_TABLES)}
    for name in (*LEDGER, *COMPARED):
        if name not in tables:
            if name in LEDGER:  # a store of an earlier version may lack another one
                yield f"the table `{name}` is missing"
            continue
        kind, changed, broken = tables[name]
        if _text(kind) == "v":
            yield f"the view `{name}` was not made by Interlock"
        elif _text(kind) != "r" or changed:
            yield f"the table `{name}` is not as it was made"
        if broken:
            yield f"an index of the table `{name}` is not complete"
    found: dict[str, list[Trigger | None]] = {}
    for name, table, events, function, state, plain in reader.all(_TRIGGERS):
        if _text(table) not in (*LEDGER, *COMPARED):
            continue
        # A function that is named with its schema is not that of this one.
        one = Trigger(_text(table), int(events), _text(function))
        if _text(name) not in TRIGGERS:
            yield f"the trigger `{_text(name)}` on `{one.table}` was not made by Interlock"
        found.setdefault(_text(name), []).append(one if _text(state) == "O" and plain else None)
    for name, expected in TRIGGERS.items():
        if name not in found:
            yield f"the trigger `{name}` on `{expected.table}` is missing"
        elif found[name] != [expected]:
            yield f"the trigger `{name}` on `{expected.table}` is not as it was made"
    functions: dict[str, list[Function | None]] = {}
    for name, arguments, source, plain in reader.all(_FUNCTIONS):
        one = Function(_text(arguments), " ".join(_text(source).split()))
        functions.setdefault(_text(name), []).append(one if plain else None)
    for name, made in FUNCTIONS.items():
        if functions.get(name) != [made]:
            yield f"the function `{name}` is not as it was made"
    yield from _rights(reader)


def _rights(reader: Reader) -> Iterator[str]:
    """Rights to change the ledger that roles have beside its owner.

    They were given to them or to everybody, or they come by membership, or with the schema.
    """
    for table, column, role, right in reader.all(_GRANTS, LEDGER):
        what = f"the column `{_text(column)}` of the table" if column else "the table"
        yield f"the role `{_text(role)}` has the right {_text(right)} on {what} `{_text(table)}`"
    for member, role, why in reader.all(_MEMBERS, LEDGER):
        yield f"the role `{_text(member)}` is a member of the role `{_text(role)}`, {_WHY[_text(why)]}"
    for owner, schema in reader.all(_SCHEMA_OWNER):
        yield f"the role `{_text(owner)}` owns the schema `{_text(schema)}`, and another one the ledger in it"
    for table, owner in reader.all(_OWNERS, LEDGER):
        yield f"the role `{_text(owner)}` owns the table `{_text(table)}`, and another one the store"


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes | bytearray) else str(value)

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
_GRANTS = (
    "SELECT table_name::text, grantee::text, privilege_type::text FROM information_schema.table_privileges"
    " WHERE table_schema = current_schema() AND table_name IN (?, ?, ?)"
    " AND privilege_type IN ('UPDATE', 'DELETE', 'TRUNCATE')"
    " AND grantee <> (SELECT tableowner FROM pg_tables WHERE schemaname = current_schema() AND tablename = table_name)"
    " ORDER BY 1, 2, 3"
)


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
ORDER BY 1, 2
"""


def missing_rights(reader: Reader) -> list[str]:
    """The rights that the role of this process lacks, although a process that serves needs them."""
    return [f"{right} on the table `{table}`" for table, right in reader.all(_MISSING)]


def server(reader: Reader) -> tuple[str, bool]:
    """The version of the server, and whether the role of this process has the rights of the ledger's owner."""
    version, owns = reader.one(_SERVER)
    return version, bool(owns)


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
    for table, role, right in reader.all(_GRANTS, LEDGER):
        yield f"the role `{_text(role)}` has the right {_text(right)} on the table `{_text(table)}`"


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes | bytearray) else str(value)

"""Checks of the ledger on PostgreSQL: its triggers, what stands in its tables' place, and who may change it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from interlock.store.port import Reader
from interlock.store.postgres.schema import LEDGER, SOURCES, TRIGGERS

_TABLES = """
SELECT relname::text, relkind::text, relrowsecurity, (SELECT count(*) FROM pg_rewrite WHERE ev_class = c.oid),
    (SELECT count(*) FROM pg_index WHERE indrelid = c.oid AND NOT indisvalid)
FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
WHERE nspname = current_schema() AND relname IN (?, ?, ?)
"""
_TRIGGERS = """
SELECT tgname::text, tgenabled::text, relname::text FROM pg_trigger
JOIN pg_class c ON c.oid = tgrelid JOIN pg_namespace n ON n.oid = relnamespace
WHERE NOT tgisinternal AND nspname = current_schema() AND relname IN (?, ?, ?)
"""
_FUNCTIONS = """
SELECT proname::text, prosrc FROM pg_proc JOIN pg_namespace n ON n.oid = pronamespace WHERE nspname = current_schema()
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


def server(reader: Reader) -> tuple[str, bool]:
    """The version of the server, and whether the role of this process has the rights of the ledger's owner."""
    version, owns = reader.one(_SERVER)
    return version, bool(owns)


def departures(reader: Reader) -> Iterator[str]:
    """Differences of the ledger from how the schema makes it, and rights to change it that nobody should have."""
    tables = {_text(name): rest for name, *rest in reader.all(_TABLES, LEDGER)}
    for name in LEDGER:
        if name not in tables:
            yield f"the table `{name}` is missing"
            continue
        kind, hides, rules, broken = tables[name]
        if _text(kind) != "r" or hides or rules:
            yield f"the table `{name}` is not as it was made"
        if broken:
            yield f"an index of the table `{name}` is not complete"
    triggers = {_text(name): (_text(state), _text(table)) for name, state, table in reader.all(_TRIGGERS, LEDGER)}
    for name, table in TRIGGERS.items():
        if name not in triggers:
            yield f"the trigger `{name}` on `{table}` is missing"
        elif triggers[name] != ("O", table):
            yield f"the trigger `{name}` on `{table}` is not as it was made"
    for name in sorted(triggers.keys() - TRIGGERS.keys()):
        yield f"the trigger `{name}` on `{triggers[name][1]}` was not made by Interlock"
    sources = {_text(name): _text(source) for name, source in reader.all(_FUNCTIONS)}
    for name, source in SOURCES.items():
        if sources.get(name, "").split() != source.split():
            yield f"the function `{name}` is not as it was made"
    for table, role, right in reader.all(_GRANTS, LEDGER):
        yield f"the role `{_text(role)}` has the right {_text(right)} on the table `{_text(table)}`"


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes | bytearray) else str(value)

"""A store before and after its schema changes: the life of one, its rows, and its whole schema."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from interlock import Interlock
from interlock.api.doctor import examine
from interlock.audit.chain import verify
from interlock.store.home import Home
from interlock.store.postgres.home import PostgresHome
from interlock.store.tables import metadata
from tests import sample

# Older migrations cannot be undone, and say nothing of the programs before them.
FIRST_WITH_RULES = "0012"


def address(home: Home) -> str:
    return home.address if isinstance(home, PostgresHome) else ""


async def lived(home: Home) -> None:
    """A store in which something happened."""
    sample.reset()
    async with Interlock.open(home.path, store=address(home), housekeeping=False) as app:
        await app.add(sample.increment)
        assert (await app.call("demo.increment", name="a", key="k")).ok


async def goes_on(home: Home) -> None:
    """The program of this release works on the store as it is."""
    async with Interlock.open(home.path, store=address(home), housekeeping=False) as app:
        app.catalog.attach(sample.increment)
        assert (await app.call("demo.increment", name="a", key="k")).replayed
        assert (await app.call("demo.increment", name="a", key="another")).ok
    assert verify(home).faults == ()
    assert [one for one in examine(home, machine=False) if one.status == "broken"] == []


def rows(home: Home) -> dict[str, list[Any]]:
    """Every row of every table, but of those that say which schema it is and who lives."""
    with closing(home.reading()) as reader:
        names = [name for (name,) in reader.all("SELECT name FROM sqlite_master") if not name.startswith("sqlite_")]
        left_out = {"alembic_version", "instance", "store_clock"}
        tables = sorted(set(names) & metadata.tables.keys() - left_out)
        return {name: sorted(reader.all(f"SELECT * FROM {name}"), key=repr) for name in tables}


_SHAPE = """
SELECT table_name::text, column_name::text, data_type::text, is_nullable::text, column_default::text,
    collation_name::text FROM information_schema.columns WHERE table_schema = current_schema()
    ORDER BY table_name, ordinal_position;
SELECT indexdef FROM pg_indexes WHERE schemaname = current_schema() ORDER BY 1;
SELECT pg_get_triggerdef(t.oid) FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid
    WHERE relnamespace = current_schema()::regnamespace ORDER BY 1;
SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = current_schema()::regnamespace ORDER BY 1;
SELECT conrelid::regclass::text, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE connamespace = current_schema()::regnamespace ORDER BY 1, 2
"""


def shape(home: Home) -> list[Any]:
    """The whole schema, as the database itself has it."""
    with closing(home.reading()) as reader:
        if home.near:
            return reader.all("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name")
        return [reader.all(statement) for statement in _SHAPE.split(";")]

"""What tests do to a store behind the program's back, whichever database it is in."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from typing import cast

from interlock.store.connection import Connection
from interlock.store.home import Home


def address_of(home: Home) -> str | None:
    """The address of the database; None where the store is a file."""
    return cast("str | None", getattr(home, "address", None))


@contextmanager
def opened(home: Home) -> Generator[Connection]:
    """A connection that may do anything. Each statement is committed at once, unless it is within a transaction."""
    address = address_of(home)
    if address is None:
        made = sqlite3.connect(home.database, isolation_level=None, factory=Connection)
    else:
        from interlock.store.postgres import connection as postgres

        made = cast("Connection", postgres.Connection(address))
    with closing(made) as connection:
        yield connection


@contextmanager
def unguarded(home: Home, *, put_back: bool = True) -> Generator[Connection]:
    """One transaction without the triggers, which are back in the end, to the letter, if they are to be."""
    with opened(home) as connection:
        if address_of(home) is None:
            guards = connection.all("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
            away = [f"DROP TRIGGER {name}" for name, _ in guards]
            back = [sql for _, sql in guards]
            connection.execute("PRAGMA synchronous=OFF")
        else:
            guards = connection.all(
                "SELECT tgname::text, relname::text FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid"
                " WHERE NOT tgisinternal"
            )
            away = [
                f"ALTER TABLE {table} DISABLE TRIGGER {name}" if put_back else f"DROP TRIGGER {name} ON {table}"
                for name, table in guards
            ]
            back = [f"ALTER TABLE {table} ENABLE TRIGGER {name}" for name, table in guards]
        for statement in ("BEGIN", *away):
            connection.execute(statement)
        yield connection
        for statement in (*(back if put_back else ()), "COMMIT"):
            connection.execute(statement)

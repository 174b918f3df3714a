"""What tests do to a store behind the program's back, whichever database it is in."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, cast

from interlock.store.changes import FRESH_S, MAX_STALE_S
from interlock.store.connection import SqliteConnection
from interlock.store.home import Home
from tests.support.calls import until

if TYPE_CHECKING:
    import pytest

    from interlock import Interlock
    from interlock.store.journal import Journal
    from interlock.testing import FakeClock


def address_of(home: Home) -> str | None:
    """The address of the database; None where the store is a file."""
    return cast("str | None", getattr(home, "address", None))


@contextmanager
def opened(home: Home) -> Generator[SqliteConnection]:
    """A connection that may do anything. Each statement is committed at once, unless it is within a transaction."""
    address = address_of(home)
    if address is None:
        made = sqlite3.connect(home.database, timeout=30, isolation_level=None, factory=SqliteConnection)
    else:
        from interlock.store.postgres import connection as postgres

        made = cast("SqliteConnection", postgres.PostgresConnection(address))
    with closing(made) as connection:
        yield connection


@contextmanager
def unguarded(home: Home, *, put_back: bool = True) -> Generator[SqliteConnection]:
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


def set_time(home: Home, at_ms: int) -> None:
    """Have a store whose time is later than that of the machine, as one has that a machine with a wrong clock used."""
    with opened(home) as connection:
        if address_of(home) is None:
            value = json.dumps({"ms": at_ms, "up": 0.0, "boot": "of another machine"})
            connection.execute("UPDATE fact SET value = ? WHERE name = 'clock'", (value,))
        else:
            connection.execute("UPDATE store_clock SET ms = ?", (at_ms,))


@contextmanager
def busy(home: Home) -> Generator[None]:
    """Have every process that wants to write wait, as one does that is in the middle of a transaction."""
    with opened(home) as connection:
        if address_of(home) is None:
            connection.execute("BEGIN IMMEDIATE")
        else:
            connection.execute("BEGIN")
            connection.execute("SELECT interlock_enter('')")
        yield
        connection.execute("ROLLBACK")


@contextmanager
def refusing(home: Home, table: str, condition: str, words: str = "x") -> Generator[None]:
    """Have the database refuse to insert rows for which a condition holds, which names them `NEW`."""
    when = f"CREATE TRIGGER refuses BEFORE INSERT ON {table}"
    if address_of(home) is None:
        made = [f"{when} WHEN {condition} BEGIN SELECT RAISE(ABORT, '{words}'); END"]
        dropped = "DROP TRIGGER refuses"
    else:
        made = [
            f"CREATE FUNCTION refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION '{words}'; END $$",
            f"{when} FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION refuses()",
        ]
        dropped = "DROP FUNCTION refuses CASCADE"
    with opened(home) as connection:
        for statement in made:
            connection.execute(statement)
        yield
        connection.execute(dropped)


def contents(home: Home) -> bytes:
    """Everything that a store holds, as it holds it."""
    if address_of(home) is None:
        return b"".join(path.read_bytes() for path in sorted(home.path.glob("interlock.db*")))
    with opened(home) as connection:
        tables = connection.all("SELECT tablename::text FROM pg_tables WHERE schemaname = current_schema()")
        rows = [row for (table,) in tables for row in connection.all(f'SELECT * FROM "{table}"')]
    return b"\n".join(one if isinstance(one, bytes) else str(one).encode() for row in rows for one in row)


def everything_in(home: Home) -> bytes:
    """Every byte of every file of a data directory, with the database's log, and of a store on a server."""
    elsewhere = [] if address_of(home) is None else [contents(home)]
    return b"\n".join([*(path.read_bytes() for path in home.path.rglob("*") if path.is_file()), *elsewhere])


def bodies(home: Home, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of the journal, or those of one kind, in their order."""
    with opened(home) as connection:
        rows = connection.all("SELECT kind, body FROM journal ORDER BY seq")
    return [json.loads(body) for name, body in rows if kind in (None, name)]


def forge(home: Home, old: bytes, new: bytes, where: str = "1 = 1") -> None:
    """Change bytes in records of the journal, whose triggers are gone afterwards."""
    with unguarded(home, put_back=False) as connection:
        for seq, body in connection.all(f"SELECT seq, body FROM journal WHERE {where}"):
            connection.execute("UPDATE journal SET body = ? WHERE seq = ?", (bytes(body).replace(old, new), seq))


def make_newer(home: Home) -> None:
    """Make the store one of a version that is not known yet."""
    with opened(home) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.execute("UPDATE fact SET value = '9999' WHERE name = 'schema_compatible_since'")


def first_inserted(home: Home) -> str:
    """The column that has notifications in the order in which they were made, as far as the database knows it."""
    return "rowid" if address_of(home) is None else "id"


def impatient(home: Home, journal: Journal, patch: pytest.MonkeyPatch) -> None:
    """Have a writer wait for others for a moment only, before it refuses."""
    patch.setattr("interlock.store.writer.LOCK_PATIENCE_S", 0.02)
    if address_of(home) is not None:
        journal.writer._connection.execute("SET lock_timeout = '20ms'")  # pyright: ignore[reportPrivateUsage]


def bury(home: Home, *dead: str) -> None:
    """Let the leases of killed processes run out, which takes 15 s. Without names: of all that have one."""
    if address_of(home) is not None:
        with opened(home) as connection:
            if dead:
                connection.execute(f"DELETE FROM instance WHERE id IN ({', '.join('?' * len(dead))})", dead)
            else:
                connection.execute("DELETE FROM instance")


def lives(home: Home) -> list[str]:
    """The processes that have a lease, whether they live or were killed; none where the store is a file."""
    if address_of(home) is None:
        return []
    with opened(home) as connection:
        return [owner for (owner,) in connection.all("SELECT id FROM instance")]


async def beside(app: Interlock) -> list[str]:
    """The parts of readiness that a store on a server adds, once the subscription of Redis has begun."""
    if app.home.near:
        return []
    await until(lambda: app.messages.condition == "healthy")
    return ["nodes", "redis"]


async def passes(time: FakeClock, seconds: float, *journals: Journal) -> None:
    """Let time pass, and caches notice what has changed, as they do at the beginning of each call."""
    time.advance(seconds)
    for journal in journals:
        await journal.changes.caught_up()


async def notice(time: FakeClock, *journals: Journal) -> None:
    """Let so much time pass that changes of other processes have to be noticed. A server is asked less often."""
    far = any(not journal.near for journal in journals)
    await passes(time, MAX_STALE_S if far else FRESH_S, *journals)

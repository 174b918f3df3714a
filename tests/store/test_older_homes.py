"""A populated home of each earlier schema is migrated: its journal verifies; keys, results and undos still work.

Such a home is made by living a history in a new one and moving its rows into a database of the earlier schema.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from interlock import Context, Effect, Field, Interlock, Preview, tool
from interlock.api.doctor import examine
from interlock.audit.chain import verify
from interlock.store.home import Home
from interlock.store.schema_version import APPLICATION_ID
from interlock.testing import FakeClock
from tests.support.histories import VERSIONS, live, make, work

REVISIONS = sorted(path.name[:4] for path in VERSIONS.glob("0*.py"))
Text = Annotated[str, Field(description="any text", examples=["a"])]


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="old",
    effects=[Effect("thing:{name}", "UPDATE"), Effect("session:last", "UPDATE")],
)  # fmt: skip
async def keep(ctx: Context, name: Text) -> str:
    """Keep something, which can be undone."""
    ctx.effect(f"thing:{name}", "UPDATE", before=0, after=1)
    ctx.session["last"] = name
    ctx.compensate_with(name=name)
    return name * 5000 if name == "large" else name


@keep.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


@keep.compensate
async def _(name: str) -> None:
    return None


async def history(home: Path, clock: FakeClock, revision: str) -> None:
    """Calls with keys, sessions, kept results and undos; from the second schema on also tokens, tickets and budgets."""
    if revision >= "0002":
        # The sixth schema dropped standing approvals, whose records did not say then what they were bound to.
        await make(home, clock, in_advance=revision >= "0006")
        await live(home, ["fine", "refused", "unclear", "undone", "happened", "large", "charged"], clock)
    async with Interlock.open(home, clock=clock.clock, housekeeping=False) as app:
        app.catalog.attach(keep)
        await app.add(keep)
        for name in ("small", "large", "later"):
            assert (await app.call("old.keep", name=name, key=name, session="s")).ok


Histories = Callable[[Path, FakeClock, str], Awaitable[None]]


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Histories:
    """Make a home with the history of a revision, as a copy of one where revisions share it."""
    made: dict[tuple[bool, bool], tuple[Path, FakeClock]] = {}

    async def copy(home: Path, clock: FakeClock, revision: str) -> None:
        kind = revision >= "0002", revision >= "0006"
        if kind not in made:
            original, lived = tmp_path_factory.mktemp("lived") / "home", FakeClock()
            await history(original, lived, revision)
            made[kind] = original, lived
        original, lived = made[kind]
        shutil.copytree(original, home)
        vars(clock).update(vars(lived))

    return copy


def aged(home: Home, revision: str) -> None:
    """Move the rows of a home into a database of an earlier schema. Tables and columns that it lacks are left out."""
    new = home.database.with_name("new.db")
    home.database.rename(new)
    engine = sa.create_engine(f"sqlite:///{home.database}", poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    config = Config()
    config.set_main_option("script_location", str(VERSIONS.parent))
    with engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    engine.dispose()
    with closing(sqlite3.connect(home.database, isolation_level=None)) as db:
        db.execute("ATTACH ? AS new", (str(new),))
        tables = {name for (name,) in db.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")}
        for table in sorted(tables - {"alembic_version", "sqlite_sequence", "payload_use"}):
            here, there = (
                [row[1] for row in db.execute(f"PRAGMA {schema}.table_info({table})")] for schema in ("main", "new")
            )
            columns = ", ".join(column for column in here if column in there)
            db.execute(f"DELETE FROM main.{table}" if table == "fact" else "SELECT 1")
            db.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM new.{table} ORDER BY 1")
    new.unlink()
    home.database.chmod(0o600)


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_populated_home_of_an_earlier_schema_goes_on_as_it_was(
    tmp_path: Path, histories: Histories, revision: str
) -> None:
    clock, home = FakeClock(), Home(tmp_path / "home")
    await histories(home.path, clock, revision)
    if revision < REVISIONS[-1]:
        aged(home, revision)
    with closing(sqlite3.connect(home.database)) as db:
        assert db.execute("SELECT version_num FROM alembic_version").fetchone() == (revision,)
        records = db.execute("SELECT count(*) FROM journal").fetchone()
    async with Interlock.open(home.path, clock=clock.clock, housekeeping=False) as app:
        app.catalog.attach(keep)
        app.catalog.attach(work)
        assert app.journal.reader.all("SELECT version_num FROM alembic_version") == [(REVISIONS[-1],)]
        assert app.journal.reader.all("SELECT count(*) FROM journal")[0] >= records
        for name in ("small", "large"):
            again = await app.call("old.keep", name=name, key=name, session="s")
            assert (again.ok, again.source) == (True, "replay"), again.error
            assert again.value == (name if name == "small" else name * 5000) or again.persistence.ref
        (call,) = app.journal.reader.all("SELECT call FROM reservation WHERE key = 'later'")[0]
        assert (await app.undo(call, key="u")).ok
        assert (await app.call("old.keep", name="new", key="new", session="s")).ok
    verdict = verify(home)
    assert verdict.faults == ()
    assert verdict.intact
    assert [one for one in examine(home, machine=False) if one.status == "broken"] == []


def test_migrating_leaves_nothing_beside_the_database(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    asyncio.run(history(home.path, FakeClock(), "0001"))
    aged(home, "0001")
    kept = shutil.copytree(home.path, tmp_path / "kept")

    async def opened() -> None:
        async with Interlock.open(home.path, clock=FakeClock().clock, housekeeping=False):
            pass

    asyncio.run(opened())
    assert {path.name for path in home.path.iterdir()} <= {path.name for path in kept.iterdir()} | {"instances"}

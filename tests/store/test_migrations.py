"""Migrations on SQLite and on PostgreSQL: up, one step back, under a program of the release before, and interrupted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from alembic.script import ScriptDirectory

from interlock import Failure, Interlock
from interlock.api.doctor import examine
from interlock.store import migration, migration_list, schema_status, schema_version
from interlock.store.home import Home
from interlock.store.homes import home_at
from interlock.store.port import StoreError
from interlock.store.postgres import leases, schema, session
from interlock.store.schema_version import SCHEMA_HEAD
from tests import sample
from tests.support.calls import until
from tests.support.next_release import NEXT, write_migrations
from tests.support.postgres import Server
from tests.support.schemas import FIRST_WITH_RULES, address, goes_on, lived, rows, shape


@pytest.fixture(params=["sqlite", "postgres"])
def home(request: pytest.FixtureRequest, postgres_server: Server, tmp_path: Path) -> Home:
    return home_at(tmp_path / "home", "" if request.param == "sqlite" else postgres_server.new_schema())


@pytest.fixture
def next_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A program with one migration more, for as long as the block lasts."""

    @contextmanager
    def release(*, compatible: str = SCHEMA_HEAD, then: str = "") -> Generator[None]:
        scripts = write_migrations(tmp_path / "next", compatible, then)
        with monkeypatch.context() as patch:
            patch.setattr(migration_list, "SCRIPTS", scripts)
            patch.setattr(schema_version, "SCHEMA_HEAD", NEXT)
            patch.setattr(leases, "SCHEMA_HEAD", NEXT)
            yield

    return release


def test_the_program_knows_the_last_migration_and_they_follow_each_other_in_order() -> None:
    known = [one.revision for one in migration_list.migrations()]
    assert known[-1] == SCHEMA_HEAD
    assert known == sorted(known)


def test_the_list_of_migrations_is_what_alembic_reads_of_their_modules(tmp_path: Path) -> None:
    with migration.transaction(tmp_path / "empty.db") as connection:
        config = migration._config(connection)  # pyright: ignore[reportPrivateUsage]
        scripts = list(ScriptDirectory.from_config(config).walk_revisions())
    assert [
        (
            one.revision, one.doc.partition("\n")[0].rstrip("."),
            getattr(one.module, "compatible_since", one.revision), hasattr(one.module, "downgrade"),
            dict(getattr(one.module, "loses", ())),
        )
        for one in reversed(scripts)
    ] == [tuple(one) for one in migration_list.migrations()]  # fmt: skip


@pytest.mark.parametrize("one", migration_list.migrations(), ids=lambda one: one.revision)
def test_a_migration_can_be_undone_and_says_what_is_lost(one: migration_list.Migration, tmp_path: Path) -> None:
    if one.revision < FIRST_WITH_RULES:
        assert not one.can_be_undone
        return
    assert one.can_be_undone
    before, after = (_tables_at(tmp_path / f"{name}.db", name) for name in (_before(one), one.revision))
    lost = {name for name in after if name not in before}
    lost |= {f"{table}.{name}" for table in before for name in after.get(table, {}) if name not in before[table]}
    assert set(one.loses) == lost
    if one.compatible_since < one.revision:
        for table, columns in before.items():
            assert columns.items() <= after[table].items()
            added = [column for name, column in after[table].items() if name not in columns]
            assert all(nullable or default is not None for _, nullable, default in added)


def _before(one: migration_list.Migration) -> str:
    known = [other.revision for other in migration_list.migrations()]
    return known[known.index(one.revision) - 1]


def _tables_at(path: Path, revision: str) -> dict[str, dict[str, tuple[str, bool, str | None]]]:
    from alembic import command

    with migration.transaction(path) as connection:
        command.upgrade(migration._config(connection), revision)  # pyright: ignore[reportPrivateUsage]
        inspector = sa.inspect(connection)
        return {
            table: {
                one["name"]: (str(one["type"]), bool(one["nullable"]), one["default"])
                for one in inspector.get_columns(table)
            }
            for table in inspector.get_table_names()
        }


@pytest.mark.proves("OPS-08")
async def test_up_down_and_up_again_gives_the_same_schema_and_keeps_the_rows(home: Home) -> None:
    await lived(home)
    made, kept = shape(home), rows(home)
    undone: list[str] = []
    while schema_status.status(home).at_stake is not None:
        undone.append(migration.down(home).revision)
    assert undone[-1] == FIRST_WITH_RULES
    assert shape(home) != made
    assert [one.revision for one in migration.up(home)] == undone[::-1]
    assert shape(home) == made
    assert rows(home) == kept
    assert migration.up(home) == []
    await goes_on(home)


@pytest.mark.proves("OPS-08")
async def test_a_program_works_on_a_schema_that_is_one_migration_newer(
    home: Home, next_release: Callable[..., Any]
) -> None:
    await lived(home)
    made, kept = shape(home), rows(home)
    with next_release():
        (step,) = migration.up(home)
        assert step.revision == NEXT
        assert schema_status.status(home)[:2] == (NEXT, SCHEMA_HEAD)
        newer = shape(home)
    assert "can work on it" in next(one.what for one in examine(home, machine=False) if one.name == "schema")
    await goes_on(home)
    assert shape(home) == newer
    with pytest.raises(Failure, match="newer than this version") as unknown:
        migration.down(home)
    assert unknown.value.code == "E3411"
    later = rows(home)
    with next_release():
        migration.down(home)
    assert shape(home) == made
    assert schema_status.status(home)[:2] == (SCHEMA_HEAD, migration_list.compatible_since(SCHEMA_HEAD))
    before, after = (
        {
            name: [row for row in found if row[0] != schema_version.COMPATIBLE_SINCE]
            for name, found in tables.items()
            if name != "evidence"
        }
        for tables in (later, rows(home))
    )
    assert after == before
    assert rows(home)["evidence"] == kept["evidence"]
    await goes_on(home)


async def test_a_newer_schema_that_does_not_name_this_program_is_refused(
    home: Home, next_release: Callable[..., Any]
) -> None:
    await lived(home)
    with next_release(compatible=NEXT):
        migration.up(home)
    with pytest.raises(Failure) as refused:
        await lived(home)
    assert refused.value.code == "E3805"


async def test_a_migration_is_undone_only_with_the_rows_named_that_go(
    home: Home, next_release: Callable[..., Any]
) -> None:
    await lived(home)
    with next_release():
        migration.up(home)
        with home.changing_schema() as connection:
            connection.exec_driver_sql("INSERT INTO parcel (id, size) VALUES ('a', 1), ('b', 2)")
        assert schema_status.status(home).at_stake == {"parcel": 2}
        for lose in ((), ("evidence.note",)):
            with pytest.raises(Failure, match="would lose 2 rows of `parcel`") as refused:
                migration.down(home, lose)
            assert "--lose parcel" in str(refused.value.resolution)
        assert schema_status.status(home).schema == NEXT
        migration.down(home, ("parcel",))
    await goes_on(home)


@pytest.mark.proves("OPS-08")
@pytest.mark.parametrize("earlier", [0, 3])
async def test_a_migration_that_fails_leaves_the_schema_before_it_and_before_those_applied_with_it(
    home: Home, next_release: Callable[..., Any], earlier: int
) -> None:
    await lived(home)
    for _ in range(earlier):
        migration.down(home)
    made, kept = shape(home), rows(home)
    with next_release(then="op.execute('SELECT nothing FROM nowhere')"), pytest.raises((Failure, StoreError)):
        migration.up(home)
    assert (shape(home), rows(home)) == (made, kept)
    await goes_on(home)


@pytest.mark.proves("OPS-08")
async def test_of_programs_that_start_at_once_one_migrates(home: Home, next_release: Callable[..., Any]) -> None:
    await lived(home)
    at_once = threading.Barrier(3)

    def start() -> int:
        at_once.wait()
        return len(migration.up(home))

    with next_release():
        applied = await asyncio.gather(*(asyncio.to_thread(start) for _ in range(3)))
    assert sorted(applied) == [0, 0, 1]


@pytest.mark.parametrize("home", ["postgres"], indirect=True)
async def test_on_a_server_a_node_that_can_work_on_the_new_schema_goes_on(
    home: Home, next_release: Callable[..., Any]
) -> None:
    sample.reset()
    async with Interlock.open(home.path, store=address(home), housekeeping=False) as app:
        await app.add(sample.increment)
        assert (await app.call("demo.increment", name="a", key="1")).ok
        with next_release(compatible=NEXT), pytest.raises(Failure, match="1 process runs") as refused:
            migration.up(home)
        assert refused.value.code == "E3804"
        with next_release():
            migration.up(home)
            async with Interlock.open(home.path, store=address(home), housekeeping=False):
                with pytest.raises(Failure, match="1 process runs"):
                    migration.down(home)
        assert (await app.call("demo.increment", name="a", key="2")).ok
        assert (await app.call("demo.increment", name="a", key="1")).replayed
        with next_release():
            migration.down(home)
        assert (await app.call("demo.increment", name="a", key="3")).ok


@pytest.mark.parametrize("home", ["postgres"], indirect=True)
async def test_on_a_server_a_table_that_stays_in_use_lets_the_migration_give_up(
    home: Home, next_release: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "PATIENCE_MS", 50)
    await lived(home)
    made = shape(home)
    with closing(home.reading()) as busy, next_release():
        busy.execute("BEGIN")
        busy.all("SELECT * FROM evidence")
        with pytest.raises(Failure) as refused:
            migration.up(home)
        assert refused.value.code == "E3803"
    assert shape(home) == made


@pytest.mark.parametrize("home", ["postgres"], indirect=True)
@pytest.mark.parametrize("there", [False, True], ids=["a new store", "a store"])
async def test_on_a_server_a_process_waits_for_one_that_migrates_for_longer_than_a_write_waits_for_others(
    home: Home, postgres_server: Server, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    if there:
        await lived(home)
        migration.down(home)
    monkeypatch.setitem(session._WRITING, "lock_timeout", "'1'")  # pyright: ignore[reportPrivateUsage]
    waiting = b"SELECT 1 FROM pg_stat_activity WHERE wait_event = 'advisory' AND query LIKE '%xact_lock%'"
    with closing(psycopg.connect(address(home))) as busy, closing(postgres_server.connect()) as looking:
        busy.execute(f"SELECT pg_advisory_xact_lock({schema.MIGRATING})".encode())
        started = asyncio.create_task(asyncio.to_thread(home.open_database))
        await until(lambda: started.done() or looking.execute(waiting).fetchall())
        await asyncio.wait([started], timeout=0.1)
        assert not started.done(), "it has given up"
        busy.rollback()
        (await started).close()
    monkeypatch.undo()
    assert schema_status.status(home).schema == SCHEMA_HEAD
    if there:
        await goes_on(home)

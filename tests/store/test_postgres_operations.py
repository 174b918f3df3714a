"""Operating a store on PostgreSQL: backups while it runs, restoring, and removing records by the tables' owner."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from interlock import Failure, Interlock
from interlock.api.doctor import Finding, examine
from interlock.audit import retention, tail
from interlock.audit.backups import copy_verified, drill, due, made_in, restore_store
from interlock.audit.chain import verify
from interlock.core.clock import Clock
from interlock.settings import load_settings
from interlock.store import copying, facts
from interlock.store.home import Home
from interlock.store.homes import home_at, restored_home
from interlock.store.port import Reader
from interlock.store.postgres.layout import CONNECTIONS
from interlock.store.readers import THREADS
from tests import sample
from tests.support import unfinished
from tests.support.calls import until
from tests.support.cli import Cli
from tests.support.postgres import Server
from tests.thorough import THOROUGH

YEAR_MS = 366 * 86_400_000


@pytest.fixture
def address(postgres_server: Server) -> str:
    return postgres_server.new_schema()


@pytest.fixture
def runtime(postgres_server: Server, address: str) -> Iterator[str]:
    """The address for a role that owns nothing."""
    role = f"r{secrets.token_hex(6)}"
    with closing(postgres_server.connect()) as connection:
        connection.execute(f'CREATE ROLE "{role}" LOGIN'.encode())
    yield address.replace("postgres@", f"{role}@")
    with closing(postgres_server.connect()) as connection:
        connection.execute(f'DROP OWNED BY "{role}"'.encode())
        connection.execute(f'DROP ROLE "{role}"'.encode())


async def lived(path: Path, store: str, admin: str = "") -> None:
    sample.reset()
    async with Interlock.open(path, store=store, store_admin=admin, housekeeping=False) as app:
        await app.add(sample.increment)
        for key in "abc":
            assert (await app.call("demo.increment", name="a", key=key)).ok


def contents(home: Home) -> copying.Contents:
    with closing(home.reading()) as reader:
        reader.execute("BEGIN")
        return copying.contents(reader)


async def test_only_the_owner_of_the_tables_removes_records_and_the_rest_verifies(
    tmp_path: Path, address: str, runtime: str
) -> None:
    await lived(tmp_path / "home", runtime, address)
    owner, process = home_at(tmp_path / "home", runtime, address), home_at(tmp_path / "home", runtime)
    settings = load_settings(process.settings)
    later = 2_000_000_000_000 + 8 * YEAR_MS
    due = retention.due(process, settings, now_ms=later)
    assert due
    with pytest.raises(Failure, match="may not remove") as refused:
        retention.purge(process, settings, now_ms=later, by="somebody")
    assert refused.value.code == "E3411"
    assert verify(process).purged_through == 0
    removed = retention.purge(owner, settings, now_ms=later, by="somebody")
    assert removed == due
    assert retention.shrink(owner) == 0
    verdict = verify(process)
    assert verdict.faults == ()
    assert verdict.purged_through == removed[-1].last_seq
    async with Interlock.open(tmp_path / "home", store=runtime, housekeeping=False) as app:
        app.catalog.attach(sample.increment)
        assert (await app.call("demo.increment", name="a", key="a")).replayed


async def test_only_the_owner_of_the_tables_accepts_the_end_of_the_journal(
    tmp_path: Path, address: str, runtime: str
) -> None:
    await lived(tmp_path / "home", runtime, address)
    owner, process = home_at(tmp_path / "home", runtime, address), home_at(tmp_path / "home", runtime)
    found = tail.unsigned_tail(owner)
    with pytest.raises(Failure, match="may not remove records or accept") as refused:
        tail.accept(process, found, reason="known", by="somebody", now_ms=2_000_000_000_000)
    assert refused.value.code == "E3411"
    assert tail.accept(owner, found, reason="known", by="somebody", now_ms=2_000_000_000_000) == found.last + 1
    assert verify(process).faults == ()


@pytest.mark.parametrize(("statement", "named"), [
    ("ALTER TABLE journal DISABLE TRIGGER journal_never_changes", "the trigger `journal_never_changes` on `journal`"),
    ("DROP TRIGGER anchor_stays ON anchor", "the trigger `anchor_stays` on `anchor` is missing"),
    ("GRANT DELETE ON journal TO {role}", "has the right DELETE on the table `journal`"),
    ("REVOKE INSERT ON journal FROM {role}", "lacks the right INSERT on the table `journal`"),
    ("REVOKE UPDATE ON reservation FROM {role}", "lacks the right UPDATE on the table `reservation`"),
])  # fmt: skip
async def test_doctor_names_triggers_and_rights_that_are_not_as_they_were_made(
    tmp_path: Path, address: str, runtime: str, statement: str, named: str
) -> None:
    await lived(tmp_path / "home", runtime, address)
    home = home_at(tmp_path / "home", runtime)

    def broken() -> list[str]:
        return [one.what for one in examine(home, machine=False) if one.status == "broken"]

    assert broken() == []
    role = runtime.partition("://")[2].partition("@")[0]
    with closing(psycopg.connect(address, autocommit=True)) as connection:
        connection.execute(statement.format(role=role).encode())
    (what,) = broken()
    assert named in what


async def test_a_process_has_no_more_connections_than_doctor_counts_for_each(
    tmp_path: Path, address: str, runtime: str, postgres_server: Server
) -> None:
    sample.reset()
    role = runtime.partition("://")[2].partition("@")[0]
    every = threading.Barrier(THREADS)

    def read(reader: Reader) -> None:
        every.wait()
        reader.one("SELECT 1")

    async with Interlock.open(tmp_path / "home", store=runtime, store_admin=address, housekeeping=False) as app:
        await app.add(sample.increment)
        assert (await app.call("demo.increment", name="a", key="a")).ok  # takes a lock
        await asyncio.gather(*(app.readers.read(read) for _ in range(THREADS)))
        with closing(postgres_server.connect()) as connection:
            shown = "SELECT count(*) FROM pg_stat_activity WHERE usename = %s"

            def there() -> int:
                return connection.execute(shown, (role,)).fetchall()[0][0]

            await until(lambda: there() >= CONNECTIONS)  # threads make some of them
            assert there() == CONNECTIONS


async def test_doctor_warns_where_the_server_allows_fewer_connections_than_the_processes_need(
    tmp_path: Path, address: str, runtime: str, postgres_server: Server
) -> None:
    await lived(tmp_path / "home", runtime, address)
    home = home_at(tmp_path / "home", runtime)
    role = runtime.partition("://")[2].partition("@")[0]

    def found() -> Finding:
        (one,) = [one for one in examine(home, machine=False) if "connections, enough for" in one.what]
        return one

    with closing(psycopg.connect(address, autocommit=True)) as connection:
        ((most, reserved),) = connection.execute(
            "SELECT current_setting('max_connections')::int, current_setting('superuser_reserved_connections')::int"
        ).fetchall()
        assert found().status == "good"
        assert f"allows {most - reserved:,} connections" in found().what
        # The leases of other processes, as many as just fit, and then one more.
        fit = (most - reserved) // CONNECTIONS
        lease = (
            "INSERT INTO instance (id, place, report, until_ms) SELECT 'OTHER-' || n, 'elsewhere', '{}',"
            " extract(epoch FROM clock_timestamp()) * 1000 + 3600000 FROM generate_series(%s::int, %s::int) n"
        )
        connection.execute(lease, (1, fit))
        assert (found().status, f"{fit:,} run now" in found().what) == ("good", True)
        connection.execute(lease, (fit + 1, fit + 1))
        assert (found().status, f"{fit + 1:,} run now" in found().what) == ("attention", True)
        assert f"allow {(fit + 1) * CONNECTIONS:,} at least, {CONNECTIONS} for each process" in found().advice
        connection.execute(b"DELETE FROM instance")
    # A limit of the role is enforced like that of the server.
    with closing(postgres_server.connect()) as connection:
        connection.execute(f'ALTER ROLE "{role}" CONNECTION LIMIT {CONNECTIONS - 1}'.encode())
    assert found().status == "attention"


MEMORY = "RAISE EXCEPTION 'out of memory' USING ERRCODE = 'out_of_memory'"


@pytest.mark.proves("OPS-07")
async def test_a_server_without_memory_is_told_and_everything_goes_on_afterwards(tmp_path: Path, address: str) -> None:
    sample.reset()
    async with Interlock.open(tmp_path / "home", store=address, housekeeping=False) as app:
        await app.add(sample.increment)
        with closing(psycopg.connect(address, autocommit=True)) as connection:
            full = f"CREATE FUNCTION full_up() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {MEMORY}; END $$"
            connection.execute(full.encode())
            connection.execute(b"CREATE TRIGGER full_up BEFORE INSERT ON journal EXECUTE FUNCTION full_up()")
            refused = await app.call("demo.increment", name="a", key="k")
            assert refused.error is not None
            assert (refused.error.code, refused.error.retryable) == ("E3803", True)
            assert sample.world.runs == 0
            with pytest.raises(Failure) as unread:
                await app.journal.read(lambda reader: reader.all(f"DO $$ BEGIN {MEMORY}; END $$"))
            assert (unread.value.code, unread.value.retryable, unread.value.retry_after_ms) == ("E3001", True, 1000)
            connection.execute(b"DROP TRIGGER full_up ON journal")
        assert (await app.call("demo.increment", name="a", key="k")).ok
        assert sample.world.runs == 1


@pytest.mark.part_of("OPS-12", rest="a paused saga that goes on after a restore; there are no sagas yet")
async def test_a_backup_of_a_running_store_is_drilled_and_restored_to_an_empty_database(
    tmp_path: Path, address: str, postgres_server: Server
) -> None:
    home, backup = home_at(tmp_path / "home", address), tmp_path / "backup"
    await lived(home.path, address)
    (home.path / "settings.toml").write_text(f'store = "{address}"\n')
    begun, done = asyncio.Event(), asyncio.Event()
    async with Interlock.open(home.path, housekeeping=False) as app:
        app.catalog.attach(sample.increment)
        left = await unfinished.begin(app)

        async def work() -> None:
            number = 0
            while not done.is_set():
                assert (await app.call("demo.increment", name="b", key=f"meanwhile-{number}")).ok
                number += 1
                begun.set()

        working = asyncio.create_task(work())
        await begun.wait()
        _, verdict = await asyncio.to_thread(copy_verified, home, backup)
        done.set()
        await working
    assert verdict.intact
    assert home_at(backup).near  # whatever its settings name
    with drill(backup) as (_, found):
        assert found.verdict.intact

    elsewhere = postgres_server.new_schema()
    (backup / "settings.toml").write_text(f'store = "{elsewhere}"\n')
    target = restored_home(tmp_path / "restored", backup)
    with pytest.raises(Failure, match="a store at that address already"):
        restore_store(Home(backup), home_at(tmp_path / "restored", address))
    assert not (tmp_path / "restored").exists()
    _, verdict = restore_store(Home(backup), target)
    assert verdict.intact
    assert not (tmp_path / "restored" / "interlock.db").exists()
    assert contents(target) == contents(Home(backup))
    async with Interlock.open(tmp_path / "restored", housekeeping=False) as app:
        await unfinished.finish(app, left)
        app.catalog.attach(sample.increment)
        assert (await app.call("demo.increment", name="a", key="a")).replayed
        assert (await app.call("demo.increment", name="a", key="later")).ok
    assert verify(home_at(tmp_path / "restored")).faults == ()


def test_the_commands_back_up_drill_and_restore(tmp_path: Path, address: str, postgres_server: Server) -> None:
    asyncio.run(lived(tmp_path / "home", address))
    (tmp_path / "home" / "settings.toml").write_text(f'store = "{address}"\nbackup_to = "{tmp_path / "backups"}"\n')
    cli = Cli(tmp_path)
    made = Path(cli.ask("backup")["backup"])
    assert cli.ask("restore", "--drill")["verdict"]["intact"]
    assert "intact" in cli("--home", str(made), "audit", "verify").out
    empty = Cli(tmp_path, {"INTERLOCK_HOME": str(tmp_path / "again"), "INTERLOCK_STORE": postgres_server.new_schema()})
    assert empty.ask("restore", str(made))["verdict"]["intact"]
    assert not (tmp_path / "again" / "interlock.db").exists()
    assert "demo.increment" in empty("calls", "list").out


def test_a_drill_restores_a_backup_to_a_server_in_a_schema_of_its_own_and_removes_it(
    tmp_path: Path, address: str, runtime: str
) -> None:
    asyncio.run(lived(tmp_path / "home", address))
    (tmp_path / "home" / "settings.toml").write_text(f'store = "{address}"\nbackup_to = "{tmp_path / "backups"}"\n')
    cli = Cli(tmp_path)
    assert cli("backup").code == 0
    before = contents(home_at(tmp_path / "home"))

    shown = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'interlock_drill%'"

    def schemas() -> list[Any]:
        with closing(psycopg.connect(address, autocommit=True)) as connection:
            return connection.execute(shown.encode()).fetchall()

    with closing(psycopg.connect(address, autocommit=True)) as connection:
        role, database = runtime.partition("://")[2].partition("@")[0], connection.info.dbname
        ((may,),) = connection.execute("SELECT has_database_privilege(%s, %s, 'CREATE')", (role, database)).fetchall()
    drilled = cli.ask("restore", "--drill", "--store", address)
    assert drilled["verdict"]["intact"]
    assert (drilled["rows"]["reservation"], drilled["tools"]) == (3, 1)
    assert schemas() == []
    assert contents(home_at(tmp_path / "home")) == before
    assert not may
    refused = cli("restore", "--drill", "--store", runtime)
    assert (refused.code, "may not make a schema" in refused.err) == (1, True), refused.err
    assert cli("restore", "--drill", "--store", "/srv/file").code == 2
    assert cli("restore", str(tmp_path), "--store", address).code == 2

    # What does not verify on the server is refused, and nothing is left there either.
    (made,) = made_in(tmp_path / "backups")
    with closing(sqlite3.connect(made.path / "interlock.db")) as database:
        triggers = database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for (name,) in triggers:
            database.execute(f"DROP TRIGGER {name}")
        database.execute("UPDATE journal SET body = CAST(replace(CAST(body AS TEXT), 'demo', 'dema') AS BLOB)")
        database.commit()
    broken = cli("restore", "--drill", "--store", address)
    assert (broken.code, "E3804" in broken.err) == (1, True), broken.err
    assert schemas() == []


def test_a_migration_of_a_store_on_a_server_says_that_it_makes_no_backup(tmp_path: Path, address: str) -> None:
    asyncio.run(lived(tmp_path / "home", address))
    (tmp_path / "home" / "settings.toml").write_text(f'store = "{address}"\n')
    cli = Cli(tmp_path)
    assert "backup" not in cli("migrate", "down", "--dry-run").out
    undone = cli("migrate", "down")
    said = " ".join(undone.out.split())
    assert (undone.code, "backup none: the backups of a PostgreSQL server are its own" in said) == (0, True)
    assert cli.ask("migrate", "up")["backup"] is None
    for command in ("up", "down"):
        shown = " ".join(cli("migrate", command, "--help").out.split())
        assert "Of a store on PostgreSQL no backup is made" in shown


@pytest.mark.part_of("OPS-12", rest="a paused saga that goes on after a restore; there are no sagas yet")
async def test_of_the_servers_on_one_store_one_makes_the_scheduled_backup(tmp_path: Path, address: str) -> None:
    first, folder = tmp_path / "home", tmp_path / "backups"
    await lived(first, address)
    shutil.copytree(first, tmp_path / "other", ignore=shutil.ignore_patterns("anchors.jsonl", "instances", "*.lock"))

    opening = [
        Interlock.open(path, store=address, backup_to=folder, resume_approved=True)
        for path in (first, tmp_path / "other")
    ]
    async with opening[0] as app, opening[1] as other:
        async with asyncio.timeout(300):
            while not await noted(app):  # noqa: ASYNC110 - another process may do it
                await asyncio.sleep(0.02)
        # Nobody makes another one today.
        assert not await other.journal.commit(partial(due, every_ms=86_400_000))
    (backup,) = made_in(folder)
    with drill(backup.path) as (_, found):
        assert found.verdict.intact
        assert found.rows["reservation"] == 3


async def noted(app: Interlock) -> bool:
    return await app.journal.read(lambda reader: facts.get(reader, "backup_made_ms")) is not None


async def test_a_server_removes_old_records_by_itself_if_it_has_the_role_for_it(
    tmp_path: Path, address: str, runtime: str
) -> None:
    await lived(tmp_path / "home", runtime, address)
    home = home_at(tmp_path / "home", runtime)
    later = Clock(now_ms=lambda: 2_000_000_000_000 + 8 * YEAR_MS)

    async def maintain(admin: str) -> None:
        opening = Interlock.open(
            home.path, store=runtime, store_admin=admin, clock=later, purge_records=True, housekeeping=False
        )
        async with opening as app:
            await app.maintain()

    with pytest.raises(Failure, match="may not remove"):
        await maintain("")
    assert verify(home).purged_through == 0
    with closing(psycopg.connect(address, autocommit=True)) as connection:  # a day later
        connection.execute("DELETE FROM fact WHERE name = 'purged_ms'")
    await maintain(address)
    verdict = verify(home)
    assert verdict.faults == ()
    assert verdict.purged_through > 0


@pytest.mark.skipif(not THOROUGH, reason="starts two more servers: ./dev test --thorough")
@pytest.mark.part_of("OPS-12", rest="a paused saga that goes on after a restore; there are no sagas yet")
async def test_a_store_comes_back_as_it_was_at_a_moment_from_the_archive_of_its_server(tmp_path: Path) -> None:
    place = Path(tempfile.mkdtemp(prefix="interlock-wal-", dir="/tmp"))
    os.chmod(place, 0o777)  # the user of the server writes there
    archiving = "wal_level=replica;max_wal_senders=2;archive_mode=on;fsync=off;listen_addresses="
    server = Server([*archiving.split(";"), f"archive_command=cp %p {place}/%f"])
    restored: Server | None = None
    try:
        home, address = tmp_path / "home", server.address
        await lived(home, address)
        server.run(
            "pg_basebackup", "-h", server.place, "-U", "postgres", "-D", place / "base", "-X", "none", "-c", "fast"
        )
        async with Interlock.open(home, store=address, housekeeping=False) as app:
            app.catalog.attach(sample.increment)
            assert (await app.call("demo.increment", name="a", key="wanted")).ok
        shutil.copytree(home, tmp_path / "then", ignore=shutil.ignore_patterns("instances", "*.lock"))
        with server.connect() as connection:
            connection.execute("SELECT pg_create_restore_point('before')")
        async with Interlock.open(home, store=address, housekeeping=False) as app:
            app.catalog.attach(sample.increment)
            assert (await app.call("demo.increment", name="a", key="accident")).ok
        with server.connect() as connection:
            connection.execute("SELECT pg_switch_wal()")
        server.stop("fast")  # the last file is archived

        recovery = f"restore_command=cp {place}/%f %p;recovery_target_name=before;recovery_target_action=promote"
        restored = Server([*archiving.split(";"), *recovery.split(";")], base=place / "base")
        # The directory as it is now knows of records that the store no longer has.
        with pytest.raises(Failure) as refused:
            async with Interlock.open(home, store=restored.address, housekeeping=False):
                pass
        assert refused.value.code == "E3804"
        async with Interlock.open(tmp_path / "then", store=restored.address, housekeeping=False) as app:
            app.catalog.attach(sample.increment)
            assert (await app.call("demo.increment", name="a", key="wanted")).replayed
            assert not (await app.call("demo.increment", name="a", key="accident")).replayed
        assert verify(home_at(tmp_path / "then", restored.address)).faults == ()
    finally:
        for one in (server, restored):
            if one is not None:
                one.remove()
        shutil.rmtree(place)

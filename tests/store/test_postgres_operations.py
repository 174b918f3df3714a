"""Operating a store on PostgreSQL: backups while it runs, restoring, and removing records by the tables' owner."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from interlock import Failure, Interlock
from interlock.audit import retention, tail
from interlock.audit.backups import copy_verified, drill, restore_store
from interlock.audit.chain import verify
from interlock.settings import load_settings
from interlock.store import copying
from interlock.store.home import Home
from interlock.store.homes import home_at, restored_home
from tests import sample
from tests.cli.conftest import Cli
from tests.support.postgres import Server

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
    async with Interlock.open(path, store=store, store_admin=admin, housekeeping=False) as lock:
        await lock.add(sample.increment)
        for key in "abc":
            assert (await lock.call("demo.increment", name="a", key=key)).ok


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
    async with Interlock.open(tmp_path / "home", store=runtime, housekeeping=False) as lock:
        lock.catalog.attach(sample.increment)
        assert (await lock.call("demo.increment", name="a", key="a")).replayed


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


@pytest.mark.part_of("OPS-12", rest="point-in-time recovery, a paused saga, snapshots of Redis")
async def test_a_backup_of_a_running_store_is_drilled_and_restored_to_an_empty_database(
    tmp_path: Path, address: str, postgres_server: Server
) -> None:
    home, backup = home_at(tmp_path / "home", address), tmp_path / "backup"
    await lived(home.path, address)
    (home.path / "settings.toml").write_text(f'store = "{address}"\n')
    begun, done = asyncio.Event(), asyncio.Event()
    async with Interlock.open(home.path, housekeeping=False) as lock:
        lock.catalog.attach(sample.increment)

        async def work() -> None:
            number = 0
            while not done.is_set():
                assert (await lock.call("demo.increment", name="b", key=f"meanwhile-{number}")).ok
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
    async with Interlock.open(tmp_path / "restored", housekeeping=False) as lock:
        lock.catalog.attach(sample.increment)
        assert (await lock.call("demo.increment", name="a", key="a")).replayed
        assert (await lock.call("demo.increment", name="a", key="later")).ok
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

"""A store copied from SQLite to PostgreSQL and back: all is there, verifies and goes on; half a copy does not."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from interlock import Failure, Interlock
from interlock.audit.backups import copy_store
from interlock.audit.chain import verify
from interlock.store import copying
from interlock.store.home import Home
from interlock.store.homes import home_at
from interlock.testing import FakeClock
from tests import sample, warm
from tests.support.cli import Cli
from tests.support.histories import make
from tests.support.postgres import Server


@pytest.fixture
def address(postgres_server: Server) -> str:
    return postgres_server.new_schema()


def contents(home: Home) -> copying.Contents:
    with closing(home.reading()) as reader:
        reader.execute("BEGIN")
        return copying.contents(reader)


async def lived(path: Path) -> Home:
    """A store with tokens, tickets, secrets, budgets and calls."""
    sample.reset()
    await make(path, FakeClock(), in_advance=True)
    async with Interlock.open(path, store="", housekeeping=False) as app:
        await app.add(sample.increment)
        assert (await app.call("demo.increment", name="a", key="k")).ok
    return home_at(path, "")


async def test_everything_goes_to_postgres_and_back_verifies_and_goes_on(tmp_path: Path, address: str) -> None:
    file = await lived(tmp_path / "home")
    server = home_at(file.path, address)
    told: list[tuple[int, int]] = []
    found, verdict = copy_store(file, server, lambda done, total: told.append((done, total)))
    assert verdict.intact
    assert found == contents(file) == contents(server)
    assert told[-1][0] == told[-1][1] == sum(rows for rows, _ in found.values())
    assert sum(rows > 0 for rows, _ in found.values()) > 8
    async with Interlock.open(file.path, store=address, housekeeping=False) as app:
        app.catalog.attach(sample.increment)
        assert (await app.call("demo.increment", name="a", key="k")).replayed
        assert (await app.call("demo.increment", name="a", key="server")).ok

    with pytest.raises(Failure, match="in a file already") as taken:
        copy_store(server, file)
    assert taken.value.code == "E3411"
    for path in file.path.glob("interlock.db*"):
        path.unlink()
    found, verdict = copy_store(server, file)
    assert verdict.intact
    assert found == contents(server) == contents(file)
    async with Interlock.open(file.path, store="", housekeeping=False) as app:
        app.catalog.attach(sample.increment)
        assert (await app.call("demo.increment", name="a", key="server")).replayed
        assert (await app.call("demo.increment", name="a", key="back")).ok
    assert verify(file).faults == ()


async def test_a_store_that_went_on_after_it_was_copied_leaves_a_copy_that_is_refused(
    tmp_path: Path, address: str
) -> None:
    file = await lived(tmp_path / "home")
    copy_store(file, home_at(file.path, address))
    async with Interlock.open(file.path, store="", housekeeping=False) as app:
        app.catalog.attach(sample.increment)
        assert (await app.call("demo.increment", name="a", key="later")).ok
    with pytest.raises(Failure) as behind:
        async with Interlock.open(file.path, store=address, housekeeping=False):
            pass
    assert behind.value.code == "E3804"


async def test_a_store_in_use_and_a_target_that_is_not_empty_are_refused(tmp_path: Path, address: str) -> None:
    file = await lived(tmp_path / "home")
    server = home_at(file.path, address)
    async with Interlock.open(file.path, store="", housekeeping=False):
        with pytest.raises(Failure, match="1 process uses this store") as used:
            copy_store(file, server)
        assert used.value.code == "E3804"
    assert server.path == file.path
    copy_store(file, server)
    before = contents(server)
    with pytest.raises(Failure, match="a store at that address already") as full:
        copy_store(file, server)
    assert full.value.code == "E3411"
    assert contents(server) == before


COPIES = "SELECT 1 FROM pg_stat_activity WHERE xact_start IS NOT NULL AND query LIKE 'COPY %'"
COMMITTED = "SELECT 1 FROM pg_tables WHERE tablename = 'unfinished_copy' AND schemaname = '{schema}'"
TRIES = 50


def killed(cli: Cli, to: str, reached: Callable[[], bool]) -> bool:
    """Kill a command that copies a store when it has reached something. False if it ended before that was seen."""
    with warm.start(("store", "copy", "--to", to), cli.environment, cli.path) as process:
        while process.poll() is None:
            if reached():
                process.kill()
                return process.wait() == -signal.SIGKILL
    return False


@pytest.mark.parametrize(("statement", "left"), [(COPIES, False), (COMMITTED, True)], ids=["writing", "verifying"])
def test_a_copy_whose_process_is_killed_is_not_opened_and_can_be_begun_again(
    tmp_path: Path, postgres_server: Server, statement: str, left: bool
) -> None:
    file = asyncio.run(lived(tmp_path / "home"))
    before = contents(file)
    with closing(postgres_server.connect()) as connection:
        for _ in range(TRIES):  # the moment may pass unseen
            address = postgres_server.new_schema()
            asked = statement.format(schema=address.rpartition("%3D")[2]).encode()
            if killed(Cli(tmp_path), address, lambda asked=asked: connection.execute(asked).fetchone() is not None):
                break
        else:
            pytest.fail("the copy was never seen in the middle")
    server = home_at(file.path, address)
    with closing(server.reading()) as reader:
        assert (reader.one("SELECT 1 FROM pg_tables WHERE schemaname = current_schema()") is not None) == left
    if left:
        with pytest.raises(Failure, match="not finished") as unfinished:
            server.open_database()
        assert unfinished.value.code == "E3804"
    again = Cli(tmp_path)("store", "copy", "--to", address)
    assert again.code == 0, again.err
    assert contents(server) == contents(file) == before


def test_a_copy_to_a_file_whose_process_is_killed_leaves_no_database(tmp_path: Path, address: str) -> None:
    file = asyncio.run(lived(tmp_path / "home"))
    copy_store(file, home_at(file.path, address))
    cli = Cli(tmp_path, {"INTERLOCK_STORE": address})
    for _ in range(TRIES):
        for path in file.path.glob("interlock.db*"):
            path.unlink()
        if killed(cli, "file", lambda: any(file.path.glob("*.copy*"))):
            break
    else:
        pytest.fail("the copy was never seen in the middle")
    assert not file.made
    again = cli("store", "copy", "--to", "file")
    assert again.code == 0, again.err
    assert contents(file) == contents(home_at(file.path, address))
    assert list(file.path.glob("*.copy*")) == []


async def test_a_copy_that_differs_from_its_source_is_not_used(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await lived(tmp_path / "home")
    server = home_at(file.path, address)
    copy_store(file, server)
    for path in file.path.glob("interlock.db*"):
        path.unlink()
    fill = copying._File.fill  # pyright: ignore[reportPrivateUsage]

    def loses(self: Any, columns: copying.Columns, rows: Iterator[Any]) -> None:
        fill(self, columns, (row for row in list(rows)[1 if columns.table == "reservation" else 0 :]))

    monkeypatch.setattr(copying._File, "fill", loses)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(Failure, match="differs from its source in: reservation") as differs:
        copy_store(server, file)
    assert differs.value.code == "E3804"
    assert not file.made


def test_the_command_says_what_it_copied_and_what_comes_next(tmp_path: Path, address: str) -> None:
    file = asyncio.run(lived(tmp_path / "home"))
    cli = Cli(file.path.parent)
    assert cli("store", "copy", "--to", "somewhere").code == 2
    document = cli.ask("store", "copy", "--to", address)
    assert document["verdict"]["intact"]
    assert document["tables"]["journal"]["rows"] == document["verdict"]["records"]
    again = cli("store", "copy", "--to", address)
    assert (again.code, "E3411" in again.err) == (1, True)

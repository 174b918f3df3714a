"""A store copied from SQLite to PostgreSQL and back: all is there, verifies and goes on; half a copy does not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
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
from tests import sample
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
    async with Interlock.open(path, store="", housekeeping=False) as lock:
        await lock.add(sample.increment)
        assert (await lock.call("demo.increment", name="a", key="k")).ok
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
    async with Interlock.open(file.path, store=address, housekeeping=False) as lock:
        lock.catalog.attach(sample.increment)
        assert (await lock.call("demo.increment", name="a", key="k")).replayed
        assert (await lock.call("demo.increment", name="a", key="server")).ok

    with pytest.raises(Failure, match="in a file already") as taken:
        copy_store(server, file)
    assert taken.value.code == "E3411"
    for path in file.path.glob("interlock.db*"):
        path.unlink()
    found, verdict = copy_store(server, file)
    assert verdict.intact
    assert found == contents(server) == contents(file)
    async with Interlock.open(file.path, store="", housekeeping=False) as lock:
        lock.catalog.attach(sample.increment)
        assert (await lock.call("demo.increment", name="a", key="server")).replayed
        assert (await lock.call("demo.increment", name="a", key="back")).ok
    assert verify(file).faults == ()


async def test_a_store_that_went_on_after_it_was_copied_leaves_a_copy_that_is_refused(
    tmp_path: Path, address: str
) -> None:
    file = await lived(tmp_path / "home")
    copy_store(file, home_at(file.path, address))
    async with Interlock.open(file.path, store="", housekeeping=False) as lock:
        lock.catalog.attach(sample.increment)
        assert (await lock.call("demo.increment", name="a", key="later")).ok
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


class Killed(BaseException):
    """The end of a process, as far as it can be had without one."""


async def test_a_copy_that_is_ended_in_the_middle_is_not_opened_and_can_be_begun_again(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await lived(tmp_path / "home")
    server = home_at(file.path, address)

    def die(*_: Any) -> None:
        raise Killed

    with pytest.raises(Killed):  # while rows are written: nothing is left
        copy_store(file, server, die)
    with closing(server.reading()) as reader:
        assert reader.all("SELECT name FROM sqlite_master") == []
    with pytest.raises(Killed):  # after they were committed, before they were verified
        copy_store(file, server, None, die)
    with pytest.raises(Failure, match="not finished") as unfinished:
        async with Interlock.open(file.path, store=address, housekeeping=False):
            pass
    assert unfinished.value.code == "E3804"
    found, verdict = copy_store(file, server)
    assert verdict.intact
    assert found == contents(server)

    saved = [path.rename(file.path / f"saved-{path.name}") for path in file.path.glob("interlock.db*")]
    with pytest.raises(Killed):
        copy_store(server, file, None, die)
    assert saved
    assert not file.made
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

"""A copy of a home that changes while it is copied: of one moment, with every key it needs, or not made."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from interlock import Failure, Interlock
from interlock.audit.chain import verify
from interlock.store import backup
from interlock.store.backup import copied
from interlock.store.home import Home
from interlock.store.sealing import Box
from tests import sample
from tests.support import forked


async def test_what_is_written_while_a_database_is_copied_is_not_in_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "_PAGES_AT_A_TIME", 5)
    home, target, steps = Home(tmp_path / "home"), tmp_path / "copy", list[int]()
    async with Interlock.open(home.path, housekeeping=False) as app:
        await app.add(sample.add)
        before = app.journal.reader.all("SELECT MAX(seq) FROM journal")[0][0]

        def write(done: int, total: int) -> None:
            steps.append(done)
            assert done <= total
            app.journal.record("note", f"note{done}", b'{"kind":"note","call":"note%d"}' % done)
            app.journal._flush()  # pyright: ignore[reportPrivateUsage] - here and now, in the midst of the copying

        with copied(home, target, write) as copy:
            assert verify(copy.home).head[0] == before
            assert not (target / "interlock.db").exists()
    assert len(steps) > 5
    assert steps == sorted(set(steps))
    assert verify(Home(target)).intact
    assert verify(home).head[0] > before


async def test_a_copy_without_a_key_that_it_needs_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    async with Interlock.open(home.path, housekeeping=False) as app:
        await app.secrets.set("bank", "s3cret", by="local:alice")

    def drop(_: int, __: int) -> None:
        (home.keys / "secrets.key").unlink()
        assert Box(home.keys).current

    with (
        pytest.raises(Failure, match="a sealing key in use is missing") as refused,
        copied(home, tmp_path / "copy", drop),
    ):
        pytest.fail("it was made")
    assert refused.value.code == "E3410"
    assert os.listdir(tmp_path) == ["home"]


async def test_a_copy_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    async with Interlock.open(home.path, housekeeping=False):
        pass
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "copy", tmp_path / "empty"):
        with pytest.raises(KeyboardInterrupt), copied(home, target):
            raise KeyboardInterrupt
    assert sorted(os.listdir(tmp_path)) == ["empty", "home"]
    assert os.listdir(tmp_path / "empty") == []


async def test_a_home_on_a_read_only_place_can_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home")
    async with Interlock.open(home.path, housekeeping=False) as app:
        await app.add(sample.add)

    def may(path: Path, _: int) -> bool:
        return path != home.path  # whoever tests as root may write anywhere

    monkeypatch.setattr(os, "access", may)
    with copied(home, tmp_path / "copy"):
        assert sorted(path.name for path in home.path.glob("interlock.db*")) == ["interlock.db"]
    with closing(sqlite3.connect(tmp_path / "copy" / "interlock.db")) as database:
        assert database.execute("SELECT COUNT(*) FROM tool_version").fetchone() == (1,)


async def test_whoever_may_only_read_a_home_that_others_write_copies_what_they_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "home")

    def may(path: Path, _: int) -> bool:
        return path != home.path

    async with Interlock.open(home.path, housekeeping=False) as app:
        await app.add(sample.add)
        monkeypatch.setattr(os, "access", may)
        with copied(home, tmp_path / "copy") as copy:
            assert verify(copy.home).intact
    with closing(sqlite3.connect(tmp_path / "copy" / "interlock.db")) as database:
        assert database.execute("SELECT COUNT(*) FROM tool_version").fetchone() == (1,)


async def test_what_a_killed_copy_leaves_is_not_opened_as_a_home(tmp_path: Path) -> None:
    home, target = Home(tmp_path / "home"), tmp_path / "copy"
    async with Interlock.open(home.path, housekeeping=False):
        pass
    program = (
        "import os, sys; from pathlib import Path; from interlock.store.backup import copied;"
        " from interlock.store.home import Home\n"
        "with copied(Home(sys.argv[1]), Path(sys.argv[2])): os.kill(os.getpid(), 9)"
    )
    command = [*forked.python(), "-c", program, home.path, target]
    killed = await asyncio.to_thread(subprocess.run, command, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = sorted(target.rglob("*"))
    with pytest.raises(Failure, match="was not finished") as refused:
        await Interlock.open(target, housekeeping=False)
    assert refused.value.code == "E3804"
    assert sorted(target.rglob("*")) == left


async def test_a_home_that_is_being_copied_to_is_not_opened_meanwhile(tmp_path: Path) -> None:
    home, target = Home(tmp_path / "home"), tmp_path / "copy"
    async with Interlock.open(home.path, housekeeping=False) as app:
        await app.add(sample.add)
    with copied(home, target), pytest.raises(Failure, match="was not finished"):
        await Interlock.open(target, housekeeping=False)
    async with Interlock.open(target, housekeeping=False) as app:
        assert app.journal.reader.all("SELECT COUNT(*) FROM tool_version") == [(1,)]


async def test_what_came_to_its_target_meanwhile_is_not_written_over(tmp_path: Path) -> None:
    home, target = Home(tmp_path / "home"), tmp_path / "copy"
    async with Interlock.open(home.path, housekeeping=False):
        pass
    for name in ("anchors.jsonl", "interlock.db"):
        with pytest.raises(Failure, match="came there meanwhile") as refused, copied(home, target):
            (target / name).write_text("mine")
        assert refused.value.code == "E3411"
        assert os.listdir(target) == [name]
        assert (target / name).read_text() == "mine"
        (target / name).unlink()


async def test_a_link_that_leads_back_is_not_followed_round_and_round(tmp_path: Path) -> None:
    home, places = Home(tmp_path / "home"), tmp_path / "places"
    async with Interlock.open(home.path, housekeeping=False):
        pass
    places.mkdir()
    for leads_to in (home.path, tmp_path, places):
        (home.path / "link").symlink_to(leads_to)
        with pytest.raises(Failure, match="leads back") as refused, copied(home, places / "copy"):
            pytest.fail("it was made")
        assert refused.value.code == "E3411"
        assert os.listdir(places) == []
        (home.path / "link").unlink()


def test_what_is_no_database_of_ours_is_not_copied(tmp_path: Path) -> None:
    for name in ("empty", "foreign"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "interlock.db").touch()
    with closing(sqlite3.connect(tmp_path / "foreign" / "interlock.db")) as database:
        database.execute("CREATE TABLE alembic_version (version_num TEXT)")
    for name in ("empty", "foreign"):
        with (
            pytest.raises(Failure, match="not made by Interlock") as refused,
            copied(Home(tmp_path / name), tmp_path / "copy"),
        ):
            pytest.fail("it was made")
        assert refused.value.code == "E3804"
    assert not (tmp_path / "copy").exists()

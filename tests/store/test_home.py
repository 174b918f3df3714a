"""What a home must hold to be opened: its database as it was left, its keys, its policy. Nothing lost is made anew."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Failure, Interlock
from interlock.audit.chain import verify
from interlock.core.clock import Clock
from interlock.settings import load_settings
from interlock.store import migration
from interlock.store.anchors import ANCHOR_AFTER_S
from interlock.store.home import Home
from interlock.store.instance import Instance
from interlock.store.journal import Journal
from interlock.store.journal_connection import connect
from interlock.store.port import Transaction
from interlock.store.signing import Signer
from tests import sample
from tests.support import forked

Spoil = Callable[[Path], None]


async def used(path: Path) -> Path:
    """A home in which a call was made."""
    async with Interlock.open(path, housekeeping=False) as app:
        await app.add(sample.add)
        assert (await app.call("demo.add", a=1, b=1)).ok
    return path


async def refusal(path: Path) -> Failure:
    with pytest.raises(Failure) as refused:
        async with Interlock.open(path, housekeeping=False):
            pass
    assert str(path) not in f"{refused.value.message} {refused.value.resolution}"
    return refused.value


# The database


def _removed(path: Path) -> None:
    (path / "interlock.db").unlink()


def _emptied(path: Path) -> None:
    (path / "interlock.db").write_bytes(b"")


def _emptied_and_anchors_lost(path: Path) -> None:
    _emptied(path)
    (path / "anchors.jsonl").unlink()


def _removed_and_key_lost(path: Path) -> None:
    _removed(path)
    shutil.rmtree(path / "keys")


def _of_another_home(path: Path) -> None:
    shutil.copyfile(path.with_name("other") / "interlock.db", path / "interlock.db")


def _set_back(path: Path) -> None:
    shutil.copyfile(path.with_name("earlier") / "interlock.db", path / "interlock.db")


@pytest.mark.parametrize(
    "spoil", [_removed, _emptied, _emptied_and_anchors_lost, _removed_and_key_lost, _of_another_home, _set_back]
)
async def test_a_database_that_has_forgotten_what_was_done_is_refused(tmp_path: Path, spoil: Spoil) -> None:
    home = await used(tmp_path / "home")
    shutil.copytree(home, tmp_path / "earlier")
    await used(tmp_path / "home")
    await used(tmp_path / "other")
    spoil(home)
    before = {path: path.read_bytes() for path in sorted(home.rglob("*")) if path.is_file()}
    failure = await refusal(home)
    assert failure.code == "E3804"
    assert "restore the whole data directory" in failure.resolution
    assert "begin anew" in failure.resolution
    assert {path: path.read_bytes() for path in sorted(home.rglob("*")) if path in before} == before


async def test_a_whole_home_that_was_restored_opens(tmp_path: Path) -> None:
    home = await used(tmp_path / "home")
    shutil.copytree(home, tmp_path / "earlier")
    await used(home)
    shutil.rmtree(home)
    shutil.copytree(tmp_path / "earlier", home)
    await used(home)
    assert verify(Home(home)).intact


async def test_anchors_that_a_power_cut_left_half_written_or_out_of_order_are_no_hindrance(tmp_path: Path) -> None:
    home = await used(await used(tmp_path / "home"))
    anchors = home / "anchors.jsonl"
    first, *_, last = [line for line in anchors.read_bytes().split(b"\n") if line]
    anchors.write_bytes(b"\n".join((last, first, last[: len(last) // 2])))
    await used(home)


@given(tail=st.binary(max_size=300))
def test_nothing_in_the_anchors_file_can_make_reading_it_fail(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes
) -> None:
    home = Home(tmp_path_factory.mktemp("home"))
    home.anchors.write_bytes(b'{"seq":7,"hash":"00"}\n' + tail)
    found = home.last_anchor()
    assert found is None or found >= (7, b"\0")


async def test_purged_records_that_an_anchor_names_are_not_missed(tmp_path: Path) -> None:
    from interlock.audit.retention import purge

    path = await used(tmp_path / "home")
    home, later = Home(path), Clock().now_ms() + 9 * 366 * 86_400_000
    lines = home.anchors.read_bytes()
    assert purge(home, load_settings(home.settings), now_ms=later, by="local:auditor")
    home.anchors.write_bytes(lines)  # as if the power had gone before the last line was on disk
    await used(path)
    with closing(sqlite3.connect(home.database)) as database:
        ((last, digest),) = database.execute("SELECT last_seq, hash FROM segment").fetchall()
    home.anchors.write_text(f'{{"seq":{last},"hash":"{bytes(digest).hex()}"}}\n')
    await used(path)
    home.anchors.write_text(f'{{"seq":{last},"hash":"{"00" * 32}"}}\n')
    assert "another one" in (await refusal(path)).message


# The signing key


def _junk(path: Path) -> None:
    (path / "keys" / "journal.ed25519").write_text("junk\n")


def _lost(path: Path) -> None:
    (path / "keys" / "journal.ed25519").unlink()


def _pair_lost(path: Path) -> None:
    shutil.rmtree(path / "keys")


def _another(path: Path) -> None:
    (path / "keys" / "journal.ed25519").write_bytes(os.urandom(32))


def _another_pair(path: Path) -> None:
    _another(path)
    (path / "keys" / "journal.pub").unlink()


def _shared(path: Path) -> None:
    (path / "keys" / "journal.ed25519").chmod(0o644)


@pytest.mark.parametrize("spoil", [_junk, _lost, _pair_lost, _another, _another_pair, _shared])
async def test_a_journal_that_nobody_can_sign_any_more_is_not_gone_on_with(tmp_path: Path, spoil: Spoil) -> None:
    home = await used(tmp_path / "home")
    records = verify(Home(home)).records
    spoil(home)
    failure = await refusal(home)
    assert failure.code == "E3804"
    assert ("chmod 600" if spoil is _shared else "from a backup") in failure.resolution
    with closing(sqlite3.connect(home / "interlock.db")) as database:
        assert database.execute("SELECT COUNT(*) FROM journal").fetchone() == (records,)


_KILLED = """
import asyncio, os, sys
from interlock.core.clock import Clock
from interlock.store.home import Home
from interlock.store.journal import Journal
from interlock.store.records import plain
from interlock.store.signing import Signer

async def main():
    home, at = Home(sys.argv[1]), Clock().now_ms()
    journal = Journal(home, clock=Clock(now_ms=lambda: at, monotonic=lambda: 0.0), signer=Signer(home.keys))
    await journal.append("authority", "x", plain("authority", "x", at, act="test"))
    os._exit(9)

asyncio.run(main())
"""


async def test_what_a_killed_process_left_unsigned_the_next_one_signs(tmp_path: Path) -> None:
    home = tmp_path / "home"
    await asyncio.to_thread(subprocess.run, [*forked.python(), "-c", _KILLED, str(home)], check=False, timeout=120)
    killed = verify(Home(home))
    assert (killed.intact, killed.anchored_through < killed.head[0]) == (True, True)
    async with Interlock.open(home, housekeeping=False):
        pass
    verdict = verify(Home(home))
    assert verdict.anchored_through == verdict.head[0] > 0


async def test_records_that_no_other_follow_are_signed_by_any_later_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    journal = Journal(home, clock=Clock(), signer=Signer(home.keys))

    def nothing(_: Transaction) -> None:
        pass

    await journal.append("authority", "x", b'{"call":"x","kind":"authority"}')
    assert not journal.unsigned
    monkeypatch.setattr("interlock.store.anchors.ANCHOR_AFTER_S", 0.0)
    assert ANCHOR_AFTER_S > 0
    assert journal.unsigned
    await journal.commit(nothing)
    assert not journal.unsigned
    assert journal.reader.all("SELECT seq FROM anchor") == [(1,)]
    await journal.close()


# The policy


@pytest.mark.parametrize("name", ["policy.cedar", "principals.toml"])
async def test_a_policy_file_that_is_gone_denies_and_is_not_made_anew(tmp_path: Path, name: str) -> None:
    home = await used(tmp_path / "home")
    (home / name).unlink()
    async with Interlock.open(home, housekeeping=False) as app:
        app.catalog.attach(sample.add)
        result = await app.call("demo.add", a=1, b=1)
        assert result.error is not None
        assert result.error.code == "E3205"
        assert f"{name} is missing" in result.error.message
        assert "interlock policy default" in result.error.message
        assert name == "policy.cedar" or app.caller.scopes == frozenset()
    assert not (home / name).exists()


async def test_a_home_that_was_half_made_gets_the_policy_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "policy.cedar").write_text("")
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        assert app.caller.scopes
    assert (tmp_path / "policy.cedar").read_text() == ""


def test_a_new_database_is_in_wal_mode_before_another_process_can_see_it(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare()
    migration.create(home.database)
    assert home.database.read_bytes()[18:20] == b"\x02\x02"  # the file format's versions for writing and reading


def test_several_that_open_a_database_at_once_all_switch_it_to_wal(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare()
    migration.create(home.database)
    with closing(sqlite3.connect(home.database)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")  # as a copy by another program may leave it
    copies = [tmp_path / f"{number}.db" for number in range(50)]
    at_once = threading.Barrier(4)

    def mode(copy: Path) -> str:
        at_once.wait()
        with closing(connect(copy)) as connection:
            return connection.one("PRAGMA journal_mode")[0]

    with ThreadPoolExecutor(4) as threads:
        for copy in copies:
            shutil.copy(home.database, copy)
            assert list(threads.map(mode, [copy] * 4)) == ["wal"] * 4


# Signs of life


def test_a_process_that_starts_removes_the_signs_of_life_of_those_that_died(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare()
    living = Instance(home, "A" * 26)
    for number in range(50):
        (home.instances / f"{number:026}.lock").touch()
    started = Instance(home, "B" * 26)
    assert {path.stem for path in home.instances.iterdir()} == {living.id, started.id}
    assert (started.alive(living.id), living.alive(started.id), home.alive()) == (True, True, 2)
    living.close()
    assert not started.alive(living.id)
    started.close()


def test_a_sign_of_life_that_is_swept_away_before_it_is_locked_is_made_again(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare()
    path = home.instances / f"{'A' * 26}.lock"
    with ThreadPoolExecutor(1) as thread, open(path, "w") as sweeping:
        fcntl.flock(sweeping, fcntl.LOCK_EX)
        starting = thread.submit(Instance, home, "A" * 26)
        while not starting.done() and _openers(path) < 2:
            time.sleep(0.001)
        path.unlink()
        fcntl.flock(sweeping, fcntl.LOCK_UN)
        started = starting.result(60)
    other = Instance(home, "B" * 26)
    assert other.alive(started.id)
    started.close()
    other.close()


def _openers(path: Path) -> int:
    """How often this process has a file open."""
    return sum(os.path.realpath(f"/proc/self/fd/{one}") == str(path) for one in os.listdir("/proc/self/fd"))

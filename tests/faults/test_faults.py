"""Bad disks, bad files, bad neighbours: a clear error with its code, and nothing lost."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from interlock import Failure, Interlock
from interlock.audit.chain import verify
from interlock.store.home import Home
from interlock.store.port import StoreError
from interlock.store.writer import Writer
from tests import sample
from tests.sample import world
from tests.support import forked
from tests.support.calls import code, prepare, records
from tests.support.counter import effects, mark
from tests.support.disks import full_disk

ROOT = Path(__file__).parents[2]


@pytest.mark.proves("AUDIT-04")
async def test_on_a_full_disk_no_write_runs_and_everything_goes_on_afterwards(app: Interlock, home: Path) -> None:
    assert (await app.call("demo.increment", name="a", key="before")).ok
    with full_disk(home):
        refused: list[str | None] = []
        for number in range(400):
            result = await app.call("demo.increment", {"name": "a"}, key=f"full-{number}")
            refused.append(code(result))
            if len(refused) > 3 and all(one in ("E3801", "E3803") for one in refused[-3:]):
                break
        assert refused[-1] in ("E3801", "E3803"), "the disk never filled"
        done = 1 + refused.count(None)
        assert world.runs == done + refused.count("E3409")
        read = await app.call("demo.add", a=1, b=2)
        assert code(read) in ("E3801", "E3803")
    again = await app.call("demo.increment", {"name": "a"}, key="after")
    assert again.ok
    assert verify(Home(home)).intact


@pytest.mark.proves("AUDIT-04")
async def test_an_effect_whose_record_could_not_be_written_is_recorded_at_the_next_chance(
    app: Interlock,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apply = Writer._apply  # pyright: ignore[reportPrivateUsage]
    failing = True

    def limited(self: Writer, batch: list[Any]) -> Any:
        if failing and any("SuccessWriter" in getattr(one.work, "__qualname__", "") for one in batch):
            raise StoreError("database or disk is full")
        return apply(self, batch)

    monkeypatch.setattr(Writer, "_apply", limited)
    result = await app.call("demo.increment", name="a", key="k")
    assert code(result) == "E3409"
    assert result.error is not None
    assert result.error.details is not None
    assert result.error.details["executed"]
    assert world.runs == 1
    failing = False
    assert (await app.call("demo.increment", name="b", key="other")).ok
    replay = await app.call("demo.increment", name="a", key="k")
    assert (replay.unwrap(), replay.replayed) == (1, True)
    assert world.runs == 2
    assert len(records(app, result.invocation_id)) == 1
    assert verify(Home(home)).intact


async def test_a_full_disk_is_told_with_the_advice_to_make_room(app: Interlock) -> None:
    journal = app.journal.writer._connection  # pyright: ignore[reportPrivateUsage] - the disk is made small
    journal.execute(f"PRAGMA max_page_count={journal.execute('PRAGMA page_count').fetchone()[0]}")
    failures = [(await app.call("demo.increment", {"name": "a" * 20_000}, key=str(n))).error for n in range(20)]
    assert failures[-1] is not None
    assert (failures[-1].code, "make room" in failures[-1].resolution) == ("E3803", True)


def test_a_full_disk_is_told_where_the_room_is_missing_for_reading_too(home: Path) -> None:
    (home / "interlock.db-wal").touch()  # a process was killed: whoever reads now has to make the log's index first
    with full_disk(home, largest=8192), pytest.raises(Failure) as refused:
        verify(Home(home))
    assert (refused.value.code, "make room" in refused.value.resolution) == ("E3803", True)


async def test_a_home_that_cannot_be_written_when_it_is_opened_leaves_nothing_running(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlock.store.writer.LOCK_PATIENCE_S", 0.05)
    other = sqlite3.connect(home / "interlock.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Failure) as refused:
        await Interlock.open(home)
    other.execute("ROLLBACK")
    other.close()
    assert refused.value.code == "E3803"
    assert not [thread for thread in threading.enumerate() if thread.name == "interlock-journal"]
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.proves("AUDIT-04")
async def test_a_database_that_another_process_holds_refuses_writes_instead_of_running_them(
    app: Interlock,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("interlock.store.writer.LOCK_PATIENCE_S", 0.05)
    other = sqlite3.connect(home / "interlock.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    result = await app.call("demo.increment", name="a", key="k")
    assert code(result) == "E3803"
    assert world.runs == 0
    other.execute("ROLLBACK")
    other.close()
    assert (await app.call("demo.increment", name="a", key="k")).ok


def _not_a_database(path: Path) -> None:
    path.write_bytes(b"this is not a database, but it is long enough to look at" * 40)


def _foreign(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE accounts (id INTEGER)")
    other.commit()
    other.close()


def _newer(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("UPDATE alembic_version SET version_num = '9999'")
    other.execute("UPDATE fact SET value = '9999' WHERE name = 'schema_compatible_since'")
    other.commit()
    other.close()


def _scrambled(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100:4000] = os.urandom(3900)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "fresh", "expected"),
    [
        (_not_a_database, True, "E3804"),
        (_foreign, True, "E3804"),
        (_newer, False, "E3805"),
        (_scrambled, False, "E3804"),
    ],
)
async def test_a_file_that_is_not_ours_or_newer_is_refused_and_left_alone(
    tmp_path: Path, spoil: Any, fresh: bool, expected: str
) -> None:
    if not fresh:
        async with Interlock.open(tmp_path):
            pass
    spoil(tmp_path / "interlock.db")
    before = (tmp_path / "interlock.db").read_bytes()
    with pytest.raises(Failure) as refused:
        async with Interlock.open(tmp_path):
            pass
    assert refused.value.code == expected
    assert str(tmp_path) not in refused.value.message
    assert (tmp_path / "interlock.db").read_bytes() == before


async def test_a_home_that_cannot_be_written_is_refused_with_a_clear_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    with pytest.raises(Failure) as refused:
        async with Interlock.open(blocker / "home"):
            pass
    assert refused.value.code == "E3801"
    assert str(tmp_path) not in refused.value.message


def test_a_read_only_home_is_refused_for_an_ordinary_user(tmp_path: Path) -> None:
    """As root every directory is writable, so this drops to an ordinary user where it can."""
    script = (
        "import asyncio, os, sys\n"
        "from interlock import Failure, Interlock\n"
        "os.getuid() or os.setuid(65534)\n"
        "async def main():\n"
        "    async with Interlock.open(sys.argv[1]): pass\n"
        "try:\n    asyncio.run(main())\nexcept Failure as failure:\n    print(failure.code)\n"
    )
    directory = tmp_path / "readonly"
    directory.mkdir()
    directory.chmod(0o555)
    for parent in directory.parents:
        if parent.is_relative_to(Path("/tmp")) and parent != Path("/tmp"):
            parent.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory / "home")], capture_output=True, text=True, cwd="/"
    )
    assert done.stdout.strip() == "E3801", done.stderr
    assert "Traceback" not in done.stderr


async def test_a_migration_that_is_killed_half_way_starts_over(tmp_path: Path) -> None:
    (tmp_path / "interlock.new").write_bytes(b"half a database")
    async with Interlock.open(tmp_path) as app:
        await app.add(sample.add)
        assert (await app.call("demo.add", a=1, b=1)).ok


WORKER = """
import asyncio, os, sys
from interlock import Interlock
from tests.support.counter import mark

async def main(home, who, count):
    async with Interlock.open(home, caller="local:shared") as app:
        app.catalog.attach(mark)
        async def one(n):
            shared = n % 2 == 0
            name = f"s{n}" if shared else f"{who}-{n}"
            result = await app.call("demo.mark", {"name": name}, key=f"key-{name}", session=name)
            assert result.ok, result.error
        for start in range(0, count, 10):
            await asyncio.gather(*(one(n) for n in range(start, start + 10)))

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


@pytest.mark.proves("IDEM-07")
async def test_four_processes_hammering_one_home_lose_nothing_and_keep_one_chain(tmp_path: Path) -> None:
    shared_home, lines = tmp_path / "home", tmp_path / "effects"
    await prepare(shared_home, mark)
    environment = {**os.environ, "EFFECTS": str(lines), "CRASH_AT": ""}
    workers = [
        await asyncio.create_subprocess_exec(
            *forked.python(), "-c", WORKER, str(shared_home), f"w{n}", "100", cwd=ROOT, env=environment,
            stderr=asyncio.subprocess.PIPE,
        )
        for n in range(4)
    ]  # fmt: skip
    for worker in workers:
        _, errors = await worker.communicate()
        assert worker.returncode == 0, errors.decode()
    made = effects(str(lines))
    assert sorted(made) == sorted(
        [f"s{n}" for n in range(0, 100, 2)] + [f"w{w}-{n}" for w in range(4) for n in range(1, 100, 2)]
    )
    verdict = verify(Home(shared_home))
    assert verdict.intact, verdict.faults
    async with Interlock.open(shared_home) as after:
        closed = after.journal.reader.all("SELECT COUNT(*) FROM journal WHERE kind = 'closed'")
    assert closed[0][0] == 400


LOCAL_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=LOCAL_JSON, tool=st.sampled_from(["demo.add", "demo.echo", "demo.increment"]) | st.text(max_size=30))
async def test_arbitrary_input_is_answered_and_never_leaks(app: Interlock, arguments: Any, tool: str) -> None:
    from interlock import Request

    result = await app.gateway.invoke(Request(tool=tool, arguments=arguments, caller=app.caller, key="k"))
    if result.error is not None:
        told = json.dumps(result.error.envelope("t"))
        assert "Traceback" not in told
        assert "site-packages" not in told
        assert result.error.code != "E3000", result.error.message


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=st.text(max_size=30) | st.from_regex(r"[\^~<>=v.0-9x*| -]{1,20}", fullmatch=True))
async def test_arbitrary_ranges_are_answered(app: Interlock, spec: str) -> None:
    result = await app.call("demo.add", {"a": 1}, version=spec)
    assert code(result) in (None, "E3102", "E3004", "E3104")


async def test_objects_that_are_not_json_are_refused_before_anything(app: Interlock) -> None:
    for value in (object(), {1, 2}, b"bytes", ctypes.c_int(3), {1: 2}, "\ud800"):
        result = await app.call("demo.echo", value=value)
        assert code(result) == "E3004", value

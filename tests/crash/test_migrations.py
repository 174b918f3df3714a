"""kill -9 at every statement of a migration, and two processes that migrate at once, on SQLite and on PostgreSQL."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import pytest

from interlock.store import migration, migration_list, schema_status
from interlock.store.home import Home
from interlock.store.homes import home_at
from interlock.store.postgres.schema import MIGRATING
from tests import warm
from tests.crash.migrating import READY
from tests.support.calls import until
from tests.support.postgres import Server
from tests.support.schemas import FIRST_WITH_RULES, address, goes_on, lived, rows, shape
from tests.support.source import ROOT
from tests.thorough import THOROUGH

pytestmark = pytest.mark.timeout(600)  # many processes start and die, one after the other

NEVER = 0  # a point that no process reaches
PATIENCE_S = 60


class NewHome(Protocol):
    """Names a data directory that is not there yet, whose store is on the database of the test."""

    def __call__(self, name: str = "home") -> Home: ...


@pytest.fixture(params=["sqlite", "postgres"])
def new_home(request: pytest.FixtureRequest, postgres_server: Server, tmp_path: Path) -> NewHome:
    def made(name: str = "home") -> Home:
        return home_at(tmp_path / name, "" if request.param == "sqlite" else postgres_server.new_schema())

    return made


@pytest.fixture
def home(new_home: NewHome) -> Home:
    return new_home()


def start(home: Home, action: str, point: int = NEVER, how: str = "die") -> warm.Started:
    words = ["-m", "tests.crash.migrating", action, str(home.path), address(home), str(point), how]
    return warm.start(words, os.environ, ROOT, python=True)


def run(home: Home, action: str, point: int = NEVER) -> int:
    """Run a process, which is killed at a point if it gets there. How many points it passed; 0 if it was killed."""
    with start(home, action, point) as child:
        passed, told = child.communicate(PATIENCE_S)
    assert child.returncode in (0, -signal.SIGKILL), told.decode()
    return 0 if child.returncode else int(passed.split()[0])


def points(total: int) -> list[int]:
    """The points to die at, of so many: some, and the last, which are the commit and what follows it."""
    return [*range(1, total - 5, 1 if THOROUGH else 5), *range(max(total - 5, 1), total + 1)]


def go_on(child: warm.Started) -> None:
    child.stdin.write(b"\n")
    child.stdin.flush()


def waiting(home: Home) -> int:
    """Count the processes that wait until another one has migrated."""
    if home.near:
        inode = os.stat(home.path / "migrate.lock").st_ino
        return sum("->" in line and f":{inode} " in line for line in Path("/proc/locks").read_text().splitlines())
    with closing(home.reading()) as reader:
        return reader.one(_WAITING)[0]


_WAITING = f"""
SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND classid = {MIGRATING.split(",")[0]}
    AND objid::bigint = hashtext(current_schema())::bigint & 4294967295
"""


def set_back(home: Home) -> None:
    """Undo every migration that can be undone."""
    while schema_status.status(home).at_stake is not None:
        migration.down(home)
    assert schema_status.status(home).schema < FIRST_WITH_RULES


@pytest.mark.proves("OPS-08")
async def test_a_kill_at_any_statement_of_a_migration_leaves_the_old_schema_or_the_new_one(home: Home) -> None:
    await lived(home)
    new, kept = shape(home), rows(home)
    set_back(home)
    old, before = shape(home), rows(home)
    total = run(home, "up")
    assert total > len(migration_list.pending_at(FIRST_WITH_RULES)) * 3
    set_back(home)
    died = 0
    for died in points(total):
        assert not run(home, "open", died)
        if shape(home) == new:
            break
        assert (shape(home), rows(home)) == (old, before)
    assert total - 5 < died <= total
    assert (shape(home), rows(home)) == (new, kept)
    await goes_on(home)


@pytest.mark.proves("OPS-08")
async def test_a_kill_at_any_statement_of_an_undoing_leaves_the_old_schema_or_the_new_one(home: Home) -> None:
    await lived(home)
    undone = 0
    while schema_status.status(home).at_stake is not None and (THOROUGH or undone < 2):
        last, old, before = schema_status.status(home).schema, shape(home), rows(home)
        died = 0
        while schema_status.status(home).schema == last:
            assert (shape(home), rows(home)) == (old, before)
            died += 1
            assert not run(home, "down", died)
        assert died > 3
        left = rows(home)
        # All that differs is the note of the programs that can work on it.
        assert {name: found for name, found in before.items() if name in left} | {"fact": []} == left | {"fact": []}
        undone += 1
    # The next start migrates it again.
    await goes_on(home)


@pytest.mark.proves("OPS-08")
async def test_a_kill_while_the_store_is_made_leaves_none_and_the_next_start_makes_it(new_home: NewHome) -> None:
    total = run(new_home("whole"), "open")
    home = new_home()
    died = 0
    for died in points(total):
        assert not run(home, "open", died)
        if not home.new:
            break
    assert total - 5 < died <= total
    assert not home.new
    await lived(home)
    await goes_on(home)


@pytest.mark.proves("OPS-08")
async def test_a_kill_while_a_migration_is_committed_leaves_the_old_schema_or_the_new_one(home: Home) -> None:
    await lived(home)
    new, kept = shape(home), rows(home)
    set_back(home)
    old, before = shape(home), rows(home)
    # The last points are those after the commit, of which a file has one more: its mode is set.
    commit = run(home, "up") - (2 if home.near else 1)
    set_back(home)
    chance = random.Random(8)
    for _ in range(100 if THOROUGH else 6):
        with start(home, "up", commit, "wait") as child:
            assert child.stdout.readline().decode().strip() == READY
            go_on(child)
            moment = time.monotonic() + chance.uniform(0, 0.02)
            while time.monotonic() < moment:
                pass
            child.send_signal(signal.SIGKILL)
        found = shape(home)
        assert (found, rows(home)) in ((old, before), (new, kept))
        if found == new:
            set_back(home)
    await goes_on(home)


@pytest.mark.proves("OPS-08")
@pytest.mark.parametrize("first", ["goes on", "is killed"])
async def test_of_two_processes_one_migrates_and_the_other_waits_and_goes_on(home: Home, first: str) -> None:
    await lived(home)
    new, kept = shape(home), rows(home)
    set_back(home)
    pending = [one.revision for one in migration_list.pending_at(schema_status.status(home).schema)]
    with start(home, "up", 7, "wait") as one:
        assert one.stdout.readline().decode().strip() == READY
        # The others are started once the first is at work, or one of them could be first.
        with start(home, "up") as another, start(home, "open") as third:
            await until(lambda: waiting(home) == 2)
            if first == "goes on":
                go_on(one)
            else:
                one.send_signal(signal.SIGKILL)
            steps = [child.communicate(PATIENCE_S)[0].decode().split()[1:] for child in (one, another, third)]
            ends = [child.wait() for child in (one, another, third)]
    if first == "goes on":
        assert (ends, steps[:2]) == ([0, 0, 0], [pending, []])
    else:  # whichever of the others came first has migrated
        assert (ends, steps[0]) == ([-signal.SIGKILL, 0, 0], [])
        assert steps[1] in (pending, [])
    written: dict[str, list[Any]] = {"anchor": [], "fact": []}  # by the one that opened it
    assert (shape(home), rows(home) | written) == (new, kept | written)
    await goes_on(home)


@pytest.mark.proves("OPS-08")
async def test_a_process_that_opens_a_store_while_its_last_migration_is_undone_is_refused(home: Home) -> None:
    await lived(home)
    looked = 8 if home.near else 7  # the point after it has looked for processes that run
    with start(home, "down", looked, "wait") as one:
        assert one.stdout.readline().decode().strip() == READY
        with start(home, "open") as another:
            # It has found the schema that it knows, and now asks whether that is so still.
            await until(lambda: waiting(home) == 1)
            go_on(one)
            assert one.communicate(PATIENCE_S)[0].decode().split()[1:] == [migration_list.head()]
            _, told = another.communicate(PATIENCE_S)
    assert another.returncode == 1
    assert "the schema of the store was changed while this process opened it" in told.decode()
    assert home.alive() == 0
    await goes_on(home)

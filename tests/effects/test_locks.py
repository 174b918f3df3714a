"""Resource locks: what overlaps does not interleave, what does not overlap runs at the same time, and nobody hangs."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import hypothesis.strategies as st
import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from interlock import Failure
from interlock.core.clock import Clock
from interlock.effects import lock_sharing as module
from interlock.effects.locks import HeldLocks, LockRequest, Locks, Mode, check_preconditions, covers, overlap
from interlock.store.home import Home
from interlock.store.homes import home_at
from interlock.store.postgres.connection import PostgresConnection
from interlock.store.postgres.leases import Lease
from interlock.store.postgres.lock_board import PostgresBoard
from tests.support import forked
from tests.support.postgres import Server

CLOCK = Clock()
NUMBERS = itertools.count()
ROOT = Path(__file__).parents[2]
LONG_S = 30.0


@contextmanager
def processes(path: Path, count: int, store: str | None = None) -> Generator[list[Locks]]:
    """Locks as so many processes have them. Each has its own sign of life and its own open board.

    They share a data directory or, with `store`, a database, and each has a data directory of its own.
    """
    homes = [home_at(path / str(number) if store else path, store) for number in range(count)]
    for home in homes:
        home.prepare()
    if store:
        homes[0].open_database().close()
    instances = [home.instance(f"{next(NUMBERS):026d}") for home in homes]  # an id is used once
    opened = [Locks(home, clock=CLOCK, instance=one) for home, one in zip(homes, instances, strict=True)]
    try:
        yield opened
    finally:
        for locks in opened:
            locks.close()
        for instance in instances:
            instance.close()


@pytest.fixture(params=["file", "postgres"])
def store(request: pytest.FixtureRequest, postgres_server: Server) -> str | None:
    """The address of the database that holds the board; None if it is a file."""
    return None if request.param == "file" else postgres_server.new_schema()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)


def later(seconds: float = LONG_S) -> float:
    return CLOCK.monotonic() + seconds


def write(*names: str) -> list[LockRequest]:
    return [LockRequest(name) for name in names]


def read(*names: str) -> list[LockRequest]:
    return [LockRequest(name, "read") for name in names]


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not reached():  # noqa: ASYNC110 - the locks tell nobody of their inner state
            await asyncio.sleep(0.001)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# Names

SEGMENTS = st.lists(st.sampled_from("ab"), min_size=1, max_size=3)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("account:cash", "account:cash", True),
        ("account:cash", "account:cashier", False),
        ("account:cash", "mailbox:cash", False),
        ("account:*", "account:cash", True),
        ("account:ca*", "account:cash", True),
        ("account:ca*", "account:bank", False),
        ("*", "account:cash", True),
        ("acc*", "account:cash", True),
        ("acc*:x", "account:cash", True),
        ("file:/srv/data", "file:/srv/data/a.txt", True),
        ("file:/srv/data", "file:/srv/database", False),
        ("file:/srv/data/", "file:/srv//./data", True),
        ("file:/srv/data/../etc", "file:/srv/data", False),
        ("file:/srv/data/../etc", "file:/srv/etc/passwd", True),
        ("file:/../etc", "file:/etc", True),
        ("file:../etc", "file:/anything", True),
        ("file:/srv/*/../x", "file:/anything", True),
        ("file:/", "file:/srv", True),
        ("ledger", "ledger/page", True),
    ],
)
def test_names_overlap_if_they_have_a_resource_in_common(one: str, other: str, expected: bool) -> None:
    assert overlap(one, other) is expected
    assert overlap(other, one) is expected


@given(SEGMENTS, SEGMENTS)
def test_a_whole_name_overlaps_exactly_its_ancestors_and_descendants(one: list[str], other: list[str]) -> None:
    shorter = min(len(one), len(other))
    expected = one[:shorter] == other[:shorter]
    assert overlap("file:/" + "/".join(one), "file:/" + "/".join(other)) is expected
    assert covers("file:/" + "/".join(one), "file:/" + "/".join(other)) is (expected and len(one) <= len(other))


@given(st.text(alphabet="ab/.*:", max_size=12), st.text(alphabet="ab/.*:", max_size=12))
def test_any_text_is_a_name_and_covering_is_overlapping(one: str, other: str) -> None:
    assert overlap(one, one)
    assert overlap(one, other) is overlap(other, one)
    if covers(one, other) or covers(other, one):
        assert overlap(one, other)


def test_a_name_that_may_lead_anywhere_is_in_everybodys_way_and_gives_leave_for_nothing() -> None:
    assert overlap("file:../x", "file:/etc/passwd")
    assert not covers("file:../x", "file:/etc/passwd")
    assert not covers("file:../x", "file:../x")


# Within a process


class Job(NamedTuple):
    """A call: what it claims, how long it takes, and the calls it makes, together or one after the other."""

    claims: list[LockRequest]
    steps: int
    below: list[Job]
    together: bool


NAMES = st.sampled_from(["a:x", "a:y", "a:*", "a:x/1", "f:/1", "f:/1/2", "f:/1/2/3", "f:/1/4", "f:/2*", "f:/23", "*"])
CLAIMS = st.lists(st.builds(LockRequest, NAMES, st.sampled_from(["read", "write"])), min_size=1, max_size=3)
LEAVES = st.builds(Job, CLAIMS, st.integers(0, 3), st.just([]), st.booleans())
JOBS = st.lists(
    st.builds(Job, CLAIMS | st.just([]), st.integers(0, 3), st.lists(LEAVES, max_size=3), st.booleans()),
    min_size=2,
    max_size=8,
)


class Floor:
    """Runs jobs and watches that none of them meets another that it conflicts with."""

    def __init__(self) -> None:
        self.inside: dict[str, tuple[str, list[LockRequest]]] = {}
        self.most = self.refused = self.done = 0

    async def run(self, locks: Locks, name: str, job: Job, parent: str | None = None) -> None:
        try:
            held = await locks.hold(name, job.claims, later(), parent)
        except Failure as failure:
            if failure.code != "E3410" or parent is None:
                raise
            self.refused += 1
            return
        with held:
            for other, (_, claims) in self.inside.items():
                if not (name + ".").startswith(other + "."):
                    assert not any(
                        "write" in (one.mode, two.mode) and overlap(one.resource, two.resource)
                        for one in job.claims
                        for two in claims
                    ), f"{name} met {other}"
            self.inside[name] = (name, job.claims)
            self.most = max(self.most, len(self.inside))
            await turns(job.steps)
            below = [self.run(locks, f"{name}.{number}", one, name) for number, one in enumerate(job.below)]
            if job.together:
                await asyncio.gather(*below)
            else:
                for one in below:
                    await one
            del self.inside[name]
        self.done += 1


@pytest.mark.proves("EFFECT-06")
@given(JOBS)
def test_overlapping_calls_never_interleave_and_all_of_them_end(jobs: list[Job]) -> None:
    async def scene(path: Path) -> None:
        with processes(path, 1) as (locks,):
            floor = Floor()
            async with asyncio.timeout(LONG_S):
                await asyncio.gather(*(floor.run(locks, str(number), job) for number, job in enumerate(jobs)))
            assert floor.done + floor.refused >= len(jobs)
            assert not locks._table  # pyright: ignore[reportPrivateUsage] - nothing is left behind
            assert not locks._order  # pyright: ignore[reportPrivateUsage]

    with tempfile.TemporaryDirectory() as path:
        asyncio.run(scene(Path(path)))


@pytest.mark.proves("EFFECT-06")
@settings(
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to find a smaller example takes minutes
)
@given(JOBS, st.integers(2, 3))
def test_nor_do_they_when_they_come_from_several_processes(store: str | None, jobs: list[Job], count: int) -> None:
    async def scene(path: Path) -> None:
        with processes(path, count, store) as opened:
            floor = Floor()
            async with asyncio.timeout(LONG_S):
                await asyncio.gather(
                    *(floor.run(opened[number % count], str(number), job) for number, job in enumerate(jobs))
                )

    with tempfile.TemporaryDirectory() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LOOK_S", 0.001)
        asyncio.run(scene(Path(path)))


@pytest.mark.parametrize(("resource", "mode"), [("account:{}", "write"), ("account:*", "read")])
async def test_independent_calls_and_readers_are_inside_at_the_same_time(
    tmp_path: Path, resource: str, mode: Mode
) -> None:
    together = asyncio.Barrier(20)

    async def call(locks: Locks, number: int) -> None:
        with await locks.hold(str(number), [LockRequest(resource.format(number), mode)], later()):
            await together.wait()

    with processes(tmp_path, 1) as (locks,):
        async with asyncio.timeout(LONG_S):
            await asyncio.gather(*(call(locks, number) for number in range(20)))


async def order(locks: Sequence[Locks], calls: list[tuple[str, list[LockRequest]]]) -> list[str]:
    """Let calls come one after the other while a first one holds; the order in which they get in."""
    entered: list[str] = []

    async def call(number: int, name: str, claims: list[LockRequest]) -> None:
        with await locks[number % len(locks)].hold(name, claims, later()):
            entered.append(name)
            await turns()

    first = await locks[0].hold("first", read("account:cash"), later())
    waiting: list[Awaitable[None]] = []
    for number, (name, claims) in enumerate(calls):
        waiting.append(asyncio.ensure_future(call(number, name, claims)))
        await turns()
    first.release()
    async with asyncio.timeout(LONG_S):
        await asyncio.gather(*waiting)
    return entered


async def test_a_writer_is_not_overtaken_by_readers_that_come_later(tmp_path: Path) -> None:
    calls = [("w1", write("account:cash")), ("r1", read("account:*")), ("w2", write("*")), ("r2", read("account:cash"))]
    with processes(tmp_path, 1) as locks:
        assert await order(locks, calls) == ["w1", "r1", "w2", "r2"]


@pytest.mark.usefixtures("quick")
async def test_nor_by_readers_of_another_process(tmp_path: Path, store: str | None) -> None:
    with processes(tmp_path, 2, store) as (ours, theirs):
        first = await ours.hold("r1", read("account:cash"), later())
        writer = asyncio.ensure_future(theirs.hold("w", write("account:cash"), later()))
        # The board is ours alone until the other process has rung and we have written down what we hold.
        await until(lambda: not ours._sharing.alone and any(ticket.number for ticket in theirs._tickets))  # pyright: ignore[reportPrivateUsage]
        reader = asyncio.ensure_future(ours.hold("r2", read("account:cash"), later()))
        await asyncio.sleep(0.01)
        assert not reader.done()
        first.release()
        async with asyncio.timeout(LONG_S):
            (await writer).release()
            (await reader).release()


async def test_who_cannot_have_it_in_time_hears_of_a_conflict_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with processes(tmp_path, 1) as (locks,):
        with await locks.hold("one", write("account:cash"), later()):
            for deadline in (later(-1), later(0.01)):
                with pytest.raises(Failure) as caught:
                    await locks.hold("two", write("account:cash", "account:bank"), deadline)
                assert caught.value.code == "E3410"
                assert caught.value.row.error_code == "CONFLICT"
                assert caught.value.retry_after_ms
                assert "`account:cash`" in caught.value.message
            with await locks.hold("three", write("account:bank"), later(-1)):
                pass
        with await locks.hold("four", write("account:cash"), later(-1)):
            pass


async def test_a_waiting_call_that_is_cancelled_stands_in_nobodys_way(tmp_path: Path) -> None:
    with processes(tmp_path, 1) as (locks,):
        first = await locks.hold("one", read("account:cash"), later())
        writer = asyncio.ensure_future(locks.hold("two", write("account:cash"), later()))
        await turns()
        reader = asyncio.ensure_future(locks.hold("three", read("account:cash"), later()))
        await turns()
        writer.cancel()
        await turns()
        assert reader.done()
        for held in (first, reader.result()):
            held.release()
            held.release()  # a second time does nothing
        with await locks.hold("four", write("*"), later(-1)):
            pass


async def test_a_call_that_claims_nothing_costs_and_hinders_nothing(tmp_path: Path) -> None:
    with processes(tmp_path, 1) as (locks,), await locks.hold("one", [], later(-1)):
        assert not (tmp_path / "locks.board").exists()
        with await locks.hold("two", write("*"), later(-1)):
            pass


# Calls within calls


async def test_a_call_is_not_in_the_way_of_the_calls_it_makes(tmp_path: Path) -> None:
    with processes(tmp_path, 1) as (locks,):
        with await locks.hold("parent", write("account:*"), later()):
            # Somebody waits already; they do not come between a call and its own.
            waiting = asyncio.ensure_future(locks.hold("other", write("account:cash"), later()))
            await turns()
            child = await locks.hold("child", [], later(-1), "parent")
            with child, await locks.hold("grandchild", write("account:cash"), later(-1), "child"):
                assert not waiting.done()
        (await waiting).release()


async def test_calls_of_one_parent_wait_for_one_another(tmp_path: Path) -> None:
    with processes(tmp_path, 1) as (locks,), await locks.hold("parent", write("account:*"), later()):
        first = await locks.hold("one", write("account:cash"), later(), "parent")
        nephew = await locks.hold("below one", write("account:cash"), later(), "one")
        second = asyncio.ensure_future(locks.hold("two", write("account:cash"), later(), "parent"))
        await turns()
        assert not second.done()
        first.release()
        await turns()
        assert not second.done()
        nephew.release()
        (await second).release()


async def test_a_call_within_a_call_does_not_wait_for_strangers(tmp_path: Path) -> None:
    with processes(tmp_path, 1) as (locks,):
        one = await locks.hold("one", write("account:a"), later())
        two = await locks.hold("two", write("account:b"), later())
        for parent, wanted in (("one", "account:b"), ("two", "account:a")):
            with pytest.raises(Failure) as caught:
                await locks.hold("below", write(wanted), later(), parent)
            assert caught.value.code == "E3410"
        one.release()
        with await locks.hold("below", write("account:a"), later(), "two"):
            pass
        two.release()


@pytest.mark.usefixtures("quick")
async def test_nor_for_strangers_in_another_process(tmp_path: Path, store: str | None) -> None:
    with processes(tmp_path, 2, store) as (ours, theirs):
        one = await ours.hold("one", write("account:a"), later())
        two = await theirs.hold("two", write("account:b"), later())
        for locks, parent, wanted in ((ours, "one", "account:b"), (theirs, "two", "account:a")):
            with pytest.raises(Failure) as caught:
                await locks.hold("below", write(wanted), later(), parent)
            assert caught.value.code == "E3410"
        one.release()
        two.release()


# Several processes


def start(home: Path, store: str | None, instance: str, *arguments: str) -> subprocess.Popen[str]:
    python = [sys.executable] if arguments[0] == "hold" else forked.python()  # whoever holds something is killed
    command = [*python, "-m", "tests.effects.contender", str(home), store or "", instance * 26, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.proves("EFFECT-06")
def test_real_processes_are_never_inside_together(tmp_path: Path, store: str | None) -> None:
    home, marker = tmp_path / "home", tmp_path / "inside"
    Home(home).prepare()
    if store:
        home_at(home, store).open_database().close()
    rounds = "10" if store else "40"
    running = [start(home / name if store else home, store, name, "hammer", str(marker), rounds) for name in "ABC"]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


@pytest.mark.sqlite_only("the board is a file; the tests of this module that hold for both name their store")
async def test_killing_the_holder_frees_what_it_held(tmp_path: Path) -> None:
    with processes(tmp_path, 1) as (locks,):
        holder = start(tmp_path, None, "Z", "hold")
        assert holder.stdout is not None
        try:
            assert await asyncio.to_thread(holder.stdout.readline) == "held\n"
            with pytest.raises(Failure):
                await locks.hold("one", write("account:cash"), later(0.05))
            waiting = asyncio.ensure_future(locks.hold("two", write("account:cash"), later()))
            await asyncio.sleep(0)
            assert not waiting.done()
            os.kill(holder.pid, signal.SIGKILL)
            (await waiting).release()
        finally:
            holder.kill()
            holder.communicate()


@pytest.mark.usefixtures("quick")
async def test_a_process_that_is_taken_for_dead_loses_its_locks_and_gets_no_others(
    tmp_path: Path, postgres_server: Server
) -> None:
    """Also one that was alone, and would not have asked anybody: it is not sure of its lease any more."""
    store = postgres_server.new_schema()
    with processes(tmp_path, 2, store) as (late, other):
        await late.hold("one", write("account:cash"), later())
        assert late._sharing.alone  # pyright: ignore[reportPrivateUsage]
        lease = cast("Lease", late._sharing._board._lease)  # pyright: ignore
        lease._ended.set()  # pyright: ignore[reportPrivateUsage] - as if it had been stopped
        lease._sure_until = 0.0  # pyright: ignore[reportPrivateUsage]
        with closing(psycopg.connect(store, autocommit=True)) as connection:
            connection.execute("DELETE FROM instance WHERE id = %s", (lease.id,))
        (await other.hold("two", write("account:cash"), later())).release()
        with pytest.raises(Failure, match="taken for dead") as fenced:
            await late.hold("three", write("account:bank"), later())
        assert fenced.value.code == "E3801"


async def test_no_step_of_the_board_in_a_database_is_taken_on_the_event_loop(
    tmp_path: Path, postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[int] = set()
    connected = PostgresBoard._connected  # pyright: ignore[reportPrivateUsage]

    def watched(board: PostgresBoard) -> PostgresConnection:
        used.add(threading.get_ident())
        return connected(board)

    monkeypatch.setattr(PostgresBoard, "_connected", watched)
    with processes(tmp_path, 2, postgres_server.new_schema()) as (ours, theirs):
        for locks in (ours, theirs, ours):
            (await locks.hold("one", write("account:cash"), later())).release()
    assert used
    assert threading.get_ident() not in used


@pytest.mark.usefixtures("quick")
async def test_a_process_that_was_alone_hands_over_and_is_alone_again(
    tmp_path: Path, store: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.0)
    with processes(tmp_path, 2, store) as (ours, theirs):
        mine = await ours.hold("one", write("account:a"), later())
        with pytest.raises(Failure):
            await theirs.hold("two", write("account:a"), later(0.1))
        with await theirs.hold("three", write("account:b"), later()):
            assert not ours._sharing.alone  # pyright: ignore[reportPrivateUsage]
        await until(lambda: not theirs._sharing.on_board)  # pyright: ignore[reportPrivateUsage] - it has nothing to do and leaves
        with await ours.hold("four", write("account:c"), later()):
            assert ours._sharing.alone  # pyright: ignore[reportPrivateUsage]
        mine.release()


async def test_what_a_power_cut_left_of_the_board_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "locks.board").write_bytes(b"\xff" * 5000)
    with processes(tmp_path, 1) as (locks,), await locks.hold("one", write("account:a"), later(-1)):
        pass


@pytest.mark.sqlite_only("the board is a file; the tests of this module that hold for both name their store")
async def test_a_board_that_cannot_be_opened_refuses_the_call(tmp_path: Path) -> None:
    (tmp_path / "locks.board").mkdir()
    with processes(tmp_path, 1) as (locks,):
        with pytest.raises(Failure) as caught:
            await locks.hold("one", write("account:a"), later())
        assert caught.value.code == "E3801"


# Preconditions


@pytest.mark.parametrize(
    ("expected", "code"),
    [
        ({"doc:a": "v1"}, None),
        ({"doc:a": "*", "doc:b": ""}, None),
        ({"doc:a": "v0"}, "E3410"),
        ({"doc:b": "v1"}, "E3410"),
        ({"doc:b": "*"}, "E3411"),
        ({"doc:a": ""}, "E3411"),
        ({"doc:a": "v0", "doc:b": "*"}, "E3411"),
    ],
)
def test_a_stale_version_is_a_conflict_and_a_missing_resource_a_failed_precondition(
    expected: dict[str, str], code: str | None
) -> None:
    current = {"doc:a": "v1"}
    if code is None:
        check_preconditions(list(expected.items()), {"doc:b": None, **current})
        return
    with pytest.raises(Failure) as caught:
        check_preconditions(list(expected.items()), {"doc:b": None, **current})
    assert caught.value.code == code


def test_a_held_that_holds_nothing_can_be_released() -> None:
    HeldLocks(None, "", None, {}).release()

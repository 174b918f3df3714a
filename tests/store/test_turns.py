"""Processes that write to one home take turns: nobody is passed again and again, and nobody waits for a stopped one."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from interlock.core import record_locks
from interlock.core.clock import Clock
from interlock.store import turns
from interlock.store.home import Home
from interlock.store.journal import Journal
from interlock.store.port import StoreConnection, StoreError, Transaction
from interlock.store.signing import Signer
from interlock.store.turns import Turns

ROOT = Path(__file__).parents[2]
LONG_S = 60.0

# A process on a home. It writes one record for each line that it reads, or without a pause.
WRITER = """
import asyncio, sys
from interlock.core.clock import Clock
from interlock.store import journal, turns, writer
from interlock.store.home import Home
from interlock.store.signing import Signer

async def main(path, how):
    home = Home(path)
    writer.LOCK_PATIENCE_S = 3600.0
    if how == "greedy":
        turns.STALLED_S = 3600.0  # a machine under load must not look like a stopped process
    made = journal.Journal(home, clock=Clock(), signer=Signer(home.keys))
    print("ready", flush=True)
    while how == "greedy" or sys.stdin.readline():
        await made.append("test", "call", b"{}")
        if how != "greedy":
            print("written", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def writer(home: Home, how: str) -> Generator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WRITER, str(home.path), how]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.open_database().close()
    return made


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def places(home: Home) -> int:
    """How many wait for their turn."""
    count = 0
    with open(home.turns, "ab+") as file:
        # The kernel names any lock of a range: count those before it and those behind it.
        ranges = [(1, 2**62)]
        while ranges:
            start, length = ranges.pop()
            found = record_locks.any_lock(file.fileno(), start, length) if length > 0 else None
            if found is not None:
                at, size = found
                count += 1
                ranges += [(start, at - start), (at + size, start + length - at - size)]
    return count


def head(connection: sqlite3.Connection | StoreConnection) -> int:
    return connection.execute("SELECT COALESCE(MAX(seq), 0) FROM journal").fetchone()[0]


def test_a_process_that_writes_without_a_pause_passes_one_that_waits_once_at_most(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "STALLED_S", 3600.0)
    passed: list[int] = []
    heads: list[int] = []
    with writer(home, "greedy"), closing(home.open_database()) as connection, closing(Turns(home.turns)) as own:

        def execute(statement: str) -> None:
            heads.append(head(connection))
            connection.execute(statement)

        end = time.monotonic() + LONG_S
        while len(passed) < 30:
            assert time.monotonic() < end, "the other process has never held the database"
            heads.clear()
            assert own.begin(execute, LONG_S)
            # At its second attempt it has a place. What comes after that, came in between.
            if len(heads) > 1:
                passed.append(head(connection) - heads[1])
            connection.execute("COMMIT")
    assert max(passed) <= 1


def test_a_process_that_writes_without_a_pause_still_writes_beside_another(home: Home) -> None:
    with writer(home, "greedy"), closing(home.open_database()) as connection, closing(Turns(home.turns)) as own:
        first = head(connection)
        end = time.monotonic() + LONG_S
        while head(connection) < first + 20:
            assert time.monotonic() < end
            assert own.begin(connection.execute, LONG_S)
            connection.execute("COMMIT")


def test_those_who_wait_have_their_turns_in_the_order_in_which_they_came(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "STALLED_S", 3600.0)
    monkeypatch.setattr(turns, "CONTENDED_S", 3600.0)
    free = threading.Event()
    order: list[int] = []

    def wait(number: int) -> None:
        def execute(_: str) -> None:
            if not free.is_set():
                raise StoreError("database is locked")
            order.append(number)

        with closing(Turns(home.turns)) as own:
            assert not own.contended
            assert own.begin(execute, LONG_S)
            assert own.contended

    waiting = [threading.Thread(target=wait, args=(number,)) for number in range(4)]
    for number, thread in enumerate(waiting):
        thread.start()
        until(lambda: places(home) == number + 1)  # noqa: B023 - it ends before the next one begins
    free.set()
    for thread in waiting:
        thread.join(LONG_S)
    assert order == [0, 1, 2, 3]
    assert places(home) == 0


async def test_a_stopped_process_holds_nobody_up_and_has_its_turn_when_it_goes_on(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlock.store.writer.LOCK_PATIENCE_S", 3600.0)
    journal = Journal(home, clock=Clock(), signer=Signer(home.keys))
    with writer(home, "by line") as process, closing(home.open_database()) as connection:
        assert process.stdin is not None
        assert process.stdout is not None
        connection.execute("BEGIN IMMEDIATE")
        process.stdin.write("write\n")
        until(lambda: places(home) == 1)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # noqa: ASYNC222 - until it has stopped
        connection.execute("COMMIT")
        async with asyncio.timeout(LONG_S):
            await journal.append("test", "call", b"{}")
        assert places(home) == 1
        with closing(Turns(home.turns)) as own:
            # Somebody new waits for it once, and then passes it without a pause.
            assert not own.begin(connection.execute, 0.0)
            assert own.begin(connection.execute, 3600.0)
            connection.execute("COMMIT")
            assert own.begin(connection.execute, 0.0)
            # It goes on, and counts again.
            process.send_signal(signal.SIGCONT)
            until(lambda: not own.begin(lambda _: None, 0.0))
            connection.execute("COMMIT")
        assert process.stdout.readline() == "written\n"
    await journal.close()
    assert places(home) == 0


def test_a_killed_process_leaves_no_place_behind(home: Home) -> None:
    with closing(home.open_database()) as connection:
        with writer(home, "by line") as process:
            assert process.stdin is not None
            connection.execute("BEGIN IMMEDIATE")
            process.stdin.write("write\n")
            until(lambda: places(home) == 1)
        assert places(home) == 0


def test_who_has_no_patience_passes_nobody_and_takes_no_place(home: Home) -> None:
    free = threading.Event()

    def locked(_: str) -> None:
        if not free.is_set():
            raise StoreError("database is locked")

    def wait() -> None:
        with closing(Turns(home.turns)) as first:
            assert first.begin(locked, LONG_S)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: places(home) == 1)
    with closing(Turns(home.turns)) as own:
        assert not own.begin(lambda _: None, 0.0)
        assert places(home) == 1
        assert not own.contended
        free.set()
        thread.join(LONG_S)
        assert own.begin(lambda _: None, 0.0)


async def test_a_process_that_others_wait_for_writes_little_at_a_time(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process waits for as long as a transaction takes, and may be gone before the next one begins."""
    monkeypatch.setattr(turns, "CONTENDED_S", 3600.0)
    free, meets = threading.Event(), threading.Event()

    def locked(_: str) -> None:
        if not free.is_set():
            raise StoreError("database is locked")

    def wait() -> None:
        with closing(Turns(home.turns)) as other:
            assert other.begin(locked, LONG_S)

    async def write(made: Journal, count: int) -> list[int]:
        """How many of so many units each transaction takes."""
        done = await asyncio.gather(*(made.commit(lambda transaction: transaction) for _ in range(count)))
        sizes = dict[int, int]()
        for transaction in done:
            sizes[id(transaction)] = sizes.get(id(transaction), 0) + 1
        return list(sizes.values())

    thread = threading.Thread(target=wait)

    def meet(_: Transaction) -> None:
        """While this is written another process comes to wait."""
        if not meets.is_set():
            thread.start()
        until(lambda: places(home) == 1)
        meets.set()

    made = Journal(home, clock=Clock(), signer=Signer(home.keys))
    try:
        assert await write(made, 100) == [100]
        await asyncio.gather(made.commit(meet), made.commit(lambda _: None))
        assert meets.is_set()
        free.set()
        thread.join(LONG_S)
        assert await write(made, 100) == [32, 32, 32, 4]
    finally:
        await made.close()


def _no_locks(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_locks, "available", lambda: False)


def _a_directory(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.turns.mkdir()


def _no_locks_on_this_file_system(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(record_locks, "anyone", refuse)


@pytest.mark.parametrize("spoil", [_no_locks, _a_directory, _no_locks_on_this_file_system])
async def test_without_a_queue_a_home_is_written_all_the_same(
    home: Home, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Home, pytest.MonkeyPatch], None]
) -> None:
    spoil(home, monkeypatch)
    journal = Journal(home, clock=Clock(), signer=Signer(home.keys))
    with closing(home.open_database()) as connection:
        connection.execute("BEGIN IMMEDIATE")
        written = asyncio.ensure_future(journal.append("test", "call", b"{}"))
        await asyncio.sleep(0)
        connection.execute("COMMIT")
        await written
        assert head(connection) == 1
    await journal.close()


async def test_the_file_of_turns_is_its_owners_alone_and_holds_nothing(home: Home) -> None:
    journal = Journal(home, clock=Clock(), signer=Signer(home.keys))
    await journal.append("test", "call", b"{}")
    assert stat.S_IMODE(home.turns.stat().st_mode) == 0o600
    assert home.turns.read_bytes() == b""
    await journal.close()

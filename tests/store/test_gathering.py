"""Who shares a write to disk: those who come together, and those who come one after the other in a crowd."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from pathlib import Path

import pytest
import pytest_asyncio

from interlock.core.clock import Clock
from interlock.store import journal as journals
from interlock.store import payloads
from interlock.store import writer as writers
from interlock.store.home import Home
from interlock.store.journal import Journal
from interlock.store.port import Transaction, Unit
from interlock.store.signing import Signer


@pytest_asyncio.fixture
async def journal(tmp_path: Path) -> AsyncGenerator[Journal]:
    home = Home(tmp_path)
    home.prepare()
    made = Journal(home, clock=Clock(), signer=Signer(home.keys))
    yield made
    await made.close()


async def crowd(journal: Journal) -> None:
    await asyncio.gather(*(journal.commit(lambda _: None) for _ in range(3)))


async def one_to_a_turn(journal: Journal, count: int) -> int:
    """Commit units that come in one after the other; in how many writes they went to disk."""
    coming: list[asyncio.Task[Transaction]] = []
    for _ in range(count):
        coming.append(asyncio.create_task(journal.commit(lambda transaction: transaction)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    writes = await asyncio.gather(*coming)
    return len({id(write) for write in writes})


async def test_in_a_crowd_those_who_come_one_to_a_turn_share_a_write(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "GATHER_S", 60.0)
    await crowd(journal)
    assert await one_to_a_turn(journal, 20) == 1


async def test_a_crowd_that_never_ends_is_not_waited_for(journal: Journal) -> None:
    await crowd(journal)
    first = asyncio.create_task(journal.commit(lambda _: None))
    async with asyncio.timeout(60):
        while not first.done():
            if journal.fill < 0.5:  # a disk may take its time, and the queue has an end
                journal.post(lambda _: None)
            await asyncio.sleep(0)


async def turns_of(journal: Journal, count: int) -> int:
    """How many turns of the loop go by before so many who come together are being written."""
    coming = [asyncio.create_task(journal.commit(lambda _: None)) for _ in range(count)]
    await asyncio.sleep(0)
    turns = 0
    while journal.fill:
        await asyncio.sleep(0)
        turns += 1
    await asyncio.gather(*coming)
    return turns


@pytest.mark.parametrize("size", [journals.LARGE, 2 * journals.LARGE])
async def test_a_large_crowd_that_is_all_here_is_waited_for_no_longer(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(journals, "GATHER_S", 60.0)
    await turns_of(journal, size)
    usual = await turns_of(journal, size)
    assert usual < journals.QUIET_TURNS
    assert await turns_of(journal, journals.LARGE // 2) > journals.QUIET_TURNS, "the others may still be coming"
    for _ in range(30):
        await turns_of(journal, 3)
    assert await turns_of(journal, journals.LARGE) == usual, "the crowd has become smaller, and that is known"


async def test_whoever_is_alone_does_not_wait_for_company(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they, after a while, where there was a crowd: a lone unit is on disk in the turn after it came."""
    monkeypatch.setattr(journals, "INLINE_BELOW_S", 60.0)  # whatever the disk, a lone unit is committed on the loop
    waited: list[int] = []
    for number in range(3 * journals.LONELY):
        if number == journals.LONELY:
            await crowd(journal)
        task, turns = asyncio.create_task(journal.commit(lambda _: None)), 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        waited.append(turns)
    before, after = waited[: journals.LONELY], waited[-journals.LONELY :]
    assert min(before) == min(after) <= 3
    assert max(waited[journals.LONELY : journals.LONELY + 2]) > 3


async def test_whoever_is_alone_is_on_disk_before_the_loop_turns(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "INLINE_BELOW_S", 60.0)
    assert journal.append("k", "one", b"{}").done()
    second, third = journal.append("k", "two", b"{}"), journal.append("k", "three", b"{}")
    assert not second.done(), "one turn's next may have company, and has"
    await asyncio.gather(second, third)
    assert [call for (call,) in journal.reader.all("SELECT call FROM journal ORDER BY seq")] == ["one", "two", "three"]


async def test_those_who_call_one_after_the_other_let_others_run(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller who never has to wait would keep the loop to himself."""
    monkeypatch.setattr(journals, "INLINE_BELOW_S", 60.0)
    turns = 0

    async def bystander() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(bystander())
    for number in range(20):
        await journal.append("k", str(number), b"{}")
    other.cancel()
    assert turns >= 10


async def test_large_units_are_written_one_by_one_and_others_have_their_turn_between_two(journal: Journal) -> None:
    """Each unit notes which transaction it was in; the head of the chain counts the records before it."""
    order: list[tuple[int, str]] = []

    def unit(name: str) -> Callable[[Transaction], tuple[Transaction, int]]:
        def work(transaction: Transaction) -> tuple[Transaction, int]:
            transaction.append("authority", name, b'{"call":"' + name.encode() + b'","kind":"authority"}')
            return transaction, transaction.head[0]

        return work

    async def large(name: str, then: str = "") -> Transaction:
        where, place = await journal.commit_large(unit(name))
        order.append((place, name))
        if then:
            await small(then)
        return where

    async def small(name: str) -> Transaction:
        where, place = await journal.commit(unit(name))
        order.append((place, name))
        return where

    first, second, *others = await asyncio.gather(large("A", "e"), large("B"), small("c"), small("d"))
    assert [name for _, name in sorted(order)] == ["c", "d", "A", "e", "B"]
    assert others[0] is others[1]
    assert len({id(first), id(second), id(others[0])}) == 3
    await journal.drain()


async def test_a_large_unit_is_not_written_on_the_event_loop(journal: Journal) -> None:
    loop = threading.get_ident()
    assert await journal.commit(lambda _: threading.get_ident()) == loop
    assert await journal.commit_large(lambda _: threading.get_ident()) != loop


async def test_whoever_writes_much_applies_the_log_before_a_commit_of_somebody_else_must(
    journal: Journal, tmp_path: Path
) -> None:
    def piece(number: int) -> Unit[None]:
        return lambda transaction: payloads.add_piece(transaction, "payload:x", number, memoryview(body), "x")

    body = bytes(payloads.PIECE_BYTES)
    before = (tmp_path / "interlock.db").stat().st_size
    for number in range(1, journals.APPLY_EVERY + 1):
        assert (tmp_path / "interlock.db").stat().st_size == before
        await journal.commit_large(piece(number))
    assert (tmp_path / "interlock.db").stat().st_size > before + (journals.APPLY_EVERY - 1) * len(body)
    assert journal.reader.all("SELECT count(*) FROM payload_piece") == [(journals.APPLY_EVERY,)]


async def test_a_process_that_goes_on_writing_has_a_log_that_is_long_enough_and_loses_nothing(
    journal: Journal, tmp_path: Path
) -> None:
    log = tmp_path / "interlock.db-wal"
    for number in range(writers.EXTEND_AFTER):
        assert log.stat().st_size < 4 * 2**20
        await journal.append("test", f"call-{number}", b"{}")
    async with asyncio.timeout(60):
        while log.stat().st_size < 4 * 2**20:
            await journal.append("test", "meanwhile", b"{}")
    await journal.append("test", "after", b"{}")
    assert log.stat().st_size > 1000 * 8192
    count = "SELECT count(*) FROM journal WHERE call IN ('call-0', 'after')"
    with closing(sqlite3.connect(tmp_path / "interlock.db")) as other:
        assert other.execute(count).fetchone() == (2,)
        assert other.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'filling'").fetchone() == (0,)
        assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_a_log_that_the_disk_has_no_room_for_stops_nobody(journal: Journal, tmp_path: Path) -> None:
    connection = journal.writer._connection  # pyright: ignore[reportPrivateUsage]
    (pages,) = connection.one("PRAGMA page_count")
    connection.execute(f"PRAGMA max_page_count={pages + 20}")
    for number in range(writers.EXTEND_AFTER + 1):
        await journal.append("test", f"call-{number}", b"{}")
    await journal.append("test", "after", b"{}")
    assert not journal.writer.extends
    assert (tmp_path / "interlock.db-wal").stat().st_size < 4 * 2**20
    assert connection.one("SELECT count(*) FROM journal WHERE call LIKE 'call-%'") == (writers.EXTEND_AFTER + 1,)


# Units that each change another page of a table, as idempotency keys do.
_SPREAD = """
import asyncio, sys
from pathlib import Path
from interlock.core.clock import Clock
from interlock.store import facts
from interlock.store.home import Home
from interlock.store.journal import Journal
from interlock.store.signing import Signer

def unit(numbers, value):
    def work(transaction):
        for number in numbers:
            facts.put(transaction, f"test:{number:05}", value)
    return work

async def main():
    home = Home(Path(sys.argv[1]))
    home.prepare()
    journal = Journal(home, clock=Clock(), signer=Signer(home.keys))
    await journal.commit(unit(range(4000), "x" * 200))
    before = Path(sys.argv[2]).stat().st_mtime_ns
    await asyncio.gather(*(journal.commit(unit([number], "y")) for number in range(0, 4000, 100)))
    changed = journal.reader.all("SELECT count(*) FROM fact WHERE value = 'y'")
    print(changed, Path(sys.argv[2]).stat().st_mtime_ns == before)
    await journal.close()

asyncio.run(main())
"""


def test_a_batch_that_changes_many_pages_makes_no_file_outside_of_the_data_directory(tmp_path: Path) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    command = [sys.executable, "-c", _SPREAD, str(tmp_path / "home"), str(temporary)]
    surroundings = {**os.environ, "SQLITE_TMPDIR": str(temporary)}
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[(40,)] True\n", done.stderr


async def test_a_log_that_cannot_be_applied_now_stops_nobody(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "APPLY_EVERY", 1)
    with closing(sqlite3.connect(journal._home.database, isolation_level=None)) as reader:  # pyright: ignore[reportPrivateUsage]
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM fact").fetchone()
        assert await journal.commit_large(lambda _: 1) == 1

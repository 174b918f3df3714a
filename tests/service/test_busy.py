"""Long reads while others call: the loop goes on turning."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from interlock import Failure, Interlock
from interlock.api.audit import Audit, Sought
from interlock.audit.exported import AT_A_TIME
from interlock.audit.retention import purge
from interlock.store import records
from interlock.store.port import Transaction
from interlock.store.readers import THREADS

MANY = 50_000
YEAR_MS = 366 * 86_400_000


class Heart:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.beats = 0

    async def beat(self) -> None:
        while True:
            self.beats += 1
            await asyncio.sleep(0)


@asynccontextmanager
async def beating() -> AsyncGenerator[Heart]:
    heart = Heart()
    task = asyncio.create_task(heart.beat())
    await asyncio.sleep(0)
    try:
        yield heart
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def fill(app: Interlock, count: int) -> None:
    """Records, as many as a busy week leaves."""

    def unit(transaction: Transaction) -> None:
        for number in range(count):
            body = records.plain("audit.read", f"r{number}", transaction.now_ms, by="local:a", what="call")
            transaction.append("audit.read", f"r{number}", body)

    await app.journal.commit(unit)


async def test_an_export_of_many_records_leaves_the_loop_to_others_between_its_slices(app: Interlock) -> None:
    await fill(app, MANY)
    stream = await Audit(app).export(by=app.caller, door="rest")
    lines = before = slices = 0
    async with beating() as heart:
        async for piece in stream:
            assert heart.beats > before, "no turn of the loop since the last slice"
            before = heart.beats
            slices += 1
            assert piece.count(b"\n") <= AT_A_TIME + 1
            lines += piece.count(b"\n")
    assert slices >= MANY // AT_A_TIME
    assert lines > MANY


async def test_a_search_that_finds_nothing_leaves_the_loop_to_others(app: Interlock) -> None:
    await fill(app, MANY)
    async with beating() as heart:
        before = heart.beats
        found, after = await Audit(app).records(Sought(caller="nobody"), by=app.caller, door="rest")
        assert heart.beats > before + 1
    assert found == []
    assert after is not None


def _files(app: Interlock) -> int:
    """How often this process has the database open."""
    files = Path("/proc/self/fd")
    return sum(os.path.realpath(one) == str(app.home.database) for one in files.iterdir())


async def test_an_export_that_is_given_up_half_way_lets_go_of_the_database(app: Interlock) -> None:
    await fill(app, 5 * AT_A_TIME)
    before = _files(app)
    for _ in range(20):
        stream = await Audit(app).export(by=app.caller, door="rest")
        assert orjson.loads((await anext(stream)).split(b"\n")[0])["seq"] == 1
        await stream.aclose()
    # SQLite keeps a file that it has closed for the next connection while another one holds a lock.
    assert _files(app) <= before + THREADS + 1


async def test_an_export_says_so_when_retention_removes_what_is_being_read(app: Interlock) -> None:
    await fill(app, 5 * AT_A_TIME)
    journal = Audit(app)
    upto = await journal.begin_export(by=app.caller, door="rest")
    stream = journal.lines(upto)
    await anext(stream)
    later = app.clock.now_ms() + 20 * YEAR_MS
    await asyncio.to_thread(purge, app.home, app.settings, now_ms=later, by="local:a")
    with pytest.raises(Failure) as refused:
        await anext(stream)
    assert refused.value.code == "E3410"
    assert "purged" in refused.value.message

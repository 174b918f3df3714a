"""A home that others write to while somebody looks at it: nothing that is in order is called broken."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from typing import Any

import pytest
import pytest_asyncio

from interlock import Interlock
from interlock.api.audit import Audit
from interlock.api.doctor import examine
from interlock.audit.chain import verify
from interlock.store.connection import SqliteConnection

pytestmark = pytest.mark.sqlite_only("the statements of a reader are interrupted where they reach SQLite")


@pytest_asyncio.fixture
async def between(app: Interlock, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A call is recorded and signed before each statement of a reader, but for those that the call itself needs."""
    loop, statements = asyncio.get_running_loop(), list[str]()
    own = {threading.current_thread().name, "interlock-changes"}
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    async def write() -> None:
        await app.call("demo.increment", name="a", key=f"k-{len(statements)}")
        await app.journal.drain()
        app.journal.anchor()

    class Interrupted(SqliteConnection):
        def execute(self, *given: Any) -> sqlite3.Cursor:
            if threading.current_thread().name in own:
                return super().execute(*given)
            statements.append(str(given[0]))
            asyncio.run_coroutine_threadsafe(write(), loop).result(60)
            return super().execute(*given)

    def interrupted(address: Any, **how: Any) -> sqlite3.Connection:
        return connect(address, **(how | {"factory": Interrupted} if "mode=ro" in str(address) else how))

    monkeypatch.setattr(sqlite3, "connect", interrupted)
    return statements


async def test_doctor_finds_nothing_broken_in_a_home_that_is_written_between_its_statements(
    app: Interlock, between: list[str]
) -> None:
    findings = await asyncio.to_thread(examine, app.home, machine=False)
    assert len(between) > 10
    assert [one for one in findings if one.status == "broken"] == []


async def test_verify_finds_the_chain_intact_in_a_home_that_is_written_between_its_statements(
    app: Interlock, between: list[str]
) -> None:
    verdict = await asyncio.to_thread(verify, app.home)
    assert len(between) > 10
    assert verdict.faults == ()
    assert verdict.anchors > 1


async def test_a_page_of_records_is_as_the_journal_was_at_one_moment(app: Interlock, between: list[str]) -> None:
    from interlock.api.audit import Sought

    found, after = await Audit(app).records(Sought(), by=app.caller, door="rest", limit=1000)
    seqs = [one["seq"] for one in found]
    assert between
    assert seqs == list(range(1, len(seqs) + 1))
    assert after is None

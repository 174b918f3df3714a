"""The contract of a unit: what raises leaves nothing behind, and nobody else in the batch hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings

from interlock.audit.chain import verify
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.store import records
from interlock.store.home import Home
from interlock.store.journal import Journal
from interlock.store.port import EarlyRow, StatementError, StoreError, Transaction, Unit
from interlock.store.signing import Signer
from interlock.store.writer import Writer
from tests import rehearsal


@pytest_asyncio.fixture
async def journal(tmp_path: Path) -> AsyncGenerator[Journal]:
    home = Home(tmp_path)
    home.prepare()
    made = Journal(home, clock=Clock(), signer=Signer(home.keys))
    yield made
    await made.close()
    assert verify(home).intact


def noting(name: str, fail: Callable[[Transaction], Any] | None = None) -> Unit[str]:
    """A unit that writes to a table and to the chain, and then fails in some way."""

    def unit(transaction: Transaction) -> str:
        transaction.execute("INSERT INTO fact (name, value) VALUES (?, 'x')", (name,))
        body = records.plain("authority", name, transaction.now_ms, act="noted")
        transaction.append("authority", name, body)
        if fail is not None:
            fail(transaction)
        return name

    return unit


def _raise(error: Exception) -> Callable[[Transaction], Any]:
    def fail(_: Transaction) -> None:
        raise error

    return fail


def _again(transaction: Transaction) -> None:
    transaction.execute("INSERT INTO fact (name, value) SELECT name, value FROM fact LIMIT 1")


WAYS: dict[str, Callable[[Transaction], Any]] = {
    "a refusal": _raise(Failure("E3604", "the key cannot be read")),
    "an accident": _raise(KeyError("missing")),
    "an iteration that ended": _raise(StopIteration()),
    "a statement that cannot be": lambda transaction: transaction.execute("SELECT FROM WHERE"),
    "a row that is there already": _again,
    "a disk that fails": _raise(StoreError("disk I/O error")),
}


def present(journal: Journal, name: str) -> tuple[int, int]:
    ((facts,),) = journal.reader.all("SELECT COUNT(*) FROM fact WHERE name = ?", (name,))
    ((rows,),) = journal.reader.all("SELECT COUNT(*) FROM journal WHERE call = ?", (name,))
    return facts, rows


def refusing(name: str, *, records_first: bool) -> Unit[str]:
    """A unit that writes to no table before it fails."""

    def unit(transaction: Transaction) -> str:
        assert transaction.one("SELECT 1 FROM fact WHERE name = ?", (name,)) is None
        if records_first:
            transaction.append("authority", name, records.plain("authority", name, transaction.now_ms, act="noted"))
        raise Failure("E3604", "the key cannot be read")

    return unit


def run_once(unit: Unit[Any], transaction: Transaction) -> Any:
    """What the writer does outside of tests. Only then are rows of several units written together."""
    return unit(transaction)


def handing_over(name: str, fail: Callable[[Transaction], Any] | None = None) -> Unit[str]:
    """A unit whose row is written together with those of other units."""

    def unit(transaction: Transaction) -> str:
        transaction.later("INSERT INTO fact (name, value) VALUES {rows}", (name, "x"))
        transaction.append("authority", name, records.plain("authority", name, transaction.now_ms, act="noted"))
        if fail is not None:
            fail(transaction)
        return name

    return unit


def _row_twice(transaction: Transaction) -> None:
    row = transaction.one("SELECT name, value FROM fact ORDER BY name LIMIT 1")
    transaction.later("INSERT INTO fact (name, value) VALUES {rows}", row)


LATER: dict[str, Callable[[Transaction], Any] | None] = {
    "a row for later": None,
    "a row for later, then a refusal": WAYS["a refusal"],
    "a row for later, a look, then an accident": lambda transaction: transaction.all("SELECT 1 FROM fact") and 1 / 0,
    "a row for later that is there already": _row_twice,
}
EARLY: dict[str, Callable[[Transaction], Any] | None] = {
    "an early row": None,
    "an early row, then a refusal": WAYS["a refusal"],
}
SUCCEED = ("", "a row for later", "an early row")

# Where nothing has to be undone in a table, no savepoint is rolled back.
WITHOUT_ROWS = {"a refusal after a look": False, "a refusal after a record": True}


def early_row(name: str, row_id: str) -> EarlyRow:
    """A fact of this name, unless there is one."""
    statement = (
        "INSERT INTO fact (name, value) SELECT column1, column2 FROM (SELECT ? AS now_ms), (VALUES {rows})"
        " WHERE now_ms > 0 ON CONFLICT (name) DO NOTHING RETURNING value"
    )
    return EarlyRow(statement, row_id, (name, row_id))


def asking(row: EarlyRow, fail: Callable[[Transaction], Any] | None = None) -> Unit[str]:
    """A unit that asks whether its early row was inserted, and returns an empty text if it was not."""

    def unit(transaction: Transaction) -> str:
        if not transaction.inserted(row):
            return ""
        transaction.append("authority", row.id, records.plain("authority", row.id, transaction.now_ms, act="noted"))
        if fail is not None:
            fail(transaction)
        return row.id

    return unit


def submitted(journal: Journal, name: str, way: str) -> asyncio.Future[str]:
    if way in EARLY:
        row = early_row(name, name)
        return journal.submit(asking(row, EARLY[way]), row)
    if way in WITHOUT_ROWS:
        return journal.submit(refusing(name, records_first=WITHOUT_ROWS[way]))
    if way in LATER:
        return journal.submit(handing_over(name, LATER[way]))
    return journal.submit(noting(name, WAYS.get(way)))


@pytest.mark.parametrize("way", WAYS)
async def test_a_unit_that_raises_leaves_nothing_in_the_tables_or_the_chain(journal: Journal, way: str) -> None:
    with pytest.raises(Exception) as raised:  # each way has its own, and none is a success
        await journal.commit(noting("alone", WAYS[way]))
    assert type(raised.value) is not StoreError, "an error of the database itself is raised as a Failure"
    assert present(journal, "alone") == (0, 0)
    assert await journal.commit(noting("alone")) == "alone"
    assert present(journal, "alone") == (1, 1)


@pytest.mark.parametrize("rehearsed", [True, False])
@given(ways=st.lists(st.sampled_from([*SUCCEED, *WAYS, *WITHOUT_ROWS, *LATER, *EARLY]), min_size=2, max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
async def test_in_a_batch_each_unit_gets_its_own_answer_and_nothing_of_another(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, rehearsed: bool, ways: list[str]
) -> None:
    if not rehearsed:
        monkeypatch.setattr(Writer, "perform", staticmethod(run_once))
    batch = f"{await journal.commit(lambda transaction: transaction.head[0])}"
    names = [f"{batch}.{number}" for number in range(len(ways))]
    sent = [submitted(journal, name, way) for name, way in zip(names, ways, strict=True)]
    answers = await asyncio.gather(*sent, return_exceptions=True)
    for name, way, answer in zip(names, ways, answers, strict=True):
        assert answer == name if way in SUCCEED else isinstance(answer, Exception)
        assert present(journal, name) == ((1, 1) if way in SUCCEED else (0, 0))
        await journal.commit(
            lambda transaction: transaction.append("authority", "n", records.plain("authority", "n", 0))
        )


async def test_rows_of_many_units_are_written_with_few_statements_and_found_by_the_next(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writer, "perform", staticmethod(run_once))
    statements: list[str] = []
    traced: Any = journal.writer._connection  # pyright: ignore[reportPrivateUsage]
    traced.set_trace_callback(statements.append)

    def count(transaction: Transaction) -> int:
        return transaction.one("SELECT COUNT(*) FROM fact WHERE name LIKE 'row %'")[0]

    units: list[Unit[Any]] = [handing_over(f"row {number}") for number in range(100)]
    answers = await asyncio.gather(*map(journal.commit, [*units[:70], count, *units[70:]]))
    assert answers[70] == 70
    assert await journal.commit(count) == 100
    assert (
        sum("'row " in one for one in statements if one.startswith("INSERT INTO fact")) == 3 + 4
    )  # 64 + 4 + 2, then 16 + 8 + 4 + 2
    traced.set_trace_callback(None)


async def test_early_rows_of_many_units_are_inserted_with_few_statements_and_the_first_to_ask_gets_its_row(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writer, "perform", staticmethod(run_once))
    await journal.commit(noting("taken"))
    statements: list[str] = []
    traced: Any = journal.writer._connection  # pyright: ignore[reportPrivateUsage]
    traced.set_trace_callback(statements.append)
    rows = [
        early_row(name, f"row {number}") for number, name in enumerate(("a", "b", "taken", "a", *map(str, range(66))))
    ]
    answers = await asyncio.gather(*(journal.submit(asking(row), row) for row in rows))
    traced.set_trace_callback(None)
    assert answers == ["row 0", "row 1", "", "", *(f"row {number}" for number in range(4, 70))]
    assert sum(one.startswith("INSERT INTO fact") for one in statements) == 3  # 64 + 4 + 2
    assert await journal.commit(asking(rows[0])) == ""
    assert await journal.commit(asking(early_row("alone", "alone"))) == "alone"


async def test_a_record_that_cannot_be_stored_fails_alone(journal: Journal) -> None:
    broken: Any = None
    answers = await asyncio.gather(
        journal.commit(noting("first")),
        journal.append(broken, "second", b"{}"),
        journal.commit(noting("third")),
        return_exceptions=True,
    )
    assert (answers[0], answers[2]) == ("first", "third")
    assert isinstance(answers[1], StatementError)
    assert present(journal, "first") == present(journal, "third") == (1, 1)


async def test_what_nobody_waits_for_is_logged_when_it_fails(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    journal.post(noting("posted", WAYS["an accident"]))
    await journal.drain()
    assert "nobody waited for" in caplog.text
    assert present(journal, "posted") == (0, 0)


async def test_a_piece_of_a_unit_can_fail_while_the_unit_goes_on(journal: Journal) -> None:
    def unit(transaction: Transaction) -> str:
        try:
            transaction.apart(noting("piece", WAYS["a refusal"]), transaction)
        except Failure:
            return noting("rest")(transaction)
        return ""

    assert await journal.commit(unit) == "rest"
    assert (present(journal, "piece"), present(journal, "rest")) == ((0, 0), (1, 1))


@pytest.mark.parametrize("alone", [True, False])
async def test_a_unit_with_side_effects_is_found_by_the_rehearsal(journal: Journal, alone: bool) -> None:
    seen: list[int] = []
    count = 0

    def counts(_: Transaction) -> None:
        nonlocal count
        count += 1

    def differs(_: Transaction) -> int:
        return next(numbers)

    def writes(transaction: Transaction) -> None:
        transaction.append("authority", "n", records.plain("authority", "n", next(numbers)))

    numbers = iter(range(100))
    units: list[Unit[Any]] = [lambda _: seen.append(1), counts, differs, writes]
    if alone:
        for unit in units:
            with pytest.raises(AssertionError, match="contract"):
                await journal.commit(unit)
    else:
        answers = await asyncio.gather(*map(journal.commit, units), return_exceptions=True)
        assert all(isinstance(answer, AssertionError) for answer in answers)
    assert len(rehearsal.broken) == 4
    rehearsal.broken.clear()

"""Everything that hands rows to repositories satisfies the port of the store."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import closing
from pathlib import Path

import pytest
import pytest_asyncio

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.store import facts
from interlock.store.home import Home
from interlock.store.journal import Journal
from interlock.store.port import Reader, StoreError, Transaction
from interlock.store.readers import Readers
from interlock.store.signing import Signer

_NAMES = "SELECT name, value FROM fact WHERE name LIKE 'port:%' ORDER BY name"


@pytest_asyncio.fixture
async def journal(tmp_path: Path) -> AsyncGenerator[Journal]:
    home = Home(tmp_path)
    home.prepare()
    made = Journal(home, clock=Clock(), signer=Signer(home.keys))
    await made.commit(_filled)
    yield made
    await made.close()


def _filled(transaction: Transaction) -> None:
    facts.put(transaction, "port:one", "1")
    facts.put(transaction, "port:two", "2")


def _read(reader: Reader) -> tuple[object, ...]:
    rows = [("port:one", "1"), ("port:two", "2")]
    assert reader.one(_NAMES) == rows[0]
    assert reader.one("SELECT name FROM fact WHERE name = ?", ("port:none",)) is None
    assert reader.all(_NAMES) == rows
    assert list(reader.each(_NAMES)) == rows
    return reader.one("SELECT count(*) FROM fact WHERE name = ?", ("port:one",))


async def test_a_transaction_the_journals_reader_and_a_connection_read_the_same(
    journal: Journal, tmp_path: Path
) -> None:
    assert await journal.commit(_read) == (1,)
    assert _read(journal.reader) == (1,)
    with closing(Home(tmp_path).reading()) as connection:
        assert _read(connection) == (1,)
    threads = Readers(Home(tmp_path))
    try:
        assert await threads.read(_read) == (1,)
    finally:
        threads.close()


async def test_a_read_that_fails_is_a_failure_from_the_journals_reader_and_the_drivers_error_elsewhere(
    journal: Journal, tmp_path: Path
) -> None:
    for read in (journal.reader.one, journal.reader.all, journal.reader.each):
        with pytest.raises(Failure):
            read("SELECT 1 FROM nowhere")
    with closing(Home(tmp_path).reading()) as connection:
        for read in (connection.one, connection.all, connection.each):
            with pytest.raises(StoreError):
                read("SELECT 1 FROM nowhere")


async def test_a_fact_is_set_anew_set_once_listed_by_range_and_removed(journal: Journal) -> None:
    def unit(transaction: Transaction) -> tuple[bool, bool]:
        facts.put(transaction, "port:one", "new")
        return facts.put_once(transaction, "port:one", "other"), facts.put_once(transaction, "port:three", "3")

    assert await journal.commit(unit) == (False, True)
    assert facts.get(journal.reader, "port:one") == "new"
    assert facts.get(journal.reader, "port:none") is None
    await journal.commit(lambda transaction: facts.remove(transaction, "port:two"))
    assert facts.between(journal.reader, "port:", "port;") == [("port:one", "new"), ("port:three", "3")]

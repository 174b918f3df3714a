"""A PostgreSQL server whose disk is full: no write runs without its record, and all goes on when there is room."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import ExitStack, suppress
from pathlib import Path

import psycopg
import pytest

from interlock import Interlock
from interlock.audit.chain import verify
from interlock.store.homes import home_at
from tests import sample
from tests.sample import world
from tests.support.calls import code
from tests.support.disks import small_disk
from tests.support.postgres import Server

# The tables of an empty store take 4 MiB. The server's log of changes is not there: without room for it, it ends.
MEBIBYTES = 16
REFUSED = ("E3801", "E3803")


@pytest.fixture
def server() -> Generator[Server]:
    with ExitStack() as stack:
        server = Server()
        stack.callback(server.remove)
        place = server.place / "small"
        place.mkdir()
        stack.enter_context(small_disk(place, MEBIBYTES))
        stack.callback(server.stop)  # it has files there
        server.give(place)
        with server.connect() as connection:
            connection.execute(f"CREATE TABLESPACE small LOCATION '{place}'".encode())
        yield server


def fill(server: Server) -> None:
    """Take all room that is left, row by row: one that does not fit takes none."""
    with server.connect() as connection:
        connection.execute(b"CREATE TABLE junk (data text) TABLESPACE small")
        connection.execute(b"ALTER TABLE junk ALTER COLUMN data SET STORAGE PLAIN")
        for rows in (100, 10, 1):
            with suppress(psycopg.errors.DiskFull):
                while True:
                    connection.execute(
                        b"INSERT INTO junk SELECT repeat('x', 7000) FROM generate_series(1, %s)", (rows,)
                    )


@pytest.mark.proves("AUDIT-04")
async def test_while_the_disk_of_the_server_is_full_no_write_runs_and_everything_goes_on_afterwards(
    tmp_path: Path, server: Server
) -> None:
    sample.reset()
    address = f"{server.new_schema()}%20-cdefault_tablespace%3Dsmall"
    async with Interlock.open(tmp_path / "home", store=address, housekeeping=False) as app:
        await app.add(sample.increment)
        assert (await app.call("demo.increment", name="a", key="before")).ok
        await asyncio.to_thread(fill, server)

        # Pages that the tables had already take some more records.
        ended: list[str | None] = []
        while len(ended) < 4 or not all(one in REFUSED for one in ended[-3:]):
            ended.append(code(await app.call("demo.increment", {"name": "a"}, key=f"full-{len(ended)}")))
            assert len(ended) < 2000, "the disk never filled"
        assert world.runs == 1 + ended.count(None) + ended.count("E3409")
        told = (await app.call("demo.increment", {"name": "a"}, key="told")).error
        assert told is not None
        assert (told.code, told.retryable, "make room" in told.resolution) == ("E3803", True, True)

        with server.connect() as connection:
            connection.execute(b"DROP TABLE junk")
            connection.execute(b"CHECKPOINT")  # which removes the file
        assert (await app.call("demo.increment", {"name": "a"}, key="after")).ok
        # An effect that could not be recorded at first is on record by now, and its key replays it.
        for number, one in enumerate(ended):
            if one == "E3409":
                assert (await app.call("demo.increment", {"name": "a"}, key=f"full-{number}")).replayed
    assert verify(home_at(tmp_path / "home", address)).intact

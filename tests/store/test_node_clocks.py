"""Two processes on one PostgreSQL store whose clocks are six hours ahead and six hours behind: the store's time counts.

Time passes for a row by moving its times back, so that no test waits for it.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
import pytest_asyncio

from interlock import Interlock
from interlock.api.doctor import Finding, examine
from interlock.core.clock import Clock
from interlock.store import records
from interlock.store.homes import home_at
from interlock.store.postgres.server_time import ServerTime
from interlock.testing import FakeClock
from tests import sample
from tests.support import skewed
from tests.support.cli import Cli
from tests.support.cluster import NOT_COPIED, run
from tests.support.postgres import Server

AHEAD, BEHIND = 6.0, -6.0
# Between clocks of two processes, as far as they know the store's time.
MOMENTS_S = 30.0
HOUR_S = 3600


class Place(NamedTuple):
    """A store and two data directories for it."""

    address: str
    homes: tuple[Path, Path]

    def do(self, statement: str) -> list[Any]:
        """Do something to the store behind the program's back."""
        with closing(psycopg.connect(self.address, autocommit=True)) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def nodes(self) -> Generator[tuple[skewed.Node, skewed.Node]]:
        """A node whose clock is ahead, and one whose clock is behind."""
        ahead, behind = self.homes
        with (
            skewed.started(ahead, self.address, hours=AHEAD) as one,
            skewed.started(behind, self.address, hours=BEHIND) as two,
        ):
            yield one, two


def a_year_ago() -> datetime:
    now = datetime.now(UTC)
    return now.replace(year=now.year - 1, day=28 if (now.month, now.day) == (2, 29) else now.day)


@pytest_asyncio.fixture
async def make_place(tmp_path: Path, postgres_server: Server) -> AsyncGenerator[Any]:
    async def make(at: datetime | None = None) -> Place:
        """A store with the sample tools. With `at`, that is when it was made."""
        address = postgres_server.new_schema()
        homes = tmp_path / "ahead", tmp_path / "behind"
        at_ms = None if at is None else round(at.timestamp() * 1000)
        clock = None if at_ms is None else replace(Clock(), now_ms=lambda: at_ms)
        async with Interlock.open(homes[0], store=address, clock=clock, housekeeping=False) as app:
            await app.add(sample.increment, sample.send)
            await app.journal.append("checkpoint", "old", records.plain("checkpoint", "old", app.clock.now_ms()))
        shutil.copytree(*homes, ignore=NOT_COPIED)
        return Place(address, homes)

    yield make


@pytest.mark.proves("IDEM-04")
async def test_nodes_whose_clocks_are_hours_apart_replay_within_the_window_and_neither_lengthens_it(
    make_place: Any,
) -> None:
    place = await make_place()

    def check() -> None:
        with place.nodes() as both:
            for number, (one, other) in enumerate((both, both[::-1])):
                call: dict[str, Any] = {"tool": "demo.increment", "key": f"k{number}", "name": f"k{number}"}
                fresh = {"state": "succeeded", "replayed": False, "code": None}
                assert one.ask("call", **call) == fresh
                for seconds in (0, HOUR_S - 60):  # the window is an hour
                    place.do(f"UPDATE reservation SET expires_ms = expires_ms - {seconds * 1000}")
                    for node in both:
                        node.ask("maintain")
                        assert node.ask("call", **call) == {**fresh, "replayed": True}
                place.do("UPDATE reservation SET expires_ms = expires_ms - 60000")
                assert other.ask("call", **call) == fresh

    await asyncio.to_thread(check)


@pytest.mark.parametrize("by", [0, 1])
async def test_a_breaker_and_a_suspension_end_when_they_should_on_nodes_whose_clocks_are_hours_apart(
    make_place: Any, by: int
) -> None:
    place = await make_place()

    def check() -> None:
        with place.nodes() as both:
            both[by].ask("fail", service="bank", timeout_s=600)
            for node in both:
                told = node.ask("enter", service="bank")
                assert told["code"] == "E3501", told
                assert 0 < told["wait_s"] <= 600 + MOMENTS_S
            place.do("UPDATE breaker SET until_ms = until_ms - 600000")
            place.do("UPDATE fact SET value = '999' WHERE name = 'service_epoch'")
            assert both[1 - by].ask("enter", service="bank")["code"] is None
            both[by].ask("suspend", service="shop", for_s=600)
            for node in both:
                told = node.ask("enter", service="shop")
                assert told["code"] == "E3504", told
                assert 0 < told["wait_s"] <= 600 + MOMENTS_S

    await asyncio.to_thread(check)


@pytest.mark.parametrize("by", [0, 1])
async def test_a_standing_approval_ends_when_it_should_on_nodes_whose_clocks_are_hours_apart(
    make_place: Any, by: int
) -> None:
    place = await make_place()

    def check() -> None:
        with place.nodes() as both:
            both[by].ask("grant", lifetime_s=HOUR_S)
            ((left_ms,),) = place.do("SELECT expires_ms - extract(epoch FROM clock_timestamp()) * 1000 FROM standing")
            assert 0 < left_ms / 1000 <= HOUR_S + MOMENTS_S
            for number, node in enumerate(both):
                assert node.ask("call", tool="demo.send", key=f"a{number}", to="team-a")["state"] == "succeeded"
            place.do(f"UPDATE standing SET expires_ms = expires_ms - {HOUR_S * 1000}")
            for number, node in enumerate(both):
                assert node.ask("call", tool="demo.send", key=f"b{number}", to="team-a")["code"] == "E3208"

    await asyncio.to_thread(check)


@pytest.mark.parametrize("by", [0, 1])
@pytest.mark.parametrize(("hours", "kept"), [(3, 1), (-3, 0)])
async def test_records_are_removed_at_their_term_by_nodes_whose_clocks_are_hours_wrong(
    make_place: Any, by: int, hours: int, kept: int
) -> None:
    place = await make_place(a_year_ago() + timedelta(hours=hours))

    def check() -> None:
        with place.nodes() as both:
            assert both[by].ask("maintain") == kept

    await asyncio.to_thread(check)


@pytest.mark.parametrize(("hours", "how"), [(AHEAD, "ahead of"), (BEHIND, "behind")])
async def test_doctor_names_a_machine_whose_clock_is_not_that_of_the_server(
    make_place: Any, monkeypatch: pytest.MonkeyPatch, hours: float, how: str
) -> None:
    place = await make_place()
    (place.homes[0] / "settings.toml").write_text(f'store = "{place.address}"\n')

    def told() -> Finding:
        (found,) = [one for one in examine(home_at(place.homes[0]), machine=False) if one.name == "clock"]
        return found

    assert told().status == "good"
    right = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: right() + round(hours * HOUR_S * 1e9))
    found = told()
    assert found.status == "attention"
    assert found.what.endswith(f" {how} the clock of the database server")


WRONG = """
import sys
import time

right, shift_ns = time.time_ns, round(float({hours}) * 3600e9)
time.time_ns = lambda: right() + shift_ns
time.time = lambda: time.time_ns() / 1e9
import interlock.cli
sys.argv[0] = "interlock"
interlock.cli.main()
"""


@pytest.mark.parametrize("hours", [AHEAD, BEHIND])
async def test_the_command_line_counts_back_from_the_time_of_the_server(make_place: Any, hours: float) -> None:
    place = await make_place()
    async with Interlock.open(place.homes[0], store=place.address, housekeeping=False) as app:
        app.catalog.attach(sample.increment)
        assert (await app.call("demo.increment", name="a", key="k")).ok
        await app.secrets.set("mail", "hunter2", by="local:ben", expires_ms=app.clock.now_ms() + 3 * HOUR_S * 1000)
    cli = Cli(place.homes[0].parent, {"INTERLOCK_HOME": str(place.homes[0]), "INTERLOCK_STORE": place.address})

    def ask(*words: str) -> str:
        ended = run(cli, ("-c", WRONG.format(hours=hours)), *words)
        assert ended.code == 0, ended.err
        return ended.out

    for command in (("list",), ("top", "--by", "calls")):
        shown = await asyncio.to_thread(ask, "calls", *command, "--since", "2h", "--json")
        assert "demo.increment" in shown
        ended = await asyncio.to_thread(ask, "calls", *command, "--until", "2h", "--json")
        assert "demo.increment" not in ended
    assert "expired" not in await asyncio.to_thread(ask, "secrets", "list")


def test_a_slow_reading_of_the_servers_clock_moves_nothing_and_one_that_contradicts_does() -> None:
    clock = FakeClock(now_ms=5)
    told = ServerTime(clock.clock)
    assert told.now_ms() == 5
    up = told.uptime()
    told.learn(1_000_000, up)
    assert told.now_ms() == 1_000_000
    clock.now_ms -= 6 * HOUR_S * 1000  # somebody sets the clock of the machine
    clock.advance(10)
    assert told.now_ms() == 1_010_000
    told.learn(1_005_000, up)  # it was asked 10 s ago, and looked at its clock 5 s ago
    assert told.now_ms() == 1_010_000
    told.learn(1_011_000, told.uptime() - 1)  # the server's clock is a second further at least
    assert told.now_ms() == 1_011_000
    told.learn(1_009_000, told.uptime() - 1)  # and here a second behind that
    assert told.now_ms() == 1_010_000

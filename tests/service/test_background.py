"""Background work of a process survives what it meets in the home, and says what it could not do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from interlock import Interlock
from interlock.api.doctor import examine
from interlock.api.doctor.findings import Finding
from interlock.api.health import Health
from interlock.store.homes import home_at
from interlock.telemetry.alerts import Alert
from tests import sample
from tests.support import stores

WITHIN_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - whatever makes it true has no event to wait for
            await asyncio.sleep(0.01)


def edit(home: Path, statement: str, *values: str) -> None:
    with stores.opened(home_at(home)) as connection:
        connection.execute(statement, values)


def told_by_doctor(home: Path) -> list[Finding]:
    return [one for one in examine(home_at(home), machine=False) if one.name == "background"]


async def test_a_damaged_ticket_is_told_everywhere_and_stops_no_other_work(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with Interlock.open(home, ask_all_writes=True) as app:
        heard: list[Alert] = []
        app.gateway.telemetry.alerts.listeners.append(heard.append)
        await app.add(sample.increment)
        assert (await app.call("demo.increment", name="a", key="k")).pending
        (chain,) = app.journal.reader.all("SELECT chain FROM ticket")[0]
        edit(home, "UPDATE ticket SET chain = ?", "not JSON")

        await until(lambda: bool(heard))
        alert = heard[0]
        assert (alert.name, alert.severity, alert.facts["task"]) == ("BACKGROUND_TASK_FAILED", "critical", "tickets")
        condition, parts = await Health(app).ready()
        assert (condition, parts["background"]) == ("degraded", "degraded")
        await until(lambda: bool(told_by_doctor(home)))  # on a server with the next renewal of the lease
        (finding,) = told_by_doctor(home)
        assert finding.status == "attention"
        assert "tickets" in finding.what
        assert "log" in finding.advice

        # The other jobs go on: what is written now is signed though nothing more is written.
        await app.journal.append("read", "c", b'{"kind":"read","call":"c"}')
        head = app.journal.reader.all("SELECT MAX(seq) FROM journal")[0][0]
        await until(lambda: app.journal.reader.all("SELECT MAX(seq) FROM anchor")[0][0] >= head)

        edit(home, "UPDATE ticket SET chain = ?", chain)
        await until(lambda: not app.supervisor.failing)
        await until(lambda: not told_by_doctor(home))


async def test_no_sign_of_a_process_is_left_when_it_has_ended(tmp_path: Path) -> None:
    home = home_at(tmp_path / "home")
    async with Interlock.open(home.path, housekeeping=False) as app:
        app.instance.report({"failing": [["tickets", 3, "TypeError"]]})
        reported = [["tickets", 3, "TypeError"]]
        await until(lambda: [told.get("failing") for _, told in home.signs_of_life()] == [reported])
    assert list(home.signs_of_life()) == []

"""kill -9 at every point of a ticket's life, and a machine that is down when it expires: no decision lost or forged."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from interlock import Interlock, Result
from interlock.audit.chain import verify
from interlock.store.homes import home_at
from interlock.testing import FakeClock
from tests.crash.approver import BASE_MS, BEN, ESCALATION, EXPIRY, LIFE, opening, stamp
from tests.support import forked
from tests.support.calls import admit
from tests.support.counter import effects

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)  # many processes start and die, one after the other
DAY = 86_400


class Scene:
    """A home, the effects made in it, and what dead processes had acknowledged."""

    def __init__(self, path: Path) -> None:
        self.home, self.lines = path / "home", path / "effects"
        self.turns: list[dict[str, Any]] = []

    async def prepare(self) -> None:
        async with opening(str(self.home), FakeClock(BASE_MS, seed="first")) as app:
            await admit(app, stamp)

    def drive(self, mode: str, count: int) -> None:
        done = subprocess.run(
            [*forked.python(), "-m", "tests.crash.approver", mode, str(self.home), str(count)],
            cwd=ROOT,
            env={**os.environ, "EFFECTS": str(self.lines)},
            capture_output=True,
            text=True,
            check=False,
            timeout=540,
        )
        assert done.returncode == 0, done.stderr
        self.turns = [json.loads(line) for line in done.stdout.splitlines()]

    @property
    def names(self) -> list[str]:
        return [name for turn in self.turns for name in turn["names"]]

    def acknowledged(self, act: str) -> set[str]:
        return {line.split()[0] for turn in self.turns for line in turn["said"] if line.split()[1] == act}

    def made(self) -> list[str]:
        made = effects(str(self.lines))
        assert len(made) == len(set(made)), "an effect was made twice"
        return made

    async def states(self, app: Interlock) -> dict[str, str]:
        """The state of each name's ticket; there is never more than one."""
        found = [(ticket.params["name"], ticket.state) for ticket in await app.approvals.list(every=True)]
        assert len(found) == len(dict(found))
        return dict(found)

    def prove_chain(self) -> None:
        verdict = verify(home_at(self.home))
        assert verdict.intact, verdict.faults


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene(tmp_path)
    monkeypatch.setenv("EFFECTS", str(made.lines))
    await made.prepare()
    return made


async def send(app: Interlock, name: str) -> Result:
    return await app.call("demo.stamp", name=name, key=name)


async def judge(scene: Scene) -> None:
    """Every promise, on what the dead left behind; then everything is sent again, approved and gone on with."""
    made = scene.made()
    async with opening(str(scene.home), FakeClock(BASE_MS, seed="judge")) as app:
        app.catalog.attach(stamp)
        before = await scene.states(app)
        assert scene.acknowledged("ask") <= before.keys(), "a ticket was lost"
        decided = {name for name, state in before.items() if state in ("APPROVED", "USED")}
        assert scene.acknowledged("approve") <= decided, "a decision was lost"
        assert scene.acknowledged("resume") <= set(made), "an effect was lost"
        used = {name for name, state in before.items() if state == "USED"}
        assert set(made) <= used, "an effect without an approval that was used for it"
        assert made_in_order(app)
        for name in scene.names:
            result = await send(app, name)
            if before.get(name) in (None, "PENDING"):
                assert result.pending
                ticket = await app.approvals.approve(result.metadata["pending"]["ticketId"], by=BEN)
                assert (await app.approved_calls.resume(ticket.id)).unwrap() == name
            elif before[name] == "APPROVED":
                assert result.unwrap() == name
            else:
                # It was used: it is told again how that ended, or that nobody can know.
                cut_off = result.error is not None and result.error.code == "E3409"
                assert cut_off or (result.replayed and name in made)
        assert await app.approved_calls.resume_all() == []
        unknown = app.journal.reader.all("SELECT key FROM reservation WHERE state = 'unknown'")
        assert set(scene.names) - set(scene.made()) <= {key for (key,) in unknown}
    scene.prove_chain()


def made_in_order(app: Interlock) -> bool:
    """Whether every intent cites a ticket that was approved, and used in the same breath, before it."""
    approved: set[str] = set()
    used: Counter[str] = Counter()
    for kind, body in app.journal.reader.all("SELECT kind, body FROM journal ORDER BY seq"):
        record = orjson.loads(body)
        if kind == "approval" and record["act"] == "approved":
            approved.add(record["approvalTicketId"])
        elif kind == "approval" and record["act"] == "used":
            used[record["approvalTicketId"]] += 1
        elif kind == "intent":
            ticket = record["approvalTicketId"]
            if ticket not in approved or used[ticket] != 1:
                return False
    return True


@pytest.mark.proves("HITL-10")
async def test_a_kill_at_every_point_of_a_tickets_life_loses_no_decision_and_runs_nothing_twice(scene: Scene) -> None:
    scene.drive("life", 2)
    assert len(scene.turns) == 2 * len(LIFE)
    await judge(scene)


@pytest.mark.proves("HITL-10")
async def test_a_kill_after_any_step_loses_no_decision_and_runs_nothing_twice(scene: Scene) -> None:
    scene.drive("random", 12)
    await judge(scene)
    answered = sum(len(turn["said"]) for turn in scene.turns)
    assert 0 < answered < 3 * len(scene.names), "the kills came too early or too late to prove anything"


@pytest.mark.proves("HITL-05")
async def test_a_kill_at_an_escalation_neither_skips_a_step_nor_repeats_one(scene: Scene) -> None:
    scene.drive("escalation", 3)
    assert len(scene.turns) == 3 * len(ESCALATION)
    for _ in range(2):
        async with opening(str(scene.home), FakeClock(BASE_MS + 3_601_000, seed="judge")) as app:
            assert set(scene.names) == (await scene.states(app)).keys()
            for ticket in await app.approvals.list():
                told = app.journal.reader.all(
                    "SELECT step FROM notification WHERE ticket = ? ORDER BY rowid", (ticket.id,)
                )
                assert [step for (step,) in told] == [0, 1]
                escalated = app.journal.reader.all(
                    "SELECT body FROM journal WHERE call = ? AND kind = 'approval'", (ticket.call,)
                )
                assert [orjson.loads(body)["act"] for (body,) in escalated] == ["escalated"]
    scene.prove_chain()


@pytest.mark.proves("HITL-04")
async def test_a_machine_that_is_down_when_a_ticket_expires_runs_nothing_when_it_is_back(scene: Scene) -> None:
    scene.drive("expiry", 2)
    assert len(scene.turns) == 2 * len(EXPIRY)
    approved = scene.acknowledged("approve") | {
        turn["names"][0] for turn in scene.turns if turn["point"].startswith("approved")
    }
    for turn in scene.turns:
        (name,) = turn["names"]
        async with opening(turn["home"], FakeClock(BASE_MS + DAY * 1000, seed="judge")) as app:
            app.catalog.attach(stamp)
            ended = "LAPSED" if name in approved else "AUTO_DENIED"
            assert await scene.states(app) == {name: ended}, "a ticket outlived its time"
            assert await app.approved_calls.resume_all() == []
            result = await send(app, name)
            assert result.error is not None
            assert result.error.code == "E3209"
            rows = app.journal.reader.all("SELECT body FROM journal WHERE kind = 'closed'")
            ends = [record["call"] for (body,) in rows if (record := orjson.loads(body))["source"] == "synthetic"]
            assert len(ends) == 1, "a call was closed twice, or never"
        verdict = verify(home_at(turn["home"]))
        assert verdict.intact, verdict.faults
    assert scene.made() == []

"""Every approval outcome names its mechanism and the rule or person behind it, whichever door the call came through."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from interlock import Caller, Interlock
from interlock.api.history import find
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.cli.history import explain
from interlock.testing import FakeClock
from tests import sample
from tests.support.identities import did_of
from tests.support.wires import WIRES, Wires, opened

Json = dict[str, Any]
HITL_12 = pytest.mark.proves("HITL-12")
REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))
DOORS = ("library", *WIRES)
TIMEOUT_S = 60


class World:
    """A server with tools that ask, and a clock that the tests move."""

    def __init__(self, wires: Wires, clock: FakeClock, token: str) -> None:
        self.wires = wires
        self.app: Interlock = wires.app
        self.clock = clock
        self._token = token

    async def library(self, tool: str, arguments: Json, key: str) -> Any:
        return await self.app.call(tool, arguments, key=key, token=self._token)

    async def told(self, door: str, tool: str, arguments: Json, key: str) -> Json | None:
        """The approval in the answer of one call through one door: of its result, or of its refusal."""
        if door == "library":
            result = await self.library(tool, arguments, key)
            if result.error is not None:
                assert result.metadata["approval"] == result.error.details["approval"]
            return result.metadata.get("approval")
        heard = await self.wires.call(door, tool, arguments, key)
        if heard.envelope is not None:
            assert heard.envelope["error_code"] == "E3209"
            return heard.envelope["details"]["approval"]
        return heard.about.get("approval")

    async def closed(self) -> Json:
        await self.app.journal.commit(lambda _: None)
        rows = self.app.journal.reader.all(
            "SELECT body FROM journal WHERE kind = 'closed' ORDER BY seq DESC LIMIT 1", ()
        )
        return orjson.loads(rows[0][0])

    def given_up(self, ticket: str) -> Json:
        """The record that closed a call which its ticket ended, before it was sent again."""
        rows = self.app.journal.reader.all("SELECT body FROM journal WHERE kind = 'closed' ORDER BY seq", ())
        return next(one for (body,) in rows if (one := orjson.loads(body)).get("approvalTicketId") == ticket)

    async def story(self, call: str) -> str:
        return " ".join(explain(await find(self.app, call, None, self.app.gateway.waiting_calls.open)))

    async def check(self, told: Json | None, expected: Json, words: str) -> None:
        """The result, the record and the explanation say the same."""
        closed = await self.closed()
        assert told == expected
        assert closed["approval"] == expected
        assert words in await self.story(closed["call"])


@pytest_asyncio.fixture
async def world(home: Path) -> AsyncGenerator[World]:
    clock = FakeClock()
    async with opened(home, clock=clock.clock, approval={"timeout_seconds": TIMEOUT_S}) as wires:
        app = wires.app
        for one in (sample.increment, sample.send, sample.add):
            app.catalog.attach(one)
        await app.identities.register(Identity(did=did_of("ann"), name="ann", kind="human"), by="test")
        token = await app.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("*")], by=app.caller)
        yield World(wires, clock, token)


@HITL_12
@pytest.mark.parametrize("door", DOORS)
async def test_a_write_that_a_rule_allows_says_auto_and_the_rule(world: World, door: str) -> None:
    told = await world.told(door, "demo.increment", {"name": "a"}, "k")
    assert told is not None
    rule = told["rule"]
    assert rule in (await world.closed())["rules"]
    expected = {"mechanism": "auto", "outcome": "approved", "rule": rule}
    await world.check(told, expected, f"It was approved through auto, by rule {rule}; no person was asked.")


@HITL_12
@pytest.mark.parametrize("door", DOORS)
async def test_a_call_that_was_agreed_to_in_advance_says_standing_and_who_agreed(world: World, door: str) -> None:
    given = await world.app.standing_approvals.grant(
        "demo.send", by=REVIEWER, caller=did_of("bot"), arguments={"to": "desk-*"}, uses=1,
        expires_ms=world.clock.now_ms + 60_000,
    )  # fmt: skip
    told = await world.told(door, "demo.send", {"to": "desk-1"}, "k")
    expected = {"mechanism": "standing", "outcome": "approved", "rule": given.id, "by": REVIEWER.id}
    words = f"It was approved through standing, by the standing approval {given.id} of {REVIEWER.id}."
    await world.check(told, expected, words)


@HITL_12
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("outcome", ["approved", "denied"])
async def test_a_call_that_a_person_decided_on_says_human_review_and_the_person(
    world: World, door: str, outcome: str
) -> None:
    ticket = (await world.library("demo.send", {"to": "a"}, "k")).metadata["pending"]["ticketId"]
    decide = world.app.approvals.approve if outcome == "approved" else world.app.approvals.deny
    await decide(ticket, by=REVIEWER, comment="")
    told = await world.told(door, "demo.send", {"to": "a"}, "k")
    expected = {"mechanism": "human_review", "outcome": outcome, "by": REVIEWER.id, "ticketId": ticket}
    words = f"It was {outcome} through human_review, by {REVIEWER.id}, on ticket {ticket}."
    await world.check(told, expected, words)
    assert world.given_up(ticket)["approval"] == expected
    assert (await world.app.approvals.show(ticket)).document()["approval"] == expected


@HITL_12
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("state", ["AUTO_DENIED", "LAPSED"])
async def test_a_call_that_time_decided_on_says_timeout_and_since_when(world: World, door: str, state: str) -> None:
    ticket = (await world.library("demo.send", {"to": "a"}, "k")).metadata["pending"]["ticketId"]
    if state == "LAPSED":
        await world.app.approvals.approve(ticket, by=REVIEWER, comment="")
    world.clock.advance(TIMEOUT_S + 1)
    told = await world.told(door, "demo.send", {"to": "a"}, "k")
    assert told is not None
    expected = {"mechanism": "timeout", "outcome": "denied", "rule": told["rule"], "ticketId": ticket}
    assert " before 2027-01-15T08:01:0" in told["rule"]
    await world.check(told, expected, f"It was denied through timeout, by time: {told['rule']} (ticket {ticket}).")
    assert world.given_up(ticket)["approval"] == expected
    approvals = world.app.journal.reader.all("SELECT body FROM journal WHERE kind = 'approval' ORDER BY seq", ())
    last = orjson.loads(approvals[-1][0])
    assert (last["act"], last["mechanism"]) == (state.lower(), "timeout")


@HITL_12
async def test_a_read_that_nothing_asks_about_has_no_approval(world: World) -> None:
    result = await world.app.call("demo.add", a=1, b=2)
    assert result.ok
    assert "approval" not in result.metadata
    assert "approval" not in await world.closed()

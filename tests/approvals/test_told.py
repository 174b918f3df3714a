"""Approvers are told of a ticket by webhook, from the call that asks to the request that the receiver gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any

import orjson
import pytest
import pytest_asyncio
from pydantic import Field

from interlock import Change, Effect, Interlock, Preview, tool
from interlock.api.service import Service
from interlock.approvals.notify import undelivered
from interlock.approvals.webhook import verify
from interlock.testing import FakeClock
from tests import sample
from tests.support.calls import admit
from tests.support.webhooks import SECRET, Answer, Receiver

pytestmark = pytest.mark.proves("HITL-06")

TIMEOUT_S = 300


class Desk:
    """A home with a webhook for approvers, one for managers, and a console."""

    def __init__(self, app: Interlock, clock: FakeClock, first: Receiver, second: Receiver) -> None:
        self.app = app
        self.clock = clock
        self.first = first
        self.second = second

    async def ask(self) -> str:
        pending = await self.app.call("demo.send", {"to": "ann"}, key="k")
        return pending.metadata["pending"]["ticketId"]

    def acts(self, act: str) -> list[tuple[str, str, int]]:
        rows = self.app.journal.reader.all("SELECT body FROM journal WHERE kind = 'approval' ORDER BY seq")
        found = [orjson.loads(body) for (body,) in rows]
        return sorted((one["channel"], one["call"], one["step"]) for one in found if one["act"] == act)


@pytest_asyncio.fixture
async def desk(home: Path, tmp_path: Path) -> AsyncGenerator[Desk]:
    (tmp_path / "secret").write_text(SECRET)
    clock = FakeClock()
    signed = {"secret_file": str(tmp_path / "secret"), "allow_private": True}
    async with Receiver.open() as first, Receiver.open() as second:
        channels: list[dict[str, Any]] = [
            {**signed, "name": "hook", "groups": ["approvers"], "webhook": first.url},
            {**signed, "name": "bosses", "groups": ["managers"], "webhook": second.url},
            {"name": "console", "groups": ["approvers"], "console": True},
        ]
        chain = [{"group": "approvers"}, {"group": "managers", "after_seconds": 60}]
        approval = {"timeout_seconds": TIMEOUT_S, "chain": chain}
        async with Interlock.open(
            home, clock=clock.clock, housekeeping=False, channels=channels, approval=approval
        ) as app:
            app.catalog.attach(sample.send)
            yield Desk(app, clock, first, second)


async def test_approvers_of_each_step_are_told_by_signed_webhooks(desk: Desk) -> None:
    ticket = await desk.ask()
    await desk.app.courier.deliver_due()
    (got,) = desk.first.got
    verify(got.headers, got.body, SECRET, desk.clock.now_ms / 1000)
    told = orjson.loads(got.body)
    assert told["type"] == "approval.requested"
    assert told["id"] == got.headers["webhook-id"]
    data = told["data"]
    assert (data["ticket"], data["group"], data["step"]) == (ticket, "approvers", 0)
    assert (data["tool"], data["params"]) == ("demo.send@1.0.0", {"to": "ann"})
    assert (data["caller"], data["impact"]) == (desk.app.caller.id, "ann would get a mail")
    assert desk.second.got == [], "the managers are not asked yet"
    assert desk.acts("notified") == [("hook", ticket, 0)]
    desk.clock.advance(61)
    await desk.app.approvals.sweep()
    await desk.app.courier.deliver_due()
    (escalated,) = desk.second.got
    verify(escalated.headers, escalated.body, SECRET, desk.clock.now_ms / 1000)
    told = orjson.loads(escalated.body)
    assert told["type"] == "approval.escalated"
    assert (told["data"]["ticket"], told["data"]["group"]) == (ticket, "managers")
    assert desk.acts("notified") == [("bosses", ticket, 1), ("hook", ticket, 0)]
    assert await undelivered(desk.app.journal) == []


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=[Effect("n:all", "UPDATE")])
async def count(number: Annotated[int, Field(description="which number", examples=[1])]) -> str:
    """Count up to a number."""
    return "counted"


@count.preview
async def _(number: int) -> Preview:
    change = Change(resource="n:all", operation="UPDATE", before=number, after=number + 1)
    return Preview(impact=f"up to {number}", effects=(change,))


async def test_approvers_are_told_a_number_of_any_length(desk: Desk) -> None:
    await admit(desk.app, count)
    asked = await desk.app.call("demo.count", {"number": 10**30}, key="long")
    assert asked.pending, asked.error
    await desk.app.courier.deliver_due()
    (got,) = desk.first.got
    assert json.loads(got.body)["data"]["params"] == {"number": 10**30}
    ticket = await Service(desk.app).approvals.ticket(asked.metadata["pending"]["ticketId"], by=desk.app.caller)
    assert f"it would UPDATE n:all, from {10**30} to {10**30 + 1}" in ticket["readable"]


async def test_a_webhook_that_fails_is_sent_again_and_seen(desk: Desk) -> None:
    desk.first.answers = [Answer(503)]
    ticket = await desk.ask()
    await desk.app.courier.deliver_due()
    (failed,) = await undelivered(desk.app.journal)
    assert (failed.channel, failed.state, failed.attempts) == ("hook", "retry", 1)
    assert "127.0.0.1" not in failed.error
    assert desk.acts("notified") == []
    desk.clock.advance(30)
    await desk.app.courier.deliver_due()
    first, again = desk.first.got
    assert first.headers["webhook-id"] == again.headers["webhook-id"]
    assert await undelivered(desk.app.journal) == []
    assert desk.acts("notified") == [("hook", ticket, 0)]


async def test_a_webhook_that_does_not_answer_does_not_delay_the_denial(desk: Desk) -> None:
    desk.first.silent = True
    ticket = await desk.ask()
    await desk.app.courier.wake()
    async with asyncio.timeout(30), desk.first.arrived:
        await desk.first.arrived.wait_for(lambda: bool(desk.first.got))
    desk.clock.advance(TIMEOUT_S + 1)
    await desk.app.approvals.sweep()
    assert (await desk.app.approvals.show(ticket)).state == "AUTO_DENIED"

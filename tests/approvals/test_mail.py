"""Approvers are told by e-mail: a real conversation with an SMTP server, through the same courier as other channels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from interlock import Caller, Interlock
from interlock.approvals.notify import undelivered
from interlock.testing import FakeClock
from tests import sample
from tests.support.mail import PASSWORD, SmtpServer

pytestmark = [
    pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning"),
    pytest.mark.proves("HITL-06"),
]

TIMEOUT_S = 300


@pytest_asyncio.fixture
async def smtp() -> AsyncGenerator[SmtpServer]:
    server = SmtpServer()
    async with server.running():
        yield server


class Desk:
    """A home whose approvers are told by mail."""

    def __init__(self, app: Interlock, clock: FakeClock, smtp: SmtpServer) -> None:
        self.app = app
        self.clock = clock
        self.smtp = smtp

    async def ask(self, to: str = "ann", key: str = "k") -> Any:
        return await self.app.call("demo.send", {"to": to}, key=key)


@pytest_asyncio.fixture
async def desk(home: Path, tmp_path: Path, smtp: SmtpServer) -> AsyncGenerator[Desk]:
    (tmp_path / "password").write_text(PASSWORD)
    clock = FakeClock()
    mail = {
        "secret_file": str(tmp_path / "password"),
        "allow_private": True,
        "url": f"mailto://postmaster:{{secret}}@127.0.0.1:{smtp.port}?from=interlock@example.org&to=",
    }
    channels = [
        {**mail, "name": "mail", "groups": ["approvers"], "url": f"{mail['url']}desk@example.org"},
        {**mail, "name": "bosses", "groups": ["managers"], "url": f"{mail['url']}boss@example.org"},
    ]
    chain = [{"group": "approvers"}, {"group": "managers", "after_seconds": 60}]
    approval = {"timeout_seconds": TIMEOUT_S, "chain": chain}
    async with Interlock.open(home, clock=clock.clock, housekeeping=False, channels=channels, approval=approval) as app:
        app.catalog.attach(sample.send)
        yield Desk(app, clock, smtp)


async def test_approvers_of_each_step_are_told_by_mail(desk: Desk) -> None:
    ticket = (await desk.ask()).metadata["pending"]["ticketId"]
    await desk.app.courier.deliver_due()
    ((sender, to, message),) = desk.smtp.mail
    assert (sender, to) == ("interlock@example.org", ["desk@example.org"])
    assert desk.smtp.logins == [("postmaster", PASSWORD)]
    assert message["Subject"].endswith("Approval needed: demo.send@1.0.0")
    text = message.get_body(("plain",)).get_content()  # pyright: ignore[reportOptionalMemberAccess] - there is one
    for words in (f"ticket: {ticket}", "group: approvers", "caller: local:", "ann would get a mail"):
        assert words in text
    desk.clock.advance(61)
    await desk.app.approvals.sweep()
    await desk.app.courier.deliver_due()
    assert [one[1] for one in desk.smtp.mail] == [["desk@example.org"], ["boss@example.org"]]
    assert await undelivered(desk.app.journal) == []


async def test_mail_that_is_refused_is_tried_again_and_seen(desk: Desk) -> None:
    desk.smtp.refusals = ["451 try again later"]
    await desk.ask()
    await desk.app.courier.deliver_due()
    assert desk.smtp.mail == []
    (failed,) = await undelivered(desk.app.journal)
    assert (failed.channel, failed.state, failed.attempts) == ("mail", "retry", 1)
    assert failed.error.startswith("E3704 ")
    assert "127.0.0.1" not in failed.error
    desk.clock.advance(30)
    await desk.app.courier.deliver_due()
    assert len(desk.smtp.mail) == 1
    assert await undelivered(desk.app.journal) == []


async def test_a_mail_server_that_hangs_does_not_delay_the_denial(desk: Desk) -> None:
    desk.smtp.hang = asyncio.Event()
    pending = await desk.ask()
    await desk.app.courier.wake()
    async with asyncio.timeout(30):
        await desk.smtp.reached.wait()
    desk.clock.advance(TIMEOUT_S + 1)
    await desk.app.approvals.sweep()
    ticket = await desk.app.approvals.show(pending.metadata["pending"]["ticketId"])
    assert ticket.state == "AUTO_DENIED"
    assert desk.smtp.mail == []


async def test_nothing_that_a_caller_sends_becomes_a_header_or_a_recipient(desk: Desk) -> None:
    hostile = "x\r\nBcc: eve@example.org\r\n\r\n.\r\nMAIL FROM:<eve@example.org>\r\n"
    result = await desk.app.call(
        "demo.send", {"to": hostile}, key="k", caller=Caller(id="local:ann\r\nBcc: eve@example.org")
    )
    assert result.pending, result.error
    await desk.app.courier.deliver_due()
    ((sender, to, message),) = desk.smtp.mail
    assert (sender, to) == ("interlock@example.org", ["desk@example.org"])
    assert message["Bcc"] is None
    assert "eve@example.org" not in str([value for _, value in message.items()])


async def test_the_password_is_in_no_record_table_or_message(desk: Desk, home: Path) -> None:
    await desk.ask()
    await desk.app.courier.deliver_due()
    await desk.app.journal.commit(lambda _: None)
    assert _files_with(home, PASSWORD.encode()) == []
    assert all(PASSWORD not in str(message) for _, _, message in desk.smtp.mail)


def _files_with(directory: Path, text: bytes) -> list[Path]:
    return [file for file in directory.rglob("*") if file.is_file() and text in file.read_bytes()]


async def test_a_mail_server_that_refuses_three_times_raises_an_alert(desk: Desk) -> None:
    desk.smtp.refusals = ["451 try again later"] * 3
    await desk.ask()
    for _ in range(3):
        await desk.app.courier.deliver_due()
        desk.clock.advance(90)
    assert desk.app.gateway.observer.metrics["CHANNEL_FAILING"] == 1

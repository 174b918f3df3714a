"""Tools whose calls wait for people, the people, and what they are asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import pytest

from interlock import Caller, Change, Context, Effect, Failure, Field, Interlock, Preview, Result, tool
from interlock.testing import FakeClock
from tests import sample
from tests.support.calls import admit

Json = dict[str, Any]
Text = Annotated[str, Field(description="any text", examples=["hello"])]
Private = Annotated[
    str, Field(description="for nobody else", examples=["x"], json_schema_extra={"x-sensitivity": "pii"})
]
DAY = 86_400
ANN = "local:ann"
BEN = Caller(id="local:ben", groups=frozenset({"approvers"}))
MAY = Caller(id="local:may", groups=frozenset({"managers"}))
ADA = Caller(id="local:ada", groups=frozenset({"admins"}))
EVE = Caller(id="local:eve", groups=frozenset({"staff"}))
BOT = Caller(id="did:example:bot", kind="agent", groups=frozenset({"approvers"}))
CHANNELS = [{"name": "chat", "url": "json://127.0.0.1:9/{secret}", "secret": "chat", "allow_private": True}]
ANYTHING = "permit (principal, action, resource);\n"


class Outbox:
    """What the tools of these tests have sent, and what they claim to have sent instead of the truth."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []
        self.claim: str | None = None
        self.undone: list[str] = []
        self.checks: list[Callable[[], None]] = []  # what happens while an input is checked, one by one


outbox = Outbox()


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=[Effect("mail:{to}", "CREATE")])
async def mail(ctx: Context, to: Text, note: Private = "none") -> str:
    """Send a mail with a private note."""
    outbox.sent.append((to, note))
    ctx.effect(f"mail:{outbox.claim or to}", "CREATE", after=to)
    return to


@mail.preview
async def _(to: str, note: str) -> Preview:
    change = Change(resource=f"mail:{to}", operation="CREATE", after=to)
    return Preview(effects=(change,), preconditions={"reachable": True}, impact=f"{to} would read {note}")


@mail.check
def _(to: str, note: str) -> list[str]:
    if outbox.checks:
        outbox.checks.pop(0)()
    return ["nobody is called nobody"] if to == "nobody" else []


@tool(
    version="1.0.0",
    mutation_class="write_reversible",
    namespace="demo",
    effects=[Effect("mail:{to}", "UPDATE")],
)
async def forward(ctx: Context, to: Text) -> str:
    """Send a mail on by means of another tool."""
    return await ctx.call("demo.mail", to=to, key=f"nested-{to}")


@forward.preview
def _(to: str) -> Preview:
    return Preview(impact=f"{to} would get something")


@forward.compensate
async def _(result: str) -> None:
    outbox.undone.append(result)


@asynccontextmanager
async def opened(home: Path, clock: FakeClock, **settings: Any) -> AsyncGenerator[Interlock]:
    """A home with the tools of these tests, whose time is the clock's and which does nothing by itself."""
    given: Json = {"caller": ANN, "housekeeping": False, "channels": CHANNELS}
    async with Interlock.open(home, clock=clock.clock, **(given | settings)) as app:
        await admit(app, mail, forward, sample.increment, sample.send, sample.add)
        yield app


def ticket_of(result: Result) -> str:
    assert result.pending, result.error
    return result.metadata["pending"]["ticketId"]


async def refusal(attempt: Any) -> Failure:
    with pytest.raises(Failure) as refused:
        await attempt
    return refused.value


async def ask(app: Interlock, to: str = "carl", key: str = "k", **options: Any) -> str:
    """Ask for a mail; the ticket."""
    return ticket_of(await app.call("demo.mail", to=to, key=key, **options))

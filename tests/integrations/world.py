"""A data directory with tools, an agent with a token, and a reviewer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlock import Caller, Context, Interlock, tool
from interlock.api.tokens import Tokens
from tests import sample
from tests.support.calls import admit, records

REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))


PNG = b"\x89PNG\r\n\x1a\n of a picture"


@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
async def picture(ctx: Context, of: sample.Text) -> str:
    """A picture and a word."""
    ctx.attach("image", mime_type="image/png", data=PNG)
    return of


@dataclass(slots=True)
class World:
    """An open Interlock and the token of an agent, which allows the tools of `demo` only."""

    app: Interlock
    token: str
    agent: str

    async def approve_all(self) -> int:
        """Approve everything that waits; how many calls that were."""
        waiting = self.app.journal.reader.all("SELECT id FROM ticket WHERE state = 'PENDING'", ())
        for (ticket,) in waiting:
            await self.app.approvals.approve(ticket, by=REVIEWER)
        return len(waiting)

    def calls(self) -> list[tuple[str, str]]:
        """The tool and the outcome of every call on record. All were made by the agent."""
        closed = records(self.app)
        assert {one["agentId"] for one in closed} == {self.agent}
        return [(one["toolId"], one["status"]) for one in closed]


@asynccontextmanager
async def opened(home: Path, **options: Any) -> AsyncGenerator[World]:
    sample.reset()
    async with Interlock.open(home, **options) as app:
        await admit(app, sample.add, sample.increment, sample.send)
        issued = await Tokens(app).issue(by=app.caller, agent="framework", tools=["demo.*"])
        caller = await app.caller_of(issued["token"])
        yield World(app, issued["token"], caller.acting)

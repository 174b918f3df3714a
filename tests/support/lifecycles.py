"""Each endpoint over tools that wait, with what it tells of a call from its beginning to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import orjson

from interlock import Caller, Context, Effect, Field, Interlock, Preview, tool
from interlock.audit.invocations import invocation_of
from interlock.call.capability import ToolGrant
from interlock.call.events import Event
from tests import sample
from tests.sample import TOOLS
from tests.support import isolated_tools as cell
from tests.support.calls import admit
from tests.support.endpoints import register_people
from tests.support.identities import did_of
from tests.support.tokens import issuer_keys as _issuer_keys
from tests.support.wires import Wires, served

Json = dict[str, Any]
CHANNELS = [{"name": "chat", "url": "json://127.0.0.1:9/{secret}", "secret": "chat", "allow_private": True}]
Private = Annotated[
    str, Field(description="for nobody else", examples=["x"], json_schema_extra={"x-sensitivity": "pii"})
]


class Stage:
    """What holds the tools of these tests back."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.sent: list[str] = []
        self.talkers: list[Context] = []
        self.aborted: list[tuple[str, bool]] = []


stage = Stage()


@tool(version="1.0.0", mutation_class="read_only", namespace="life")
async def waits(ctx: Context) -> str:
    """Wait to be stopped."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        stage.aborted.append((ctx.invocation_id, ctx.cancelled))
        raise
    return "never"


@tool(version="1.0.0", mutation_class="read_only", namespace="life", cancellable=False)
async def insists(ctx: Context) -> str:
    """Run on, whoever asks it to stop."""
    await stage.release.wait()
    return "done"


@tool(version="1.0.0", mutation_class="read_only", namespace="life", timeout_class="long_running", timeout_s=60)
async def climbs(ctx: Context, steps: sample.Number) -> int:
    """Say how far it is, once the test lets it."""
    await stage.release.wait()
    for step in range(steps):
        ctx.progress(f"step {step}", percent=100 * (step + 1) / steps, current_step=step, total_steps=steps)
    return steps


@tool(version="1.0.0", mutation_class="read_only", namespace="life", timeout_class="async", timeout_s=60)
async def talks(ctx: Context) -> str:
    """Report progress, and leave behind what could report more."""
    stage.talkers.append(ctx)
    await stage.release.wait()
    ctx.progress("at work")
    return "done"


@tool(version="1.0.0", mutation_class="read_only", namespace="life")
async def left(ctx: Context) -> float:
    """How much time it has."""
    return ctx.remaining_s


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="life", effects=[Effect("mail:{to}", "CREATE")])
async def mail(ctx: Context, to: sample.Text, note: Private = "none") -> str:
    """Send a mail that cannot be called back."""
    stage.sent.append(to)
    ctx.effect(f"mail:{to}", "CREATE", after=note)
    return to


@mail.preview
async def _(to: str, note: str) -> Preview:
    return Preview(preconditions={"reachable": True}, impact=f"{to} would read {note}")


@tool(
    version="1.0.0", mutation_class="read_only", namespace="life", timeout_class="interactive", external_io=False,
)  # fmt: skip
async def overruns() -> str:
    """Take more time than it has."""
    await asyncio.Event().wait()
    return "never"


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="life", effects=[Effect("clock:{name}", "UPDATE")],
)  # fmt: skip
async def measures(ctx: Context, name: sample.Text) -> float:
    """Write, and say how much time it has."""
    ctx.effect(f"clock:{name}", "UPDATE")
    return ctx.remaining_s


@measures.preview
async def _measured(name: str) -> Preview:
    return Preview(impact=name)


@measures.compensate
async def _unmeasured(name: str) -> None: ...


LIFE = (measures, waits, insists, climbs, talks, left, mail, overruns)


class Place(Wires):
    """Every wire, with the records and the events of calls. The SDK makes the calls of MCP's older era."""

    BY_SDK = ("mcp-legacy",)

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.events: list[Event] = []
        self.app.listen(self.events.append)

    def records(self, *kinds: str) -> list[Json]:
        marks = ", ".join("?" * len(kinds))
        rows = self.app.journal.reader.all(f"SELECT body FROM journal WHERE kind IN ({marks}) ORDER BY seq", kinds)
        return [orjson.loads(body) for (body,) in rows]

    def invocation(self, call: str) -> Json:
        found = invocation_of([one for one in self.records("pending", "intent", "closed") if one["call"] == call])
        assert found is not None
        return found

    async def last(self, *kinds: str) -> Json:
        await self.app.journal.commit(lambda _: None)
        return self.records(*(kinds or ("closed", "pending")))[-1]

    def heard(self, call_id: str) -> list[str]:
        """The events of a call."""
        return [event.type for event in self.events if event.invocation_id == call_id]

    async def caller(self) -> Caller:
        return await self.app.caller_of(self.tokens["full"])


@asynccontextmanager
async def opened(home: Path, **settings: Any) -> AsyncGenerator[Place]:
    stage.__init__()
    given: Json = {"housekeeping": False, "trace_ratio": 1.0, "channels": CHANNELS, **settings}
    async with Interlock.open(home, **given) as app:
        for one in TOOLS:
            app.catalog.attach(one)
        await admit(app, *LIFE, cell.double, cell.lingers)
        for name, pem in _issuer_keys("RS256").items():
            (app.home.keys / "issuer").mkdir(exist_ok=True)
            (app.home.keys / "issuer" / name).touch(mode=0o600)
            (app.home.keys / "issuer" / name).write_bytes(pem)
        await register_people(app)
        token = await app.tokens.issue(subject=did_of("bot"), user=did_of("ann"), tools=[ToolGrant("*")], by=app.caller)
        async with served(app, {"full": token}, Place) as place:
            yield place

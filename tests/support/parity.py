"""One call over every wire: the answer, the record, the events and the metrics of each."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson

from interlock import Effect, Interlock, Preview, tool
from interlock.call.capability import ToolGrant
from interlock.call.events import Event
from tests import sample
from tests.sample import TOOLS
from tests.support import artifact_tools
from tests.support.answers import Told, Wish, left
from tests.support.calls import admit
from tests.support.endpoints import register_people
from tests.support.identities import did_of
from tests.support.wires import DOORS, SdkWires, served

Json = dict[str, Any]
# What differs from call to call, whatever the door.
_OF_THIS_CALL = (
    "call", "timestamp", "latencyMs", "traceId", "invocation_id", "door", "native", "approvalTicketId",
    "idempotencyKey", "cost",
)  # fmt: skip


@tool(version="1.0.0", mutation_class="read_only", namespace="demo", timeout_s=1)
async def dawdle(text: sample.Text) -> str:
    """Take longer than its contract allows."""
    await asyncio.Event().wait()
    return text


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="demo", effects=[Effect("x:{text}", "UPDATE")],
    timeout_s=1,
)  # fmt: skip
async def strand(text: sample.Text) -> str:
    """Change something, or not, and never come back."""
    await asyncio.Event().wait()
    return text


@strand.preview
def _(text: str) -> Preview:
    return Preview(impact=text)


@strand.compensate
async def _(text: str) -> None:
    return None


@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
async def fail(text: sample.Text) -> str:
    """Fail in an unforeseen way."""
    raise RuntimeError(text)


@asynccontextmanager
async def opened(home: Path) -> AsyncGenerator[SdkWires]:
    async with Interlock.open(home, housekeeping=False) as app:
        for one in TOOLS:
            app.catalog.attach(one)
        await admit(app, dawdle, strand, fail, artifact_tools.leave)
        if not app.issuer_keys.all():
            app.issuer_keys.init("EdDSA")
            await register_people(app)
        narrow = {"full": "*", "narrow": "demo.echo"}
        tokens = {
            name: await app.tokens.issue(
                subject=did_of("bot"), user=did_of("ann"), tools=[ToolGrant(tools)], by=app.caller
            )
            for name, tools in narrow.items()
        }
        async with served(app, tokens) as ways:
            yield ways


def comparable(record: Json) -> Json:
    """A record without what differs from one call to the next. Writes of one test are to different things."""
    left_out = (*_OF_THIS_CALL, *(("inputHash", "compensation", "resources") if record.get("sideEffects") else ()))
    kept = {name: value for name, value in record.items() if name not in left_out}
    if "artifacts" in kept:
        kept["artifacts"] = left(kept["artifacts"])
    kept["sideEffects"] = [change["operation"] for change in record.get("sideEffects") or ()]
    if "decision" in kept:
        kept["decision"] = {name: value for name, value in kept["decision"].items() if name != "expires_at"}
    return kept


async def counts(app: Interlock) -> Counter[str]:
    """All metrics that count something, by their names and labels.

    How long calls took and how much of its limits the server uses differs from one call to the next.
    """
    lines = (await app.gateway.telemetry.metrics.render()).decode().splitlines()
    samples = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    timed = re.compile(r"^(\w+(_bucket|_sum|_rate)|interlock_limit_used)\b")
    return Counter({name: float(value) for name, value in samples if not timed.match(name)})  # pyright: ignore[reportArgumentType] - costs are fractions


_ID = re.compile(r"(?<![0-9A-Z])[0-9A-HJKMNP-TV-Z]{26}(?![0-9A-Z])")
_TIME = re.compile(r'"\d{4}-\d\d-\d\dT[^"]*"|(?<="elapsed_ms":)[\d.e-]+')


def _announced(event: Event) -> Json:
    """An event without ids and times."""
    told = {**event.document(), "event_id": ""}
    return orjson.loads(_TIME.sub('"TIME"', _ID.sub("ID", orjson.dumps(told).decode())))


async def through_all(
    ways: SdkWires, wish: Callable[[str], Wish]
) -> tuple[dict[str, Told], list[Json], list[list[Json]], list[Counter[str]]]:
    """One call over every wire, one after the other: the answers, the records, the events and the metrics."""
    told: dict[str, Told] = {}
    recorded: list[Json] = []
    announced: list[list[Json]] = []
    counted: list[Counter[str]] = []
    for door in DOORS:
        events: list[Event] = []
        (before,) = ways.app.journal.reader.all("SELECT COALESCE(MAX(seq), 0) FROM journal")[0]
        stop = ways.app.listen(events.append)
        so_far = await counts(ways.app)
        told[door] = await ways.rows[door].call(wish(door))
        stop()
        counted.append(await counts(ways.app) - so_far)
        await ways.app.journal.commit(lambda _: None)
        rows = ways.app.journal.reader.all(
            "SELECT body FROM journal WHERE seq > ? AND kind IN ('closed', 'pending') ORDER BY seq", (before,)
        )
        records: list[Json] = [orjson.loads(body) for (body,) in rows]
        assert len(records) == 1, (door, records)
        assert records[0]["door"] == door.partition("-")[0]
        recorded.append(comparable(records[0]))
        # A change of the listing belongs to no call and is told when it is noticed.
        announced.append([_announced(event) for event in events if event.type != "tool.surface.updated"])
    return told, recorded, announced, counted


def same(
    told: Mapping[str, Told], recorded: list[Json], announced: list[list[Json]], counted: list[Counter[str]]
) -> Told:
    """The answer on which all wires agree."""
    first = told["library"]
    assert told == dict.fromkeys(DOORS, first)
    for door, record in zip(DOORS, recorded, strict=True):
        assert record == recorded[0], door
    for door, events in zip(DOORS, announced, strict=True):
        assert events == announced[0], door
    for door, metrics in zip(DOORS, counted, strict=True):
        assert metrics == counted[0], door
    assert any(name.startswith("tool_") for name in counted[0]), "a call is counted"
    return first

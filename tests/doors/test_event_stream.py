"""Every class of events has a producer, a schema and a way out of the server."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import orjson
import pytest

from interlock import Caller, Context, Effect, Failure, Field, Hook, Interlock, Preview, tool
from interlock.api import events as streaming
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.call.events import CLASSES, KINDS, Event, data_schema
from interlock.data.schema import compile_validator
from interlock.doors.server import Listening, serving
from tests import sample
from tests.support import source
from tests.support.each import each
from tests.support.identities import did_of

Json = dict[str, Any]
REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))
Name = Annotated[str, Field(description="a name", examples=["a"])]


@tool(version="1.0.0", mutation_class="read_only", namespace="seen")
async def work(name: Name, context: Context) -> str:
    """Report progress and parts, and say much or fail."""
    context.progress("half way", percent=50)
    context.partial("a part of a result")
    context.yield_result("an interim result")
    if name == "fails":
        raise Failure("E3401", "it failed")
    return name * (60_000 if name == "much" else 1)


@tool(version="1.0.0", mutation_class="read_only", namespace="seen")
async def later(name: Name) -> str:
    """Come later."""
    return name


@tool(version="1.0.0", mutation_class="write_reversible", namespace="seen", effects=[Effect("x:{name}", "UPDATE")])
async def idle(name: Name, context: Context) -> str:
    """Change nothing, which is worth an alert."""
    return name


@idle.preview
def _(name: str) -> Preview:
    return Preview()


@idle.compensate
async def _(name: str) -> None:
    return None


# The eleven classes of the standard, word by word.
ELEVEN = {
    "declaration", "surface", "invocation", "hook", "permission", "scheduling", "progress", "result", "persistence",
    "error", "telemetry",
}  # fmt: skip


class Place:
    """A server with a reader of its events."""

    def __init__(self, app: Interlock, client: httpx.AsyncClient, token: str) -> None:
        self.app = app
        self.client = client
        self.headers = {"authorization": f"Bearer {token}"}
        self.heard: list[Json] = []
        self.began = asyncio.Event()
        self.news = asyncio.Condition()

    async def read(self) -> None:
        async with self.client.stream("GET", "/v1/events", headers=self.headers, timeout=None) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    self.heard.append(orjson.loads(line.removeprefix("data: ")))
                    self.began.set()
                    async with self.news:
                        self.news.notify_all()

    async def until(self, kind: str) -> None:
        async with asyncio.timeout(60), self.news:
            await self.news.wait_for(lambda: any(one["event_class"] == kind for one in self.heard))


@asynccontextmanager
async def place(tmp_path: Path, *scopes: str) -> AsyncGenerator[Place]:
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        await app.add(work, idle, sample.increment, sample.send)
        app.issuer_keys.init("EdDSA")
        await app.identities.register(Identity(did=did_of("ops"), name="ops"), by="test")
        token = await app.tokens.issue(subject=did_of("ops"), tools=[ToolGrant("*")], scopes=scopes, by=app.caller)
        async with (
            serving(Service(app), Listening(port=0, ports={})) as server,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client,
        ):
            yield Place(app, client, token)


@pytest.mark.proves("OBS-10")
async def test_each_class_of_events_is_produced_by_a_real_action_validates_and_leaves_the_server(
    tmp_path: Path,
) -> None:
    async with place(tmp_path, "audit:read") as here:
        reading = asyncio.create_task(here.read())
        await asyncio.wait_for(here.began.wait(), 60)
        app = here.app
        app.hook(Hook(id="looks", when="pre", run=lambda seen: None))
        calls = {
            "fine": await app.call("seen.work", name="a"),
            "much": await app.call("seen.work", name="much"),
            "fails": await app.call("seen.work", name="fails"),
            "wrong": await app.call("seen.work", name=[]),
            "write": await app.call("demo.increment", name="a", key="k1"),
            "asks": await app.call("demo.send", to="ann", key="k2"),
            "idle": await app.call("seen.idle", name="a", key="k3"),
        }
        await app.approvals.deny(calls["asks"].metadata["pending"]["ticketId"], by=REVIEWER)
        await app.add(later)
        for kind in ("tool.declared", "tool.surface.updated"):  # in either order
            await here.until(kind)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    began, *heard = here.heard
    assert set(began["classes"]) == set(CLASSES) == ELEVEN
    assert {one["group"] for one in heard} == ELEVEN, "no class is without a producer"
    for one in heard:
        kind = KINDS[one["event_class"]]
        assert one["group"] == kind.group
        assert compile_validator(data_schema(one["event_class"])).is_valid(one), one
        assert kind.of != "call" or one["invocation_id"] in {result.invocation_id for result in calls.values()}
    declared = [one["tool_id"] for one in heard if one["event_class"] == "tool.declared"]
    assert declared == ["seen.later@1.0.0"]
    of = {
        name: {one["group"] for one in heard if one["invocation_id"] == call.invocation_id}
        for name, call in calls.items()
    }
    assert {"invocation", "hook", "permission", "progress", "result"} <= of["fine"]
    assert "persistence" in of["much"]
    assert "error" in of["fails"]
    assert "error" in of["wrong"]
    assert "scheduling" in of["write"]
    assert "telemetry" in of["idle"]
    told = [one["event_class"] for one in heard if one["invocation_id"] == calls["fine"].invocation_id]
    assert [one.removeprefix("tool.") for one in told if one != "tool.permission.decided"] == [
        "invocation.planned", "invocation.selected", "invocation.arguments_ready", "hook.pre.started",
        "hook.pre.completed", "invocation.started", "invocation.progress", "invocation.partial_result",
        "invocation.yielded", "invocation.succeeded", "result.created",
    ]  # fmt: skip
    decided = [one["event_class"] for one in heard if one["invocation_id"] == calls["asks"].invocation_id]
    assert decided[-3:] == ["approval.denied", "tool.invocation.failed", "tool.result.created"]
    assert len({one["event_id"] for one in heard}) == len(heard)


async def test_the_stream_holds_no_part_of_a_result(tmp_path: Path) -> None:
    async with place(tmp_path, "audit:read") as here:
        reading = asyncio.create_task(here.read())
        await asyncio.wait_for(here.began.wait(), 60)
        own: list[Event] = []
        here.app.listen(own.append)
        await here.app.call("seen.work", name="a")
        await here.until("tool.result.created")
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    parts = [one for one in here.heard if one["event_class"].endswith((".partial_result", ".yielded"))]
    assert [one["data"] for one in parts] == [
        {"index": number, "ref": f"{parts[0]['invocation_id']}:part:{number}"} for number in (1, 2)
    ]
    assert "interim result" not in str(here.heard)
    assert "interim result" in str(own), "who made the call hears it"


@pytest.mark.supports("OBS-10")
def test_no_event_is_told_that_has_no_class_and_no_schema() -> None:
    """Read in the code: every type of event that is written out where events are told."""
    tellers = ("emit", "announce", "mention")
    told: set[str] = set()
    for _, node in source.nodes_with(*tellers):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            name, first = node.func.attr.lstrip("_"), node.args[0]
            if name in tellers and isinstance(first, ast.Constant):
                told.add(str(first.value))
    assert {"tool.invocation.planned", "tool.invocation.queued", "tool.alert", "tool.declared"} <= told
    assert told <= KINDS.keys()


@each("kind", KINDS)
def test_an_event_without_its_link_or_its_facts_does_not_validate(kind: str) -> None:
    known = KINDS[kind]
    whole = Event(
        id="e:1", type=kind, invocation_id="c1", tool="demo.add@1.0.0", at_ms=0,
        data=dict.fromkeys(known.data, "x"), surface="tools",
    ).document()  # fmt: skip
    valid = compile_validator(data_schema(kind)).is_valid
    assert valid(whole)
    for name in known.data:
        assert not valid({**whole, "data": {other: 1 for other in known.data if other != name}})
    link = {"call": "invocation_id", "tool": "tool_id", "surface": "surface_id"}.get(known.of)
    if link is not None:
        assert not valid({**whole, link: ""})
    assert not valid({**whole, "event_class": "tool.other"})


async def test_events_are_for_auditors_and_reading_them_is_on_record(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        refused = await here.client.get("/v1/events", headers=here.headers)
        assert (refused.status_code, refused.json()["error"]["error_code"]) == (403, "E3206")
        assert not here.app.gateway.observer.listeners
    async with place(tmp_path / "other", "audit:read") as here:
        reading = asyncio.create_task(here.read())
        await asyncio.wait_for(here.began.wait(), 60)
        (record,) = here.app.journal.reader.all("SELECT body FROM journal WHERE kind = 'audit.read'")
        assert orjson.loads(record[0])["what"] == "events"
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_slow_reader_is_told_how_many_events_it_missed_and_a_stopped_server_ends_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "MOST_WAITING", 3)
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        service = Service(app)
        who = app.caller
        events = await service.events.follow(by=who, door="library")
        assert (await anext(events))[1]["event_class"] == "tool.events.began"
        for number in range(10):
            app.gateway.observer.announce("tool.alert", "", "", alert=f"A{number}")
        assert (await anext(events))[1] == {"event_class": "tool.events.missed", "missed": 7}
        assert [(await anext(events))[1]["data"]["alert"] for _ in range(3)] == ["A0", "A1", "A2"]
        service.events.close()
        assert [one async for one in events] == []
        assert not app.gateway.observer.listeners

"""Tools of an upstream that does not answer: every wire lists them as unavailable, and as available once it is back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp import Client

from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.registry import quarantine
from interlock.testing import FakeClock
from tests.support.answers import Wish
from tests.support.calls import admit
from tests.support.endpoints import ERAS
from tests.support.http_tools import RATE, READS
from tests.support.lifecycles import Place, opened
from tests.support.surface_tools import offer
from tests.support.upstream_servers import Answer, HttpServer, json_answer
from tests.support.wires import WIRES

Json = dict[str, Any]


async def _listed(place: Place) -> dict[str, Any]:
    """The availability of `bank.rate` as each wire lists and describes it."""
    bearer = place.bearer()
    stub, metadata = place.stub, tuple(bearer.items())
    rest: Json = (await place.http.get("/v1/tools?limit=100", headers=bearer)).json()
    shown: Json = (await place.http.get("/v1/tools/bank.rate", headers=bearer)).json()
    rpc = (await place.rpc("tools.list", {"limit": 1000}))["result"]["tools"]
    described = await stub.Describe(wire.DescribeRequest(tool_id="bank.rate"), metadata=metadata)
    discovered = await stub.Discover(wire.DiscoverRequest(page_size=1000), metadata=metadata)
    found: dict[str, Any] = {
        "library": place.app.availability((await place.app.catalog.resolve("bank.rate")).row),
        "rest list": _of(rest["tools"]),
        "rest show": shown["availability"],
        "rest interface": _enabled(shown),
        "jsonrpc interface": _enabled((await place.rpc("tools.describe", {"tool_id": "bank.rate"}))["result"]),
        "jsonrpc list": _of(rpc),
        "jsonrpc describe": (await place.rpc("tools.describe", {"tool_id": "bank.rate"}))["result"]["availability"],
        "grpc list": next(one.availability for one in discovered.tools if one.tool_id == "bank.rate"),
        "grpc describe": described.availability,
    }
    for era in ERAS:
        async with place.session(era) as client:
            (tool,) = [one for one in (await client.list_tools()).tools if one.name == "bank-rate"]
            found[era] = tool.meta.get("interlock/availability", "AVAILABLE")
    return found


def _enabled(shown: Json) -> str:
    return "AVAILABLE" if shown["interface"]["availability"]["is_enabled"] else "UNAVAILABLE"


def _of(tools: list[Json]) -> str:
    (found,) = [one["availability"] for one in tools if one["tool_id"] == "bank.rate"]
    others = {one["availability"] for one in tools if one["tool_id"] != "bank.rate"}
    assert others == {"AVAILABLE"}
    return found


@pytest.mark.proves("REG-11", "CONTRACT-11")
async def test_every_wire_marks_the_tools_of_an_upstream_that_does_not_answer(home: Path) -> None:
    async with opened(home) as place, HttpServer.open() as server:
        upstreams = place.app.upstreams
        config: Json = {"urls": [server.url], "tools": [RATE], "allow_private": True}
        await upstreams.add("bank", "http", config, by=place.app.caller, overlay=READS)
        registered = (await place.app.catalog.resolve("bank.rate")).row
        assert set((await _listed(place)).values()) == {"AVAILABLE"}
        server.otherwise = lambda _: Answer(status=0)  # connections are closed without an answer
        assert await upstreams.probe("bank") == "unavailable"
        assert set((await _listed(place)).values()) == {"UNAVAILABLE"}
        asked = len(server.got)
        for door, row in place.rows.items():
            told = await row.call(Wish("bank.rate", {"of": "CHF"}))
            assert told.error is not None, door
            # From the sixth on, it is the breaker that refuses.
            assert (told.error[0] in ("E3502", "E3501"), told.error[2]) == (True, "dependency_unavailable"), door
        assert len(server.got) == asked, "calls fail at once; nobody was asked"
        server.otherwise = lambda _: json_answer({"rate": 1})
        assert await upstreams.probe("bank") == "available"
        assert set((await _listed(place)).values()) == {"AVAILABLE"}
        assert (await place.app.catalog.resolve("bank.rate")).row == registered, "and nothing was registered anew"
        for door, row in place.rows.items():
            assert (await row.call(Wish("bank.rate", {"of": "CHF"}))).error is None, door


@pytest.mark.proves("SURF-01")
async def test_a_loaded_tool_of_an_upstream_that_does_not_answer_leaves_the_surface_and_is_refused(home: Path) -> None:
    doors = ("mcp", "rest", "jsonrpc", "grpc")
    async with opened(home, surface="search", surface_doors=doors) as place, HttpServer.open() as server:
        upstreams, bearer = place.app.upstreams, place.bearer()
        config: Json = {"urls": [server.url], "tools": [RATE], "allow_private": True}
        await upstreams.add("bank", "http", config, by=place.app.caller, overlay=READS)

        async def shown() -> tuple[list[str], dict[str, str]]:
            listed: Json = (await place.http.get("/v1/tools", headers=bearer)).json()
            told: Json = (await place.http.get("/v1/surface", headers=bearer)).json()["surface"]
            blocked = {one["tool_id"]: one["reason"] for one in told["blocked_tools"]}
            assert [one["tool_id"] for one in listed["tools"]] == told["loaded_tools"]
            return told["loaded_tools"], blocked

        loaded = await place.http.post("/v1/tools/load", json={"names": ["bank.rate"]}, headers=bearer)
        assert loaded.status_code == 200
        assert await shown() == (["bank.rate"], {})
        server.otherwise = lambda _: Answer(status=0)
        assert await upstreams.probe("bank") == "unavailable"
        assert await shown() == ([], {"bank.rate": "setup_required"})
        asked = len(server.got)
        for door in (one for one in place.rows if one != "library"):
            told = await place.rows[door].call(Wish("bank.rate", {"of": "CHF"}))
            assert told.error is not None, door
            assert (told.error[0] in ("E3502", "E3501"), told.error[2]) == (True, "dependency_unavailable"), door
        assert len(server.got) == asked
        server.otherwise = lambda _: json_answer({"rate": 1})
        assert await upstreams.probe("bank") == "available"
        assert await shown() == (["bank.rate"], {})
        for door in (one for one in place.rows if one != "library"):
            assert (await place.rows[door].call(Wish("bank.rate", {"of": "CHF"}))).error is None, door


BOTH_ERAS = pytest.mark.parametrize("door", ERAS)


class _Hearing:
    """An MCP session that notes when it is told that its list of tools may be another."""

    def __init__(self, client: Client, news: asyncio.Event) -> None:
        self._client = client
        self._news = news

    async def after(self, tool: str) -> Any:
        """The description of a tool once the session has heard of a change; None where it is listed no more."""
        async with asyncio.timeout(30):
            await self._news.wait()
        self._news.clear()
        found = (await self._client.list_tools()).tools
        return next((one for one in found if one.name == tool), None)


@asynccontextmanager
async def _hearing(place: Place, door: str) -> AsyncGenerator[_Hearing]:
    news = asyncio.Event()

    async def hear(message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            news.set()

    async with place.session(door, message_handler=hear) as client:
        await client.list_tools()
        if door == "mcp-legacy":
            yield _Hearing(client, news)
        else:
            async with client.listen(tools_list_changed=True):
                yield _Hearing(client, news)


@BOTH_ERAS
async def test_sessions_are_told_when_an_upstream_stops_answering_and_when_it_is_back(home: Path, door: str) -> None:
    async with opened(home) as place, HttpServer.open() as server:
        upstreams = place.app.upstreams
        config: Json = {"urls": [server.url], "tools": [RATE], "allow_private": True}
        await upstreams.add("bank", "http", config, by=place.app.caller, overlay=READS)
        async with _hearing(place, door) as session:
            server.otherwise = lambda _: Answer(status=0)
            assert await upstreams.probe("bank") == "unavailable"
            assert (await session.after("bank-rate")).meta["interlock/availability"] == "UNAVAILABLE"
            server.otherwise = lambda _: json_answer({"rate": 1})
            assert await upstreams.probe("bank") == "available"
            assert "interlock/availability" not in (await session.after("bank-rate")).meta


@BOTH_ERAS
async def test_sessions_are_told_when_a_tool_is_quarantined_and_when_that_is_lifted(home: Path, door: str) -> None:
    async with opened(home) as place:
        app = place.app
        async with _hearing(place, door) as session:
            digest = (await app.catalog.resolve("demo.add")).row.digest
            await app.journal.commit(quarantine.impose(digest, "demo.add@1.0.0", "a-call", "a test"))
            assert await session.after("demo-add") is None
            await app.journal.commit(quarantine.lift(digest, by=app.caller, reason="a test"))
            assert (await session.after("demo-add")).name == "demo-add"


@BOTH_ERAS
async def test_sessions_are_told_when_a_credential_or_a_rule_takes_a_tool_away_and_gives_it_back(
    home: Path, door: str
) -> None:
    async with opened(home) as place:
        app = place.app
        await admit(app, offer("read_mail", "Read the mail of a mailbox.", permissions=["credential:mail/key"]))
        async with _hearing(place, door) as session:
            await app.secrets.set("mail/key", "s3cret-value", by="test")
            assert (await session.after("office-read_mail")).name == "office-read_mail"
            text = app.policy.path.read_text()
            rule = 'forbid (principal, action == Action::"office.read_mail", resource);'
            app.policy.path.write_text(f'{text}\n@id("no-mail") {rule}\n')
            assert await session.after("office-read_mail") is None
            app.policy.path.write_text(text)
            assert (await session.after("office-read_mail")).name == "office-read_mail"
            await app.secrets.remove("mail/key", by="test")
            assert await session.after("office-read_mail") is None


@pytest.mark.proves("OPS-15")
async def test_every_wire_labels_a_cached_result_and_tells_its_age(home: Path) -> None:
    clock = FakeClock()
    async with opened(home, clock=clock.clock) as place, HttpServer.open() as server:
        config: Json = {"urls": [server.url], "tools": [RATE], "allow_private": True}
        overlay = {"tools": {"rate": {**READS["tools"]["rate"], "stale_s": 3600}}}
        await place.app.upstreams.add("bank", "http", config, by=place.app.caller, overlay=overlay)
        server.otherwise = lambda _: json_answer({"rate": 1})
        wish = Wish("bank.rate", {"of": "CHF"})
        assert (await place.rows["rest"].call(wish)).data == {"rate": 1}
        server.otherwise = lambda _: Answer(status=503)
        clock.advance(7)
        labels: dict[str, tuple[Any, Any, Any]] = {}
        for door in (one for one in WIRES if one not in ERAS):
            heard = await place.rows[door].heard(wish)
            labels[door] = heard.data, heard.about["source"], heard.about["warnings"]
        for era in ERAS:
            async with place.session(era) as client:
                answer = await client.call_tool("bank-rate", wish.arguments)
            about = answer.meta["interlock/call"]
            labels[era] = answer.structured_content, about["source"], about["warnings"]
        for door, label in labels.items():
            assert label == ({"rate": 1}, "cache", ["CACHED_RESULT age_s=7.000"]), door

"""A catalog that is too large to list, over MCP: tools are searched for, loaded and called."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import orjson
import pytest
import pytest_asyncio

from interlock import Interlock
from interlock.call.capability import ToolGrant
from interlock.data.schema import Json
from tests.support.calls import admit, until
from tests.support.identities import did_of
from tests.support.wires import Wires, wired
from tests.surfaces.offices import TOOLS, offer

OWN = ["search_tools", "load_tools", "read_result"]
ERAS = pytest.mark.parametrize("modern", [True, False], ids=["modern", "handshake"])


@pytest_asyncio.fixture
async def wires(home: Path, request: pytest.FixtureRequest) -> AsyncGenerator[Wires]:
    settings: Json = {"surface": "search", **getattr(request, "param", {})}
    async with Interlock.open(home, housekeeping=False, **settings) as lock:
        await admit(lock, *TOOLS)
        await lock.catalog.forget()
        async with wired(lock) as opened:
            yield opened


async def _listed(wires: Wires, *, modern: bool) -> list[str]:
    answer: Json = orjson.loads(await wires.mcp("tools/list", {}, modern=modern))
    return [one["name"] for one in answer["result"]["tools"]]


async def _call(wires: Wires, name: str, arguments: Json, *, modern: bool) -> Json:
    params = {"name": name, "arguments": arguments}
    return orjson.loads(await wires.mcp("tools/call", params, modern=modern))["result"]


@ERAS
@pytest.mark.proves("SURF-02", "SURF-03")
async def test_a_tool_is_searched_for_loaded_and_called(wires: Wires, modern: bool) -> None:
    assert await _listed(wires, modern=modern) == OWN
    refused = await _call(wires, "office-forecast", {"value": "Rome"}, modern=modern)
    assert refused["isError"]
    error = refused["_meta"]["interlock/error"]
    assert (error["error_code"], error["error_class"]) == ("E3107", "schema_not_loaded")
    assert "load_tools" in error["resolution"]
    queries = ["will it rain tomorrow", "send somebody an email"]
    found = (await _call(wires, "search_tools", {"queries": queries, "limit": 2}, modern=modern))["structuredContent"]
    assert [one["query"] for one in found["results"]] == queries
    assert [one["tools"][0]["name"] for one in found["results"]] == ["office-forecast", "office-send_email"]
    assert found["results"][0]["tools"][0]["loaded"] is False
    assert b"inputSchema" not in orjson.dumps(found)
    loaded = (await _call(wires, "load_tools", {"names": ["office-forecast"]}, modern=modern))["structuredContent"]
    assert loaded["tools"][0]["inputSchema"]["properties"]["value"]["description"] == "a value"
    assert await _listed(wires, modern=modern) == [*OWN, "office-forecast"]
    done = await _call(wires, "office-forecast", {"value": "Rome"}, modern=modern)
    assert done["structuredContent"] == {"result": "forecast Rome"}
    assert (await _call(wires, "office-translate", {"value": "x"}, modern=modern))["isError"]


@ERAS
async def test_what_a_token_does_not_cover_is_neither_found_nor_loaded(wires: Wires, modern: bool) -> None:
    lock = wires.lock
    wires.bear(await lock.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("office.forecast")], by=lock.caller))
    found = await _call(wires, "search_tools", {"queries": ["send an email", "weather"]}, modern=modern)
    assert b"send_email" not in orjson.dumps(found["structuredContent"]["results"][0]["tools"])
    for names in (["office-send_email"], ["office-forecast", "office-send_email"], ["office-nothing"]):
        refused = await _call(wires, "load_tools", {"names": names}, modern=modern)
        assert refused["_meta"]["interlock/error"]["error_code"] == "E3101", names
    assert await _listed(wires, modern=modern) == OWN


@pytest.mark.parametrize("wires", [{"surface_unloaded": "load"}], indirect=True)
@ERAS
async def test_one_setting_lets_a_call_load_its_tool(wires: Wires, modern: bool) -> None:
    done = await _call(wires, "office-forecast", {"value": "Rome"}, modern=modern)
    assert done["structuredContent"] == {"result": "forecast Rome"}

    async def listed() -> bool:
        return "office-forecast" in await _listed(wires, modern=modern)

    await until(listed)


@pytest.mark.parametrize(
    "wires",
    [{"surface_pinned": ({"tools": ["office.translate"]}, {"tools": ["office.forecast"], "groups": ["weather"]})}],
    indirect=True,
)
async def test_pinned_tools_are_listed_and_callable(wires: Wires) -> None:
    assert await _listed(wires, modern=True) == [*OWN, "office-translate"]
    done = await _call(wires, "office-translate", {"value": "x"}, modern=True)
    assert done["structuredContent"] == {"result": "translate x"}


@pytest.mark.parametrize("wires", [{"surface": "auto", "surface_most": 10}], indirect=True)
async def test_a_surface_takes_the_place_of_a_list_that_grows_too_long(wires: Wires) -> None:
    assert len(await _listed(wires, modern=True)) == 10
    await admit(wires.lock, offer("track_parcel", "Find out where a parcel is."))
    await wires.lock.catalog.forget()
    assert await _listed(wires, modern=True) == OWN


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("search_tools", {}),
        ("search_tools", {"queries": "mail"}),
        ("search_tools", {"queries": []}),
        ("search_tools", {"queries": ["mail"] * 11}),
        ("search_tools", {"queries": ["mail"], "limit": "1"}),
        ("search_tools", {"queries": ["mail"], "limit": 0}),
        ("search_tools", {"queries": [" "]}),
        ("search_tools", {"queries": ["x" * 1001]}),
        ("load_tools", {"names": []}),
        ("load_tools", {"names": [7]}),
        ("load_tools", {"names": ["office-forecast"], "more": 1}),
        ("read_result", {}),
        ("read_result", {"ref": 7}),
        ("read_result", {"ref": "payload:x", "more": 1}),
        ("read_result", {"ref": "payload:x", "tokens": 20_001}),
        ("read_result", {"ref": "payload:x", "tokens": None}),
        ("read_result", {"ref": "payload:x", "at": 7}),
        ("read_result", {"ref": "payload:x", "start": "1"}),
    ],
)
async def test_mistakes_of_a_model_are_answered_for_it(wires: Wires, name: str, arguments: Json) -> None:
    answer = await _call(wires, name, arguments, modern=True)
    assert answer["isError"]
    assert answer["_meta"]["interlock/error"]["error_code"] == "E3004"

"""A catalog that is too large to list, over MCP: tools are searched for, loaded and called."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx2
import mcp_types as types
import orjson
import pytest
import pytest_asyncio
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from interlock import Context, Interlock, tool
from interlock.call.capability import ToolGrant
from interlock.data.schema import Json
from tests.support.calls import admit, records, until
from tests.support.identities import did_of
from tests.support.surface_tools import TOOLS, Value, offer
from tests.support.wires import Wires, wired

MODERN = "2026-07-28"
OWN = ["search_tools", "load_tools", "read_result"]
ERAS = pytest.mark.parametrize("modern", [True, False], ids=["modern", "handshake"])


@pytest_asyncio.fixture
async def wires(home: Path, request: pytest.FixtureRequest) -> AsyncGenerator[Wires]:
    settings: Json = {"surface": "search", **getattr(request, "param", {})}
    async with Interlock.open(home, housekeeping=False, **settings) as app:
        await admit(app, *TOOLS)
        await app.catalog.forget()
        async with wired(app) as opened:
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
    app = wires.app
    wires.bear(await app.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("office.forecast")], by=app.caller))
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
    await admit(wires.app, offer("track_parcel", "Find out where a parcel is."))
    await wires.app.catalog.forget()
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


@dataclass
class Model:
    """The model of a client. It answers with a text that was put in, and remembers what it was asked."""

    answer: str = ""
    asked: list[Any] = field(default_factory=list[Any])

    async def sample(self, _: Any, params: Any) -> types.CreateMessageResult | types.ErrorData:
        self.asked.append(params)
        if not self.answer:
            return types.ErrorData(code=-1, message="the person said no")
        return types.CreateMessageResult(role="assistant", content=types.TextContent(text=self.answer), model="m")


@asynccontextmanager
async def _client(wires: Wires, mode: str, **options: Any) -> AsyncGenerator[Client]:
    headers = {"authorization": wires.http.headers["authorization"]}
    async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
        transport = streamable_http_client(f"{wires.http.base_url}/mcp".replace("//mcp", "/mcp"), http_client=http)
        async with Client(transport, mode=mode, read_timeout_seconds=60, **options) as client:
            yield client


@ERAS
@pytest.mark.proves("SURF-07")
async def test_a_clients_own_model_selects_a_tool_where_the_client_declares_sampling(
    wires: Wires, modern: bool
) -> None:
    model, mode = Model(), MODERN if modern else "legacy"
    async with _client(wires, mode, sampling_callback=model.sample) as client:

        async def select(request: str, answer: str) -> Json:
            model.answer = answer
            told = await client.call_tool("select_tool", {"request": request})
            assert not told.is_error
            return cast("Json", told.structured_content)

        assert [one.name for one in (await client.list_tools()).tools] == [*OWN, "select_tool"]
        made = await select(
            "weather in Rome", '```json\n{"tool": "office.forecast", "parameters": {"value": "Rome"}}\n```'
        )
        assert made["tool"]["name"] == "office-forecast"
        assert made["tool"]["inputSchema"]["properties"]["value"]["description"] == "a value"
        assert (made["parameters"], made["gate"]["answer"], made["refused"]) == ({"value": "Rome"}, "ALLOW", None)
        # It was asked about the candidates alone, and what it chose is loaded.
        (asked,) = model.asked
        assert "office.forecast" in asked.messages[0].content.text
        assert "weather in Rome" in asked.messages[0].content.text
        assert "office-forecast" in [one.name for one in (await client.list_tools()).tools]
        done = await client.call_tool("office-forecast", made["parameters"])
        assert done.structured_content == {"result": "forecast Rome"}
        # What it makes up, and an answer of another form, are refused before the gate.
        for answer in (
            '{"tool": "office.made_up", "parameters": {}}',
            '{"tool": "office.forecast", "parameters": {"city": "Rome"}}',
            "the forecast, of course",
            "[1]",
        ):
            refused = await select("weather in Rome", answer)
            assert (refused["tool"], refused["gate"]) == (None, None), answer
            assert refused["refused"], answer
        # A model that does not answer chooses nothing. In the later era the client does not even repeat its request.
        if modern:
            with pytest.raises(MCPError, match="the person said no"):
                await select("weather in Rome", "")
        else:
            assert "the person said no" in (await select("weather in Rome", ""))["refused"]
        assert (await select("weather in Rome", '{"tool": null}'))["refused"] is None
        # The gate decides about its choice too. What is forbidden in every call is not even offered.
        forbid = '\n@id("no-words") forbid (principal, action, resource == Tool::"office.translate")'
        forbid += ' when { context.arguments.value == "x" };\n'
        wires.app.policy.path.write_text(wires.app.policy.path.read_text() + forbid)
        await until(lambda: "no-words" in wires.app.policy.rules.text)
        denied = await select("translate a text", '{"tool": "office.translate", "parameters": {"value": "x"}}')
        assert (denied["gate"]["answer"], denied["tool"]) == ("DENY", {"name": "office-translate"})
        assert "office-translate" not in [one.name for one in (await client.list_tools()).tools]
        wrong = await client.call_tool("select_tool", {"queries": ["weather"]})
        assert wrong.is_error
    # One selection is one record, however many requests it took; a question that nobody answered is none.
    assert len(records(wires.app, kind="selection")) == (7 if modern else 8)
    # Clients without a model have no such tool.
    async with _client(wires, mode) as client:
        assert "select_tool" not in [one.name for one in (await client.list_tools()).tools]
        with pytest.raises(MCPError):
            await client.call_tool("select_tool", {"request": "weather"})


@ERAS
@pytest.mark.proves("SURF-08")
@pytest.mark.parametrize("wires", [{"budgets": [{"per": "session", "limit": 2.0}]}], indirect=True)
async def test_what_a_session_has_spent_counts_for_a_selection_by_a_clients_model(wires: Wires, modern: bool) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="office", external_io=False, estimated_cost=2.0)
    async def almanac(ctx: Context, value: Value) -> str:
        """Weather of a whole year in a city, for money."""
        ctx.cost(external_api=2.0)
        return value

    await admit(wires.app, almanac)
    await wires.app.catalog.forget()
    model = Model('{"tool": "office.almanac", "parameters": {"value": "Rome"}}')
    async with _client(wires, MODERN if modern else "legacy", sampling_callback=model.sample) as client:

        async def asked(name: str, arguments: Json, session: Any) -> types.CallToolResult:
            meta = cast("types.RequestParamsMeta", {"interlock/session": session})
            return await client.call_tool(name, arguments, meta=meta)

        async def gate(session: str) -> Json:
            told = await asked("select_tool", {"request": "weather of a year in Rome"}, session)
            return cast("Json", told.structured_content)["gate"]

        assert (await gate("monday"))["answer"] == "ALLOW"
        assert not (await asked("office-almanac", {"value": "Rome"}, "monday")).is_error
        refused = await asked("office-almanac", {"value": "Rome"}, "monday")
        assert (refused.meta or {})["interlock/error"]["error_code"] == "E3210"
        denied = await gate("monday")
        assert denied["answer"] == "DENY"
        assert "per session" in denied["reason"]
        assert (await gate("tuesday"))["answer"] == "ALLOW"
        with pytest.raises(MCPError, match=r"interlock/session.* must be a string"):
            await asked("select_tool", {"request": "weather of a year in Rome"}, 7)
    recorded = [(one["session"], one["gate"]["check"]) for one in records(wires.app, kind="selection")]
    assert recorded == [("monday", "authorization"), ("monday", "cost"), ("tuesday", "authorization")]


async def test_a_question_to_a_clients_model_is_answered_by_any_request_that_brings_the_answer(wires: Wires) -> None:
    """Nothing is kept between the two requests of the later era, so that another node can serve the second."""

    async def select(**more: Any) -> Json:
        able: Json = {"io.modelcontextprotocol/clientCapabilities": {"sampling": {}}}
        params: Json = {"name": "select_tool", "arguments": {"request": "weather in Rome"}, "_meta": able, **more}
        return orjson.loads(await wires.mcp("tools/call", params, modern=True))["result"]

    def answered(name: str, choice: Json) -> Json:
        content = {"type": "text", "text": orjson.dumps(choice).decode()}
        return {"inputResponses": {name: {"role": "assistant", "model": "m", "content": content}}}

    choice = {"tool": "office.forecast", "parameters": {"value": "Rome"}}
    asked = await select()
    assert (asked["resultType"], "requestState" in asked) == ("input_required", False)
    ((name, question),) = asked["inputRequests"].items()
    assert question["method"] == "sampling/createMessage"
    # An answer to something else is none.
    assert (await select(**answered("another", choice)))["inputRequests"].keys() == {name}
    assert records(wires.app, kind="selection") == []
    made = (await select(**answered(name, choice)))["structuredContent"]
    assert (made["tool"]["name"], made["gate"]["answer"]) == ("office-forecast", "ALLOW")
    assert (await select(**answered(name, {"tool": "office.made_up"})))["structuredContent"]["tool"] is None

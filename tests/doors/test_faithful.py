"""Tools of other people's MCP servers as clients see them through Interlock: as their server describes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import mcp_types as types
import orjson
import pytest
from mcp.client.extension import advertise
from mcp.server import Server
from mcp.server.context import ServerRequestContext

from interlock.data.schema import Json
from interlock.doors.mcp import calling
from tests.support.calls import use_policy
from tests.support.mcp import DOOR, PATIENCE_S, World, serving, text
from tests.support.mcp import world as world

CATALOGS = Path(__file__).parents[1] / "upstreams" / "data" / "catalogs"
# Long descriptions, `_meta`, output schemas, and names with dashes.
SERVERS = ("aws-documentation", "basic-memory", "context7")
DAY: Json = {
    "type": "object",
    "properties": {"day": {"type": "string"}, "notes": {"type": "array", "items": {"$ref": "#/$defs/Note"}}},
    "required": ["day"],
    "$defs": {"Note": {"type": "object", "properties": {"text": {"type": "string"}}}},
}
ODD: list[Json] = [
    {
        "name": "listDays",
        "description": "Days.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "from": {"type": "string", "default": None, "description": "the first day"},
                "count": {"type": "integer", "default": 7, "description": "how many days"},
            },
        },
        "outputSchema": DAY,
        "annotations": {"readOnlyHint": True},
        "_meta": {"interlock/class": "read_only", "example.org/colour": {"name": "red"}},
    },
    {"name": "undescribed", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}},
]


@asynccontextmanager
async def served(
    world: World, name: str, tools: list[Json], answers: list[Json], overlay: Json | None = None
) -> AsyncGenerator[None]:
    """A server with these tools as an upstream whose hints are believed. It notes the arguments of its calls."""
    offered = [types.Tool.model_validate(one) for one in tools]
    taken: list[Json] = answers

    async def listing(_: Any, __: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=offered)

    async def call(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        taken.append(params.arguments or {})
        notes = [{"text": "x" * 100}] * (1000 if params.arguments == {"count": 8} else 1)
        return types.CallToolResult(content=[], structured_content={"day": "monday", "notes": notes})

    server: Server[Any] = Server(name, version="1", on_list_tools=listing, on_call_tool=call)
    app = server.streamable_http_app(stateless_http=False, json_response=False)
    async with server.session_manager.run(), serving(app) as port:
        config: Json = {"url": f"http://127.0.0.1:{port}/mcp", "allow_private": True, "accept_hints": True}
        report = await world.app.upstreams.add(name, "mcp", config, by=world.app.caller, overlay=overlay)
        assert report.count("admitted") == len(tools), report
        yield


async def listed(world: World) -> dict[str, Json]:
    async with world.client("auto") as client:
        tools = (await client.list_tools()).tools
        return {one.name: one.model_dump(by_alias=True, exclude_none=True) for one in tools}


@DOOR
@pytest.mark.parametrize("server", SERVERS)
async def test_tools_of_public_servers_are_described_as_their_servers_describe_them(world: World, server: str) -> None:
    tools: list[Json] = orjson.loads((CATALOGS / f"{server}.json").read_bytes())["tools"]
    async with served(world, server, tools, []):
        shown = await listed(world)
    for tool in tools:
        one = shown[f"{server}-{tool['name']}"]
        assert one["description"] == tool["description"].strip()
        assert tool.get("_meta", {}).items() <= one["_meta"].items()
        hints: Json = tool.get("annotations") or {}
        if hints.get("readOnlyHint"):
            assert one["inputSchema"] == tool["inputSchema"]
            assert one.get("outputSchema") == tool.get("outputSchema")


@DOOR
async def test_names_defaults_and_short_descriptions_are_the_servers_own_and_nothing_is_made_up(world: World) -> None:
    sent: list[Json] = []
    async with served(world, "diary", ODD, sent):
        sent.clear()  # of the contract tests
        shown = await listed(world)
        one, bare = shown["diary-listDays"], shown["diary-undescribed"]
        assert (one["description"], "description" in bare) == ("Days.", False)
        assert (one["inputSchema"], one["outputSchema"]) == (ODD[0]["inputSchema"], DAY)
        assert one["_meta"]["example.org/colour"] == {"name": "red"}
        assert one["_meta"]["interlock/address"] == "diary.list_days"
        async with world.client("auto") as client:
            await client.list_tools()  # the SDK checks results against the output schemas it was told
            for name in ("diary-listDays", "diary-list_days", "diary.list_days"):
                assert (await client.call_tool(name, {})).structured_content is not None
            large = await client.call_tool("diary-listDays", {"count": 8})
            assert (large.is_error, len(cast("Json", large.structured_content)["notes"])) == (False, 1000)
            assert len(text(large)) < 30_000
    assert sent == [{"count": 7}] * 3 + [{"count": 8}], "a default that does not fit its own schema is not sent"


@DOOR
async def test_an_answer_that_is_no_result_is_not_checked_against_the_servers_own_schema(world: World) -> None:
    rules = "permit(principal, action, resource); forbid(principal, action, resource) unless { context.approved };"
    await use_policy(world.app, rules)
    sent: list[Json] = []
    async with served(world, "diary", ODD[:1], sent), world.client("auto") as client:
        sent.clear()
        await client.list_tools()
        waits = await client.call_tool("diary-listDays", {})
    assert (waits.is_error, "waits for a person" in text(waits), sent) == (True, True, [])


@DOOR
async def test_a_write_that_can_be_undone_has_its_servers_own_output_schema(world: World, monkeypatch: Any) -> None:
    """Where a person is asked for each call, that answer is an ordinary one, and the schema says so."""
    monkeypatch.setattr(calling, "LARGEST", 1000)
    await use_policy(world.app, "permit(principal, action, resource);")
    tools: list[Json] = [
        {"name": name, "description": "Writes a day.", "inputSchema": ODD[0]["inputSchema"], "outputSchema": DAY}
        for name in ("writeDay", "burnDay")
    ]
    undo: Json = {"tool": "writeDay", "arguments": {}, "example": {"count": 1}}
    stated: Json = {"mutation_class": "write_reversible", "undo": undo, "idempotency": "each"}
    overlay: Json = {"tools": {"writeDay": stated}}
    async with served(world, "diary", tools, [], overlay):
        schemas = {name: one["outputSchema"] for name, one in (await listed(world)).items()}
        assert schemas["diary-writeDay"] == DAY
        assert [*schemas["diary-burnDay"]] == ["$defs", "type", "anyOf"]
        async with world.client("auto") as client:
            await client.list_tools()
            for count, notes in ((7, 1), (8, 1000)):
                done = await client.call_tool("diary-writeDay", {"count": count})
                assert (done.is_error, len(cast("Json", done.structured_content)["notes"])) == (False, notes)
            waits = await client.call_tool("diary-burnDay", {"idempotency_key": "one"})
            assert (waits.is_error, "interlock" in cast("Json", waits.structured_content)) == (False, True)
            forbids = "forbid(principal, action, resource) unless { context.approved };"
            world.app.home.policy.write_text(f"permit(principal, action, resource); {forbids}")
            async with asyncio.timeout(PATIENCE_S):
                while not (asked := await client.call_tool("diary-writeDay", {})).is_error:
                    pass  # the file is looked at every so often
            assert "waits for a person" in text(asked)


async def test_an_upstream_is_removed_and_added_again_with_another_overlay(world: World) -> None:
    app, sent = world.app, list[Json]()
    async with served(world, "diary", ODD, sent):
        known = await app.upstreams.get("diary")
        overlays: list[Json] = [
            {"tools": {"listDays": {"rename": "days", "mutation_class": "read_only"}, "undescribed": {"hide": True}}},
            {"tools": {"listDays": {"mutation_class": "write_irreversible"}}},
            {"tools": {"listDays": {"mutation_class": "read_only", "examples": [{"count": 1}]}}},
        ]
        for overlay in overlays:
            await app.upstreams.remove("diary", by=app.caller)
            await app.upstreams.add("diary", "mcp", dict(known.config), by=app.caller, overlay=overlay)
            states = {one.name: one for one in await app.upstreams.offers("diary")}
            stated = overlay["tools"]["listDays"]
            assert (states["listDays"].state, states["listDays"].mutation_class) == (
                "admitted",
                stated["mutation_class"],
            )
            result = await app.call(f"diary.{stated.get('rename', 'list_days')}", {"count": 2})
            code = None if result.error is None else result.error.code
            assert code == (None if stated["mutation_class"] == "read_only" else "E3307")


APP = "ui://days/view.html"
PICTURE = "data:image/png;base64,iVBORw0KGgo="
WITH_APP: list[Json] = [
    {
        "name": "show",
        "description": "Shows the days.",
        "inputSchema": {"type": "object"},
        "annotations": {"readOnlyHint": True},
        "_meta": {"ui": {"resourceUri": APP, "visibility": ["model"]}, "ui/resourceUri": APP},
        "icons": [
            {"src": "https://days.example/icon.svg", "mimeType": "image/svg+xml", "sizes": ["any"], "theme": "dark"},
            {"src": PICTURE, "sizes": ["48x48", "large"]},
            {"src": "http://days.example/icon.png"},
            {"src": "javascript:alert(1)"},
            {"src": f"data:image/png;base64,{'A' * 70_000}"},
        ],
    },
    {
        "name": "research",
        "description": "Runs as a task, in the form of 2025-11-25.",
        "inputSchema": {"type": "object"},
        "execution": {"taskSupport": "required"},
    },
]


@asynccontextmanager
async def with_app(world: World, name: str, **config: Any) -> AsyncGenerator[dict[str, tuple[str, str]]]:
    """A server of an MCP App. Its interface names the upstream that it is served by."""

    async def listing(_: Any, __: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool.model_validate(one) for one in WITH_APP])

    async def resources(_: Any, __: Any) -> types.ListResourcesResult:
        kind = "text/html;profile=mcp-app"
        return types.ListResourcesResult(resources=[types.Resource(uri=APP, name="view", mime_type=kind)])

    async def read(_: Any, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        assert params.uri == APP
        return types.ReadResourceResult(contents=[types.TextResourceContents(uri=APP, text=f"<h1>{name}</h1>")])

    server: Server[Any] = Server(
        name, version="1", on_list_tools=listing, on_list_resources=resources, on_read_resource=read
    )
    app = server.streamable_http_app(stateless_http=False, json_response=False)
    async with server.session_manager.run(), serving(app) as port:
        place: Json = {"url": f"http://127.0.0.1:{port}/mcp", "allow_private": True, "accept_hints": True}
        said = {**place, "protocol": "handshake", **config}
        report = await world.app.upstreams.add(name, "mcp", said, by=world.app.caller)
        yield {one.name: (one.state, one.reason) for one in report.tools}


@DOOR
async def test_an_app_that_a_tool_names_is_read_under_that_address_from_the_server_of_the_tool(world: World) -> None:
    """Hosts read it only under `ui://`. Servers have apps of the same address, and none is shown for another."""
    async with with_app(world, "days"), with_app(world, "weeks"), with_app(world, "own", prefix=False):
        async with world.client("auto") as client:
            tools = {one.name: one for one in (await client.list_tools()).tools}
            there = {str(one.uri) for one in (await client.list_resources()).resources}
            named: dict[str, str] = {}
            for tool, server in (("days-show", "days"), ("weeks-show", "weeks"), ("show", "own")):
                meta: Any = tools[tool].meta
                named[server] = meta["ui"]["resourceUri"]
                assert meta["ui"] == {"resourceUri": named[server], "visibility": ["model"]}
                assert meta["ui/resourceUri"] == named[server]
                (content,) = (await client.read_resource(named[server])).contents
                assert (content.uri, getattr(content, "text", "")) == (named[server], f"<h1>{server}</h1>")
        assert named == {
            "days": "ui://upstream.days/days/view.html", "weeks": "ui://upstream.weeks/days/view.html", "own": APP,
        }  # fmt: skip
        assert there == set(named.values())


@DOOR
@pytest.mark.parametrize("protocol", ["handshake", "modern"])
async def test_a_server_is_told_that_its_clients_show_apps_where_the_operator_says_so(
    world: World, protocol: str
) -> None:
    """A server may list other tools for clients without interfaces, so all conversations with it must say the same."""
    plain, rich = ({**WITH_APP[0], "name": name} for name in ("plain", "rich"))

    async def listing(ctx: ServerRequestContext[Any], _: Any) -> types.ListToolsResult:
        able = ctx.session.client_capabilities
        shows = ((able and able.extensions) or {}).get("io.modelcontextprotocol/ui")
        assert shows in (None, {"mimeTypes": ["text/html;profile=mcp-app"]})
        return types.ListToolsResult(tools=[types.Tool.model_validate(rich if shows else plain)])

    async def call(ctx: ServerRequestContext[Any], params: types.CallToolRequestParams) -> types.CallToolResult:
        (tool,) = (await listing(ctx, None)).tools
        return types.CallToolResult(content=[types.TextContent(text=f"{params.name} of {tool.name}")])

    server: Server[Any] = Server("days", version="1", on_list_tools=listing, on_call_tool=call)
    app = server.streamable_http_app(stateless_http=False, json_response=False)
    async with server.session_manager.run(), serving(app) as port:
        place: Json = {"url": f"http://127.0.0.1:{port}/mcp", "allow_private": True, "accept_hints": True}
        for name, said in (("without", {}), ("with", {"apps": True})):
            config = {**place, "protocol": protocol, **said}
            await world.app.upstreams.add(name, "mcp", config, by=world.app.caller)
        async with world.client("auto") as client:
            for tool in ("without-plain", "with-rich"):
                own = tool.partition("-")[2]
                (text,) = (await client.call_tool(tool, {})).content
                assert getattr(text, "text", "") == f"{own} of {own}"


@DOOR
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_tool_for_interfaces_alone_is_listed_to_clients_that_show_interfaces(world: World, mode: str) -> None:
    """Other clients would give it to their model. Whoever calls it by its name is governed as for any other."""
    tools: list[Json] = [
        {**WITH_APP[0], "name": name, "_meta": {"ui": {"resourceUri": APP, **visible}}}
        for name, visible in (
            ("both", {"visibility": ["model", "app"]}), ("model", {"visibility": ["model"]}),
            ("unsaid", {}), ("app", {"visibility": ["app"]}),
        )
    ]  # fmt: skip
    shows = advertise("io.modelcontextprotocol/ui", {"mimeTypes": ["text/html;profile=mcp-app"]})
    async with served(world, "days", tools, []):
        for extensions, hidden in ((None, {"days-app"}), ([shows], set[str]())):
            async with world.client(mode, extensions=extensions) as client:
                names = {one.name for one in (await client.list_tools()).tools if one.name.startswith("days-")}
                assert names == {"days-both", "days-model", "days-unsaid", "days-app"} - hidden


@DOOR
async def test_icons_are_kept_and_a_tool_that_only_runs_as_an_old_task_is_refused(world: World) -> None:
    async with with_app(world, "days") as states:
        assert states["show"][0] == "admitted"
        assert (states["research"][0], "taskSupport: required" in states["research"][1]) == ("refused", True)
        tool = (await listed(world))["days-show"]
    first: Json = WITH_APP[0]["icons"][0]
    assert tool["icons"] == [first, {"src": PICTURE, "sizes": ["48x48"]}]
    assert "execution" not in tool, "clients of 2025-11-25 take that for `taskSupport: forbidden`"

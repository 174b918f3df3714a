"""The MCP endpoint over stdio: all that clients over HTTP have, in both eras, from a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import mcp_types as types
import orjson
import pytest
from mcp import Client, MCPError, StdioServerParameters

from interlock import tool
from tests import sample
from tests.sample import TOOLS
from tests.support import asking, forked, postgres
from tests.support.calls import records, until
from tests.support.mcp import OWN, PATIENCE_S, Person, World, text, world
from tests.support.mcp_servers.asking import NOTE
from tests.support.source import ROOT

__all__ = ["world"]

DOOR = pytest.mark.proves("OPS-02")
ERAS = pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
# The SDK's client warns of what the modern era gave up; clients of the handshake era go on using it.
pytestmark = pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
# All tools of the tests, in pages of two.
SERVER = """
import asyncio, sys
from interlock import Interlock
from interlock.api.service import Service
from interlock.doors.mcp import McpDoor, listing
from tests.sample import TOOLS
from tests.support.mcp import OWN

listing.PAGE = 2

async def main() -> None:
    async with Interlock.open(sys.argv[1], housekeeping=False) as app:
        for one in (*TOOLS, *OWN):
            app.catalog.attach(one)
        await McpDoor(Service(app)).run_stdio()

asyncio.run(main())
"""


@tool(version="1.0.0", mutation_class="read_only", namespace="shapes")
async def added_later(x: sample.Number) -> int:
    """A tool that is registered while clients are connected."""
    return x


async def command(world: World) -> StdioServerParameters:
    program, *words = forked.python()
    args = [*words, "-c", SERVER, str(world.home)]
    env = {"INTERLOCK_TOKEN": await world.token(), **postgres.given()}
    return StdioServerParameters(command=program, args=args, env=env, cwd=str(ROOT))


@asynccontextmanager
async def connected(world: World, mode: str, **options: Any) -> AsyncGenerator[Client]:
    async with Client(await command(world), mode=mode, read_timeout_seconds=PATIENCE_S, **options) as client:
        yield client


@DOOR
@pytest.mark.parametrize("version", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "1999-01-01"])
async def test_the_handshake_settles_on_a_version_both_know(world: World, version: str) -> None:
    hello = {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    started = await command(world)
    process = await asyncio.create_subprocess_exec(
        started.command, *started.args, env=started.env, cwd=started.cwd,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    request = orjson.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}) + b"\n"
    answer, _ = await asyncio.wait_for(process.communicate(request), PATIENCE_S)
    told = orjson.loads(answer)["result"]
    assert told["protocolVersion"] == (version if version > "2000" else "2025-11-25")
    assert told["capabilities"]["tools"] == {"listChanged": True}


@DOOR
async def test_the_modern_era_is_discovered_without_a_handshake(world: World) -> None:
    async with connected(world, "auto") as client:
        assert client.session.protocol_version == "2026-07-28"
        assert client.server_capabilities.tools == types.ToolsCapability(list_changed=True)


@DOOR
@ERAS
async def test_lists_come_page_by_page(world: World, mode: str) -> None:
    found: list[str] = []
    async with connected(world, mode) as client:
        page = await client.list_tools()
        while True:
            assert len(page.tools) <= 2
            found += [one.name for one in page.tools]
            if page.next_cursor is None:
                break
            page = await client.list_tools(cursor=page.next_cursor)
    assert len(found) == len(set(found)) == len(TOOLS) + len(OWN)


@DOOR
@ERAS
async def test_a_call_has_structured_content_or_fails_as_a_result(world: World, mode: str) -> None:
    async with connected(world, mode) as client:
        added = await client.call_tool("demo-add", {"a": 1, "b": 2})
        assert (added.is_error, added.structured_content) == (False, {"result": 3})
        failed = await client.call_tool("shapes-broken", {"x": 0})
        assert (failed.is_error, "it failed" in text(failed)) == (True, True)
        with pytest.raises(MCPError):
            await client.call_tool("demo-nothing", {})


@DOOR
@ERAS
async def test_clients_hear_of_a_tool_that_another_process_registers(world: World, mode: str) -> None:
    heard = asyncio.Event()

    async def hear(message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            heard.set()

    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(connected(world, mode, message_handler=hear))
        if mode != "legacy":
            await stack.enter_async_context(client.listen(tools_list_changed=True))
        await client.list_tools()
        await world.app.add(added_later)
        await asyncio.wait_for(heard.wait(), PATIENCE_S)


@DOOR
@ERAS
async def test_progress_is_told_in_order_before_the_result(world: World, mode: str) -> None:
    told: list[tuple[float, str | None]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, message))

    async with connected(world, mode) as client:
        result = await client.call_tool("slow-count", {"to": 3}, progress_callback=hear)
    assert result.structured_content == {"result": 3}
    assert [message for _, message in told][-3:] == ["step 0", "step 1", "step 2"]
    assert [progress for progress, _ in told] == sorted({progress for progress, _ in told})


@DOOR
@ERAS
async def test_a_call_that_its_client_gives_up_on_ends_on_record(world: World, mode: str) -> None:
    waiting = asyncio.Event()

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        if message == "waiting":
            waiting.set()

    def closed() -> list[dict[str, Any]]:
        return [record for record in records(world.app) if record["toolId"] == "slow.count"]

    async with connected(world, mode) as client:
        call = asyncio.ensure_future(client.call_tool("slow-count", {"to": 101}, progress_callback=hear))
        await asyncio.wait_for(waiting.wait(), PATIENCE_S)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(closed)
        # The process serves on.
        assert (await client.call_tool("demo-add", {"a": 1, "b": 2})).structured_content == {"result": 3}
    (record,) = closed()
    assert record["states"][-1] == "canceled"


@DOOR
@ERAS
async def test_tools_prompts_and_resources_of_an_upstream_ask_the_client_that_uses_them(
    world: World, mode: str
) -> None:
    """In the modern era the answer says what is to be asked, and the request comes again with it."""
    person = Person()
    async with asking.upstream(world, "stdio", protocol="modern"), connected(world, mode, **person.options) as client:
        (resource,) = (await client.list_resources()).resources
        assert str(resource.uri) == f"upstream:asks:{NOTE}"
        (read,) = (await client.read_resource(str(resource.uri))).contents
        assert isinstance(read, types.TextResourceContents)
        assert read.text.startswith("ann:")
        (prompt,) = (await client.list_prompts()).prompts
        (message,) = (await client.get_prompt(prompt.name, {})).messages
        assert isinstance(message.content, types.TextContent)
        assert message.content.text.startswith("ann:")
        assert text(await asking.call(client, "ask_twice", "x")) == "ann:n-x 0 ann:n-x 1"
    assert len(person.asked) == 4

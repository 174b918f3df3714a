"""Real clients in front of 5,000 tools: the list is short, a tool is searched for, loaded and called."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx2
import mcp_types as types
import pytest
import pytest_asyncio
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from interlock import Interlock
from interlock.api.service import Service
from interlock.api.tokens import Tokens
from interlock.data.canonical import digest
from interlock.doors.server import Listening, serving
from interlock.registry import admission
from interlock.registry.admission import TrialEvidence
from tests.clients.common import PATIENCE_S
from tests.clients.large import ARGUMENTS, FEWEST, MOST, QUERY, TOOLS, TURNS, WANTED
from tests.clients.target import Target, over_stdio
from tests.thorough import THOROUGH

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("module_leaves_nothing_behind"),
    pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.timeout(1800),
]
thorough = pytest.mark.skipif(not THOROUGH, reason="another client is loaded, which takes seconds")
_THINGS = ("order", "invoice", "customer", "parcel", "ticket", "meeting", "page", "picture", "song", "branch")
_ACTS = ("archive", "rename", "translate", "publish", "lock", "export", "tag", "copy", "merge", "print")


async def _fill(app: Interlock) -> None:
    """Publish thousands of tools beside the real ones. Nothing is bound to them: they are found, not called."""
    pattern = (await app.catalog.resolve("probe.add")).contract.manifest
    for number in range(TOOLS):
        act, thing = _ACTS[number % 10], _THINGS[number // 10 % 10]
        text = f"{act.capitalize()} a {thing} of department {number // 100}."
        manifest = pattern.model_copy(update={"tool_id": f"{act}_{thing}_{number}", "namespace": "office",
                                              "description": text})  # fmt: skip
        content = digest(manifest.document())
        pretend = TrialEvidence(content, True, "test", "")
        app.journal.post(admission.publish(manifest, content, "library:", pretend, "test"))
    await app.journal.drain()
    await app.catalog.forget()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(
    module_leaves_nothing_behind: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[tuple[Interlock, Target]]:
    home = tmp_path_factory.mktemp("large") / "home"
    async with Interlock.open(home, housekeeping=False) as app:
        await app.add_from(str(Path(__file__).with_name("tools.py")))
        await _fill(app)
        async with serving(Service(app), Listening(port=0, ports={})) as server:
            yield app, Target(f"http://127.0.0.1:{server.port}/mcp", "", over_stdio(home), "")


async def _mine(app: Interlock, target: Target, agent: str) -> Target:
    """The same place, with a token of its own: what one client loads is not loaded for another."""
    token = (await Tokens(app).issue(by=app.caller, agent=agent, tools=["*"]))["token"]
    return Target(target.url, token, target.command, target.marker)


@asynccontextmanager
async def _sdk(target: Target, wire: str, mode: str, hear: Any = None) -> AsyncGenerator[Client]:
    options: Any = {"mode": mode, "read_timeout_seconds": PATIENCE_S, "message_handler": hear}
    if wire == "stdio":
        async with Client(StdioServerParameters(command=target.command[0], args=target.command[1:]), **options) as made:
            yield made
        return
    headers = {"authorization": f"Bearer {target.token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=PATIENCE_S) as http,
        Client(streamable_http_client(target.url, http_client=http), **options) as made,
    ):
        yield made


async def _names(client: Client) -> list[str]:
    listed = await client.list_tools()
    assert listed.next_cursor is None
    return [one.name for one in listed.tools]


async def _found(client: Client) -> str:
    found = (await client.call_tool("search_tools", {"queries": [QUERY]})).structured_content
    assert found is not None
    return found["results"][0]["tools"][0]["name"]


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
@pytest.mark.parametrize("wire", ["http", pytest.param("stdio", marks=thorough)])
async def test_the_sdk_searches_loads_and_calls_in_both_eras(
    target: tuple[Interlock, Target], wire: str, mode: str
) -> None:
    mine = await _mine(*target, f"sdk-{wire}-{mode}")
    changed = asyncio.Event()

    async def hear(message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            changed.set()

    async with _sdk(mine, wire, mode, hear) as client:
        before = await _names(client)
        assert FEWEST <= len(before) <= MOST
        refused = await client.call_tool(WANTED, ARGUMENTS)
        assert refused.is_error or WANTED in before  # over stdio the caller is the same in both eras
        assert await _found(client) == WANTED
        loaded = (await client.call_tool("load_tools", {"names": [WANTED]})).structured_content
        assert loaded is not None
        assert set(loaded["tools"][0]["inputSchema"]["properties"]) == set(ARGUMENTS)
        if mode == "legacy" and WANTED not in before:
            async with asyncio.timeout(PATIENCE_S):
                await changed.wait()
        assert WANTED in await _names(client)
        assert len(await _names(client)) <= MOST
        assert (await client.call_tool(WANTED, ARGUMENTS)).structured_content == {"sum": 42}


async def test_a_client_that_ignores_list_changed_works_all_the_same(target: tuple[Interlock, Target]) -> None:
    for mode in ("2026-07-28", "legacy"):
        async with _sdk(await _mine(*target, f"deaf-{mode}"), "http", mode) as client:
            for name, arguments in TURNS[:-1]:
                assert not (await client.call_tool(name, arguments)).is_error
            assert (await client.call_tool(WANTED, ARGUMENTS)).structured_content == {"sum": 42}


@thorough
@pytest.mark.parametrize("wire", ["http", "stdio"])
async def test_fastmcp_searches_loads_and_calls(target: tuple[Interlock, Target], wire: str) -> None:
    from fastmcp.client import Client as FastMCPClient

    from tests.clients.probes import _transport  # pyright: ignore[reportPrivateUsage]

    mine = await _mine(*target, f"fastmcp-{wire}")
    async with FastMCPClient(_transport(mine, wire), timeout=PATIENCE_S) as client:
        assert FEWEST <= len(await client.list_tools()) <= MOST
        for name, arguments in TURNS[:-1]:
            await client.call_tool(name, arguments)
        assert WANTED in {one.name for one in await client.list_tools()}
        assert (await client.call_tool(WANTED, ARGUMENTS)).structured_content == {"sum": 42}


@thorough
async def test_an_agent_of_pydantic_ai_searches_loads_and_calls(target: tuple[Interlock, Target]) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.mcp import MCPToolset
    from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import AgentInfo, FunctionModel

    from tests.clients.probes import _transport  # pyright: ignore[reportPrivateUsage]

    offered: list[set[str]] = []
    heard: list[ModelMessage] = []

    def speak(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        offered.append({one.name for one in info.function_tools})
        heard[:] = messages
        turn = len(offered) - 1
        return ModelResponse([ToolCallPart(*TURNS[turn])] if turn < len(TURNS) else [TextPart("done")])

    mine = await _mine(*target, "pydantic-ai")
    # It keeps the list that it got first until it is told of a change, and subscribes to none in the modern era.
    toolset = MCPToolset[None](
        _transport(mine, "http"), cache_tools=False, read_timeout=PATIENCE_S, init_timeout=PATIENCE_S
    )
    agent: Any = Agent(FunctionModel(speak), toolsets=[cast("Any", toolset)])
    ended = await agent.run("what is 20 + 22?")
    assert ended.output == "done"
    assert FEWEST <= len(offered[0]) <= MOST
    assert WANTED not in offered[0]
    assert WANTED in offered[2]
    assert "42" in str(heard[-1])


@thorough
async def test_an_agent_of_the_openai_agents_sdk_searches_loads_and_calls(target: tuple[Interlock, Target]) -> None:
    from tests.clients.table import _outside  # pyright: ignore[reportPrivateUsage]

    mine = await _mine(*target, "openai-agents")
    assert await _outside("probe_large_openai_agents", "integrations")(mine, "http") == {"worked"}

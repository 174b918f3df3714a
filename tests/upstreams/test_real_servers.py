"""MCP servers that other people wrote, as upstreams: found, called, killed and called again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from interlock.call.connector import Discovered
from interlock.core.clock import Clock
from interlock.data.schema import Json
from interlock.upstreams.mcp import McpConfig, McpUpstream
from tests.upstreams.mcp_servers.real import node_server, python_server
from tests.upstreams.servers import remote_call
from tests.upstreams.test_children import children, gone

MODERN, HANDSHAKE = "2026-07-28", "2025-11-25"


@pytest.fixture(autouse=True)
def no_process_is_left() -> Generator[None]:
    before = children()
    yield
    assert children() <= before


@asynccontextmanager
async def served(command: list[str], **said: Any) -> AsyncGenerator[tuple[McpUpstream, Discovered]]:
    one = McpUpstream(
        "real", McpConfig.model_validate({"command": command, **said}), clock=Clock(), on_change=lambda: None
    )
    try:
        found = await one.discover()
        assert not found.refused
        yield one, found
    finally:
        async with asyncio.timeout(30):
            await one.close()


async def ask(one: McpUpstream, tool: str, arguments: Json | None = None, **facts: Any) -> Json:
    return await one.call(remote_call({"protocol": "mcp", "name": tool}, arguments, **facts))


def text(value: Json) -> str:
    return value["content"][0]["text"]


async def test_server_everything() -> None:
    heard: list[Json] = []
    async with served(node_server("server-everything"), protocol="handshake") as (one, found):
        assert len(found.tools) >= 13
        assert found.about["protocol"] == HANDSHAKE
        assert found.about["prompts"]
        assert found.about["resourceTemplates"]
        assert text(await ask(one, "echo", {"message": "hello"})) == "Echo: hello"
        value = await ask(one, "get-structured-content", {"location": "New York"})
        assert set(value["structuredContent"]) == {"temperature", "conditions", "humidity"}
        image = await ask(one, "get-tiny-image")
        assert any(block["type"] == "image" for block in image["content"])
        steps = {"duration": 0.2, "steps": 2}
        await ask(one, "trigger-long-running-operation", steps, progress=heard.append)
        assert [step["percent"] for step in heard] == [50.0, 100.0]
        resource = found.about["resources"][0]["uri"]
        assert (await one.read_resource(resource))["contents"]
        assert (await one.get_prompt("simple-prompt"))["messages"]
        await one.probe()


async def test_server_filesystem(tmp_path: Path) -> None:
    async with served([*node_server("server-filesystem"), str(tmp_path)]) as (one, found):
        assert {"read_text_file", "write_file"} <= {tool.name for tool in found.tools}
        path = str(tmp_path / "note.txt")
        await ask(one, "write_file", {"path": path, "content": "kept"}, writes=True)
        assert (tmp_path / "note.txt").read_text() == "kept"
        assert text(await ask(one, "read_text_file", {"path": path})) == "kept"


async def test_server_memory_killed_and_back(tmp_path: Path) -> None:
    env = {"MEMORY_FILE_PATH": str(tmp_path / "memory.jsonl")}
    before = children()
    async with served(node_server("server-memory"), env=env) as (one, found):
        assert len(found.tools) >= 9
        entity = {"name": "Ada", "entityType": "person", "observations": ["first"]}
        await ask(one, "create_entities", {"entities": [entity]}, writes=True)
        (pid,) = children() - before
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
        graph = await ask(one, "read_graph")
        assert graph["structuredContent"]["entities"][0]["name"] == "Ada"
        assert one.health()["restarts"] == 1


async def test_mcp_server_time() -> None:
    async with served(python_server("mcp-server-time")) as (one, found):
        assert found.about["protocol"] == MODERN
        given = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
        assert "21:00" in text(await ask(one, "convert_time", given))
        await one.probe()


async def test_mcp_server_git(tmp_path: Path) -> None:
    init = await asyncio.create_subprocess_exec("git", "init", "-q", str(tmp_path))
    assert await init.wait() == 0
    (tmp_path / "new.txt").write_text("x")
    async with served(python_server("mcp-server-git")) as (one, found):
        assert len(found.tools) >= 12
        assert "new.txt" in text(await ask(one, "git_status", {"repo_path": str(tmp_path)}))

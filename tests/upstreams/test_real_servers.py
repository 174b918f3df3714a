"""MCP servers that other people wrote, as upstreams: found, called, killed and called again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from interlock import Interlock
from interlock.audit.chain import verify
from interlock.call.connector import Discovered
from interlock.core.clock import Clock
from interlock.data.schema import Json
from interlock.upstreams.mcp import McpConfig, McpUpstream
from tests.support.calls import code, records
from tests.support.children import children, gone
from tests.support.mcp_servers.real import node_server, python_server
from tests.support.upstream_servers import remote_call

MODERN, HANDSHAKE = "2026-07-28", "2025-11-25"


@pytest.fixture(autouse=True)
def no_process_is_left() -> Generator[None]:
    before = children()
    yield
    assert children() <= before


@asynccontextmanager
async def served(
    command: list[str], refused: Sequence[str] = (), **said: Any
) -> AsyncGenerator[tuple[McpUpstream, Discovered]]:
    one = McpUpstream(
        "real", McpConfig.model_validate({"command": command, **said}), clock=Clock(), on_change=lambda: None
    )
    try:
        found = await one.discover()
        assert [name for name, _ in found.refused] == list(refused)
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
    # It has one tool that runs only as a task of an era whose tasks Interlock does not make.
    asked = served(node_server("server-everything"), ["simulate-research-query"], protocol="handshake")
    async with asked as (one, found):
        assert len(found.tools) >= 12
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
        assert (await one.content.read_resource(resource))["contents"]
        assert (await one.content.get_prompt("simple-prompt"))["messages"]
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


# Through a governed call


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


async def test_the_time_server_behind_a_governed_call(home: Path) -> None:
    config: Json = {"command": python_server("mcp-server-time"), "accept_hints": True}
    async with Interlock.open(home, housekeeping=False) as app:
        report = await app.upstreams.add("time", "mcp", config, by=app.caller)
        assert {one.state for one in report.tools} == {"admitted"}
        given = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
        done = await app.call("time.convert_time", given)
        assert "21:00" in str(done.unwrap())
        (closed,) = records(app, done.invocation_id)
        assert closed["toolId"] == "time.convert_time"
        refused = await app.call("time.convert_time", {**given, "time": 12})
        assert code(refused) == "E3301"
        assert verify(app.home).faults == ()


async def test_files_of_the_filesystem_server_are_written_once_and_come_back(home: Path, tmp_path: Path) -> None:
    """A recipe makes `write_file` honestly reversible: nobody is asked, and the text from before is written back."""
    folder = tmp_path / "files"
    folder.mkdir()
    note = folder / "note.txt"
    note.write_text("before")
    undo = {
        "before": {"tool": "read_text_file", "arguments": {"path": "/input/path"}},
        "tool": "write_file",
        "arguments": {"path": "/input/path", "content": "/before/structuredContent/content"},
        "example": {"path": str(note), "content": "a trial"},
    }
    overlay: Json = {
        "tools": {
            "read_text_file": {"mutation_class": "read_only"},
            "write_file": {"mutation_class": "write_reversible", "undo": undo},
        }
    }
    config: Json = {"command": [*node_server("server-filesystem"), str(folder)]}
    async with Interlock.open(home, housekeeping=False) as app:
        await app.upstreams.add("files", "mcp", config, by=app.caller, overlay=overlay)
        assert note.read_text() == "before", "admission has written to it, and undone that"
        given = {"path": str(note), "content": "after"}
        done = await app.call("files.write_file", given, key="one")
        assert done.ok, done.error
        assert note.read_text() == "after"
        note.write_text("somebody else's")
        again = await app.call("files.write_file", given, key="one")
        assert (again.ok, again.replayed) == (True, True)
        assert note.read_text() == "somebody else's", "under its key it runs once"
        assert (await app.undo(done.invocation_id, key="undo")).ok
        assert note.read_text() == "before"
        asked = await app.call("files.move_file", {"source": str(note), "destination": str(note) + "2"}, key="two")
        assert asked.pending, "of a tool without a recipe nothing is known, so a person is asked"


async def test_an_entity_of_the_memory_server_is_taken_back_by_another_tool(home: Path, tmp_path: Path) -> None:
    """The undo takes a list of names, which is in the input of the call."""
    entity: Json = {"name": "Trial", "entityType": "trial", "observations": []}
    undo = {
        "tool": "delete_entities",
        "arguments": {"entityNames": "/input/entities/0/observations"},
        "example": {"entities": [{**entity, "observations": ["Trial"]}]},
    }
    overlay: Json = {
        "defaults": {"idempotency": "each"},
        "tools": {
            "read_graph": {"mutation_class": "read_only"},
            "create_entities": {"mutation_class": "write_reversible", "undo": undo},
        },
    }
    env = {"MEMORY_FILE_PATH": str(tmp_path / "memory.jsonl")}
    config: Json = {"command": node_server("server-memory"), "env": env}
    async with Interlock.open(home, housekeeping=False) as app:
        report = await app.upstreams.add("memory", "mcp", config, by=app.caller, overlay=overlay)
        states = {one.name: (one.state, one.reason) for one in report.tools}
        state, reason = states["create_entities"]
        assert (state, "only that its undo runs" in reason) == ("admitted", True)

        async def names() -> list[str]:
            graph = (await app.call("memory.read_graph", {})).unwrap()
            return [one["name"] for one in graph["structuredContent"]["entities"]]

        assert await names() == [], "what admission has created is gone"
        given = {"entities": [{**entity, "name": "Ada", "observations": ["Ada"]}]}
        done = await app.call("memory.create_entities", given)
        assert (done.ok, await names()) == (True, ["Ada"]), "no key is needed, and nobody is asked"
        assert (await app.undo(done.invocation_id, key="undo")).ok
        assert await names() == []

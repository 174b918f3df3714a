"""The MCP Inspector, as a client that others wrote in another language: it lists governed tools and calls one."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.support.calls import records
from tests.support.conformance import program
from tests.support.mcp import PATIENCE_S, World, world

__all__ = ["world"]


async def inspect(world: World, home: Path, token: str, *words: str) -> tuple[int | None, Any]:
    """What the Inspector prints of one request, and how it ended."""
    command = [*program("@modelcontextprotocol/inspector", "clients/launcher/build/index.js"), "--cli", world.url]
    process = await asyncio.create_subprocess_exec(
        *command, "--transport", "http", "--header", f"Authorization: Bearer {token}", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, "HOME": str(home)},
    )  # fmt: skip
    said, complaints = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    print(complaints.decode())
    return process.returncode, orjson.loads(said) if said.strip() else None


@pytest.mark.proves("OPS-02")
async def test_the_inspector_lists_governed_tools_and_calls_one(world: World, tmp_path: Path) -> None:
    token = await world.token(["demo.add"])
    ended, listed = await inspect(world, tmp_path, token, "--method", "tools/list")
    assert ended == 0
    assert [one["name"] for one in listed["tools"]] == ["demo-add"]
    call = ("--method", "tools/call", "--tool-name", "demo-add", "--tool-arg", "a=1", "b=2")
    ended, result = await inspect(world, tmp_path, token, *call)
    assert ended == 0
    assert result["structuredContent"] == {"result": 3}
    assert [record["door"] for record in records(world.app) if record["toolId"] == "demo.add"] == ["mcp"]
    refused, _ = await inspect(world, tmp_path, "nonsense", "--method", "tools/list")
    assert refused

"""MCP upstreams, and calls of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.upstreams.mcp import McpConfig, McpUpstream
from tests.support.upstream_servers import remote_call, served

SCRIPTED = Path(__file__).parents[1] / "support" / "mcp_servers" / "scripted.py"


async def ask(one: McpUpstream, tool: str, arguments: Json | None = None, **facts: Any) -> Json:
    return await one.call(remote_call({"protocol": "mcp", "name": tool}, arguments, **facts))


async def failure_of(one: McpUpstream, tool: str, arguments: Json | None = None, **facts: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        await ask(one, tool, arguments, **facts)
    return caught.value


def text(value: Json) -> str:
    return value["content"][0]["text"]


@asynccontextmanager
async def by_address(url: str, **facts: Any) -> AsyncGenerator[McpUpstream]:
    said: Json = {"url": url, "allow_private": True, **facts.pop("said", {})}
    given: dict[str, Any] = {"clock": Clock(), "on_change": lambda: None}
    one = McpUpstream("far", McpConfig.model_validate(said), **given | facts)
    try:
        yield one
    finally:
        async with asyncio.timeout(60):
            await one.close()


@asynccontextmanager
async def sdk_server() -> AsyncGenerator[str]:
    """The SDK's own server, over HTTP on this machine."""
    from tests.support.mcp_servers.sdk import app

    async with served(app()) as base:
        yield f"{base}/mcp"

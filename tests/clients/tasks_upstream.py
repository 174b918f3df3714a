"""Somebody else's MCP server whose tool runs only as a task: clients that take no tasks are refused."""

from __future__ import annotations

from typing import Any

import anyio
import mcp_types as types
from mcp import MCPError

from tests.clients.common import ONLY_AS_TASK
from tests.support.mcp_servers.jobs import TASKS, Jobs, stdio, takes_tasks


class OnlyTasks(Jobs):
    async def list(self, ctx: Any, params: Any) -> types.ListToolsResult:
        takes: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}}
        return types.ListToolsResult(tools=[types.Tool(name="greet-later", description="Greet.", input_schema=takes)])

    async def call(self, ctx: Any, params: types.CallToolRequestParams) -> Any:
        if (params.arguments or {}).get("name") == "nobody":  # contract tests have no client
            return types.CallToolResult(content=[types.TextContent(text="Hello, nobody!")])
        if not takes_tasks(ctx):
            raise MCPError(-32021, ONLY_AS_TASK, {"requiredCapabilities": {"extensions": {TASKS: {}}}})
        return await super().call(ctx, params)


if __name__ == "__main__":
    anyio.run(stdio, OnlyTasks())

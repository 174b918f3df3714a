"""A server made with the official SDK, which speaks both eras."""

from __future__ import annotations

from typing import Any

import anyio
import mcp_types as types
from mcp.server import Server, ServerRequestContext
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from mcp.shared.exceptions import MCPError
from starlette.applications import Starlette

OBJECT: dict[str, Any] = {"type": "object", "properties": {}}


class Bench:
    """The tools of one server."""

    def __init__(self) -> None:
        said = {"type": "string", "x-mcp-header": "Said"}
        self.tools = [
            types.Tool(name="echo", input_schema={"type": "object", "properties": {"text": said}}),
            *(types.Tool(name=name, input_schema=OBJECT) for name in ("count", "hang", "cancelled", "grow")),
        ]
        self.cancelled = anyio.Event()
        self.bus = InMemorySubscriptionBus()

    async def list(self, ctx: ServerRequestContext[Any, Any], params: Any) -> types.ListToolsResult:
        start = int(params.cursor) if params and params.cursor else 0
        following = start + 2 if start + 2 < len(self.tools) else None
        return types.ListToolsResult(
            tools=self.tools[start : start + 2], next_cursor=str(following) if following else None
        )

    async def call(
        self, ctx: ServerRequestContext[Any, Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        given = params.arguments or {}
        match params.name:
            case "echo":
                assert ctx.request is not None
                value: dict[str, Any] = {"text": given["text"], "headers": dict(ctx.request.headers)}
            case "count":
                for step in range(given["to"]):
                    await ctx.session.report_progress(step + 1, given["to"], "on")
                value = {}
            case "hang":
                try:
                    await anyio.sleep_forever()
                finally:
                    self.cancelled.set()
                value = {}
            case "cancelled":
                await self.cancelled.wait()
                value = {}
            case "grow":
                self.tools.append(types.Tool(name=f"grown{len(self.tools)}", input_schema=OBJECT))
                await self.bus.publish(ToolsListChanged())
                await ctx.session.send_tool_list_changed()
                value = {}
            case name:
                raise MCPError(code=types.INVALID_PARAMS, message=f"there is no tool {name}")
        return types.CallToolResult(content=[], structured_content=value)


def app() -> Starlette:
    bench = Bench()
    server: Server[Any] = Server(
        "bench",
        version="1",
        on_list_tools=bench.list,
        on_call_tool=bench.call,
        on_subscriptions_listen=ListenHandler(bench.bus),
        get_tool_input_schema=lambda name: next((one.input_schema for one in bench.tools if one.name == name), None),
    )
    return server.streamable_http_app(stateless_http=False, json_response=False)

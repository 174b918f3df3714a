"""Somebody else's MCP server, for the table of clients: tools that ask their client, a resource and a prompt."""

from __future__ import annotations

from typing import Any

import anyio
import mcp_types as types
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server

NOTE = "note://first"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"answer": {"type": "string"}}}
TAKES: dict[str, Any] = {"type": "object", "properties": {"who": {"type": "string"}}}


async def tools(ctx: Any, params: Any) -> types.ListToolsResult:
    found = [
        types.Tool(name=name, description="Ask the client, then answer.", input_schema=TAKES)
        for name in ("ask", "sample", "roots")
    ]
    return types.ListToolsResult(tools=found)


async def call(ctx: ServerRequestContext[Any, Any], params: types.CallToolRequestParams) -> types.CallToolResult:
    session: Any = ctx.session
    if (params.arguments or {}).get("who") == "nobody":  # contract tests have no client that could be asked
        told = "nobody"
    elif params.name == "ask":
        answer = await session.elicit_form("Who?", SCHEMA, related_request_id=ctx.request_id)
        told = str(answer.content["answer"])
    elif params.name == "roots":
        told = ",".join(str(one.uri) for one in (await session.list_roots()).roots)
    else:
        said = types.SamplingMessage(role="user", content=types.TextContent(text="Who?"))
        message = await session.create_message(messages=[said], max_tokens=9, related_request_id=ctx.request_id)
        told = message.content.text
    return types.CallToolResult(content=[types.TextContent(text=told)])


async def resources(ctx: Any, params: Any) -> types.ListResourcesResult:
    return types.ListResourcesResult(resources=[types.Resource(uri=NOTE, name="first")])


async def read(ctx: Any, params: Any) -> types.ReadResourceResult:
    return types.ReadResourceResult(contents=[types.TextResourceContents(uri=NOTE, text="a note")])


async def prompts(ctx: Any, params: Any) -> types.ListPromptsResult:
    who = types.PromptArgument(name="who", required=True)
    return types.ListPromptsResult(prompts=[types.Prompt(name="greet", arguments=[who])])


async def prompt(ctx: Any, params: types.GetPromptRequestParams) -> types.GetPromptResult:
    words = types.TextContent(text=f"greet {(params.arguments or {}).get('who')}")
    return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=words)])


async def _main() -> None:
    server = Server[Any](
        "asks",
        version="1",
        on_list_tools=tools,
        on_call_tool=call,
        on_list_resources=resources,
        on_read_resource=read,
        on_list_prompts=prompts,
        on_get_prompt=prompt,
    )
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


if __name__ == "__main__":
    anyio.run(_main)

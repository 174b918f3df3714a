"""The peers, each called the cheapest way its own users would, with typed arguments it validates."""

from __future__ import annotations

import os
from typing import Any

from bench.measure import Contender
from bench.payloads import Payload

LANGCHAIN = "LangChain tool.ainvoke"
MANAGER = "pydantic-ai ToolManager.handle_call"
TOOLSET = "pydantic-ai toolset: validate, call_tool"
FASTMCP = "FastMCP server.call_tool"
MCP = "mcp MCPServer.call_tool"


async def contenders(payload: Payload) -> list[Contender]:
    return [langchain(payload), *await pydantic_ai(payload), fastmcp(payload), mcp(payload)]


def bare(payload: Payload) -> Contender:
    function, arguments = payload.function, payload.arguments
    return Contender(name="bare function", call=lambda: function(**arguments))


def langchain(payload: Payload) -> Contender:
    # Tracing to a remote service would be switched on by the environment alone.
    for variable in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        os.environ.pop(variable, None)
    from langchain_core.tools import tool

    made = tool(payload.function)
    return Contender(name=LANGCHAIN, call=lambda: made.ainvoke(payload.arguments))


async def pydantic_ai(payload: Payload) -> list[Contender]:
    from pydantic_ai import FunctionToolset, RunContext
    from pydantic_ai.messages import ToolCallPart
    from pydantic_ai.models.test import TestModel
    from pydantic_ai.tool_manager import ToolManager
    from pydantic_ai.usage import RunUsage

    context = RunContext(deps=None, model=TestModel(), usage=RunUsage())
    toolset: Any = FunctionToolset([payload.function])
    manager: Any = await ToolManager(toolset).for_run_step(context)
    name, arguments = payload.function.__name__, payload.arguments
    tool = (await toolset.get_tools(context))[name]

    async def manage() -> Any:
        return await manager.handle_call(ToolCallPart(tool_name=name, args=arguments))

    async def call() -> Any:
        # A toolset takes arguments for granted; validating them is its caller's part.
        return await toolset.call_tool(name, tool.args_validator.validate_python(arguments), context, tool)

    return [Contender(name=MANAGER, call=manage), Contender(name=TOOLSET, call=call)]


def fastmcp(payload: Payload) -> Contender:
    from fastmcp import FastMCP

    server = FastMCP("bench")
    server.tool(payload.function)
    name, arguments = payload.function.__name__, payload.arguments
    return Contender(name=FASTMCP, call=lambda: server.call_tool(name, arguments), answer=_structured)


def mcp(payload: Payload) -> Contender:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("bench")
    server.tool()(payload.function)
    name, arguments = payload.function.__name__, payload.arguments
    return Contender(name=MCP, call=lambda: server.call_tool(name, arguments), answer=_structured)


def _structured(result: Any) -> Any:
    """The value of an MCP result; a value that is not an object comes wrapped."""
    content = result.structured_content
    return content["result"] if set(content) == {"result"} else content

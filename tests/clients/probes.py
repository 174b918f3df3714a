"""Probes of MCP clients: each uses one client as its users do, and reports which features worked.

A probe returns the features that worked, as a set. A feature that a client has no means for is not tried. A probe of
another environment is a script of its own and prints the same as JSON.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import mcp_types as types
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from tests.clients.common import AS_TASK, PATIENCE_S, ROOT, Report, approved, cancelled, task
from tests.clients.target import Target
from tests.support.task_extension import TasksExtension

Probe = Callable[[Target, str], Awaitable[set[str]]]


async def _elicit(context: Any, params: Any) -> types.ElicitResult:
    return types.ElicitResult(action="accept", content={"answer": "ann"})


async def _sample(context: Any, params: Any) -> types.CreateMessageResult:
    return types.CreateMessageResult(role="assistant", content=types.TextContent(text="ann"), model="m")


async def _roots(context: Any) -> types.ListRootsResult:
    return types.ListRootsResult(roots=[types.Root(uri=ROOT)])  # pyright: ignore[reportArgumentType]


@asynccontextmanager
async def _sdk_client(target: Target, wire: str, mode: str) -> AsyncGenerator[Client]:
    options: Any = {
        "mode": mode, "read_timeout_seconds": PATIENCE_S, "elicitation_callback": _elicit, "sampling_callback": _sample,
        "list_roots_callback": _roots, "extensions": [TasksExtension()],
    }  # fmt: skip
    if wire == "stdio":
        server = StdioServerParameters(command=target.command[0], args=target.command[1:])
        async with Client(server, **options) as client:
            yield client
        return
    headers = {"authorization": f"Bearer {target.token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=PATIENCE_S) as http,
        Client(streamable_http_client(target.url, http_client=http), **options) as client,
    ):
        yield client


def sdk(mode: str) -> Probe:
    """The client of the official SDK, in one era."""

    async def probe(target: Target, wire: str) -> set[str]:
        report, heard = Report(), list[Any]()

        async def hear(progress: float, total: float | None, message: str | None) -> None:
            heard.append(message)

        async with _sdk_client(target, wire, mode) as client:
            report("list", "probe-add" in {one.name for one in (await client.list_tools()).tools})
            added = await client.call_tool("probe-add", {"a": 1, "b": 2})
            report("call", _text(added.content) == '{"sum":3}' and not added.is_error)
            report("structured result", added.structured_content == {"sum": 3})
            report("images", _has_image((await client.call_tool("probe-picture", {})).content))
            failed = await client.call_tool("probe-fail", {"a": 2})
            report("error", failed.is_error and "on purpose" in _text(failed.content))
            await client.call_tool("probe-steps", {"to": 3}, progress_callback=hear)
            report("progress", "step 2" in heard)
            await cancelled(target.marker, lambda marker: client.call_tool("probe-hang", {"marker": marker}))
            report("approvals", await approved(lambda given: client.call_tool("probe-send", given)))
            report("elicitation", _text((await client.call_tool("asks-ask", {"who": "x"})).content) == "ann")
            report("roots", _text((await client.call_tool("asks-roots", {"who": "x"})).content) == ROOT)
            report("sampling", _text((await client.call_tool("asks-sample", {"who": "x"})).content) == "ann")
            (resource,) = (await client.list_resources()).resources
            report("resources", _text((await client.read_resource(str(resource.uri))).contents) == "a note")
            (prompt,) = (await client.list_prompts()).prompts
            said = (await client.get_prompt(prompt.name, {"who": "ann"})).messages[0].content
            report("prompts", getattr(said, "text", "") == "greet ann")
            report("tasks", await task(client.call_tool(*AS_TASK)))
        return report.worked

    return probe


def _text(content: Any) -> str:
    return "".join(getattr(one, "text", "") for one in content)


def _has_image(content: Any) -> bool:
    return any(getattr(one, "type", "") == "image" and one.mime_type == "image/png" for one in content)


# The libraries are large: they are loaded where they are probed, and not by each process that collects tests.


def _transport(target: Target, wire: str) -> Any:
    from fastmcp.client.transports import StdioTransport, StreamableHttpTransport

    if wire == "stdio":
        return StdioTransport(target.command[0], target.command[1:], keep_alive=False)
    return StreamableHttpTransport(target.url, headers={"authorization": f"Bearer {target.token}"})


def _handlers(heard: list[Any]) -> dict[str, Any]:
    """The handlers of FastMCP's client, which pydantic-ai uses too. Messages of progress are added to `heard`."""

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message)

    async def elicit(message: str, response_type: Any, params: Any, context: Any) -> Any:
        return {"answer": "ann"}

    async def sample(messages: Any, params: Any, context: Any) -> str:
        return "ann"

    return {"elicitation_handler": elicit, "sampling_handler": sample, "progress_handler": hear, "roots": [ROOT]}


async def fastmcp(target: Target, wire: str) -> set[str]:
    """FastMCP's client. It takes tasks if the package `fastmcp-tasks` has been imported."""
    from fastmcp.client import Client as FastMCPClient

    report, heard = Report(), list[Any]()
    async with FastMCPClient(_transport(target, wire), timeout=PATIENCE_S, **_handlers(heard)) as client:
        report("list", "probe-add" in {one.name for one in await client.list_tools()})
        added = await client.call_tool("probe-add", {"a": 1, "b": 2})
        report("call", _text(added.content) == '{"sum":3}')
        report("structured result", added.structured_content == {"sum": 3})
        report("images", _has_image((await client.call_tool("probe-picture", {})).content))
        failed = await client.call_tool("probe-fail", {"a": 2}, raise_on_error=False)
        report("error", failed.is_error and "on purpose" in _text(failed.content))
        await client.call_tool("probe-steps", {"to": 3})
        report("progress", "step 2" in heard)
        await cancelled(target.marker, lambda marker: client.call_tool("probe-hang", {"marker": marker}))
        report("approvals", await approved(lambda given: client.call_tool("probe-send", given)))
        report("elicitation", _text((await client.call_tool("asks-ask", {"who": "x"})).content) == "ann")
        report("roots", _text((await client.call_tool("asks-roots", {"who": "x"})).content) == ROOT)
        report("sampling", _text((await client.call_tool("asks-sample", {"who": "x"})).content) == "ann")
        (resource,) = await client.list_resources()
        report("resources", _text(await client.read_resource(str(resource.uri))) == "a note")
        (prompt,) = await client.list_prompts()
        said = (await client.get_prompt(prompt.name, {"who": "ann"})).messages[0].content
        report("prompts", getattr(said, "text", "") == "greet ann")
        report("tasks", await task(client.call_tool(*AS_TASK)))
    return report.worked


async def pydantic_ai(target: Target, wire: str) -> set[str]:
    """The toolset of pydantic-ai. It takes tasks if the package `fastmcp-tasks` is installed."""
    from pydantic_ai.exceptions import ModelRetry
    from pydantic_ai.mcp import MCPToolset

    report, heard = Report(), list[Any]()

    toolset = MCPToolset[None](
        _transport(target, wire), read_timeout=PATIENCE_S, init_timeout=PATIENCE_S, **_handlers(heard)
    )
    async with toolset:
        report("list", "probe-add" in {one.name for one in await toolset.list_tools()})
        added = await toolset.direct_call_tool("probe-add", {"a": 1, "b": 2})
        report("call", added is not None)
        report("structured result", added == {"sum": 3})
        report("images", "image/png" in str(await toolset.direct_call_tool("probe-picture", {})))
        try:
            await toolset.direct_call_tool("probe-fail", {"a": 2})
        except ModelRetry as error:
            report("error", "on purpose" in str(error))
        await toolset.direct_call_tool("probe-steps", {"to": 3})
        report("progress", "step 2" in heard)
        await cancelled(target.marker, lambda marker: toolset.direct_call_tool("probe-hang", {"marker": marker}))
        report("approvals", await approved(lambda given: toolset.direct_call_tool("probe-send", given)))
        report("roots", await toolset.direct_call_tool("asks-roots", {"who": "x"}) == ROOT)
        report("elicitation", await toolset.direct_call_tool("asks-ask", {"who": "x"}) == "ann")
        report("sampling", await toolset.direct_call_tool("asks-sample", {"who": "x"}) == "ann")
        (resource,) = await toolset.list_resources()
        report("resources", await toolset.read_resource(resource.uri) == "a note")
        (prompt,) = await toolset.list_prompts()
        report("prompts", "greet ann" in str(await toolset.get_prompt(prompt.name, {"who": "ann"})))
        report("tasks", await task(toolset.direct_call_tool(*AS_TASK)))
    return report.worked


PROBES: dict[str, Probe] = {
    "MCP SDK 2, 2026-07-28": sdk("2026-07-28"),
    "MCP SDK 2, handshake": sdk("legacy"),
    "FastMCP 4": fastmcp,
    "pydantic-ai 2": pydantic_ai,
}

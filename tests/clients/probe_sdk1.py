# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""The client of the official SDK before its second version."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from mcp import ClientSession, StdioServerParameters, types
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamablehttp_client

from tests.clients.common import AS_TASK, ROOT, Report, approved, cancelled, run, task


async def probe(target: dict[str, Any], wire: str) -> set[str]:
    report, heard = Report(), []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message)

    async def elicit(context: Any, params: Any) -> types.ElicitResult:
        return types.ElicitResult(action="accept", content={"answer": "ann"})

    async def sample(context: Any, params: Any) -> types.CreateMessageResult:
        said = types.TextContent(type="text", text="ann")
        return types.CreateMessageResult(role="assistant", content=said, model="m")

    async def roots(context: Any) -> types.ListRootsResult:
        return types.ListRootsResult(roots=[types.Root(uri=ROOT)])

    async with AsyncExitStack() as stack:
        if wire == "stdio":
            program, *arguments = target["command"]
            streams = await stack.enter_async_context(
                stdio_client(StdioServerParameters(command=program, args=arguments))
            )
        else:
            headers = {"Authorization": f"Bearer {target['token']}"}
            streams = await stack.enter_async_context(streamablehttp_client(target["url"], headers=headers))
        made = ClientSession(
            *streams[:2], elicitation_callback=elicit, sampling_callback=sample, list_roots_callback=roots
        )
        client = await stack.enter_async_context(made)
        await client.initialize()
        report("list", "probe-add" in {one.name for one in (await client.list_tools()).tools})
        added = await client.call_tool("probe-add", {"a": 1, "b": 2})
        report("call", added.content[0].text == '{"sum":3}')
        report("structured result", added.structuredContent == {"sum": 3})
        report("images", "image" in {one.type for one in (await client.call_tool("probe-picture", {})).content})
        failed = await client.call_tool("probe-fail", {"a": 2})
        report("error", failed.isError and "on purpose" in failed.content[0].text)
        await client.call_tool("probe-steps", {"to": 3}, progress_callback=hear)
        report("progress", "step 2" in heard)
        if wire == "http":  # over stdio this client says nothing when a call is given up
            await cancelled(target["marker"], lambda marker: client.call_tool("probe-hang", {"marker": marker}))
        report("approvals", await approved(lambda given: client.call_tool("probe-send", given)))
        report("roots", (await client.call_tool("asks-roots", {"who": "x"})).content[0].text == ROOT)
        report("elicitation", (await client.call_tool("asks-ask", {"who": "x"})).content[0].text == "ann")
        report("sampling", (await client.call_tool("asks-sample", {"who": "x"})).content[0].text == "ann")
        (resource,) = (await client.list_resources()).resources
        report("resources", (await client.read_resource(resource.uri)).contents[0].text == "a note")
        (prompt,) = (await client.list_prompts()).prompts
        said = (await client.get_prompt(prompt.name, {"who": "ann"})).messages[0].content
        report("prompts", said.text == "greet ann")
        # Its experimental tasks are those of 2025-11-25, which have another form.
        report("tasks", await task(client.call_tool(*AS_TASK)))
    return report.worked


if __name__ == "__main__":
    run(probe)

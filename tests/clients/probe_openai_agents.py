# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""The MCP client of the OpenAI Agents SDK. It has no means for progress and questions."""

from __future__ import annotations

from typing import Any

from agents.mcp import MCPServerStdio, MCPServerStreamableHttp

from tests.clients.common import AS_TASK, PATIENCE_S, Report, approved, cancelled, run, task


async def probe(target: dict[str, Any], wire: str) -> set[str]:
    options: Any = {"client_session_timeout_seconds": PATIENCE_S}
    if wire == "stdio":
        program, *arguments = target["command"]
        made: Any = MCPServerStdio({"command": program, "args": arguments}, **options)
    else:
        headers = {"Authorization": f"Bearer {target['token']}"}
        made = MCPServerStreamableHttp({"url": target["url"], "headers": headers, "timeout": PATIENCE_S}, **options)
    report = Report()
    async with made as server:
        report("list", "probe-add" in {one.name for one in await server.list_tools()})
        added = await server.call_tool("probe-add", {"a": 1, "b": 2})
        report("call", added.content[0].text == '{"sum":3}')
        report("structured result", _structured(added) == {"sum": 3})
        report("images", "image" in {one.type for one in (await server.call_tool("probe-picture", {})).content})
        report("approvals", await approved(lambda given: server.call_tool("probe-send", given)))
        failed = await server.call_tool("probe-fail", {"a": 2})
        report("error", "on purpose" in failed.content[0].text)
        await cancelled(target["marker"], lambda marker: server.call_tool("probe-hang", {"marker": marker}))
        (resource,) = (await server.list_resources()).resources
        report("resources", (await server.read_resource(str(resource.uri))).contents[0].text == "a note")
        (prompt,) = (await server.list_prompts()).prompts
        said = (await server.get_prompt(prompt.name, {"who": "ann"})).messages[0].content
        report("prompts", said.text == "greet ann")
        report("tasks", await task(server.call_tool(*AS_TASK)))
    return report.worked


def _structured(result: Any) -> Any:
    return getattr(result, "structured_content", None) or getattr(result, "structuredContent", None)


if __name__ == "__main__":
    run(probe)

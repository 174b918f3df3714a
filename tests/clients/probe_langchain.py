# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""The MCP client of LangChain (`langchain-mcp-adapters`). It has no means for sampling."""

from __future__ import annotations

from typing import Any

from langchain_mcp_adapters.callbacks import Callbacks
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_mcp_adapters.prompts import load_mcp_prompt
from langchain_mcp_adapters.resources import load_mcp_resources
from langchain_mcp_adapters.tools import load_mcp_tools
from mcp.types import ElicitResult, ListRootsResult, Root

from tests.clients.common import AS_TASK, ROOT, Report, approved, cancelled, run, task


async def probe(target: dict[str, Any], wire: str) -> set[str]:
    report, heard = Report(), []

    async def hear(progress: float, total: float | None, message: str | None, context: Any) -> None:
        heard.append(message)

    async def elicit(mcp_context: Any, params: Any, context: Any) -> ElicitResult:
        return ElicitResult(action="accept", content={"answer": "ann"})

    async def roots(context: Any) -> ListRootsResult:
        return ListRootsResult(roots=[Root(uri=ROOT)])

    callbacks = Callbacks(on_progress=hear, on_elicitation=elicit)
    if wire == "stdio":
        program, *arguments = target["command"]
        entry: Any = {"transport": "stdio", "command": program, "args": arguments}
    else:
        headers = {"Authorization": f"Bearer {target['token']}"}
        entry = {"transport": "streamable_http", "url": target["url"], "headers": headers}
    entry["session_kwargs"] = {"list_roots_callback": roots}
    client = MultiServerMCPClient({"interlock": entry}, callbacks=callbacks)
    async with client.session("interlock") as session:
        loaded = await load_mcp_tools(session, callbacks=callbacks, server_name="interlock")
        tools = {one.name: one for one in loaded}
        report("list", "probe-add" in tools)
        added = await tools["probe-add"].ainvoke(_call("probe-add", a=1, b=2))
        report("call", '{"sum":3}' in str(added.content))
        report("structured result", (added.artifact or {}).get("structured_content") == {"sum": 3})
        report(
            "images", "'type': 'image'" in str((await tools["probe-picture"].ainvoke(_call("probe-picture"))).content)
        )
        failed = await tools["probe-fail"].ainvoke(_call("probe-fail", a=2))
        report("error", failed.status == "error" and "on purpose" in str(failed.content))
        await tools["probe-steps"].ainvoke({"to": 3})
        report("progress", "step 2" in heard)
        if wire == "http":  # the SDK below it says nothing over stdio when a call is given up
            await cancelled(target["marker"], lambda marker: tools["probe-hang"].ainvoke({"marker": marker}))
        report("approvals", await approved(lambda given: tools["probe-send"].ainvoke(given)))
        report("roots", ROOT in str(await tools["asks-roots"].ainvoke({"who": "x"})))
        report("elicitation", "ann" in str(await tools["asks-ask"].ainvoke({"who": "x"})))
        (resource,) = await load_mcp_resources(session)
        report("resources", resource.as_string() == "a note")
        (said,) = await load_mcp_prompt(session, "asks-greet", arguments={"who": "ann"})
        report("prompts", said.content == "greet ann")
        name, arguments = AS_TASK
        report("tasks", await task(tools[name].ainvoke(arguments)))
    return report.worked


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_call", "id": "1", "name": name, "args": arguments}


if __name__ == "__main__":
    run(probe)

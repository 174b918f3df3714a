"""A client of MCP 2026-07-28 that takes tasks."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import orjson

from tests.support.mcp_servers.jobs import TASKS

MODERN = "2026-07-28"
META = "io.modelcontextprotocol/"
PATIENCE_S = 60


class TaskClient:
    """A client of 2026-07-28 that takes tasks, by hand: the SDK's does not."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http

    async def request(self, method: str, params: dict[str, Any], *, able: Any = None, **headers: str) -> Any:
        """The result of a request, or its error."""
        capabilities: Any = {"elicitation": {}, "extensions": {TASKS: {}}} if able is None else able
        meta: Any = {f"{META}protocolVersion": MODERN, f"{META}clientCapabilities": capabilities}
        named = params.get("name") or params.get("taskId") or ""
        said = {
            "accept": "application/json, text/event-stream", "mcp-protocol-version": MODERN, "mcp-method": method,
            "mcp-name": named, **headers,
        }  # fmt: skip
        body: Any = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": meta}}
        answer = (await self._http.post("/mcp", json=body, headers=said)).text
        lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
        told = orjson.loads(lines[-1] if lines else answer)
        return told["result"] if "result" in told else told["error"]

    async def call(self, name: str, arguments: dict[str, Any], **options: Any) -> Any:
        return await self.request("tools/call", {"name": name, "arguments": arguments}, **options)

    async def get(self, task: Any) -> Any:
        return await self.request("tasks/get", {"taskId": task["taskId"]})

    async def until(self, task: Any, status: str) -> Any:
        state: Any = None
        async with asyncio.timeout(PATIENCE_S):
            while (state := await self.get(task))["status"] != status:
                assert state["status"] in ("working", "input_required"), state
        return state

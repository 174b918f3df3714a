"""A server that ends, and one that has only begun: whoever asks is told in the usual form."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import httpx
import pytest

from interlock import Interlock, tool
from interlock.api.service import Service
from interlock.doors import rest
from interlock.doors.server import Listening, serving
from tests import sample
from tests.support.calls import admit
from tests.support.grpc import refusal, served
from tests.support.servers import LOOPBACK, place

Json = dict[str, Any]
PATIENCE_S = 60
begun: list[asyncio.Event] = []


@tool(version="1.0.0", mutation_class="read_only", namespace="ending", timeout_class="long_running")
async def waits(x: sample.Number) -> int:
    """Wait until somebody cuts it off."""
    begun[0].set()
    await asyncio.Event().wait()
    return x


WAITS: Json = {"tool_id": "ending.waits", "parameters": {"x": 1}}
_MODERN = "2026-07-28"
_META = {
    "io.modelcontextprotocol/protocolVersion": _MODERN,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"},
}
_MCP = {
    "mcp-protocol-version": _MODERN, "mcp-method": "tools/call", "mcp-name": "ending-waits",
    "accept": "application/json, text/event-stream",
}  # fmt: skip
REQUESTS: dict[str, tuple[str, Json, dict[str, str]]] = {
    "rest": ("/v1/tools/invoke", WAITS, {}),
    "jsonrpc": ("/rpc", {"jsonrpc": "2.0", "id": 1, "method": "tools.invoke", "params": WAITS}, {}),
    "mcp": (
        "/mcp",
        {
            "jsonrpc": "2.0", "id": 1, "method": "tools/call",
            "params": {"name": "ending-waits", "arguments": {"x": 1}, "_meta": _META},
        },
        _MCP,
    ),
}  # fmt: skip


async def _ended(asking: Awaitable[httpx.Response]) -> httpx.Response:
    async with asyncio.timeout(PATIENCE_S):
        return await asking


@pytest.mark.parametrize("way", ["hurried", "out of time"])
@pytest.mark.parametrize("door", REQUESTS)
async def test_callers_that_are_cut_off_at_the_end_get_the_envelope(home: Path, door: str, way: str) -> None:
    path, body, headers = REQUESTS[door]
    begun[:] = [asyncio.Event()]
    listening = LOOPBACK if way == "hurried" else Listening(port=0, ports={}, drain_s=1)
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        async with place(home, listening) as here:
            await admit(here.app, waits)
            asking = asyncio.create_task(
                client.post(f"{here.base}{path}", json=body, headers={**here.bearer, **headers})
            )
            await asyncio.wait({asyncio.ensure_future(begun[0].wait()), asking}, return_when=asyncio.FIRST_COMPLETED)
            assert not asking.done(), asking.result().text
            if way == "hurried":
                here.server.hurry()
        answer = await _ended(asking)
    told = answer.json()["error"]
    assert (answer.status_code, told["error_code"], told["retryable"]) == (503, "E3001", False)
    assert "idempotency key" in told["resolution"]


async def test_a_grpc_caller_that_is_cut_off_at_the_end_gets_the_envelope(app: Interlock) -> None:
    begun[:] = [asyncio.Event()]
    async with served(app, drain_s=PATIENCE_S) as world:
        await admit(app, waits)
        asking = asyncio.ensure_future(world.invoke("ending.waits", {"x": 1}))
        await begun[0].wait()
        world.door.hurry()
        told = await refusal(asking)
    assert told.envelope.code == "E3001"


async def test_health_and_readiness_are_told_before_the_wide_api_is_there(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(_: Service) -> Any:
        raise AssertionError("the wide API was loaded")

    monkeypatch.setattr(rest, "rest_app", slow)
    async with Interlock.open(home, housekeeping=False) as app, serving(Service(app), LOOPBACK) as server:
        async with httpx.AsyncClient(base_url=f"http://localhost:{server.port}", timeout=PATIENCE_S) as client:
            assert (await client.get("/health")).json()["status"] == "healthy"
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["status"]) == (200, "healthy")
            assert (await client.head("/ready")).status_code == 200
        assert "upstreams" not in vars(app)

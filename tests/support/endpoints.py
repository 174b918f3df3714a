"""Connections to the endpoints of one server, for callers whose tokens have names."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import httpx
import httpx2
import orjson
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from interlock import Interlock
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.doors.grpc.v1.gateway_pb2_grpc import GatewayStub
from tests.support.answers import Wish
from tests.support.identities import did_of

Json = dict[str, Any]
MODERN = "2026-07-28"
META: Json = {"io.modelcontextprotocol/protocolVersion": MODERN, "io.modelcontextprotocol/clientCapabilities": {}}
BOTH = "application/json, text/event-stream"
# The handshake of an MCP client of the older era.
HELLO: Json = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
# The name of the era of each MCP wire for the SDK's client.
ERAS = {"mcp-modern": MODERN, "mcp-legacy": "legacy"}


@asynccontextmanager
async def dialled(port: int | None) -> AsyncGenerator[GatewayStub]:
    """A gRPC client of a port."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield GatewayStub(channel)


class Endpoints:
    """Connections to one server, and the tokens of its callers.

    Requests over `http` are of the caller "full", where there is such a token and they do not name another one.
    """

    def __init__(self, service: Service, port: int, grpc_port: int, tokens: dict[str, str]) -> None:
        self.service = service
        self.app: Interlock = service.app
        self.base = f"http://127.0.0.1:{port}"
        self.tokens = tokens
        self.http = httpx.AsyncClient(base_url=self.base, timeout=30)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}")
        self.stub = GatewayStub(self.channel)
        self._sessions: dict[str, str] = {}
        self._capabilities: Json = {}
        if "full" in tokens:
            self.bear(tokens["full"])

    async def close(self) -> None:
        await self.http.aclose()
        await self.channel.close(grace=None)

    def declare(self, capabilities: Json) -> None:
        """Go on as an MCP client that can do this."""
        self._capabilities = capabilities
        self._sessions.clear()

    def bear(self, token: str) -> None:
        """Go on with another token."""
        self.tokens["full"] = token
        self.http.headers.update(self.bearer())
        self._sessions.clear()

    def bearer(self, token: str = "full") -> dict[str, str]:
        """The headers of a caller."""
        return {"authorization": f"Bearer {self.tokens[token]}"}

    def metadata(self, token: str = "full") -> tuple[tuple[str, str], ...]:
        """The metadata of a caller over gRPC."""
        return tuple(self.bearer(token).items())

    def body(self, wish: Wish) -> Json:
        """A call as REST and JSON-RPC take it."""
        body: Json = {"tool_id": wish.tool, "parameters": wish.arguments, "dry_run": wish.dry_run}
        given = {
            "idempotency_key": wish.key, "tool_version": wish.version, "timeout_ms": wish.timeout_ms,
        }  # fmt: skip
        return body | {name: value for name, value in given.items() if value is not None}

    async def rpc_text(
        self, method: str, params: Json, token: str = "full", headers: dict[str, str] | None = None
    ) -> str:
        """The answer to a request over JSON-RPC, word for word."""
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return (await self.http.post("/rpc", json=request, headers=self.bearer(token) | (headers or {}))).text

    async def rpc(self, method: str, params: Json, token: str = "full") -> Json:
        """The whole answer to a request over JSON-RPC."""
        return orjson.loads(await self.rpc_text(method, params, token))

    async def mcp(self, method: str, params: Json, *, modern: bool, token: str = "full") -> str:
        """The answer to an MCP request, word for word, whether at once or as the last event of a stream."""
        headers = {**self.bearer(token), "accept": BOTH}
        if modern:
            able = {"io.modelcontextprotocol/clientCapabilities": self._capabilities}
            params = {**params, "_meta": {**META, **able, **params.get("_meta", {})}}
            headers |= {"mcp-protocol-version": MODERN, "mcp-method": method}
            named = params.get("name") or params.get("uri") or params.get("taskId")
            headers |= {} if named is None else {"mcp-name": named}
        else:
            headers["mcp-session-id"] = await self._handshake(token)
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        text = (await self.http.post("/mcp", json=body, headers=headers)).text
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        return events[-1] if events else text

    async def _handshake(self, token: str) -> str:
        if token not in self._sessions:
            headers = {**self.bearer(token), "accept": BOTH}
            hello = {**HELLO, "capabilities": self._capabilities}
            opening = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
            answer = await self.http.post("/mcp", json=opening, headers=headers)
            self._sessions[token] = headers["mcp-session-id"] = answer.headers["mcp-session-id"]
            ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
            await self.http.post("/mcp", json=ready, headers=headers)
        return self._sessions[token]

    @asynccontextmanager
    async def session(self, wire: str, token: str = "full", **options: Any) -> AsyncGenerator[Any]:
        """The MCP SDK's client in the era of a wire."""
        async with httpx2.AsyncClient(headers=self.bearer(token), timeout=30) as http:
            transport = streamable_http_client(f"{self.base}/mcp", http_client=http)
            async with Client(transport, mode=ERAS[wire], read_timeout_seconds=30, **options) as client:
                yield client

    async def knock(self, method: str, path: str, body: Json, headers: dict[str, str]) -> httpx.Response:
        """A request without any credential but those of its headers."""
        async with httpx.AsyncClient(base_url=self.base, timeout=30) as http:
            return await http.request(method, path, json=body, headers=headers)


async def register_people(app: Interlock) -> None:
    """The person ann, and the agent bot that acts for her."""
    for name, kind in (("ann", "human"), ("bot", "agent")):
        await app.identities.register(Identity(did=did_of(name), name=name, kind=kind, trust=80), by="test")  # pyright: ignore[reportArgumentType] - both are kinds

"""All that leaves each door, word for word: for tests that look for what must not be in it, or must.

The wires are those of `ways`; here they give what came over the wire, not what a client makes of it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import httpx
import orjson
from google.protobuf.json_format import MessageToDict
from google.rpc.status_pb2 import Status

from interlock import Interlock
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.doors.grpc.v1.gateway_pb2_grpc import GatewayStub
from interlock.doors.server import Listening, serving
from tests.support.identities import did_of

Json = dict[str, Any]
WIRES = ("rest", "jsonrpc", "grpc", "mcp-modern", "mcp-legacy")
MODERN = "2026-07-28"
META: Json = {"io.modelcontextprotocol/protocolVersion": MODERN, "io.modelcontextprotocol/clientCapabilities": {}}
BOTH = "application/json, text/event-stream"


@dataclass(frozen=True)
class Heard:
    """What came over a wire: all of it as text, its status there, and the data or the failure's envelope in it."""

    text: str
    status: int | str
    data: Any = None
    about: Any = None
    envelope: Json | None = None

    @property
    def failure(self) -> Json:
        assert self.envelope is not None, self.text
        return self.envelope

    @property
    def triple(self) -> tuple[str, str, str, bool]:
        told = self.failure
        return told["error_code"], told["errorCode"], told["error_class"], told["retryable"]


class Wires:
    """Every wire to one server, by one token."""

    def __init__(self, app: Interlock, service: Service, port: int, grpc_port: int, token: str) -> None:
        self.app = app
        self.service = service
        self._bearer = {"authorization": f"Bearer {token}"}
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, headers=self._bearer)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}")
        self._stub = GatewayStub(self.channel)
        self._session: str | None = None
        self._capabilities: Json = {}

    def declare(self, capabilities: Json) -> None:
        """Go on as an MCP client that can do this."""
        self._capabilities = capabilities
        self._session = None

    def bear(self, token: str) -> None:
        """Go on with another token."""
        self._bearer = {"authorization": f"Bearer {token}"}
        self.http.headers.update(self._bearer)
        self._session = None

    async def close(self) -> None:
        await self.http.aclose()
        await self.channel.close(grace=None)

    # Calling

    async def call(self, door: str, tool: str, arguments: Json, key: str | None = None) -> Heard:
        """One call through one door."""
        ways: Mapping[str, Callable[[], Awaitable[Heard]]] = {
            "rest": lambda: self._rest(tool, arguments, key),
            "jsonrpc": lambda: self._jsonrpc(tool, arguments, key),
            "grpc": lambda: self._grpc(tool, arguments, key),
            "mcp-modern": lambda: self._mcp(tool, arguments, key, modern=True),
            "mcp-legacy": lambda: self._mcp(tool, arguments, key, modern=False),
        }
        return await ways[door]()

    def _asked(self, tool: str, arguments: Json, key: str | None) -> Json:
        return {"tool_id": tool, "parameters": arguments, **({} if key is None else {"idempotency_key": key})}

    async def _rest(self, tool: str, arguments: Json, key: str | None) -> Heard:
        answer = await self.http.post("/v1/tools/invoke", json=self._asked(tool, arguments, key))
        body: Json = answer.json()
        told = f"{answer.headers}{answer.text}"
        if "error" in body:
            return Heard(told, answer.status_code, envelope=body["error"])
        return Heard(told, answer.status_code, body["result"], body)

    async def _jsonrpc(self, tool: str, arguments: Json, key: str | None) -> Heard:
        answer = await self.rpc("tools.invoke", self._asked(tool, arguments, key))
        body: Json = orjson.loads(answer)
        if "error" in body:
            return Heard(answer, body["error"]["code"], envelope=body["error"]["data"])
        return Heard(answer, 0, body["result"]["structured_content"], body["result"]["metadata"])

    async def rpc(self, method: str, params: Json) -> str:
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return (await self.http.post("/rpc", json=body)).text

    async def _grpc(self, tool: str, arguments: Json, key: str | None) -> Heard:
        request = wire.InvokeRequest(tool_id=tool, arguments_json=orjson.dumps(arguments), idempotency_key=key)
        try:
            answer = await self._stub.Invoke(request, metadata=tuple(self._bearer.items()))
        except grpc.aio.AioRpcError as error:
            return typed_refusal(error)
        about: Json = orjson.loads(answer.metadata_json)
        data = orjson.loads(answer.value_json) if answer.WhichOneof("outcome") == "value_json" else None
        return Heard(str(answer), "OK", data, about)

    async def _mcp(self, tool: str, arguments: Json, key: str | None, *, modern: bool) -> Heard:
        meta = {} if key is None else {"interlock/key": key}
        name = tool.replace(".", "-")
        text = await self.mcp("tools/call", {"name": name, "arguments": arguments, "_meta": meta}, modern=modern)
        body: Json = orjson.loads(text)
        if "error" in body:
            return Heard(text, body["error"]["code"], envelope=body["error"].get("data"))
        result: Json = body["result"]
        told: Json = result["_meta"]
        if "interlock/error" in told:
            assert result["isError"]
            return Heard(text, "isError", envelope=told["interlock/error"])
        return Heard(text, "result", result["structuredContent"], told["interlock/call"])

    async def mcp(self, method: str, params: Json, *, modern: bool) -> str:
        """What an MCP request is answered, whether at once or as the one event of a stream."""
        headers = {"accept": BOTH}
        if modern:
            able = {"io.modelcontextprotocol/clientCapabilities": self._capabilities}
            params = {**params, "_meta": {**META, **able, **params.get("_meta", {})}}
            headers |= {"mcp-protocol-version": MODERN, "mcp-method": method}
            named = params.get("name") or params.get("uri") or params.get("taskId")
            headers |= {} if named is None else {"mcp-name": named}
        else:
            headers["mcp-session-id"] = await self._handshake()
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        text = (await self.http.post("/mcp", json=body, headers=headers)).text
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        return events[-1] if events else text

    async def _handshake(self) -> str:
        if self._session is None:
            able, own = self._capabilities, {"name": "x", "version": "1"}
            hello = {"protocolVersion": "2025-06-18", "capabilities": able, "clientInfo": own}
            said = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
            answer = await self.http.post("/mcp", json=said, headers={"accept": BOTH})
            self._session = answer.headers["mcp-session-id"]
            ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
            await self.http.post("/mcp", json=ready, headers={"accept": BOTH, "mcp-session-id": self._session})
        return self._session

    # Finding

    async def found(self, door: str, tool: str) -> Sequence[str]:
        """All that a door says of a tool to those who look for it: lists, search results, descriptions."""
        ways: Mapping[str, Callable[[], Awaitable[Sequence[str]]]] = {
            "rest": lambda: self._found_by_rest(tool),
            "jsonrpc": lambda: self._found_by_rpc(tool),
            "grpc": lambda: self._found_by_grpc(tool),
            "mcp-modern": lambda: self._found_by_mcp(modern=True),
            "mcp-legacy": lambda: self._found_by_mcp(modern=False),
        }
        return await ways[door]()

    async def _found_by_rest(self, tool: str) -> Sequence[str]:
        word = tool.partition(".")[2]
        paths = ("/v1/tools", f"/v1/tools?q={word}", f"/v1/tools/{tool}", f"/v1/tools/{tool}/versions")
        paths += tuple(
            f"/v1/tools/declarations?provider={one}"
            for one in ("openai-chat", "openai-responses", "anthropic", "gemini")
        )
        return [(await self.http.get(path)).text for path in paths]

    async def _found_by_rpc(self, tool: str) -> Sequence[str]:
        return await self.rpc("tools.list", {}), await self.rpc("tools.describe", {"tool_id": tool})

    async def _found_by_grpc(self, tool: str) -> Sequence[str]:
        metadata = tuple(self._bearer.items())
        asked = (wire.DiscoverRequest(), wire.DiscoverRequest(query=tool.partition(".")[2]))
        listed = [str(await self._stub.Discover(one, metadata=metadata)) for one in asked]
        return [*listed, str(await self._stub.Describe(wire.DescribeRequest(tool_id=tool), metadata=metadata))]

    async def discovered(self, query: str = "", by: str = "") -> Sequence[wire.Tool]:
        """The tools that the gRPC door lists."""
        asked = wire.DiscoverRequest(query=query, by=by)
        return (await self._stub.Discover(asked, metadata=tuple(self._bearer.items()))).tools

    async def _found_by_mcp(self, *, modern: bool) -> Sequence[str]:
        return [await self.mcp("tools/list", {}, modern=modern)]


def typed_refusal(error: grpc.aio.AioRpcError) -> Heard:
    """A status with its details: the typed envelope under the names that it has elsewhere."""
    trailing: dict[str, bytes] = dict(cast("Any", error.trailing_metadata()) or ())
    status = Status.FromString(trailing["grpc-status-details-bin"])
    (packed,) = [one for one in status.details if one.type_url.endswith("/interlock.v1.ErrorEnvelope")]
    said = wire.ErrorEnvelope()
    packed.Unpack(said)
    told: Json = MessageToDict(said, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    envelope: Json = {
        **told,
        "errorCode": told["error_code"],
        "error_code": told["code"],
        "humanMessage": told["message"],
        "traceId": told["trace_id"],
        **({"retryAfterMs": said.retry_after_ms} if said.HasField("retry_after_ms") else {}),
        "details": orjson.loads(said.details_json) if said.details_json else {},
    }
    return Heard(f"{error.details()}{status}{said}{envelope}", error.code().name, envelope=envelope)


@asynccontextmanager
async def wired(app: Interlock) -> AsyncGenerator[Wires]:
    """A server over an open home, and every wire to it by a token for all tools."""
    if not app.issuer_keys.all():
        app.issuer_keys.init("EdDSA")
    await app.identities.register(Identity(did=did_of("bot"), name="bot", kind="agent", trust=80), by="test")
    token = await app.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("*")], by=app.caller)
    service = Service(app)
    async with serving(service, Listening(port=0, ports={"grpc": 0})) as server:
        wires = Wires(app, service, server.port, server.ports["grpc"], token)
        try:
            yield wires
        finally:
            await wires.close()


@asynccontextmanager
async def opened(home: Path, **settings: Any) -> AsyncGenerator[Wires]:
    """The same over a home on disk."""
    async with Interlock.open(home, housekeeping=False, **settings) as app, wired(app) as wires:
        yield wires

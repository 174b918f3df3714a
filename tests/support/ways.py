"""A client of every door, as others would write it: the library, HTTP, a gRPC stub, and the MCP SDK in both eras.

All speak to one server. What a client heard is in the same terms whatever the door, so that doors can be compared.
`wires` has what came over the wires, word for word.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
import httpx
import httpx2
import orjson
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from interlock import Interlock
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.core.errors import Failure
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.doors.grpc.v1.gateway_pb2_grpc import GatewayStub
from interlock.doors.server import Listening, serving
from tests.support.identities import did_of
from tests.support.wires import MODERN, WIRES, typed_refusal

Json = dict[str, Any]
DOORS = ("library", *WIRES)
# How the SDK's client names the era of each MCP wire.
ERAS = {"mcp-modern": MODERN, "mcp-legacy": "legacy"}


@dataclass(frozen=True)
class Wish:
    """A call as any client can ask for it."""

    tool: str
    arguments: Json
    key: str | None = None
    dry_run: bool = False
    token: str = "full"
    version: str | None = None


@dataclass(frozen=True)
class Told:
    """What a client heard: the data, a pending call, or the error's code, errorCode, class and whether to retry."""

    data: Any = None
    pending: bool = False
    error: tuple[str, str, str, bool] | None = None
    # What a caller is advised to do about the error.
    advice: str = ""
    # What each file that the call left is named, and what is in it by its hash and size.
    files: tuple[tuple[str, str, int], ...] = ()
    # Until when the version that ran can be called, and what comes after it.
    deprecation: Json | None = None
    # The whole error.
    envelope: Json = field(default_factory=dict[str, Any], compare=False)


def left(artifacts: Iterable[Json]) -> tuple[tuple[str, str, int], ...]:
    """Files as a door names them, without their references."""
    return tuple((one["path"], one["sha256"], one["size"]) for one in artifacts)


def failed(envelope: Mapping[str, Any]) -> Told:
    facts = (envelope["error_code"], envelope["errorCode"], envelope["error_class"], envelope["retryable"])
    return Told(error=cast("tuple[str, str, str, bool]", facts), advice=envelope["resolution"], envelope=dict(envelope))


class Ways:
    """Every way in to one server, for callers whose tokens have names."""

    def __init__(self, app: Interlock, base: str, grpc_port: int, tokens: dict[str, str]) -> None:
        self.app = app
        self.base = base
        self.tokens = tokens
        self.http = httpx.AsyncClient(base_url=base, timeout=30)
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}")
        self.stub = GatewayStub(self._channel)
        self.ways: Mapping[str, Callable[[Wish], Awaitable[Told]]] = {
            "library": self._library,
            "rest": self._rest,
            "jsonrpc": self._jsonrpc,
            "grpc": self._grpc,
            "mcp-modern": lambda wish: self._mcp(wish, "mcp-modern"),
            "mcp-legacy": lambda wish: self._mcp(wish, "mcp-legacy"),
        }

    async def close(self) -> None:
        await self.http.aclose()
        await self._channel.close(grace=None)

    def token(self, name: str) -> str:
        return self.tokens[name]

    def bearer(self, token: str = "full") -> dict[str, str]:
        """The headers, or the metadata, of a caller."""
        return {"authorization": f"Bearer {self.tokens[token]}"}

    def body(self, wish: Wish) -> Json:
        """A wish as REST and JSON-RPC take it."""
        body: Json = {"tool_id": wish.tool, "parameters": wish.arguments, "dry_run": wish.dry_run}
        body |= {} if wish.key is None else {"idempotency_key": wish.key}
        return body if wish.version is None else {**body, "tool_version": wish.version}

    async def rpc(self, method: str, params: Json, token: str = "full") -> Json:
        """The whole answer to a request over JSON-RPC."""
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return (await self.http.post("/rpc", json=request, headers=self.bearer(token))).json()

    @asynccontextmanager
    async def mcp(self, door: str, token: str = "full", **options: Any) -> AsyncGenerator[Any]:
        """The SDK's client in the era of a door."""
        async with httpx2.AsyncClient(headers=self.bearer(token), timeout=30) as http:
            transport = streamable_http_client(f"{self.base}/mcp", http_client=http)
            async with Client(transport, mode=ERAS[door], read_timeout_seconds=30, **options) as client:
                yield client

    # Calling

    async def _library(self, wish: Wish) -> Told:
        result = await self.app.call(
            wish.tool, wish.arguments, key=wish.key, dry_run=wish.dry_run, version=wish.version,
            token=self.tokens[wish.token],
        )  # fmt: skip
        if result.pending:
            return Told(pending=True)
        if result.error is not None:
            return failed(result.error.envelope(""))
        files = left(one.document() for one in result.artifacts)
        return Told(result.value, files=files, deprecation=result.metadata.get("deprecation"))

    async def _rest(self, wish: Wish) -> Told:
        answer = await self.http.post("/v1/tools/invoke", json=self.body(wish), headers=self.bearer(wish.token))
        body: Json = answer.json()
        if answer.status_code == 202:
            return Told(pending=True)
        if answer.status_code == 200:
            return Told(body["result"], files=left(body["artifacts"]), deprecation=body.get("deprecation"))
        told: Json = body["error"]
        assert answer.status_code == Failure(told["error_code"]).row.http
        if told.get("retryAfterMs") is not None:
            assert answer.headers["retry-after"] == str(math.ceil(told["retryAfterMs"] / 1000))
        return failed(told)

    async def _jsonrpc(self, wish: Wish) -> Told:
        answer = await self.rpc("tools.invoke", self.body(wish), wish.token)
        if "error" in answer:
            return failed(answer["error"]["data"])
        result: Json = answer["result"]
        if "pending" in result:
            return Told(pending=True)
        items: list[Json] = [one for one in result["content"] if one["type"] == "artifact_ref"]
        assert [one["ref"] for one in items] == result["artifact_refs"]
        files = left({**one, "size": one["size_bytes"]} for one in items)
        return Told(result["structured_content"], files=files, deprecation=result["metadata"].get("deprecation"))

    async def _grpc(self, wish: Wish) -> Told:
        request = wire.InvokeRequest(
            tool_id=wish.tool, arguments_json=orjson.dumps(wish.arguments), idempotency_key=wish.key,
            dry_run=wish.dry_run, version=wish.version,
        )  # fmt: skip
        try:
            answer = await self.stub.Invoke(request, metadata=tuple(self.bearer(wish.token).items()))
        except grpc.aio.AioRpcError as error:
            return failed(typed_refusal(error).failure)
        if answer.WhichOneof("outcome") == "pending":
            return Told(pending=True)
        files = tuple((one.path, one.sha256, one.size) for one in answer.artifacts)
        about: Json = orjson.loads(answer.metadata_json)
        return Told(orjson.loads(answer.value_json), files=files, deprecation=about.get("deprecation"))

    async def _mcp(self, wish: Wish, door: str) -> Told:
        meta: Json = {"interlock/dryRun": True} if wish.dry_run else {}
        meta |= {} if wish.key is None else {"interlock/key": wish.key}
        meta |= {} if wish.version is None else {"interlock/version": wish.version}
        async with self.mcp(door, wish.token) as client:
            try:
                answer: Any = await client.call_tool(wish.tool, wish.arguments, meta=meta)
            except MCPError as error:
                return failed(cast("Json", error.error.data))
            about: Json = answer.meta.get("interlock/call", {})
            files = left(about.get("artifacts", ()))
            links = [one for one in answer.content if one.type == "resource_link"]
            assert [(one.name, one.size) for one in links] == [(path, size) for path, _, size in files]
            for link, (_, sha256, _) in zip(links, files, strict=True):
                (read,) = (await client.read_resource(link.uri)).contents
                assert hashlib.sha256(_bytes(read)).hexdigest() == sha256
        told: Json = answer.meta
        if "interlock/error" in told:
            assert answer.is_error
            return failed(told["interlock/error"])
        if "interlock/pending" in told:
            return Told(pending=True)
        if "interlock/preview" in told:
            return Told(told["interlock/preview"])
        value: Json = answer.structured_content
        data = value["result"] if set(value) == {"result"} else value
        return Told(data, files=files, deprecation=about.get("deprecation"))

    # Finding

    async def found(self, door: str, token: str = "full") -> list[str]:
        """The addresses of the tools that a door lists."""
        bearer = self.bearer(token)
        if door == "library":
            caller = await self.app.caller_of(self.tokens[token])
            return [one.row.address for one in await Service(self.app).tools.visible(caller)]
        if door == "rest":
            return [one["tool_id"] for one in (await self.http.get("/v1/tools", headers=bearer)).json()["tools"]]
        if door == "jsonrpc":
            return [one["tool_id"] for one in (await self.rpc("tools.list", {}, token))["result"]["tools"]]
        if door == "grpc":
            listed = await self.stub.Discover(wire.DiscoverRequest(), metadata=tuple(bearer.items()))
            return [one.tool_id for one in listed.tools]
        async with self.mcp(door, token) as client:
            return [one.meta["interlock/address"] for one in (await client.list_tools()).tools]


def _bytes(read: Any) -> bytes:
    """What a resource holds: text, or bytes in base64."""
    return read.text.encode() if hasattr(read, "text") else base64.b64decode(read.blob)


async def register_people(app: Interlock) -> None:
    """The person ann, and the agent bot that acts for her."""
    for name, kind in (("ann", "human"), ("bot", "agent")):
        await app.identities.register(Identity(did=did_of(name), name=name, kind=kind, trust=80), by="test")  # pyright: ignore[reportArgumentType] - both are kinds


W = TypeVar("W", bound=Ways)


@asynccontextmanager
async def served(app: Interlock, tokens: dict[str, str], kind: Callable[..., W] = Ways) -> AsyncGenerator[W]:
    """A server over an open home, and every way in to it."""
    async with serving(Service(app), Listening(port=0, ports={"grpc": 0})) as server:
        ways = kind(app, f"http://127.0.0.1:{server.port}", server.ports["grpc"], tokens)
        try:
            yield ways
        finally:
            await ways.close()

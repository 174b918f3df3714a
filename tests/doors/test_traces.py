"""Reading the trace of a call back, through every door: callers read their own, auditors those of their tenant."""

from __future__ import annotations

import json
import os
from asyncio import to_thread
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc.aio
import httpx
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from interlock import Interlock
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.core.errors import Failure
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.doors.grpc.v1.gateway_pb2_grpc import GatewayStub
from interlock.doors.server import Listening, serving
from tests import sample, warm
from tests.upstreams.servers import Answer, HttpServer

Json = dict[str, Any]
DOORS = ("library", "rest", "jsonrpc", "grpc", "mcp-modern", "mcp-legacy", "cli")
STEPS = ["tool.invoke", "Validate", "Authorize", "Execute", "Verify", "Return"]
MINE, ALIEN, AUDITS, OF_OTHERS = "mine", "alien", "audits", "of-others"
_DID = "did:web:{}.example"


class Place:
    """A server that traces calls, and callers of it: two of one tenant, an auditor of it, and one of another tenant."""

    def __init__(self, app: Interlock, service: Service, port: int, grpc_port: int, tokens: dict[str, str]) -> None:
        self.app = app
        self.service = service
        self.base = f"http://127.0.0.1:{port}"
        self.grpc_port = grpc_port
        self.tokens = tokens

    async def call(self, who: str = MINE) -> str:
        """Make a call. Its id."""
        headers = {"authorization": f"Bearer {self.tokens[who]}"}
        async with httpx.AsyncClient(base_url=self.base, timeout=60) as http:
            body = {"tool_id": "demo.add", "parameters": {"a": 1, "b": 2}}
            told: Json = (await http.post("/v1/tools/invoke", json=body, headers=headers)).json()
        return told["invocation_id"]

    async def read(self, door: str, call: str, who: str) -> Json | str:
        """The trace of a call as a door gives it; the code of the refusal where it does not."""
        token = self.tokens[who]
        match door:
            case "library":
                try:
                    return await self.service.calls.trace(call, await self.app.caller_of(token))
                except Failure as failure:
                    return failure.code
            case "grpc":
                return await self._grpc(call, token)
            case "cli":
                return await self._cli(call, token)
            case "mcp-modern" | "mcp-legacy":
                return await self._mcp(door, call, token)
            case _:
                return await self._http(door, call, token)

    async def _http(self, door: str, call: str, token: str) -> Json | str:
        headers = {"authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=self.base, headers=headers, timeout=60) as http:
            if door == "rest":
                answer = await http.get(f"/v1/calls/{call}/trace")
                told: Json = answer.json()
                return told if answer.status_code == 200 else told["error"]["error_code"]
            asked = {"jsonrpc": "2.0", "id": 1, "method": "calls.trace", "params": {"invocation_id": call}}
            told = (await http.post("/rpc", json=asked)).json()
            return told["result"] if "result" in told else told["error"]["data"]["error_code"]

    async def _grpc(self, call: str, token: str) -> Json | str:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            request = wire.TraceRequest(invocation_id=call)
            try:
                told = await GatewayStub(channel).Trace(request, metadata=(("authorization", f"Bearer {token}"),))
            except grpc.aio.AioRpcError as error:
                details = dict(cast("Any", error.trailing_metadata()))["grpc-status-details-bin"]
                return next(code for code in ("E3702", "E3206") if code.encode() in details)
        spans = [
            {
                "name": one.name, "trace_id": one.trace_id, "span_id": one.span_id,
                "parent_span_id": one.parent_span_id or None, "start": one.start, "duration_ms": one.duration_ms,
                "status": one.status, "attributes": json.loads(one.attributes_json),
                "events": json.loads(one.events_json),
            }
            for one in told.spans
        ]  # fmt: skip
        return {
            "invocation_id": told.invocation_id, "trace_id": told.trace_id, "complete": told.complete, "spans": spans,
        }  # fmt: skip

    async def _mcp(self, door: str, call: str, token: str) -> Json | str:
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=60) as http:
            transport = streamable_http_client(f"{self.base}/mcp", http_client=http)
            era = "legacy" if door == "mcp-legacy" else "2026-07-28"
            async with Client(transport, mode=era, read_timeout_seconds=60) as client:
                try:
                    (content,) = (await client.read_resource(f"trace:{call}")).contents
                except MCPError as error:
                    return "E3702" if "Resource not found" in str(error) else str(error)
        return json.loads(cast("Any", content).text)

    async def _cli(self, call: str, token: str) -> Json | str:
        words = ["calls", "trace", call, "--url", self.base, "--token", token, "--json"]
        code, out, _ = await to_thread(warm.run, self.on_home(*words), os.environ, self.app.home.path)
        told: Json = json.loads(out)
        return told if code == 0 else told["error"]["error_code"]

    def on_home(self, *words: str) -> tuple[str, ...]:
        return ("--home", str(self.app.home.path), *words)


@asynccontextmanager
async def opened(home: Path, **settings: Any) -> AsyncGenerator[Place]:
    async with Interlock.open(home, housekeeping=False, **settings) as app:
        app.catalog.attach(sample.add)
        app.issuer_keys.init("EdDSA")
        tokens: dict[str, str] = {}
        for name, tenant, scopes in (
            (MINE, "acme", ()),
            (ALIEN, "acme", ()),
            (AUDITS, "acme", ("audit:read",)),
            (OF_OTHERS, "rival", ("audit:read",)),
        ):
            did = _DID.format(name)
            await app.identities.register(Identity(did=did, name=name, tenant=tenant), by="test")
            tokens[name] = await app.tokens.issue(subject=did, tools=[ToolGrant("*")], scopes=scopes, by=app.caller)
        service = Service(app)
        async with serving(service, Listening(port=0, ports={"grpc": 0})) as server:
            yield Place(app, service, server.port, server.ports["grpc"], tokens)


@pytest.mark.proves("OBS-01")
async def test_through_every_door_callers_read_their_own_traces_and_auditors_those_of_their_tenant(home: Path) -> None:
    async with opened(home, trace_ratio=1.0) as place:
        call = await place.call()
        expected = await place.read("library", call, MINE)
        assert isinstance(expected, dict)
        assert (expected["invocation_id"], expected["complete"]) == (call, True)
        assert [span["name"] for span in expected["spans"]] == STEPS
        assert {span["trace_id"] for span in expected["spans"]} == {expected["trace_id"]}
        root = expected["spans"][0]["attributes"]
        assert (root["tool.invocation_id"], root["tool.id"], root["tool.status"]) == (call, "demo.add", "succeeded")
        assert {"tool.version", "tool.latency_ms", "tool.cost"} <= root.keys()
        for door in DOORS:
            assert await place.read(door, call, MINE) == expected, door
            assert await place.read(door, call, AUDITS) == expected, door
            assert await place.read(door, call, ALIEN) == "E3702", door
            assert await place.read(door, call, OF_OTHERS) == "E3702", door
        # Looking at the calls of others is on record.
        await place.app.journal.commit(lambda _: None)
        read = place.app.journal.reader.all("SELECT COUNT(*) FROM journal WHERE kind = 'audit.read'")
        assert read[0][0] == len(DOORS)


@pytest.mark.proves("OBS-01")
async def test_through_every_door_the_attempts_of_an_external_call_are_shown(home: Path) -> None:
    tool: Json = {
        "name": "look", "description": "Looks at the one thing there is.", "path": "/thing",
        "input_schema": {"type": "object", "properties": {}}, "output_schema": {"type": "object"},
    }  # fmt: skip
    async with HttpServer.open() as far, opened(home, trace_ratio=1.0) as place:
        config: Json = {"urls": [far.url], "tools": [tool], "allow_private": True}
        overlay = {"tools": {"look": {"mutation_class": "read_only"}}}
        await place.app.upstreams.add("svc", "http", config, by=place.app.caller, overlay=overlay)
        far.answers = [Answer(status=503), Answer()]
        result = await place.app.call("svc.look", {}, caller=await place.app.caller_of(place.tokens[MINE]))
        assert result.ok, result.error
        for door in DOORS:
            told = await place.read(door, result.invocation_id, MINE)
            assert isinstance(told, dict)
            attempts = [span for span in told["spans"] if span["name"] == "Attempt"]
            assert [one["status"] for one in attempts] == ["UPSTREAM_FAILURE", "OK"], door
            assert [one["attributes"]["external.attempt"] for one in attempts] == [1, 2]
            assert [one["attributes"]["http.response.status_code"] for one in attempts] == [503, 200]
            assert {one["attributes"]["server.address"] for one in attempts} == {"127.0.0.1"}
        words = ["calls", "trace", result.invocation_id, "--url", place.base, "--token", place.tokens[MINE]]
        code, out, _ = await to_thread(warm.run, place.on_home(*words), os.environ, place.app.home.path)
        assert (code, f"attempt 1 to 127.0.0.1:{far.port}, 503" in out.decode()) == (0, True)


@pytest.mark.supports("OBS-01")
async def test_of_a_call_that_was_not_traced_one_span_tells_what_is_on_record(home: Path) -> None:
    async with opened(home) as place:
        call = await place.call()
        told = [await place.read(door, call, MINE) for door in ("library", "rest", "jsonrpc", "grpc", "mcp-modern")]
        assert all(one == told[0] for one in told)
        (first, *_) = told
        assert isinstance(first, dict)
        (span,) = first["spans"]
        assert (first["complete"], span["name"], span["status"]) == (False, "tool.invoke", "OK")
        assert span["attributes"]["tool.invocation_id"] == call
        assert span["attributes"]["tool.id"] == "demo.add"
        assert await place.read("library", "01ARZ3NDEKTSV4RRFFQ69G5FAV", MINE) == "E3702"


@pytest.mark.supports("OBS-01")
async def test_a_trace_shows_a_caller_only_the_calls_of_it_that_are_its_own(home: Path) -> None:
    async with opened(home, trace_ratio=1.0) as place:
        callers = {who: await place.app.caller_of(place.tokens[who]) for who in (MINE, ALIEN, AUDITS)}
        calls = {
            who: (await place.app.call("demo.add", a=1, caller=callers[who], trace_id="one-trace")).invocation_id
            for who in (MINE, ALIEN)
        }
        for who, seen in ((MINE, [MINE]), (ALIEN, [ALIEN]), (AUDITS, [MINE, ALIEN])):
            told = await place.service.calls.trace(calls[seen[0]], callers[who])
            roots = [one["attributes"]["tool.invocation_id"] for one in told["spans"] if one["name"] == "tool.invoke"]
            assert roots == [calls[one] for one in seen]

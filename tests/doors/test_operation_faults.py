"""A fault inside any operation leaves its door as an envelope that gives nothing away; the log has the rest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import grpc.aio
import orjson
import pytest

from interlock.call.capability import ToolGrant
from interlock.core.errors import CODES
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.doors.jsonrpc import JsonRpcDoor
from interlock.doors.mcp import McpDoor
from tests.support.answers import Heard, typed_refusal
from tests.support.faults import BEHIND, failing, logged, raising, sound
from tests.support.identities import did_of
from tests.support.wires import Wires, opened

Json = dict[str, Any]
CALL = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
CASE = {"principal": "bot", "tool": "demo.add", "expect": "allow"}
ARGUMENT = {"name": "a", "value": "b"}
SCOPES = ("tools:admin", "policy:read", "policy:admin", "budgets:read", "audit:read")
# The part of the service and its method that an operation needs, and the operation: by REST,
REST: list[tuple[str, str, str, Json | None]] = [
    ("registration.register", "POST", "/v1/tools/register", {"tool_id": "x"}),
    ("tools.page", "GET", "/v1/tools", None),
    ("tools.search", "GET", "/v1/tools?q=add", None),
    ("surface_views.show", "GET", "/v1/surface", None),
    ("surfaces.load", "POST", "/v1/tools/load", {"names": ["demo.add"]}),
    ("app.select", "POST", "/v1/tools/select", {"request": "add two numbers"}),
    ("app.recommend", "GET", "/v1/tools/recommendations", None),
    ("app.token_costs", "GET", "/v1/tools/cost", None),
    ("app.affordances", "GET", "/v1/tools/affordances?budget=1000", None),
    ("app.schema_part", "GET", "/v1/tools/demo.add/schema", None),
    ("tools.negotiate", "POST", "/v1/tools/negotiate", {"expected": {}}),
    ("providers.declarations", "GET", "/v1/tools/declarations?provider=anthropic", None),
    ("providers.call", "POST", "/v1/tools/calls", {"call": {}}),
    ("calls.resume", "POST", f"/v1/tools/resume/{CALL}", None),
    ("tools.find", "GET", "/v1/tools/demo.add", None),
    ("tools.find", "GET", "/v1/tools/demo.add/versions", None),
    ("tools.compare", "GET", "/v1/tools/demo.add/diff?old=1.0.0&new=1.0.0", None),
    ("registration.quarantined", "GET", "/v1/quarantine", None),
    ("registration.release", "POST", "/v1/quarantine/release", {"tool": "demo.add@1.0.0", "reason": "looked at"}),
    ("registration.deprecate", "POST", "/v1/tools/demo.add/deprecate", {"version": "1.0.0"}),
    ("listing.page", "GET", "/v1/calls", None),
    ("listing.top", "GET", "/v1/calls/top", None),
    ("calls.find", "GET", f"/v1/calls/{CALL}", None),
    ("calls.checkpoints", "GET", f"/v1/calls/{CALL}/checkpoints", None),
    ("calls.inputs", "GET", f"/v1/calls/{CALL}/inputs", None),
    ("calls.trace", "GET", f"/v1/calls/{CALL}/trace", None),
    ("calls.cancel", "POST", f"/v1/calls/{CALL}/cancel", None),
    ("undo", "POST", f"/v1/calls/{CALL}/undo", {"idempotency_key": "u"}),
    ("app.read_payload", "GET", "/v1/payloads/payload:x", None),
    ("app.read_part", "GET", "/v1/payloads/payload:x/part", None),
    ("administration.unknown_calls.unknown", "GET", "/v1/calls/unknown", None),
    ("administration.unknown_calls.settle", "POST", f"/v1/calls/{CALL}/settle", {"happened": False}),
    ("administration.identities.list", "GET", "/v1/identities", None),
    ("administration.identities.add", "POST", "/v1/identities", {"name": "x"}),
    ("administration.identities.revoke", "POST", "/v1/identities/revoke", {"who": "x", "reason": "lost"}),
    ("administration.signing_keys.list", "GET", "/v1/keys", None),
    ("administration.signing_keys.make", "POST", "/v1/keys", {}),
    ("administration.signing_keys.retire", "POST", "/v1/keys/retire", {"kid": "x"}),
    ("administration.signing_keys.jwks", "GET", "/v1/keys/jwks", None),
    ("administration.settings.show", "GET", "/v1/settings", None),
    ("policy.show", "GET", "/v1/policy", None),
    ("policy.apply", "PUT", "/v1/policy", {"text": ""}),
    ("policy.check", "POST", "/v1/policy/check", {"text": ""}),
    ("policy.forget", "POST", "/v1/policy/forget", {}),
    ("policy.test", "POST", "/v1/policy/test", {"cases": [CASE]}),
    ("policy.explain", "POST", "/v1/policy/explain", {"principal": "bot", "tool": "demo.add"}),
    ("budgets.show", "GET", "/v1/budgets", None),
    ("upstreams.all", "GET", "/v1/upstreams", None),
    ("upstreams.add", "POST", "/v1/upstreams", {"name": "x", "kind": "http", "config": {}}),
    ("upstreams.preview", "POST", "/v1/upstreams/preview", {"name": "x", "kind": "http", "config": {}}),
    ("upstreams.one", "GET", "/v1/upstreams/x", None),
    ("upstreams.probe", "POST", "/v1/upstreams/x/probe", None),
    ("upstreams.remove", "DELETE", "/v1/upstreams/x", None),
    ("upstreams.refresh", "POST", "/v1/upstreams/x/refresh", {}),
    ("upstreams.accept", "POST", "/v1/upstreams/x/accept", {"reason": "looked at"}),
    ("health.alive", "GET", "/health", None),
    ("health.readiness", "GET", "/ready", None),
]
# by JSON-RPC,
RPC: list[tuple[str, str, Json]] = [
    ("tools.page", "tools.list", {}),
    ("tools.search", "tools.search", {"query": "add"}),
    ("tools.find", "tools.describe", {"tool_id": "demo.add"}),
    ("tools.negotiate", "tools.negotiate", {"expected": {}}),
    ("surfaces.load", "tools.load", {"names": ["demo.add"]}),
    ("app.select", "tools.select", {"request": "add two numbers"}),
    ("app.recommend", "tools.recommend", {}),
    ("surface_views.show", "surface.show", {}),
    ("listing.page", "calls.list", {}),
    ("listing.top", "calls.top", {}),
    ("calls.find", "calls.status", {"invocation_id": CALL}),
    ("calls.trace", "calls.trace", {"invocation_id": CALL}),
    ("app.read_part", "calls.part", {"ref": "payload:x"}),
    ("calls.cancel", "calls.cancel", {"invocation_id": CALL}),
    ("calls.resume", "calls.resume", {"invocation_id": CALL}),
]
# by MCP,
MCP: list[tuple[str, str, Json]] = [
    ("tools.page", "tools/list", {}),
    ("app.read_payload", "resources/read", {"uri": "payload:x"}),
    ("app.read_part", "resources/read", {"uri": "payload:x?at=/a"}),
    ("calls.trace", "resources/read", {"uri": f"trace:{CALL}"}),
    ("tools.visible", "resources/list", {}),
    ("tools.visible", "resources/templates/list", {}),
    ("tools.visible", "resources/read", {"uri": "upstream:far:x"}),
    ("tools.visible", "prompts/list", {}),
    ("tools.visible", "prompts/get", {"name": "far-x"}),
    ("tools.visible", "completion/complete", {"ref": {"type": "ref/prompt", "name": "x"}, "argument": ARGUMENT}),
]
# These are of the handshake era only,
MCP_LEGACY: list[tuple[str, str, Json]] = [
    ("tools.visible", "resources/subscribe", {"uri": "upstream:far:x"}),
]
# these of the modern one,
_TAKES_TASKS: Json = {"extensions": {"io.modelcontextprotocol/tasks": {}}}
_TASK: Json = {"taskId": CALL, "_meta": {"io.modelcontextprotocol/clientCapabilities": _TAKES_TASKS}}
MCP_MODERN: list[tuple[str, str, Json]] = [
    ("calls.result", "tasks/get", _TASK),
    ("calls.find", "tasks/get", _TASK),
    ("calls.result", "tasks/update", {**_TASK, "inputResponses": {}}),
    ("calls.cancel", "tasks/cancel", _TASK),
]
# and by gRPC.
GRPC: list[tuple[str, str, Any]] = [
    ("tools.page", "Discover", wire.DiscoverRequest()),
    ("tools.search", "Discover", wire.DiscoverRequest(query="add")),
    ("tools.find", "Describe", wire.DescribeRequest(tool_id="demo.add")),
    ("surfaces.load", "Load", wire.LoadRequest(names=["demo.add"])),
    ("app.select", "Select", wire.SelectRequest(request="add two numbers")),
    ("app.recommend", "Recommend", wire.RecommendRequest()),
    ("surface_views.show", "Surface", wire.SurfaceRequest()),
    ("listing.page", "Calls", wire.CallsRequest()),
    ("listing.top", "Top", wire.TopRequest()),
    ("calls.find", "Status", wire.StatusRequest(invocation_id=CALL)),
    ("calls.trace", "Trace", wire.TraceRequest(invocation_id=CALL)),
    ("app.read_part", "Part", wire.PartRequest(ref="payload:x")),
    ("calls.cancel", "Cancel", wire.CancelRequest(invocation_id=CALL)),
    ("calls.resume", "Resume", wire.ResumeRequest(invocation_id=CALL)),
]


def _break(wires: Wires, patch: pytest.MonkeyPatch, needed: str, how: Any) -> None:
    owner: Any = wires.service
    *parts, name = needed.split(".")
    for part in parts:
        owner = getattr(owner, part)
    patch.setattr(owner, name, how)


async def _ready(wires: Wires) -> tuple[tuple[str, str], ...]:
    """Go on with a token that may do all of it."""
    app = wires.app
    token = await app.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("*")], scopes=SCOPES, by=app.caller)
    wires.bear(token)
    return (("authorization", f"Bearer {token}"),)


def _told(wires: Wires, caplog: pytest.LogCaptureFixture, heard: Heard, door: str, how: Any) -> None:
    envelope = sound(heard, door)
    assert envelope["error_code"] == ("E3000" if how is raising else "E3801"), heard.text
    assert logged(wires, caplog, envelope["traceId"]), heard.text


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("how", [raising, failing])
async def test_a_fault_in_any_operation_of_rest_is_an_envelope_and_the_log_says_what_it_was(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: Any
) -> None:
    async with opened(home) as wires:
        await _ready(wires)
        for needed, method, path, body in REST:
            with monkeypatch.context() as broken:
                _break(wires, broken, needed, how)
                answer = await wires.http.request(method, path, json=body)
            heard = Heard(f"{path} {answer.text}", answer.status_code, envelope=answer.json().get("error"))
            _told(wires, caplog, heard, "rest", how)
            assert answer.status_code == CODES[heard.failure["error_code"]].http, path


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("how", [raising, failing])
async def test_a_fault_in_any_method_of_json_rpc_is_an_envelope_and_the_log_says_what_it_was(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: Any
) -> None:
    async with opened(home) as wires:
        await _ready(wires)
        for needed, method, params in RPC:
            with monkeypatch.context() as broken:
                _break(wires, broken, needed, how)
                text = await wires.rpc_text(method, params)
            _told(wires, caplog, Heard(text, 0, envelope=orjson.loads(text)["error"]["data"]), "rest", how)


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("how", [raising, failing])
@pytest.mark.parametrize("modern", [True, False])
async def test_a_fault_in_any_request_of_mcp_is_an_envelope_and_the_log_says_what_it_was(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: Any, modern: bool
) -> None:
    async with opened(home) as wires:
        await _ready(wires)
        for needed, method, params in (*MCP, *(MCP_MODERN if modern else MCP_LEGACY)):
            with monkeypatch.context() as broken:
                _break(wires, broken, needed, how)
                text = await wires.mcp(method, params, modern=modern)
            _told(wires, caplog, Heard(text, 0, envelope=orjson.loads(text)["error"]["data"]), "grpc", how)


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("how", [raising, failing])
async def test_a_fault_in_any_rpc_of_grpc_is_an_envelope_and_the_log_says_what_it_was(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: Any
) -> None:
    async with opened(home) as wires:
        metadata = await _ready(wires)
        stub: Any = wires.stub
        start = wire.RunRequest(start=wire.InvokeRequest(tool_id="demo.add", arguments_json=b'{"a": 1}'))
        for needed, name, request in (*GRPC, ("calls.invoke", "Run", start)):
            with monkeypatch.context() as broken:
                _break(wires, broken, needed, how)
                rpc = getattr(stub, name)
                answered = (
                    rpc(iter([request]), metadata=metadata).read() if name == "Run" else rpc(request, metadata=metadata)
                )
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await answered
            _told(wires, caplog, typed_refusal(refused.value), "grpc", how)


# Calls, approvals, tokens, the journal and streams are broken in `test_contracts` and `test_faults`.
REST_ELSEWHERE = [
    ("POST", "/v1/tools/invoke"), ("GET", "/v1/events"), ("GET", f"/v1/calls/{CALL}/events"),
    *((method, path) for _, requests, _ in BEHIND.values() for method, path, _ in requests),
]  # fmt: skip
RPC_ELSEWHERE = {"tools.invoke", *(name for _, _, methods in BEHIND.values() for name in methods)}
# All but calls ask no other part for anything, or are answered by the SDK.
MCP_ELSEWHERE = {
    "tools/call", "resources/unsubscribe", "logging/setLevel", "ping", "server/discover", "subscriptions/listen",
}  # fmt: skip


@pytest.mark.proves("CONTRACT-13")
async def test_no_operation_is_left_out_here(home: Path) -> None:
    async with opened(home) as wires:
        document = (await wires.http.get("/openapi.json")).json()
        served = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
        named = [*REST_ELSEWHERE, *((method, path) for _, method, path, _ in REST)]
        assert {_route(served, method, path.partition("?")[0]) for method, path in named} == served
        assert {method for _, method, _ in RPC} | RPC_ELSEWHERE == set(JsonRpcDoor(wires.service)._methods)  # pyright: ignore[reportPrivateUsage]
        asked = {method for _, method, _ in (*MCP, *MCP_LEGACY, *MCP_MODERN)}
        assert asked | MCP_ELSEWHERE == set(McpDoor(wires.service)._sdk.server._request_handlers)  # pyright: ignore[reportPrivateUsage]
    rpcs = {method.name for method in wire.DESCRIPTOR.services_by_name["Gateway"].methods}
    assert {name for _, name, _ in GRPC} | {"Run", "Invoke"} == rpcs


def _route(served: set[tuple[str, str]], method: str, path: str) -> tuple[str, str]:
    """The operation that a path belongs to: a route of just that name, or else one with a parameter in it."""
    if (method, path) in served:
        return method, path
    forms = {one: re.sub(r"\{\w+\}", "[^/]+", one) for of, one in served if of == method}
    (found,) = [one for one, form in forms.items() if re.fullmatch(form, path)]
    return method, found

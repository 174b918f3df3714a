"""A fault inside any operation leaves its door as an envelope that gives nothing away; the log has the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc.aio
import orjson
import pytest

from interlock.call.capability import ToolGrant
from interlock.core.errors import CODES
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.doors.grpc.v1.gateway_pb2_grpc import GatewayStub
from tests.doors.test_contracts import failing, logged, raising, sound
from tests.support.identities import did_of
from tests.support.wires import Heard, Wires, opened, typed_refusal

Json = dict[str, Any]
CALL = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
SCOPES = ("tools:admin", "policy:read", "policy:admin", "budgets:read", "audit:read")
# The part of the service and its method that an operation needs, and the operation: by REST,
REST: list[tuple[str, str, str, Json | None]] = [
    ("registration.register", "POST", "/v1/tools/register", {"tool_id": "x"}),
    ("tools.page", "GET", "/v1/tools", None),
    ("tools.search", "GET", "/v1/tools?q=add", None),
    ("tools.negotiate", "POST", "/v1/tools/negotiate", {"expected": {}}),
    ("providers.declarations", "GET", "/v1/tools/declarations?provider=anthropic", None),
    ("providers.call", "POST", "/v1/tools/calls", {"call": {}}),
    ("calls.resume", "POST", f"/v1/tools/resume/{CALL}", None),
    ("tools.find", "GET", "/v1/tools/demo.add", None),
    ("tools.find", "GET", "/v1/tools/demo.add/versions", None),
    ("registration.deprecate", "POST", "/v1/tools/demo.add/deprecate", {"version": "1.0.0"}),
    ("listing.page", "GET", "/v1/calls", None),
    ("listing.top", "GET", "/v1/calls/top", None),
    ("calls.find", "GET", f"/v1/calls/{CALL}", None),
    ("calls.checkpoints", "GET", f"/v1/calls/{CALL}/checkpoints", None),
    ("calls.inputs", "GET", f"/v1/calls/{CALL}/inputs", None),
    ("calls.trace", "GET", f"/v1/calls/{CALL}/trace", None),
    ("calls.cancel", "POST", f"/v1/calls/{CALL}/cancel", None),
    ("undo", "POST", f"/v1/calls/{CALL}/undo", {"idempotency_key": "u"}),
    ("lock.read_payload", "GET", "/v1/payloads/payload:x", None),
    ("policy.show", "GET", "/v1/policy", None),
    ("policy.apply", "PUT", "/v1/policy", {"text": ""}),
    ("policy.check", "POST", "/v1/policy/check", {"text": ""}),
    ("policy.explain", "POST", "/v1/policy/explain", {"principal": "bot", "tool": "demo.add"}),
    ("budgets.show", "GET", "/v1/budgets", None),
    ("upstreams.all", "GET", "/v1/upstreams", None),
    ("upstreams.add", "POST", "/v1/upstreams", {"name": "x", "kind": "http", "config": {}}),
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
    ("tools.find", "tools.describe", {"tool_id": "demo.add"}),
    ("tools.negotiate", "tools.negotiate", {"expected": {}}),
    ("listing.page", "calls.list", {}),
    ("listing.top", "calls.top", {}),
    ("calls.find", "calls.status", {"invocation_id": CALL}),
    ("calls.trace", "calls.trace", {"invocation_id": CALL}),
    ("calls.cancel", "calls.cancel", {"invocation_id": CALL}),
    ("calls.resume", "calls.resume", {"invocation_id": CALL}),
]
# by MCP (other resources and prompts are an upstream's),
MCP: list[tuple[str, str, Json]] = [
    ("lock.read_payload", "resources/read", {"uri": "payload:x"}),
    ("calls.trace", "resources/read", {"uri": f"trace:{CALL}"}),
    ("tools.visible", "resources/list", {}),
    ("tools.visible", "resources/templates/list", {}),
    ("tools.visible", "prompts/list", {}),
]
# and by gRPC.
GRPC: list[tuple[str, str, Any]] = [
    ("tools.page", "Discover", wire.DiscoverRequest()),
    ("tools.search", "Discover", wire.DiscoverRequest(query="add")),
    ("tools.find", "Describe", wire.DescribeRequest(tool_id="demo.add")),
    ("listing.page", "Calls", wire.CallsRequest()),
    ("listing.top", "Top", wire.TopRequest()),
    ("calls.find", "Status", wire.StatusRequest(invocation_id=CALL)),
    ("calls.trace", "Trace", wire.TraceRequest(invocation_id=CALL)),
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
    lock = wires.lock
    token = await lock.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("*")], scopes=SCOPES, by=lock.caller)
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
                text = await wires.rpc(method, params)
            _told(wires, caplog, Heard(text, 0, envelope=orjson.loads(text)["error"]["data"]), "rest", how)


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("how", [raising, failing])
@pytest.mark.parametrize("modern", [True, False])
async def test_a_fault_in_a_resource_of_mcp_is_an_envelope_and_the_log_says_what_it_was(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: Any, modern: bool
) -> None:
    async with opened(home) as wires:
        await _ready(wires)
        for needed, method, params in MCP:
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
        stub: Any = GatewayStub(wires.channel)
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

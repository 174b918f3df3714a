"""A token bound to resources sees and touches only calls on these resources, at every door.

Two tables list all operations of all doors: those about one call or ticket, with how each is asked, and those that are
about none. A new operation is in neither, and the first test fails until somebody decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import httpx2
import orjson
import pytest
import pytest_asyncio
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from interlock import Context, Effect, Failure, Interlock, Preview, tool
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.call.context import Caller
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.doors.jsonrpc import JsonRpcDoor
from interlock.doors.rest.routes import ROUTERS
from interlock.window.reading import Part
from tests import sample
from tests.sample import TOOLS
from tests.support.calls import admit, until
from tests.support.identities import did_of
from tests.support.wires import Wires, served

Json = dict[str, Any]


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="demo", effects=[Effect("note:{name}", "UPDATE")],
    max_inline_chars=100, checkpoints=["half"],
)  # fmt: skip
async def note(ctx: Context, name: sample.Name, text: sample.Text) -> str:
    """Write a note, save how far that came, and give back more than travels inline."""
    if sample.world.gate is not None:
        await sample.world.gate.wait()
    await ctx.checkpoint("half", {"name": name})
    ctx.effect(f"note:{name}", "UPDATE", after=text)
    ctx.compensate_with(name=name, text="")
    return text * 100


@note.preview
def _(name: str, text: str) -> Preview:
    return Preview(impact=f"{name} would say {text}")


@note.compensate
async def _(name: str, text: str) -> None:
    return None


class World(Wires):
    """A served home; `whole` made all calls, the others are narrower tokens of the same agent for the same person."""

    async def rest(self, method: str, path: str, by: str, body: Json | None = None) -> httpx.Response:
        return await self.http.request(method, path, json=body, headers=self.bearer(by))

    async def invoke(self, tool_id: str, parameters: Json, by: str = "whole", **more: Any) -> Json:
        body = {"tool_id": tool_id, "parameters": parameters, **more}
        return (await self.rest("POST", "/v1/tools/invoke", by, body)).json()

    async def caller(self, by: str) -> Caller:
        return await self.app.caller_of(self.tokens[by])


NARROWED: dict[str, Json] = {
    "elsewhere": {"resources": ["note:b", "mail:ben"]},
    "nowhere": {"resources": []},
    "prefix": {"resources": ["note:aa*", "mail:annie"]},
}
WIDE_ENOUGH: Json = {"resources": ["note:a", "mail:ann"]}


@pytest_asyncio.fixture
async def world(home: Path) -> AsyncGenerator[World]:
    async with Interlock.open(home, housekeeping=False) as app:
        for one in TOOLS:
            app.catalog.attach(one)
        await admit(app, note)
        app.issuer_keys.init("EdDSA")
        await app.identities.register(Identity(did=did_of("ann"), name="ann", kind="human"), by="test")
        await app.identities.register(Identity(did=did_of("bot"), name="bot", kind="agent", trust=80), by="test")
        tokens = {
            name: await app.tokens.issue(
                subject=did_of("bot"), user=did_of("ann"), tools=[ToolGrant("*")], by=app.caller, **given
            )
            for name, given in {"whole": {}, "enough": WIDE_ENOUGH, **NARROWED}.items()
        }
        async with served(app, tokens, World) as made:
            yield made


@dataclass(frozen=True)
class Target:
    """What the operations are tried on: a call, what it keeps, and its ticket where it waits for a person."""

    call: str
    ref: str = "payload:none"
    ticket: str = "apr_none"


Ask = Callable[[World, Target, str], Awaitable[str | None]]  # the code of the refusal, if it is one


def _rest(method: str, path: str, body: Json | None = None) -> Ask:
    async def ask(world: World, target: Target, by: str) -> str | None:
        named = path.format(invocation_id=target.call, ref=target.ref, ticket_id=target.ticket)
        answer = await world.rest(method, named, by, body)
        return None if answer.is_success else answer.json()["error"]["error_code"]

    return ask


def _jsonrpc(method: str, **names: str) -> Ask:
    async def ask(world: World, target: Target, by: str) -> str | None:
        params = {name: getattr(target, value) for name, value in names.items()}
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        answer = (await world.http.post("/rpc", json=body, headers=world.bearer(by))).json()
        return answer["error"]["data"]["error_code"] if "error" in answer else None

    return ask


def _grpc(name: str, field: str = "invocation_id", of: str = "call") -> Ask:
    async def ask(world: World, target: Target, by: str) -> str | None:
        request = getattr(wire, f"{name}Request")(**{field: getattr(target, of)})
        try:
            await getattr(world.stub, name)(request, metadata=tuple(world.bearer(by).items()))
        except grpc.aio.AioRpcError as error:
            return "E3702" if error.code() is grpc.StatusCode.NOT_FOUND else str(error.details())
        return None

    return ask


async def _mcp_resource(world: World, target: Target, by: str, query: str = "") -> str | None:
    async with httpx2.AsyncClient(headers=world.bearer(by), timeout=30) as http:
        transport = streamable_http_client(f"{world.base}/mcp", http_client=http)
        async with Client(transport, mode="2026-07-28", read_timeout_seconds=30) as client:
            try:
                await client.read_resource(f"{target.ref}{query}")
            except MCPError as error:
                return "E3702" if "not found" in str(error) else str(error)
    return None


def _library(ask: Callable[[Interlock, Target, Caller], Any]) -> Ask:
    async def asked(world: World, target: Target, by: str) -> str | None:
        try:
            found = ask(world.app, target, await world.caller(by))
            if asyncio.iscoroutine(found):
                await found
        except Failure as failure:
            return failure.code
        return None

    return asked


# Operations about one call. The name is the door's own name of the operation.
ABOUT_CALLS: dict[str, Ask] = {
    "GET /v1/calls/{invocation_id}": _rest("GET", "/v1/calls/{invocation_id}"),
    "GET /v1/calls/{invocation_id}/events": _rest("GET", "/v1/calls/{invocation_id}/events"),
    "GET /v1/calls/{invocation_id}/checkpoints": _rest("GET", "/v1/calls/{invocation_id}/checkpoints"),
    "GET /v1/calls/{invocation_id}/trace": _rest("GET", "/v1/calls/{invocation_id}/trace"),
    "POST /v1/calls/{invocation_id}/cancel": _rest("POST", "/v1/calls/{invocation_id}/cancel"),
    "POST /v1/calls/{invocation_id}/undo": _rest("POST", "/v1/calls/{invocation_id}/undo", {"idempotency_key": "u"}),
    "POST /v1/tools/resume/{invocation_id}": _rest("POST", "/v1/tools/resume/{invocation_id}"),
    "calls.status": _jsonrpc("calls.status", invocation_id="call"),
    "calls.trace": _jsonrpc("calls.trace", invocation_id="call"),
    "calls.cancel": _jsonrpc("calls.cancel", invocation_id="call"),
    "calls.resume": _jsonrpc("calls.resume", invocation_id="call"),
    "Status": _grpc("Status"),
    "Trace": _grpc("Trace"),
    "Cancel": _grpc("Cancel"),
    "Resume": _grpc("Resume"),
    "library undo": _library(lambda app, target, by: app.undo(target.call, key="u", caller=by)),
    "library checkpoints": _library(lambda app, target, by: app.checkpoints(target.call, caller=by)),
}
# Operations about what a call keeps.
ABOUT_KEPT: dict[str, Ask] = {
    "GET /v1/payloads/{ref}": _rest("GET", "/v1/payloads/{ref}"),
    "GET /v1/payloads/{ref}/part": _rest("GET", "/v1/payloads/{ref}/part"),
    "calls.part": _jsonrpc("calls.part", ref="ref"),
    "Part": _grpc("Part", "ref", "ref"),
    "resources/read": _mcp_resource,
    "resources/read of a part": partial(_mcp_resource, query="?start=0&stop=3"),
    "library read_part": _library(lambda app, target, by: app.read_part(target.ref, Part(), caller=by)),
    "library read_payload": _library(lambda app, target, by: app.read_payload(target.ref, caller=by)),
}
# Operations about one ticket.
ABOUT_TICKETS: dict[str, Ask] = {
    "GET /v1/approvals/{ticket_id}": _rest("GET", "/v1/approvals/{ticket_id}"),
    "approvals.show": _jsonrpc("approvals.show", ticket_id="ticket"),
}
# Listings: tested below by what they list.
LISTINGS = {"GET /v1/approvals", "approvals.list", "GET /v1/approvals/standing", "GET /v1/calls", "calls.list", "Calls"}
# Operations about no call of the caller's, and those that make one. Deciding on tickets is for people with a token of
# their own, which tests/doors/test_reviewers.py holds; records and exports are for auditors, calls of
# unknown outcome for those who hold `calls:reconcile` and operate the server.
OTHERS = {
    "POST /v1/tools/register", "GET /v1/tools", "POST /v1/tools/invoke", "POST /v1/tools/negotiate",
    "GET /v1/surface", "POST /v1/tools/load", "tools.load", "surface.show", "Load", "Surface",
    "POST /v1/tools/select", "tools.select", "Select", "GET /v1/tools/recommendations", "tools.recommend", "Recommend",
    "GET /v1/identities", "POST /v1/identities", "POST /v1/identities/revoke", "GET /v1/keys", "POST /v1/keys",
    "POST /v1/keys/retire", "GET /v1/keys/jwks", "GET /v1/settings",
    "GET /v1/calls/unknown", "POST /v1/calls/{invocation_id}/settle",
    "GET /v1/tools/declarations", "POST /v1/tools/calls", "GET /v1/tools/{tool_id}", "GET /v1/tools/{tool_id}/versions",
    "POST /v1/tools/{tool_id}/deprecate", "POST /v1/approvals/standing", "DELETE /v1/approvals/standing/{standing_id}",
    "POST /v1/approvals/{ticket_id}/approve", "POST /v1/approvals/{ticket_id}/deny", "GET /v1/budgets",
    "POST /v1/tokens/issue", "POST /v1/tokens/delegate", "POST /v1/tokens/revoke", "POST /v1/tokens/inspect",
    "GET /v1/policy", "PUT /v1/policy", "POST /v1/policy/check", "POST /v1/policy/explain", "POST /v1/policy/test",
    "POST /v1/policy/forget",
    "GET /v1/quarantine", "POST /v1/quarantine/release", "GET /v1/tools/{tool_id}/diff", "POST /v1/upstreams/preview",
    "GET /v1/audit/records",
    "GET /v1/audit/verify", "GET /v1/audit/export", "GET /v1/calls/top", "calls.top", "Top",
    "GET /v1/upstreams", "POST /v1/upstreams",
    "GET /v1/upstreams/{name}", "POST /v1/upstreams/{name}/probe", "DELETE /v1/upstreams/{name}",
    "POST /v1/upstreams/{name}/refresh", "POST /v1/upstreams/{name}/accept", "GET /health", "GET /ready",
    "GET /v1/events", "GET /v1/calls/{invocation_id}/inputs",
    "GET /v1/tools/cost", "GET /v1/tools/affordances", "GET /v1/tools/{tool_id}/schema",
    "tools.list", "tools.search", "tools.describe", "tools.negotiate", "tools.invoke", "approvals.approve",
    "approvals.deny",
    "Discover", "Describe", "Invoke", "Run",
}  # fmt: skip


def test_every_operation_of_every_door_is_in_one_of_the_tables() -> None:
    rest = {
        f"{method} {route.path}"  # pyright: ignore[reportAttributeAccessIssue] - all are API routes
        for router in ROUTERS
        for route in router.routes
        for method in route.methods  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType, reportUnknownMemberType] - as above
    }
    rpc = {method.name for method in wire.DESCRIPTOR.services_by_name["Gateway"].methods}
    jsonrpc = set(JsonRpcDoor(None)._methods)  # pyright: ignore[reportArgumentType, reportPrivateUsage] - only its names
    tried = {name for name in {**ABOUT_CALLS, **ABOUT_KEPT, **ABOUT_TICKETS} if not name.startswith(("lib", "resou"))}
    assert rest | rpc | jsonrpc == tried | LISTINGS | OTHERS


@pytest.mark.parametrize("by", NARROWED)
async def test_a_call_that_ended_is_not_there_for_a_token_bound_to_other_resources(world: World, by: str) -> None:
    made = await world.invoke("demo.note", {"name": "a", "text": "hello"}, idempotency_key="k")
    target = Target(made["invocation_id"], made["payload_ref"])
    for name, ask in {**ABOUT_CALLS, **ABOUT_KEPT}.items():
        assert await ask(world, target, by) == "E3702", name
    for name, ask in ABOUT_KEPT.items():
        assert await ask(world, target, "enough") is None, name
    for name in (
        "GET /v1/calls/{invocation_id}",
        "calls.status",
        "Status",
        "Trace",
        "library checkpoints",
        "library undo",
    ):
        assert await ABOUT_CALLS[name](world, target, "enough") is None, name


@pytest.mark.parametrize("by", NARROWED)
async def test_a_call_is_not_listed_for_a_token_bound_to_other_resources(world: World, by: str) -> None:
    made = await world.invoke("demo.note", {"name": "a", "text": "hello"}, idempotency_key="k")
    for one, expected in ((by, []), ("enough", [made["invocation_id"]]), ("whole", [made["invocation_id"]])):
        listed = (await world.rest("GET", "/v1/calls", one)).json()["calls"]
        assert [line["invocation_id"] for line in listed] == expected
        body = {"jsonrpc": "2.0", "id": 1, "method": "calls.list"}
        told = (await world.http.post("/rpc", json=body, headers=world.bearer(one))).json()["result"]
        assert told["calls"] == listed
        metadata = tuple(world.bearer(one).items())
        answered = await world.stub.Calls(wire.CallsRequest(), metadata=metadata)
        assert [line.invocation_id for line in answered.calls] == expected


@pytest.mark.parametrize("by", NARROWED)
async def test_a_running_call_is_not_there_for_a_token_bound_to_other_resources(world: World, by: str) -> None:
    sample.world.gate = asyncio.Event()
    runs = await world.invoke("demo.note", {"name": "a", "text": "hi"}, execution_mode="async", idempotency_key="k")
    await until(lambda: world.app.ownership.history(runs["invocation_id"]))
    target = Target(runs["invocation_id"])
    for name, ask in ABOUT_CALLS.items():
        assert await ask(world, target, by) == "E3702", name
    assert await ABOUT_CALLS["calls.status"](world, target, "enough") is None
    assert await ABOUT_CALLS["POST /v1/calls/{invocation_id}/cancel"](world, target, "enough") is None


@pytest.mark.parametrize("by", NARROWED)
async def test_a_waiting_call_and_its_ticket_are_not_there_for_a_token_bound_to_other_resources(
    world: World, by: str
) -> None:
    waits = await world.invoke("demo.send", {"to": "ann"}, idempotency_key="k")
    target = Target(waits["invocation_id"], ticket=waits["pending"]["ticketId"])
    for name, ask in {**ABOUT_CALLS, **ABOUT_TICKETS}.items():
        assert await ask(world, target, by) == "E3702", name
    assert (await world.rest("GET", "/v1/approvals", by)).json() == {"tickets": []}
    listed = await world.http.post(
        "/rpc", json={"jsonrpc": "2.0", "id": 1, "method": "approvals.list"}, headers=world.bearer(by)
    )
    assert listed.json()["result"] == {"approvals": []}
    assert len((await world.rest("GET", "/v1/approvals", "enough")).json()["tickets"]) == 1
    for name, ask in ABOUT_TICKETS.items():
        assert await ask(world, target, "enough") is None, name
    assert await ABOUT_CALLS["Cancel"](world, target, "enough") is None


async def test_what_was_agreed_in_advance_is_not_there_for_a_token_bound_to_other_resources(world: World) -> None:
    boss = Caller(id="local:boss", kind="human", groups=frozenset({"approvers"}))
    given = await world.app.standing_approvals.grant(
        "demo.send", by=boss, caller=did_of("bot"), arguments={"to": "ann"}, uses=1,
        expires_ms=world.app.clock.now_ms() + 60_000,
    )  # fmt: skip
    for by in NARROWED:
        assert (await world.rest("GET", "/v1/approvals/standing", by)).json() == {"standing": []}
        refused = await world.rest("DELETE", f"/v1/approvals/standing/{given.id}", by)
        assert refused.json()["error"]["error_code"] == "E3702"
    for by in ("whole", "enough"):
        assert len((await world.rest("GET", "/v1/approvals/standing", by)).json()["standing"]) == 1


async def test_a_call_without_a_recorded_resource_is_there_only_for_tokens_without_bounds(world: World) -> None:
    plain = await world.invoke("demo.add", {"a": 1})
    told = {by: await ABOUT_CALLS["calls.status"](world, Target(plain["invocation_id"]), by) for by in world.tokens}
    assert told == {**dict.fromkeys(world.tokens, "E3702"), "whole": None}


async def test_who_holds_a_bound_token_hears_of_their_own_calls_even_where_those_name_nothing(world: World) -> None:
    asked: dict[str, tuple[str, Json]] = {
        "E3301": ("demo.note", {"name": 3}),
        "E3206": ("demo.note", {"name": "zzz", "text": "x"}),
        "E3101": ("demo.none", {}),
    }
    for code, (tool_id, arguments) in asked.items():
        started = await world.invoke(tool_id, arguments, "enough", execution_mode="async", idempotency_key=code)
        call_id = started["invocation_id"]
        await until(lambda call_id=call_id: world.app.ownership.history(call_id))
        fresh, caller = Service(world.app).calls, await world.caller("enough")
        await fresh.background.ended(call_id, caller)
        assert (await fresh.status(call_id, caller))["result"]["error"]["error_code"] == code
        with pytest.raises(Failure, match="no call"):
            await fresh.status(call_id, await world.caller("elsewhere"))


async def test_a_resource_that_holds_a_credential_is_not_recorded(world: World) -> None:
    secret = "ghp_" + "a1B2" * 9
    made = await world.invoke("demo.note", {"name": f"{secret}"[:40], "text": f"/x/{secret}"}, idempotency_key="k")
    records = orjson.dumps([one.get("resources") for one in await world.app.ownership.history(made["invocation_id"])])
    assert secret.encode() not in records
    assert await ABOUT_CALLS["calls.status"](world, Target(made["invocation_id"]), "elsewhere") == "E3702"

"""Surfaces as recorded objects: each tool with its reason, for callers and for operators, through every endpoint."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from interlock import Interlock
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.contract.standard.declarations import ToolSurface
from interlock.data.schema import Json
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.doors.grpc.v1.gateway_pb2_grpc import GatewayStub
from interlock.registry import quarantine
from interlock.registry.admission import Evidence
from interlock.registry.admission import publish as published
from interlock.registry.catalog import contract_digest
from interlock.store import upstreams
from interlock.store.port import Transaction
from tests.support.calls import admit, records, until
from tests.support.identities import did_of
from tests.support.wires import Wires, wired
from tests.surfaces.offices import TOOLS, offer

UNREAD = "that somebody else has read the tests against every word of it"
FIELDS = {
    "surface_id", "scope", "created_at", "producer", "tool_refs", "loaded_tools", "deferred_tools", "blocked_tools",
    "excluded_tools", "selection_policy", "default_tool_choice", "capability_requirements", "model_capabilities",
    "role_constraints", "policy_refs", "runtime_refs", "surface_reason",
}  # fmt: skip
FORBID = '\n@id("no-post") forbid (principal, action == Action::"office.post_letter", resource);\n'
SETTINGS: Json = {
    "surface": "search",
    "surface_doors": ("mcp", "rest", "jsonrpc", "grpc"),
    "surface_pinned": ({"tools": ["office.translate"]}, {"tools": ["office.forecast"], "groups": ["weather"]}),
    "surface_excluded": (
        {"tools": ["office.old_*"]},
        {"tools": ["office.draw"], "groups": ["weather"], "reason": "model_unsupported"},
        {"tools": ["office.ask_bot"], "callers": [did_of("rain")], "reason": "recursive_tool_forbidden"},
    ),
}
SCOPED = offer("pay_wages", "Pay the wages of a month.", scopes=["wages"])
LENT = offer("read_mail", "Read the mail of a mailbox.", permissions=["credential:mail/key"])
HELD = offer("guess", "Guess a number between bounds.")
POSTED = offer("post_letter", "Send a letter by post.")
REMOTE = offer("remote", "Look something up elsewhere.")
HIDDEN = [
    offer("old_fax", "Send a fax to a number."),
    offer("draw", "Draw a picture of something."),
    offer("ask_bot", "Ask the bot itself."),
]


@pytest_asyncio.fixture
async def wires(home: Path) -> AsyncGenerator[Wires]:
    async with Interlock.open(home, housekeeping=False, **SETTINGS) as lock:
        await admit(lock, *TOOLS, SCOPED, LENT, HELD, POSTED, *HIDDEN)
        await lock.journal.commit(_serve_elsewhere)
        held = f"{HELD.manifest.address}@1.0.0"
        await lock.journal.commit(quarantine.impose(contract_digest(HELD), held, "c", "it did what it should not"))
        lock.policy.path.write_text(lock.policy.path.read_text() + FORBID)
        await lock.catalog.forget()
        await until(lambda: "no-post" in lock.policy.rules.text)
        async with wired(lock) as opened:
            await lock.identities.register(
                Identity(did=did_of("rain"), name="rain", kind="agent", trust=80, groups=frozenset({"weather"})),
                by="test",
            )
            opened.bear(await lock.tokens.issue(subject=did_of("rain"), tools=[ToolGrant("office.*")], by=lock.caller))
            yield opened


def _serve_elsewhere(transaction: Transaction) -> None:
    digest = contract_digest(REMOTE)
    published(REMOTE.manifest, digest, "upstream:far", Evidence(digest, True, "test", ""), "test")(transaction)
    upstreams.insert(transaction, "far", kind="http", config="{}", overlay="{}", added_by="test", at_ms=1)
    upstreams.mark_probed(transaction, "far", "unavailable", "nobody answers", 2)


async def _operator(lock: Interlock) -> str:
    await lock.identities.register(Identity(did=did_of("ada"), name="ada", kind="human", trust=90), by="test")
    return await lock.tokens.issue(
        subject=did_of("ada"), tools=[ToolGrant("*")], scopes=["tools:admin"], by=lock.caller
    )


def _masked(text: str, tool: str) -> str:
    """What a client is told, without names, ids, digests, times and lengths."""
    named = text.replace(tool, "TOOL").replace(tool.replace(".", "-"), "TOOL")
    return re.sub(r"[0-9A-Z]{26}|[0-9a-f]{16,64}|[0-9][0-9.:]*", "", named)


def _reasons(listed: Any) -> dict[str, str]:
    return {one["tool_id"]: one["reason"] for one in listed}


BLOCKED = {
    "office.read_mail": "credential_missing",
    "office.guess": "feature_disabled",
    "office.remote": "setup_required",
}
FOR_OPERATORS = {"office.pay_wages": "role_not_allowed", "office.post_letter": "policy_blocked"}
EXCLUDED = {
    "office.old_fax": "feature_disabled",
    "office.draw": "model_unsupported",
    "office.ask_bot": "recursive_tool_forbidden",
}


@pytest.mark.part_of("SURF-01", rest=UNREAD)
async def test_each_reason_puts_a_tool_into_its_list_and_callers_see_none_that_they_must_not_know(wires: Wires) -> None:
    assert await wires.http.get("/v1/tools")
    own: Json = (await wires.http.get("/v1/surface")).json()
    told = own["surface"]
    assert told.keys() >= FIELDS
    assert ToolSurface.parse(told).document() == told
    assert told["loaded_tools"] == ["office.translate", "office.forecast"]
    deferred = {one["tool_id"]: one for one in told["deferred_tools"]}
    assert deferred.keys() == {"office.create_invoice", "office.send_email"}
    assert {one["reason"] for one in deferred.values()} == {"deferred_until_discovered"}
    assert _reasons(told["blocked_tools"]) == BLOCKED
    assert told["excluded_tools"] == []
    assert told["tool_refs"] == [*told["loaded_tools"], *deferred]
    assert own["reasons"] == {
        "office.translate": "pinned",
        "office.forecast": "role",
        **dict.fromkeys(deferred, "deferred"),
        **BLOCKED,
    }
    unknown = orjson.dumps(own).decode()
    assert not [name for name in FOR_OPERATORS | EXCLUDED if name in unknown]
    assert (told["scope"], told["selection_policy"], told["default_tool_choice"]) == ("session", "search", "auto")
    assert told["role_constraints"] == ["group:weather"]
    assert told["policy_refs"]
    assert told["runtime_refs"] == ["interlock"]

    wires.bear(await _operator(wires.lock))
    for who in ("rain", did_of("rain")):
        seen: Json = (await wires.http.get("/v1/surface", params={"caller": who})).json()
        assert seen["surface"]["surface_id"] == told["surface_id"]
        assert seen["revision"] == own["revision"] == 1
        assert _reasons(seen["surface"]["blocked_tools"]).items() >= (BLOCKED | FOR_OPERATORS).items()
        assert _reasons(seen["surface"]["excluded_tools"]) == EXCLUDED
        assert seen["surface"]["loaded_tools"] == told["loaded_tools"]


@pytest.mark.part_of("SURF-01", rest=UNREAD)
async def test_what_keeps_a_tool_from_being_called_is_read_from_where_it_is_in_force(wires: Wires) -> None:
    lock = wires.lock
    await lock.secrets.set("mail/key", "s3cret-value", by="test")
    await lock.journal.commit(lambda one: upstreams.mark_probed(one, "far", "available", "", 3))
    await lock.journal.commit(quarantine.lift("office.guess@1.0.0", by=lock.caller, reason="looked at it"))
    await lock.catalog.forget()
    told = (await wires.http.get("/v1/surface")).json()["surface"]
    assert told["blocked_tools"] == []
    assert BLOCKED.keys() <= {one["tool_id"] for one in told["deferred_tools"]}
    assert told["runtime_refs"] == ["interlock", "upstream:far"]


@pytest.mark.part_of("SURF-01", rest=UNREAD)
@pytest.mark.parametrize("door", ["rest", "jsonrpc", "grpc", "mcp-modern", "mcp-legacy"])
async def test_a_tool_that_is_not_on_the_surface_is_unknown_to_its_caller_at_every_door(
    wires: Wires, door: str
) -> None:
    for tool in ("office.old_fax", "office.draw", "office.ask_bot"):
        heard = await wires.call(door, tool, {"value": "x"})
        assert (heard.failure["error_code"], heard.failure["error_class"]) == ("E3101", "unknown_tool")
        other = tool[:-1] + "q"
        never = await wires.call(door, other, {"value": "x"})
        assert heard.status == never.status
        assert _masked(str(heard.envelope), tool) == _masked(str(never.envelope), other)
        if door != "grpc":
            assert _masked(heard.text, tool) == _masked(never.text, other)
    heard = await wires.call(door, "office.ol_fax", {"value": "x"})
    assert "old_fax" not in heard.text
    # Another caller has another surface.
    await wires.lock.identities.register(Identity(did=did_of("eve"), name="eve", kind="agent", trust=80), by="test")
    grants = [ToolGrant("office.draw"), ToolGrant("office.translate")]
    wires.bear(await wires.lock.tokens.issue(subject=did_of("eve"), tools=grants, by=wires.lock.caller))
    heard = await wires.call(door, "office.draw", {"value": "x"})
    assert heard.failure["error_code"] == "E3107"
    assert (await wires.call(door, "office.translate", {"value": "x"})).envelope is None


@pytest.mark.part_of("SURF-01", rest=UNREAD)
async def test_every_door_shows_the_same_surface(wires: Wires) -> None:
    rest: Json = (await wires.http.get("/v1/surface")).json()
    rpc: Json = orjson.loads(await wires.rpc("surface.show", {}))["result"]
    stub = GatewayStub(wires.channel)
    bearer = wires.http.headers["authorization"]
    answer = await stub.Surface(wire.SurfaceRequest(), metadata=(("authorization", bearer),))
    library = await wires.service.surface_views.show(by=await wires.service.authenticate(bearer))
    for one in (rpc, {**rest, "surface": orjson.loads(answer.surface_json)}, library):
        assert {**one["surface"], "created_at": ""} == {**rest["surface"], "created_at": ""}
    assert dict(answer.reasons) == rest["reasons"] == rpc["reasons"]
    refused = await wires.http.get("/v1/surface", params={"caller": "ada"})
    assert (refused.status_code, refused.json()["error"]["error_code"]) == (403, "E3206")
    first = (await wires.http.get("/v1/surface", params={"limit": 2})).json()
    assert first["cursor"]
    rest_of_it = (await wires.http.get("/v1/surface", params={"limit": 1000, "cursor": first["cursor"]})).json()
    assert rest_of_it["cursor"] is None
    assert rest_of_it["surface"]["loaded_tools"] == rest["surface"]["loaded_tools"]
    deferred = [*first["surface"]["deferred_tools"], *rest_of_it["surface"]["deferred_tools"]]
    assert deferred == rest["surface"]["deferred_tools"]
    # A cursor names a tool, so it is one that the caller may know.
    assert first["cursor"] in rest["reasons"]


@pytest.mark.part_of("SURF-01", rest=UNREAD)
@pytest.mark.part_of("SURF-02", rest=UNREAD)
async def test_changes_of_a_surface_are_events_and_records(wires: Wires) -> None:
    lock = wires.lock
    heard: list[Json] = []
    lock.listen(lambda event: heard.append(event.document()))
    assert (await wires.call("rest", "office.send_email", {"value": "x"})).failure["error_code"] == "E3107"
    await wires.http.post("/v1/tools/load", json={"names": ["office.send_email"]})
    about = [one for one in heard if one["event_class"].startswith(("tool.surface", "tool.deferred"))]
    assert [one["event_class"] for one in about] == [
        "tool.surface.created", "tool.deferred.loaded", "tool.surface.updated",
    ]  # fmt: skip
    assert about[1]["tool_id"] == "office.send_email"
    assert len({one["surface_id"] for one in about}) == 1
    assert [one["data"].get("revision") for one in about] == [1, None, 2]
    created, updated = records(lock, kind="surface")
    assert created["offered"] == {"office.translate": "pinned", "office.forecast": "role"}
    assert (created["revision"], created["tenant"], created["agentId"]) == (1, "local", did_of("rain"))
    assert updated["offered"] == {"office.send_email": "retrieved"}
    assert updated["withdrawn"] == []
    # A list, a call and a load of the same change nothing.
    await wires.http.get("/v1/tools")
    assert (await wires.call("rest", "office.send_email", {"value": "x"})).data == "send_email x"
    await wires.http.post("/v1/tools/load", json={"names": ["office.send_email"]})
    assert len(records(lock, kind="surface")) == 2
    told = (await wires.http.get("/v1/surface")).json()
    assert told["reasons"]["office.send_email"] == "recent"
    assert told["surface"]["loaded_tools"] == ["office.translate", "office.forecast", "office.send_email"]


async def test_the_tool_that_was_used_last_is_forgotten_last(wires: Wires) -> None:
    from interlock.store import surfaces

    lock = wires.lock
    names = ["office.send_email", "office.create_invoice"]
    await wires.http.post("/v1/tools/load", json={"names": names})

    async def order() -> list[str]:
        return (await wires.http.get("/v1/surface")).json()["surface"]["loaded_tools"][2:]

    for name in (*names, *names):
        assert (await wires.call("rest", name, {"value": "x"})).envelope is None

        async def first(name: str = name) -> bool:
            return (await order())[0] == name

        await until(first)
    await lock.journal.commit(lambda one: surfaces.load(one, _holder(lock), [], 1))
    assert await order() == ["office.create_invoice"]


def _holder(lock: Interlock) -> str:
    return lock.journal.reader.one("SELECT holder FROM surface_tool")[0]

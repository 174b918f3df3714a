"""Surfaces as recorded objects: each tool with its reason, for callers and for operators, through every endpoint."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncGenerator, Mapping
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
import pytest
import pytest_asyncio

from interlock import Caller, Interlock
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.contract.standard.declarations import ToolSurface
from interlock.data.schema import Json
from interlock.integrations.toolkit import Toolkit
from interlock.registry import quarantine
from interlock.registry.admission import TrialEvidence
from interlock.registry.admission import publish as published
from interlock.registry.catalog import contract_digest
from interlock.store import upstreams
from interlock.store.port import Transaction
from interlock.testing import FakeClock
from tests.support.calls import admit, records, until, use_policy
from tests.support.identities import did_of
from tests.support.surface_tools import TOOLS, offer
from tests.support.wires import BY_ID, WIRES, Wires, wired

FIELDS = {
    "surface_id", "scope", "created_at", "producer", "tool_refs", "loaded_tools", "deferred_tools", "blocked_tools",
    "excluded_tools", "selection_policy", "default_tool_choice", "capability_requirements", "model_capabilities",
    "role_constraints", "policy_refs", "runtime_refs", "surface_reason",
}  # fmt: skip
FORBID = '\n@id("no-post") forbid (principal, action == Action::"office.post_letter", resource);\n'
SETTINGS: Json = {
    "surface": "search",
    "surface_doors": ("mcp", "rest", "jsonrpc", "grpc"),
    "surface_pinned": (
        {"tools": ["office.translate", "office.pay_wages"]},
        {"tools": ["office.forecast"], "groups": ["weather"]},
    ),
    "surface_excluded": (
        {"tools": ["office.old_*"]},
        {"tools": ["office.draw"], "needs": ["image_input"]},
        {"tools": ["office.ask_bot"], "callers": [did_of("rain")], "reason": "recursive_tool_forbidden"},
    ),
    # The models of those who draw see images; those of the others call tools and no more.
    "surface_models": (
        {"capabilities": ["tool_calls", "parallel_tool_calls"], "groups": ["weather"]},
        {"capabilities": ["tool_calls", "image_input"], "callers": [did_of("eve")]},
    ),
}
SCOPED = offer("pay_wages", "Pay the wages of a month.", scopes=["wages"])
LENT = offer("read_mail", "Read the mail of a mailbox.", permissions=["credential:mail/key"])
HELD = offer("guess", "Guess a number between bounds.")
POSTED = offer("post_letter", "Send a letter by post.")
OTHERS = offer("away", "Go away from here.", namespace="far")  # no token of these tests names it
REMOTE = offer("remote", "Look something up elsewhere.")
HIDDEN = [
    offer("old_fax", "Send a fax to a number."),
    offer("draw", "Draw a picture of something."),
    offer("ask_bot", "Ask the bot itself."),
]


@pytest_asyncio.fixture
async def wires(home: Path) -> AsyncGenerator[Wires]:
    async with Interlock.open(home, housekeeping=False, **SETTINGS) as app:
        await admit(app, *TOOLS, SCOPED, LENT, HELD, POSTED, OTHERS, *HIDDEN)
        await app.journal.commit(_serve_elsewhere)
        held = f"{HELD.manifest.address}@1.0.0"
        await app.journal.commit(quarantine.impose(contract_digest(HELD), held, "c", "it did what it should not"))
        app.policy.path.write_text(app.policy.path.read_text() + FORBID)
        await app.catalog.forget()
        await until(lambda: "no-post" in app.policy.rules.text)
        async with wired(app) as opened:
            await app.identities.register(
                Identity(did=did_of("rain"), name="rain", kind="agent", trust=80, groups=frozenset({"weather"})),
                by="test",
            )
            opened.bear(await app.tokens.issue(subject=did_of("rain"), tools=[ToolGrant("office.*")], by=app.caller))
            yield opened


def _serve_elsewhere(transaction: Transaction) -> None:
    digest = contract_digest(REMOTE)
    published(REMOTE.manifest, digest, "upstream:far", TrialEvidence(digest, True, "test", ""), "test")(transaction)
    upstreams.insert(transaction, "far", kind="http", config="{}", overlay="{}", added_by="test", at_ms=1)
    upstreams.mark_probed(transaction, "far", "unavailable", "nobody answers", 2)


async def _operator(app: Interlock) -> str:
    await app.identities.register(Identity(did=did_of("ada"), name="ada", kind="human", trust=90), by="test")
    return await app.tokens.issue(subject=did_of("ada"), tools=[ToolGrant("*")], scopes=["tools:admin"], by=app.caller)


def _masked(text: str, tool: str) -> str:
    """What a client is told, without names, ids, digests, times and lengths."""
    # The status of gRPC has bytes in it, as `\032`, and ids right behind them.
    text = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
    named = text.replace(tool, "TOOL").replace(tool.replace(".", "-"), "TOOL")
    return re.sub(r"[0-9A-Z]{26}|[0-9a-f]{16,64}|[0-9][0-9.:]*", "", named)


def _reasons(listed: Any) -> dict[str, str]:
    return {one["tool_id"]: one["reason"] for one in listed}


async def _searched(wires: Wires, door: str, words: str) -> str:
    """The answer to a search, with names as they are elsewhere."""
    return (await wires.rows[door].search(words)).text.replace("office-", "office.")


BLOCKED = {
    "office.read_mail": "credential_missing",
    "office.guess": "feature_disabled",
    "office.remote": "setup_required",
    "office.post_letter": "policy_blocked",
}
FOR_OPERATORS = {"office.pay_wages": "role_not_allowed", "far.away": "role_not_allowed"}
EXCLUDED = {
    "office.old_fax": "feature_disabled",
    "office.draw": "model_unsupported",
    "office.ask_bot": "recursive_tool_forbidden",
}


@pytest.mark.proves("SURF-01")
async def test_each_reason_puts_a_tool_into_its_list_and_callers_see_none_that_they_must_not_know(wires: Wires) -> None:
    assert (await wires.http.get("/v1/tools")).status_code == 200
    own: Json = (await wires.http.get("/v1/surface")).json()
    told = own["surface"]
    assert told.keys() >= FIELDS
    assert ToolSurface.parse(told).document() == told
    # It is what the constructor of the model would make of the same values: complete, and in order of the fields.
    assert orjson.dumps(ToolSurface(**told).document()) == orjson.dumps(told)
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
    assert told["surface_id"].startswith("surface-")
    assert datetime.fromisoformat(told["created_at"]) == datetime.fromisoformat(own["changed_at"])
    assert told["producer"] == f"interlock:{wires.app.instance.id}"
    assert told["capability_requirements"] == ["tool_calls", "tool_search", "tool_loading"]
    assert told["model_capabilities"] == ["tool_calls", "parallel_tool_calls"]
    assert "pinned or loaded" in told["surface_reason"]
    assert told["role_constraints"] == ["group:weather"]
    assert told["policy_refs"]
    assert told["runtime_refs"] == ["interlock"]

    wires.bear(await _operator(wires.app))
    for who in ("rain", did_of("rain")):
        seen: Json = (await wires.http.get("/v1/surface", params={"caller": who})).json()
        assert seen["surface"]["surface_id"] == told["surface_id"]
        assert seen["revision"] == own["revision"] == 1
        assert _reasons(seen["surface"]["blocked_tools"]).items() >= (BLOCKED | FOR_OPERATORS).items()
        assert _reasons(seen["surface"]["excluded_tools"]) == EXCLUDED
        assert seen["surface"]["loaded_tools"] == told["loaded_tools"]
        assert seen["surface"]["model_capabilities"] == told["model_capabilities"]
    # Nobody has said what the operator's own model can do.
    assert (await wires.http.get("/v1/surface")).json()["surface"]["model_capabilities"] == ["tool_calls"]


@pytest.mark.proves("SURF-01")
async def test_what_keeps_a_tool_from_being_called_is_read_from_where_it_is_in_force(wires: Wires) -> None:
    app = wires.app
    await app.secrets.set("mail/key", "s3cret-value", by="test")
    await app.journal.commit(lambda one: upstreams.mark_probed(one, "far", "available", "", 3))
    await app.journal.commit(quarantine.lift("office.guess@1.0.0", by=app.caller, reason="looked at it"))
    await app.catalog.forget()
    told = (await wires.http.get("/v1/surface")).json()["surface"]
    assert _reasons(told["blocked_tools"]) == {"office.post_letter": "policy_blocked"}
    assert BLOCKED.keys() - {"office.post_letter"} <= {one["tool_id"] for one in told["deferred_tools"]}
    assert told["runtime_refs"] == ["interlock", "upstream:far"]


async def _afforded(wires: Wires, query: str = "") -> tuple[str, set[str]]:
    """What affordances and the sizes of tools tell, and which tools they name."""
    told = (await wires.http.get("/v1/tools/affordances", params={"budget": 20_000, "q": query})).json()
    costs = (await wires.http.get("/v1/tools/cost")).json()
    assert told["tools"] == costs["tools"] == len(costs["of"])
    loaded = {one["name"] for one in told["loaded"]}
    if not query:  # then every tool of the index is a candidate
        assert loaded == {one["tool"] for one in costs["of"]}
    return f"{told}{costs}", loaded


@pytest.mark.proves("SURF-01")
async def test_affordances_name_no_tool_that_is_blocked_for_whatever_reason(wires: Wires) -> None:
    app, policy = wires.app, wires.app.policy.path
    usable = {"office.create_invoice", "office.forecast", "office.send_email", "office.translate"}
    for query in ("", "read the mail, post a letter, guess a number, look something up"):
        text, named = await _afforded(wires, query)
        assert named <= usable
        for tool in BLOCKED | FOR_OPERATORS | EXCLUDED:
            assert tool not in text, tool
            assert f"{tool.partition('.')[2]}?" not in text, tool
    # Each comes back with what it lacked.
    await app.secrets.set("mail/key", "s3cret-value", by="test")
    assert (await _afforded(wires))[1] == {*usable, "office.read_mail"}
    await app.journal.commit(lambda one: upstreams.mark_probed(one, "far", "available", "", 3))
    await app.journal.changes.look()
    assert (await _afforded(wires))[1] == {*usable, "office.read_mail", "office.remote"}
    await app.journal.commit(quarantine.lift("office.guess@1.0.0", by=app.caller, reason="looked at it"))
    await app.journal.changes.look()
    assert (await _afforded(wires))[1] == {*usable, *BLOCKED} - {"office.post_letter"}
    await use_policy(app, policy.read_text().replace(FORBID, ""))
    assert (await _afforded(wires))[1] == {*usable, *BLOCKED}
    assert "post_letter" in (await _afforded(wires, "send a letter by post"))[0]
    # And the reasons that lie in the caller: the scope, the token, and what was excluded for them.
    grants = [ToolGrant("*")]
    wires.bear(await app.tokens.issue(subject=did_of("rain"), tools=grants, scopes=["wages"], by=app.caller))
    named = (await _afforded(wires))[1]
    assert {*usable, *BLOCKED, *FOR_OPERATORS} <= named
    assert not named & EXCLUDED.keys()
    await app.identities.register(Identity(did=did_of("eve"), name="eve", kind="agent", trust=80), by="test")
    wires.bear(await app.tokens.issue(subject=did_of("eve"), tools=grants, by=app.caller))
    assert (await _afforded(wires))[1] & EXCLUDED.keys() == {"office.draw", "office.ask_bot"}


@pytest.mark.proves("SURF-03")
@pytest.mark.proves("SURF-01")
@pytest.mark.parametrize("door", WIRES)
async def test_a_tool_that_is_not_on_the_surface_is_unknown_to_its_caller_at_every_door(
    wires: Wires, door: str
) -> None:
    for tool in (*EXCLUDED, *FOR_OPERATORS):
        heard = await wires.call(door, tool, {"value": "x"})
        assert (heard.failure["error_code"], heard.failure["error_class"]) == ("E3101", "unknown_tool")
        other = tool[:-1] + "q"
        never = await wires.call(door, other, {"value": "x"})
        assert heard.status == never.status
        assert _masked(str(heard.envelope), tool) == _masked(str(never.envelope), other)
        assert _masked(heard.text, tool) == _masked(never.text, other)
        told, none = await wires.rows[door].described(tool), await wires.rows[door].described(other)
        assert told.count("E3101") >= {"rest": 3, "jsonrpc": 2, "grpc": 2}.get(door, 1), "each request is refused"
        assert _masked(told, tool) == _masked(none, other)
        for words in (tool.partition(".")[2].replace("_", " "), tool, f"{tool}@1.0.0"):
            found = (await _searched(wires, door, words)).replace(words, "")  # MCP tells the query again
            assert tool not in found, words
            assert tool.partition(".")[2] not in found, words
    # Nor is one found that the policy forbids, although its caller may know of it; others still are.
    for words in ("post letter", "send a letter by post", "office.post_letter"):
        assert "post_letter" not in (await _searched(wires, door, words)).replace(words, ""), words
    assert "office.send_email" in await _searched(wires, door, "send an email")
    heard = await wires.call(door, "office.ol_fax", {"value": "x"})
    assert "old_fax" not in heard.text
    # Another caller has another surface.
    await wires.app.identities.register(Identity(did=did_of("eve"), name="eve", kind="agent", trust=80), by="test")
    grants = [ToolGrant("office.draw"), ToolGrant("office.translate")]
    wires.bear(await wires.app.tokens.issue(subject=did_of("eve"), tools=grants, by=wires.app.caller))
    heard = await wires.call(door, "office.draw", {"value": "x"})
    assert heard.failure["error_code"] == "E3107"
    assert (await wires.call(door, "office.translate", {"value": "x"})).envelope is None


@pytest.mark.proves("SURF-01")
async def test_programs_adapters_and_calls_of_providers_reach_no_tool_that_is_not_on_the_surface(wires: Wires) -> None:
    app, bearer = wires.app, wires.http.headers["authorization"]
    kit = Toolkit(app, token=bearer.removeprefix("Bearer "))

    async def provider(tool: str) -> str:
        sent = {
            "type": "function_call",
            "call_id": "c1",
            "name": tool.replace(".", "__"),
            "arguments": '{"value": "x"}',
        }
        answer = await wires.http.post("/v1/tools/calls", json={"call": sent})
        assert answer.status_code == 200
        return answer.json()["message"]["output"]

    async def adapter(tool: str) -> str:
        result, parts = await kit.call(tool.replace(".", "__"), '{"value": "x"}', "c2")
        assert result.error is None or result.error.code == "E3101"
        return str(parts)

    async def program(tool: str) -> str:
        caller = await wires.service.authenticate(bearer)
        by_caller = await app.call(tool, {"value": "x"}, caller=caller)
        by_token = await app.call(tool, {"value": "x"}, token=bearer.removeprefix("Bearer "))
        (together,) = await app.batch([app.request(tool, {"value": "x"}, caller=caller)])
        assert by_caller.text() == by_token.text() == together.text()
        return by_caller.text()

    assert "translate x" in await provider("office.translate")
    assert "translate x" in await adapter("office.translate")
    assert "translate x" in await program("office.translate")
    for tool in (*EXCLUDED, *FOR_OPERATORS):
        other = tool[:-1] + "q"
        spelled = (tool.replace(".", "__"), other.replace(".", "__"))
        for ask in (provider, adapter, program):
            told, never = await ask(tool), await ask(other)
            assert "no tool" in told
            # Names that are alike may be suggested, of tools that the caller sees.
            suggested = told.partition("did you mean")[2]
            assert not [one for one in EXCLUDED | FOR_OPERATORS if one.replace(".", "__") in suggested]
            told = re.sub("; did you mean.*", "", told.replace(tool, "T").replace(spelled[0], "T"))
            assert told == re.sub("; did you mean.*", "", never.replace(other, "T").replace(spelled[1], "T"))
    ran = {one["toolId"] for one in records(app) if one["status"] == "SUCCESS"}
    assert ran == {"office.translate"}


@pytest.mark.proves("SURF-01")
async def test_every_door_shows_the_same_surface(wires: Wires) -> None:
    bearer = wires.tokens["full"]
    shown = {wire: await wires.rows[wire].surface() for wire in BY_ID}
    rest = shown["rest"]
    for wire, one in shown.items():
        assert one["surface"] == rest["surface"], wire
        assert one["reasons"] == rest["reasons"], wire
    # Another caller sees another one, over every wire.
    await wires.app.identities.register(Identity(did=did_of("eve"), name="eve", kind="agent", trust=80), by="test")
    grants = [ToolGrant("office.draw"), ToolGrant("office.translate")]
    wires.bear(await wires.app.tokens.issue(subject=did_of("eve"), tools=grants, by=wires.app.caller))
    for wire in BY_ID:
        other = (await wires.rows[wire].surface())["surface"]
        assert other["model_capabilities"] == ["tool_calls", "image_input"], wire
        assert other["surface_id"] != rest["surface"]["surface_id"], wire
        assert other["tool_refs"] == ["office.translate", "office.draw"], wire
    for modern in (True, False):
        listed = await wires.mcp("tools/list", {}, modern=modern)
        assert "office-translate" in listed
        assert "office-forecast" not in listed
    wires.bear(bearer)
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


@pytest.mark.proves("SURF-01")
@pytest.mark.proves("SURF-02")
async def test_changes_of_a_surface_are_events_and_records(wires: Wires) -> None:
    app = wires.app
    heard: list[Json] = []
    app.listen(lambda event: heard.append(event.document()))
    assert (await wires.call("rest", "office.send_email", {"value": "x"})).failure["error_code"] == "E3107"
    await wires.http.post("/v1/tools/load", json={"names": ["office.send_email"]})
    about = [one for one in heard if one["event_class"].startswith(("tool.surface", "tool.deferred"))]
    assert [one["event_class"] for one in about] == [
        "tool.surface.created", "tool.deferred.discovered", "tool.deferred.loaded", "tool.surface.updated",
    ]  # fmt: skip
    assert about[1]["tool_id"] == about[2]["tool_id"] == "office.send_email"
    assert len({one["surface_id"] for one in about}) == 1
    assert [one["data"].get("revision") for one in about] == [1, None, None, 2]
    created, updated = records(app, kind="surface")
    offered = {"office.translate": "pinned", "office.forecast": "role"}  # a pin gives nobody a tool
    assert created["offered"] == offered
    assert (created["revision"], created["tenant"], created["agentId"]) == (1, "local", did_of("rain"))
    assert updated["offered"] == {"office.send_email": "retrieved"}
    assert updated["withdrawn"] == []
    # A list, a call and a load of the same change nothing.
    await wires.http.get("/v1/tools")
    assert (await wires.call("rest", "office.send_email", {"value": "x"})).data == "send_email x"
    await wires.http.post("/v1/tools/load", json={"names": ["office.send_email"]})
    assert len(records(app, kind="surface")) == 2
    told = (await wires.http.get("/v1/surface")).json()
    assert told["reasons"]["office.send_email"] == "recent"
    assert told["surface"]["loaded_tools"] == ["office.translate", "office.forecast", "office.send_email"]


@pytest.mark.proves("SURF-01")
async def test_what_every_door_lists_is_what_the_surface_records_whatever_changes(wires: Wires) -> None:
    app, policy = wires.app, wires.app.policy.path
    heard: list[Json] = []
    app.listen(lambda event: heard.append(event.document()))
    pins = {"office.translate", "office.forecast"}

    async def agrees(tools: set[str], blocked: Mapping[str, str]) -> None:
        """Every door lists these tools; the document, the row and the last record and event name them."""
        for door in WIRES:
            assert await wires.rows[door].listed() == sorted(tools), door
            assert await wires.rows[door].listed(cursor="office.forecast") == sorted(tools - {"office.forecast"}), door
        told = (await wires.http.get("/v1/surface")).json()
        assert set(told["surface"]["loaded_tools"]) == tools
        assert _reasons(told["surface"]["blocked_tools"]).items() >= blocked.items()
        (row,) = app.journal.reader.all("SELECT offered, revision FROM surface")
        assert orjson.loads(row[0]).keys() == tools
        about = [one for one in heard if one["event_class"].startswith("tool.surface")]
        events = [one for one in about if one["surface_id"] != "tools"]  # that is the catalog as a whole
        assert len(events) == row[1] == told["revision"] == len(records(app, kind="surface"))
        assert set(events[-1]["data"]["tools"]) == tools

    # Blocked tools can be loaded; they are listed once they can be called.
    await wires.http.post("/v1/tools/load", json={"names": ["office.read_mail", "office.remote"]})
    await agrees(pins, {"office.read_mail": "credential_missing", "office.remote": "setup_required"})
    await app.secrets.set("mail/key", "s3cret-value", by="test")
    await agrees({*pins, "office.read_mail"}, {"office.remote": "setup_required"})
    assert records(app, kind="surface")[-1]["offered"] == {"office.read_mail": "retrieved"}
    await app.journal.commit(lambda one: upstreams.mark_probed(one, "far", "available", "", 3))
    await app.journal.changes.look()
    await agrees({*pins, "office.read_mail", "office.remote"}, {})
    text = policy.read_text()
    forbidden = 'forbid (principal, action == Action::"office.translate", resource);'
    policy.write_text(f'{text}\n@id("no-words") {forbidden}\n')
    await until(lambda: "no-words" in app.policy.rules.text)
    await agrees({"office.forecast", "office.read_mail", "office.remote"}, {"office.translate": "policy_blocked"})
    assert records(app, kind="surface")[-1]["withdrawn"] == ["office.translate"]
    policy.write_text(text)
    await until(lambda: "no-words" not in app.policy.rules.text)
    await app.secrets.remove("mail/key", by="test")
    await agrees({*pins, "office.remote"}, {"office.read_mail": "credential_missing"})
    digest = (await app.catalog.resolve("office.forecast")).row.digest
    await app.journal.commit(quarantine.impose(digest, "office.forecast@1.0.0", "c", "it is wrong"))
    await app.journal.changes.look()
    await agrees({"office.translate", "office.remote"}, {"office.forecast": "feature_disabled"})


@pytest.mark.proves("SURF-01")
async def test_a_caller_who_sees_the_whole_catalog_lists_no_blocked_tool_but_marks_those_of_an_absent_upstream(
    home: Path,
) -> None:
    async with Interlock.open(home, housekeeping=False, surface="all") as app, wired(app) as wires:
        await admit(app, *TOOLS, LENT, POSTED)
        await app.journal.commit(_serve_elsewhere)
        await app.catalog.forget()
        text = app.policy.path.read_text()
        await use_policy(app, text + FORBID)
        await app.identities.register(Identity(did=did_of("rain"), name="rain", kind="agent", trust=80), by="test")
        wires.bear(await app.tokens.issue(subject=did_of("rain"), tools=[ToolGrant("office.*")], by=app.caller))

        async def agrees(blocked: Mapping[str, str]) -> None:
            told = (await wires.http.get("/v1/surface")).json()["surface"]
            assert _reasons(told["blocked_tools"]) == blocked
            assert (told["deferred_tools"], told["selection_policy"]) == ([], "all")
            away = [name for name, reason in blocked.items() if reason == "setup_required"]
            for door in WIRES:
                assert await wires.rows[door].listed() == sorted([*told["loaded_tools"], *away]), door
            listed = (await wires.http.get("/v1/tools")).json()["tools"]
            assert [one["tool_id"] for one in listed if one["availability"] == "UNAVAILABLE"] == away
            # Two tools are looked at for a page; a page has those of them that can be called.
            seen: list[str] = []
            place: Json = {}
            while True:
                page: Json = (await wires.http.get("/v1/tools", params={"limit": 2, **place})).json()
                seen += [one["tool_id"] for one in page["tools"]]
                if page["cursor"] is None:
                    break
                place = {"cursor": page["cursor"]}
            assert seen == sorted([*told["loaded_tools"], *away])

        remote = {"office.remote": "setup_required"}
        mail, post = {"office.read_mail": "credential_missing"}, {"office.post_letter": "policy_blocked"}
        await agrees(remote | mail | post)
        await app.secrets.set("mail/key", "s3cret-value", by="test")
        await agrees(remote | post)
        await use_policy(app, text)
        await agrees(remote)
        await app.journal.commit(lambda one: upstreams.mark_probed(one, "far", "available", "", 3))
        await app.secrets.remove("mail/key", by="test")
        await app.journal.changes.look()
        await agrees(mail)
        # Adapters for agent frameworks offer the same.
        kit = Toolkit(app, token=wires.http.headers["authorization"].removeprefix("Bearer "))
        offered = {contract.address for _, contract in await kit.named()}
        assert offered == {one.manifest.address for one in (*TOOLS, POSTED)} | {"office.remote"}


REFUSED = {
    "office.read_mail": ("E3602", "credential_missing"),
    "office.post_letter": ("E3206", "permission_denied"),
}


@pytest.mark.proves("SURF-01")
@pytest.mark.parametrize("door", WIRES)
async def test_a_blocked_tool_is_refused_for_its_reason_and_before_that_because_it_is_not_loaded(
    wires: Wires, door: str
) -> None:
    for tool in BLOCKED:
        assert (await wires.call(door, tool, {"value": "x"})).failure["error_code"] == "E3107", tool
    names = list(REFUSED)
    assert (await wires.http.post("/v1/tools/load", json={"names": names})).status_code == 200
    refused = await wires.http.post("/v1/tools/load", json={"names": ["office.guess"]})  # it is in quarantine
    assert refused.json()["error"]["error_code"] == "E3210"
    for tool in names:
        heard = await wires.call(door, tool, {"value": "x"})
        assert (heard.failure["error_code"], heard.failure["error_class"]) == REFUSED[tool], tool


@pytest.mark.proves("SURF-01")
async def test_a_tool_leaves_a_surface_when_its_credential_expires(home: Path) -> None:
    clock = FakeClock()
    pinned = ({"tools": ["office.read_mail"]},)
    async with Interlock.open(
        home, clock=clock.clock, housekeeping=False, surface="search", surface_pinned=pinned
    ) as app:
        await admit(app, LENT)
        service = Service(app)
        await app.secrets.set("mail/key", "s3cret-value", by="test", expires_ms=app.clock.now_ms() + 60_000)

        async def listed() -> list[str]:
            return [
                one.row.address
                for one in await service.surfaces.listed(await service.surfaces.attach(app.caller, "mcp"))
            ]

        assert await listed() == ["office.read_mail"]
        clock.advance(59)
        assert await listed() == ["office.read_mail"]
        clock.advance(1)
        assert await listed() == []
        assert [one["withdrawn"] for one in records(app, kind="surface")] == [[], ["office.read_mail"]]
        await service.close()


async def _own_list(service: Service, caller: Caller) -> list[str]:
    if caller.surface is None:
        return [one.row.address for one in (await service.tools.page(caller, None, 250)).versions]
    return [one.row.address for one in await service.surfaces.listed(caller)]


async def _calls_of_functions(service: Service, caller: Caller) -> int:
    counted = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal counted
        counted += event == "call"

    sys.setprofile(count)
    try:
        await _own_list(service, caller)
    finally:
        sys.setprofile(None)
    return counted


async def test_listing_a_surface_takes_as_many_calls_of_functions_as_a_catalog_of_that_size(home: Path) -> None:
    made = [offer(f"read_{number}", f"Read part {number} of a text.") for number in range(60)]
    names = [one.manifest.address for one in made]
    clock = FakeClock()  # nothing is looked for anew while calls are counted
    counted: list[int] = []
    for tools, mode, pinned in ((made[:40], "all", ()), (made, "search", ({"tools": names[:40]},))):
        async with Interlock.open(
            home / mode, clock=clock.clock, housekeeping=False, surface=mode, surface_pinned=pinned
        ) as app:
            await admit(app, *tools)
            service = Service(app)
            caller = await service.surfaces.attach(app.caller, "mcp")
            assert await _own_list(service, caller) == sorted(names[:40])
            counted.append(await _calls_of_functions(service, caller))
            await service.close()
    whole, surface = counted
    assert 40 < surface <= 1.2 * whole


async def test_a_surface_that_nobody_uses_is_forgotten_after_a_month_also_one_of_pins_alone(home: Path) -> None:
    clock = FakeClock()
    pinned = ({"tools": ["office.translate"]},)
    async with Interlock.open(
        home, clock=clock.clock, housekeeping=False, surface="search", surface_pinned=pinned
    ) as app:
        await admit(app, *TOOLS)
        service = Service(app)
        await service.surfaces.attach(app.caller, "mcp")  # it has pins alone
        eve = Caller(id="eve", scopes=app.caller.scopes)
        await service.surfaces.attach(eve, "mcp")
        clock.advance(20 * 86_400)
        await service.surfaces.load(["office.forecast"], eve)
        holders = "SELECT holder FROM surface ORDER BY holder"
        assert app.journal.reader.all(holders) == [("local:eve",), (f"local:{app.caller.id}",)]
        clock.advance(20 * 86_400)
        await app.background.maintain()
        assert app.journal.reader.all(holders) == [("local:eve",)]
        # It is made anew when its holder comes back.
        await service.surfaces.attach(app.caller, "mcp")
        assert len(app.journal.reader.all(holders)) == 2
        clock.advance(40 * 86_400)
        await app.background.maintain()
        assert app.journal.reader.all(holders) == []
        assert app.journal.reader.all("SELECT holder FROM surface_tool") == []
        await service.close()


async def test_the_tool_that_was_used_last_is_forgotten_last(wires: Wires) -> None:
    from interlock.store import surfaces

    app = wires.app
    names = ["office.send_email", "office.create_invoice"]
    await wires.http.post("/v1/tools/load", json={"names": names})

    async def order() -> list[str]:
        return (await wires.http.get("/v1/surface")).json()["surface"]["loaded_tools"][2:]

    for name in (*names, *names):
        assert (await wires.call("rest", name, {"value": "x"})).envelope is None

        async def first(name: str = name) -> bool:
            return (await order())[0] == name

        await until(first)
    await app.journal.commit(lambda one: surfaces.load(one, _holder(app), [], 1))
    assert await order() == ["office.create_invoice"]


def _holder(app: Interlock) -> str:
    return app.journal.reader.one("SELECT holder FROM surface_tool")[0]

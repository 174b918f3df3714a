"""Search: by exact name and keywords, with upstreams that are pending and an answer where nothing matches."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from interlock import Failure, Interlock
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.call.connector import Connector
from interlock.contract.manifest import Execution
from interlock.contract.standard.declarations import DeferredToolRef
from interlock.data.canonical import digest as canonical_digest
from interlock.data.schema import Json
from interlock.registry.admission import TrialEvidence
from interlock.registry.admission import publish as published
from interlock.registry.catalog import contract_digest
from interlock.store import upstreams
from interlock.store.port import Transaction
from tests.support.calls import admit, records
from tests.support.identities import did_of
from tests.support.surface_tools import TOOLS, offer
from tests.support.wires import Wires, wired

HINTED = offer("run_42", "Does what it is for, and nothing else.", search_hint="book a flight to anywhere")
SPACED = offer("list_all", "Returns what there is.", namespace="veterinary")
REMOTE = offer("remote", "Look up the lunar calendar.", namespace="far")
NAMED = offer("zeppelin_rental", "Does something that nobody would guess.")
# The first has the name, the second the better words for it.
STAMP = offer("stamp", "Does something else that nobody would guess.")
STAMPS = offer("many_stamps", "Stamp a stamp: all stamps.", search_hint="stamp stamps with a stamp", tags=["stamp"])
NOTHING = "xylophone zymurgy quokka"


class Silent:
    """An upstream that is being added and has not answered yet."""

    async def discover(self, credentials: Mapping[str, str] | None = None) -> Any:
        raise Failure("E3502", "nobody is at home")

    async def close(self) -> None:
        return None


def _serve_apps(transaction: Transaction) -> None:
    """Publish tools of an MCP upstream: one for its interface alone, one for models too."""
    for name, visibility in (("paint_pixels", ["app"]), ("paint_portrait", ["app", "model"])):
        manifest = offer(name, "Paint something with colours.").manifest
        native = {"name": name, "_meta": {"ui": {"visibility": visibility}}}
        execution = Execution.model_validate({"kind": "upstream", "target": "apps", "native": native})
        made = manifest.model_copy(update={"protocol": "mcp", "execution": execution})
        digest = canonical_digest(made.document())
        published(made, digest, "library:", TrialEvidence(digest, True, "test", ""), "test")(transaction)


def _serve_elsewhere(transaction: Transaction) -> None:
    digest = contract_digest(REMOTE)
    published(REMOTE.manifest, digest, "upstream:far", TrialEvidence(digest, True, "test", ""), "test")(transaction)
    upstreams.insert(transaction, "far", kind="http", config="{}", overlay="{}", added_by="test", at_ms=1)
    upstreams.mark_probed(transaction, "far", "unavailable", "nobody answers", 2)


@pytest_asyncio.fixture
async def wires(home: Path) -> AsyncGenerator[Wires]:
    # Words alone: by meaning, everything resembles something.
    settings: Json = {
        "surface": "search",
        "surface_doors": ("mcp", "rest", "jsonrpc", "grpc"),
        "search_encoder": "none",
    }
    async with Interlock.open(home, housekeeping=False, **settings) as app:
        await admit(app, *TOOLS, HINTED, SPACED, NAMED, STAMP, STAMPS)
        await app.journal.commit(_serve_elsewhere)
        await app.journal.commit(_serve_apps)
        await app.catalog.forget()
        async with wired(app) as opened:
            yield opened


DOORS = ["rest", "jsonrpc", "grpc", "mcp-modern", "mcp-legacy"]


@pytest.mark.proves("SURF-02", "SURF-03")
@pytest.mark.parametrize("door", DOORS)
async def test_a_search_tells_what_it_found_what_is_pending_and_that_it_found_nothing(wires: Wires, door: str) -> None:
    for query, first in (
        ("translate", "office.translate"),
        ("office.translate", "office.translate"),
        ("book flight", "office.run_42"),
        ("veterinary", "veterinary.list_all"),
        ("invoice for goods", "office.create_invoice"),
        ("run_42", "office.run_42"),
        ("office.run_42@1.0.0", "office.run_42"),
        ("zeppelin", "office.zeppelin_rental"),  # in its name alone
        ("customer", "office.create_invoice"),  # in its description alone
    ):
        told = (await wires.rows[door].search(query)).data
        assert told["deferred"][0]["tool_id"] == first, query
        assert told["outcome"] == "found"
        assert not told["tools"]
        assert {"server": "far", "state": "unavailable"} in told["pending"]
    ref = (await wires.rows[door].search("lunar calendar")).data["deferred"][0]
    assert ref.pop("score") > 0
    assert ref["tool_id"] == "far.remote"
    assert ref["pending_provider_or_server"] == "far"
    assert ref.keys() == set(DeferredToolRef.model_fields)
    assert DeferredToolRef.parse(ref).document() == ref
    shown = ref["selection_ref"]
    assert shown.startswith("surface-")
    assert ref == {
        "schema_version": "0.2.0", "tool_id": "far.remote", "name": "remote", "namespace": "far",
        "search_hint": "Look up the lunar calendar.", "source": "upstream:far", "schema_visibility": "hidden",
        "loading_state": "pending", "reason": "deferred_until_discovered", "pending_provider_or_server": "far",
        "selection_ref": shown,
    }  # fmt: skip
    ready = (await wires.rows[door].search("book flight")).data["deferred"][0]
    about = ("search_hint", "source", "loading_state", "pending_provider_or_server", "selection_ref")
    assert [ready[one] for one in about] == ["book a flight to anywhere", "registry", "deferred", None, shown]
    # The more of the words a tool has, the higher it ranks.
    ranked = [
        one["tool_id"] for one in (await wires.rows[door].search("invoice for a customer, email")).data["deferred"]
    ]
    assert ranked[:2] == ["office.create_invoice", "office.send_email"]
    # By words the one with the better ones is first; by its exact name, the other.
    for query, first in (("stamps", "many_stamps"), ("stamp", "stamp"), ("office.stamp", "stamp")):
        ranked = [one["tool_id"] for one in (await wires.rows[door].search(query)).data["deferred"]]
        assert ranked[0] == f"office.{first}", query
        assert {"office.stamp", "office.many_stamps"} <= set(ranked), query
    nothing = (await wires.rows[door].search(NOTHING)).data
    assert (nothing["tools"], nothing["deferred"], nothing["outcome"]) == ([], [], "pending")
    # To a caller without tools of it, the upstream does not exist.
    app = wires.app
    await app.identities.register(Identity(did=did_of("eve"), name="eve", kind="agent", trust=80), by="test")
    wires.bear(await app.tokens.issue(subject=did_of("eve"), tools=[ToolGrant("office.*")], by=app.caller))
    nothing = (await wires.rows[door].search(NOTHING)).data
    assert (nothing["tools"], nothing["deferred"], nothing["outcome"], nothing["pending"]) == ([], [], "no_match", [])
    assert not (await wires.rows[door].search("lunar calendar")).data["deferred"]
    assert not (await wires.rows[door].search("far.remote")).data["deferred"]


@pytest.mark.proves("SURF-03")
async def test_an_upstream_that_is_being_added_is_pending(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    app = wires.app
    connections = app.upstreams.connections

    def make(*_: Any) -> Connector:
        return cast("Connector", Silent())

    monkeypatch.setattr(connections, "_make", make)
    async with connections.adding("near", "http", {}) as connector:
        told = (await wires.rows["rest"].search(NOTHING)).data
        assert {"server": "near", "state": "discovering"} in told["pending"]
        await connector.close()
    assert [one["server"] for one in (await wires.rows["rest"].search(NOTHING)).data["pending"]] == ["far"]


@pytest.mark.proves("SURF-02")
@pytest.mark.proves("LIFE-02")
@pytest.mark.proves("LIFE-08")
@pytest.mark.parametrize("door", DOORS)
async def test_at_every_door_a_tool_is_refused_found_loaded_and_called(wires: Wires, door: str) -> None:
    heard: list[tuple[str, str]] = []
    wires.app.listen(lambda event: heard.append((event.type, event.tool)))
    refused = await wires.call(door, "office.forecast", {"value": "Rome"})
    assert (refused.failure["error_code"], refused.failure["error_class"]) == ("E3107", "schema_not_loaded")
    assert all(word in refused.failure["resolution"] for word in ("discover it first", "search_tools", "load_tools"))
    # It is one end: one record, one event, and nothing after the tool was found.
    (closed,) = records(wires.app)
    assert (closed["error_code"], closed["toolId"]) == ("E3107", "office.forecast")
    assert [kind for kind, _ in heard if kind.startswith("tool.invocation.")] == [
        "tool.invocation.planned", "tool.invocation.failed",
    ]  # fmt: skip
    # That comes before a look at the arguments.
    assert (await wires.call(door, "office.forecast", {"wrong": 1})).failure["error_code"] == "E3107"
    listed = await wires.rows[door].listing()
    assert "office.forecast" not in listed
    assert "a value" not in listed
    found = (await wires.rows[door].search("weather in a city")).data
    assert found["deferred"][0]["tool_id"] == "office.forecast"
    assert not [part for part in ("a value", "properties", "parameters") if part in str(found)]
    assert ("tool.deferred.discovered", "office.forecast") in heard
    heard.clear()
    assert "a value" in await wires.rows[door].load("office.forecast")
    assert [one for one in heard if one[0].startswith("tool.deferred")] == [
        ("tool.deferred.discovered", "office.forecast"), ("tool.deferred.loaded", "office.forecast"),
    ]  # fmt: skip
    assert "a value" in await wires.rows[door].listing()
    assert (await wires.call(door, "office.forecast", {"value": "Rome"})).envelope is None
    # It is loaded for the token, whichever door asks.
    assert (await wires.call("rest", "office.forecast", {"value": "Rome"})).data == "forecast Rome"


@pytest.mark.proves("SURF-02")
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
async def test_a_model_that_calls_a_deferred_tool_is_told_how_to_discover_it(wires: Wires, provider: str) -> None:
    arguments = {"value": "Rome"}
    sent: Json = {"type": "tool_use", "id": "c1", "name": "office__forecast", "input": arguments}
    if provider == "openai":
        function = {"name": "office__forecast", "arguments": json.dumps(arguments)}
        sent = {"type": "function", "id": "c1", "function": function}
    answer = await wires.http.post("/v1/tools/calls", json={"call": sent})
    told = json.dumps(answer.json()["message"])
    assert all(word in told for word in ("was not loaded", "discover it first", "search_tools", "load_tools"))


@pytest.mark.proves("LIFE-02")
@pytest.mark.parametrize("door", DOORS)
async def test_an_alias_on_a_search_surface_is_the_tool_itself(wires: Wires, door: str) -> None:
    """It is refused under the tool's name, loaded by the alias, and called by it."""
    await admit(wires.app, offer("yodel", "Sings from one mountain to another.", aliases=["warble"]))
    assert (await wires.call(door, "office.warble", {"value": "x"})).failure["error_code"] == "E3107"
    (closed,) = records(wires.app)
    assert (closed["error_code"], closed["toolId"]) == ("E3107", "office.yodel")
    assert "a value" in await wires.rows[door].load("office.warble")
    told = await wires.call(door, "office.warble", {"value": "x"})
    assert (told.envelope, told.data) == (None, {"result": "yodel x"} if door.startswith("mcp") else "yodel x")


SHOWS = {"extensions": {"io.modelcontextprotocol/ui": {"mimeTypes": ["text/html;profile=mcp-app"]}}}


@pytest.mark.parametrize("door", DOORS)
async def test_a_tool_for_interfaces_alone_is_found_and_loaded_by_clients_that_show_interfaces(
    wires: Wires, door: str
) -> None:
    async def found(query: str) -> set[str]:
        told = (await wires.rows[door].search(query)).data
        return {one["tool_id"] for one in told["deferred"]} & {"office.paint_pixels", "office.paint_portrait"}

    for query in ("paint with colours", "office.paint_pixels", "paint_pixels"):
        assert await found(query) == {"office.paint_portrait"}, query
    if not door.startswith("mcp"):
        return
    load = {"name": "load_tools", "arguments": {"names": ["office-paint_pixels"]}}
    modern = door == "mcp-modern"
    refused = await wires.mcp("tools/call", load, modern=modern)
    other = {"name": "load_tools", "arguments": {"names": ["office-paint_pixelz"]}}
    unknown = await wires.mcp("tools/call", other, modern=modern)
    assert "E3101" in refused
    assert "E3101" in unknown
    wires.declare(SHOWS)
    assert await found("paint with colours") == {"office.paint_pixels", "office.paint_portrait"}
    assert await found("office.paint_pixels") == {"office.paint_pixels", "office.paint_portrait"}
    assert "E3101" not in await wires.mcp("tools/call", load, modern=modern)


async def test_what_is_compiled_and_selected_for_models_has_no_tool_for_interfaces_alone(wires: Wires) -> None:
    app = wires.app
    text = (await app.affordances(budget=100_000, query="paint with colours")).text
    assert "paint_portrait" in text
    assert "paint_pixels" not in text
    assert "paint_pixels" not in str([one.version.row.address for one in await app.search("paint with colours")])
    made = await app.select("paint something with colours", intent=False)
    assert "office.paint_portrait" in {one.tool for one in made.candidates}
    assert "office.paint_pixels" not in {tool for stage in made.stages for tool in stage.tools}

"""Search through the public interfaces: what a caller may use is found, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any

import pytest
import pytest_asyncio

from interlock import Failure, Field, Interlock
from interlock.api.tools import DEFAULT_LIMIT
from interlock.authority.tokens import ToolGrant
from interlock.contract.manifest import parse_manifest
from interlock.data.canonical import digest
from interlock.data.schema import Json
from interlock.doors.grpc.v1 import gateway_pb2 as messages
from interlock.registry import admission, quarantine
from interlock.registry.admission import TrialEvidence
from interlock.registry.retirement import deprecate, move
from interlock.search import index as module
from interlock.search.fields import entry_of
from tests.support.calls import admit, use_policy
from tests.support.identities import did_of
from tests.support.office import OFFERED, some_tool
from tests.support.openapi import document
from tests.support.upstream_servers import HttpServer
from tests.support.wires import BY_ID, Wires, wired

Value = Annotated[str, Field(description="a value", examples=["x"])]


@pytest_asyncio.fixture
async def office(app: Interlock) -> Interlock:
    await admit(app, *OFFERED)
    await app.catalog.forget()
    return app


@pytest_asyncio.fixture
async def wires(office: Interlock) -> AsyncGenerator[Wires]:
    async with wired(office) as opened:
        yield opened


async def _names(app: Interlock, query: str, limit: int = 10) -> list[str]:
    return [one.version.row.address for one in await app.search(query, limit=limit)]


@pytest.mark.proves("REG-14")
async def test_tools_are_found_by_what_they_do(office: Interlock):
    assert (await _names(office, "send message to user"))[0] == "office.send_email"
    assert (await _names(office, "bill the client"))[0] == "office.create_invoice"
    assert (await _names(office, "will it rain tomorrow?"))[0] == "office.forecast"
    assert await _names(office, "qwertz asdfgh") == []
    assert len(await _names(office, "a text of a file", limit=2)) == 2


@pytest.mark.proves("REG-14")
async def test_deprecated_tools_are_found_and_sunset_or_removed_ones_are_not(office: Interlock):
    async def found() -> list[bool]:
        return [
            "office.translate" in await _names(office, "translate a text"),
            "office.translate" in await _names(office, "office.translate"),
            "office.translate" in [one.version.row.address for one in await office.search("translate", by="meaning")],
        ]

    commit = office.journal.commit
    for unit, expected in (
        (None, True),
        (deprecate("office.translate", "1.0.0", by="test"), True),
        (move("office.translate", "1.0.0", "sunset", by="test"), False),
        (move("office.translate", "1.0.0", "removed", by="test"), False),
    ):
        if unit is not None:
            await commit(unit)
            await office.catalog.forget()
        assert await found() == [expected] * 3
    await admit(office, *(some_tool(f"letter_{number}", "Letter to a customer.") for number in range(12)))
    await office.catalog.forget()
    assert len(await office.search("a letter to a customer", limit=20)) >= 12
    for by in ("both", "words", "meaning"):
        assert len(await office.search("a letter to a customer", by=by)) == DEFAULT_LIMIT == 10


async def test_a_tool_whose_name_is_the_request_comes_first(office: Interlock):
    for name in ("office.translate", "translate", "office.translate@1.0.0"):
        found = await office.search(name)
        assert (found[0].version.row.address, found[0].score) == ("office.translate", 1.0)


@pytest.mark.parametrize(("query", "limit"), [("", 10), (" \n", 10), ("mail", 0), ("mail", 1001)])
async def test_a_search_for_nothing_or_for_too_many_is_refused(office: Interlock, query: str, limit: int):
    with pytest.raises(Failure) as refused:
        await office.search(query, limit=limit)
    assert refused.value.code == "E3004"


async def test_a_search_follows_the_registry_and_indexes_only_what_is_new(
    office: Interlock, monkeypatch: pytest.MonkeyPatch
):
    indexed: list[str] = []
    weigh = module.weigh

    def counted(entry: module.IndexedTool) -> dict[str, float]:
        indexed.append(entry.name)
        return weigh(entry)

    monkeypatch.setattr(module, "weigh", counted)
    await office.search("parcel")
    assert {"translate", "forecast"} <= set(indexed)
    indexed.clear()
    assert "office.track_parcel" not in await _names(office, "where is the parcel")
    assert indexed == []
    await admit(office, some_tool("track_parcel", "Find out where a parcel is."))
    await office.catalog.forget()
    assert (await _names(office, "where is the parcel"))[0] == "office.track_parcel"
    assert indexed == ["track_parcel"]
    (found,) = [one.version for one in await office.search("track_parcel", limit=1)]
    await office.journal.commit(quarantine.impose(found.row.digest, found.contract.ref, "a-call", "it lied"))
    await office.gateway.quarantine.look()
    assert "office.track_parcel" not in await _names(office, "where is the parcel")


@pytest.mark.proves("REG-14")
async def test_a_search_finds_ten_tools_where_no_limit_is_given_at_every_endpoint(wires: Wires):
    await admit(wires.app, *(some_tool(f"letter_{number}", "Letter to a customer.") for number in range(12)))
    await wires.app.catalog.forget()
    query = "a letter to a customer"
    local = [one.version.row.address for one in await wires.app.search(query)]
    assert len(local) == DEFAULT_LIMIT == 10
    for by in ("both", "words", "meaning"):
        assert len(await wires.app.search(query, by=by)) == 10
        rest = (await wires.http.get("/v1/tools", params={"q": query, "by": by})).json()["tools"]
        rpc = (await wires.rpc("tools.search", {"query": query, "by": by}))["result"]["tools"]
        assert len(rest) == len(rpc) == len(await wires.discovered(query, by=by)) == 10
    for wire in BY_ID:
        if wire != "library":
            found = (await wires.rows[wire].search(query)).data
            assert [one["tool_id"] for one in found["tools"]] == local, wire
    # What is asked for counts, and a list is not a search.
    rest = (await wires.http.get("/v1/tools", params={"q": query, "limit": 12})).json()["tools"]
    asked = messages.DiscoverRequest(query=query, page_size=12)
    assert len(rest) == len((await wires.stub.Discover(asked, metadata=wires.metadata())).tools) == 12
    whole = len(await wires.app.tools.visible(wires.app.caller))
    assert whole > 10
    assert len((await wires.http.get("/v1/tools")).json()["tools"]) == len(await wires.discovered()) == whole


async def test_every_endpoint_finds_the_same(wires: Wires):
    query = "write a mail to somebody"
    local = [(one.version.row.address, one.score) for one in await wires.app.search(query)]
    assert local[0][0] == "office.send_email"
    rest = (await wires.http.get("/v1/tools", params={"q": query, "limit": 10})).json()["tools"]
    assert [(one["tool_id"], one["score"]) for one in rest] == local
    rpc = (await wires.rpc("tools.search", {"query": query}))["result"]["tools"]
    assert [(one["tool_id"], one["score"]) for one in rpc] == local
    assert [one.tool_id for one in await wires.discovered(query)] == [name for name, _ in local]
    for bad in ({"query": "x", "limit": 0}, {"query": "x", "limit": "1"}, {"query": 7}, {}):
        assert (await wires.rpc("tools.search", bad))["error"]["code"] == -32602


async def test_what_a_caller_may_not_use_is_not_found_and_does_not_change_scores(wires: Wires):
    app = wires.app
    wires.bear(await app.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("office.forecast")], by=app.caller))

    async def found(query: str) -> list[tuple[str, float]]:
        rest = (await wires.http.get("/v1/tools", params={"q": query})).json()["tools"]
        return [(one["tool_id"], one["score"]) for one in rest]

    before = await found("weather for a text message")
    assert [name for name, _ in before] == ["office.forecast"]
    assert await found("office.send_email") == await found("office.nothing_of_the_kind")
    await admit(app, *(some_tool(f"weather_{number}", "Weather message, weather text.") for number in range(5)))
    await app.catalog.forget()
    assert await found("weather for a text message") == before


READS = "forbid (principal, action, resource) when { context.arguments has other };"
PERMIT = 'permit (principal, action, resource) when { resource.mutation_class == "read_only" };'


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        (PERMIT, True),
        # What another rule reads of the call lifts no forbid.
        (f"{PERMIT} {READS}", True),
        (f'{PERMIT} forbid (principal, action == Action::"office.translate", resource);', False),
        (f'{PERMIT} {READS} forbid (principal, action, resource in Namespace::"office");', False),
        (f'{PERMIT} forbid (principal, action, resource) when {{ resource.address like "*translate" }};', False),
        (f'{PERMIT} forbid (principal, action, resource) when {{ resource == Tool::"office.translate" }};', False),
        (f'{PERMIT} forbid (principal, action, resource) when {{ action == Action::"office.translate" }};', False),
        # A person can agree to it, and a call may meet a condition of a permit.
        (f"{PERMIT} forbid (principal, action, resource) unless {{ context.approved }};", True),
        ("permit (principal, action, resource) when { context.arguments has value };", True),
        ('permit (principal, action, resource) when { resource.mutation_class == "write_reversible" };', False),
        ('permit (principal, action == Action::"office.forecast", resource) when { context.arguments has x };', False),
    ],
)
async def test_a_tool_is_found_if_the_rules_allow_some_call_of_it(office: Interlock, rules: str, found: bool):
    await use_policy(office, rules)
    assert ("office.translate" in await _names(office, "translate a text")) is found
    listed = "office.forecast" in await _names(office, "weather in a city")
    assert listed is (found or "translate" in rules or "office.forecast" in rules)
    for caller in (office.caller, office.caller):
        version = await office.tools.find("office.translate", None, caller)
        assert office.tools.denials.every_call(caller, version) is not found


async def test_a_search_compiles_the_contract_of_one_tool_for_all_that_the_rules_treat_alike(app: Interlock):
    await admit(app, *(some_tool(f"send_{number}", f"Send a letter, kind {number}.") for number in range(30)))
    await app.catalog.forget()
    async with Interlock.open(app.home.path, housekeeping=False) as other:
        found = await other.search("send a letter", limit=30)
        assert len(found) == 30
        assert sum("contract" in vars(one.version.content) for one in found) <= 1
        # A rule that mentions more of a tool is asked about each.
        await use_policy(other, 'permit (principal, action, resource) when { resource.name != "send_7" };')
        left = await _names(other, "send a letter", limit=100)
        assert "office.send_7" not in left
        assert {f"office.send_{number}" for number in range(30) if number != 7} <= {*left}


GUEST = {
    "type": "object",
    "properties": {
        "passport_number": {"type": "string"},
        "meal": {"enum": ["vegetarian", "any"]},
        "loyalty": {"type": "string", "x-internal": True},
    },
}
# As pydantic writes `Literal["window", "aisle"] | None` and `list[Guest]`.
BOOKING = {
    "type": "object",
    "properties": {
        "seat": {"anyOf": [{"enum": ["window", "aisle"], "type": "string"}, {"type": "null"}], "default": None},
        "guests": {"type": "array", "items": {"$ref": "#/$defs/Guest"}},
    },
    "$defs": {"Guest": GUEST},
}


async def test_choices_and_names_inside_of_parameters_are_found(app: Interlock):
    manifest = parse_manifest(
        {
            "tool_id": "book", "namespace": "trips", "name": "book", "version": "1.0.0", "provider": "test",
            "protocol": "native", "description": "Reserve a place on a train.", "mutation_class": "read_only",
            "parameters": BOOKING, "result_schema": {}, "required_permissions": [], "idempotency": {},
            "observability": {},
        }
    )  # fmt: skip
    content = digest(manifest.document())
    evidence = TrialEvidence(content, True, "test", "")
    await app.journal.commit(admission.publish(manifest, content, "library:", evidence, "test"))
    await app.catalog.look()
    for query in ("aisle", "passport number", "vegetarian"):
        assert (await app.search(query, by="words"))[0].version.row.address == "trips.book", query
    assert await app.search("loyalty", by="words") == []


async def test_what_a_server_says_about_itself_is_searched_as_it_was_when_it_was_added(tmp_path: Path):
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:

        def config(said: str) -> Json:
            paths: Json = {"/a": {"get": {"operationId": "look", "responses": {"200": {"description": "fine"}}}}}
            described = document(paths)
            described["info"] |= {"description": said}
            return {"urls": [server.url], "allow_private": True, "openapi": described, "accept_hints": True}

        async def found() -> list[int]:
            return [len(await app.search(query, by="words")) for query in ("harbour", "vessel", "invisible")]

        said = f"Everything about\u200b a  harbour. {'x ' * 400} vessel"
        await app.upstreams.add("port", "openapi", config(said), by=app.caller)
        assert await found() == [1, 0, 0]
        async with Interlock.open(tmp_path, housekeeping=False) as other:
            assert len(await other.search("harbour", by="words")) == 1
        await app.upstreams.remove("port", by=app.caller)
        await app.upstreams.add("port", "openapi", config("A vessel."), by=app.caller)
        assert await found() == [0, 1, 0]


def test_a_schema_that_refers_to_itself_and_a_large_one_are_looked_at_in_part():
    tree: Any = {"type": "object", "properties": {"leaf": {"enum": ["oak"]}, "more": {"$ref": "#/$defs/tree"}}}
    wide = {f"field_{number}": {"anyOf": [{"const": f"choice {number}"}]} for number in range(1000)}
    entry = entry_of("x", {"parameters": {"properties": {"tree": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": tree}}})
    assert (entry.parameters, entry.parameter_texts) == (["tree", "leaf", "more"], ["oak"])
    entry = entry_of("x", {"parameters": {"properties": wide}})
    assert len(entry.parameters) < 400

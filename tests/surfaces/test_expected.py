"""Tools that are not what an agent expects: over every wire, lists and searches of a surface have none of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import orjson
import pytest
import pytest_asyncio

from interlock import Interlock
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.data.schema import Json
from tests.support.calls import admit
from tests.support.identities import did_of
from tests.support.surface_tools import TOOLS, offer
from tests.support.wires import WIRES, Wires, wired

DOORS = ("mcp", "rest", "jsonrpc", "grpc")
OVER = pytest.mark.parametrize("wire", WIRES)
ERAS = pytest.mark.parametrize("modern", [True, False], ids=["modern", "handshake"])
OWN = ["search_tools", "load_tools", "read_result"]
TEXT = {"type": "string"}
# What the tools of the office offer, and what none of them does.
OFFERED = {"type": "object", "properties": {"value": TEXT}, "required": ["value"]}
OTHER = {"type": "object", "properties": {"loudness": TEXT}, "required": ["loudness"]}


@pytest_asyncio.fixture
async def wires(home: Path, request: pytest.FixtureRequest) -> AsyncGenerator[Wires]:
    settings: Json = {"surface": "search", "surface_doors": DOORS, **getattr(request, "param", {})}
    async with Interlock.open(home, housekeeping=False, **settings) as app:
        await admit(app, *TOOLS, offer("yodel", "Sing from one mountain to another.", aliases=["warble"]))
        await app.catalog.forget()
        async with wired(app) as opened:
            yield opened


@OVER
@pytest.mark.proves("REG-13", "SURF-01")
async def test_expectations_take_tools_off_a_surface_and_put_none_on_it(wires: Wires, wire: str) -> None:
    row = wires.rows[wire]
    expectations: list[Json] = [{}, {"office.forecast": OFFERED}, {"office.translate": OTHER}]
    for expected in expectations:
        assert await row.listed(expected=expected) == []
    for name in ("office.forecast", "office.translate"):
        await row.load(name)
    both = ["office.forecast", "office.translate"]
    shown = [await row.listed(expected=expected) for expected in expectations]
    assert shown == [both, both, ["office.forecast"]]
    assert await row.listed(cursor="office.forecast", expected={}) == ["office.translate"]
    assert await row.listed(cursor="office.forecast", expected=expectations[2]) == []
    surface: Json = (await wires.http.get("/v1/surface")).json()["surface"]
    assert sorted(surface["loaded_tools"]) == both
    for name in both:
        assert (await wires.call(wire, name, {"value": "x"})).envelope is None


@ERAS
@pytest.mark.proves("REG-13", "SURF-01")
async def test_a_client_with_expectations_keeps_the_tools_that_search_and_load_others(
    wires: Wires, modern: bool
) -> None:
    for expected in ({}, {"office-forecast": OFFERED}, {"office-translate": OTHER}):
        answer = await wires.mcp("tools/list", {"_meta": {"interlock/expects": expected}}, modern=modern)
        assert [one["name"] for one in orjson.loads(answer)["result"]["tools"]] == OWN


@OVER
@pytest.mark.proves("REG-13", "SURF-02")
async def test_a_search_finds_no_tool_that_is_not_what_is_expected(wires: Wires, wire: str) -> None:
    row, query = wires.rows[wire], "translate a text"

    async def found(expected: Json | None = None) -> list[str]:
        return [one["tool_id"] for one in (await row.search(query, expected)).data["deferred"]]

    whole = await found()
    assert whole[0] == "office.translate"
    assert await found({"office.translate": OFFERED}) == whole
    assert await found({}) == whole
    others = await found({"office.translate": OTHER})
    assert "office.translate" not in others
    assert others[: len(whole) - 1] == whole[1:]
    # Nor if it is loaded.
    await row.load("office.translate")
    loaded = (await row.search(query)).data["tools"]
    assert "translate" in str(loaded[0])
    assert (await row.search(query, {"office.translate": OTHER})).data["tools"] == []


@ERAS
async def test_expectations_of_a_search_that_are_none_are_refused(wires: Wires, modern: bool) -> None:
    call = {"name": "search_tools", "arguments": {"queries": ["translate a text"]}}

    async def asked(expected: object) -> Json:
        params = {**call, "_meta": {"interlock/expects": expected}}
        return orjson.loads(await wires.mcp("tools/call", params, modern=modern))

    assert (await asked([]))["error"]["code"] == -32602
    refused = (await asked({"office.translate": {"type": "nonsense"}}))["result"]
    assert refused["isError"]
    assert refused["_meta"]["interlock/error"]["error_code"] == "E3004"


@pytest.mark.parametrize("wires", [{"surface": "all"}, {}], indirect=True, ids=["whole", "deferred"])
@OVER
@pytest.mark.proves("REG-13")
async def test_what_is_expected_of_a_tool_under_two_of_its_names_has_to_be_offered_all(wires: Wires, wire: str) -> None:
    row, names = wires.rows[wire], ["office.yodel", "office.warble"]
    if wire.startswith("mcp"):
        names += ["office-yodel"]
    await row.load("office.yodel")
    for first in names:
        for second in set(names) - {first}:
            for schemas in ((OTHER, OFFERED), (OFFERED, OTHER)):
                expected = dict(zip((first, second), schemas, strict=True))
                assert "office.yodel" not in await row.listed(expected=expected), expected
            assert "office.yodel" in await row.listed(expected={first: OFFERED, second: OFFERED})


@OVER
@pytest.mark.proves("SURF-01")
async def test_an_expectation_of_a_bare_name_tells_nothing_of_the_tools_of_others(wires: Wires, wire: str) -> None:
    app = wires.app
    await admit(app, *(offer("probe", "Look at something.", namespace=one) for one in ("red", "blue", "green")))
    await app.catalog.forget()
    await app.identities.register(Identity(did=did_of("eve"), name="eve", kind="agent", trust=80), by="test")
    wires.tokens["eve"] = await app.tokens.issue(subject=did_of("eve"), tools=[ToolGrant("office.*")], by=app.caller)
    for name in ("probe", "no_such"):
        assert await wires.rows[wire].listed("eve", expected={name: OTHER, "office.yodel": OFFERED}) == [], name

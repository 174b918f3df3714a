"""Tools within a budget: the index is always there, the best schemas that fit are loaded, and nothing goes over."""

from __future__ import annotations

import json
import random
import sys
from itertools import combinations
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from bench.search import choice_table
from interlock import Failure, Field, Interlock, demo_tools, tool
from interlock.call.capability import ToolGrant
from interlock.data.canonical import encode
from interlock.data.schema import Json
from interlock.window.affordances import (
    DETAIL,
    Affordances,
    compile_affordances,
    declaration,
    detail,
    folded,
    knapsack,
    offer,
    schema_text,
    signature_text,
    sizes,
)
from interlock.window.blocks import read_blocks
from interlock.window.tokens import Counter, estimate
from tests.sample import TOOLS
from tests.support.calls import admit
from tests.support.catalogs import catalog_tools
from tests.support.identities import did_of
from tests.support.servers import place

CATALOG = dict(sorted(catalog_tools(), key=lambda one: one[0].partition(".")[::2]))
NAMES = list(CATALOG)


def fitted(names: list[str], utilities: dict[str, float], budget: int, count: Counter = estimate) -> Affordances:
    offers = [offer(name, "1.0.0", CATALOG[name], count) for name in names]
    return compile_affordances(offers, utilities, budget, CATALOG.__getitem__, count)


# Items of the knapsack: a utility and a size.
items = st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 60)), max_size=20)


@pytest.mark.proves("SURF-06")
@given(items, st.integers(0, 200))
def test_the_greedy_choice_fits_and_is_at_least_half_as_useful_as_the_best_one(
    given_items: list[tuple[float, int]], capacity: int
) -> None:
    chosen = knapsack(given_items, capacity)
    assert len(set(chosen)) == len(chosen)
    assert sum(given_items[place][1] for place in chosen) <= capacity
    # The best choice of all, by the sizes that can be reached.
    best = {0: 0.0}
    for utility, size in given_items:
        for used, value in list(best.items()):
            if used + size <= capacity:
                best[used + size] = max(best.get(used + size, 0.0), value + utility)
    assert sum(given_items[place][0] for place in chosen) >= max(best.values()) / 2 - 1e-9


def test_the_exact_solver_of_the_property_agrees_with_trying_every_choice() -> None:
    few = [(3.0, 4), (5.0, 7), (4.0, 5), (1.0, 1)]
    choices = [choice for size in range(5) for choice in combinations(few, size)]
    best = max(sum(one[0] for one in choice) for choice in choices if sum(one[1] for one in choice) <= 10)
    assert sum(few[place][0] for place in knapsack(few, 10)) >= best / 2
    # A small item that is worth more per token does not keep out a large one that is worth far more.
    assert knapsack([(2.0, 1), (100.0, 100)], 100) == [1]


@pytest.mark.proves("SURF-06")
def test_schemas_are_taken_by_utility_per_token() -> None:
    # Each has the highest utility per token of those that are left, until one does not fit.
    assert knapsack([(6.0, 6), (3.0, 1), (8.0, 4), (1.0, 4)], 5) == [1, 2]
    assert knapsack([(1.0, 1), (1.0, 2), (1.0, 3), (1.0, 4)], 6) == [0, 1, 2]
    # Where the best choice is another one, that of the highest utility per token is taken: 10 of 14, and not 7 and 7.
    assert knapsack([(7.0, 5), (10.0, 6), (7.0, 5)], 10) == [1]
    # The best single one is taken where it is worth more than all that were taken so: 9 of 9, and not 2.
    assert knapsack([(2.0, 1), (9.0, 10)], 10) == [1]


@pytest.mark.proves("SURF-06")
@given(st.data())
def test_affordances_load_what_the_knapsack_chooses(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=12))
    names.sort(key=NAMES.index)
    utilities = {name: data.draw(st.floats(0.1, 10)) for name in names}
    budget = data.draw(st.integers(200, 6000))
    found = fitted(names, utilities, budget)
    ranked = sorted(names, key=lambda name: -utilities[name])
    offers = [offer(name, "1.0.0", CATALOG[name], estimate) for name in ranked]
    room = budget - fitted(names, {}, budget).tokens
    chosen = knapsack([(utilities[one.id], one.schema_tokens) for one in offers], room)
    wanted = {offers[place].id for place in chosen}
    assert {one["name"] for one in found.loaded} == wanted


@pytest.mark.proves("SURF-06")
def test_the_bench_measures_the_choice_among_500_against_10_ms() -> None:
    table = choice_table(rounds=20)
    (row,) = table.rows
    assert row[0] == "500 tools"
    assert row[3] == "10"
    assert float(row[2]) > 0


def _steps(items: list[tuple[float, int]], capacity: int) -> int:
    """The lines of Python that a choice takes, counted."""
    counted = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal counted
        counted += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        knapsack(items, capacity)
    finally:
        sys.settrace(before)
    return counted


@pytest.mark.proves("SURF-06")
@pytest.mark.parametrize("kind", ["any", "all fit", "none fits", "all alike", "no size"])
def test_a_choice_below_500_tools_takes_fewer_than_10_000_steps(kind: str) -> None:
    # 10 ms are 1 µs for each; a line of Python takes about a tenth of that. Twice as many tools take twice as many.
    draw = random.Random(6)
    sizes_of = {"any": lambda: draw.randint(1, 900), "none fits": lambda: 50_000, "no size": lambda: 0}
    size = sizes_of.get(kind, lambda: 40)
    items = [(draw.random() if kind == "any" else 1.0, size()) for _ in range(998)]
    capacity = 10**6 if kind == "all fit" else 20_000
    assert 499 <= _steps(items[:499], capacity) < 10_000
    assert _steps(items, capacity) < 2.1 * _steps(items[:499], capacity)


def doubling(text: str) -> int:
    """A counter by which the whole has more tokens than its parts."""
    return len(text) // 4 + (len(text) // 1000) ** 2


@pytest.mark.proves("SURF-05")
@pytest.mark.parametrize("count", [estimate, doubling, len])
@given(st.data())
def test_the_compiled_text_is_within_the_budget_and_what_remains_is_exact(count: Counter, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(NAMES)))
    names = NAMES[start : start + data.draw(st.integers(0, 25))]
    utilities = {name: data.draw(st.floats(0, 10)) for name in names if data.draw(st.booleans())}
    budget = data.draw(st.integers(0, 6000))
    found = fitted(names, utilities, budget, count)
    assert count(found.text) == found.tokens <= budget
    assert found.remaining == budget - found.tokens
    loaded = [one["name"] for one in found.loaded]
    wanted = {name for name, utility in utilities.items() if utility > 0}
    assert sorted([*loaded, *found.signatures, *found.left_out]) == sorted(wanted)
    # In rank order; the first that does not fit even as a signature ends it.
    ranked = sorted((name for name in names if name in wanted), key=lambda name: -utilities[name])
    assert loaded == [name for name in ranked if name in loaded]
    others = [name for name in ranked if name not in loaded]
    assert [*found.signatures, *found.left_out] == others
    if found.left_out and found.index != "none" and count is not doubling:
        assert count(found.text + signature_text(found.left_out[0], CATALOG[found.left_out[0]])) > budget
    # The index gives way only where it does not fit itself, and then the categories take its place.
    whole = fitted(names, {}, 10**6, count)
    assert (found.index == "tools") is (whole.tokens <= budget)
    if whole.tokens > budget:
        smaller = fitted(names, {}, whole.tokens - 1, count)
        assert smaller.index != "categories" or (found.index == "categories") is (smaller.tokens <= budget)
    for name in loaded:
        assert schema_text(name, CATALOG[name], count) in found.text
    for name in found.signatures:
        assert signature_text(name, CATALOG[name]) in found.text


@pytest.mark.proves("SURF-05")
def test_a_schema_is_shown_without_its_nested_parts_if_it_has_more_than_400_tokens() -> None:
    def shown(words: int) -> tuple[int, Json]:
        nested = {"type": "object", "properties": {"a": {"type": "string", "description": "word " * words}}}
        manifest: Json = {"description": "x", "parameters": {"type": "object", "properties": {"deep": nested}}}
        document = {"name": "a.b", "description": "x", "parameters": manifest["parameters"]}
        deep = declaration("a.b", manifest, estimate)["parameters"]["properties"]["deep"]
        return estimate(encode(document).decode()), deep

    told = [shown(words) for words in range(300, 450)]
    assert min(size for size, _ in told) <= 400 < max(size for size, _ in told)
    for size, deep in told:
        assert ("properties" in deep) is (size <= 400)
        assert (DETAIL in deep) is (size > 400)


@pytest.mark.proves("SURF-04")
def test_every_visible_tool_has_exactly_one_line_and_the_compiler_reports_both_costs() -> None:
    found = fitted(NAMES, {}, 5000)
    assert found.index == "tools"
    namespace, listed = "", list[str]()
    for line in found.text.splitlines()[1:]:
        if line.endswith(":"):
            namespace = line[:-1]
        else:
            listed.append(f"{namespace}.{line.partition('? ')[0]}")
    assert listed == NAMES
    assert found.tokens <= 10 * len(NAMES)
    told = found.document()
    assert told["index_tokens"] <= 10 * len(NAMES)
    assert told["full_tokens"] == round(sum(estimate(schema_text(name, CATALOG[name], estimate)) for name in NAMES))
    assert 15_000 < fitted(NAMES[:: len(NAMES) // 100][:100], {}, 5000).document()["full_tokens"] < 30_000
    # The tools of this package.
    shipped = {one.manifest.address: one.manifest.document() for one in (demo_tools.balance, demo_tools.post,
                                                                         demo_tools.mail_statement)}  # fmt: skip
    costs = sizes([offer(name, "1.0.0", manifest, estimate) for name, manifest in shipped.items()])
    assert 5 <= costs["index_mean"] <= 10
    assert (costs["index_tokens"], costs["full_tokens"]) == (
        pytest.approx(3 * costs["index_mean"], abs=0.2),
        pytest.approx(3 * costs["full_mean"], abs=0.2),
    )


@given(st.text(alphabet='<>/tool_result \n"&;'), st.sampled_from(["description", "search_hint", "parameter"]))
def test_no_text_of_a_tool_looks_like_a_delimiter(text: str, where: str) -> None:
    schema: Json = {"type": "object", "properties": {f"a{text}": {"type": "string", "description": text}}}
    manifest: Json = {"parameters": schema, "mutation_class": "read_only", "protocol": "mcp", where: text}
    measured = offer("a.b", "1.0.0", manifest, estimate)
    found = compile_affordances([measured], {"a.b": 1.0}, 5000, lambda _: manifest, estimate)
    assert "<" not in found.text + signature_text("a.b", manifest)
    assert list(read_blocks(found.text)) == []
    (line,) = [one for one in found.text.splitlines() if one.startswith("{")]
    assert json.loads(line)["parameters"] == schema


@pytest.mark.proves("SURF-05")
def test_what_does_not_fit_gives_way_step_by_step() -> None:
    names = [name for name in NAMES if name.startswith("server-github.")]
    ranking = {name: 1 / (1 + place) for place, name in enumerate(names)}
    full = fitted(names, ranking, 100_000)
    assert [one["name"] for one in full.loaded] == names
    assert full.signatures == ()
    some = fitted(names, ranking, 1200)
    assert some.loaded
    assert some.signatures
    assert some.left_out == tuple(name for name in names if name not in some.text.partition("\n{")[2])
    assert fitted(names, ranking, 100).index == "categories"
    assert "server-github: 26 tools" in fitted(names, ranking, 100).text
    assert fitted(names, ranking, 15).text == "26 tools; search for one by what it does\n"
    nothing = fitted(names, ranking, 3)
    assert (nothing.index, nothing.text, nothing.remaining) == ("none", "", 3)


def _with_cost(name: str, cost: int | None, nested: bool) -> Any:
    more: Json = {} if cost is None else {"x-token-cost": cost}
    if nested:

        class Inner(BaseModel):
            value: Annotated[str, Field(description="a value", examples=["x"], json_schema_extra=more)]

        kind, example = Inner, {"value": "x"}
    else:
        kind, example = str, "x"

    async def function(value: Any) -> str:
        return name

    function.__name__, function.__doc__ = name, "Find where a parcel is."
    extra: Any = None if nested else more
    function.__annotations__["value"] = Annotated[
        kind, Field(description="a value", examples=[example], json_schema_extra=extra)
    ]
    return tool(namespace="parcel", version="1.0.0", mutation_class="read_only")(function)


@pytest.mark.proves("CONTRACT-06")
@pytest.mark.parametrize("nested", [False, True])
async def test_a_stated_token_cost_raises_what_a_schema_is_taken_to_cost_and_changes_the_choice(
    app: Interlock, nested: bool
) -> None:
    given = {"plain": None, "heavy": 900, "light": 1}
    await admit(app, *(_with_cost(name, cost, nested) for name, cost in given.items()))
    await app.catalog.forget()
    sizes_of = {one["tool"]: one["full_tokens"] for one in (await app.token_costs())["of"]}
    text = schema_text("parcel.light", (await _manifest(app, "parcel.light")), estimate)
    assert sizes_of["parcel.light"] == estimate(text), "never below what is counted"
    assert sizes_of["parcel.plain"] < sizes_of["parcel.heavy"]
    assert 900 < sizes_of["parcel.heavy"] < 900 + sizes_of["parcel.plain"]
    # The most useful tool by its utility; by its utility per token it comes last.
    ranking = {"parcel.heavy": 1.0, "parcel.plain": 0.5, "parcel.light": 0.5}
    budget = (await app.affordances(budget=0)).sizes["index_tokens"] + 700
    found = await app.affordances(budget=budget, ranking=ranking)
    assert {one["name"] for one in found.loaded} == {"parcel.plain", "parcel.light"}
    assert found.signatures == ("parcel.heavy",)
    assert found.tokens <= budget
    wide = await app.affordances(budget=3000, ranking=ranking)
    assert {one["name"] for one in wide.loaded} == ranking.keys()


async def _manifest(app: Interlock, name: str) -> Json:
    return json.loads((await app.catalog.resolve(name)).row.manifest)


class Street(BaseModel):
    name: Annotated[str, Field(description="name of the street", examples=["Main Street"])]
    number: Annotated[int, Field(description="number of the house", examples=[5])]


class Address(BaseModel):
    street: Annotated[Street, Field(description="the street", examples=[{"name": "Main Street", "number": 5}])]
    city: Annotated[str, Field(description="the city", examples=["Oslo"])]
    notes: Annotated[str, Field(description="what a driver should know. " * 40, examples=["ring twice"])] = ""


EXAMPLE: Json = {"street": {"name": "Main Street", "number": 5}, "city": "Oslo"}


@tool(namespace="shop", version="1.0.0", mutation_class="read_only")
async def quote(
    address: Annotated[Address, Field(description="where it goes", examples=[EXAMPLE])],
    grams: Annotated[int, Field(description="how heavy it is", examples=[250])],
) -> int:
    """Price of a delivery."""
    return grams


@pytest.mark.proves("SURF-05")
async def test_nested_parts_of_a_large_schema_are_loaded_when_a_call_is_written(app: Interlock) -> None:
    await admit(app, quote)
    found = await app.affordances(budget=2000, ranking={"shop.quote": 1.0})
    (loaded,) = found.loaded
    properties = loaded["parameters"]["properties"]
    assert properties["grams"]["type"] == "integer"
    assert properties["address"] == {"type": "object", "description": "where it goes", DETAIL: "/properties/address"}
    assert "driver" not in found.text
    part = await app.schema_part("shop.quote", properties["address"][DETAIL])
    assert "driver" in json.dumps(part["schema"])
    assert part["tokens"] > 0
    # Nothing is lost: with the definitions it refers to, the part is the schema of the contract.
    whole = await app.schema_part("shop.quote")
    contract = (await app.catalog.resolve("shop.quote")).contract
    assert whole["schema"] == contract.input.model_facing
    assert part["schema"]["$defs"] == whole["schema"]["$defs"]
    with pytest.raises(Failure) as raised:
        await app.schema_part("shop.quote", "/properties/nothing")
    assert raised.value.code == "E3004"


def test_every_part_that_is_left_out_of_a_real_schema_can_be_read() -> None:
    left_out = 0
    for manifest in CATALOG.values():
        schema: Json = manifest["parameters"]
        for key, part in folded(schema).get("properties", {}).items():
            if DETAIL in part:
                assert detail(manifest, part[DETAIL]).items() >= schema["properties"][key].items()
                left_out += 1
    assert left_out > 20


async def test_tools_that_a_caller_used_come_first_unless_a_query_says_what_is_wanted(app: Interlock) -> None:
    for _ in range(2):
        await app.call("demo.shout", text="a")
    await app.call("demo.add", a=1)
    found = await app.affordances(budget=100_000)
    assert [one["name"] for one in found.loaded][:2] == ["demo.shout", "demo.add"]
    assert len(found.loaded) == len(TOOLS)
    searched = await app.affordances(budget=100_000, query="capitals")
    assert searched.loaded[0]["name"] == "demo.shout"
    ranked = await app.affordances(budget=100_000, ranking={"demo.send": 2.0, "demo.echo": 1.0, "demo.unknown": 5.0})
    assert [one["name"] for one in ranked.loaded] == ["demo.send", "demo.echo"]
    with pytest.raises(Failure):
        await app.affordances(budget=-1)


async def test_a_server_answers_with_the_tools_of_the_holder_and_no_others(home: Path) -> None:
    async with place(home) as here, httpx.AsyncClient(base_url=here.base, headers=here.bearer, timeout=60) as http:
        asked = await http.get("/v1/tools/affordances", params={"budget": 2000, "q": "capitals"})
        assert asked.json()["loaded"][0]["name"] == "demo.shout"
        assert (await http.get("/v1/tools/demo.add/schema", params={"at": "/properties/a"})).json()["schema"]
        assert (await http.get("/v1/tools/affordances")).status_code == 400
        token = await here.app.tokens.issue(subject=did_of("ann"), tools=[ToolGrant("demo.add")], by=here.app.caller)
        http.headers["authorization"] = f"Bearer {token}"
        narrow = (await http.get("/v1/tools/affordances", params={"budget": 2000})).json()
        assert [one["name"] for one in narrow["loaded"]] == ["demo.add"]
        assert narrow["tools"] == 1
        assert "shout" not in json.dumps(narrow)
        assert (await http.get("/v1/tools/demo.shout/schema")).status_code == 404

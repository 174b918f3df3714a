"""The router: learned from a tenant's own calls, used and replaced only where it is better."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import sets
from bench.search import selection_table
from interlock import Interlock
from interlock.api.evaluating import evaluate, evaluate_journal, evaluate_recorded, tasks_of
from interlock.api.learning import match
from interlock.api.selection_results import Selection
from interlock.call.capability import ToolGrant
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.registry.retirement import deprecate, move
from interlock.search.index import Index, IndexedTool
from interlock.search.table import shipped
from interlock.selection.evaluation import TaskOutcome, report
from interlock.selection.intent import softmax
from interlock.selection.router import Router, features, figures, is_held_out, train
from interlock.selection.together import Used, recommend, used_together
from interlock.store.selections import Called, Selected
from interlock.window.tokens import estimate
from tests.support.calls import admit
from tests.support.cli import Cli
from tests.support.identities import did_of
from tests.support.office import opened, some_tool
from tests.support.wires import BY_ID, wired

# What tools say of themselves, and two ways in which their callers ask for them: by words of the description, which the
# search finds, and by words of this house. Nobody could guess what those mean; some of them point to another tool.
TEXTS = {
    "bank.balance": "Balance of an account.", "bank.transfer": "Move money between two accounts.",
    "desk.book": "Reserve a desk in the office.", "desk.list": "Free desks of a day.",
    "food.menu": "Dishes of the canteen.", "map.street": "Streets, and each corner of a plan.",
    "post.parcel": "Where a parcel is.", "print.page": "Print a sheet or a slip of paper.",
}  # fmt: skip
ASKED = {
    "bank.balance": ("account balance", "blue sheet"), "bank.transfer": ("money moved", "green slip"),
    "desk.book": ("desk reserved", "corner"), "desk.list": ("free desks", "floor plan"),
    "food.menu": ("canteen dishes", "bowl"), "map.street": ("streets", "walk"),
    "post.parcel": ("parcel", "brown thing"), "print.page": ("paper printed", "noise"),
}  # fmt: skip
VERBS = ("get", "please take", "we want", "I need", "can you do", "prepare", "once more")
ENDS = ("for Anna", "for Bo", "of Monday", "again")
PAIRS = [
    (f"{verb} the {words} {ENDS[(place + number) % 4]}", tool)
    for tool, asked in ASKED.items()
    for number, words in enumerate(asked)
    for place, verb in enumerate(VERBS)
]
CURRENT = frozenset(TEXTS)
LEARNED = [pair for pair in PAIRS if not is_held_out(pair[0])]
HELD_OUT = [pair for pair in PAIRS if is_held_out(pair[0])]


def _scores(text: str) -> dict[str, float]:
    index = Index(shipped())
    index.add(IndexedTool(tool, tool.partition(".")[2], words) for tool, words in TEXTS.items())
    return {hit.id: hit.score for hit in index.search(text, 10, index.mask(TEXTS))}


@pytest.mark.proves("SURF-09")
def test_training_is_deterministic_and_beats_similarity_on_held_out_requests() -> None:
    assert len(HELD_OUT) > 10
    router = train(LEARNED)
    assert (train(LEARNED).weights == router.weights).all()
    assert Router.load(router.save()).tools == router.tools
    found = [(text, right, _scores(text)) for text, right in HELD_OUT]
    routed = figures([(router.best(text, scores, CURRENT, 10), right) for text, right, scores in found])
    searched = figures([(list(scores), right) for _, right, scores in found])
    # The search finds what is asked for in words of the descriptions, and three of eight tools are not all of them.
    assert 0.3 < searched.first <= searched.among_three < 0.9 < routed.first
    assert routed.among_three > searched.among_three
    always = figures([(sorted(CURRENT), right) for _, right, _ in found])
    assert always.among_three < searched.among_three


@pytest.mark.proves("SURF-09")
def test_training_minimises_the_cross_entropy_of_the_tools_that_were_called() -> None:
    router = train(PAIRS)
    rows = features([text for text, _ in PAIRS])
    right = [router.tools.index(tool) for _, tool in PAIRS]

    def entropy(weights: Any) -> float:
        mass = softmax(rows @ weights)[np.arange(len(PAIRS)), right]
        return float(-np.log(mass).mean() + 0.5e-4 * (weights**2).sum())

    wanted = np.eye(len(router.tools), dtype=np.float32)[right]
    slope = rows.T @ (softmax(rows @ router.weights) - wanted) / len(PAIRS) + 1e-4 * router.weights
    assert np.linalg.norm(slope) < 1e-3
    found = entropy(router.weights)
    assert found < 0.2 * entropy(np.zeros_like(router.weights))
    draw = np.random.default_rng(7)
    for _ in range(20):
        step = draw.standard_normal(router.weights.shape).astype(np.float32)
        assert found < entropy(router.weights + 0.05 * step)


@pytest.mark.proves("SURF-09")
def test_the_distribution_is_over_current_tools_new_ones_are_reached_and_gone_ones_have_no_mass() -> None:
    router = train(PAIRS)
    scores = {"mail.send": 0.9, "bank.balance": 0.1, "print.page": 0.05}
    current = CURRENT - {"post.parcel"} | {"mail.send"}
    found = router.distribution("send a mail", scores, current)
    assert set(found) == current
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-4)
    assert all(mass >= 0 for mass in found.values())
    assert router.best("send a mail", scores, current, 3)[0] == "mail.send"
    # What it learned is not lost by that, and a tool that is gone has no mass even for its own words.
    assert router.best("get the corner again", {"map.street": 0.9}, current, 3)[0] == "desk.book"
    assert "post.parcel" not in router.distribution("get the brown thing again", {"post.parcel": 0.9}, current)
    # Nothing that it learned exists any more: similarity alone.
    cold = router.distribution("send a mail", {"mail.send": 0.9, "x.y": 0.2}, frozenset({"mail.send", "x.y"}))
    assert cold["mail.send"] > cold["x.y"]
    assert sum(cold.values()) == pytest.approx(1.0, abs=1e-4)
    # Nothing is known of any tool.
    assert router.distribution("x", {}, frozenset("ab")) == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"PK\x03\x04"])
def test_a_damaged_router_is_not_used(data: bytes) -> None:
    with pytest.raises(ValueError, match="router"):
        Router.load(data)


async def _used(app: Interlock, pairs: list[tuple[str, str]], caller: Caller) -> None:
    for text, right in pairs:
        made = await app.select(text, intent=False, caller=caller)
        assert made.id
        assert (await app.call(right, {"value": "x"}, caller=caller)).ok


@pytest.mark.proves("SURF-09")
@pytest.mark.supports("SURF-16")
async def test_the_router_of_a_home_is_trained_used_measured_and_kept_from_getting_worse(home: Path) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        tools = [
            some_tool(name.partition(".")[2], text, namespace=name.partition(".")[0]) for name, text in TEXTS.items()
        ]
        await admit(app, *tools)
        await app.catalog.forget()
        me = app.caller
        empty = await app.selections.learning.train(me)
        assert (empty["in_use"], empty["calls"]) == (False, 0)
        # A cold start: similarity alone.
        cold = await app.select("get the account balance", intent=False)
        assert cold.chosen == "bank.balance"
        assert all(one.reason == "retrieved" for one in cold.candidates)
        await _used(app, PAIRS, me)
        # A stranger of another tenant teaches it nothing, although the words would.
        stranger = Caller(id="eve", tenant="other", scopes=me.scopes, trust=me.trust, groups=me.groups)
        await _used(app, PAIRS[:5], stranger)
        # Nor does a caller of the same name there, who selects before I call, or calls after I have selected.
        twin = Caller(id=me.id, tenant="other", scopes=me.scopes, trust=me.trust, groups=me.groups)
        for selects, calls in ((twin, me), (me, twin)):
            await app.select("the noise of the canteen", intent=False, caller=selects)
            assert (await app.call("food.menu", {"value": "x"}, caller=calls)).ok
        # Nor does a call that failed.
        await app.select("once more, and wrongly", intent=False)
        assert not (await app.call("bank.balance", {"wrong": 1})).ok
        before = await evaluate_journal(app.selections, me)
        assert (before["router"], before["tasks"]) == (False, len(PAIRS))
        answer = await app.selections.learning.train(me)
        assert (answer["in_use"], answer["replaced"], answer["calls"]) == (True, True, len(PAIRS))
        assert answer["held_out"] == answer["router"]["requests"] == answer["search"]["requests"] == len(HELD_OUT)
        assert answer["router"]["first"] > answer["search"]["first"] > 0.3
        assert answer["router"]["among_three"] > answer["search"]["among_three"]
        made = await app.select("please fetch the corner", intent=False)
        assert made.chosen == "desk.book"
        assert made.candidates[0].reason == "router"
        after = await evaluate_journal(app.selections, me)
        assert after["router"]
        assert after["recall"] > before["recall"]
        assert after == await evaluate_journal(app.selections, me)
        # Other tenants have no part of it.
        other = await app.select("please fetch the corner", intent=False, caller=stranger)
        assert all(one.reason == "retrieved" for one in other.candidates)
        with pytest.raises(Failure) as refused:
            await app.selections.learning.train(stranger, "local")
        assert refused.value.code == "E3206"
        # A tool that is gone has no mass; a new one is reached without training.
        await admit(app, some_tool("forecast", "Weather of the next days in a city.", namespace="sky"))
        await app.catalog.forget()
        new = await app.select("weather in Rome", intent=False)
        assert "sky.forecast" in [one.tool for one in new.candidates][:3]
        assert (await app.select("please fetch the corner", intent=False)).chosen == "desk.book"
        await app.journal.commit(deprecate("desk.book", "1.0.0", by="test"))
        await app.journal.commit(move("desk.book", "1.0.0", "sunset", by="test"))
        await app.catalog.forget()
        gone = await app.select("please fetch the corner", intent=False)
        assert "desk.book" not in [one.tool for one in gone.candidates]
        assert gone.candidates[0].reason == "router"
        assert sum(one.score for one in gone.candidates) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.proves("SURF-09")
async def test_a_worse_router_does_not_replace_a_better_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        tools = [
            some_tool(name.partition(".")[2], text, namespace=name.partition(".")[0]) for name, text in TEXTS.items()
        ]
        await admit(app, *tools)
        await app.catalog.forget()
        await _used(app, PAIRS, app.caller)
        assert (await app.selections.learning.train(app.caller))["replaced"]
        same = await app.selections.learning.train(app.caller)
        assert same["router"]["first"] == same["before"]["first"]
        assert same["replaced"]  # it is not worse

        def other(pairs: list[tuple[str, str]]) -> Router:
            learned = train(pairs)
            return Router(learned.tools, learned.weights * np.float32(1.25))

        monkeypatch.setattr("interlock.selection.router.train", other)
        first = await app.selections.learning.router("local")
        assert (await app.selections.learning.train(app.caller))["replaced"]
        good = await app.selections.learning.router("local")
        assert first is not None
        assert good is not None
        assert np.allclose(good.weights, 1.25 * first.weights, rtol=0.01, atol=0.001)
        names = sorted(TEXTS)
        turned = dict(zip(names, names[1:] + names[:1], strict=True))

        def badly(pairs: list[tuple[str, str]]) -> Router:
            # What it is measured by is no part of what it learns from.
            assert sorted(pairs) == sorted(LEARNED)
            return train([(text, turned[tool]) for text, tool in pairs])

        monkeypatch.setattr("interlock.selection.router.train", badly)
        worse = await app.selections.learning.train(app.caller)
        assert (worse["replaced"], worse["in_use"]) == (False, True)
        assert worse["router"]["first"] < worse["before"]["first"]
        assert worse["held_out"] == worse["before"]["requests"] == len(HELD_OUT)
        kept = await app.selections.learning.router("local")
        assert kept is not None
        assert (kept.weights == good.weights).all()


def test_a_call_belongs_to_the_last_selection_of_its_caller_that_is_not_long_ago() -> None:
    def selected(place: int, name: str, caller: str, time: str, *tools: str) -> Selected:
        return Selected(place, name, orjson.dumps({"callerId": caller, "timestamp": time, "candidates": tools}))

    at = "2026-01-01T10:{:02}:00.000Z".format
    found = match(
        [
            selected(1, "s1", "ann", at(0), "a", "b"),
            selected(3, "s2", "bob", at(0), "a"),
            selected(6, "s3", "ann", at(5), "a"),
        ],
        [
            Called(2, at(1), "bob", "a"),
            Called(4, at(3), "ann", "c"),
            Called(5, at(4), "ann", "b"),
            Called(7, at(20), "ann", "a"),
            Called(8, at(1), "bob", "z"),
        ],
    )
    assert found == [("s1", "b", "ann"), ("s2", "z", "bob")]


def test_a_call_belongs_to_the_last_search_that_found_its_tool() -> None:
    def searched(place: int, name: str, *tools: str, kind: str = "search") -> Selected:
        record = {"kind": kind, "callerId": "ann", "timestamp": at(0), "candidates": tools}
        return Selected(place, name, orjson.dumps(record))

    at = "2026-01-01T10:{:02}:00.000Z".format
    several = [searched(1, "s1", "a", "b"), searched(2, "s2", "b", "c"), searched(3, "s3", "d")]
    calls = [Called(4, at(1), "ann", "b"), Called(5, at(1), "ann", "b"), Called(6, at(1), "ann", "z")]
    # Each search is one step; none is about a tool that it did not find.
    assert match(several, calls) == [("s2", "b", "ann"), ("s1", "b", "ann")]
    assert match(several, [Called(4, at(20), "ann", "b")]) == []
    # A selection ends what was before it, and still has a part in what comes after a search.
    chosen = searched(4, "s4", "a", kind="selection")
    assert match([*several, chosen], [Called(5, at(1), "ann", "d")]) == [("s4", "d", "ann")]
    assert match([chosen, searched(5, "s5", "x")], [Called(6, at(1), "ann", "a")]) == [("s4", "a", "ann")]
    assert match([chosen, searched(5, "s5", "x")], [Called(6, at(1), "ann", "q")]) == []
    many = [searched(place, f"s{place}", f"t{place}") for place in range(100)]
    assert match(many, [Called(200, at(1), "ann", "t0")]) == []


async def test_a_router_learns_from_searches_where_these_are_stored(tmp_path: Path) -> None:
    tools = [some_tool(name.partition(".")[2], text, namespace=name.partition(".")[0]) for name, text in TEXTS.items()]
    cases: list[tuple[str, dict[str, Any], int]] = [
        ("on", {"selection_searches": True}, len(PAIRS)),
        ("off", {}, 0),
        ("never", {"selection_searches": True, "selection_requests": "never"}, 0),
    ]
    for name, settings, learned in cases:
        async with Interlock.open(tmp_path / name, housekeeping=False, **settings) as app:
            await admit(app, *tools)
            await app.catalog.forget()
            for text, right in PAIRS:
                # As a model does: it searches for each step, and calls a tool that was found.
                found = [one.version.row.address for one in await app.search(f"{text} {TEXTS[right]}")]
                assert right in found
                assert (await app.call(right, {"value": "x"})).ok
            assert await app.search("qwertz asdfgh") == []  # of which there is nothing to learn
            stored = app.journal.reader.all("SELECT body FROM journal WHERE kind = 'search'")
            assert len(stored) == learned
            assert not [body for (body,) in stored if b"corner" in body]
            answer = await app.selections.learning.train(app.caller)
            assert (answer["calls"], "router" in answer) == (learned, bool(learned))
            if learned:
                assert (await evaluate_journal(app.selections, app.caller))["tasks"] > 0
                other = Caller(id="eve", tenant="other", scopes=app.caller.scopes, trust=app.caller.trust)
                assert await app.selections.learning.router(other.tenant) is None


# Evaluation


@pytest.mark.proves("SURF-16")
async def test_selections_are_measured_on_a_trace(home: Path, tmp_path: Path) -> None:
    trace = tmp_path / "tasks.jsonl"
    lines = [
        {"query": "weather in Rome", "relevant": ["office.forecast"]},
        {"query": "translate this into German", "groups": [["office.translate", "office.other"]]},
        {"query": "send a mail to Bo", "relevant": ["office.forecast"]},
    ]
    trace.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    async with opened(home) as app:
        answer = await evaluate(app.selections, await tasks_of(trace), app.caller, intent=False)
        assert answer["tasks"] == 3
        assert answer["wrong_tool_rate"] == pytest.approx(1 / 3, abs=1e-4)
        assert answer["tokens_per_task"] > 0
        # No tool of these tasks costs anything to call: what remains is the price of the tokens.
        price = app.settings.selection_token_price / 1_000_000
        assert answer["cost_per_task"] == pytest.approx(price * answer["tokens_per_task"], abs=1e-6)
        paid = await evaluate(app.selections, [("run an SQL query", [frozenset({"office.run_query"})])], app.caller)
        assert (paid["recall"], paid["wrong_tool_rate"]) == (1.0, 0.0)
        assert paid["cost_per_task"] == pytest.approx(2.0 + price * paid["tokens_per_task"], abs=1e-6)
        assert 0 < paid["precision"] <= 1
        assert app.journal.reader.one("SELECT count(*) FROM journal WHERE kind = 'selection'") == (0,)
        trace.write_text('{"query": ""}')
        with pytest.raises(Failure, match="line 1"):
            await tasks_of(trace)
    # The price of tokens is a setting. Where it is nothing, a task costs what its call costs.
    for price, cost in ((0.0, 2.0), (1000.0, 2.0 + paid["tokens_per_task"] / 1000)):
        async with opened(tmp_path / f"{price:g}", selection_token_price=price) as app:
            again = await evaluate(
                app.selections, [("run an SQL query", [frozenset({"office.run_query"})])], app.caller
            )
            assert again["cost_per_task"] == pytest.approx(cost, abs=1e-6)


@pytest.mark.proves("SURF-16")
async def test_the_figures_of_the_journal_are_those_of_its_own_selections_and_calls(home: Path) -> None:
    """Each counted by hand: what was selected for a request, and the tool that its caller called then."""
    right = {"weather in Rome": "forecast", "an SQL query on the database of orders": "run_query"}
    wrong = {"translate this into German": "send_email", "write an invoice for the customer": "forecast"}
    async with opened(home, selection_token_price=1000.0) as app:
        me = app.caller
        made: dict[str, Selection] = {}
        for request, tool in (right | wrong).items():
            made[request] = await app.select(request)
            assert (made[request].chosen == f"office.{tool}") is (request in right)
            assert (await app.call(f"office.{tool}", {"value": "x"})).ok
        # Requests that no call has followed, those whose call failed and those of another tenant are no tasks.
        await app.select("send a mail to Bo")
        await app.select("send a mail to Cy")
        assert not (await app.call("office.send_email", {"wrong": 1})).ok
        other = Caller(id="eve", tenant="other", scopes=me.scopes, trust=me.trust, groups=me.groups)
        await app.select("weather in Oslo", caller=other)
        assert (await app.call("office.forecast", {"value": "x"}, caller=other)).ok
        found = await evaluate_journal(app.selections, me)
        called = {request: f"office.{tool}" for request, tool in (right | wrong).items()}
        candidates = {request: [one.tool for one in each.candidates] for request, each in made.items()}
        among = {request: called[request] in candidates[request] for request in made}
        assert not all(among.values())
        precision = [among[request] / len(candidates[request]) for request in made]
        tokens = [sum(each.tokens.values()) for each in made.values()]
        # The price is that of a thousand tokens for one unit, and one of the tools costs two for each call.
        costs = [each / 1000 + (2.0 if made[request].chosen == "office.run_query" else 0.0)
                 for request, each in zip(made, tokens, strict=True)]  # fmt: skip
        assert sum(costs) > 2
        assert found == {
            "tasks": 4, "precision": pytest.approx(sum(precision) / 4, abs=1e-4), "recall": sum(among.values()) / 4,
            "wrong_tool_rate": 0.5, "no_tool_rate": 0.0, "tokens_per_task": pytest.approx(sum(tokens) / 4, abs=0.1),
            "cost_per_task": pytest.approx(sum(costs) / 4, abs=1e-6), "latency_ms_per_task": None, "router": False,
        }  # fmt: skip
        assert found == await evaluate_journal(app.selections, me)
    # A process that is started later finds the same in the journal.
    async with opened(home, selection_token_price=1000.0) as app:
        assert await evaluate_journal(app.selections, me) == found


@pytest.mark.proves("SURF-16")
async def test_the_report_of_what_was_selected_is_the_same_after_the_tools_have_changed(home: Path) -> None:
    async with opened(home, selection_token_price=1000.0) as app:
        me = app.caller
        for request, tool in (
            ("weather in Rome", "forecast"), ("an SQL query on the database of orders", "run_query"),
            ("translate this into German", "send_email"),
        ):  # fmt: skip
            await app.select(request)
            assert (await app.call(f"office.{tool}", {"value": "x"})).ok
        then = await evaluate_journal(app.selections, me)
        found = await evaluate_recorded(app.selections, me)
        figures_then = {name: value for name, value in then.items() if name != "router"}
        assert found == {**figures_then, "token_price": 1000.0, "up_to": found["up_to"]}
        # One of its tools goes, and another that fits the words better comes.
        await app.journal.commit(deprecate("office.forecast", "1.0.0", by="test"))
        await app.journal.commit(move("office.forecast", "1.0.0", "sunset", by="test"))
        words = "Weather in Rome, an SQL query on the database of orders, and what is to be translated into German."
        await admit(app, some_tool("all_of_it", words, estimated_cost=9.0, namespace="office"))
        await app.catalog.forget()
        assert await evaluate_journal(app.selections, me) != then
        assert await evaluate_recorded(app.selections, me, found["up_to"]) == found
        # Later calls are in reports that go on to them.
        await app.select("weather in Rome")
        assert (await app.call("office.all_of_it", {"value": "x"})).ok
        assert await evaluate_recorded(app.selections, me, found["up_to"]) == found
        assert (await evaluate_recorded(app.selections, me))["tasks"] == found["tasks"] + 1
        # Those of another tenant are nobody else's.
        other = Caller(id="eve", tenant="other", scopes=me.scopes, trust=me.trust, groups=me.groups)
        assert (await evaluate_recorded(app.selections, other))["tasks"] == 0
        with pytest.raises(Failure) as refused:
            await evaluate_recorded(app.selections, replace(me, scopes=frozenset()))
        assert refused.value.code == "E3206"
    # So it is in a process that is started later, and on the command line.
    async with Interlock.open(home, housekeeping=False, selection_token_price=1000.0) as app:
        assert await evaluate_recorded(app.selections, me, found["up_to"]) == found
    cli = Cli(home.parent, {"INTERLOCK_SELECTION_TOKEN_PRICE": "1000"})
    assert cli.ask("tools", "evaluate", "--recorded", "--up-to", str(found["up_to"])) == found


@pytest.mark.proves("SURF-16")
@pytest.mark.parametrize("shipped_set", [0, 1])
def test_the_figures_of_the_shipped_data_are_those_of_its_searches(shipped_set: int) -> None:
    told = sets.load(sets.found()[shipped_set])
    row = selection_table(told, 20).rows[0]
    index = Index(shipped())
    index.add(told.entries)
    mask = index.mask(index.ids())
    sizes = {
        one.id: estimate(f"{one.name} {one.description} {one.parameters} {one.parameter_texts}") for one in told.entries
    }
    precision, recalled, tokens = list[float](), list[float](), list[float]()
    wrong: list[bool] = []
    for one in told.queries[:: max(1, len(told.queries) // 20)]:
        found = [hit.id for hit in index.search(one.text, 10, mask)]
        right = {tool for group in one.needed for tool in group}
        precision.append(len([tool for tool in found if tool in right]) / max(len(found), 1))
        wrong.append(bool(found) and found[0] not in right)
        recalled.append(sum(bool(group & set(found)) for group in one.needed) / len(one.needed))
        tokens.append(sum(sizes[tool] for tool in found) / sum(sizes.values()))
    assert row[0] == "search alone"
    told_of = [float(row[place]) for place in (2, 3, 4, 6)]
    assert told_of == pytest.approx([100 * fmean(one) for one in (precision, recalled, wrong, tokens)], abs=0.06)
    assert 0 < float(row[2]) < 100
    assert 0 <= float(row[4]) < 60


@pytest.mark.proves("SURF-16")
def test_the_figures_of_a_report() -> None:
    outcomes = [
        TaskOutcome([{"a"}, {"b", "c"}], ["a", "x"], "a", 100, 0.5),
        TaskOutcome([{"a"}], ["y"], "y", 50, 0.0),
        TaskOutcome([{"a"}], [], None, 0, 0.0),
    ]
    found = report(outcomes, 1000.0).document()
    assert found == {
        "tasks": 3, "precision": 0.1667, "recall": 0.1667, "wrong_tool_rate": 0.3333, "no_tool_rate": 0.3333,
        "tokens_per_task": 50.0, "cost_per_task": 0.216667, "latency_ms_per_task": None,
    }  # fmt: skip
    assert report(outcomes, 0.0).cost == pytest.approx(0.5 / 3)
    assert report([], 3.0).tasks == 0


@pytest.mark.proves("SURF-16")
@pytest.mark.proves("SURF-15")
@pytest.mark.parametrize("shipped_set", [0, 1])
def test_the_bench_measures_selections_on_the_shipped_data_with_and_without_each_first_stage(shipped_set: int) -> None:
    folders = sets.found()
    assert len(folders) == 2
    table = selection_table(sets.load(folders[shipped_set]), 20)
    assert table.columns == (
        "stages", "tools left, %", "precision@10", "recall@10", "first is wrong", "no tool", "tokens, % of all schemas",
        "cost of 1,000 tasks",
    )  # fmt: skip
    rows = {str(row[0]): [float(figure) for figure in row[1:]] for row in table.rows}
    assert list(rows) == ["search alone", "with intent", "with categories", "with both"]
    assert all(0 <= figure <= 100 for figures in rows.values() for figure in figures[:-1])
    # The cost of a task is that of the tokens which a model reads for it: no tool of the sets states what a call costs.
    tokens, cost = ({name: figures[place] for name, figures in rows.items()} for place in (-2, -1))
    assert 0 < cost["search alone"] < cost["with categories"]
    assert cost["with categories"] / cost["search alone"] == pytest.approx(
        tokens["with categories"] / tokens["search alone"], rel=0.2
    )
    left, found = ({name: figures[place] for name, figures in rows.items()} for place in (0, 2))
    # A verdict leaves out tools of other kinds, and hardly ever the right one.
    assert left["with intent"] < left["search alone"] == 100
    assert left["with both"] < left["with categories"] < left["search alone"]
    assert found["search alone"] > 0
    assert found["with intent"] >= found["search alone"] - 5
    assert found["with both"] >= found["with categories"] - 5


# Recommendations


def _calls(*told: tuple[str, str]) -> list[Used]:
    return [Used(caller, tool, 60.0 * place) for place, (caller, tool) in enumerate(told)]


def test_tools_that_enough_callers_used_together_are_recommended() -> None:
    calls = _calls(*((who, tool) for who in ("ann", "bob", "cy") for tool in ("a", "b")), ("ann", "z"))
    assert used_together(calls) == {("a", "b"): {"ann", "bob", "cy"}, ("a", "z"): {"ann"}, ("b", "z"): {"ann"}}

    def named(caller: str, tool: str | None = None, **more: Any) -> list[tuple[str, int]]:
        options: dict[str, Any] = {"peers": {}, "visible": {"a", "b", "z"}, **more}
        return [(one.tool, one.callers) for one in recommend(calls, caller, tool=tool, **options)]

    assert named("dan", "a") == [("b", 3)]
    # Those who ask are not among the three: what two others do stays unknown.
    assert named("ann", "a") == []
    assert named("ann", "a", least=2) == [("b", 2)]
    assert named("dan", "a", visible={"a"}) == []
    assert named("dan", "a", least=4) == []
    assert named("dan", peers={"ann": {"sales"}, "bob": {"sales"}, "cy": {"sales"}}) == [("a", 3), ("b", 3)]
    assert named("dan", peers={"ann": {"sales"}, "bob": {"sales"}, "cy": set()}) == []


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["t1", "t2", "t3", "t4"])), max_size=40),
    st.integers(1, 4),
    st.sets(st.sampled_from(["t1", "t2", "t3", "t4"])),
    st.sampled_from([None, "t1"]),
)
def test_a_recommendation_names_visible_tools_that_enough_callers_used(
    told: list[tuple[str, str]], least: int, visible: set[str], tool: str | None
) -> None:
    calls = _calls(*told)
    peers = {name: {"g"} for name in "abcd"}
    for one in recommend(calls, "a", tool=tool, peers=peers, visible=visible, least=least):
        assert one.tool in visible
        assert one.callers >= least
        assert len({call.caller for call in calls if call.tool == one.tool and call.caller != "a"}) >= least


async def test_no_tenant_learns_what_another_one_uses(home: Path) -> None:
    async with opened(home, recommend_callers=2) as app:
        me = app.caller
        for name in ("ann", "bob"):
            other = Caller(id=name, tenant="other", scopes=me.scopes, trust=me.trust, groups=me.groups)
            for tool in ("office.forecast", "office.translate"):
                assert (await app.call(tool, {"value": "x"}, caller=other)).ok
        assert await app.recommend("office.forecast") == []
        third = Caller(id="cy", tenant="other", scopes=me.scopes, trust=me.trust, groups=me.groups)
        found = await app.recommend("office.forecast", caller=third)
        assert [(one.tool, one.callers) for one in found] == [("office.translate", 2)]
        with pytest.raises(Failure) as unknown:
            await app.recommend("office.made_up", caller=third)
        assert unknown.value.code == "E3101"


async def test_every_endpoint_recommends_the_same_to_the_holder_of_a_token(home: Path) -> None:
    async with opened(home, recommend_callers=2) as app, wired(app) as wires:
        me = app.caller
        for name in ("ann", "bob", "cid"):
            other = Caller(id=name, scopes=me.scopes, trust=me.trust, groups=me.groups)
            for one in ("office.forecast", "office.translate", "office.send_email"):
                await app.call(one, {"value": "x"}, caller=other)
        asked: Json = {"tool": "office.forecast"}

        async def told() -> list[list[Json]]:
            return [await wires.rows[wire].recommend(asked["tool"]) for wire in BY_ID]

        whole = await told()
        assert all(one == whole[0] for one in whole)
        assert [(one["tool"], one["reason"], one["callers"]) for one in whole[0]][:1] == [
            ("office.send_email", "together", 3)
        ]
        # Of tools that the token does not name, the holder learns nothing.
        grants = [ToolGrant("office.forecast"), ToolGrant("office.translate")]
        token = await app.tokens.issue(subject=did_of("bot"), tools=grants, by=app.caller)
        wires.bear(token)
        narrowed = await told()
        assert all(one == narrowed[0] for one in narrowed)
        assert [one["tool"] for one in narrowed[0]] == ["office.translate"]
        asked["tool"] = "office.send_email"
        refused = await wires.http.get("/v1/tools/recommendations", params=asked)
        assert (refused.status_code, refused.json()["error"]["error_code"]) == (404, "E3101")
        assert (await wires.rpc("tools.recommend", asked))["error"]["data"]["error_code"] == "E3101"
        assert "error" in (await wires.rpc("tools.recommend", {"tool": 7}))

"""The stages of a selection, each by itself: intent, categories, rules, allocation, cost, model."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import sets
from interlock.api.narrowing import Narrowing
from interlock.api.search import Search
from interlock.core.errors import Failure
from interlock.search.evaluation import recall
from interlock.search.index import Index, IndexedTool
from interlock.search.table import shipped
from interlock.selection.dangers import dangers
from interlock.selection.hierarchy import CHOSEN, LEAST_SIZE, Category, Hierarchy, most_tools, partition
from interlock.selection.intent import LEAST, NONE_THRESHOLD, THRESHOLD, Intent, classifier
from interlock.selection.kinds import EVERY, KINDS, Kind, kinds_of
from interlock.selection.stages import (
    Candidate,
    Stage,
    apply_rules,
    checked_choice,
    fit,
    keep_best,
    prefer_cheaper,
    prefer_faster,
)
from interlock.window.tokens import estimate

# Requests, the kind of help that each needs, and whether that is clear enough for a verdict.
LABELLED: list[tuple[str, Kind, bool]] = [
    ("List the customer's accounts", "read", False),
    ("list all open issues", "read", True),
    ("Show me the weather forecast for Rome", "read", True),
    ("find all restaurants near the station", "read", True),
    ("delete the file report.txt", "change", True),
    ("create a new issue in the repository", "change", True),
    ("book a table for four people tomorrow", "change", True),
    ("calculate the compound interest of 1000 euros over 5 years", "compute", False),
    ("convert 20 miles to kilometres", "compute", False),
    ("compute the average of these numbers", "compute", True),
    ("translate this text into German", "compute", True),
    ("send an email to Anna that I will be late", "communicate", True),
    ("reply to the customer's mail", "communicate", True),
    ("tell me a joke", "none", False),
    ("tell me a funny joke about cats", "none", True),
    ("good morning, how are you", "none", True),
    ("thank you so much", "none", True),
    ("hello there", "none", False),
]


# Intent


@pytest.mark.proves("SURF-15")
@pytest.mark.parametrize(("request_text", "kind", "clear"), LABELLED)
def test_the_kind_of_help_is_named_with_a_confidence(request_text: str, kind: Kind, *, clear: bool) -> None:
    found = classifier().classify(request_text)
    assert found.kind == (kind if clear else None)
    assert (found.confidence >= (NONE_THRESHOLD if kind == "none" else THRESHOLD)) == clear
    assert max(found.probabilities, key=lambda one: found.probabilities[one]) == kind
    assert 0 <= found.confidence <= 1
    assert math.isclose(found.confidence, found.probabilities[kind], abs_tol=1e-6)
    # The same request has no verdict if more is asked for, and one if less is.
    if kind != "none":
        assert classifier().classify(request_text, threshold=found.confidence + 1e-3).kind is None
        assert classifier().classify(request_text, threshold=found.confidence - 1e-3).kind == kind


@pytest.mark.proves("SURF-15")
def test_without_a_clear_kind_there_is_no_verdict_and_every_tool_stays() -> None:
    found = classifier().classify("my invoice and the shop")
    assert found.kind is None
    assert all(found.allows(frozenset((kind,))) for kind in KINDS)
    assert classifier().classify("delete the file", threshold=1.0).kind is None


def _visible(tools: list[frozenset[Kind]]) -> dict[str, Any]:
    """Tools that can give these kinds of help, as their names and classes say."""
    verbs = {"read": "get", "change": "create", "compute": "calculate", "communicate": "send"}
    made: dict[str, Any] = {}
    for place, kinds in enumerate(tools):
        words = "_".join(verbs[kind] for kind in sorted(kinds & set(verbs))) or "thing"
        manifest = orjson.dumps({"tool_id": f"{words}_{place}", "description": "", "mutation_class": ""})
        made[f"id{place}"] = SimpleNamespace(row=SimpleNamespace(manifest=manifest, address=f"a.{words}_{place}"))
    return made


@pytest.mark.proves("SURF-15")
@given(
    st.sampled_from([None, *KINDS]),
    st.lists(st.floats(0, 1), min_size=len(KINDS), max_size=len(KINDS)),
    st.lists(st.frozensets(st.sampled_from(sorted(EVERY)), max_size=2), max_size=12),
)
def test_a_verdict_leaves_a_part_of_the_candidates(
    kind: Kind | None, numbers: list[float], tools: list[frozenset[Kind]]
) -> None:
    intent = Intent(kind, 0.9, dict(zip(KINDS, numbers, strict=True)), ())
    visible, stages = _visible(tools), list[Stage]()
    narrowing = Narrowing(cast("Search", None))  # which categories alone need
    kept = asyncio.run(narrowing.by_intent(visible, intent, stages))
    assert set(kept) <= set(visible)
    assert stages[0].tools == tuple(visible[one].row.address for one in kept)
    likely: list[str] = []
    for one, version in visible.items():
        able = kinds_of(orjson.loads(version.row.manifest)["tool_id"])
        if sum(intent.probabilities[each] for each in able) >= LEAST:
            likely.append(one)
    if kind is None:
        assert kept == list(visible)
    elif kind == "none":
        assert not kept
    else:
        assert kept == (likely or list(visible))


@pytest.mark.proves("SURF-10", "SURF-15")
def test_categories_are_chosen_among_those_that_hold_a_tool_which_the_verdict_left() -> None:
    categories = [Category("sky", "weather rain", ("a", "b")), Category("money", "invoice", ("c",))]
    hierarchy = Hierarchy(categories, None)
    assert [one.name for one in hierarchy.choose("weather and rain")] == ["sky"]
    assert [one.name for one in hierarchy.choose("weather and rain", among=frozenset("b"))] == ["sky"]
    assert [one.name for one in hierarchy.choose("weather and rain", among=frozenset("c"))] == ["money"]


def test_what_a_tool_can_do_follows_from_its_name_and_its_class() -> None:
    assert kinds_of("get_balance") == {"read"}
    assert kinds_of("sendMessage") == {"communicate"}
    assert kinds_of("balance") == EVERY
    assert kinds_of("balance", "", "read_only") == {"read", "compute"}
    # Tools of others count as writes until somebody has said otherwise, so their names count too.
    assert "read" in kinds_of("list_issues", "", "write_irreversible")
    assert kinds_of("delete_rows", "", "read_only") == {"read", "compute"}


# Categories


@st.composite
def _catalogs(draw: st.DrawFn) -> list[IndexedTool]:
    servers = draw(st.lists(st.integers(1, 90), min_size=1, max_size=8))
    return [
        IndexedTool(f"s{s}.t{n}", f"tool_{n}", f"does {n}", server=f"s{s}")
        for s, m in enumerate(servers)
        for n in range(m)
    ]


@pytest.mark.proves("SURF-10")
@given(_catalogs(), st.integers(0, 2**32 - 1))
def test_every_tool_is_in_exactly_one_category_and_no_category_is_too_large(
    entries: list[IndexedTool], seed: int
) -> None:
    vectors = np.random.default_rng(seed).standard_normal((len(entries), 8)).astype(np.float32)
    found = partition(entries, vectors)
    assert sorted(tool for one in found for tool in one.tools) == sorted(one.id for one in entries)
    assert len({one.name for one in found}) == len(found)
    most = most_tools(len(entries))
    assert all(1 <= len(one.tools) <= most for one in found)
    assert len(found) <= 2 * len(entries) / most + 1
    assert partition(entries, vectors) == found


@pytest.mark.proves("SURF-10")
def test_categories_do_not_depend_on_vectors_that_are_all_alike() -> None:
    entries = [IndexedTool(f"t{n:03}", f"tool_{n}", "") for n in range(200)]
    found = partition(entries, np.zeros((200, 4), np.float32))
    assert sorted(tool for one in found for tool in one.tools) == [one.id for one in entries]
    assert all(len(one.tools) <= LEAST_SIZE for one in found)


@pytest.mark.proves("SURF-10")
def test_a_category_is_chosen_by_its_description() -> None:
    words = {"mail": "letter inbox", "money": "invoice ledger", "sky": "weather rain"}
    entries = [IndexedTool(f"{name}.t{n}", f"t{n}", f"About {text} {n}.", server=name)
               for name, text in words.items() for n in range(20)]  # fmt: skip
    hierarchy = Hierarchy(partition(entries, shipped().documents([one.text() for one in entries])), shipped())
    assert len(hierarchy.categories) == 3
    for name, text in words.items():
        for word in text.split():
            (chosen,) = hierarchy.choose(f"about the {word}", 1)
            assert word in chosen.description
            assert set(chosen.tools) == {one.id for one in entries if one.server == name}


@pytest.mark.proves("SURF-10")
def test_what_a_step_shows_is_bounded_by_the_categories_and_not_by_the_number_of_tools() -> None:
    draw = np.random.default_rng(7)
    steps: list[int] = []
    numbers = (640, 2560)
    for number in numbers:
        said = draw.integers(0, 3000, (number, 12)).tolist()
        entries = [
            IndexedTool(
                f"s{n % 40}.t{n:05}", f"tool_{n}", " ".join(f"word{one}" for one in said[n]), server=f"s{n % 40}"
            )
            for n in range(number)
        ]
        vectors = draw.standard_normal((number, 16)).astype(np.float32)
        hierarchy = Hierarchy(partition(entries, vectors), None)
        count, size = len(hierarchy.categories), most_tools(number)
        assert count <= 2 * number / size + 1
        # A category is told in so many words, however many tools it has.
        assert all(len(one.description.split()) <= 90 for one in hierarchy.categories.values())
        told = max(estimate(one.line) for one in hierarchy.categories.values())
        assert estimate(hierarchy.text) <= count * told
        # The second step looks into so many categories, each of which has so many tools.
        chosen = hierarchy.choose(f"{entries[0].description} {entries[1].description}")
        assert len(chosen) == CHOSEN
        assert sum(len(one.tools) for one in chosen) <= CHOSEN * size
        steps.append(count * told + CHOSEN * size)
    # Four times as many tools: twice as many categories, and twice as large ones.
    assert most_tools(numbers[1]) <= 2 * most_tools(numbers[0]) + 1
    assert steps[1] <= 2.5 * steps[0]


@pytest.mark.proves("SURF-10")
@pytest.mark.parametrize(("name", "most", "every"), [("livemcp", 1000, 2), ("bfcl", 1000, 20)])
def test_a_choice_by_category_takes_few_tokens_and_finds_as_much(name: str, most: int, every: int) -> None:
    told = sets.load(sets.HERE / name)
    entries = told.entries[:most]
    assert len(entries) == (1000 if name == "bfcl" else 527)
    ids = {one.id for one in entries}
    index = Index(shipped())
    index.add(entries)
    vectors = index.vectors([one.id for one in entries])
    assert vectors is not None
    hierarchy = Hierarchy(partition(entries, vectors), shipped())
    queries = [one for one in told.queries if all(group & ids for group in one.needed)][::every]
    assert len(queries) > 40
    schemas = {
        one.id: estimate(f"{one.name} {one.description} {one.parameters} {one.parameter_texts}") for one in entries
    }
    flat, stepped, shown = 0.0, 0.0, 0.0
    for query in queries:
        flat += recall([hit.id for hit in index.search(query.text, 10, index.mask(ids))], query.needed)
        inside = [tool for one in hierarchy.choose(query.text) for tool in one.tools]
        found = [hit.id for hit in index.search(query.text, 10, index.mask(inside))]
        stepped += recall(found, query.needed)
        shown = max(shown, sum(schemas[tool] for tool in found))
    assert flat > 0.5 * len(queries)
    assert stepped >= flat - 0.05 * len(queries)
    whole = sum(schemas.values())
    assert max(estimate(hierarchy.text), shown) < 0.15 * whole


# Rules, allocation, cost


@dataclass(frozen=True)
class _Rule:
    tool: str
    words: tuple[str, ...] = ()
    pattern: str = ""


def _some(*names: str) -> list[Candidate]:
    return [Candidate(name, 0.9 - 0.1 * place, tokens=100) for place, name in enumerate(names)]


@pytest.mark.proves("SURF-07")
def test_a_rule_that_fires_puts_its_tool_first_and_keeps_two_others() -> None:
    def allowed(tool: str) -> bool:
        return tool != "hidden"

    rules = [
        _Rule("hidden", ("refund",)),
        _Rule("bank.refund", ("refunds", "order")),
        _Rule("x.y", pattern=r"\binv-\d+"),
    ]
    kept, stage = apply_rules("Refund the order of yesterday", _some("a", "b", "bank.refund", "c"), rules, allowed)
    assert [one.tool for one in kept] == ["bank.refund", "a", "b"] == list(stage.tools)
    assert kept[0].reason == "rule"
    kept, _ = apply_rules("where is INV-17?", _some("a"), rules, allowed)
    assert [one.tool for one in kept] == ["x.y", "a"]
    kept, stage = apply_rules("hello", _some("a", "b"), rules, allowed)
    assert [one.tool for one in kept] == ["a", "b"]
    assert stage.why == "no rule fired"


@pytest.mark.proves("SURF-07")
def test_at_most_ten_are_kept_and_only_those_whose_schemas_fit() -> None:
    assert len(keep_best(_some(*"abcdefghijklm"))) == 10
    assert [one.tool for one in keep_best(_some("b", "a"))] == ["b", "a"]
    kept, stage = fit([Candidate("a", 1, 60), Candidate("b", 0.9, 50), Candidate("c", 0.8, 40)], 100)
    assert [one.tool for one in kept] == ["a", "c"]
    assert (stage.before, stage.why) == (3, "100 of 100 tokens are used by schemas")
    assert fit(_some("a"), 99)[0] == []
    assert len(fit(_some("a", "b"), None)[0]) == 2


@pytest.mark.proves("SURF-16")
def test_of_two_equal_tools_the_cheaper_is_chosen_and_the_trade_is_stated() -> None:
    dear, cheap = Candidate("a.dear", 0.8, cost=0.5), Candidate("b.cheap", 0.79, cost=0.01)
    kept, stage = prefer_cheaper([dear, cheap], asked=True)
    assert [one.tool for one in kept] == ["b.cheap", "a.dear"]
    assert stage.why == "b.cheap at 0.01 instead of a.dear at 0.5: saves 0.49 a call, with -0.010 of expected success"
    assert stage.facts["trade"]["expected_success"] == -0.01
    assert prefer_cheaper([dear, cheap], asked=False)[0] == [dear, cheap]
    # The cheapest of all that are equal, not the first of them that costs less.
    between = Candidate("c.between", 0.8, cost=0.2)
    assert prefer_cheaper([dear, between, cheap], asked=True)[0] == [cheap, dear, between]
    for worse in (Candidate("d.worse", 0.79, cost=0.0, success=0.5), Candidate("e.worse", 0.77)):
        assert prefer_cheaper([dear, worse], asked=True)[0] == [dear, worse]
    # A rule is what the operator decided.
    ruled = replace(dear, reason="rule")
    kept, stage = prefer_cheaper([ruled, cheap], asked=True)
    assert (kept, stage.why) == ([ruled, cheap], "a rule decided")


def test_of_equal_tools_the_faster_is_chosen_and_no_dearer_one_where_cost_counts_too() -> None:
    slow = Candidate("a.slow", 0.8, cost=0.25, latency_ms=900.0)
    fast, quick = Candidate("b.fast", 0.79, cost=0.5, latency_ms=20.0), replace(slow, tool="c.quick", latency_ms=30.0)
    kept, stage = prefer_faster([slow, fast, quick], asked=True)
    assert [one.tool for one in kept] == ["b.fast", "a.slow", "c.quick"]
    assert stage.why == (
        "b.fast at 20.0 ms instead of a.slow at 900.0 ms: saves 880.0 ms a call, with -0.010 of expected success and"
        " +0.25 of cost"
    )
    assert prefer_faster([slow, fast, quick], asked=True, cheaper=True)[0][0] == quick
    assert prefer_faster([slow, fast], asked=False)[0] == [slow, fast]
    # What was not measured is neither faster nor slower, and what fits worse is no equal.
    new = Candidate("d.new", 0.8)
    assert prefer_faster([slow, new], asked=True)[0] == [slow, new]
    assert prefer_faster([new, fast], asked=True)[0] == [new, fast]
    assert prefer_faster([slow, replace(fast, success=0.5)], asked=True)[0][0] == slow
    ruled = replace(slow, reason="rule")
    assert prefer_faster([ruled, fast], asked=True)[0] == [ruled, fast]
    assert prefer_faster([], asked=True)[0] == []


# A model's answer


@pytest.mark.proves("SURF-07")
@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ({"tool": "a.made_up", "parameters": {}}, "E3101"),
        ({"tool": "a.known", "parameters": {"bad": 1}}, "E3301"),
        ({"tool": "a.known", "parameters": [1]}, "E3004"),
        ({"tool": 7}, "E3004"),
        ("a.known", "E3004"),
        (None, "E3004"),
    ],
)
def test_what_a_model_makes_up_is_refused(answer: Any, code: str) -> None:
    with pytest.raises(Failure) as refused:
        checked_choice(answer, {"a.known": lambda given: ["bad: not known"] if "bad" in given else []})
    assert refused.value.code == code


def test_a_model_may_choose_no_tool() -> None:
    assert checked_choice({"tool": None}, {}).tool is None


# Dangerous operations


@pytest.mark.proves("SURF-08")
@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ({"sql": "DROP TABLE users"}, ["DROP"]),
        ({"sql": "drop/* x */ table\n users"}, ["DROP"]),
        ({"q": ["select 1;", "truncate orders"]}, ["TRUNCATE"]),
        ({"a": {"b": "DELETE FROM orders;"}}, ["DELETE without WHERE"]),
        ({"a": "delete from orders where id = 1"}, []),
        ({"a": "UPDATE t SET x = 1"}, ["UPDATE without WHERE"]),
        ({"a": "update t set x = 1 where y = 2"}, []),
        ({"command": ["rm", "-rf", "/srv"]}, ["rm -r"]),
        ({"command": "rm file.txt"}, []),
        ({"a": "SELECT '--'; DROP TABLE users"}, ["DROP"]),
        ({"a": "select '/*'; drop table users; select '*/'"}, ["DROP"]),
        ({"a": "/*!50000 DROP TABLE users */"}, ["DROP"]),
        ({"a": "DROP TEMPORARY TABLE x"}, ["DROP"]),
        ({"a": "drop materialized view totals"}, ["DROP"]),
        ({"a": "DELETE FROM orders RETURNING id"}, ["DELETE without WHERE"]),
        ({"a": "DELETE FROM orders LIMIT 5"}, ["DELETE without WHERE"]),
        ({"a": "DELETE FROM `my db`.orders"}, ["DELETE without WHERE"]),
        ({"a": 'delete from only "a b" as t'}, ["DELETE without WHERE"]),
        ({"a": "delete from orders o where id = 1"}, []),
        ({"a": "delete from orders -- where id = 1"}, ["DELETE without WHERE"]),
        ({"a": "UPDATE t a SET x=1"}, ["UPDATE without WHERE"]),
        ({"a": "UPDATE t SET x = 1 -- where y = 2"}, ["UPDATE without WHERE"]),
        ({"a": "UPDATE t SET note = '--' WHERE y = 2"}, []),
        ({"a": "GRANT ALL ON t TO bob"}, ["GRANT ALL"]),
        ({"a": "mkfs.ext4 /dev/sda1"}, ["mkfs"]),
        ({"a": "dd if=/dev/zero of=/dev/sda"}, ["dd to a device"]),
        ({"a": "git push --force"}, ["git push --force"]),
        ({"a": ["git", "push", "origin", "-f"]}, ["git push --force"]),
        ({"a": "git push origin main"}, []),
        ({"a": "rm --recursive /srv"}, ["rm -r"]),
        ({"a": "rm --force --recursive /srv"}, ["rm -r"]),
        ({"a": " " * 200_001}, ["text that is too long to be read"]),
        ({"text": "we drop the table reservation at noon"}, []),
        ({"n": 7, "none": None}, []),
    ],
)
def test_operations_that_destroy_much_are_found(parameters: dict[str, Any], found: list[str]) -> None:
    assert dangers(parameters) == found

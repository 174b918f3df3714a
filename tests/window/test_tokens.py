"""Tokens are counted by the setting `counter`, and people see what their tools take in a window."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Failure, Interlock
from interlock.call.capability import ToolGrant
from interlock.data.schema import Json
from interlock.window import tokens
from interlock.window.affordances import Offer, offer, sizes
from interlock.window.tokens import estimate
from tests.sample import TOOLS
from tests.support.catalogs import catalog_tools
from tests.support.identities import did_of
from tests.support.servers import place


def offers(count: tokens.Counter = estimate) -> list[Offer]:
    return [offer(name, "1.0.0", manifest, count) for name, manifest in catalog_tools()]


@pytest.mark.supports("SURF-04")
def test_the_index_of_real_tools_takes_at_most_ten_tokens_a_tool_and_a_hundred_schemas_near_20_000() -> None:
    found, described = offers(), dict(catalog_tools())
    told = sizes(found)
    assert told["tools"] == 231 == len({one.id for one in found})
    assert 5 <= told["index_mean"] <= 10
    assert 15_000 <= 100 * told["full_mean"] <= 30_000
    assert told["index_tokens"] == sum(one.line_tokens for one in found)
    assert told["full_mean"] == round(told["full_tokens"] / 231, 1)
    for one in found:
        name, _, words = one.line.rstrip("\n").partition("? ")
        assert name == one.id.partition(".")[2]
        assert 2 <= len(words.split()) <= 10
        assert all(word in described[one.id]["description"] for word in words.split()), one.line


@pytest.mark.proves("SURF-04")
def test_a_search_hint_serves_as_the_sentence_of_a_tool() -> None:
    manifest: Json = {
        "description": "Something long that nobody needs.",
        "search_hint": "book flights anywhere",
        "mutation_class": "read_only",
    }
    assert offer("office.travel", "1.0.0", manifest, estimate).line == "travel? book flights anywhere\n"
    for mark, name in (("?", "read_only"), ("+", "write_reversible"), ("!", "write_irreversible")):
        assert offer("office.travel", "1.0.0", {**manifest, "mutation_class": name}, estimate).line[6] == mark


@pytest.mark.proves("SURF-04")
def test_an_exact_counter_agrees_with_the_estimate_within_its_margin() -> None:
    for name in get_args(tokens.Exact):
        exact = tokens.exact(name)
        assert exact("") == 0
        told, estimated = sizes(offers(exact)), sizes(offers())
        assert told["index_mean"] == pytest.approx(8, abs=0.6)
        assert 1.0 <= estimated["full_tokens"] / told["full_tokens"] <= 1.2


def test_an_exact_counter_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rs_bpe", None)
    with pytest.raises(Failure) as raised:
        tokens.exact("o200k")
    assert raised.value.code == "E3108"
    assert "pip install rs-bpe" in raised.value.resolution


@given(st.text(), st.text())
def test_more_text_never_has_fewer_tokens(first: str, second: str) -> None:
    assert 0 <= estimate(first) <= estimate(f"{first}\n{second}")


@pytest.mark.proves("SURF-04")
async def test_the_costs_of_tools_are_those_of_the_tools_that_a_caller_sees(app: Interlock) -> None:
    told = await app.token_costs()
    assert [one["tool"] for one in told["of"]] == sorted(one.manifest.address for one in TOOLS)
    assert told["full_tokens"] == sum(one["full_tokens"] for one in told["of"])
    marks = {one["tool"]: one["index_line"].split()[0][-1] for one in told["of"]}
    assert (marks["demo.add"], marks["demo.increment"], marks["demo.send"]) == ("?", "+", "!")
    assert await app.token_costs() == told


async def test_a_server_counts_for_the_holder_of_a_token(home: Path) -> None:
    async with place(home) as here, httpx.AsyncClient(base_url=here.base, headers=here.bearer, timeout=60) as http:
        told = (await http.get("/v1/tools/cost")).json()
        assert told == await here.app.token_costs()
        token = await here.app.tokens.issue(subject=did_of("ann"), tools=[ToolGrant("demo.add")], by=here.app.caller)
        narrow = (await http.get("/v1/tools/cost", headers={"authorization": f"Bearer {token}"})).json()
        assert [one["tool"] for one in narrow["of"]] == ["demo.add"]
        assert narrow["tools"] == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [("return 'many'", "whole number"), ("return -1", "whole number"), ("raise OSError", "it raised OSError")],
)
async def test_a_counter_of_the_operators_is_used_and_held_to_its_promise(home: Path, body: str, words: str) -> None:
    (home / "count.py").write_text("def chars(text):\n    return len(text)\n\ndef broken(text):\n    " + body)
    async with Interlock.open(home, counter="count.py:chars") as app:
        told: Any = await app.token_costs()
        assert all(one["index_tokens"] == len(one["index_line"]) + 1 for one in told["of"])
    async with Interlock.open(home, counter="count.py:broken") as app:
        with pytest.raises(Failure) as raised:
            await app.token_costs()
        assert raised.value.code == "E3108"
        assert words in raised.value.message

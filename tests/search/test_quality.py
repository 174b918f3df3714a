"""The shipped table of vectors: these very bytes, and how well a search with it finds what is needed.

The sets are public ones with their labels. The bounds lie a little below what was measured; a table that was trained
worse, or an index that ranks worse, falls below them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib.resources import files
from statistics import fmean

import pytest

from bench import sets
from interlock.search.evaluation import ndcg, recall
from interlock.search.index import Encoder, Index
from interlock.search.table import shipped

DIGEST = "54ebcebe7f39a85718741e3f24d8d40a243bc9bc4e4e78243c34b6b460a068f8"


def test_the_table_is_the_one_that_was_measured_and_small_enough_to_ship():
    data = files("interlock.search").joinpath("table.npz").read_bytes()
    assert sha256(data).hexdigest() == DIGEST
    assert len(data) <= 8_000_000


@cache
def _loaded(name: str) -> sets.Set:
    return sets.load(sets.HERE / name)


def _figures(name: str, encoder: Encoder | None, most: int) -> tuple[float, float, float]:
    """NDCG@10, recall@10, and the part of the needed tools among the best five of each step."""
    told = _loaded(name)
    index = Index(encoder)
    index.add(told.entries)
    seen = index.mask(one.id for one in told.entries)

    def find(text: str, limit: int) -> list[str]:
        return [hit.id for hit in index.search(text, limit, seen)]

    queries = told.queries[:: max(1, len(told.queries) // most)]
    ranked = [(find(one.text, 10), one.needed) for one in queries]
    steps = [({tool for step in one.steps for tool in find(step, 5)}, one.needed) for one in queries if one.steps]
    return (
        100 * fmean(ndcg(found, needed) for found, needed in ranked),
        100 * fmean(recall(found, needed) for found, needed in ranked),
        100 * fmean(recall(found, needed) for found, needed in steps) if steps else 0.0,
    )


@pytest.mark.parametrize(
    ("name", "encoder", "least"),
    [
        ("livemcp", None, (36.5, 45, 71)),
        ("livemcp", shipped, (42, 51, 75)),
        ("bfcl", None, (74, 88, 0)),
        ("bfcl", shipped, (78, 91, 0)),
    ],
)
@pytest.mark.part_of("SURF-03", rest="search hints, pending servers and the shape of an empty answer")
def test_search_finds_what_is_needed(name: str, encoder: Callable[[], Encoder] | None, least: tuple[float, ...]):
    found = _figures(name, encoder and encoder(), 300)
    assert all(one >= bound for one, bound in zip(found, least, strict=True)), found


def test_the_gain_of_a_ranking():
    needed = [{"a", "b"}, {"c"}]
    assert ndcg(["a", "c"], needed) == 1
    assert ndcg(["a", "b", "c"], needed) == pytest.approx((1 + 1 / 2) / (1 + 1 / 1.584962500721156))
    assert ndcg(["x"], needed) == 0
    assert (recall({"b"}, needed), recall({"b", "c"}, needed)) == (0.5, 1.0)

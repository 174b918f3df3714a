"""How many values a request holds, and how much of a text is searched."""

from __future__ import annotations

from typing import Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Failure
from interlock.data import bounds
from interlock.data.bounds import MARGIN, Shortener, check_values, size_of
from interlock.privacy.redact import Redactor, safe_log, safe_message, without_credentials
from tests.support.each import each

values = st.recursive(
    st.none() | st.integers(0, 9) | st.text("a,[{:", max_size=4),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text("ab,", max_size=3), inner, max_size=6),
    max_leaves=30,
)


def counted(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(counted, cast("dict[str, Any]", value).values()))
    return 1 + sum(map(counted, cast("list[Any]", value))) if isinstance(value, list) else 1


def empty(value: Any) -> int:
    """How many empty objects and arrays there are; counting in bytes takes each for two values."""
    if isinstance(value, dict | list):
        inner = list(cast("dict[str, Any]", value).values()) if isinstance(value, dict) else cast("list[Any]", value)
        return sum(map(empty, inner)) if inner else 1
    return 0


@given(values, st.integers(1, 40))
def test_a_text_is_refused_when_it_holds_more_values_and_not_before(value: Any, most: int) -> None:
    text = orjson.dumps(value)
    if counted(value) > most:
        with pytest.raises(Failure, match=f"more than {most} values"):
            check_values(text, most)
    elif counted(value) + empty(value) <= most:
        check_values(text, most)


@given(values, st.integers(0, 200))
def test_a_size_is_never_overestimated_and_stops_behind_its_limit(value: Any, most: int) -> None:
    for walk in (size_of(value, most), bounds._measured(value, most, 1 << 20)):  # pyright: ignore[reportPrivateUsage]
        exact = len(orjson.dumps(value))
        assert min(walk, most) <= exact
        if walk <= most:
            assert walk * 4 + 4 >= exact


def test_endless_and_shared_data_is_measured_in_bounded_time() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert size_of(endless, 1 << 40) < 10_000, "what is too deep is found when it is written"
    shared: Any = "x" * 100
    for _ in range(40):
        shared = [shared] * 100
    assert size_of(shared, 1 << 20) > 1 << 20


@given(values)
def test_data_within_the_bounds_is_not_changed_by_shortening(value: Any) -> None:
    assert Shortener().shorten(value) == value


def test_what_is_left_out_is_said_where_it_was() -> None:
    short = Shortener(characters=100, values=6).shorten({"text": "x" * 500, "list": list(range(50)), "more": 1})
    assert short["text"].endswith("more characters]")
    assert len(short["text"]) < 200
    assert short["list"][-1] == "… 48 more items are not shown"
    assert "1 more members are not shown" in short.values()


SECRET = "AKIAIOSFODNN7EXAMPLE"


@each("search", [safe_message, safe_log, without_credentials])
@each("at", [0, 7_990, 8_000, 15_990, 16_000, 16_000 + MARGIN - 10, 31_990, 32_000 + MARGIN - 10, 500_000])
def test_a_credential_in_a_long_text_is_never_shown_not_even_the_half_of_it_before_the_cut(
    search: Any, at: int
) -> None:
    text = "- " * (at // 2) + SECRET + " -" * 400_000
    shown = search(Redactor(), text)
    assert len(shown) < 40_000
    assert SECRET[:5] not in shown


@given(st.integers(15_900, 18_000))
def test_no_address_is_cut_in_two_where_the_search_ends(at: int) -> None:
    shown = safe_log(Redactor(), " " * at + "ann@example.org" + " " * 10_000)
    assert "ann" not in shown

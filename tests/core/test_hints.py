"""From JSON to the types a function asks for: own conversions give what pydantic gives, and only where needed."""

from __future__ import annotations

import json
from typing import Annotated, Any, NotRequired

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, Field, StringConstraints, TypeAdapter
from typing_extensions import TypedDict

from interlock import Interlock, tool
from interlock.core.hints import converter


class Part(TypedDict):
    number: int
    ratio: float
    note: NotRequired[str]
    more: NotRequired[list[int | None]]


class Whole(TypedDict, total=False):
    part: Part
    parts: dict[str, Part]
    count: Annotated[int, Field(ge=0)] | None
    other: int | float


_number = st.integers(-(2**50), 2**50) | st.integers(-(2**50), 2**50).map(float)
_ratio = st.floats(allow_nan=False, allow_infinity=False)
_part = st.fixed_dictionaries(
    {"number": _number, "ratio": _ratio},
    optional={"note": st.text(), "more": st.lists(_number | st.none())},
)
_whole = st.fixed_dictionaries(
    {},
    optional={
        "part": _part,
        "parts": st.dictionaries(st.text(), _part),
        "count": st.none() | st.integers(0, 2**50).map(float) | st.integers(0, 2**50),
        "other": _number | _ratio,
    },
)
_HINTS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, _number),
    (list[int], st.lists(_number)),
    (dict[str, list[int]], st.dictionaries(st.text(), st.lists(_number))),
    (int | None, _number | st.none()),
    (int | str, _number | st.text()),
    (list[dict[str, int | None]] | None, st.none() | st.lists(st.dictionaries(st.text(), _number | st.none()))),
    (Part, _part),
    (Whole, _whole),
    (list[Whole], st.lists(_whole)),
]


@given(case=st.sampled_from(_HINTS).flatmap(lambda one: st.tuples(st.just(one[0]), one[1])))
def test_whole_numbers_arrive_as_pydantic_delivers_them_and_the_given_value_stays_as_it_is(case: Any) -> None:
    hint, value = case
    before = _told(value)
    convert = converter(hint)
    assert convert is not None
    assert _told(convert(value)) == _told(TypeAdapter(hint).validate_python(value))
    assert _told(value) == before


def _told(value: Any) -> str:
    """As text, in which 5 and 5.0 differ."""
    return json.dumps(value, sort_keys=True)


@pytest.mark.parametrize("hint", [str, float, list[str], dict[str, Any], list[float] | None, dict, Any], ids=repr)
def test_what_arrives_as_it_is_is_not_converted(hint: Any) -> None:
    assert converter(hint) is None


@tool(version="1.0.0", mutation_class="read_only", namespace="made")
def shout(
    word: Annotated[str, AfterValidator(str.upper), Field(description="a word", examples=["hey"])],
    name: Annotated[str, StringConstraints(strip_whitespace=True), Field(description="a name", examples=["ann"])],
) -> str:
    """Shout at somebody."""
    return f"{word}, {name}!"


async def test_what_an_author_says_of_a_value_beside_its_type_is_done(lock: Interlock) -> None:
    await lock.add(shout)
    assert (await lock.call("made.shout", word="hey", name=" ann ")).unwrap() == "HEY, ann!"

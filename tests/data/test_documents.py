"""What is said twice in one object is refused, wherever people write JSON or YAML."""

from __future__ import annotations

import json
import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from interlock.data.documents import Malformed, read_json, read_yaml

TREES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(), parts, max_size=4),
    max_leaves=20,
)


@given(tree=TREES, spaced=st.booleans(), plain=st.booleans())
def test_what_says_everything_once_is_read_as_it_is(tree: Any, spaced: bool, plain: bool) -> None:
    text = json.dumps(tree, indent=2 if spaced else None, ensure_ascii=plain)
    assert read_json(text) == read_json(text.encode()) == tree


@given(above=TREES, name=st.text(max_size=5), values=st.tuples(TREES, TREES), below=st.dictionaries(st.text(), TREES))
def test_a_name_that_an_object_has_twice_is_found_however_deep_and_however_written(
    above: Any, name: str, values: tuple[Any, Any], below: dict[str, Any]
) -> None:
    inner = json.dumps(below)[1:-1]
    first, second = (
        f"{json.dumps(name, ensure_ascii=kept)}: {json.dumps(value)}"
        for kept, value in zip((False, True), values, strict=True)
    )
    text = f'[{json.dumps(above)}, {{"a": [{{{first},\n{inner + ("," if inner else "")}\n{second}}}]}}]'
    with pytest.raises(Malformed, match=r"line [12345]: .* appears twice"):
        read_json(text)


def test_a_name_that_is_told_neither_breaks_the_line_nor_draws_on_a_terminal() -> None:
    name = "é\n\x1b[31m\x9b\x7f\u202e\x85\u2028"
    text = json.dumps({name: 1})[:-1] + "," + json.dumps({name: 2})[1:]
    with pytest.raises(Malformed) as caught:
        read_json(text)
    told = r"line 1: `é\n\x1b[31m\x9b\x7f\u202e\x85\u2028` appears twice"
    assert str(caught.value) == told
    assert told.isprintable()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", 3),
        ("a: 1\n---\nb: 1\nc:\n  - {d: 1,\n     d: 2}\n", 6),
        ('{"a": 1,\n "a": 2}', 2),
        ("base: &b {x: 1}\nother:\n  <<: *b\n  y: 1\n  y: 2\n", 5),
    ],
)
def test_in_yaml_it_is_found_with_its_line(text: str, line: int) -> None:
    with pytest.raises(Malformed, match=f"line {line}: .* appears twice"):
        read_yaml(text)


def test_what_is_taken_over_from_elsewhere_may_be_said_otherwise() -> None:
    text = "root: &r {x: 1}\nbase: &b\n  <<: *r\n  x: 2\nlast:\n  <<: *b\n  x: 3\nsame: *b\n---\nx: 1\n"
    first, second = read_yaml(text)
    assert (first["last"], first["base"], first["same"], second) == ({"x": 3}, {"x": 2}, {"x": 2}, {"x": 1})


@pytest.mark.parametrize("text", ["a: [1", b"\xff\xfe\x00", "a: !!python/object:os.x 1", "[" * 5000])
def test_what_is_no_document_is_refused_in_words(text: str | bytes) -> None:
    with pytest.raises(Malformed):
        read_yaml(text)
    with pytest.raises(Malformed):
        read_json(text)


@pytest.mark.parametrize("text", ["!!bool maybe", "a: !!bool ''", "[!!timestamp soon]", "!!float ''"])
def test_a_value_that_is_not_what_its_tag_says_is_refused_in_words(text: str) -> None:
    with pytest.raises(Malformed, match="a value is not of the kind that its tag says"):
        read_yaml(text)


@pytest.mark.parametrize("text", ["[" * 100_000, "- " * 100_000, "{a: " * 100_000, "? " * 100_000])
def test_a_yaml_text_that_is_too_deep_is_refused(text: str) -> None:
    with pytest.raises(Malformed, match="more than 500 levels"):
        read_yaml(text)


def test_a_yaml_text_of_hundreds_of_levels_is_read() -> None:
    (value,) = read_yaml("[" * 400 + "1" + "]" * 400)
    for _ in range(400):
        (value,) = value
    assert value == 1


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("[NO, no, Yes, on, off, y, n, tRUE]", ["NO", "no", "Yes", "on", "off", "y", "n", "tRUE"]),
        ("[true, True, TRUE, false, False, FALSE]", [True, True, True, False, False, False]),
        ("[~, null, Null, NULL, nULL, \"\"]", [None, None, None, None, "nULL", ""]),
        ("[12:30, 190:20:30, 1:30.5, 2020-01-01, 2020-01-01T10:00:00Z]",
         ["12:30", "190:20:30", "1:30.5", "2020-01-01", "2020-01-01T10:00:00Z"]),
        ("[7, +7, -7, 017, 0o17, 0x1f, 1_000, 0b11]", [7, 7, -7, 17, 15, 31, "1_000", "0b11"]),
        ("[1e3, 1.5, .5, 1., -1.5E-1, -.inf, .]", [1000.0, 1.5, 0.5, 1.0, -0.15, -math.inf, "."]),
        ("[=, '017', 'no']", ["=", "017", "no"]),
        ("[{&a 200: x, y: *a}, {x: &b true, *b : y}]", [{"200": "x", "y": 200}, {"x": True, "true": "y"}]),
        ("[{on: 1, no: 2, 200: 3, true: 4, null: 5, 1e3: 6, 2020-01-01: 7, 017: 8}]",
         [{"on": 1, "no": 2, "200": 3, "true": 4, "null": 5, "1e3": 6, "2020-01-01": 7, "017": 8}]),
    ],
)  # fmt: skip
def test_scalars_of_yaml_are_what_the_core_schema_of_yaml_1_2_says(text: str, values: list[Any]) -> None:
    (read,) = read_yaml(text)
    assert [(type(one), one) for one in read] == [(type(one), one) for one in values]


def test_names_that_are_one_in_json_are_a_name_twice() -> None:
    with pytest.raises(Malformed, match="`200` appears twice"):
        read_yaml("{200: a, '200': b}")

"""Lossless conversion of text: what is taken, what is left alone, and that nothing is ever guessed."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Field, Interlock, tool
from interlock.data.coerce import Coercion, coerce
from interlock.data.schema import Schema
from tests.support.each import each

Json = dict[str, Any]
INTEGER: Json = {"type": "integer"}
NUMBER: Json = {"type": "number"}
BOOLEAN: Json = {"type": "boolean"}
TEXT: Json = {"type": "string"}


def coerced(schema: Json, value: Any) -> Any:
    return coerce(Schema(schema), value).value


@pytest.mark.supports("VALID-01")
def test_the_three_texts_of_the_example_become_their_values() -> None:
    schema = Schema({"type": "object", "properties": {"count": INTEGER, "price": NUMBER, "active": BOOLEAN}})
    given = {"count": "42", "price": "19.99", "active": "true"}
    result = coerce(schema, given)
    assert result.value == {"count": 42, "price": 19.99, "active": True}
    assert result.changes == (
        Coercion("/count", "42", 42),
        Coercion("/price", "19.99", 19.99),
        Coercion("/active", "true", True),
    )
    assert given == {"count": "42", "price": "19.99", "active": "true"}, "what the model sent is left as it was"


@pytest.mark.supports("VALID-01")
@pytest.mark.parametrize(
    ("text", "value"),
    [("42", 42), ("-7", -7), ("+7", 7), ("0", 0), ("-0", 0), ("007", 7), ("9007199254740993", 9007199254740993)],
)
def test_text_that_is_a_whole_number_becomes_it(text: str, value: int) -> None:
    assert coerced(INTEGER, text) == value
    assert type(coerced(INTEGER, text)) is int
    assert coerced(NUMBER, text) == value


UNFIT_FOR_NUMBERS = [
    "4x",
    "x4",
    "",
    " ",
    " 42",
    "42 ",
    "42\n",
    "\t42",
    "1_000",
    "1,000",
    "0x10",
    "0b1",
    "0o7",
    "\u0664\u0662",
    "\uff14\uff12",
    "4\u00b2",
    "\u2167",
    "NaN",
    "nan",
    "inf",
    "Infinity",
    "-inf",
    "+",
    "-",
    "--1",
    "1-",
    "1e",
    "e1",
    "1e5x",
    ".",
    "1.2.3",
    "1 2",
    "true",
    "null",
    "None",
    "\u22125",
    "1\u00a0000",
    "$5",
    "5%",
    "[1]",
    "1j",
]


@pytest.mark.supports("VALID-01")
@each("text", UNFIT_FOR_NUMBERS)
def test_text_that_is_not_plainly_a_number_is_left_for_validation_to_refuse(text: str) -> None:
    for schema in (INTEGER, NUMBER):
        result = coerce(Schema(schema), text)
        assert result == (text, ())
        assert not Schema(schema).valid(result.value)


@pytest.mark.supports("VALID-01")
@pytest.mark.parametrize("text", ["1.5", "1.0", "1e3", "1e400", ".5", "5."])
def test_text_with_a_fraction_or_an_exponent_is_no_whole_number(text: str) -> None:
    assert coerce(Schema(INTEGER), text) == (text, ())


@pytest.mark.supports("VALID-01")
@pytest.mark.parametrize(
    ("text", "value"),
    [("19.99", 19.99), ("-0.5", -0.5), ("0.10", 0.1), (".5", 0.5), ("5.", 5.0), ("1e5", 1e5), ("2E-3", 0.002)],
)
def test_text_that_a_float_holds_exactly_becomes_it(text: str, value: float) -> None:
    assert coerced(NUMBER, text) == value


@pytest.mark.supports("VALID-01")
@pytest.mark.parametrize(
    "text",
    ["0.1234567890123456789", "9007199254740993.0", "1e400", "-1e400", "1e-400", "1e999", "1" * 400 + ".0", "1e-4000"],
)
def test_text_that_would_lose_precision_is_left_as_it_is(text: str) -> None:
    assert coerce(Schema(NUMBER), text) == (text, ())


@pytest.mark.supports("VALID-01")
@pytest.mark.parametrize("text", ["true", "TRUE", "True", "tRuE", "1", "yes", "YES", "Yes"])
def test_words_for_true_become_true(text: str) -> None:
    assert coerced(BOOLEAN, text) is True


@pytest.mark.supports("VALID-01")
@pytest.mark.parametrize("text", ["false", "FALSE", "False", "0", "no", "NO", "No"])
def test_words_for_false_become_false(text: str) -> None:
    assert coerced(BOOLEAN, text) is False


@pytest.mark.supports("VALID-01")
@pytest.mark.parametrize(
    "text", ["", "on", "off", "y", "n", "t", "2", "01", " true", "true ", "\uff54rue", "ye\u017f", "null"]
)
def test_other_words_are_no_booleans(text: str) -> None:
    assert coerce(Schema(BOOLEAN), text) == (text, ())


@pytest.mark.supports("VALID-01")
def test_conversion_goes_through_objects_arrays_references_and_maps() -> None:
    schema = Schema(
        {
            "type": "object",
            "properties": {
                "rows": {"type": "array", "items": {"$ref": "#/$defs/row"}},
                "by_name": {"type": "object", "additionalProperties": INTEGER},
            },
            "$defs": {
                "row": {"type": "object", "properties": {"n": INTEGER, "tags": {"type": "array", "items": TEXT}}}
            },
        }
    )
    given: Json = {"rows": [{"n": "1", "tags": ["1", "2"]}, {"n": 2}], "by_name": {"a/b": "3"}, "unknown": "4"}
    result = coerce(schema, given)
    assert result.value == {
        "rows": [{"n": 1, "tags": ["1", "2"]}, {"n": 2}],
        "by_name": {"a/b": 3},
        "unknown": "4",
    }
    assert result.changes == (Coercion("/rows/0/n", "1", 1), Coercion("/by_name/a~1b", "3", 3))
    assert given["rows"][0]["n"] == "1"


@pytest.mark.supports("VALID-01")
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": ["integer", "null"]}, "42", 42),
        ({"anyOf": [INTEGER, {"type": "null"}]}, "42", 42),
        ({"oneOf": [BOOLEAN, {"type": "null"}]}, "yes", True),
        ({"type": ["integer", "number"]}, "42", 42),
        ({"type": ["integer", "number"]}, "1.5", 1.5),
        ({"anyOf": [INTEGER, BOOLEAN]}, "true", True),
        ({"anyOf": [INTEGER, BOOLEAN]}, "7", 7),
        ({"type": "integer", "enum": [1, 2]}, "2", 2),
    ],
)
def test_a_union_takes_text_that_exactly_one_of_its_types_claims(schema: Json, text: str, value: Any) -> None:
    assert coerced(schema, text) == value
    assert type(coerced(schema, text)) is type(value)


@pytest.mark.supports("VALID-01")
@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"anyOf": [INTEGER, BOOLEAN]}, "1"),
        ({"type": ["integer", "string"]}, "42"),
        ({"anyOf": [INTEGER, TEXT]}, "42"),
        ({"anyOf": [INTEGER, {"const": "42"}]}, "42"),
        ({"anyOf": [INTEGER, {"enum": ["42"]}]}, "42"),
        ({"type": "null"}, "null"),
        ({"type": "string", "format": "date-time"}, "2026-01-02T03:04:05Z"),
        ({}, "42"),
    ],
)
def test_text_that_may_stay_text_or_could_be_two_things_stays_as_it_is(schema: Json, text: str) -> None:
    assert coerce(Schema(schema), text) == (text, ())


@pytest.mark.supports("VALID-01")
def test_an_object_that_may_be_null_is_converted_inside() -> None:
    point: Json = {"type": "object", "properties": {"x": INTEGER}}
    assert coerced({"anyOf": [point, {"type": "null"}]}, {"x": "6"}) == {"x": 6}
    assert coerced({"anyOf": [{"type": "array", "items": point}, {"type": "null"}]}, [{"x": "6"}]) == [{"x": 6}]


@pytest.mark.supports("VALID-01")
def test_the_positions_of_a_tuple_are_converted_each_by_its_own_type() -> None:
    schema: Json = {"type": "array", "prefixItems": [INTEGER, BOOLEAN, TEXT], "items": NUMBER}
    assert coerced(schema, [1, True, "3"]) == [1, True, "3"], "this fits already"
    assert coerced(schema, ["1", "no", "3", "4.5"]) == [1, False, "3", 4.5]


@pytest.mark.supports("VALID-01")
def test_a_value_nested_beyond_all_sense_is_left_for_validation_to_refuse() -> None:
    value: Any = "1"
    for _ in range(50_000):
        value = [value]
    schema = Schema({"type": "array", "items": {"$ref": "#"}})
    assert coerce(schema, value).changes == ()


# Properties

LEAVES: list[Json] = [
    INTEGER,
    NUMBER,
    BOOLEAN,
    TEXT,
    {},
    {"type": ["integer", "null"]},
    {"anyOf": [NUMBER, BOOLEAN]},
    {"enum": ["1", 1]},
]


def array_of(items: Json) -> Json:
    return {"type": "array", "items": items}


def object_of(parts: dict[str, Json]) -> Json:
    return {"type": "object", "properties": parts}


def optional(part: Json) -> Json:
    return {"anyOf": [part, {"type": "null"}]}


def larger(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    parts = st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    return inner.map(array_of) | parts.map(object_of) | inner.map(optional)


SCHEMAS = st.recursive(st.sampled_from(LEAVES), larger, max_leaves=5)
TEXTS = (
    st.sampled_from(
        ["42", "19.99", "true", "0", "1", "no", "1e3", "4x", "NaN", "1.5", "", "-7", "0.1234567890123456789"]
    )
    | st.integers().map(str)
    | st.floats().map(repr)
    | st.text(max_size=6)
)
VALUES = st.recursive(
    TEXTS | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.supports("VALID-01")
@given(SCHEMAS, VALUES)
def test_converting_twice_changes_nothing_more(schema: Json, value: Any) -> None:
    once = coerce(Schema(schema), value)
    again = coerce(Schema(schema), once.value)
    assert again.changes == ()
    assert again.value is once.value


@pytest.mark.supports("VALID-01")
@given(SCHEMAS, VALUES)
def test_a_value_that_already_fits_is_never_touched(schema: Json, value: Any) -> None:
    compiled = Schema(schema)
    if compiled.valid(value):
        result = coerce(compiled, value)
        assert result.changes == ()
        assert result.value is value


@pytest.mark.supports("VALID-01")
@given(SCHEMAS, VALUES)
def test_every_change_is_recorded_and_undoing_them_gives_what_was_sent(schema: Json, value: Any) -> None:
    result = coerce(Schema(schema), value)
    assert (result.value is value) == (not result.changes)
    restored: Any = result.value
    for change in result.changes:
        restored = replaced(restored, change.pointer.split("/")[1:], change.before)
    assert restored == value
    assert all(type(change.before) is str and type(change.after) in (int, float, bool) for change in result.changes)


def replaced(value: Any, path: list[str], item: Any) -> Any:
    if not path:
        return item
    if isinstance(value, list):
        return [replaced(old, path[1:], item) if str(i) == path[0] else old for i, old in enumerate(value)]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType] - JSON
    return {name: replaced(old, path[1:], item) if name == path[0] else old for name, old in value.items()}


NUMERALS = st.one_of(
    st.from_regex(r"[+-]?[0-9]{1,25}(\.[0-9]{0,25})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
    st.decimals(allow_nan=False, allow_infinity=False).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers().map(str),
)


@pytest.mark.supports("VALID-01")
@given(NUMERALS)
def test_a_number_taken_from_text_is_written_again_as_the_number_that_was_sent(text: str) -> None:
    for schema in (NUMBER, INTEGER, {"type": ["integer", "number"]}):
        value = coerced(schema, text)
        if not isinstance(value, str):
            assert Decimal(repr(value)) == Decimal(text)
            assert Schema(schema).valid(value)


@pytest.mark.supports("VALID-01")
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_shortest_spelling_of_every_float_is_taken(number: float) -> None:
    assert coerced(NUMBER, repr(number)) == number


@pytest.mark.supports("VALID-01")
@given(st.integers(min_value=-(10**200), max_value=10**200))
def test_whole_numbers_of_any_size_keep_every_digit(number: int) -> None:
    assert coerced(INTEGER, str(number)) == number
    assert coerced(NUMBER, str(number)) == number


@pytest.mark.supports("VALID-01")
@given(st.text())
def test_no_text_makes_conversion_fail_or_gives_a_value_that_does_not_fit(text: str) -> None:
    for schema in (INTEGER, NUMBER, BOOLEAN):
        result = coerce(Schema(schema), text)
        assert Schema(schema).valid(result.value) == bool(result.changes)


# Plain text is plain data

ATTACKS = [
    "a | b & c ; d",
    "`id`",
    "$(rm -rf /)",
    "${HOME}",
    "'; DROP TABLE users; --",
    "DROP",
    "SELECT * FROM t WHERE a = '1' OR 1=1",
    "<script>alert(1)</script>",
    "../../etc/passwd",
    "%00\x00",
    "a\r\nb",
    "\u202etxt.exe",
    "e\u0301 is not \u00e9",
    "\U0001f44d",
    "  spaces  ",
    "",
]
SINKS = "each sink of the kits for databases, files, messages and browsers, which do not exist yet"
seen: list[str] = []


@tool(version="1.0.0", mutation_class="read_only", namespace="plain", redact_results=False)
async def keep(text: Annotated[str, Field(description="any text", examples=["hello"])]) -> str:
    """Give back the text that arrived."""
    seen.append(text)
    return text


@pytest.mark.part_of("VALID-02", rest=SINKS)
@each("text", ATTACKS)
def test_dangerous_looking_text_passes_unchanged_as_plain_data(text: str) -> None:
    schema = Schema({"type": "object", "properties": {"note": TEXT, "list": {"type": "array", "items": TEXT}}})
    value: Json = {"note": text, "list": [text]}
    assert coerce(schema, value).value is value


@pytest.mark.part_of("VALID-02", rest=SINKS)
@given(st.text())
def test_text_for_a_text_field_is_the_same_object_afterwards(text: str) -> None:
    assert coerce(Schema(TEXT), text).value is text


@pytest.mark.part_of("VALID-02", rest=SINKS)
async def test_dangerous_looking_text_reaches_the_tool_byte_for_byte(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        await app.add(keep)
        for text in ATTACKS:
            seen.clear()
            result = await app.call("plain.keep", text=text)
            assert result.unwrap() == text
            assert [heard.encode() for heard in seen] == [text.encode()]


@tool(version="1.0.0", mutation_class="read_only", namespace="plain", redact_results=False)
async def take(
    count: Annotated[int, Field(description="how many", examples=[1])],
    price: Annotated[float, Field(description="how much", examples=[1.5])] = 0.5,
    active: Annotated[bool, Field(description="whether")] = False,
) -> list[Any]:
    """Give back the numbers that arrived."""
    return [count, price, active]


@pytest.mark.supports("VALID-01")
async def test_a_call_takes_text_for_numbers_and_refuses_what_would_lose_something(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        await app.add(take)
        sent = {"count": "42", "price": "19.99", "active": "true"}
        assert (await app.call("plain.take", sent)).unwrap() == [42, 19.99, True]
        assert sent == {"count": "42", "price": "19.99", "active": "true"}
        for wrong, code in (("1.5", "E3302"), ("4x", "E3301"), ("NaN", "E3301")):
            error = (await app.call("plain.take", count=wrong)).error
            assert error is not None
            assert error.code == code
            assert error.message.startswith("count: ")


@pytest.mark.part_of("VALID-02", rest=SINKS)
async def test_text_that_is_no_unicode_is_refused_before_the_tool_sees_it(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        await app.add(keep)
        seen.clear()
        error = (await app.call("plain.keep", text="\ud800")).error
        assert error is not None
        assert error.row.error_code == "INVALID_INPUT"
        assert seen == []

"""The compiled walk: whenever it says yes, it says what orjson, the validator and the converters would have said."""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, cast
from unittest.mock import patch

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from interlock.contract.hints import read_annotations
from interlock.core.errors import Failure
from interlock.data import bounds
from interlock.data.canonical import canonical, compiled, interpreted, may_hold_long_number
from interlock.data.schema import Schema
from interlock.data.schema_plan import fitter, taker

Json = dict[str, Any]

if compiled is None:
    assert not os.environ.get("CI"), "the walk is not compiled: is there a C compiler, and did ./dev sync run?"
    pytest.skip("the walk is not compiled: there was no C compiler when ./dev sync ran", allow_module_level=True)


class Odd(str):
    __slots__ = ()


ASCII = st.text(st.characters(max_codepoint=127), max_size=30)
NUMBERS = (
    st.integers(-(2**63), 2**63 - 1)
    | st.floats(-1e15, 1e15)
    | st.floats(min_value=1e-6, max_value=1e18)
    | st.decimals(-(10**9), 10**9, places=3).map(float)
)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | ASCII,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(ASCII, inner, max_size=20),
    max_leaves=40,
)
# Much of this only JSON's fringes know, and some of it nobody.
ODD = st.recursive(
    PLAIN
    | st.text(max_size=12)
    | st.floats()
    | st.integers()
    | st.sampled_from([2**63, 2**64, -(2**63) - 1, 9e18, 1e300, -0.0, math.nan, math.inf])
    | st.sampled_from(["\ud800", "e\u0301", b"", Odd()]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=4) | st.integers() | st.just(Odd("a")), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(made: Any, value: Any) -> bool:
    """Whether two values are one to the last bit, a tuple being a list."""
    if isinstance(value, dict):
        theirs = cast("Json", value)
        return type(made) is dict and list(made) == list(theirs) and all(same(made[n], theirs[n]) for n in theirs)  # pyright: ignore[reportUnknownArgumentType] - JSON
    if isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        return type(made) is list and len(made) == len(items) and all(map(same, made, items))  # pyright: ignore[reportUnknownArgumentType] - JSON
    return type(made) is type(value) and repr(made) == repr(value)


def containers(value: Any) -> Iterator[int]:
    if isinstance(value, dict | list | tuple):
        yield id(value)  # pyright: ignore[reportUnknownArgumentType] - JSON
        for item in value.values() if isinstance(value, dict) else value:  # pyright: ignore[reportUnknownVariableType] - JSON
            yield from containers(item)


def by_orjson(value: Any) -> bytes | Failure:
    try:
        return interpreted(value)
    except Failure as failure:
        return failure


@settings(max_examples=400)
@given(PLAIN)
@example({"a" * 40: 1.5, "b": [0.1, -0.25, 1e-7, 123456.789, 0.001, 1e15 + 0.5], "": {"z": {}, "y": []}})
@example([{"b": 1, "a": 2}, {"b": 3, "a": 4}, {"a": 5, "b": 6}, {"b": 7}, {}])
@example('\x00\x1f"\\/\b\t\n\f\r\x7f and a text that goes on after all of that')
def test_plain_data_is_written_and_copied_as_the_long_way_does(value: Any) -> None:
    assert compiled.canonical(value) == interpreted(value)
    made = compiled.copied(value)
    assert same(made, value)
    assert not set(containers(made)) & set(containers(value))


@settings(max_examples=400)
@given(ODD)
def test_what_is_not_plain_is_written_as_the_long_way_does_or_left_to_it(value: Any) -> None:
    before = repr(value)
    written, made = compiled.canonical(value), compiled.copied(value)
    assert written is None or written == by_orjson(value)
    assert made is None or same(made, value)
    assert repr(value) == before


@given(st.floats(allow_nan=False, allow_infinity=False) | st.decimals(-(10**12), 10**12, places=6).map(float))
def test_a_number_is_spelt_as_orjson_spells_it(number: float) -> None:
    written = compiled.canonical(number)
    if not number.is_integer():
        assert written == orjson.dumps(number)
    elif abs(number) < 9e18:
        assert written == b"%d" % int(number)
    else:
        assert written is None


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 200])
@pytest.mark.parametrize("depth", [0, 5, 6, 40])
def test_objects_of_any_size_at_any_depth_come_in_the_order_of_their_names(size: int, depth: int) -> None:
    names = [f"{i * 7919 % 211:x}é" if i % 3 else f"{i * 7919 % 211:x}" for i in range(size)]
    value: Any = [{name: [{"z": 1, name: 2}] for name in names}, dict.fromkeys(reversed(names), 3)]
    for _ in range(depth):
        value = {"in": value}
    assert compiled.canonical(value) == interpreted(value)
    assert same(compiled.copied(value), value)


@pytest.mark.parametrize(("depth", "taken"), [(50, True), (51, False), (100_000, False)])
def test_what_is_nested_too_deep_is_left_to_others(depth: int, taken: bool) -> None:
    value: Any = 1
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    anything = compiled.Shape(("any", False, None))
    for function in (compiled.canonical, compiled.copied, anything.take):
        assert (function(value) is not None) is taken
    assert anything.fits(value) is taken
    round_about: list[Any] = []
    round_about.append({"again": round_about})
    assert compiled.canonical(round_about) is None
    assert compiled.copied(round_about) is None


def _met(value: Any, names: set[str], texts: list[str]) -> None:
    if isinstance(value, dict):
        names.update(cast("Json", value))
    elif isinstance(value, str):
        texts.append(value)
    if isinstance(value, dict | list):
        for item in cast("Json", value).values() if isinstance(value, dict) else cast("list[Any]", value):
            _met(item, names, texts)


def _may_be_private(text: str) -> bool:
    return not text.isascii() or "@" in text or sum(map(text.count, "0123456789")) >= 4


TELLING = st.text("19@.a-/A:?~ é", max_size=30)


@given(PLAIN | st.lists(TELLING) | st.dictionaries(TELLING, TELLING), st.data())
def test_names_are_known_and_texts_gathered_that_may_be_private(value: Any, data: st.DataObject) -> None:
    names: set[str] = set()
    texts: list[str] = []
    _met(value, names, texts)
    found: list[str] = []
    assert compiled.gathered(value, names, found)
    assert found == list(filter(_may_be_private, texts))
    if names:
        unknown = data.draw(st.sampled_from(sorted(names)))
        assert not compiled.gathered(value, names - {unknown}, [])


@pytest.mark.parametrize("odd", [b"", Odd("a"), {1: 2}, {Odd("a"): 1}, {1, 2}, object()])
def test_nothing_is_gathered_from_what_json_does_not_have(odd: Any) -> None:
    assert not compiled.gathered([{"a": (odd,)}], {"a"}, [])


# Shapes


class Part(TypedDict):
    number: int
    ratio: float
    kind: Literal["one", "other"]
    note: NotRequired[str | None]
    more: NotRequired[list[int]]


class Model(BaseModel):
    count: int
    share: float
    parts: dict[str, Part] = {}


Described = Annotated[float | None, Field(description="a ratio", examples=[0.5])]


async def shaped(
    text: str, flag: bool, part: Part, rows: list[Part], table: dict[str, list[float]], ratio: Described,
    free: dict[str, Any], model: Model, models: list[Model], anything: Any = None, nothing: None = None,
    one: Literal["a"] = "a",
) -> int:  # fmt: skip
    """Everything that a shape can say."""
    del text, flag, part, rows, table, ratio, free, model, models, anything, nothing, one
    return 0


_whole = st.integers(-(2**53), 2**53)
_ratio = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e15, max_value=1e15) | _whole
_part = st.fixed_dictionaries(
    {"number": _whole, "ratio": _ratio, "kind": st.sampled_from(["one", "other"])},
    optional={"note": ASCII | st.none(), "more": st.lists(_whole, max_size=3)},
)
_model = st.fixed_dictionaries(
    {"count": _whole, "share": _ratio}, optional={"parts": st.dictionaries(ASCII, _part, max_size=2)}
)
ARGUMENTS = st.fixed_dictionaries(
    {
        "text": ASCII,
        "flag": st.booleans(),
        "part": _part,
        "rows": st.lists(_part, max_size=4),
        "table": st.dictionaries(ASCII, st.lists(_ratio, max_size=3), max_size=3),
        "ratio": _ratio | st.none(),
        "free": st.dictionaries(ASCII, PLAIN, max_size=3),
        "model": _model,
        "models": st.lists(_model, max_size=2),
    },
    optional={"anything": PLAIN, "nothing": st.none(), "one": st.just("a")},
)
READ, FAULTS = read_annotations(shaped, {})
SCHEMA = Schema(READ.parameters, closed=True)
TAKE = taker(SCHEMA.document, [name for name, _ in READ.rich])


def plainly(document: Json) -> Callable[[Any], bool]:
    """What says yes to values that plainly fit a schema; of a schema that is no shape nothing does."""
    return fitter(document) or (lambda value: False)


FITS = plainly(SCHEMA.document)


@settings(max_examples=300)
@given(ARGUMENTS)
def test_arguments_that_fit_are_taken_as_the_long_way_takes_them(arguments: Json) -> None:
    assert TAKE is not None
    assert READ.converters is not None
    before = copy.deepcopy(arguments)
    taken = TAKE(arguments)
    assert SCHEMA.fits(arguments)
    assert FITS(arguments)
    assert taken is not None
    written, made = taken
    assert written == interpreted(arguments)
    assert same(arguments, before)
    assert not set(containers(made)) & set(containers(arguments))
    for name, make in READ.rich:
        made[name] = make(made[name])
    expected = dict(arguments)
    for name, make in READ.converters:
        if name in expected:
            expected[name] = make(expected[name])
    assert repr(made) == repr(expected)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for step in value if isinstance(value, dict) else range(len(value)):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] - JSON
            yield from _places(value[step], (*path, step))  # pyright: ignore[reportUnknownArgumentType] - JSON


def _changed(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(value)
    made = copy.copy(value)
    made[path[0]] = _changed(value[path[0]], path[1:], change)
    return made


def _replaced(new: Any, _: Any) -> Any:
    return new


def _with_member(value: Any, name: str, item: Any) -> Any:
    return {**cast("Json", value), name: item} if isinstance(value, dict) else [item]


def _without_member(value: Any, at: int) -> Any:
    if not isinstance(value, dict) or not value:
        return "gone"
    members = cast("Json", value)
    gone = list(members)[at % len(members)]
    return {name: item for name, item in members.items() if name != gone}


NEW: list[Any] = [
    None,
    True,
    1,
    1.0,
    1.5,
    "one",
    "",
    "\ud800",
    "e\u0301",
    math.nan,
    2**70,
    [],
    {},
    (),
    b"",
    [1],
    {"a": 1},
]
MEMBERS: list[tuple[str, Any]] = [("note", 1), ("count", 1), ("x", "a"), ("", None), ("é", []), ("more", [1, 2])]
CHANGES: list[Callable[[Any], Any]] = [
    *(partial(_replaced, new) for new in NEW),
    *(partial(_with_member, name=name, item=item) for name, item in MEMBERS),
    *(partial(_without_member, at=at) for at in range(12)),
]


@settings(max_examples=600)
@given(ARGUMENTS, st.data())
def test_one_change_anywhere_is_taken_only_if_the_validator_takes_it(arguments: Json, data: st.DataObject) -> None:
    assert TAKE is not None
    path = data.draw(st.sampled_from(list(_places(arguments))))
    change = data.draw(st.sampled_from(CHANGES))
    changed = _changed(arguments, path, change)
    taken = TAKE(changed)
    assert SCHEMA.valid(changed) or not FITS(changed)
    if taken is not None:
        assert SCHEMA.valid(changed)
        assert taken[0] == interpreted(changed)


@settings(max_examples=200)
@given(ARGUMENTS)
def test_no_more_is_looked_at_than_is_allowed_and_as_many_bytes_as_the_canonical_form_has_are_enough(
    arguments: Json,
) -> None:
    assert TAKE is not None
    taken = TAKE(arguments)
    if taken is not None:
        size, plain = len(taken[0]), fitter(SCHEMA.document)
        assert plain is not None
        assert TAKE(arguments, size) == taken
        assert plain(arguments, size)
        assert TAKE(arguments, len(arguments)) is None
        assert not plain(arguments, len(arguments))


@pytest.mark.parametrize(
    "value", [["a"] * 1000, [1] * 1000, {str(i): 1 for i in range(1000)}, ["a" * 1000], {"a" * 1000: 1}]
)
def test_a_large_value_is_neither_taken_nor_does_it_plainly_fit(value: Any) -> None:
    assert compiled is not None
    document: Json = {"type": "object", "additionalProperties": False, "properties": {"a": {}}}
    take, fits = taker(document, []), fitter(document)
    assert take is not None
    assert fits is not None
    assert take({"a": value}, 8000) is not None
    assert fits({"a": value}, 8000)
    assert take({"a": value}, 999) is None
    assert not fits({"a": value}, 999)


def test_what_a_hint_makes_of_a_value_is_not_for_the_schema_to_say() -> None:
    """A tuple stays whatever it was, and a whole number stays one where only the schema was told otherwise."""

    async def odd(anything: Any, whole: Annotated[int, Field(json_schema_extra={"type": "number"})]) -> int:
        """Take what hints and schema differ about."""
        del anything
        return whole

    read, _ = read_annotations(odd, {})
    take = taker(Schema(read.parameters, closed=True).document, [name for name, _ in read.rich])
    assert take is not None
    assert take({"anything": [(1,)], "whole": 3}) is None
    taken = take({"anything": [[1]], "whole": 3})
    assert taken is not None
    assert same(taken[1], {"anything": [[1]], "whole": 3})


OTHER: list[Any] = [
    {"type": "string", "maxLength": 3},
    {"type": "string", "format": "date"},
    {"type": "integer", "minimum": 0},
    {"type": "object", "properties": {"a": {}}},
    {"type": "object", "additionalProperties": False, "properties": {"a": {}}, "required": ["b"]},
    {"type": "object", "additionalProperties": False, "properties": {"é": {}}},
    {"type": "object", "additionalProperties": False, "properties": {f"m{i}": {} for i in range(65)}},
    {"type": "object", "additionalProperties": False, "properties": {}, "required": True},
    {"type": "array", "minItems": 1},
    {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    {"anyOf": [{"type": "string"}, {"type": "null"}], "minLength": 2},
    {"anyOf": [{"type": "string"}, {"type": "null", "enum": [1]}]},
    {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "integer"}]},
    {"enum": ["a", 1]},
    {"enum": ["a"], "type": "integer"},
    {"type": ["string", "null"]},
    {"$ref": "#/$defs/nowhere"},
    {"$ref": "#/$defs/itself"},
    {"$ref": "#/$defs/wide"},
    {"$ref": "#/$defs/row", "maxProperties": 1},
    {"$ref": "#/$defs/narrower"},
    {"$ref": "#/$defs/ro%77"},
    {"$ref": "#/$defs/row/properties/a"},
    {"$ref": 1},
    False,
    "string",
    None,
]


@pytest.mark.parametrize("part", OTHER, ids=lambda part: json.dumps(part)[:60])
def test_a_schema_that_says_more_is_no_shape(part: Any) -> None:
    wide: Json = {"type": "array", "items": {"type": "string"}}
    for _ in range(9):
        properties = {f"m{i}": wide for i in range(3)}
        wide = {"type": "object", "additionalProperties": False, "properties": properties}
    definitions: Json = {
        "itself": {"type": "array", "items": {"$ref": "#/$defs/itself"}},
        "row": {"type": "object", "additionalProperties": False, "properties": {"a": {"type": "string"}}},
        "wide": wide,
        "narrower": {"$ref": "#/$defs/row", "properties": {"a": {}, "b": {}}},
        "ro%77": {"type": "string"},
    }
    document: Json = {"type": "object", "additionalProperties": False, "$defs": definitions}
    assert taker({**document, "properties": {"a": part}}, []) is None
    assert taker({**document, "properties": {"a": {"type": "string", "x-note": 1, "title": "a"}}}, []) is not None


_NAMES = st.sampled_from(["a", "b", "c"])


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    row = {
        "type": st.just("object"),
        "properties": st.dictionaries(_NAMES, inner, max_size=3),
        "required": st.lists(_NAMES, max_size=2, unique=True),
        "additionalProperties": st.booleans(),
    }
    return (
        st.fixed_dictionaries({"type": st.just("array"), "items": inner})
        | st.fixed_dictionaries({"type": st.just("object"), "additionalProperties": inner})
        | st.fixed_dictionaries({"anyOf": st.tuples(inner, st.just({"type": "null"})).map(list)})
        | st.fixed_dictionaries(row)
        | st.fixed_dictionaries({name: row[name] for name in ("type", "properties")})
    )


_SIMPLE: list[Any] = [{"type": name} for name in ("string", "integer", "number", "boolean", "null", "object", "array")]
_LEAVES: list[Any] = [True, {}, {"enum": ["a", "b"]}, {"const": "a", "type": "string"}, *OTHER[:4], *OTHER[8:16]]
SCHEMAS = st.recursive(st.sampled_from([*_SIMPLE, *_LEAVES]), _larger, max_leaves=6)
SMALL = st.recursive(
    st.sampled_from([None, True, 0, 1.0, 0.5, "a", "2020-01-01", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=600)
@given(SCHEMAS, SMALL, st.booleans())
def test_whatever_a_schema_says_what_is_taken_fits_it(part: Any, value: Any, kept: bool) -> None:
    document = {"type": "object", "additionalProperties": False, "properties": {"a": part}}
    take = taker(document, ["a"] if kept else [])
    taken = take({"a": value}) if take is not None else None
    if taken is not None:
        assert Schema(document).valid({"a": value})
        assert taken[0] == interpreted({"a": value})
        assert taken[1] == {"a": value}
    whole = cast("Json", part) if isinstance(part, dict) else {}
    assert not plainly(whole)(value) or Schema(whole).valid(value)


ROW = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}


@given(st.dictionaries(ASCII | _NAMES, PLAIN, max_size=8), st.booleans())
def test_a_row_that_is_open_may_have_more_members(more: Json, list_of: bool) -> None:
    document = {"type": "array", "items": ROW} if list_of else ROW
    for row in ({"a": "x", **more}, {**more, "a": "x", "b": 1}, more):
        value = [row, row] if list_of else row
        # Whether 1.0 is a whole number is not for the walk to say.
        sure = not isinstance(row.get("b"), float)
        assert plainly(document)(value) == (Schema(document).valid(value) and sure)


def test_open_rows_are_looked_at_whole_and_neither_taken_nor_copied() -> None:
    plan = ("open", False, (("a", b",", True, ("text", False, None)), ("b", b",", False, ("whole", False, None))))
    shape = compiled.Shape(plan)
    for many in (0, 1, 2, 3, 65, 1000):
        value: Json = {f"m{i}": i for i in range(many)} | {"a": "x"}
        assert shape.fits(value)
        assert shape.fits({"a": "x"} | value)
        assert not shape.fits({**value, "b": "x"})
        assert not shape.fits({**value, "c": {"d": [2**70]}})
        assert not shape.fits({**value, "\ud800": 1})
        assert not shape.fits({**value, 1: 1})
        assert not shape.fits({**value, "c": "\ud800"})
        assert not shape.fits({**value, "c": (1, {b""})})
        assert shape.take(value) is None
    assert not shape.fits([])
    assert not shape.fits({"b": 1})


def test_what_is_only_looked_at_stays_as_it_is() -> None:
    value = [1, 2**62]
    assert compiled.Shape(("list", False, ("real", False, None))).fits(value)
    assert same(value, [1, 2**62])


@pytest.mark.parametrize(
    "plan",
    [
        None, (), ("text",), ("text", False), ("what", False, None), ("list", False, None), ("map", False, ("text",)),
        ("row", False, None), ("row", False, (None,)), ("row", False, (("a",),)), ("choice", False, ["a"]),
        ("choice", False, frozenset({1})), ("choice", False, frozenset({Odd("a")})), ("open", False, (None,)),
        ("row", False, (("a", "a:", True, ("text", False, None)),)), ("row", False, (("a", b"a:", True, None),)),
        ("row", False, tuple((f"m{i}", b"", True, ("any", False, None)) for i in range(65))),
    ],
)  # fmt: skip
def test_a_plan_that_is_none_is_refused(plan: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        compiled.Shape(plan)
    for _ in range(200):
        plan = ("list", False, plan)
    with pytest.raises(ValueError, match="not too deep"):
        compiled.Shape(plan)


# Memory


class Meddler:
    """Changes what is being walked, as soon as the collector lets it."""

    def __init__(self, target: list[Any]) -> None:
        self.target = target
        self.me = self

    def __del__(self) -> None:
        while len(self.target) > 1:
            self.target.pop().clear()


def test_whatever_finalizers_do_meanwhile_what_was_written_is_what_is_handed_on() -> None:
    shape = compiled.Shape(("list", False, ("map", False, ("list", False, ("text", False, None)))))
    met = 0
    threshold = gc.get_threshold()
    try:
        for first in range(1, 40):
            rows = [{f"n{i}": [f"text {i}", "b"], "z": ["c"]} for i in range(30)]
            expected = interpreted(rows)
            Meddler(rows)
            gc.set_threshold(first, 1, 1)
            taken = shape.take(rows)
            gc.set_threshold(*threshold)
            gc.collect()
            assert len(rows) == 1
            met += taken is None or taken[0] != expected
            assert taken is None or taken[0] == interpreted(taken[1])
    finally:
        gc.set_threshold(*threshold)
    assert met or sys.version_info >= (3, 12)  # from then on a collection waits for the walk to end


@pytest.mark.parametrize("change", ["clear", "shrink", "grow"])
def test_whatever_finalizers_do_to_an_object_that_is_being_copied(change: str) -> None:
    """An object that is changed between two steps of copying it is taken as it was, as it is, or not at all."""
    shape = compiled.Shape(("map", False, ("text", False, None)))
    loose = compiled.Shape(("map", False, ("any", False, None)))

    class Changer:
        def __init__(self, target: Json) -> None:
            self.target = target
            self.me = self

        def __del__(self) -> None:
            if change == "grow":
                self.target.update({f"m{i}": 1 for i in range(12)})
            else:
                for name in list(self.target)[0 if change == "clear" else 20 :]:
                    del self.target[name]

    threshold = gc.get_threshold()
    for texts_only, taken_by in ((True, shape.take), (False, loose.take), (False, compiled.copied)):
        data: Json = {f"n{i}": "text" for i in range(3 if change == "grow" else 400)}
        gc.collect()  # also empties the list of objects that could be used again, which would start no collection
        gc.disable()
        Changer(data)
        held: list[list[Any]] = [[] for _ in range(50)]
        gc.set_threshold(1, 1000, 1000)
        gc.enable()
        taken = taken_by(data)
        gc.set_threshold(*threshold)
        assert held
        if isinstance(taken, tuple):
            assert taken[0] == interpreted(taken[1])
            assert not texts_only or all(item == "text" for item in cast("Json", taken[1]).values())


def test_a_set_whose_members_meddle_is_survived() -> None:
    data: Json = {"a": "".join(["x"] * 1000), "b": ["".join(["y"] * 1000)]}

    class Member:
        def __hash__(self) -> int:
            return hash("a")

        def __eq__(self, other: object) -> bool:
            data.clear()
            return True

    found: list[str] = []
    assert compiled.gathered(data, cast("set[str]", {Member()}), found) in (True, False)


def test_nothing_is_left_behind() -> None:
    assert TAKE is not None
    take = TAKE
    part: Json = {"number": 1, "ratio": 2, "kind": "one", "more": [1, 2]}
    fits: Json = {
        "text": "a\n", "flag": True, "part": part, "rows": [part] * 3, "table": {"é": [1, 0.1 + 0.2]}, "ratio": None,
        "free": {"a": [{}, []], **{f"n{i}": i for i in range(40)}}, "model": {"count": 1, "share": 1}, "models": [],
    }  # fmt: skip
    late = {**fits, "rows": [part, {**part, "more": [1, "2"]}], "text": "a" * 1000}
    odd = {**fits, "free": {"a": {"b": [1, 2**70]}}}

    def work() -> None:
        for _ in range(300):
            assert take(fits) is not None
            assert take(late) is None
            assert take(odd) is None
            assert FITS(fits)
            assert not FITS(late)
            assert not FITS(odd)
            assert plainly(ROW)({"a": "", **{f"n{i}": i for i in range(40)}})
            assert compiled.canonical(fits) is not None
            assert compiled.canonical(odd) is None
            assert compiled.copied(fits) is not None
            assert compiled.copied({"a": {"b": [{}, 2**70]}}) is None
            assert taker(SCHEMA.document, []) is not None
            with pytest.raises(ValueError, match="no such kind"):
                compiled.Shape(("list", False, ("row", False, (("a", b"a", True, ("odd", False, None)),))))

    work()
    gc.collect()
    before, held = sys.getallocatedblocks(), sys.getrefcount(part)
    work()
    gc.collect()
    assert sys.getrefcount(part) == held
    assert abs(sys.getallocatedblocks() - before) < 250
    assert canonical(fits) == interpreted(fits)


# Text that was not parsed yet

_RUNS = ["1", "12345", "9" * 18, "9" * 19, "9" * 308, "9" * 400, "1.5"]
_PIECES = st.sampled_from([*',[{]}:"\\ a', '\\"', "\\\\", '",[{', "\u00e9", "\0", *_RUNS])


@given(st.lists(_PIECES, max_size=40).map("".join), st.sampled_from([bytes, bytearray]), st.sampled_from([7, 65_536]))
@settings(deadline=None)
def test_a_text_is_counted_as_python_counts_it(text: str, kind: type[bytes | bytearray], window: int) -> None:
    assert compiled is not None
    body = kind(text.encode())
    runs = [len(run) for run in re.findall("[0-9]+", text)]
    assert compiled.digits(body) == max((run for run in runs if run >= 19), default=0)

    def found() -> tuple[bool, ...]:
        limits = range(1, len(body) // 2 + 2)
        values = [bounds.more_values(body, limit) for limit in limits]
        return (*values, bounds.long_number(body), may_hold_long_number(bytes(body)))

    with (
        patch.object(bounds, "compiled", None),
        patch("interlock.data.canonical.compiled", None),
        patch.object(bounds, "_WINDOW", window),
        patch("interlock.data.canonical._WINDOW", window),
    ):
        by_python = found()
    assert found() == by_python


def test_what_is_no_bytes_is_not_counted() -> None:
    assert compiled is not None
    for search in (compiled.marks, compiled.digits):
        with pytest.raises(TypeError):
            search("text")  # pyright: ignore[reportArgumentType]
    text = bytearray(b"[1,2]")
    assert (compiled.marks(text), compiled.digits(text)) == (2, 0)
    text += b"3"  # and the buffer was given back


def test_other_threads_run_while_a_text_is_counted() -> None:
    assert compiled is not None
    text, turns, done = b"[" * (64 << 20), 0, threading.Event()

    def count() -> None:
        assert compiled is not None
        compiled.marks(text)
        done.set()

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # nobody has to give the interpreter up
    try:
        thread = threading.Thread(target=count)
        thread.start()
        while not done.is_set():
            turns += 1
            time.sleep(0)  # whoever wants the interpreter has it now; it comes back when they give it up
        thread.join()
    finally:
        sys.setswitchinterval(usual)
    assert turns > 100

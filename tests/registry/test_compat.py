"""Compatibility: what the comparison says of two schemas is held against the instances they accept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import combinations, product
from typing import Any, TypeGuard

import jsonschema_rs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from interlock.core.errors import Failure
from interlock.data.schema import close
from interlock.registry.compat import RANK, VersionSurface, classify, require_bump
from interlock.registry.containment import contains
from interlock.registry.negotiation import CompatOutcome, negotiate
from tests.support.each import each

Schema = Any
TEXT, COUNT = {"type": "string"}, {"type": "integer"}
CLOSED = {"type": "object", "properties": {"p": TEXT}, "additionalProperties": False}
CLASSES = pytest.mark.proves("REG-06")
NEGOTIATED = pytest.mark.proves("REG-13")


def spelt(schema: Schema) -> TypeGuard[dict[str, Any]]:
    """Whether a schema is more than plain true or false."""
    return isinstance(schema, dict)


# A tiny world of instances


LEAVES: list[Any] = [None, True, False, *range(-3, 4), 0.5]
WORDS = ["".join(letters) for size in range(4) for letters in product("ab", repeat=size)]
SMALL: list[Any] = [None, True, -3, 0, 1, 2, "", "a", "bb"]
NESTED: list[Any] = [{}, {"a": 1}, {"a": "a"}, {"b": None}, [], [1], ["a", "a"]]
ARRAYS: list[Any] = [
    [],
    *([one] for one in SMALL),
    [0, 0],
    [1, "a"],
    ["a", "bb"],
    [0, 1, 2],
    ["a", 1, None],
    [{"a": 1}],
]
NAMES = ("a", "b", "c")
OBJECTS: list[Any] = [
    dict(zip(names, values, strict=True))
    for size in range(3)
    for names in combinations(NAMES, size)
    for values in product([*SMALL, *NESTED] if size == 1 else SMALL, repeat=size)
] + [{"a": 1, "b": "a", "c": None}, {"a": 0, "b": 0, "c": 0}]
WORLD: list[Any] = [*LEAVES, *WORDS, *ARRAYS, *OBJECTS]


def fitting(schema: Schema, world: list[Any] = WORLD) -> list[bool]:
    validator = jsonschema_rs.Draft202012Validator(schema)
    return [validator.is_valid(instance) for instance in world]


def closed(schema: Schema) -> Schema:
    return close(copy.deepcopy(schema)) if spelt(schema) else schema


def filled(schema: Schema, instance: Any) -> Any:
    if not spelt(instance) or not spelt(schema):
        return instance
    fields: dict[str, Any] = schema.get("properties", {})
    defaults = {name: part["default"] for name, part in fields.items() if spelt(part) and "default" in part}
    return {**defaults, **instance}


def consumer(schema: Schema, *, tolerant: bool) -> Schema:
    """What an old consumer checks: nothing about fields it does not know, nor, if tolerant, about words."""
    if not spelt(schema):
        return schema
    view: dict[str, Any] = {key: value for key, value in schema.items() if key != "additionalProperties" or value}
    if "properties" in view:
        view["properties"] = {name: consumer(part, tolerant=tolerant) for name, part in view["properties"].items()}
    if "anyOf" in view:
        view["anyOf"] = [consumer(part, tolerant=tolerant) for part in view["anyOf"]]
    for key in ("items", "additionalProperties"):
        if key in view:
            view[key] = consumer(view[key], tolerant=tolerant)
    if tolerant and all(isinstance(word, str) for word in view.get("enum", [0])):
        view = {"type": "string", **{key: value for key, value in view.items() if key != "enum"}}
    return view


def breaks_input(old: Schema, new: Schema) -> bool:
    old, new = closed(old), closed(new)
    accepted = [filled(new, instance) for instance, fits in zip(WORLD, fitting(old), strict=True) if fits]
    return not all(fitting(new, accepted))


def breaks_output(old: Schema, new: Schema, *, tolerant: bool) -> bool:
    results = [instance for instance, fits in zip(WORLD, fitting(new), strict=True) if fits]
    return not all(fitting(consumer(old, tolerant=tolerant), results))


# Random schemas and random edits of them


def some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


def keyed(key: str) -> Callable[[Any], Schema]:
    def schema(value: Any) -> Schema:
        return {key: value}

    return schema


def of_type(kind: Any, *more: dict[str, Any]) -> Schema:
    return {"type": kind, **{key: value for keywords in more for key, value in keywords.items()}}


def few(part: st.SearchStrategy[Schema], most: int = 2) -> st.SearchStrategy[list[Schema]]:
    return st.lists(part, min_size=1, max_size=most)


small_int = st.integers(-2, 3)
size = st.integers(0, 2)
numbers = some(
    minimum=small_int,
    maximum=small_int,
    exclusiveMinimum=st.one_of(small_int, st.just(0.5)),
    exclusiveMaximum=small_int,
    multipleOf=st.sampled_from([1, 2, 3, 4, 0.5]),
)
strings = some(minLength=size, maxLength=st.integers(0, 3), pattern=st.sampled_from(["^a", "b$"]))
kinds = st.sampled_from(["null", "boolean", "integer", "number", "string"])
typed: st.SearchStrategy[Schema] = st.one_of(
    st.builds(of_type, st.sampled_from(["integer", "number"]), numbers),
    st.builds(of_type, st.just("string"), strings),
    st.builds(of_type, st.lists(kinds, min_size=1, max_size=3, unique=True), numbers, strings),
)
values: st.SearchStrategy[Any] = st.sampled_from([None, True, 0, 1, 2, "a", "ab", "b"])
enums = st.lists(values, min_size=1, max_size=3, unique_by=repr).map(keyed("enum"))
leaves: st.SearchStrategy[Schema] = st.one_of(
    typed,
    typed,
    enums,
    values.map(keyed("const")),
    st.booleans(),
    few(typed).map(keyed("anyOf")),
    typed.map(keyed("not")),
    few(typed).map(keyed("oneOf")),
)


def arrays_of(part: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    more = some(minItems=size, maxItems=size, uniqueItems=st.booleans(), items=part, prefixItems=few(part))
    return st.builds(of_type, st.just("array"), more)


def with_default(part: Schema, default: Any) -> Schema:
    return {**part, "default": default} if spelt(part) else part


needed = st.sampled_from(NAMES).map(lambda name: {"required": [name]})


def objects_of(part: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    field = st.one_of(part, part, st.builds(with_default, part, values))
    more = some(
        required=st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        additionalProperties=st.one_of(st.booleans(), part),
        minProperties=st.integers(0, 1),
        maxProperties=st.integers(1, 3),
    )
    fields = st.dictionaries(st.sampled_from(NAMES), field, max_size=3)
    # Now and then a condition on the whole object, which filling a default may break.
    whole = st.one_of(some(), some(), some(propertyNames=st.just({"maxLength": 0}), **{"not": needed}))
    return st.builds(of_type, st.just("object"), fields.map(keyed("properties")), more, whole)


flat = objects_of(leaves)
parts = st.one_of(leaves, leaves, arrays_of(leaves), flat)
objects = objects_of(parts)
schemas = st.one_of(parts, objects, arrays_of(parts), few(parts, 3).map(keyed("anyOf")))


def without_names(schema: Schema) -> Schema:
    return {key: part for key, part in schema.items() if key not in ("properties", "required")}


@st.composite
def edited(draw: st.DrawFn, schema: Schema, fresh: st.SearchStrategy[Schema] = parts) -> Schema:
    """The schema after one change somewhere in it."""
    if not spelt(schema) or not schema:
        return draw(fresh)
    new: dict[str, Any] = dict(schema)
    key = draw(st.sampled_from(sorted(new)))
    what = draw(st.sampled_from(["within", "within", "drop", "mix"]))
    if what == "drop" and key != "properties":
        del new[key]
    elif what == "mix":
        other = draw(fresh)
        taken = [name for name in (other if spelt(other) else {}) if name != "type"]
        new.update({name: other[name] for name in taken if draw(st.booleans())})
    elif key == "properties":
        new[key] = draw(edited_fields(new[key]))
    elif key in ("items", "additionalProperties", "not"):
        new[key] = draw(edited(new[key], leaves))
    elif key in ("anyOf", "oneOf"):
        place = draw(st.integers(0, len(new[key]) - 1))
        new[key] = [draw(edited(each, leaves)) if place == here else each for here, each in enumerate(new[key])]
    elif key == "enum":
        new[key] = draw(enums)["enum"]
    elif isinstance(new[key], int) and not isinstance(new[key], bool) and key not in ("const", "default", "multipleOf"):
        new[key] = max(0, new[key] + draw(st.sampled_from([-1, 1])))
    return new


@st.composite
def edited_fields(draw: st.DrawFn, fields: dict[str, Schema]) -> dict[str, Schema]:
    name = draw(st.sampled_from(NAMES))
    if name in fields and draw(st.integers(0, 3)) == 0:
        return {other: part for other, part in fields.items() if other != name}
    part = draw(edited(fields[name], leaves)) if name in fields else draw(leaves)
    return {**fields, name: with_default(part, draw(values)) if draw(st.integers(0, 3)) == 0 else part}


def pairs(of: st.SearchStrategy[Schema]) -> st.SearchStrategy[tuple[Schema, Schema]]:
    one = of.flatmap(lambda old: st.tuples(st.just(old), edited(old)))
    two = one.flatmap(lambda pair: st.tuples(st.just(pair[0]), edited(pair[1])))
    return st.one_of(one, one, two, st.tuples(of, of))


# What holds of all of them


@settings(max_examples=500, deadline=None)
@given(pairs(schemas))
@pytest.mark.proves("REG-07")
def test_a_schema_that_contains_another_accepts_all_that_the_other_accepts(pair: tuple[Schema, Schema]) -> None:
    for wide, narrow in (pair, pair[::-1]):
        if contains(wide, narrow):
            wrong = [v for v, here, there in zip(WORLD, fitting(narrow), fitting(wide), strict=True) if here > there]
            assert not wrong


def listing(**keywords: Any) -> Schema:
    return {"type": "array", **keywords}


@pytest.mark.supports("REG-07")
@each(
    ("wide", "narrow", "answer"),
    [
        (listing(items=COUNT), listing(items=TEXT, maxItems=1), False),
        (listing(items=COUNT), listing(items=TEXT, maxItems=0), True),
        (listing(items=COUNT), listing(prefixItems=[COUNT], items=TEXT), False),
        (listing(items=COUNT), listing(prefixItems=[COUNT], items=False), True),
        (listing(uniqueItems=True), listing(maxItems=1), True),
        ({"minimum": 3, "type": "integer"}, {"exclusiveMinimum": 2, "type": "integer"}, True),
        ({"minimum": 4, "type": "integer"}, {"exclusiveMinimum": 2, "type": "integer"}, False),
        ({"minimum": 3, "type": "number"}, {"exclusiveMinimum": 2, "type": "number"}, False),
        ({"type": "integer"}, {"type": "number", "multipleOf": 2}, True),
        ({"type": "integer"}, {"enum": [1, 2.0]}, True),
        ({"type": "integer"}, {"enum": [1, True]}, False),
        ({"type": "boolean"}, {"enum": [True]}, True),
        ({"enum": [True, False, None]}, {"type": ["boolean", "null"]}, True),
        ({"enum": [1, 0]}, {"type": "boolean"}, False),
        ({"anyOf": [TEXT, {"type": "null"}]}, {"type": ["null", "string"], "maxLength": 3}, True),
        ({"type": "string", "pattern": "^a"}, {"enum": ["a", "ab"]}, True),
        ({"type": "string", "format": "email"}, {"const": "nobody"}, False),
        ({"anyOf": [COUNT], "type": "integer", "minimum": 0}, COUNT, False),
    ],
)
def test_containment_is_shown_where_it_can_be_and_only_there(wide: Schema, narrow: Schema, answer: bool) -> None:
    assert contains(wide, narrow) is answer


def test_a_default_that_a_condition_forbids_is_not_compatible() -> None:
    lonely = takes(TEXT, **{"not": {"required": ["p"]}})
    assert input_compatible(lonely, lonely)
    assert not input_compatible(lonely, takes({**TEXT, "default": "a"}, **{"not": {"required": ["p"]}}))


@settings(max_examples=150, deadline=None)
@given(schemas)
def test_every_schema_contains_itself_and_lies_between_nothing_and_anything(schema: Schema) -> None:
    assert contains(schema, copy.deepcopy(schema))
    assert contains(True, schema)
    assert contains(schema, False)


def input_compatible(old: Schema, new: Schema) -> bool:
    """Whether admission lets the input change without a major version."""
    return classify(VersionSurface(input=old), VersionSurface(input=new)).level != "major"


def output_compatible(old: Schema, new: Schema, *, tolerant: bool = False) -> bool:
    """Whether admission lets the output change without a major version."""
    before, after = (VersionSurface(output=one, tolerant_output=tolerant) for one in (old, new))
    return classify(before, after).level != "major"


TYPES: list[Schema] = [
    {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": ["string", "null"]},
    {"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 0}, {"enum": ["a", "b"]},
    {"enum": ["a", "b", "c"]}, {"type": "boolean"},
]  # fmt: skip
FITTING: dict[str, Any] = {"string": "a", "integer": 1, "number": 1, "boolean": True}


def default_of(part: Schema) -> Any:
    return part["enum"][0] if "enum" in part else FITTING[part["type"] if isinstance(part["type"], str) else "string"]


@st.composite
def inputs(draw: st.DrawFn) -> tuple[Schema, Schema]:
    """Two inputs of plain fields. A field that both have keeps its default: what it means when left out is the same."""
    kinds = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.sampled_from(TYPES), max_size=4)
    before, after = draw(kinds), draw(kinds)
    if draw(st.booleans()):
        after = {**before, **draw(kinds)}
    fresh = {name: {**part, "default": default_of(part)} for name, part in after.items() if name not in before}
    chosen = draw(st.sets(st.sampled_from(sorted(fresh)))) if fresh else set[str]()
    after = {name: fresh[name] if name in chosen else part for name, part in after.items()}

    def made(fields: dict[str, Schema]) -> Schema:
        required = draw(st.sets(st.sampled_from(sorted(fields)))) if fields else set[str]()
        return {"type": "object", "properties": fields, "required": sorted(required)}

    return made(before), made(after)


@settings(max_examples=300, deadline=None)
@given(inputs())
@pytest.mark.proves("REG-07")
def test_an_input_is_compatible_if_and_only_if_the_formula_says_so(pair: tuple[Schema, Schema]) -> None:
    old, new = pair
    fields, before, required = new["properties"], old["properties"], set(new["required"])
    by_formula = (
        set(old["required"]) <= fields.keys()
        and all(name in fields and contains(fields[name], part) for name, part in before.items())
        and all(name in old["required"] or "default" in fields[name] for name in required)
    )
    assert input_compatible(old, new) == by_formula


@settings(max_examples=300, deadline=None)
@given(inputs())
@pytest.mark.proves("REG-07")
def test_an_output_is_compatible_if_and_only_if_each_old_field_stays_within_its_old_type(
    pair: tuple[Schema, Schema],
) -> None:
    old, new = pair
    fields = new["properties"]
    by_formula = all(
        name in fields and contains(part, fields[name]) for name, part in old["properties"].items()
    ) and set(old["required"]) <= set(new["required"])
    assert output_compatible(old, new) == by_formula


@settings(max_examples=400, deadline=None)
@given(pairs(objects))
@pytest.mark.proves("REG-07")
def test_a_compatible_input_accepts_every_old_call_once_defaults_are_filled(pair: tuple[Schema, Schema]) -> None:
    old, new = pair
    # A schema whose own defaults do not fit it is broken already; staying so is not a change.
    if input_compatible(old, new) and not breaks_input(old, old):
        assert not breaks_input(old, new)
        fields: set[str] = set(new["properties"])
        assert fields.issuperset(old["properties"])
        now, before = set[str](new.get("required", ())), set[str](old.get("required", ()))
        assert all("default" in new["properties"][name] for name in now - before)


@settings(max_examples=350, deadline=None)
@given(pairs(schemas), st.booleans())
@pytest.mark.proves("REG-07")
def test_every_result_of_a_compatible_output_suits_an_old_consumer(pair: tuple[Schema, Schema], tolerant: bool) -> None:
    old, new = pair
    if output_compatible(old, new, tolerant=tolerant):
        assert not breaks_output(old, new, tolerant=tolerant)


def same(old: Schema, new: Schema) -> bool:
    return fitting(old) == fitting(new)


@settings(max_examples=400, deadline=None)
@given(pairs(objects), st.booleans())
@CLASSES
def test_no_edit_receives_a_smaller_class_than_its_instances_show(pair: tuple[Schema, Schema], tolerant: bool) -> None:
    old, new = pair
    on_input = classify(VersionSurface(input=old), VersionSurface(input=new)).level
    # A schema whose own defaults do not fit it is broken already; staying so is not a change.
    if repr(old) != repr(new) and breaks_input(old, new) and not breaks_input(old, old):
        assert on_input == "major"
    elif not same(closed(old), closed(new)):
        assert RANK[on_input] >= RANK["minor"]

    before = VersionSurface(output=old, tolerant_output=tolerant)
    on_output = classify(before, VersionSurface(output=new, tolerant_output=tolerant)).level
    if breaks_output(old, new, tolerant=tolerant):
        assert on_output == "major"
    elif not same(old, new):
        assert RANK[on_output] >= RANK["minor"]


# One case for every rule


def takes(part: Schema, **more: Any) -> Schema:
    return {"type": "object", "properties": {"p": part}, **more}


OPEN = {"additionalProperties": True}
TWO = {"type": "object", "properties": {"p": TEXT, "q": COUNT}}
NODE = {"$defs": {"N": takes({"$ref": "#/$defs/N"})}, **takes({"$ref": "#/$defs/N"})}

INPUT_RULES: list[tuple[str, Schema, Schema, str]] = [
    ("new required field", takes(TEXT), {**TWO, "required": ["q"]}, "major"),
    ("field becomes required", takes(TEXT), takes(TEXT, required=["p"]), "major"),
    ("removed optional field", TWO, takes(TEXT), "major"),
    ("removed field of an open object", {**TWO, **OPEN}, takes(TEXT, **OPEN), "major"),
    ("renamed field", takes(TEXT), {"type": "object", "properties": {"r": TEXT}}, "major"),
    ("removed nested field", takes(TWO), takes(takes(TEXT)), "major"),
    ("changed type", takes(TEXT), takes(COUNT), "major"),
    ("narrowed type", takes({"type": "number"}), takes(COUNT), "major"),
    ("object closed", takes(TEXT, **OPEN), takes(TEXT, additionalProperties=False), "major"),
    ("field no longer null", takes({"anyOf": [TEXT, {"type": "null"}]}), takes(TEXT), "major"),
    ("enum value gone", takes({"enum": ["a", "b"]}), takes({"enum": ["a"]}), "major"),
    ("default changed", takes({**TEXT, "default": "a"}), takes({**TEXT, "default": "b"}), "major"),
    ("default gone", takes({**TEXT, "default": "a"}), takes(TEXT), "major"),
    (
        "default that does not fit",
        takes(TEXT),
        {**TWO, "required": ["q"], "properties": {"p": TEXT, "q": {**COUNT, "default": "x"}}},
        "major",
    ),
    ("oneOf changed", takes({"oneOf": [TEXT]}), takes({"oneOf": [TEXT, COUNT]}), "major"),
    ("unknown keyword changed", takes({**TEXT, "odd": 1}), takes({**TEXT, "odd": 2}), "major"),
    (
        "patternProperties changed",
        takes(TEXT, patternProperties={"^x": TEXT}),
        takes(TEXT, patternProperties={"^x": True}),
        "major",
    ),
    (
        "recursive definition changed",
        NODE,
        {**NODE, "$defs": {"N": takes({"$ref": "#/$defs/N"}, maxProperties=1)}},
        "major",
    ),
    ("another dialect", takes(TEXT), {"$schema": "http://json-schema.org/draft-07/schema#", **takes(TEXT)}, "major"),
    ("new optional field", takes(TEXT), TWO, "minor"),
    ("new optional nested field", takes(takes(TEXT)), takes(TWO), "minor"),
    (
        "new optional field of an optional object",
        takes({"anyOf": [takes(TEXT), {"type": "null"}]}),
        takes({"anyOf": [TWO, {"type": "null"}]}),
        "minor",
    ),
    (
        "new required field with default",
        takes(TEXT),
        {**TWO, "required": ["q"], "properties": {"p": TEXT, "q": {**COUNT, "default": 1}}},
        "minor",
    ),
    ("field no longer required", takes(TEXT, required=["p"]), takes(TEXT), "minor"),
    ("widened type", takes(COUNT), takes({"type": "number"}), "minor"),
    ("field may be null", takes(TEXT), takes({"anyOf": [TEXT, {"type": "null"}]}), "minor"),
    ("new enum value", takes({"enum": ["a"]}), takes({"enum": ["a", "b"]}), "minor"),
    ("const becomes enum", takes({"const": "a"}), takes({"enum": ["a", "b"]}), "minor"),
    ("object opened", takes(TEXT), takes(TEXT, **OPEN), "minor"),
    ("default added", takes(TEXT), takes({**TEXT, "default": "a"}), "minor"),
    ("new field beside a recursive one", NODE, {**NODE, "properties": {**NODE["properties"], "q": TEXT}}, "minor"),
    (
        "words only",
        takes({**TEXT, "description": "a"}),
        takes({**TEXT, "title": "P", "examples": ["b"], "x-token-cost": 3}),
        "patch",
    ),
    (
        "words within a recursive definition",
        NODE,
        {**NODE, "$defs": {"N": {**NODE["$defs"]["N"], "title": "n"}}},
        "patch",
    ),
    ("reordered", takes({"enum": ["a", "b"]}), takes({"enum": ["b", "a"]}), "patch"),
    (
        "written with a reference",
        takes(TEXT),
        {"$defs": {"T": {**TEXT, "title": "T"}}, **takes({"$ref": "#/$defs/T"})},
        "patch",
    ),
    ("written as a union", takes({"type": ["string", "null"]}), takes({"anyOf": [TEXT, {"type": "null"}]}), "patch"),
    ("said aloud", takes(TEXT), takes(TEXT, additionalProperties=False), "patch"),
]

# kind, keyword, the narrower value and the wider one; None is unsaid
CONSTRAINTS: list[tuple[str, str, Any, Any]] = [
    ("string", "minLength", 2, 1),
    ("string", "maxLength", 2, 3),
    ("string", "pattern", "^a", None),
    ("string", "format", "email", None),
    ("string", "enum", ["a"], ["a", "b"]),
    ("string", "const", "a", None),
    ("integer", "minimum", 2, 1),
    ("integer", "maximum", 2, None),
    ("number", "exclusiveMinimum", 2, 1),
    ("number", "exclusiveMaximum", 2, 3),
    ("integer", "multipleOf", 4, 2),
    ("array", "minItems", 2, 1),
    ("array", "maxItems", 2, 3),
    ("array", "uniqueItems", True, False),
    ("array", "items", {"type": "integer"}, {"type": "number"}),
    ("object", "minProperties", 1, None),
    ("object", "maxProperties", 1, 2),
    ("object", "required", ["a"], None),
    ("object", "additionalProperties", False, True),
    ("object", "additionalProperties", {"type": "integer"}, {"type": "number"}),
]

OUTPUT_RULES: list[tuple[str, Schema, Schema, bool, str]] = [
    ("new field", takes(TEXT), TWO, False, "minor"),
    (
        "new field of a closed object",
        takes(TEXT, additionalProperties=False),
        {**TWO, "additionalProperties": False},
        False,
        "minor",
    ),
    ("new required field", takes(TEXT), {**TWO, "required": ["q"]}, False, "minor"),
    ("field is now always there", takes(TEXT), takes(TEXT, required=["p"]), False, "minor"),
    ("narrower field", takes({"type": "number"}), takes(COUNT), False, "minor"),
    ("output described for the first time", True, takes(TEXT), False, "minor"),
    ("removed field", TWO, takes(TEXT), False, "major"),
    (
        "removed field of a closed object",
        {**TWO, "additionalProperties": False},
        takes(TEXT, additionalProperties=False),
        False,
        "major",
    ),
    (
        "removed field of an item",
        takes({"type": "array", "items": TWO}),
        takes({"type": "array", "items": takes(TEXT, additionalProperties=False)}),
        False,
        "major",
    ),
    ("renamed field", takes(TEXT), {"type": "object", "properties": {"r": TEXT}}, False, "major"),
    ("changed type", takes(TEXT), takes(COUNT), False, "major"),
    ("wider type", takes(COUNT), takes({"type": "number"}), False, "major"),
    ("field may be null", takes(TEXT), takes({"anyOf": [TEXT, {"type": "null"}]}), False, "major"),
    ("field may be absent", takes(TEXT, required=["p"]), takes(TEXT), False, "major"),
    ("new enum value", takes({"enum": ["a"]}), takes({"enum": ["a", "b"]}), False, "major"),
    ("new enum value where tolerated", takes({"enum": ["a"]}), takes({"enum": ["a", "b"]}), True, "minor"),
    ("another type where values are tolerated", takes({"enum": ["a"]}), takes(COUNT), True, "major"),
    ("output no longer described", takes(TEXT), True, False, "major"),
    ("words only", takes(TEXT), takes({**TEXT, "description": "a"}), False, "patch"),
]


@CLASSES
@each(("old", "new", "level"), [rule[1:] for rule in INPUT_RULES])
def test_an_input_change_has_its_class(old: Schema, new: Schema, level: str) -> None:
    difference = classify(VersionSurface(input=old), VersionSurface(input=new))
    assert difference.level == level
    assert bool(difference.changes) == (level != "patch")


@CLASSES
@each(("old", "new", "tolerant", "level"), [rule[1:] for rule in OUTPUT_RULES])
def test_an_output_change_has_its_class(old: Schema, new: Schema, tolerant: bool, level: str) -> None:
    before, after = (VersionSurface(output=output, tolerant_output=tolerant) for output in (old, new))
    assert classify(before, after).level == level


@CLASSES
@each(("kind", "keyword", "narrow", "wide"), CONSTRAINTS)
def test_a_constraint_tightens_one_way_and_relaxes_the_other(kind: str, keyword: str, narrow: Any, wide: Any) -> None:
    tight, loose = (
        takes({"type": kind, "properties": {"a": True}, **OPEN, **({} if value is None else {keyword: value})})
        for value in (narrow, wide)
    )
    assert classify(VersionSurface(input=loose), VersionSurface(input=tight)).level == "major"
    relaxed = classify(VersionSurface(input=tight), VersionSurface(input=loose))
    assert relaxed.level == "minor"
    assert relaxed.changes[0].pointer.startswith("/p")
    # An output that keeps to less than was promised breaks nobody, except that a closed object says nothing of fields.
    assert classify(VersionSurface(output=loose), VersionSurface(output=tight)).level == "minor"
    expected = "minor" if narrow is False else "major"
    assert classify(VersionSurface(output=tight), VersionSurface(output=loose)).level == expected


@CLASSES
def test_a_declared_change_of_behaviour_or_of_the_duties_of_consumers_is_breaking() -> None:
    same_schemas = VersionSurface(input=TWO, output=TWO)
    assert classify(same_schemas, same_schemas).level == "patch"
    changed = VersionSurface(input=TWO, output=TWO, declared_behaviour_change=True)
    assert [change.side for change in classify(same_schemas, changed).changes] == ["behaviour"]
    assert classify(same_schemas, changed).level == "major"
    assert classify(same_schemas, VersionSurface(input=TWO, output=TWO, tolerant_output=True)).level == "major"


def test_changes_are_told_in_words_with_the_gravest_first() -> None:
    old = takes({**TEXT, "maxLength": 5})
    new = {"type": "object", "properties": {"p": {**TEXT, "maxLength": 3}, "q": COUNT}}
    told = [str(change) for change in classify(VersionSurface(input=old), VersionSurface(input=new)).changes]
    assert told == ["major: input `/p` is tightened: `maxLength` 5 became 3", "minor: input `/q` is new"]
    optional = [VersionSurface(input=takes({"anyOf": [part, {"type": "null"}]})) for part in (takes(TEXT), TWO)]
    assert [str(change) for change in classify(*optional).changes] == ["minor: input `/p/q` is new"]


@CLASSES
@pytest.mark.parametrize(
    ("old", "new", "level", "breaking_changes", "allowed"),
    [
        ("1.0.0", "2.0.0", "major", True, True),
        ("1.0.0", "2.0.0", "major", False, False),
        ("1.0.0", "1.1.0", "major", True, False),
        ("1.0.0", "1.1.0", "minor", False, True),
        ("1.0.0", "1.0.1", "minor", False, False),
        ("1.0.0", "1.0.1", "patch", False, True),
        ("1.0.0", "1.0.0", "patch", False, False),
        ("2.0.0", "1.0.0", "major", True, False),
        ("0.1.0", "0.2.0", "major", True, True),
        ("0.1.0", "0.1.1", "major", True, False),
        ("0.1.0", "0.1.1", "minor", False, False),
        ("0.9.0", "1.0.0", "major", True, True),
    ],
)
def test_a_version_rises_as_far_as_its_changes_demand(
    old: str, new: str, level: str, breaking_changes: bool, allowed: bool
) -> None:
    after = {"major": takes(COUNT), "minor": TWO, "patch": takes(TEXT)}[level]
    difference = classify(VersionSurface(input=takes(TEXT)), VersionSurface(input=after))
    assert difference.level == level
    if allowed:
        require_bump(old, new, difference, breaking_changes)
        return
    with pytest.raises(Failure) as caught:
        require_bump(old, new, difference, breaking_changes)
    assert caught.value.code == "E3103"
    assert all(str(change) in caught.value.message for change in difference.changes)


def test_a_schema_that_is_none_is_refused_and_a_huge_one_is_compared_whole() -> None:
    with pytest.raises(Failure) as caught:
        contains({"type": "strin"}, True)
    assert caught.value.code == "E3105"
    doubling: Schema = {"$defs": {"d0": TEXT}, "$ref": "#/$defs/d40"}
    for step in range(1, 41):
        again = {"$ref": f"#/$defs/d{step - 1}"}
        doubling["$defs"][f"d{step}"] = {"type": "object", "properties": {"a": again, "b": again}}
    assert contains(doubling, copy.deepcopy(doubling))
    assert not contains(doubling, {**doubling, "maxProperties": 1})


# Negotiation


def accepted_names(offered: Schema) -> list[set[str]]:
    """The sets of names that an object may have, whatever the values: all are tried."""
    kept = ("type", "required", "minProperties", "maxProperties", "propertyNames", "not")
    shell: Schema = {key: offered[key] for key in kept if key in offered}
    shell["properties"] = {name: part is not False for name, part in offered["properties"].items()}
    shell["additionalProperties"] = offered.get("additionalProperties") is not False
    some_names: list[str] = [*NAMES, "d", "e", "f"]
    sets = [set(names) for size in range(len(some_names) + 1) for names in combinations(some_names, size)]
    fits = fitting(shell, [dict.fromkeys(names, 0) for names in sets])
    return [names for names, fit in zip(sets, fits, strict=True) if fit]


def takes_others(offered: Schema, parts: set[str], others: Schema) -> bool:
    """Whether it surely takes any other field with these values."""
    fields = {name: part for name, part in offered["properties"].items() if name not in parts}
    whole = offered.keys() & {"maxProperties", "propertyNames", "not"}
    return not whole and all(
        contains(part, others) for part in (*fields.values(), offered.get("additionalProperties", True))
    )


@settings(max_examples=400, deadline=None)
@given(flat, flat)
@NEGOTIATED
def test_negotiation_agrees_with_the_inclusion_of_sets(expected: Schema, offered: Schema) -> None:
    wanted, given_parts = expected["properties"], offered["properties"]
    required = set(expected.get("required", ()))
    parts = wanted.keys() | required
    assume(parts)
    others = expected.get("additionalProperties", True)
    stated = others if spelt(others) and others else None
    met = {
        name
        for name in parts
        if given_parts.get(name, False) is not False
        and (
            contains(given_parts[name], wanted[name])
            if name in wanted
            else stated is None or contains(given_parts[name], stated)
        )
    }
    accepted = accepted_names(offered)

    def together(names: set[str]) -> bool:
        return any(names <= one for one in accepted)

    alone: set[str] = {name for name in met if not together({name})}
    if together(required & met):
        refused = {name for name in met if not together({name, *(required & met)})}
    else:
        refused = alone if alone & required else alone | (required & met)
    lacking = (parts - met) | refused
    if stated is not None and not takes_others(offered, set(parts), stated):
        lacking.add("*")
    found = negotiate(expected, offered)
    assert set(found.missing) == lacking
    assert len(found.missing) == len(lacking)
    outcomes = {
        CompatOutcome.FULL_MATCH: not lacking,
        CompatOutcome.PARTIAL_MATCH: bool(lacking) and not lacking & required,
        CompatOutcome.INCOMPATIBLE: bool(lacking & required),
    }
    assert [outcome for outcome, holds in outcomes.items() if holds] == [found.outcome]


@settings(max_examples=250, deadline=None)
@given(st.one_of(leaves, arrays_of(leaves), objects_of(leaves).map(without_names), few(flat).map(keyed("anyOf"))), flat)
@NEGOTIATED
def test_an_expectation_without_named_fields_is_offered_if_it_is_included(expected: Schema, offered: Schema) -> None:
    found = negotiate(expected, offered)
    nothing = expected in (True, {}, {"type": "object"}) or expected == {"type": "object", "additionalProperties": True}
    assert found.missing == ()
    assert found.outcome == ("FULL_MATCH" if nothing or contains(offered, expected) else "INCOMPATIBLE")
    if found.outcome == "FULL_MATCH" and not nothing:
        wrong = [
            v for v, sent, takes_it in zip(WORLD, fitting(expected), fitting(offered), strict=True) if sent > takes_it
        ]
        assert not wrong


@NEGOTIATED
@pytest.mark.parametrize(
    ("offered", "outcome", "missing"),
    [
        ({"p": TEXT, "q": COUNT, "r": TEXT, "s": TEXT}, "FULL_MATCH", ()),
        ({"p": TEXT, "q": {"type": "number"}, "r": TEXT}, "FULL_MATCH", ()),
        ({"p": TEXT}, "PARTIAL_MATCH", ("q", "r")),
        ({"p": TEXT, "q": TEXT, "r": TEXT}, "PARTIAL_MATCH", ("q",)),
        ({"q": COUNT, "r": TEXT}, "INCOMPATIBLE", ("p",)),
        ({"p": COUNT}, "INCOMPATIBLE", ("p", "q", "r")),
        ({}, "INCOMPATIBLE", ("p", "q", "r")),
    ],
)
def test_the_missing_parts_are_listed_exactly(offered: Schema, outcome: str, missing: tuple[str, ...]) -> None:
    expected = {"type": "object", "properties": {"p": TEXT, "q": COUNT, "r": TEXT}, "required": ["p"]}
    found = negotiate(expected, {"type": "object", "properties": offered})
    assert (found.outcome, found.missing) == (outcome, missing)


@NEGOTIATED
def test_what_an_agent_expects_without_naming_fields_is_offered_whole_or_not_at_all() -> None:
    union = {"anyOf": [takes(TEXT, required=["p"]), takes(COUNT, required=["p"])]}
    assert negotiate(union, union).outcome == "FULL_MATCH"
    assert negotiate(union, takes(TEXT)).outcome == "INCOMPATIBLE"


@NEGOTIATED
@each(
    ("expected", "offered", "outcome", "missing"),
    [
        # Anything, and any object, expect nothing. What is sent to nobody is taken by everybody.
        (True, takes(TEXT), "FULL_MATCH", ()),
        ({}, takes(TEXT), "FULL_MATCH", ()),
        ({"type": "object"}, takes(TEXT), "FULL_MATCH", ()),
        (False, takes(TEXT), "FULL_MATCH", ()),
        # Other values than objects are no input, and an open object does not fit into a closed one.
        ({"type": "array"}, takes(TEXT), "INCOMPATIBLE", ()),
        ({"type": "string"}, takes(TEXT), "INCOMPATIBLE", ()),
        ({"type": ["object", "null"], "properties": {"p": TEXT}}, takes(TEXT), "INCOMPATIBLE", ()),
        ({"type": "object", "additionalProperties": TEXT}, CLOSED, "INCOMPATIBLE", ()),
        ({"type": "object", "additionalProperties": TEXT}, {"type": "object"}, "FULL_MATCH", ()),
        ({"type": "object", "additionalProperties": False}, takes(TEXT), "FULL_MATCH", ()),
        ({"type": "object", "additionalProperties": False}, takes(TEXT, required=["p"]), "INCOMPATIBLE", ()),
        ({"type": "object", "patternProperties": {"^x": TEXT}}, CLOSED, "INCOMPATIBLE", ()),
        # Beside named fields, those of other names are one more optional part.
        (takes(TEXT, additionalProperties=TEXT), CLOSED, "PARTIAL_MATCH", ("*",)),
        (takes(TEXT, additionalProperties=TEXT), takes(TEXT, additionalProperties=TEXT), "FULL_MATCH", ()),
        (takes(TEXT, additionalProperties=False), CLOSED, "FULL_MATCH", ()),
        ({"type": "object", "required": ["p"], "additionalProperties": COUNT}, takes(TEXT), "INCOMPATIBLE", ("p",)),
        ({"type": "object", "required": ["p"]}, takes(False), "INCOMPATIBLE", ("p",)),
    ],
)
def test_what_an_agent_expects_of_the_whole_object_is_compared_whole(
    expected: Schema, offered: Schema, outcome: str, missing: tuple[str, ...]
) -> None:
    found = negotiate(expected, offered)
    assert (found.outcome, found.missing) == (outcome, missing)


@NEGOTIATED
@each(
    ("whole", "outcome", "missing"),
    [
        ({"not": {"required": ["p"]}}, "INCOMPATIBLE", ("p",)),
        ({"not": {"properties": {"p": TEXT}, "required": ["p"]}}, "INCOMPATIBLE", ("p",)),
        ({"not": {"anyOf": [{"required": ["q"]}, {"required": ["r"]}]}}, "INCOMPATIBLE", ("q", "r")),
        ({"not": {"required": ["p", "q"]}}, "INCOMPATIBLE", ("p", "q")),
        ({"not": {"required": ["q", "r"]}}, "PARTIAL_MATCH", ("r",)),
        ({"not": {"required": ["x"]}}, "FULL_MATCH", ()),
        ({"maxProperties": 1}, "INCOMPATIBLE", ("p", "q")),
        ({"maxProperties": 2}, "PARTIAL_MATCH", ("r",)),
        ({"maxProperties": 3}, "FULL_MATCH", ()),
        ({"maxProperties": 3, "required": ["x", "y"]}, "INCOMPATIBLE", ("p", "q")),
        ({"propertyNames": {"enum": ["p", "r"]}}, "INCOMPATIBLE", ("q",)),
        ({"propertyNames": {"enum": ["p", "q"]}}, "PARTIAL_MATCH", ("r",)),
        ({"allOf": [{"not": {"required": ["p"]}}, {"minProperties": 1}]}, "INCOMPATIBLE", ("p",)),
        ({"anyOf": [{"not": {"required": ["p"]}}, {"maxProperties": 1}]}, "INCOMPATIBLE", ("p", "q")),
        ({"oneOf": [{"not": {"required": ["p"]}}, {"required": ["q"]}]}, "FULL_MATCH", ()),
        ({"dependentSchemas": {"p": {"not": {"required": ["q"]}}}}, "INCOMPATIBLE", ("p", "q")),
        ({"dependentSchemas": {"r": False}}, "PARTIAL_MATCH", ("r",)),
        # That it refuses some of what is expected does not show that it refuses all.
        ({"not": {"properties": {"p": {"const": "a"}}, "required": ["p"]}}, "FULL_MATCH", ()),
    ],
)
def test_a_part_that_the_whole_of_the_tool_s_schema_refuses_is_missing(
    whole: Schema, outcome: str, missing: tuple[str, ...]
) -> None:
    parts = {"type": "object", "properties": {"p": TEXT, "q": COUNT, "r": TEXT}}
    found = negotiate({**parts, "required": ["p", "q"]}, {**parts, **whole})
    assert (found.outcome, found.missing) == (outcome, missing)

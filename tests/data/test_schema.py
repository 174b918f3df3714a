"""Schemas at run time: every keyword enforced, faults in helpful words, nothing leaked, fetched or hung."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.contract.manifest import parse_manifest
from interlock.core.errors import Failure
from interlock.data.defaults import default_at, inner_defaults
from interlock.data.explain import authoring_faults, input_faults, output_faults
from interlock.data.schema import Schema, close, compile_validator, pointer, resolve_ref
from tests.support.keywords import KEYWORDS

Json = dict[str, Any]
CASES = [pytest.param(*case, id=name) for name, case in KEYWORDS.items()]


@pytest.mark.supports("VALID-01")
@pytest.mark.proves("CONTRACT-06")
@pytest.mark.parametrize(("part", "inside", "boundary", "outside"), CASES)
def test_each_keyword_and_format_takes_its_bound_and_refuses_one_step_beyond(
    part: Json, inside: Any, boundary: Any, outside: Any
) -> None:
    schema = Schema({"type": "object", "properties": {"field": part}}, closed=True)
    for value in (inside, boundary):
        assert schema.valid({"field": value})
        assert input_faults(schema, {"field": value}) == []
    assert not schema.valid({"field": outside})
    assert {fault.pointer for fault in input_faults(schema, {"field": outside})} == {"/field"}


@pytest.mark.proves("CONTRACT-06")
@pytest.mark.parametrize(("part", "inside", "boundary", "outside"), CASES)
def test_each_keyword_and_format_holds_inside_lists_too(part: Json, inside: Any, boundary: Any, outside: Any) -> None:
    schema = Schema({"type": "array", "items": part})
    assert schema.valid([inside, boundary])
    assert {fault.pointer for fault in output_faults(schema, [inside, outside])} == {"/1"}


@pytest.mark.proves("CONTRACT-06")
def test_an_input_schema_is_closed_where_its_author_said_nothing() -> None:
    inner: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
    schema = Schema(
        {"type": "object", "properties": {"one": inner, "list": {"type": "array", "items": inner}}}, closed=True
    )
    assert schema.valid({"one": {"a": 1}, "list": [{"a": 1}]})
    for value, where in (
        ({"two": 1}, "/two"),
        ({"one": {"b": 1}}, "/one/b"),
        ({"list": [{"a": 1}, {"b": 1}]}, "/list/1/b"),
    ):
        assert [fault.pointer for fault in input_faults(schema, value)] == [where]


def test_closing_keeps_what_the_author_said_and_does_not_break_combinations() -> None:
    said: list[Json] = [
        {"type": "object", "additionalProperties": True},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "patternProperties": {"^x-": {}}},
        {"type": "object", "unevaluatedProperties": False},
        {"type": "object", "allOf": [{"properties": {"a": {}}}]},
    ]
    for document in said:
        assert close({**document}) == document
    combined = Schema({"type": "object", "allOf": [{"properties": {"a": {"type": "integer"}}}]}, closed=True)
    assert combined.valid({"a": 1})


NAMES = st.sampled_from(["a", "b", "c", 'q"', "é"])
LEAVES = st.sampled_from([{"type": "integer"}, {"type": "string"}, {}, {"$ref": "#/$defs/leaf"}, False])


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects that are closed or open and demand some, all or more than all of what they list."""
    objects: st.SearchStrategy[Any] = st.fixed_dictionaries(
        {"properties": st.dictionaries(NAMES, inner, max_size=3)},
        optional={
            "type": st.sampled_from(["object", ["object", "null"]]),
            "additionalProperties": st.sampled_from([False, False, False, True, {"type": "integer"}]),
            "patternProperties": st.just({"^b": {"type": "string"}}),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(0, 2),
            "required": st.lists(NAMES, unique=True, max_size=3),
            "items": inner,
            "anyOf": st.lists(inner, min_size=1, max_size=2),
        },
    )
    return objects.flatmap(lambda one: st.sampled_from([one, {**one, "required": list(one["properties"])}]))


SCHEMAS = st.recursive(LEAVES, _objects, max_leaves=6).filter(lambda one: isinstance(one, dict))
VALUES = st.recursive(
    st.sampled_from([1, "x", None]),
    lambda inner: st.dictionaries(NAMES, inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=500)
@given(SCHEMAS, VALUES)
def test_a_yes_is_a_yes_in_both_forms_of_a_schema(document: Json, value: Any) -> None:
    schema = Schema({**document, "$defs": {"leaf": {"type": "integer"}}})
    assert schema.valid(value) == (not schema.errors(value))


def test_a_row_with_all_members_or_one_too_few_or_another_in_its_place() -> None:
    part: Json = {"properties": {"a": {}, "b": {}}, "required": ["b", "a"], "additionalProperties": False}
    schema = Schema({"type": "object", **part})
    assert [schema.valid(dict.fromkeys(names, 1)) for names in ("ab", "a", "b", "", "ac", "abc")] == [True] + 5 * [
        False
    ]


def test_making_a_schema_leaves_its_source_alone() -> None:
    source: Json = {"type": "object", "properties": {"a": {"type": "object"}}}
    schema = Schema(source, closed=True)
    assert source == {"type": "object", "properties": {"a": {"type": "object"}}}
    assert schema.document["additionalProperties"] is False
    assert schema == Schema(source, closed=True)
    assert schema != Schema(source)
    assert hash(schema) == hash(Schema(source, closed=True))


@pytest.mark.proves("CONTRACT-06")
def test_declared_defaults_are_known_also_behind_a_reference() -> None:
    schema = Schema(
        {
            "type": "object",
            "properties": {
                "a": {"default": 1},
                "b": {"type": "string"},
                "c": {"$ref": "#/$defs/c"},
                "d": {"default": None},
            },
            "$defs": {"c": {"default": [3]}},
        }
    )
    assert schema.defaults == (("a", 1), ("c", [3]), ("d", None))


# Words that help

ORDER = Schema(
    {
        "type": "object",
        "properties": {
            "colour": {"type": "string", "enum": ["red", "blue"]},
            "count": {"type": "integer", "minimum": 1, "maximum": 9, "examples": [3]},
            "to": {"type": "string", "format": "email", "examples": ["ada@example.com"]},
            "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "either": {"type": ["integer", "boolean"]},
            "point": {"$ref": "#/$defs/point"},
        },
        "required": ["count"],
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    },
    closed=True,
)


@pytest.mark.parametrize(
    ("value", "where", "words"),
    [
        ({"count": 1, "color": "red"}, "/color", ["`color` is not a parameter", "did you mean `colour`?"]),
        ({"count": 1, "zzz": 1}, "/zzz", ["`zzz` is not a parameter", "there are `colour`, `count`, `to`"]),
        ({}, "/count", ["missing", "for example `3`"]),
        ({"count": "many"}, "/count", ["`many` is not a whole number", "for example `3`"]),
        ({"count": 0}, "/count", ["`0` is less than the minimum of 1", "for example `3`"]),
        ({"count": 10}, "/count", ["`10`", "maximum of 9", "for example `3`"]),
        ({"count": 1, "colour": "green"}, "/colour", ["`green` is not one of `red`, `blue`"]),
        ({"count": 1, "to": "ada"}, "/to", ["`ada`", "email", "for example `ada@example.com`"]),
        ({"count": 1, "size": "big"}, "/size", ["`big` is not a whole number or null"]),
        ({"count": 1, "either": "x"}, "/either", ["`x` is not a whole number or true or false"]),
        ({"count": 1, "point": {"x": "a"}}, "/point/x", ["`a` is not a whole number", "send a whole number"]),
        ({"count": 1, "point": {}}, "/point/x", ["missing", "send a whole number"]),
        ([], "", ["is not an object", "send an object"]),
    ],
)
def test_a_fault_says_where_it_is_and_what_to_send_instead(value: Any, where: str, words: list[str]) -> None:
    faults = input_faults(ORDER, value)
    assert [fault.pointer for fault in faults] == [where]
    for part in words:
        assert part in faults[0].message
    assert faults[0].message[0] != faults[0].message[0].upper() or faults[0].message[0] == "`"
    assert not faults[0].message.endswith(".")


def test_every_fault_of_an_input_is_listed_at_once() -> None:
    value = {"color": "red", "to": "ada", "point": {"y": 1}}
    assert [fault.pointer for fault in input_faults(ORDER, value)] == [
        "/color",
        "/count",
        "/point/x",
        "/point/y",
        "/to",
    ]


def test_a_tool_without_parameters_says_so() -> None:
    [fault] = input_faults(Schema({"type": "object"}, closed=True), {"a": 1})
    assert "the tool takes none" in fault.message


def test_long_values_are_quoted_in_brief() -> None:
    [fault] = input_faults(Schema({"type": "object", "properties": {"n": {"type": "integer"}}}), {"n": "x" * 10_000})
    assert len(fault.message) < 200


def test_pointers_escape_what_rfc_6901_escapes() -> None:
    assert pointer(["a/b", "m~n", 0, ""]) == "/a~1b/m~0n/0/"
    [fault] = input_faults(Schema({"type": "object", "properties": {"a/b~c": {"type": "integer"}}}), {"a/b~c": "x"})
    assert fault.pointer == "/a~1b~0c"


# Sensitive values

SECRET = "s3cr3t-v4lue"
HIDDEN: Json = {"type": "string", "x-sensitivity": "secret", "minLength": 20, "pattern": "^[0-9]+$", "format": "uuid"}
SENSITIVE: dict[str, tuple[Json, Any]] = {
    "a field": ({"properties": {"pw": HIDDEN}}, {"pw": SECRET}),
    "a field of the wrong type": ({"properties": {"pw": {"type": "integer", "x-sensitivity": "pii"}}}, {"pw": SECRET}),
    "an enumeration": ({"properties": {"pw": {"enum": ["a"], "x-sensitivity": "credential"}}}, {"pw": SECRET}),
    "a constant": ({"properties": {"pw": {"const": "a", "x-sensitivity": "credential"}}}, {"pw": SECRET}),
    "below a sensitive object": (
        {"properties": {"card": {"type": "object", "x-sensitivity": "pii", "properties": {"no": {"type": "integer"}}}}},
        {"card": {"no": SECRET}},
    ),
    "a list sent for it": ({"properties": {"pw": HIDDEN}}, {"pw": [SECRET]}),
    "an item of a list": (
        {"properties": {"pws": {"type": "array", "items": HIDDEN}}},
        {"pws": [SECRET]},
    ),
    "behind a reference": ({"properties": {"pw": {"$ref": "#/$defs/pw"}}, "$defs": {"pw": HIDDEN}}, {"pw": SECRET}),
    "a rule of the object around it": (
        {"properties": {"pw": {"x-sensitivity": "pii"}}, "minProperties": 2},
        {"pw": SECRET},
    ),
    "a rule of the list around it": (
        {"properties": {"pws": {"type": "array", "uniqueItems": True, "items": {"x-sensitivity": "pii"}}}},
        {"pws": [SECRET, SECRET]},
    ),
    "a choice around it": (
        {"anyOf": [{"properties": {"pw": HIDDEN}, "required": ["pw"]}, {"required": ["x"]}]},
        {"pw": SECRET},
    ),
    "one branch of its type": (
        {"properties": {"pw": {"anyOf": [{"type": "integer", "x-sensitivity": "pii"}, {"type": "null"}]}}},
        {"pw": SECRET},
    ),
    "a map's values": ({"additionalProperties": {"type": "integer", "x-sensitivity": "pii"}}, {"any": SECRET}),
}


@pytest.mark.parametrize(("parts", "value"), [pytest.param(*case, id=name) for name, case in SENSITIVE.items()])
def test_a_sensitive_value_is_never_quoted_in_a_fault(parts: Json, value: Any) -> None:
    schema = Schema({"type": "object", **parts})
    faults = [*input_faults(schema, value), *output_faults(schema, value)]
    assert faults
    assert SECRET not in repr(faults)


def test_the_example_of_a_sensitive_field_is_not_shown_either() -> None:
    schema = Schema({"type": "object", "properties": {"pw": HIDDEN | {"examples": [SECRET]}}, "required": ["pw"]})
    assert SECRET not in repr([*input_faults(schema, {}), *input_faults(schema, {"pw": "x"})])


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=4).map(lambda text: f"#{text}#"))
def test_faults_of_a_result_never_quote_it(value: str) -> None:
    schema = Schema(
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x"]}, "c": {"const": 1}}}
    )
    faults = output_faults(schema, {"a": value, "b": value, "c": value})
    assert [fault.pointer for fault in faults] == ["/a", "/b", "/c"]
    assert all(value not in fault.message for fault in faults)


# What authors must say

FIELD: Json = {"type": "string", "description": "a name", "examples": ["ada"]}


def authored(**edits: Any) -> list[tuple[str, str]]:
    field = {name: value for name, value in (FIELD | edits).items() if value is not None}
    found = authoring_faults({"type": "object", "properties": {"who": field}})
    return [(fault.pointer, fault.message) for fault in found]


@pytest.mark.proves("CONTRACT-06")
def test_schemas_are_of_draft_2020_12() -> None:
    pair = Schema({"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "integer"}})
    assert pair.valid(["a", 1])
    assert not pair.valid([1, 1])
    assert not pair.valid(["a", "b"])
    with pytest.raises(Failure) as refused:
        Schema({"type": "array", "items": [{"type": "string"}]}).valid([])  # as draft 7 wrote it
    assert refused.value.code == "E3105"


@pytest.mark.proves("CONTRACT-06")
def test_a_complete_property_has_no_faults() -> None:
    assert authored() == []
    assert authored(**{"x-sensitivity": "pii", "x-token-cost": 0, "x-internal": True}) == []


@pytest.mark.proves("CONTRACT-06")
@pytest.mark.parametrize(
    ("edits", "where", "words"),
    [
        ({"description": None}, "/properties/who", "`who` needs a description"),
        ({"description": "  "}, "/properties/who", "`who` needs a description"),
        ({"examples": None}, "/properties/who", "`who` needs an example"),
        ({"examples": []}, "/properties/who", "`who` needs an example"),
        ({"examples": "ada"}, "/properties/who", "`who` needs an example"),
        ({"examples": ["ada", 5]}, "/properties/who/examples", "the example `5` of `who` does not fit its own schema"),
        (
            {"x-sensitivity": "top"},
            "/properties/who/x-sensitivity",
            "must be one of confidential, credential, pii, secret",
        ),
        ({"x-sensitivity": True}, "/properties/who/x-sensitivity", "must be one of"),
        ({"x-sensitivity": ["pii"]}, "/properties/who/x-sensitivity", "must be one of"),
        ({"x-sensitivity": {}}, "/properties/who/x-sensitivity", "must be one of"),
        ({"x-token-cost": "5"}, "/properties/who/x-token-cost", "must be a whole number of tokens"),
        ({"x-token-cost": -1}, "/properties/who/x-token-cost", "must be a whole number of tokens"),
        ({"x-token-cost": 1.5}, "/properties/who/x-token-cost", "must be a whole number of tokens"),
        ({"x-token-cost": True}, "/properties/who/x-token-cost", "must be a whole number of tokens"),
        ({"x-internal": "yes"}, "/properties/who/x-internal", "must be true or false"),
    ],
)
def test_what_a_property_lacks_is_said_with_its_place(edits: Json, where: str, words: str) -> None:
    [(found, message)] = authored(**edits)
    assert found == where
    assert words in message


BARE: Json = {"type": "integer"}
TOLD: Json = {"type": "integer", "description": "how many", "examples": [1]}
# Each way in which a schema holds another one, with the name under which a fault is told.
AROUND: dict[str, Callable[[Json], Json]] = {
    "who.n": lambda part: {"type": "object", "properties": {"n": part}},
    "who[].n": lambda part: {"type": "array", "items": {"properties": {"n": part}}},
    "who[1].n": lambda part: {"type": "array", "prefixItems": [True, {"properties": {"n": part}}]},
    "who.*.n": lambda part: {"type": "object", "additionalProperties": {"properties": {"n": part}}},
    "who.*.n ": lambda part: {"type": "object", "patternProperties": {"^a": {"properties": {"n": part}}}},
    "who.n ": lambda part: {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"n": part}}]},
    "who.n  ": lambda part: {"oneOf": [{"type": "object", "properties": {"n": part}}]},
    "who.n   ": lambda part: {"allOf": [{"type": "object", "properties": {"n": part}}]},
    "who.a.b[].n": lambda part: {
        "properties": {
            "a": {
                **TOLD, "type": "object", "examples": [{}],
                "properties": {"b": {**TOLD, "type": "array", "examples": [[]], "items": {"properties": {"n": part}}}},
            }
        }
    },
}  # fmt: skip


@pytest.mark.proves("CONTRACT-06")
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("shared", [False, True], ids=["in place", "by reference"])
def test_a_property_at_any_depth_needs_a_description_and_an_example(name: str, shared: bool) -> None:
    def faults(part: Json) -> list[tuple[str, str]]:
        who = {"description": "whom", "examples": [None], **AROUND[name](part)}
        document: Json = {"type": "object", "properties": {"who": who}}
        if shared:
            kept = {"description", "examples"}
            document["$defs"] = {"Who": {word: said for word, said in who.items() if word not in kept}}
            document["properties"]["who"] = {"$ref": "#/$defs/Who", **{word: who[word] for word in kept}}
        return [
            (one.pointer, one.message) for one in authoring_faults(document) if not one.pointer.endswith("examples")
        ]

    (described, first), (exemplified, second) = faults(BARE)
    assert described == exemplified
    assert (described.startswith("/properties/who/"), described.endswith("/properties/n")) == (True, True)
    assert first == f"`{name.strip()}` needs a description: Annotated[…, Field(description=…)]"
    assert second.startswith(f"`{name.strip()}` needs an example: Annotated[…, Field(examples=[…])]")
    assert faults(TOLD) == []
    ((_, wrong),) = faults({**TOLD, "x-sensitivity": "top"})
    assert f"x-sensitivity of `{name.strip()}` must be one of" in wrong


@pytest.mark.proves("CONTRACT-06")
def test_a_value_in_an_example_of_the_whole_is_an_example_of_its_part() -> None:
    line = {"type": "object", "properties": {"sku": {"type": "string", "description": "what"}}}
    lines: Json = {"type": "array", "description": "what is bought", "items": line, "examples": [[{"sku": "a"}]]}
    document: Json = {"type": "object", "properties": {"lines": lines}}
    assert authoring_faults(document) == []
    lines["examples"] = [[{}]]
    (fault,) = authoring_faults(document)
    assert fault.message.endswith("or a value in an example of `lines[]`")


@pytest.mark.proves("CONTRACT-06")
def test_a_schema_that_refers_to_itself_is_looked_at_once() -> None:
    again: Json = {"$ref": "#/$defs/Node", "description": "the rest", "examples": [{}]}
    node: Json = {"type": "object", "properties": {"value": BARE, "next": again}}
    document: Json = {
        "type": "object", "$defs": {"Node": node},
        "properties": {"list": {"$ref": "#/$defs/Node", "description": "a list", "examples": [{"value": 1}]}},
    }  # fmt: skip
    (fault,) = [one for one in authoring_faults(document) if "description" in one.message]
    assert "`list.value` needs a description" in fault.message


@pytest.mark.proves("CONTRACT-06")
@pytest.mark.parametrize("kind", ["string", "array", None, ["object", "null"]])
def test_an_input_schema_that_is_not_an_object_is_refused(kind: Any) -> None:
    [fault] = authoring_faults({} if kind is None else {"type": kind})
    assert fault.pointer == "/type"
    assert "`object`" in fault.message


# Schemas that mean harm


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server that waits for connections that must not come."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def test_a_remote_reference_is_refused_and_never_fetched(listener: socket.socket) -> None:
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/schema.json"
    documents: list[Json] = [
        {"$ref": address},
        {"$id": address, "$ref": "other.json"},
        {"$dynamicRef": address},
        {"$schema": address, "type": "object"},
        {"type": "object", "properties": {"a": {"items": {"$ref": f"{address}#/$defs/a"}}}},
    ]
    for document in documents:
        with pytest.raises(Failure) as caught:
            compile_validator(document)
        assert caught.value.code == "E3105"
        with pytest.raises(Failure):
            Schema(document).valid({})
        with pytest.raises(Failure) as caught:
            parse_manifest(
                {"tool_id": "abc", "version": "1.0.0", "name": "Abc", "description": "ten letters", "provider": "p"}
                | {"protocol": "native", "parameters": document}
            )
        assert caught.value.code == "E3105"
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_reference_to_a_file_is_refused_without_reading_it(tmp_path: Any) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "integer"}')
    with pytest.raises(Failure) as caught:
        compile_validator({"$ref": path.as_uri()})
    assert caught.value.code == "E3105"


@pytest.mark.parametrize(
    "document",
    [
        {"type": "text"},
        {"type": ["string", "string"]},
        {"minLength": -1},
        {"minimum": "1"},
        {"multipleOf": 0},
        {"pattern": "("},
        {"pattern": "((a{1000}){1000}){1000}"},
        {"required": "a"},
        {"properties": []},
        {"enum": 5},
        {"$ref": "#/$defs/absent"},
        {"$schema": 5},
    ],
    ids=repr,
)
def test_what_is_no_schema_is_refused_with_a_manifest_code(document: Json) -> None:
    with pytest.raises(Failure) as caught:
        compile_validator(document)
    assert caught.value.code == "E3105"
    assert caught.value.message.startswith("not a valid JSON Schema")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|aa)+$", "^(?=(a+))\\1+b$", "^(?!x)(a+)+$", "(.*a){12}$"])
def test_a_hostile_pattern_does_not_hang(pattern: str) -> None:
    schema = Schema({"type": "string", "pattern": pattern})
    assert isinstance(schema.valid("a" * 40 + "!"), bool)
    assert isinstance(input_faults(schema, "a" * 40 + "!"), list)


@pytest.mark.timeout(20)
def test_references_that_go_in_circles_end() -> None:
    circle: Json = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    assert isinstance(Schema(circle).valid(1), bool)
    assert isinstance(Schema({"$ref": "#"}).valid({"a": [1]}), bool)
    assert resolve_ref(circle, circle)["$defs"]
    tree = Schema({"type": "object", "properties": {"next": {"$ref": "#"}, "n": {"type": "integer"}}}, closed=True)
    assert tree.valid({"next": {"next": {"n": 1}}})
    assert [fault.pointer for fault in input_faults(tree, {"next": {"next": {"n": "x"}}})] == ["/next/next/n"]


@pytest.mark.timeout(20)
def test_a_schema_that_doubles_at_every_step_is_still_quick() -> None:
    document: Json = {"$defs": {"d0": {"type": "integer"}}, "$ref": "#/$defs/d9"}
    for step in range(1, 10):
        document["$defs"][f"d{step}"] = {"allOf": [{"$ref": f"#/$defs/d{step - 1}"}] * 2}
    assert Schema(document).valid(1)
    assert not Schema(document).valid("x")


@pytest.mark.parametrize("depth", [100, 300, 3000])
def test_a_deeply_nested_schema_is_handled_or_refused(depth: int) -> None:
    document: Json = {"type": "object"}
    for _ in range(depth):
        document = {"type": "object", "properties": {"a": document}}
    try:
        compile_validator(document)
    except Failure as failure:
        assert failure.code == "E3105"  # noqa: PT017 - either outcome is right, an overflow of the stack is not
        assert depth > 100


@pytest.mark.parametrize("depth", [100, 1000, 100_000])
def test_a_deeply_nested_value_does_not_fit_and_breaks_nothing(depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    schema = Schema({"type": "object", "properties": {"n": {"type": "integer"}}})
    assert not schema.valid({"n": value})
    assert input_faults(schema, {"n": value})


_DEEP = """
import sys
from interlock.data.schema import Schema
how, steps, depth = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
again = {
    "same": lambda at: {"$ref": f"#/$defs/d{at}"},
    "all": lambda at: {"allOf": [{"$ref": f"#/$defs/d{at}"}]},
    "any": lambda at: {"anyOf": [{"$ref": f"#/$defs/d{at}"}, {"type": "null"}]},
    "then": lambda at: {"if": {"type": "array"}, "then": {"$ref": f"#/$defs/d{at}"}, "else": False},
}[how]
definitions = {f"d{at}": again(at + 1) for at in range(steps)}
definitions[f"d{steps}"] = {"type": "array", "items": {"allOf": [{"$ref": "#/$defs/d0"}]}}
schema = Schema({"$ref": "#/$defs/d0", "$defs": definitions})
right, wrong = [], 1
for _ in range(depth):
    right, wrong = [right], [wrong]
assert schema.valid(right) is (depth < 199)
assert not schema.valid(wrong)
assert (schema.errors(right) == [], bool(schema.errors(wrong))) == (depth < 199, True)
print("alive")
"""


@pytest.mark.parametrize(
    ("how", "steps", "depth"),
    [
        ("same", 1, 60_000), ("all", 3, 1_000), ("then", 1, 900), ("any", 1, 198), ("any", 20, 198), ("any", 500, 190),
        ("all", 500, 190), ("same", 1_000, 100),
    ],
)  # fmt: skip
def test_a_deeply_nested_value_for_a_recursive_schema_does_not_end_the_process(
    how: str, steps: int, depth: int
) -> None:
    """Nor does it take the time of others: the validator explains faults in the cube of the levels."""
    words = [sys.executable, "-c", _DEEP, how, str(steps), str(depth)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), {1, 2}, object(), b"x", {1: 2}, 1j], ids=lambda value: type(value).__name__
)
def test_a_value_that_json_cannot_hold_does_not_fit(value: Any) -> None:
    schema = Schema({"type": "object", "properties": {"any": {"type": ["number", "string", "array"]}}})
    assert not schema.valid({"any": value})
    assert input_faults(schema, {"any": value})
    assert output_faults(schema, {"any": value})


SIZE: Json = {"type": "integer", "default": 2}
SIZED: Json = {"type": "object", "properties": {"size": SIZE, "name": {"type": "string"}}}
NODE: Json = {
    "type": "object", "$defs": {"Node": {"properties": {"size": SIZE, "of": {"$ref": "#/$defs/Node"}}}},
    "properties": {"node": {"$ref": "#/$defs/Node"}},
}  # fmt: skip
# Where a default can lie: the schema of `a` (or the whole), an input without the default, and the input with it.
INNER: dict[str, tuple[Json, Any, Any]] = {
    "an object": (SIZED, {}, {"size": 2}),
    "an object that has it": (SIZED, {"size": 3}, {"size": 3}),
    "an object in an object": ({"properties": {"b": SIZED}}, {"b": {"name": "x"}}, {"b": {"name": "x", "size": 2}}),
    "an object that was not sent": ({"properties": {"b": SIZED}}, {}, {}),
    "the elements of a list": ({"items": SIZED}, [{}, {"size": 1}], [{"size": 2}, {"size": 1}]),
    "the first element": ({"prefixItems": [SIZED], "items": {"type": "object"}}, [{}, {}], [{"size": 2}, {}]),
    "the members of a map": ({"additionalProperties": SIZED}, {"x": {}}, {"x": {"size": 2}}),
    "an object or null": ({"anyOf": [SIZED, {"type": "null"}]}, {}, {"size": 2}),
    "null": ({"anyOf": [SIZED, {"type": "null"}]}, None, None),
    "parts that all hold": ({"allOf": [SIZED, {"properties": {"b": SIZE}}]}, {}, {"size": 2, "b": 2}),
    "several objects that may be meant": ({"oneOf": [SIZED, {"type": "object", "properties": {}}]}, {}, {}),
    "a default that does not fit": ({"properties": {"size": {"type": "integer", "default": "two"}}}, {}, {}),
    "a schema that refers to itself": (NODE, {"node": {"of": {"of": {}}}}, None),
}


@pytest.mark.proves("CONTRACT-06")
@pytest.mark.parametrize("where", INNER)
def test_defaults_inside_of_what_was_sent_are_filled_in(where: str) -> None:
    part, sent, expected = INNER[where]
    whole = "$defs" in part
    schema = Schema(part if whole else {"type": "object", "properties": {"a": part, "top": SIZE}})
    given = sent if whole else {"a": sent}
    wanted: Any = {"a": expected}
    if whole:
        wanted = {"node": {"size": 2, "of": {"size": 2, "of": {"size": 2}}}}
    plan = inner_defaults(schema)
    before = repr(given)
    made, filled = (given, []) if plan is None else plan.fill(given)
    assert made == wanted, "the default of the top level is not in it"
    assert repr(given) == before, "what was sent is unchanged"
    assert (plan is not None and plan.lacks(given)) == bool(filled) == (made != given)
    for place, value in filled:
        assert default_at(schema, place) == (place.rpartition("/")[2], value)


def test_faults_of_a_result_with_a_long_name_are_short() -> None:
    schema = Schema({"additionalProperties": {"type": "object", "additionalProperties": {"type": "integer"}}})
    faults = output_faults(schema, {"x" * 1_000_000: {f"n{number}": "a" for number in range(100)}})
    assert len(faults) == 100
    assert {len(one.pointer) for one in faults} == {205, 206}
    assert faults[0].pointer == f"/{'x' * 200}…/n0"


def _doubling(refer: Callable[[int], Json], name: Callable[[int], Json]) -> Json:
    """A schema whose references double at each of 40 levels."""
    levels = {f"d{n}": {**name(n), "anyOf": [refer(n + 1), refer(n + 1)]} for n in range(40)}
    return {"type": "object", "properties": {"a": refer(0)}, "$defs": {**levels, "d40": {**name(40), "type": "string"}}}


BOMBS: dict[str, Json] = {
    "pointers": _doubling(lambda n: {"$ref": f"#/$defs/d{n}"}, lambda _: {}),
    "encoded pointers": _doubling(lambda n: {"$ref": f"#/%24defs/d{n}"}, lambda _: {}),
    "anchors": _doubling(lambda n: {"$ref": f"#d{n}"}, lambda n: {"$anchor": f"d{n}"}),
    "dynamic anchors": _doubling(lambda n: {"$dynamicRef": f"#d{n}"}, lambda n: {"$dynamicAnchor": f"d{n}"}),
    "ids": _doubling(lambda n: {"$ref": f"http://x.example/d{n}"}, lambda n: {"$id": f"http://x.example/d{n}"}),
    "not": _doubling(lambda n: {"not": {"$ref": f"#/$defs/d{n}"}}, lambda _: {}),
    "conditions": _doubling(lambda n: {"if": {"$ref": f"#/$defs/d{n}"}, "then": True}, lambda _: {}),
}


@pytest.mark.parametrize("how", BOMBS)
def test_a_schema_whose_references_double_at_each_level_is_refused(how: str) -> None:
    with pytest.raises(Failure, match="more than 5,000 subschemas") as refused:
        compile_validator(BOMBS[how])
    assert refused.value.code == "E3105"


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$defs": {"n": {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}, "r": {"$ref": "#/$defs/n"}}}}},
        {"anyOf": [{"const": number} for number in range(6000)]},
    ],
)
def test_schemas_that_refer_to_themselves_or_have_many_alternatives_are_taken(schema: Json) -> None:
    assert compile_validator(schema) is not None

"""A mark is met wherever in a schema it stands, and a schema in which it could be missed is not admitted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.authority import facts as f
from interlock.contract.contract import Contract
from interlock.core.errors import Failure
from interlock.data.fragments import attacks
from interlock.data.schema import Schema
from interlock.data.subschemas import Places
from interlock.registry.admission import examine
from tests.authority.questions import contract

Json = dict[str, Any]
PATHS, HOSTS = frozenset({"paths"}), frozenset({"hosts"})


def paths(schema: Mapping[str, Any], value: Any) -> list[str]:
    """The paths that rules see in an argument of this schema."""
    return f.facts(contract({"x": dict(schema)}), {"x": value}, None, PATHS)["paths"]


MARK: Json = {"type": "string", "x-path": True}
PLACES: list[tuple[Json, Any]] = [
    ({"prefixItems": [{}, MARK]}, ["a", "srv"]),
    ({"prefixItems": [{}], "items": MARK}, ["a", "srv"]),
    ({"unevaluatedItems": MARK}, ["srv"]),
    ({"contains": MARK}, ["srv"]),
    ({"patternProperties": {"^p": MARK}}, {"pa": "srv"}),
    ({"properties": {"pa": {"type": "string"}}, "patternProperties": {"^p": MARK}}, {"pa": "srv"}),
    ({"additionalProperties": MARK}, {"a": "srv"}),
    ({"unevaluatedProperties": MARK}, {"a": "srv"}),
    ({"propertyNames": MARK}, {"srv": 1}),
    ({"dependentSchemas": {"a": {"properties": {"b": MARK}}}}, {"a": 1, "b": "srv"}),
    ({"dependencies": {"a": {"properties": {"b": MARK}}}}, {"a": 1, "b": "srv"}),
    ({"if": {"properties": {"b": MARK}}}, {"b": "srv"}),
    ({"if": True, "then": MARK}, "srv"),
    ({"if": False, "else": MARK}, "srv"),
    ({"not": {"not": MARK}}, "srv"),
    ({"allOf": [{"anyOf": [{"oneOf": [MARK]}]}]}, "srv"),
    ({"anyOf": [{"const": str(at)} for at in range(500)] + [MARK]}, "srv"),
    ({"$defs": {"p": MARK}, "items": {"$ref": "#/properties/x/$defs/p"}}, ["srv"]),
    ({"$defs": {"p": {"$anchor": "p", **MARK}}, "$ref": "#p"}, "srv"),
    ({"$defs": {"p": {"$dynamicAnchor": "p", **MARK}}, "items": {"$dynamicRef": "#p"}}, ["srv"]),
    ({"items": {"anyOf": [MARK, {"$ref": "#/properties/x"}]}}, [[["srv"]]]),
    ({"x-path": True}, {"a": ["srv"]}),
]


OLDER: list[Json] = [{"items": [{}, MARK]}, {"items": [{}], "additionalItems": MARK}]


@pytest.mark.parametrize("rest", OLDER)
def test_a_mark_is_met_in_a_list_of_the_older_dialects(rest: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    older = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {"x": rest}}
    assert f.facts(contract(parameters=older), {"x": ["a", "srv"]}, None, PATHS)["paths"] == ["/", "/srv"]


@pytest.mark.parametrize(("schema", "value"), PLACES, ids=[str(schema)[:60] for schema, _ in PLACES])
def test_a_mark_is_met_behind_every_applicator(schema: Json, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert paths(schema, value) == ["/", "/srv"]


WRAPS = (
    "items", "prefixItems", "second", "contains", "unevaluatedItems", "properties", "patternProperties",
    "additionalProperties", "unevaluatedProperties", "dependentSchemas", "if", "then", "else", "allOf", "anyOf",
    "oneOf", "ref", "anchor", "dynamic", "not", "propertyNames", "contentSchema", "id",
)  # fmt: skip


def _wrapped(how: str, inner: Json, value: Any, definitions: Json) -> tuple[Json, Any]:
    """A schema around another one, and a value around its value."""
    name = f"d{len(definitions)}"
    match how:
        case "items" | "contains" | "unevaluatedItems":
            return {how: inner}, [value]
        case "prefixItems":
            return {"prefixItems": [inner]}, [value]
        case "second":
            return {"prefixItems": [{}, inner], "items": {}}, [1, value]
        case "properties":
            return {"properties": {"a": inner}}, {"a": value}
        case "patternProperties":
            return {"patternProperties": {"^[ab]": inner}}, {"a": value}
        case "additionalProperties" | "unevaluatedProperties":
            return {how: inner}, {"a": value}
        case "dependentSchemas":
            return {"dependentSchemas": {"k": {"properties": {"a": inner}}}}, {"k": 1, "a": value}
        case "if" | "then" | "else" | "not":
            return {how: inner}, value
        case "allOf" | "anyOf" | "oneOf":
            return {how: [{}, inner]}, value
        case "ref":
            definitions[name] = inner
            return {"$ref": f"#/$defs/{name}"}, value
        case "anchor":
            definitions[name] = {"$anchor": name, **inner}
            return {"$ref": f"#{name}"}, value
        case "dynamic":
            definitions[name] = {"$dynamicAnchor": name, **inner}
            return {"$dynamicRef": f"#{name}"}, value
        case "propertyNames" if isinstance(value, str):
            return {"propertyNames": inner}, {value: 1}
        case "contentSchema":
            return {"contentSchema": inner}, value
        case "id":
            definitions[name] = {"$id": f"https://a.example/{name}", **inner}
            return {"$ref": f"https://a.example/{name}"}, value
        case _:
            return inner, value


def _admitted(parameters: Json) -> Contract | None:
    """A tool with these parameters, unless admission refuses its schema; then no fact of it is told either."""
    try:
        tool = contract(parameters=parameters)
    except Failure:
        return None
    if any("rules may miss" in fault for fault in examine(tool.manifest, "d", {}, None).refused["schema_valid"]):
        with pytest.raises(Failure, match="cannot be followed everywhere"):
            f.facts(tool, {"x": 1}, None, PATHS)
        return None
    return tool


@given(
    st.lists(st.sampled_from(WRAPS), max_size=6),
    st.sampled_from([{"format": "path"}, {"x-path": True}, {"format": "directory-path"}]),
)
def test_every_marked_value_is_a_fact_or_its_schema_is_not_admitted(hows: list[str], mark: Json) -> None:
    definitions: Json = {}
    schema, value = dict(mark), "/marked/here"
    for how in hows:
        schema, value = _wrapped(how, schema, value, definitions)
    tool = _admitted({"type": "object", "properties": {"x": schema}, "$defs": definitions})
    if tool is not None:
        assert "/marked" in f.facts(tool, {"x": value}, None, PATHS)["paths"]


@given(st.lists(st.sampled_from(WRAPS), max_size=6))
def test_a_host_without_any_look_of_one_is_met_by_its_mark_alone(hows: list[str]) -> None:
    definitions: Json = {}
    schema, value = {"x-host": True}, "Evil"
    for how in hows:
        schema, value = _wrapped(how, schema, value, definitions)
    tool = _admitted({"type": "object", "properties": {"x": schema}, "$defs": definitions})
    if tool is not None:
        assert "evil" in f.facts(tool, {"x": value}, None, HOSTS)["hosts"]


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"contentSchema": {"x-url": True}}, "contentSchema"),
        ({"$ref": "https://a.example/p", "$defs": {"p": {"$id": "https://a.example/p", "format": "uri"}}}, "#/…"),
        ({"$defs": {"p": {"$id": "https://a.example/p", "format": "uri"}}}, "$id"),
        ({"contentSchema": {"x-fragment": "sql"}}, "contentSchema"),
    ],
)
def test_a_mark_that_could_be_missed_is_refused_at_admission(schema: Json, why: str) -> None:
    manifest = contract({"x": schema}).manifest
    faults = " ".join(examine(manifest, "d", {}, None).refused.get("schema_valid", ()))
    assert "rules may miss" in faults
    assert why in faults


def test_a_schema_without_marks_may_refer_as_it_likes() -> None:
    assert Places({"$ref": "#x", "$defs": {"x": {"$anchor": "x", "type": "string"}}}).blind is None
    assert Places({"properties": {"format": {"type": "string"}, "$ref": {"type": "string"}}}).blind is None


def test_a_fragment_is_held_to_its_language_behind_every_applicator() -> None:
    schema = Schema({"patternProperties": {"^q": {"x-fragment": "sql"}}, "prefixItems": [{"x-fragment": "shell"}]})
    assert attacks(schema, {"q1": "1; drop table x"})
    assert attacks(schema, ["a b"])
    assert not attacks(schema, {"q1": "a = 1"})

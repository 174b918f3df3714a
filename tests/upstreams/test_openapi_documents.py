"""OpenAPI documents as definitions, and calls as requests."""

from __future__ import annotations

import asyncio
import base64
import copy
import email
import gc
import gzip
import hashlib
import json
import weakref
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import orjson
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from interlock import Caller, Interlock
from interlock.call.connector import Definition, Discovered
from interlock.contract.contract import contract_of
from interlock.contract.executors import OWN_DESCRIPTION
from interlock.core.errors import Failure
from interlock.data.schema import Json, Schema
from interlock.registry.admission import TrialEvidence, examine, publish
from interlock.upstreams import openapi
from interlock.upstreams.manifests import import_all
from tests.support.openapi import document
from tests.support.upstream_servers import Answer, Got, HttpServer, json_answer, served

DOCUMENTS = sorted((Path(__file__).parent / "data" / "openapi").glob("*.json.gz"))
BASE = "https://api.example.com/v1"

# ── real documents ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.shows("OpenAPI", "discovery")
@pytest.mark.proves("EXEC-11")
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name.partition(".")[0])
def test_every_operation_of_a_real_document_is_admitted(path: Path) -> None:
    document = gzip.decompress(path.read_bytes())
    found = openapi.read(document, base_url=BASE)
    operations = [
        (where, method)
        for where, item in json.loads(document)["paths"].items()
        for method in item
        if method in openapi.METHODS
    ]
    assert len(operations) == len(found.tools) + len(found.refused) > 50
    assert found.refused == []
    imported = import_all(found.tools, upstream="api", kind="openapi", versions="1.0.0", accept_hints=True)
    for one in imported:
        assert one.manifest is not None, (one.definition.name, one.refused)
        digest = contract_of(one.manifest).digest
        assert examine(one.manifest, digest, {}, TrialEvidence(digest, True, "trial", "")).admitted
        reads = one.definition.native["method"] in ("GET", "HEAD")
        assert one.manifest.mutation_class == ("read_only" if reads else "write_irreversible")
        assert one.manifest.execution is not None
        native = {name: part for name, part in one.manifest.execution.native.items() if name != OWN_DESCRIPTION}
        assert native == one.definition.native
    for one in import_all(found.tools, upstream="api", kind="openapi", versions="1.0.0", accept_hints=False):
        assert one.manifest is not None
        assert one.manifest.mutation_class == "write_irreversible"


def test_the_same_document_reads_the_same_in_yaml() -> None:
    document = orjson.loads(gzip.decompress(DOCUMENTS[0].read_bytes()))
    in_yaml = yaml.dump(document, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))
    assert openapi.read(in_yaml) == openapi.read(document)


async def test_words_in_a_yaml_document_stay_the_words_they_are(tmp_path: Path) -> None:
    """By the rules of YAML 1.1, which OpenAPI does not use, `NO` is false, `12:30` is 750 and a date is no text."""
    text = """
openapi: 3.0.3
info: {title: trains, version: 1.0.0}
servers: [{url: https://api.example.com}]
paths:
  /trains:
    get:
      operationId: look
      parameters:
        - {name: country, in: query, schema: {type: string, enum: [DE, NO, SE]}}
        - {name: from, in: query, schema: {type: string, default: 12:30}}
        - {name: day, in: query, schema: {type: string, enum: [2020-01-01, 2020-12-31]}}
        - {name: on, in: query, schema: {type: boolean, default: true}}
      responses:
        200:
          description: ok
          content: {application/json: {schema: {type: object, properties: {on: {type: boolean}, null: {type: string}}}}}
"""
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        report = await app.upstreams.add(
            "it", "openapi", {"urls": ["https://api.example.com"], "openapi": openapi.parse(text)}, by=app.caller
        )
        assert [(one.name, one.state) for one in report.tools] == [("look", "admitted")]
        contract = (await app.catalog.resolve("it.look")).contract
        takes = contract.manifest.parameters["properties"]
        assert takes["country"]["enum"] == ["DE", "NO", "SE"]
        assert takes["from"]["default"] == "12:30"
        assert takes["day"]["enum"] == ["2020-01-01", "2020-12-31"]
        assert takes["on"]["type"] == "boolean"
        assert takes["on"]["default"] is True
        result = contract.manifest.result_schema
        assert result is not None
        assert list(result["properties"]) == ["on", "null"]


# ── a sample with everything ────────────────────────────────────────────────────────────────────────────────────────

OK: Json = {"200": {"description": "", "content": {"application/json": {"schema": {"type": "object"}}}}}


def one(operation: Json, path: str = "/things", method: str = "post", **facts: Any) -> Definition:
    found = openapi.read(document({path: {method: {"operationId": "op", "responses": OK, **operation}}}, **facts))
    assert found.refused == []
    return found.tools[0]


def refusal(operation: Json, path: str = "/things", **facts: Any) -> str:
    found = openapi.read(document({path: {"post": {"operationId": "op", "responses": OK, **operation}}}, **facts))
    assert found.tools == []
    ((name, reason),) = found.refused
    assert name == "op"
    return reason


def parameter(name: str, where: str, schema: Json | None = None, **facts: Any) -> Json:
    return {"name": name, "in": where, "schema": schema or {"type": "string"}, **facts}


def body(schema: Json, media: str = "application/json", *, required: bool = True, **facts: Any) -> Json:
    return {"required": required, "content": {media: {"schema": schema, **facts}}}


def request(definition: Definition, **arguments: Any) -> openapi.Request:
    assert Schema(definition.input_schema).valid(arguments), arguments
    return openapi.build(definition.native, arguments, BASE)


@pytest.mark.proves("EXEC-11")
def test_every_argument_goes_where_the_document_says() -> None:
    definition = one(
        {
            "summary": "Make a thing",
            "parameters": [
                parameter("id", "path", required=True),
                parameter("id", "query"),
                parameter("X-Trace", "header"),
                parameter("session", "cookie"),
                parameter("Authorization", "header"),
            ],
            "requestBody": body(
                {
                    "type": "object",
                    "properties": {"id": {"type": "integer"}, "name": {"type": "string"}, "made": {"readOnly": True}},
                    "required": ["name", "made"],
                }
            ),
        },
        path="/things/{id}",
    )
    assert set(definition.input_schema["properties"]) == {"id", "id_query", "X-Trace", "session", "id_body", "name"}
    assert definition.input_schema["required"] == ["id", "name"]
    assert (definition.title, definition.hints) == ("Make a thing", {"method": "POST"})
    made = request(definition, id="a b?", id_query="x&y=z", **{"X-Trace": "t"}, session="s;t", id_body=5, name="n")
    assert made.method == "POST"
    assert made.url == f"{BASE}/things/a%20b%3F?id=x%26y%3Dz"
    assert made.headers == {
        "Accept": "application/json",
        "X-Trace": "t",
        "Cookie": "session=s%3Bt",
        "Content-Type": "application/json",
    }
    assert orjson.loads(made.body or b"") == {"id": 5, "name": "n"}


@pytest.mark.parametrize(
    ("style", "explode", "value", "query"),
    [
        (None, None, "a b", "p=a%20b"),
        (None, None, True, "p=true"),
        (None, None, 1.5, "p=1.5"),
        (None, None, [1, 2], "p=1&p=2"),
        (None, False, [1, "a,b"], "p=1,a%2Cb"),
        ("form", False, {"a": 1, "b": 2}, "p=a,1,b,2"),
        ("form", True, {"a": 1, "b": "x y"}, "a=1&b=x%20y"),
        ("spaceDelimited", None, [1, 2], "p=1%202"),
        ("pipeDelimited", None, [1, 2], "p=1%7C2"),
        ("deepObject", True, {"a": {"b": 1}, "c": [2, 3]}, "p%5Ba%5D%5Bb%5D=1&p%5Bc%5D%5B0%5D=2&p%5Bc%5D%5B1%5D=3"),
    ],
)
def test_a_query_is_written_in_its_style(style: str | None, explode: bool | None, value: Any, query: str) -> None:
    said: Json = {} if style is None else {"style": style}
    if explode is not None:
        said["explode"] = explode
    definition = one({"parameters": [parameter("p", "query", {"description": "any"}, **said)]})
    assert request(definition, p=value).url.partition("?")[2] == query
    assert request(definition).url.partition("?")[2] == ""


@pytest.mark.parametrize(
    ("explode", "value", "path"),
    [(False, [1, 2], "1,2"), (False, {"a": 1}, "a,1"), (True, {"a": 1, "b": "x"}, "a=1,b=x"), (False, "é", "%C3%A9")],
)
def test_a_path_is_written_in_the_simple_style(explode: bool, value: Any, path: str) -> None:
    at = parameter("p", "path", {"description": "any"}, explode=explode, required=True)
    definition = one({"parameters": [at]}, path="/a/{p}/b")
    assert request(definition, p=value).url == f"{BASE}/a/{path}/b"


def test_a_parameter_written_as_json_is_sent_as_json() -> None:
    said = {"name": "p", "in": "query", "content": {"application/json": {"schema": {"type": "object"}}}}
    made = request(one({"parameters": [said]}), p={"a": [1]})
    assert parse_qsl(urlsplit(made.url).query) == [("p", '{"a":[1]}')]


@pytest.mark.parametrize(
    "value", ["..", ".", "../x", "x/..", "a/../b", "a/./b", "a\\b", "%2e%2e", "%2F", "%252f", "", "a\nb", "\0"]
)
def test_no_argument_leaves_its_segment_of_the_path(value: str) -> None:
    definition = one({"parameters": [parameter("p", "path", required=True)]}, path="/a/{p}/b")
    with pytest.raises(Failure) as caught:
        request(definition, p=value)
    assert caught.value.code == "E3305"


@pytest.mark.parametrize(("p", "q"), [(".", "."), ("a/.", "./b"), ("a/", "..")])
def test_two_arguments_in_one_segment_do_not_leave_it_together(p: str, q: str) -> None:
    both = [parameter("p", "path", required=True), parameter("q", "path", required=True)]
    with pytest.raises(Failure) as caught:
        request(one({"parameters": both}, path="/a/{p}{q}"), p=p, q=q)
    assert caught.value.code == "E3305"


def test_a_slash_in_an_argument_of_the_path_is_encoded() -> None:
    definition = one({"parameters": [parameter("p", "path", required=True)]}, path="/a/{p}/b")
    assert request(definition, p="docs/read me.md").url == f"{BASE}/a/docs%2Fread%20me.md/b"


@pytest.mark.parametrize(
    ("style", "explode", "value", "path"),
    [
        ("label", False, "blue", ".blue"),
        ("label", False, ["a", "b"], ".a,b"),
        ("label", True, ["a", "b"], ".a.b"),
        ("label", True, {"R": 1, "G": 2}, ".R=1.G=2"),
        ("matrix", False, "blue", ";p=blue"),
        ("matrix", False, ["a", "b"], ";p=a,b"),
        ("matrix", True, ["a", "b"], ";p=a;p=b"),
        ("matrix", False, {"R": 1, "G": 2}, ";p=R,1,G,2"),
        ("matrix", True, {"R": 1, "G": 2}, ";R=1;G=2"),
    ],
)
def test_a_path_is_written_in_the_label_and_matrix_styles(style: str, explode: bool, value: Any, path: str) -> None:
    at = parameter("p", "path", {"description": "any"}, style=style, explode=explode, required=True)
    assert request(one({"parameters": [at]}, path="/a/{p}/b"), p=value).url == f"{BASE}/a/{path}/b"


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("/#X-Amz-Target=Things.List", "/?q=1"),
        ("/a?kind=b&q={q}", "/a?kind=b&q=1"),
        ("/a{?q}", "/a?q=1"),
        ("a b/é", "/a%20b/%C3%A9?q=1"),
        ("/a%2Fb/users('x')", "/a%2Fb/users('x')?q=1"),
    ],
)
def test_a_path_may_hold_a_query_a_fragment_and_characters_that_are_encoded(path: str, url: str) -> None:
    assert request(one({"parameters": [parameter("q", "query")]}, path=path), q="1").url == BASE + url


def test_a_place_in_the_path_that_no_parameter_describes_is_an_argument() -> None:
    definition = one({}, path="/a/{p}/{rest+}")
    assert definition.input_schema["required"] == ["p", "rest"]
    assert request(definition, p="x", rest="y/z").url == f"{BASE}/a/x/y%2Fz"


@pytest.mark.parametrize("value", ["a\r\nX-Admin: 1", "a\nb", "\0", "\x7f"])
def test_no_argument_adds_a_header(value: str) -> None:
    with pytest.raises(Failure) as caught:
        request(one({"parameters": [parameter("X-A", "header")]}), **{"X-A": value})
    assert caught.value.code == "E3305"


def test_an_object_in_the_query_cannot_set_what_is_anothers() -> None:
    definition = one(
        {
            "parameters": [parameter("filter", "query", {"type": "object"}), parameter("limit", "query")],
            "security": [{"key": []}],
        },
        components={"securitySchemes": {"key": {"type": "apiKey", "in": "query", "name": "api_key"}}},
    )
    assert definition.native["security"] == [
        [{"id": "key", "type": "apiKey", "in": "query", "name": "api_key", "scopes": []}]
    ]
    for name in ("limit", "api_key"):
        with pytest.raises(Failure) as caught:
            request(definition, filter={name: "x"})
        assert caught.value.code == "E3305"


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(segment=TEXT, query=TEXT, reserved=TEXT, cookie=TEXT, field=TEXT)
def test_what_a_server_reads_is_what_was_sent_and_nothing_more(
    segment: str, query: str, reserved: str, cookie: str, field: str
) -> None:
    definition = one(
        {
            "parameters": [
                parameter("p", "path", required=True),
                parameter("q", "query"),
                parameter("r", "query", allowReserved=True),
                parameter("c", "cookie"),
            ],
            "requestBody": body(
                {"type": "object", "properties": {"f": {"type": "string"}}}, "application/x-www-form-urlencoded"
            ),
        },
        path="/a/{p}/b",
    )
    try:
        made = request(definition, p=segment, q=query, r=reserved, c=cookie, f=field)
    except Failure as failure:
        if failure.code != "E3305":
            raise
        return
    parts = urlsplit(made.url)
    assert [unquote(part) for part in parts.path.split("/")] == ["", "v1", "a", segment, "b"]
    assert parse_qsl(parts.query, keep_blank_values=True) == [("q", query), ("r", reserved)]
    assert parts.fragment == ""
    name, _, value = made.headers["Cookie"].partition("=")
    assert (name, unquote(value)) == ("c", cookie)
    assert parse_qsl((made.body or b"").decode(), keep_blank_values=True) == [("f", field)]
    assert made.url.isascii()


@pytest.mark.shows("OpenAPI", "call")
@pytest.mark.proves("EXEC-11")
async def test_operations_are_invoked_as_the_document_describes_them(tmp_path: Path) -> None:
    pet: Json = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    gives: Json = {"200": {"description": "", "content": {"application/json": {"schema": pet}}}}
    at = parameter("id", "path", required=True)
    paths: Json = {
        "/pets/{id}": {
            "get": {
                "operationId": "getPet",
                "parameters": [at, parameter("tags", "query", {"type": "array"}), parameter("X-Note", "header")],
                "responses": gives,
            },
            "put": {"operationId": "putPet", "parameters": [at], "requestBody": body(pet), "responses": gives},
            "delete": {"operationId": "silent", "parameters": [at], "responses": {"200": {"description": "done"}}},
            "head": {
                "operationId": "peek",
                "parameters": [at],
                "responses": {"204": {"description": "there"}},
            },
        }
    }
    async with HttpServer.open() as server, Interlock.open(tmp_path) as app:
        server.otherwise = lambda _: json_answer({"name": "Rex"})
        config: Json = {"urls": [server.url], "allow_private": True, "openapi": document(paths), "accept_hints": True}
        report = await app.upstreams.add("pets", "openapi", config, by=app.caller)
        assert {offered.name: offered.state for offered in report.tools} == {
            "getPet": "admitted",
            "putPet": "admitted",
            "silent": "admitted",
            "peek": "admitted",
        }
        classes = {one.row.address: one.contract.mutation.mutation_class for one in await app.catalog.everything()}
        assert classes == {
            "pets.get_pet": "read_only", "pets.peek": "read_only", "pets.put_pet": "write_irreversible",
            "pets.silent": "write_irreversible",
        }  # fmt: skip
        shown = (await app.catalog.resolve("pets.get_pet")).contract
        assert shown.output.document == pet
        got = await app.call("pets.get_pet", {"id": "a b", "tags": ["x", "y&z"], "X-Note": "hello"})
        assert got.unwrap() == {"name": "Rex"}
        # A PUT may change things: a person is asked, until the operator says what it is.
        assert (await app.call("pets.put_pet", {"id": "1", "name": "Max"}, key="k1")).pending
        overlay = {"tools": {"putPet": {"mutation_class": "read_only"}}}
        await app.upstreams.refresh("pets", by=app.caller, overlay=overlay)
        await app.upstreams.accept("pets", by=app.caller, reason="looked at")
        assert (await app.call("pets.put_pet", {"id": "1", "name": "Max"})).ok
        climbing = await app.call("pets.get_pet", {"id": "../admin"})
        assert climbing.error is not None
        assert climbing.error.code == "E3305"
    assert [(one.method, one.path) for one in server.got] == [
        ("GET", "/pets/a%20b?tags=x&tags=y%26z"),
        ("PUT", "/pets/1"),
    ]
    assert server.got[0].headers["x-note"] == "hello"
    assert (server.got[1].headers["content-type"], server.got[1].body) == ("application/json", b'{"name":"Max"}')


# ── bodies and results ──────────────────────────────────────────────────────────────────────────────────────────────


BODIES: list[Json] = [
    {"type": "array", "items": {"type": "string"}},
    {"type": "object", "additionalProperties": {"type": "string"}},
    {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
    {"oneOf": [{"type": "object"}, {"type": "string"}]},
    {"type": "object", "properties": {"a": {}}, "minProperties": 1},
    {"allOf": [{"type": "object", "properties": {"a": {}}}]},
]


@pytest.mark.parametrize("schema", BODIES)
def test_a_body_whose_properties_cannot_stand_alone_is_one_argument(schema: Json) -> None:
    definition = one({"requestBody": body(schema)})
    assert list(definition.input_schema["properties"]) == ["body"]
    value: Any = ["x"] if schema.get("type") == "array" else {"a": "x"}
    assert orjson.loads(request(definition, body=value).body or b"") == value


def test_an_optional_body_is_sent_only_if_something_is_in_it() -> None:
    definition = one({"requestBody": body({"type": "object", "properties": {"a": {"type": "string"}}}, required=False)})
    assert request(definition).body is None
    assert request(definition, a="x").body == b'{"a":"x"}'
    demanding: Json = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    whole = one({"requestBody": body(demanding, required=False)})
    assert request(whole).body is None
    assert not Schema(whole.input_schema).valid({"body": {}})


def test_a_form_is_written_as_the_document_says() -> None:
    schema: Json = {
        "type": "object",
        "properties": {"list": {"type": "array"}, "plain": {"type": "object"}, "deep": {"type": "object"}},
    }
    how = {"deep": {"style": "deepObject", "explode": True}}
    definition = one({"requestBody": body(schema, "application/x-www-form-urlencoded", encoding=how)})
    made = request(definition, list=["a", "b c"], plain={"x": 1}, deep={"k": {"j": True}})
    assert made.headers["Content-Type"] == "application/x-www-form-urlencoded"
    assert parse_qsl((made.body or b"").decode()) == [
        ("list", "a"),
        ("list", "b c"),
        ("plain", '{"x":1}'),
        ("deep[k][j]", "true"),
    ]


@pytest.mark.proves("EXEC-11")
@pytest.mark.parametrize(
    ("operation", "words"),
    [
        ({"parameters": [parameter("p", "query", style="matrix")]}, "style `matrix`"),
        ({"parameters": [parameter("Cookie", "header", required=True)]}, "the header `Cookie`"),
        ({"requestBody": body({"type": "string"}, "multipart/form-data")}, "a form that is not an object"),
        ({"parameters": [parameter("p", "elsewhere")]}, "in neither path"),
        ({"parameters": [{"$ref": "#/components/parameters/Nope"}]}, "not in the document"),
        ({"parameters": [{"$ref": "other.yaml#/p"}]}, "another document"),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name_with_the_reason(operation: Json, words: str) -> None:
    assert words in refusal(operation)


@pytest.mark.parametrize("path", ["/a/../b", "/a/%2e%2e/b", "/a\\b", "/a\r\nb", "https://other.example/a"])
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    assert "path" in refusal({}, path=path)


@pytest.mark.supports("EXEC-11")
def test_results_are_read_by_status() -> None:
    text: Json = {"description": "", "content": {"text/plain": {}}}
    cases: list[tuple[Json, Json, Any]] = [
        ({"204": {"description": "gone"}}, {"204": "none"}, None),
        ({"200": text}, {"200": "text"}, "words"),
        ({**OK, "204": {"description": ""}}, {"200": "json", "204": "none"}, None),
        ({**OK, "202": {"description": "later"}}, {"200": "json", "202": "none"}, None),
        ({"2XX": OK["200"]}, {"2XX": "json"}, {"a": 1}),
    ]
    for responses, modes, value in cases:
        definition = one({"responses": responses})
        assert definition.native["responses"] == modes
        assert definition.output_schema is not None
        assert Schema(definition.output_schema).valid(value)
        assert not Schema(definition.output_schema).valid(17)


# ── schemas ─────────────────────────────────────────────────────────────────────────────────────────────────────────

TREE: Json = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#/components/schemas/Tree"}},
    },
    "required": ["name"],
}


@pytest.mark.supports("EXEC-11")
def test_a_schema_that_refers_to_itself_comes_with_its_definition() -> None:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Tree"}}}
    definition = one(
        {"requestBody": {"required": True, "content": content}, "responses": {"200": {"content": content}}},
        components={"schemas": {"Tree": TREE}},
    )
    assert set(definition.input_schema["properties"]) == {"name", "children"}
    assert Schema(definition.input_schema).valid({"name": "a", "children": [{"name": "b", "children": []}]})
    assert not Schema(definition.input_schema).valid({"name": "a", "children": [{"name": "b", "children": [{}]}]})
    assert Schema(definition.output_schema or {}).valid({"name": "a", "children": [{"name": "b"}]})
    assert not Schema(definition.output_schema or {}).valid({"name": "a", "children": [{}]})


OLD: list[tuple[Json, list[Any], list[Any]]] = [
    ({"type": "string", "nullable": True}, [None, "a"], [1]),
    ({"type": "string", "enum": ["a"], "nullable": True}, [None, "a"], ["b"]),
    ({"allOf": [{"$ref": "#/components/schemas/Tree"}], "nullable": True}, [None, {"name": "a"}], [{}]),
    ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, [2], [1]),
    ({"type": "integer", "maximum": 1, "exclusiveMaximum": False}, [1], [2]),
    ({"type": "string", "example": 5, "xml": {"name": "x"}}, ["a"], [5]),
]


@pytest.mark.parametrize(("schema", "fits", "unfit"), OLD)
def test_schemas_of_version_3_0_are_written_in_todays_words(schema: Json, fits: list[Any], unfit: list[Any]) -> None:
    definition = one(
        {"requestBody": body({"type": "object", "properties": {"p": schema}})},
        version="3.0.3",
        components={"schemas": {"Tree": TREE}},
    )
    assert all(Schema(definition.input_schema).valid({"p": value}) for value in fits)
    assert not any(Schema(definition.input_schema).valid({"p": value}) for value in unfit)


def test_servers_are_the_nearest_with_their_variables_and_in_full() -> None:
    servers = [{"url": "https://{region}.example.com", "variables": {"region": {"default": "eu"}}}, {"url": "/v2"}]
    paths: Json = {"/a": {"get": {"responses": OK}}, "/b": {"servers": [{"url": "/b"}], "get": {"responses": OK}}}
    found = openapi.read(document(paths, servers=servers), base_url="https://x.example/docs/openapi.json")
    assert [tool.native["servers"] for tool in found.tools] == [
        ["https://eu.example.com", "https://x.example/v2"],
        ["https://x.example/b"],
    ]
    assert [tool.name for tool in found.tools] == ["get_a", "get_b"]


@pytest.mark.parametrize(
    "text",
    ["swagger: '1.2'", "[]", "", "a: [", "openapi: 4.0.0", '{"openapi": "3.1.0"', "\x00"],
)
def test_what_is_no_openapi_3_document_is_refused(text: str) -> None:
    with pytest.raises(Failure) as caught:
        openapi.read(text)
    assert caught.value.code == "E3105"


def test_a_small_text_that_unfolds_into_a_huge_document_is_refused() -> None:
    layers = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    layers += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(Failure) as caught:
        openapi.read("\n".join([*layers, "openapi: 3.1.0"]))
    assert "too large" in caught.value.message


WORDS = st.sampled_from(["$ref", "type", "schema", "content", "in", "name", "get", "200"])
RANDOM = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab/#{}$", max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
WHOLE = document(
    {
        "/t/{id}": {
            "parameters": [{"$ref": "#/components/parameters/Id"}],
            "post": {
                "parameters": [parameter("q", "query", {"type": "array", "items": {"type": "string"}})],
                "requestBody": body({"$ref": "#/components/schemas/Tree"}),
                "responses": {**OK, "204": {"description": ""}},
                "security": [{"key": []}],
            },
        }
    },
    components={
        "schemas": {"Tree": TREE},
        "parameters": {"Id": parameter("id", "path", required=True)},
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    },
    servers=[{"url": "/x"}],
)


def _places(node: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = list(cast("Json", node).items()) if isinstance(node, dict) else []
    items += list(enumerate(cast("list[Any]", node))) if isinstance(node, list) else []
    return [found for key, part in items for found in [(*at, key), *_places(part, (*at, key))]]


@pytest.mark.parametrize(
    ("responses", "modes"),
    [
        ({"200": {"description": "fine"}}, {"200": "any"}),
        ({"200": {"description": "", "content": {"application/json": {}}}}, {"200": "any"}),
        ({"default": OK["200"]}, {"2XX": "any"}),
        ({"404": {"description": "none"}}, {"2XX": "any"}),
        ({}, {"2XX": "any"}),
    ],
)
def test_an_answer_that_the_document_does_not_describe_is_read_as_it_comes(responses: Json, modes: Json) -> None:
    definition = one({"responses": responses})
    assert (definition.output_schema, definition.native["responses"]) == ({}, modes)


@pytest.mark.proves("EXEC-11")
async def test_an_operation_without_a_response_schema_is_admitted_and_said_to_be_unchecked(tmp_path: Path) -> None:
    paths: Json = {"/a": {"get": {"operationId": "look", "responses": {"200": {"description": "fine"}}}}}
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:
        config: Json = {"urls": [server.url], "allow_private": True, "openapi": document(paths), "accept_hints": True}
        report = await app.upstreams.add("it", "openapi", config, by=app.caller)
        (offered,) = report.tools
        assert offered.state == "admitted", offered.reason
        assert any("not checked" in need for need in offered.needs)
        contract = (await app.catalog.resolve("it.look")).contract
        assert contract.output.document == {}
        assert "not checked" in contract.manifest.annotations["unchecked"][0]
        assert contract.manifest.description == "look, a tool of it: GET /a"
        answers = [json_answer([1]), Answer(body=b"words", media="text/plain"), Answer(body=b"", media="")]
        for answer, value in zip(answers, ([1], "words", None), strict=True):
            server.answers = [answer]
            assert (await app.call("it.look")).unwrap() == value


async def test_a_result_off_its_schema_fails_unless_the_operator_wants_a_warning(tmp_path: Path) -> None:
    pet: Json = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    gives: Json = {"200": {"description": "", "content": {"application/json": {"schema": pet}}}}
    paths: Json = {f"/{name}": {"get": {"operationId": name, "responses": gives}} for name in ("strict", "lax")}
    overlay = {"defaults": {"mutation_class": "read_only"}, "tools": {"lax": {"off_schema": "warn"}}}
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:
        server.otherwise = lambda _: json_answer({"name": "Rex"})
        config: Json = {"urls": [server.url], "allow_private": True, "openapi": document(paths)}
        await app.upstreams.add("it", "openapi", config, by=app.caller, overlay=overlay)
        server.otherwise = lambda _: json_answer({"name": 7})
        strict = await app.call("it.strict")
        assert strict.error is not None
        assert strict.error.code == "E3303"
        lax = await app.call("it.lax")
        assert lax.unwrap() == {"name": 7}
        assert lax.metadata["warnings"] == ["OUTPUT_OFF_SCHEMA at=/name"]


def _deep(levels: int = 60) -> Json:
    """A chain of definitions that is too long for one tool, and its last one, whose `end` is a number."""
    chain: Json = {
        f"L{level}": {
            "type": "object",
            "properties": {f"p{part}": {"type": "string"} for part in range(10)}
            | {"next": {"$ref": f"#/components/schemas/L{level + 1}"}},
        }
        for level in range(levels)
    }
    chain[f"L{levels}"] = {"type": "object", "properties": {"end": {"type": "integer"}}}
    return chain


def _nested(end: Any, levels: int = 60) -> Json:
    value: Json = {"end": end}
    for _ in range(levels):
        value = {"next": value}
    return value


def _chained(schemas: Json, *names: str) -> Json:
    gives: Json = {
        "200": {"description": "", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/L0"}}}}
    }
    paths: Json = {f"/{name}": {"get": {"operationId": name, "responses": gives}} for name in names}
    return document(paths, components={"schemas": schemas})


@pytest.mark.parametrize("by", ["file", "address"])
async def test_a_result_whose_schema_is_too_large_for_its_tool_is_checked_whole(tmp_path: Path, by: str) -> None:
    large = _chained(_deep(), "strict", "lax", "own")
    overlay: Json = {
        "defaults": {"mutation_class": "read_only"},
        "tools": {"lax": {"off_schema": "warn"}, "own": {"result_schema": {"type": "object"}}},
    }
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:
        answers: Json = {"end": 7}
        server.otherwise = lambda got: json_answer(large if got.path == "/openapi.json" else _nested(answers["end"]))
        config: Json = {"urls": [server.url], "allow_private": True}
        config["openapi"] = large if by == "file" else f"{server.url}/openapi.json"
        report = await app.upstreams.add("it", "openapi", config, by=app.caller, overlay=overlay)
        assert {one.state for one in report.tools} == {"admitted"}
        strict = (await app.catalog.resolve("it.strict")).contract.manifest
        assert len(orjson.dumps(strict.result_schema)) < len(orjson.dumps(large)) / 2
        good = await app.call("it.strict")
        assert (good.value, good.metadata.get("warnings")) == (_nested(7), None)
        answers["end"] = "seven"
        failed = await app.call("it.strict")
        assert failed.error is not None
        assert (failed.error.code, failed.error.details) == (
            "E3303",
            {
                "violation": "TOOL_OUTPUT_SCHEMA_VIOLATION",
                "faults": [{"pointer": "/next" * 60 + "/end", "message": 'is not of type "integer"; it is text'}],
            },
        )
        lax = await app.call("it.lax")
        assert lax.value == _nested("seven")
        assert lax.metadata["warnings"] == [f"OUTPUT_OFF_SCHEMA at={'/next' * 60}/end"]
        own = await app.call("it.own")
        assert (own.value, own.metadata.get("warnings")) == (_nested("seven"), None), (
            "the overlay's schema is the whole"
        )


async def test_a_result_says_that_it_was_checked_in_part_where_the_document_is_gone_or_another(tmp_path: Path) -> None:
    schemas = _deep()
    overlay = {"defaults": {"mutation_class": "read_only"}}
    gone, end = False, cast("Any", 7)
    async with HttpServer.open() as server:

        def answer(got: Got) -> Answer:
            if got.path == "/openapi.json":
                return Answer(status=404) if gone else json_answer(_chained(schemas, "look"))
            return json_answer(_nested(end))

        server.otherwise = answer
        config: Json = {"urls": [server.url], "allow_private": True, "openapi": f"{server.url}/openapi.json"}
        async with Interlock.open(tmp_path, housekeeping=False) as app:
            await app.upstreams.add("it", "openapi", config, by=app.caller, overlay=overlay)
        gone, end = True, "seven"
        server.got.clear()
        async with Interlock.open(tmp_path, housekeeping=False) as app:
            for _ in range(2):
                result = await app.call("it.look")
                assert (result.ok, result.metadata["warnings"]) == (True, ["RESULT_CHECKED_IN_PART"])
            assert [got.path for got in server.got].count("/openapi.json") == 1, "it is left alone for a minute"
        gone = False
        schemas["L60"]["properties"]["end"] = {"type": "string"}
        async with Interlock.open(tmp_path, housekeeping=False) as app:
            result = await app.call("it.look")
            assert (result.ok, result.metadata["warnings"]) == (True, ["RESULT_CHECKED_IN_PART"])
            # What the tool does not hold is pinned as well.
            await app.upstreams.refresh("it", by=app.caller)
            changed = await app.call("it.look")
            assert changed.error is not None
            assert changed.error.code == "E3210"
            await app.upstreams.accept("it", by=app.caller, reason="it is text now")
            accepted = await app.call("it.look")
            assert (accepted.ok, accepted.metadata.get("warnings")) == (True, None)


async def test_calls_that_were_made_do_not_wait_for_a_document_that_hangs(tmp_path: Path) -> None:
    """They end with their results, and in time: a write would be one of unknown outcome otherwise."""
    large = _chained(_deep(), "ask", "bid", "cut")
    hangs, overlay = False, {"defaults": {"mutation_class": "read_only"}}
    async with HttpServer.open() as server:

        def answer(got: Got) -> Answer:
            if got.path != "/openapi.json":
                return json_answer(_nested(7))
            return Answer(hang=True) if hangs else json_answer(large)

        server.otherwise = answer
        config: Json = {"urls": [server.url], "allow_private": True, "openapi": f"{server.url}/openapi.json"}
        async with Interlock.open(tmp_path, housekeeping=False) as app:
            await app.upstreams.add("it", "openapi", config, by=app.caller, overlay=overlay)
        hangs = True
        server.got.clear()
        async with Interlock.open(tmp_path, housekeeping=False) as app:
            made = await asyncio.gather(*(app.call(f"it.{name}", timeout_s=3) for name in ("ask", "bid", "cut")))
            for result in made:
                assert (result.ok, result.metadata.get("warnings")) == (True, ["RESULT_CHECKED_IN_PART"]), result.error
        assert [got.path for got in server.got].count("/openapi.json") == 1, "all wait for the same one"


@pytest.mark.parametrize("levels", [300, 1000])
async def test_a_result_that_is_nested_as_deep_as_its_reader_allows_is_refused(tmp_path: Path, levels: int) -> None:
    """The whole schema leads back to itself through many others, each of which takes its part of the stack."""
    again: Json = {"$ref": "#/components/schemas/L0"}
    for at in range(80):
        again = {"anyOf": [again, {"type": "null"}]} if at % 2 else {"allOf": [again]}
    schemas = _deep()
    schemas["L60"]["properties"]["again"] = again
    schemas["L0"]["properties"]["again"] = {"$ref": "#/components/schemas/L60/properties/again"}
    body = b'{"again":' * levels + b"7" + b"}" * levels
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:
        config: Json = {"urls": [server.url], "allow_private": True, "openapi": _chained(schemas, "look")}
        overlay = {"defaults": {"mutation_class": "read_only"}}
        await app.upstreams.add("it", "openapi", config, by=app.caller, overlay=overlay)
        server.otherwise = lambda _: Answer(body=body)
        refused = await app.call("it.look")
        assert refused.error is not None
        assert refused.error.code == "E3303"


@pytest.mark.shows("OpenAPI", "changed definitions")
async def test_an_operation_that_its_document_describes_otherwise_is_not_called(tmp_path: Path) -> None:
    operation: Json = {"operationId": "look", "summary": "Looks at all things.", "responses": OK}
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:
        server.otherwise = lambda got: json_answer(
            document({"/things": {"get": operation}}) if got.path == "/openapi.json" else {}
        )
        config: Json = {"urls": [server.url], "allow_private": True, "openapi": f"{server.url}/openapi.json"}
        overlay = {"defaults": {"mutation_class": "read_only"}}
        (offered,) = (await app.upstreams.add("it", "openapi", config, by=app.caller, overlay=overlay)).tools
        assert (await app.call(offered.address)).ok
        operation["summary"] = "Looks at all things, and mails them to somebody."
        await app.upstreams.refresh("it", by=app.caller)
        server.got.clear()
        refused = await app.call(offered.address)
        assert refused.error is not None
        assert (refused.error.code, server.got) == ("E3210", [])


PDF = b"%PDF-1.7\x00\xff"


async def test_bytes_are_sent_from_base64_and_received_as_artifacts(tmp_path: Path) -> None:
    picture: Json = {"type": "string", "format": "binary", "description": "The picture."}
    form: Json = {
        "type": "object",
        "properties": {"file": picture, "more": {"type": "array", "items": picture}, "note": {"type": "string"},
                       "tags": {"type": "object"}},
        "required": ["file"],
    }  # fmt: skip
    pdf: Json = {"200": {"description": "", "content": {"application/pdf": {"schema": picture}}}}
    paths: Json = {
        "/raw": {"put": {"operationId": "raw", "requestBody": body(picture, "image/png"), "responses": pdf}},
        "/form": {"post": {"operationId": "form", "requestBody": body(form, "multipart/form-data"), "responses": OK}},
        "/text": {"post": {"operationId": "text", "requestBody": body({}, "text/plain"), "responses": OK}},
    }
    overlay = {"defaults": {"mutation_class": "read_only"}}
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:
        config: Json = {"urls": [server.url], "allow_private": True, "openapi": document(paths)}
        report = await app.upstreams.add("it", "openapi", config, by=app.caller, overlay=overlay)
        assert [one.state for one in report.tools] == ["admitted"] * 3
        takes = (await app.catalog.resolve("it.form")).contract.input.document["properties"]["file"]
        assert takes == {"type": "string", "description": "The picture.", "contentEncoding": "base64"}
        server.answers = [Answer(body=PDF, media="application/pdf"), json_answer({}), json_answer({})]
        got = await app.call("it.raw", body=base64.b64encode(PDF).decode())
        assert got.unwrap() == {"path": "answer.pdf", "mediaType": "application/pdf", "size": len(PDF)}
        (artifact,) = got.artifacts
        assert artifact.sha256 == hashlib.sha256(PDF).hexdigest()
        data = base64.b64encode(PDF).decode()
        tried = await app.call("it.form", file=data, more=[data, data], note='a"\r\nb', tags={"a": 1})
        assert tried.ok, tried.error
        assert (await app.call("it.text", body="plain words")).ok
        # A file that an earlier call of the caller left is sent by its reference, by this caller alone.
        server.answers = [Answer(body=b"%PDF", media="application/pdf"), json_answer({})]
        assert (await app.call("it.raw", body=artifact.ref)).ok
        assert (await app.call("it.form", file=artifact.ref, more=[data, artifact.ref])).ok
        for ref, caller in ((artifact.ref, Caller(id="local:eve")), ("payload:01JC.1", app.caller)):
            theirs = await app.call("it.raw", body=ref, caller=caller)
            assert theirs.error is not None
            assert theirs.error.code == "E3702"
        wrong = await app.call("it.raw", body="not base64!")
        assert wrong.error is not None
        assert wrong.error.code == "E3308"
    raw, sent, text, raw_again, sent_again = server.got
    assert raw_again.body == PDF
    assert sent_again.body.count(PDF) == 3
    assert (raw.body, raw.headers["content-type"]) == (PDF, "image/png")
    assert (text.body, text.headers["content-type"]) == (b"plain words", "text/plain")
    head = f"Content-Type: {sent.headers['content-type']}\r\n\r\n".encode()
    parts = [
        (part.get_param("name", header="content-disposition"), part.get_payload(decode=True))
        for part in email.message_from_bytes(head + sent.body).walk()
        if not part.is_multipart()
    ]
    assert parts == [("file", PDF), ("more", PDF), ("more", PDF), ("note", b'a"\r\nb'), ("tags", b'{"a":1}')]


SWAGGER: Json = {
    "swagger": "2.0",
    "info": {"title": "Pets", "version": "1"},
    "host": "api.example.com",
    "basePath": "/v2",
    "schemes": ["http", "https"],
    "consumes": ["application/json"],
    "paths": {
        "/pets/{id}": {
            "parameters": [{"$ref": "#/parameters/Id"}],
            "get": {
                "operationId": "getPet",
                "parameters": [
                    {"name": "tags", "in": "query", "type": "array", "items": {"type": "string"},
                     "collectionFormat": "pipes"},
                    {"name": "limit", "in": "query", "type": "integer", "default": 10, "maximum": 5, "minimum": 1,
                     "exclusiveMinimum": True},
                ],
                "responses": {"200": {"description": "", "schema": {"$ref": "#/definitions/Pet"}}},
                "security": [{"basic": []}],
            },
            "put": {
                "operationId": "putPet",
                "parameters": [
                    {"name": "pet", "in": "body", "required": True, "schema": {"$ref": "#/definitions/Pet"}}
                ],
                "responses": {"204": {"description": ""}},
            },
            "post": {
                "operationId": "addPicture",
                "consumes": ["multipart/form-data"],
                "parameters": [
                    {"name": "file", "in": "formData", "type": "file", "required": True},
                    {"name": "note", "in": "formData", "type": "string"},
                ],
                "responses": {"200": {"$ref": "#/responses/Picture"}},
                "produces": ["image/png"],
            },
        }
    },
    "parameters": {"Id": {"name": "id", "in": "path", "required": True, "type": "string"}},
    "responses": {"Picture": {"description": "", "schema": {"type": "file"}}},
    "definitions": {
        "Pet": {
            "type": "object",
            "properties": {"id": {"type": "integer", "readOnly": True}, "name": {"type": "string", "x-nullable": True},
                           "mother": {"$ref": "#/definitions/Pet"}},
            "required": ["id", "name"],
        }
    },
    "securityDefinitions": {"basic": {"type": "basic"}},
}  # fmt: skip


@pytest.mark.supports("EXEC-11")
def test_a_swagger_2_document_is_read_like_an_openapi_document() -> None:
    found = openapi.read(SWAGGER)
    assert found.refused == []
    assert found.about["servers"] == openapi.servers_of(SWAGGER)
    assert found.about["servers"] == ["https://api.example.com/v2", "http://api.example.com/v2"]
    get, put, post = found.tools
    assert get.native["security"] == [[{"id": "basic", "type": "http", "scheme": "basic", "scopes": []}]]
    assert openapi.build(get.native, {"id": "7", "tags": ["a", "b"]}, BASE).url == f"{BASE}/pets/7?tags=a%7Cb"
    assert get.input_schema["properties"]["limit"]["exclusiveMinimum"] == 1
    assert get.output_schema is not None
    assert get.output_schema["type"] == "object"
    assert Schema(get.output_schema).valid({"id": 1, "name": "Rex", "mother": {"id": 2, "name": "Ada"}})
    assert not Schema(get.output_schema).valid({"id": 1, "name": "Rex", "mother": {"id": 2}})
    assert request(put, id="7", name="Rex", mother={"name": "Ada"}).body == b'{"name":"Rex","mother":{"name":"Ada"}}'
    assert post.input_schema["properties"]["file"] == {"type": "string", "contentEncoding": "base64"}
    assert post.native["responses"] == {"200": "file"}


@pytest.mark.parametrize("how", ["yaml", "json", "python"])
async def test_a_number_beyond_64_bits_does_not_fail_a_document(how: str, tmp_path: Path) -> None:
    large: Json = {"type": "integer", "minimum": 0, "maximum": 2**80, "default": -(2**70)}
    paths: Json = {"/a": {"get": {"operationId": "look", "parameters": [parameter("p", "query", large)],
                                  "responses": OK}}}  # fmt: skip
    whole: Any = document(paths)
    if how != "python":
        whole = openapi.parse(json.dumps(whole) if how == "json" else yaml.safe_dump(whole))
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        config: Json = {"urls": ["https://api.example.com"], "openapi": whole}
        report = await app.upstreams.add("it", "openapi", config, by=app.caller)
        assert [one.state for one in report.tools] == ["admitted"]
        takes = (await app.catalog.resolve("it.look")).contract.input
        assert takes.valid({"p": 2**62})
        assert not takes.valid({"p": -1})


def test_manifests_of_a_document_have_their_definitions_in_common_and_are_not_kept() -> None:
    pet: Json = {"type": "object", "x-internal": True, "properties": {"name": {"type": "string"}}}
    pets: Json = {"type": "array", "items": {"$ref": "#/components/schemas/Pet"}}
    answer = {"200": {"description": "", "content": {"application/json": {"schema": pets}}}}
    paths: Json = {f"/{name}": {"get": {"operationId": name, "responses": answer}} for name in ("cats", "dogs")}
    found = openapi.read(document(paths, components={"schemas": {"Pet": pet}}), base_url=BASE)
    said = copy.deepcopy(found.tools)
    cats, dogs = import_all(found.tools, upstream="api", kind="openapi", versions="1.0.0", accept_hints=True)
    assert cats.manifest is not None
    assert cats.manifest.result_schema is not None
    assert dogs.manifest is not None
    assert dogs.manifest.result_schema is not None
    kept = cats.manifest.result_schema["$defs"]["Pet"]
    assert kept == {"type": "object", "properties": {"name": {"type": "string"}}}
    assert dogs.manifest.result_schema["$defs"]["Pet"] is kept
    assert found.tools == said
    # What publishes a manifest has its text, and not the manifest as well.
    proof = TrialEvidence(cats.digest, True, "trial", "")
    unit, manifest = publish(cats.manifest, cats.digest, "upstream:api", proof, "test"), weakref.ref(cats.manifest)
    del cats
    gc.collect()
    assert callable(unit)
    assert manifest() is None


def test_schemas_that_refer_to_each_other_are_shared_and_a_response_is_bounded() -> None:
    names = [f"S{number}" for number in range(800)]
    schemas: Json = {
        name: {
            "type": "object",
            "description": f"About {name}.",
            "properties": {"id": {"type": "string"}}
            | {f"next{step}": {"$ref": f"#/components/schemas/S{(number * 7 + step) % 800}"} for step in range(8)},
            "required": ["id"],
        }
        for number, name in enumerate(names)
    }
    paths: Json = {
        f"/{name}": {
            "get": {
                "operationId": name,
                "responses": {
                    "200": {
                        "description": "",
                        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
                    }
                },
            }
        }
        for name in names[:20]
    }
    found = openapi.read(document(paths, components={"schemas": schemas}))
    assert found.refused == []
    imported = import_all(found.tools, upstream="api", kind="openapi", versions="1.0.0", accept_hints=True)
    assert all(one.manifest is not None for one in imported)
    first = imported[0]
    assert not any("checked in part" in need for need in first.needs)
    assert len({one.native["whole_result"] for one in found.tools}) == 20
    assert first.manifest is not None
    schema = Schema(first.manifest.result_schema or {})
    assert schema.document["type"] == "object"
    assert not schema.valid({"id": "a", "next1": {}})  # near: checked
    assert sum(len(orjson.dumps(one.output_schema)) for one in found.tools) < 2_000_000


@given(changes=st.lists(st.tuples(st.sampled_from(_places(WHOLE)), RANDOM), min_size=1, max_size=3))
def test_a_document_with_anything_in_it_is_read_or_refused_and_never_breaks_the_reader(
    changes: list[tuple[tuple[Any, ...], Any]],
) -> None:
    changed = copy.deepcopy(WHOLE)
    for place, value in changes:
        node: Any = changed
        try:
            for step in place[:-1]:
                node = node[step]
            node[place[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took the place away
    try:
        found: Discovered = openapi.read(changed, base_url=BASE)
    except Failure as failure:
        if failure.code != "E3105":
            raise
        return
    import_all(found.tools, upstream="u", kind="openapi", versions="1.0.0")


@pytest.mark.parametrize(
    ("facts", "at"), [({}, ""), ({"servers": [{"url": "/api"}]}, "/api"), ({"servers": [{"url": "../v2"}]}, "/v2")]
)
async def test_a_service_is_where_its_document_is_unless_that_says_otherwise(
    facts: Json, at: str, tmp_path: Path
) -> None:
    from fastapi import FastAPI

    app = FastAPI(openapi_url="/docs/openapi.json", **facts)

    def offer(prefix: str) -> None:
        @app.get(f"{prefix}/hello", include_in_schema=not prefix)
        async def hello(name: str) -> dict[str, str]:  # pyright: ignore[reportUnusedFunction] - the app holds it
            """Greet somebody by name."""
            return {"hello": name, "at": prefix}

    for prefix in ("", "/api", "/v2"):
        offer(prefix)
    async with served(app) as base, Interlock.open(tmp_path, housekeeping=False) as interlock:
        document = f"{base}/docs/openapi.json"
        config = {"openapi": document, "urls": [base], "allow_private": True, "accept_hints": True}
        report = await interlock.upstreams.add("hi", "openapi", config, by=interlock.caller)
        (one,) = report.tools
        assert one.state == "admitted", one.reason
        said = (await interlock.call(one.address, name="ada")).unwrap()
        assert said == {"hello": "ada", "at": at}

"""OpenAPI documents as definitions, and calls as requests."""

from __future__ import annotations

import copy
import gzip
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import orjson
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from interlock import Interlock
from interlock.call.connector import Definition, Discovered
from interlock.contract.contract import contract_of
from interlock.core.errors import Failure
from interlock.data.schema import Json, Schema
from interlock.registry.admission import Evidence, examine
from interlock.upstreams import openapi
from interlock.upstreams.manifests import import_all
from tests.upstreams.servers import HttpServer, json_answer, served

DOCUMENTS = sorted((Path(__file__).parent / "data" / "openapi").glob("*.json.gz"))
BASE = "https://api.example.com/v1"

# ── real documents ──────────────────────────────────────────────────────────────────────────────────────────────────

REFUSED = {
    "airflow": {},
    "discourse": {
        "createUpload": "its body is `multipart/form-data`",
        **dict.fromkeys(
            (
                "downloadBackup", "sendDownloadBackupEmail", "deleteBadge", "deletePost", "getTopicByExternalId",
                "removeTopic", "bookmarkTopic", "updateEmail", "updateUsername", "changePassword",
            ),
            "its success response has no schema",
        ),
    },
    "github": {
        "markdown/render-raw": "its body is `text/plain`",
        "repos/upload-release-asset": "its body is `application/octet-stream`",
    },
    "twilio-conversations": {},
}  # fmt: skip


@pytest.mark.proves("EXEC-11")
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name.partition(".")[0])
def test_every_operation_of_a_real_document_is_admitted_or_refused_with_its_reason(path: Path) -> None:
    document = gzip.decompress(path.read_bytes())
    found = openapi.read(document, base_url=BASE)
    operations = [
        (where, method)
        for where, item in orjson.loads(document)["paths"].items()
        for method in item
        if method in openapi.METHODS
    ]
    assert len(operations) == len(found.tools) + len(found.refused) > 50
    expected = REFUSED[path.name.partition(".")[0]]
    assert {name for name, _ in found.refused} == expected.keys()
    assert all(reason.startswith(expected[name]) for name, reason in found.refused)
    imported = import_all(found.tools, upstream="api", kind="openapi", versions="1.0.0", accept_hints=True)
    for one in imported:
        assert one.manifest is not None, (one.definition.name, one.refused)
        digest = contract_of(one.manifest).digest
        assert examine(one.manifest, digest, {}, Evidence(digest, True, "trial", "")).admitted
        reads = one.definition.native["method"] in ("GET", "HEAD")
        assert one.manifest.mutation_class == ("read_only" if reads else "write_irreversible")
        assert one.manifest.execution is not None
        assert one.manifest.execution.native == one.definition.native
    for one in import_all(found.tools, upstream="api", kind="openapi", versions="1.0.0", accept_hints=False):
        assert one.manifest is not None
        assert one.manifest.mutation_class == "write_irreversible"


def test_the_same_document_reads_the_same_in_yaml() -> None:
    document = orjson.loads(gzip.decompress(DOCUMENTS[0].read_bytes()))
    in_yaml = yaml.dump(document, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))
    assert openapi.read(in_yaml) == openapi.read(document)


# ── a sample with everything ────────────────────────────────────────────────────────────────────────────────────────

OK: Json = {"200": {"description": "", "content": {"application/json": {"schema": {"type": "object"}}}}}


def document(paths: Json, version: str = "3.1.0", **parts: Any) -> Json:
    return {"openapi": version, "info": {"title": "t", "version": "1"}, "paths": paths, **parts}


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


@pytest.mark.parametrize("value", ["..", ".", "a/b", "../x", "a\\b", "%2e%2e", "%2F", "%252f", "", "a\nb", "\0"])
def test_no_argument_leaves_its_segment_of_the_path(value: str) -> None:
    definition = one({"parameters": [parameter("p", "path", required=True)]}, path="/a/{p}/b")
    with pytest.raises(Failure) as caught:
        request(definition, p=value)
    assert caught.value.code == "E3305"


def test_two_arguments_in_one_segment_do_not_leave_it_together() -> None:
    both = [parameter("p", "path", required=True), parameter("q", "path", required=True)]
    with pytest.raises(Failure) as caught:
        request(one({"parameters": both}, path="/a/{p}{q}"), p=".", q=".")
    assert caught.value.code == "E3305"


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
    async with HttpServer.open() as server, Interlock.open(tmp_path) as lock:
        server.otherwise = lambda _: json_answer({"name": "Rex"})
        config: Json = {"urls": [server.url], "allow_private": True, "openapi": document(paths), "accept_hints": True}
        report = await lock.upstreams.add("pets", "openapi", config, by=lock.caller)
        assert {offered.name: offered.state for offered in report.tools} == {
            "getPet": "admitted",
            "putPet": "admitted",
            "silent": "refused",
            "peek": "admitted",
        }
        classes = {one.row.address: one.contract.mutation.mutation_class for one in await lock.catalog.everything()}
        assert classes == {
            "pets.get_pet": "read_only", "pets.peek": "read_only", "pets.put_pet": "write_irreversible",
        }  # fmt: skip
        shown = (await lock.catalog.resolve("pets.get_pet")).contract
        assert shown.output.document == pet
        got = await lock.call("pets.get_pet", {"id": "a b", "tags": ["x", "y&z"], "X-Note": "hello"})
        assert got.unwrap() == {"name": "Rex"}
        # A PUT may change things: a person is asked, until the operator says what it is.
        assert (await lock.call("pets.put_pet", {"id": "1", "name": "Max"}, key="k1")).pending
        overlay = {"tools": {"putPet": {"mutation_class": "read_only"}}}
        await lock.upstreams.refresh("pets", by=lock.caller, overlay=overlay)
        await lock.upstreams.accept("pets", by=lock.caller, reason="looked at")
        assert (await lock.call("pets.put_pet", {"id": "1", "name": "Max"})).ok
        climbing = await lock.call("pets.get_pet", {"id": "../admin"})
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
        ({"responses": {"200": {"description": "fine"}}}, "its success response has no schema"),
        ({"responses": {"200": {"description": "", "content": {"application/json": {}}}}}, "has no schema"),
        ({"responses": {"default": OK["200"]}}, "has no schema"),
        ({"responses": {}}, "has no schema"),
        ({"responses": {"200": {"content": {"application/zip": {}}}}}, "`application/zip`"),
        ({"requestBody": body({}, "multipart/form-data")}, "`multipart/form-data`"),
        ({"parameters": [parameter("p", "query", style="matrix")]}, "style `matrix`"),
        ({"parameters": [parameter("Host", "header")]}, "the header `Host`"),
        ({"parameters": [parameter("p", "elsewhere")]}, "in neither path"),
        ({"parameters": [{"$ref": "#/components/parameters/Nope"}]}, "not in the document"),
        ({"parameters": [{"$ref": "other.yaml#/p"}]}, "another document"),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name_with_the_reason(operation: Json, words: str) -> None:
    assert words in refusal(operation)


@pytest.mark.parametrize("path", ["/a/../b", "/a?b=c", "/a#b", "a", "/a%2fb", "/{p}", "/a\r\nb"])
def test_a_path_that_is_not_plain_is_refused(path: str) -> None:
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
    ["swagger: '2.0'", "[]", "", "a: [", "openapi: 4.0.0", '{"openapi": "3.1.0"', "\x00"],
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
    async with served(app) as base, Interlock.open(tmp_path, housekeeping=False) as lock:
        document = f"{base}/docs/openapi.json"
        config = {"openapi": document, "urls": [base], "allow_private": True, "accept_hints": True}
        report = await lock.upstreams.add("hi", "openapi", config, by=lock.caller)
        (one,) = report.tools
        assert one.state == "admitted", one.reason
        said = (await lock.call(one.address, name="ada")).unwrap()
        assert said == {"hello": "ada", "at": at}

"""Tools as the model providers write them, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Interlock, Result
from interlock.call.media import parts_of
from interlock.contract.contract import Contract, contract_of
from interlock.contract.manifest import parse_manifest
from interlock.contract.wire_names import provider_name
from interlock.core.errors import Failure
from interlock.data.schema import Json, Schema
from interlock.registry.admission import TrialEvidence, examine
from interlock.upstreams import formats
from interlock.upstreams.formats import Provider
from interlock.upstreams.manifests import import_all
from interlock.upstreams.overlay import parse_overlay
from interlock.upstreams.provider_answers import answer
from tests.support.calls import SIX, records
from tests.support.upstream_servers import HttpServer, json_answer

PROVIDERS: tuple[Provider, ...] = ("openai-chat", "openai-responses", "anthropic", "gemini")
TAKES: Json = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Which city.", "minLength": 1},
        "unit": {"enum": ["c", "f"], "description": "Which unit."},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
}


def contract(parameters: Json = TAKES, address: str = "weather.forecast") -> Contract:
    namespace, _, tool_id = address.partition(".")
    return contract_of(
        parse_manifest(
            {
                "namespace": namespace,
                "tool_id": tool_id,
                "version": "1.0.0",
                "name": "Forecast",
                "description": "Says what the weather will be",
                "provider": "weather",
                "protocol": "custom",
                "parameters": parameters,
                "result_schema": {"type": "string"},
                "required_permissions": [],
                "mutation_class": "read_only",
                "idempotency": {},
                "observability": {},
            }
        )
    )


# ── out ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("EXEC-12")
def test_a_contract_is_declared_in_each_providers_form_with_strict_and_deferred_loading_kept() -> None:
    strict: Json = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Which city. (minLength: 1)"},
            "unit": {"anyOf": [{"enum": ["c", "f"], "description": "Which unit."}, {"type": "null"}]},
            "days": {"type": ["integer", "null"], "description": "(minimum: 1, maximum: 9)"},
        },
        "required": ["city", "unit", "days"],
        "additionalProperties": False,
    }
    named = {"name": "weather__forecast", "description": "Says what the weather will be"}
    declared = [formats.declare(contract(), one, strict=True, defer_loading=True) for one in PROVIDERS]
    assert declared == [
        {"type": "function", "function": {**named, "parameters": strict, "strict": True}},
        {"type": "function", **named, "parameters": strict, "strict": True, "defer_loading": True},
        {**named, "input_schema": strict, "strict": True, "defer_loading": True},
        {**named, "parametersJsonSchema": TAKES},
    ]
    loose = [formats.declare(contract(), one) for one in PROVIDERS]
    assert loose[0]["function"] == {**named, "parameters": TAKES, "strict": False}
    assert loose[2] == {**named, "input_schema": TAKES}


LOOSE: list[Json] = [
    {"type": "object"},
    {"type": "object", "properties": {}, "additionalProperties": True},
    {"type": "object", "properties": {"a": {"type": "object"}}},
    {"type": "object", "properties": {"a": {}}},
    {"type": "object", "properties": {"a": {"type": "array"}}},
    {"type": "object", "properties": {"a": {"allOf": [{"type": "string"}]}}},
    {"type": "object", "properties": {"a": {"not": {"type": "string"}}}},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "string"}}},
]


@pytest.mark.supports("EXEC-12")
@pytest.mark.parametrize("schema", LOOSE)
def test_a_schema_without_a_strict_form_is_declared_as_it_is(schema: Json) -> None:
    declared = formats.declare(contract(schema), "openai-responses", strict=True)
    assert (declared["strict"], declared["parameters"]) == (False, schema)
    assert "strict" not in formats.declare(contract(schema), "anthropic", strict=True)


def test_definitions_and_choices_have_a_strict_form() -> None:
    node: Json = {"type": "object", "properties": {"next": {"$ref": "#/definitions/N"}, "v": {"type": "string"}}}
    schema: Json = {
        "type": "object",
        "properties": {"n": {"$ref": "#/definitions/N", "description": "x"}, "o": {"oneOf": [{"type": "null"}]}},
        "definitions": {"N": node},
    }
    strict = formats.strict_form(schema)
    assert strict is not None
    assert strict["properties"]["n"] == {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}
    assert strict["properties"]["o"] == {"anyOf": [{"type": "null"}]}
    assert Schema(strict).valid({"n": {"next": None, "v": "x"}, "o": None})


SCALARS: list[Json] = [
    {"type": "string"},
    {"type": ["string", "null"]},
    {"enum": ["a", None]},
    {"enum": [1, 2]},
    {"const": "x"},
    {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
]


@st.composite
def schemas(draw: st.DrawFn, deep: int = 2) -> Json:
    inner = st.sampled_from(SCALARS) if deep == 0 else st.sampled_from(SCALARS) | schemas(deep - 1)
    lists = inner.map(lambda item: {"type": "array", "items": item})
    properties = draw(st.dictionaries(st.sampled_from("abcd"), inner | lists, max_size=3))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    return {"type": "object", "properties": properties, "required": required}


def instance(draw: st.DrawFn, schema: Json) -> Any:
    """A value of one of the schemas above."""
    if schema.get("type") == "object":
        names = [name for name in schema["properties"] if name in schema["required"] or draw(st.booleans())]
        return {name: instance(draw, schema["properties"][name]) for name in names}
    if schema.get("type") == "array":
        return [instance(draw, schema["items"]) for _ in range(draw(st.integers(0, 2)))]
    values: list[Any] = ["a", "x", None, 1, 2, True]
    return draw(st.sampled_from([value for value in values if Schema(schema).valid(value)]))


def padded(schema: Json, value: Any) -> Any:
    """The value as a model writes it in strict mode: null for what is left out."""
    if isinstance(value, dict) and "properties" in schema:
        said = cast("Json", value)
        return {name: padded(part, said.get(name)) for name, part in cast("Json", schema["properties"]).items()}
    if isinstance(value, list) and "items" in schema:
        return [padded(schema["items"], item) for item in cast("list[Any]", value)]
    return cast("Any", value)


@given(data=st.data())
def test_whatever_fits_the_contract_can_be_said_in_strict_mode_and_comes_back_fitting(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    value = data.draw(st.composite(instance)(schema))
    strict = formats.strict_form(schema)
    assert strict is not None
    said = padded(schema, value)
    assert Schema(strict).valid(said)
    back = formats.restored(schema, said)
    assert Schema(schema).valid(back)
    # What was left out may come back as the null that its schema takes; nothing else changes.
    assert padded(schema, back) == said


ADDRESS = st.from_regex(r"[a-z][a-z0-9_-]{0,40}\.[a-z][a-z0-9_]{2,50}", fullmatch=True)


@given(addresses=st.sets(ADDRESS | st.sampled_from(["a__b.cde", "a.b__cde", "a_.bcd", "a.bcd"]), max_size=8))
def test_every_address_has_a_name_of_its_own_that_providers_take_and_that_leads_back(addresses: set[str]) -> None:
    names = {provider_name(address) for address in addresses}
    assert len(names) == len(addresses)
    for address in addresses:
        name = provider_name(address)
        assert len(name) <= 64
        assert name.replace("-", "_").isidentifier()
        assert formats.address_of(name, addresses) == address


def test_a_name_that_was_never_given_out_is_unknown() -> None:
    with pytest.raises(Failure) as caught:
        formats.address_of("weather__forecasts", ["weather.forecast"])
    assert caught.value.code == "E3101"
    assert "did you mean `weather__forecast`?" in caught.value.message


# ── calls and answers ───────────────────────────────────────────────────────────────────────────────────────────────


def payload(provider: Provider, name: str, arguments: Json) -> Json:
    written = orjson.dumps(arguments).decode()
    match provider:
        case "openai-chat":
            return {"id": "c1", "type": "function", "function": {"name": name, "arguments": written}}
        case "openai-responses":
            return {"type": "function_call", "id": "fc", "call_id": "c1", "name": name, "arguments": written}
        case "anthropic":
            return {"type": "tool_use", "id": "c1", "name": name, "input": arguments}
        case "gemini":
            return {"functionCall": {"id": "c1", "name": name, "args": arguments}}


def answered(call: formats.ToolCall, result: Result) -> Json:
    return answer(call, parts_of(result), failed=not result.ok, value=result.value)[0]


@pytest.mark.proves("EXEC-12")
async def test_a_models_call_is_run_and_answered_in_its_providers_words(app: Interlock) -> None:
    answers: dict[str, Json] = {}
    for provider in PROVIDERS:
        name = provider_name("demo.add")
        call = formats.read_call(payload(provider, name, {"a": 2, "b": 3}))
        assert (call.provider, call.arguments, call.id) == (provider, {"a": 2, "b": 3}, "c1")
        result = await app.call(formats.address_of(call.name, await app.catalog.addresses()), call.arguments)
        answers[provider] = answered(call, result)
    assert answers == {
        "openai-chat": {"role": "tool", "tool_call_id": "c1", "content": "5"},
        "openai-responses": {"type": "function_call_output", "call_id": "c1", "output": "5"},
        "anthropic": {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "5"}]},
        "gemini": {"functionResponse": {"id": "c1", "name": "demo__add", "response": {"output": 5}}},
    }


async def test_a_failure_is_answered_as_one(app: Interlock) -> None:
    result = await app.call("demo.add", {"a": "x"})
    calls = [formats.read_call(payload(provider, "demo__add", {"a": "x"})) for provider in PROVIDERS]
    chat, responses, anthropic, gemini = (answered(call, result) for call in calls)
    assert chat["content"].startswith("INVALID_INPUT: ")
    assert responses["output"] == chat["content"]
    assert anthropic["is_error"] is True
    assert gemini["functionResponse"]["response"] == {"error": chat["content"]}


BROKEN: list[Any] = [
    None,
    [],
    {},
    {"type": "text", "text": "x"},
    {"type": "tool_use", "id": "1", "input": {}},
    {"type": "tool_use", "name": "a", "input": {}},
]
UNREADABLE: list[Json] = [
    {"type": "tool_use", "id": "1", "name": "a", "input": []},
    {"type": "function", "id": "1", "function": {"name": "a", "arguments": "{"}},
    {"type": "function_call", "call_id": "1", "name": "a", "arguments": "[1]"},
]


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_no_tool_call_is_refused(broken: Any) -> None:
    with pytest.raises(Failure) as caught:
        formats.read_call(broken)
    assert caught.value.code == "E3004"


@pytest.mark.parametrize("call", UNREADABLE)
def test_arguments_that_are_no_object_are_the_models_mistake(call: Json) -> None:
    read = formats.read_call(call)
    with pytest.raises(Failure, match="send one JSON object") as caught:
        _ = read.arguments
    assert caught.value.code == "E3301"


def test_a_call_without_arguments_has_none() -> None:
    assert formats.read_call({"functionCall": {"name": "a"}}).arguments == {}
    call = {"type": "function", "id": "1", "function": {"name": "a", "arguments": ""}}
    assert formats.read_call(call).arguments == {}


# ── in ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("EXEC-12")
def test_every_providers_declarations_become_contracts_once_the_overlay_says_what_they_give_back() -> None:
    gemini: Json = {
        "name": "gem",
        "description": "A function of Gemini's",
        "parameters": {
            "type": "OBJECT",
            "properties": {"p": {"type": "STRING", "nullable": True, "maxLength": "3", "description": "One."}},
        },
    }
    document: list[Json] = [
        {"type": "function", "function": {"name": "chat", "description": "A chat function", "parameters": TAKES}},
        {"type": "function", "name": "resp", "strict": True, "parameters": TAKES, "output_schema": {"type": "string"}},
        {"name": "anthro", "description": "One of Anthropic's", "input_schema": TAKES, "defer_loading": True},
        {"functionDeclarations": [gemini, {"name": "none"}]},
        {"type": "web_search"},
    ]
    found = formats.definitions({"tools": document}, native={"url": "https://tools.example.com"})
    assert [tool.name for tool in found.tools] == ["chat", "resp", "anthro", "gem", "none"]
    assert found.refused == [("web_search", "it is not a function; it has no schema")]
    assert found.tools[1].native == {
        "protocol": "function_calling",
        "name": "resp",
        "strict": True,
        "url": "https://tools.example.com",
    }
    assert found.tools[2].native["defer_loading"] is True
    shape = Schema(found.tools[3].input_schema)
    assert shape.valid({"p": None})
    assert shape.valid({"p": "abc"})
    assert not shape.valid({"p": "abcd"})
    refused = import_all(found.tools, upstream="fns", kind="http", versions="1.0.0")
    assert [one.definition.name for one in refused if one.manifest is not None] == ["resp"]
    said = {one.name: {"result_schema": {"type": "string"}} for one in found.tools}
    for one in import_all(
        found.tools, upstream="fns", kind="http", versions="1.0.0", overlay=parse_overlay({"tools": said})
    ):
        assert one.manifest is not None, one.refused
        digest = contract_of(one.manifest).digest
        assert examine(one.manifest, digest, {}, TrialEvidence(digest, True, "trial", "")).admitted


@pytest.mark.proves("EXEC-12")
async def test_a_function_that_a_provider_declared_is_registered_and_called_like_any_tool(tmp_path: Path) -> None:
    declared: Json = {"name": "forecast", "description": "Says what the weather will be", "input_schema": TAKES}
    served = [
        {"name": one.name, "description": one.description, "method": "POST", "path": "/do", "input_schema": TAKES}
        for one in formats.definitions(declared).tools
    ]
    overlay = {"tools": {"forecast": {"mutation_class": "read_only", "result_schema": {"type": "string"}}}}
    async with HttpServer.open() as server, Interlock.open(tmp_path) as app:
        server.otherwise = lambda _: json_answer("sunny")
        config: Json = {"urls": [server.url], "allow_private": True, "tools": served}
        await app.upstreams.add("fns", "http", config, by=app.caller, overlay=overlay)
        registered = (await app.catalog.resolve("fns.forecast")).contract
        assert formats.declare(registered, "anthropic")["name"] == "fns__forecast"
        said = formats.read_call(payload("anthropic", "fns__forecast", {"city": "Ulm", "unit": None, "days": 2}))
        arguments = formats.restored(registered.input.document, said.arguments)
        result = await app.call(formats.address_of(said.name, await app.catalog.addresses()), arguments)
        assert answered(said, result)["content"] == [{"type": "text", "text": "sunny"}]
        assert [record["phases"] for record in records(app)] == [SIX]
    assert [(got.method, got.path, orjson.loads(got.body)) for got in server.got] == [
        ("POST", "/do", {"city": "Ulm", "days": 2})
    ]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_goes_out_comes_back_in(provider: Provider) -> None:
    found = formats.definitions(formats.declare(contract(), provider))
    assert [(one.name, one.input_schema) for one in found.tools] == [("weather__forecast", TAKES)]

"""A loop that talks to a model provider: declarations out, the model's tool calls in, messages back."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import unquote

import pytest

from interlock import Hook, HookResult
from interlock.api.tools import Tools
from interlock.upstreams import formats
from interlock.upstreams.formats import Provider
from tests import sample
from tests.support.providers import PROVIDERS, asked, declared, name_of
from tests.support.rest import World, refused
from tests.support.rest import world as world
from tests.support.upstream_servers import HttpServer, json_answer

Json = dict[str, Any]
EXEC_12 = pytest.mark.proves("EXEC-12")


@EXEC_12
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_what_is_offered_to_a_model_can_be_asked_for_as_the_model_asks(world: World, provider: Provider) -> None:
    offered = (await world.get("/v1/tools/declarations", provider=provider, strict="true")).json()["tools"]
    names = {name_of(one) for one in offered}
    assert {"demo__add", "demo__increment"} <= names
    assert "idempotency_key" not in json.dumps(offered)
    for given in ({"a": 2, "b": 3}, {"a": 2, "b": None}):  # a strict form writes what is left out as null
        answer = (await world.post("/v1/tools/calls", {"call": asked(provider, "demo__add", given)})).json()
        assert answer["state"] == "succeeded", answer
        assert "call_1" in json.dumps(answer["message"])
        assert ("5" if given["b"] else "7") in json.dumps(answer["message"])
    record = world.records("closed")[-1]
    assert record["native"] == {"function_name": "demo__add", "tool_call_id": "call_1"}


@EXEC_12
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_tool_call_that_is_handed_on_twice_is_made_once(world: World, provider: Provider) -> None:
    call = asked(provider, "demo__increment", {"name": provider}, ident=f"call-{provider}")
    first = (await world.post("/v1/tools/calls", {"call": call})).json()
    again = (await world.post("/v1/tools/calls", {"call": call})).json()
    assert first["message"] == again["message"]
    assert sample.world.counters[provider] == 1
    other = asked(provider, "demo__increment", {"name": provider}, ident="another")
    await world.post("/v1/tools/calls", {"call": other})
    assert sample.world.counters[provider] == 2


@pytest.mark.proves("IDEM-01")
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("ident", [None, "", "has space", 7])
async def test_a_write_that_a_model_asks_for_without_a_proper_id_gets_no_key_and_does_not_run(
    world: World, provider: Provider, ident: Any
) -> None:
    call = asked(provider, "demo__increment", {"name": provider}, ident=ident)
    if ident is None:
        inner = call.get("functionCall", call)
        del inner["call_id" if provider == "openai-responses" else "id"]
    answer = await world.post("/v1/tools/calls", {"call": call})
    if answer.status_code == 200:
        assert world.records("closed")[-1]["error_code"] == "E3307"
        assert world.records("closed")[-1].get("idempotencyKey") in (None, ident)
    else:
        refused(answer, 400, "E3004")
    assert sample.world.runs == 0
    assert world.app.journal.reader.all("SELECT COUNT(*) FROM reservation") == [(0,)]


@EXEC_12
async def test_a_failure_and_a_wait_are_messages_for_the_model_and_nonsense_is_refused(world: World) -> None:
    wrong = (await world.post("/v1/tools/calls", {"call": asked("anthropic", "demo__add", {"a": "many"})})).json()
    assert wrong["message"]["is_error"]
    assert "not a whole number" in wrong["message"]["content"][0]["text"]
    # So is a denial: a result in the conversation, like any other.
    world.app.hook(Hook(id="no", when="pre", tools="demo.shout", run=lambda _: HookResult(permission="deny")))
    shout = asked("anthropic", "demo__shout", {"text": "x"})
    denied = await world.post("/v1/tools/calls", {"call": shout})
    assert (denied.status_code, denied.json()["state"]) == (200, "denied")
    message = denied.json()["message"]
    assert (message["type"], message["tool_use_id"], message["is_error"]) == ("tool_result", shout["id"], True)
    assert message["content"][0]["text"].startswith("AUTHORIZATION_DENIED")
    assert world.records("closed")[-1]["states"][-1] == "denied"
    waits = (await world.post("/v1/tools/calls", {"call": asked("anthropic", "demo__send", {"to": "a"})})).json()
    assert waits["state"] == "awaiting_approval"
    assert "is_error" not in waits["message"]
    refused(await world.post("/v1/tools/calls", {"call": {"type": "tool_use"}}), 400, "E3004")
    narrow = await world.token("scout", user="alice", tools=("demo.add",))
    only = (await world.get("/v1/tools/declarations", narrow, provider="gemini")).json()["tools"]
    assert [name_of(one) for one in only] == ["demo__add"]
    hidden = await world.post("/v1/tools/calls", {"call": asked("gemini", "demo__increment", {"name": "x"})}, narrow)
    error: str = hidden.json()["message"]["functionResponse"]["response"]["error"]
    assert error.startswith("TOOL_NOT_FOUND")
    assert "demo__increment" not in error.partition("did you mean")[2]
    refused(await world.get("/v1/tools/declarations", provider="acme"), 400, "E3004")


async def test_declarations_come_in_pages_and_only_the_tools_of_a_page_are_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (await world.get("/v1/tools/declarations", provider="anthropic", limit="500")).json()
    assert whole["cursor"] is None
    read: list[str] = []
    real = formats.declare

    def noted(contract: Any, *args: Any, **named: Any) -> Json:
        read.append(str(contract.id))
        return real(contract, *args, **named)

    monkeypatch.setattr(formats, "declare", noted)
    pages: list[Json] = []
    cursor: str | None = None
    while not pages or cursor is not None:
        more = {} if cursor is None else {"cursor": cursor}
        page = (await world.get("/v1/tools/declarations", provider="anthropic", limit="2", **more)).json()
        assert len(read) == len(page["tools"]) <= 2
        read.clear()
        pages += page["tools"]
        cursor = page["cursor"]
    assert pages == whole["tools"]
    assert len(pages) > 2


async def test_a_call_that_a_model_asked_for_looks_at_its_tool_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("all tools were looked at")

    monkeypatch.setattr(Tools, "visible", refuse)
    answer = await world.post("/v1/tools/calls", {"call": asked("anthropic", "demo__add", {"a": 2, "b": 3})})
    assert answer.json()["state"] == "succeeded"


@EXEC_12
async def test_function_schemas_are_registered_over_rest_and_declared_again_with_their_flags(world: World) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Which city."}},
        "required": ["city"],
        "additionalProperties": False,
    }
    function: Json = {"name": "forecast", "description": "Says what the weather will be.", "input_schema": schema}
    config: Json = {
        "declarations": [{**function, "strict": True, "defer_loading": True}],
        "urls": ["https://functions.example.com"],
    }
    body = {"name": "fns", "kind": "functions", "config": config}
    refused(await world.post("/v1/upstreams", body), 403, "E3206")
    added = await world.post("/v1/upstreams", body, "root")
    assert added.status_code == 201, added.text
    assert [(one["name"], one["state"]) for one in added.json()["tools"]] == [("forecast", "admitted")]
    listed = (await world.get("/v1/tools/declarations", "root", provider="anthropic", limit="500")).json()["tools"]
    (told,) = [one for one in listed if one["name"] == "fns__forecast"]
    assert (told["strict"], told["defer_loading"]) == (True, True)
    assert (told["input_schema"]["required"], told["description"]) == (["city"], function["description"])
    flat = (await world.get("/v1/tools/declarations", "root", provider="openai-responses", limit="500")).json()["tools"]
    (told,) = [one for one in flat if one["name"] == "fns__forecast"]
    assert (told["strict"], told["defer_loading"]) == (True, True)


ODD = ("getUser", "get-user", "get_user", "get.user", "user:get")


@EXEC_12
@pytest.mark.parametrize("prefix", [True, False])
async def test_functions_of_an_upstream_are_offered_to_models_under_their_own_names(world: World, prefix: bool) -> None:
    """Where all providers allow the name. Names that become one id are told apart, and each leads to its function."""
    said: Json = {"mutation_class": "read_only", "result_schema": {"type": "string"}}
    async with HttpServer.open() as server:
        server.otherwise = lambda got: json_answer(unquote(got.path).strip("/"))
        takes = {"type": "object", "properties": {"name": {"type": "string"}}}
        functions = [declared("anthropic", name, takes) for name in ODD]
        config = {"declarations": functions, "urls": [server.url], "allow_private": True, "prefix": prefix}
        overlay: Json = {"defaults": {"mutation_class": "read_only"}, "tools": dict.fromkeys(ODD, said)}
        report = await world.app.upstreams.add("fns", "functions", config, by=world.app.caller, overlay=overlay)
        assert report.count("admitted") == len(ODD), report
        head = "fns__" if prefix else ""
        kept = {f"{head}{name}": name for name in ("getUser", "get-user", "get_user")}
        called: set[str] = set()
        for provider in PROVIDERS:
            offered = (await world.get("/v1/tools/declarations", provider=provider, limit="500")).json()["tools"]
            names = [name_of(one) for one in offered if "Says something" in json.dumps(one)]
            assert len(set(names)) == len(ODD)
            assert kept.keys() <= set(names)
            assert all(re.fullmatch("[A-Za-z_][A-Za-z0-9_-]{0,63}", name) for name in names)
            for name in names:
                answer = (await world.post("/v1/tools/calls", {"call": asked(provider, name, {"name": "a"})})).json()
                assert answer["state"] == "succeeded", (name, answer)
                (path,) = [one for one in ODD if f'"{one}"' in json.dumps(answer["message"], ensure_ascii=False)] or [
                    ""
                ]
                called.add(path)
                assert kept.get(name, path) == path
        assert called == set(ODD), "and every function was reached"

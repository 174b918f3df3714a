"""What upstreams of every kind leave out of their schemas: documentation is a warning, other properties are let in."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from interlock import Interlock
from interlock.contract.upstream_kinds import KINDS
from interlock.data.schema import Json
from tests.support.mcp_upstreams import sdk_server
from tests.support.openapi import document
from tests.support.providers import declared
from tests.support.upstream_servers import ShopServer
from tests.support.upstreams import MODULE

WORD: Json = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
NOBODY: Json = {"urls": ["http://127.0.0.1:9"], "allow_private": True}
OPERATION: Json = {
    "operationId": "look", "parameters": [{"name": "word", "in": "query", "schema": {"type": "string"}}],
    "responses": {"200": {"description": "done"}},
}  # fmt: skip
SAID: Json = {
    "name": "look",
    "description": "Look for one word.",
    "input_schema": WORD,
    "output_schema": {"type": "string"},
}


@asynccontextmanager
async def _mcp(folder: Path) -> AsyncGenerator[Json]:
    async with sdk_server() as url:
        yield {"url": url, "allow_private": True}


@asynccontextmanager
async def _grpc(folder: Path) -> AsyncGenerator[Json]:
    async with ShopServer.open(folder) as shop:
        yield {"targets": [f"127.0.0.1:{shop.port}"], "plaintext": True, "allow_private": True}


def _fixed(config: Json) -> Callable[[Path], AbstractAsyncContextManager[Json]]:
    @asynccontextmanager
    async def one(folder: Path) -> AsyncGenerator[Json]:
        yield config

    return one


# kind: its configuration, a tool of it, and a property of which the upstream says nothing but the type
BARE: dict[str, tuple[Callable[[Path], AbstractAsyncContextManager[Json]], str, str]] = {
    "mcp": (_mcp, "echo", "text"),
    "openapi": (_fixed({**NOBODY, "openapi": document({"/look": {"get": OPERATION}})}), "look", "word"),
    "http": (_fixed({**NOBODY, "tools": [{**SAID, "method": "GET", "path": "/{word}"}]}), "look", "word"),
    "grpc": (_grpc, "shop_v1_shop_get", "note"),
    "websocket": (
        _fixed({
            "urls": ["ws://127.0.0.1:9"], "allow_private": True, "id_field": "ref",
            "tools": [{**SAID, "send": {"ref": "{id}", "word": "{word}"}, "result": "found"}],
        }), "look", "word",
    ),
    "functions": (_fixed({**NOBODY, "declarations": [declared("openai-chat", "look", WORD)]}), "look", "word"),
    "langchain": (_fixed({"module": MODULE}), "shout", "text"),
}  # fmt: skip


def test_every_kind_is_looked_at() -> None:
    assert BARE.keys() == KINDS.keys()


@pytest.mark.proves("CONTRACT-06")
@pytest.mark.parametrize("kind", BARE)
async def test_a_tool_of_every_kind_is_admitted_with_a_warning_of_what_its_properties_lack(
    tmp_path: Path, kind: str
) -> None:
    make, tool, name = BARE[kind]
    async with make(tmp_path) as config, Interlock.open(tmp_path / "home", housekeeping=False) as app:
        await app.upstreams.add("far", kind, config, by=app.caller)
        contract = (await app.catalog.resolve(f"far.{tool}")).contract
        assert contract.input.properties[name].keys().isdisjoint(("description", "examples"))
        assert {f"`{name}` has no description", f"`{name}` has no example"} <= set(contract.warnings)


@pytest.mark.supports("CONTRACT-06")
@pytest.mark.parametrize(
    ("said", "opened"), [({}, True), ({"additionalProperties": True}, True), ({"additionalProperties": False}, False)]
)
async def test_the_schema_of_a_discovered_tool_stays_as_its_upstream_declared_it(
    tmp_path: Path, said: Json, opened: bool
) -> None:
    """A schema that says nothing of other properties lets them in, as JSON Schema has it."""
    tools: list[Any] = [{**SAID, "input_schema": {**WORD, **said}, "method": "GET", "path": "/{word}"}]
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        await app.upstreams.add("far", "http", {**NOBODY, "tools": tools}, by=app.caller)
        schema = (await app.catalog.resolve("far.look")).contract.input
        assert schema.document == {**WORD, **said}
        assert schema.valid({"word": "a", "other": 1}) is opened


NESTED: Json = {
    "type": "object",
    "properties": {
        "word": {"type": "string"},
        "line": {"type": "object", "properties": {"size": {"type": "integer"}}},
        "filter": {"type": "object"},
        "open": {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
    },
}


@pytest.mark.supports("CONTRACT-06")
@pytest.mark.parametrize("everywhere", [False, True])
async def test_an_operator_closes_a_schema_that_says_nothing_of_other_properties(
    tmp_path: Path, everywhere: bool
) -> None:
    """What declares no property, and what the upstream has declared as open, stays open."""
    tools: list[Any] = [
        {**SAID, "name": name, "input_schema": NESTED, "method": "GET", "path": "/{word}"} for name in ("look", "see")
    ]
    closed: Json = {"closed": True}
    overlay: Json = {"defaults": closed} if everywhere else {"tools": {"look": closed}}
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        await app.upstreams.add("far", "http", {**NOBODY, "tools": tools}, by=app.caller, overlay=overlay)
        schemas = {name: (await app.catalog.resolve(f"far.{name}")).contract.input for name in ("look", "see")}
        assert schemas["look"].document["additionalProperties"] is False
        assert ("additionalProperties" in schemas["see"].document) is everywhere
        for name, schema in schemas.items():
            shut = everywhere or name == "look"
            assert schema.valid({"word": "a", "line": {"size": 1}, "filter": {"any": 1}, "open": {"b": 2}})
            assert schema.valid({"word": "a", "other": 1}) is not shut
            assert schema.valid({"word": "a", "line": {"other": 1}}) is not shut
        refused = await app.call("far.look", {"word": "a", "other": 1})
        assert refused.error is not None
        assert refused.error.code == "E3301"

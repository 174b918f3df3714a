"""Schemas and descriptions that go to models hold the upstream's own words, and none that were made up for it.

The upstreams here describe nothing at all. The only text that may be found is the description of the idempotency key,
which is an argument of Interlock's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import orjson

from interlock.data.schema import Json
from interlock.doors.mcp.listing import KEY
from tests.support.providers import declared
from tests.support.upstream_servers import Answer, Got, HttpServer, ShopServer, json_answer
from tests.support.wires import WIRES, Wires, opened

WORD: Json = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
OBJECT: Json = {"type": "object", "properties": {"word": {"type": "string"}, "parts": {"type": "array"}}}
TOOLS: list[Json] = [
    {"name": "look", "inputSchema": WORD, "outputSchema": OBJECT, "annotations": {"readOnlyHint": True}},
    {"name": "change", "inputSchema": WORD, "outputSchema": OBJECT},
    {"name": "say", "inputSchema": WORD},
]
DOCUMENT: Json = {
    "openapi": "3.1.0",
    "info": {"title": "words", "version": "1"},
    "paths": {
        "/{word}": {
            "get": {"operationId": "look", "responses": {"200": {"content": {"application/json": {"schema": OBJECT}}}}},
            "put": {
                "operationId": "change",
                "requestBody": {"required": True, "content": {"application/json": {"schema": OBJECT}}},
                "responses": {"200": {"content": {"application/json": {"schema": {"type": "string"}}}}},
            },
            "post": {"operationId": "send", "requestBody": {"content": {"text/plain": {}}}, "responses": {"204": {}}},
            "delete": {"operationId": "remove", "responses": {"200": {"content": {"image/png": {}}}}},
        }
    },
}


def answer(got: Got) -> Answer:
    """An MCP server of the handshake's era."""
    if got.method != "POST":
        return Answer(status=405)
    asked: Json = orjson.loads(got.body)
    results: Json = {
        "initialize": {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "words", "version": "1"},
        },
        "tools/list": {"tools": TOOLS},
        "tools/call": {"content": [], "structuredContent": {"word": "a"}},
        "ping": {},
    }
    if "id" not in asked:
        return Answer(status=202, body=b"")
    return json_answer({"jsonrpc": "2.0", "id": asked["id"], "result": results[asked["method"]]})


@asynccontextmanager
async def world(folder: Path) -> AsyncGenerator[Wires]:
    """A server with an upstream of each kind, none of which describes anything."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(HttpServer.open())
        server.otherwise = answer
        shop = await stack.enter_async_context(ShopServer.open(folder))
        wires = await stack.enter_async_context(opened(folder / "home"))
        http: Json = {"urls": [server.url], "allow_private": True}
        upstreams: list[tuple[str, str, Json]] = [
            ("api", "openapi", {**http, "openapi": DOCUMENT}),
            ("words", "mcp", {"url": f"{server.url}/mcp", "allow_private": True, "protocol": "handshake"}),
            ("shop", "grpc", {"targets": [f"127.0.0.1:{shop.port}"], "plaintext": True, "allow_private": True}),
            ("fns", "functions", {**http, "declarations": [declared("openai-chat", "look", WORD, description=False)]}),
        ]
        for name, kind, config in upstreams:
            report = await wires.app.upstreams.add(name, kind, config, by=wires.app.caller)
            assert {one.state for one in report.tools if "streaming" not in one.reason} == {"admitted"}, report
        yield wires


SCHEMAS = {
    "inputSchema", "outputSchema", "input_schema", "output_schema",
    "parameters", "parametersJsonSchema", "result_schema", "model_input_schema", "runtime_input_schema",
}  # fmt: skip


def members_of(node: Any) -> Iterator[tuple[str, Any]]:
    """All members of all objects in a document, but for what the key is described with."""
    if isinstance(node, list):
        for one in cast("list[Any]", node):
            yield from members_of(one)
    elif isinstance(node, dict):
        for name, part in cast("Json", node).items():
            if name != KEY:
                yield name, part
                yield from members_of(part)


def schemas_of(document: Any) -> list[Any]:
    return [part for name, part in members_of(document) if name in SCHEMAS]


async def test_no_text_in_what_models_are_told_is_made_up(tmp_path: Path) -> None:
    async with world(tmp_path) as wires:
        answers = {
            door: [
                orjson.loads(one) for tool in ("api.change", "words.change") for one in await wires.texts(door, tool)
            ]
            for door in WIRES
            if door != "grpc"
        }
        answers["grpc"] = [
            {"input_schema": orjson.loads(one.input_schema_json), "output_schema": orjson.loads(one.output_schema_json)}
            for one in await wires.discovered()
        ]
        for door, documents in answers.items():
            schemas = schemas_of(documents)
            assert len(schemas) > 3, door
            assert [text for text in members_of(schemas) if text[0] in ("description", "title", "$comment")] == [], door
        listed = answers["mcp-modern"][0]
        tools: list[Json] = listed["result"]["tools"]
        descriptions = {one["name"]: one.get("description", "") for one in tools}
        assert descriptions == {
            "api-look": "GET /{word}",
            "api-change": "PUT /{word}",
            "api-send": "POST /{word}",
            "api-remove": "DELETE /{word}",
            "words-look": "",
            "words-change": "",
            "words-say": "",
            "fns-look": "",
            "shop-shop_v1_shop_get": "rpc Get(shop.v1.GetRequest) returns (shop.common.Thing)",
            "shop-shop_v1_shop_put": "rpc Put(shop.common.Thing) returns (shop.common.Thing)",
            "shop-shop_v1_shop_list": "rpc List(shop.v1.GetRequest) returns (stream shop.common.Thing)",
            "shop-shop_v1_shop_echo": "rpc Echo(shop.v1.Everything) returns (shop.v1.Everything)",
        }
        own = {one["name"]: one["inputSchema"]["properties"] for one in tools}
        assert own["words-look"].keys() == {"word", KEY}
        assert own["words-look"]["word"] == {"type": "string"}

"""Compensation recipes: writes of an upstream that are undone by tools of the same upstream."""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from interlock import Interlock
from interlock.audit.chain import verify
from interlock.data.schema import Json
from interlock.upstreams.repository import Report
from tests.support import forked
from tests.support.calls import code, records
from tests.support.mcp_servers import notes as notes_server
from tests.support.providers import declared
from tests.support.upstream_servers import Answer, Asked, Got, HttpServer, ShopServer, SocketServer, json_answer, served

ROOT = Path(__file__).parents[2]
ADD: Json = {
    "mutation_class": "write_reversible",
    "undo": {
        "tool": "remove",
        "arguments": {"number": "/result/structuredContent/number"},
        "example": {"text": "trial"},
    },
}
CHANGE: Json = {
    "mutation_class": "write_reversible",
    "undo": {
        "before": {"tool": "read", "arguments": {"number": "/input/number"}},
        "tool": "change",
        "arguments": {"number": "/input/number", "text": "/before/structuredContent/text"},
        "example": {"number": 1, "text": "trial"},
    },
}
READ: Json = {"mutation_class": "read_only"}


class Notes:
    """The notes server behind Interlock, and the file it writes to."""

    def __init__(self, app: Interlock, file: Path, report: Report) -> None:
        self.app = app
        self.file = file
        self.states = {one.name: (one.state, one.reason) for one in report.tools}

    @property
    def lines(self) -> list[str]:
        return self.file.read_text().splitlines()


@asynccontextmanager
async def notes(home: Path, protocol: str = "auto", /, **tools: Any) -> AsyncGenerator[Notes]:
    file = home.parent / "notes.txt"
    file.write_text("first\n")
    async with Interlock.open(home, housekeeping=False) as app:
        command = [*forked.python(), "-m", "tests.support.mcp_servers.notes", str(file)]
        config = {"command": command, "cwd": str(ROOT), "protocol": protocol}
        report = await app.upstreams.add("notes", "mcp", config, by=app.caller, overlay={"tools": tools})
        yield Notes(app, file, report)


@pytest.mark.shows("MCP, handshake era", "undo")
@pytest.mark.shows("MCP 2026-07-28", "undo")
@pytest.mark.supports("EFFECT-02")
@pytest.mark.parametrize("protocol", ["handshake", "modern"])
async def test_a_write_is_undone_by_another_tool_with_what_its_result_says(home: Path, protocol: str) -> None:
    """Nobody is asked: the tool is honestly reversible, and its own undo is what the call stored."""
    async with notes(home, protocol, add=ADD) as world:
        done = await world.app.call("notes.add", {"text": "milk"}, key="one")
        assert done.ok, done.error
        assert world.lines == ["first", "milk"]
        (closed,) = records(world.app, done.invocation_id)
        assert closed["compensation"]["ref"] == f"undo:{done.invocation_id}"
        undone = await world.app.undo(done.invocation_id, key="undo-one")
        assert undone.ok, undone.error
        again = await world.app.undo(done.invocation_id, key="undo-one-again")
        assert (again.ok, again.replayed) == (True, True), "one undo per call"
        assert world.lines == ["first"]
        # Called by itself, the tool that undoes is what it was: irreversible, and a person is asked.
        assert (await world.app.call("notes.remove", {"number": 1}, key="two")).pending
        assert verify(world.app.home).faults == ()


async def test_what_was_there_before_is_read_and_written_back(home: Path) -> None:
    async with notes(home, change=CHANGE, read=READ) as world:
        done = await world.app.call("notes.change", {"number": 1, "text": "second"}, key="one")
        assert done.ok, done.error
        assert world.lines == ["second"]
        assert (await world.app.undo(done.invocation_id, key="undo-one")).ok
        assert world.lines == ["first"]


async def test_json_in_a_text_is_read_where_a_server_has_no_output_schema(home: Path) -> None:
    text = {"text": "/before/content/0/text", "at": "/note/text"}
    undo = {
        "before": {"tool": "read_text", "arguments": {"number": "/input/number"}},
        "tool": "change",
        "arguments": {"number": "/input/number", "text": text},
        "example": {"number": 1, "text": "trial"},
    }
    async with notes(home, change={**CHANGE, "undo": undo}, read_text=READ) as world:
        done = await world.app.call("notes.change", {"number": 1, "text": "second"}, key="one")
        assert (await world.app.undo(done.invocation_id, key="undo-one")).ok
        assert world.lines == ["first"]


async def test_without_a_before_image_nothing_is_written(home: Path) -> None:
    async with notes(home, change=CHANGE, read=READ) as world:
        failed = await world.app.call("notes.change", {"number": 9, "text": "second"}, key="one")
        assert failed.error is not None
        assert "nothing was changed" in failed.error.message
        assert world.lines == ["first"]
        assert code(await world.app.undo(failed.invocation_id, key="undo-one")) == "E3702"


async def test_admission_tries_every_recipe(home: Path) -> None:
    """The write is made and undone again, under the same governance as a call; one that fails is not admitted."""
    wrong = {**CHANGE["undo"], "arguments": {"number": {"value": 7}, "text": "/input/text"}}
    async with notes(home, add=ADD, change={**CHANGE, "undo": wrong}, read=READ) as world:
        assert world.states["add"][0] == "admitted", world.states
        state, reason = world.states["change"]
        assert (state, "undo undone" in reason) == ("refused", True), reason
        assert world.lines == ["trial"], "the write of the wrong recipe stands, that of the good one is gone"


async def test_a_recipe_whose_undo_does_not_bring_back_what_was_there_is_refused(home: Path) -> None:
    """The undo runs without an error, and writes something else back: the read after it tells."""
    undo = {**CHANGE["undo"], "arguments": {"number": "/input/number", "text": {"value": "x" * 1000}}}
    async with notes(home, change={**CHANGE, "undo": undo}, read=READ) as world:
        state, reason = world.states["change"]
        assert state == "refused"
        assert "what was there is not back" in reason
        assert "first" in reason, "the value before the write"
        assert "xxx" in reason, "the value after the undo"
        assert "x" * 300 not in reason, "quoted in part"


async def test_what_was_proven_of_an_undo_is_said(home: Path) -> None:
    async with notes(home, add=ADD, change=CHANGE, read=READ) as world:
        assert world.states["change"] == ("admitted", "")
        state, reason = world.states["add"]
        assert (state, "only that its undo runs" in reason) == ("admitted", True)
        (shown,) = [one for one in await world.app.upstreams.offers("notes") if one.name == "add"]
        assert shown.reason == reason


async def test_a_call_that_does_not_say_what_its_undo_needs_is_marked(home: Path) -> None:
    """The recipe works for its example, whose text has the number that the undo needs. Not every text has one."""
    number = {"text": "/input/text", "at": "/number"}
    undo = {"tool": "remove", "arguments": {"number": number}, "example": {"text": '{"number": 2}'}}
    async with notes(home, add={**ADD, "undo": undo}) as world:
        done = await world.app.call("notes.add", {"text": "milk"}, key="one")
        assert done.ok
        (closed,) = records(world.app, done.invocation_id)
        assert [one.partition(" ")[0] for one in closed["warnings"]] == ["NOT_UNDOABLE"]
        assert "compensation" not in closed


REFUSED = {
    "without a recipe": ({"add": {"mutation_class": "write_reversible"}}, "say in the overlay how it is undone"),
    "for an irreversible tool": ({"add": {"undo": ADD["undo"]}}, "write_irreversible"),
    "unknown tool": ({"add": {**ADD, "undo": {"tool": "remov"}}}, "did you mean `remove`"),
    "argument missing": ({"add": {**ADD, "undo": {"tool": "remove"}}}, "needs `number`"),
    "unknown argument": (
        {"add": {**ADD, "undo": {"tool": "remove", "arguments": {"numbr": "/input/text"}}}},
        "has no parameter `numbr`",
    ),
    "unknown input": (
        {"add": {**ADD, "undo": {"tool": "remove", "arguments": {"number": "/input/number"}}}},
        "not a parameter of the tool",
    ),
    "before without a read": (
        {"add": {**ADD, "undo": {"tool": "remove", "arguments": {"number": "/before/number"}}}},
        "needs `before`",
    ),
    "read that may write": ({"change": CHANGE}, "with a tool that only reads"),
    "no example": (
        {"add": {**ADD, "undo": {name: ADD["undo"][name] for name in ("tool", "arguments")}}},
        "add `example: {text: …}`",
    ),
    "example": (
        {"add": {**ADD, "undo": {**ADD["undo"], "example": {"text": 1}}}},
        "the example does not fit",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_recipe_that_cannot_work_is_refused_in_words(home: Path, name: str) -> None:
    tools, words = REFUSED[name]
    async with notes(home, **tools) as world:
        (tool,) = tools
        state, reason = world.states[tool]
        assert (state, words in reason) == ("refused", True), reason


DOCUMENT: Json = {
    "openapi": "3.1.0",
    "info": {"title": "Shop", "version": "1.0.0"},
    "paths": {
        "/prices/{sku}": {
            "parameters": [{"name": "sku", "in": "path", "required": True, "schema": {"type": "string"}}],
            "get": {
                "operationId": "getPrice",
                "summary": "The price of an article",
                "responses": {"200": {"description": "it", "content": {"application/json": {"schema": {
                    "type": "object", "properties": {"cents": {"type": "integer"}}}}}}},
            },
            "put": {
                "operationId": "setPrice",
                "summary": "Set the price of an article",
                "requestBody": {"required": True, "content": {"application/json": {"schema": {
                    "type": "object", "properties": {"cents": {"type": "integer"}}, "required": ["cents"]}}}},
                "responses": {"200": {"description": "it", "content": {"application/json": {"schema": {
                    "type": "object"}}}}},
            },
        }
    },
}  # fmt: skip


SKU: Json = {"sku": {"type": "string", "description": "the article"}}
CENTS: Json = {"cents": {"type": "integer", "description": "its price"}}
GET: Json = {"type": "object", "properties": SKU, "required": ["sku"]}
PUT: Json = {"type": "object", "properties": {**SKU, **CENTS}, "required": ["sku", "cents"]}
PRICE: Json = {"type": "object", "properties": CENTS, "required": ["cents"]}
OPERATIONS: tuple[Json, ...] = (
    {"name": "getPrice", "description": "The price of an article.", "input_schema": GET, "output_schema": PRICE},
    {"name": "setPrice", "description": "Set the price of an article.", "input_schema": PUT, "output_schema": PRICE},
)
LANGCHAIN = """
from langchain_core.tools import tool

PRICES = {"a1": 100}

@tool
def getPrice(sku: str) -> dict[str, int]:
    \"\"\"The price of an article.\"\"\"
    return {"cents": PRICES[sku]}

@tool
def setPrice(sku: str, cents: int) -> dict[str, int]:
    \"\"\"Set the price of an article.\"\"\"
    PRICES[sku] = cents
    return {"cents": cents}
"""


@asynccontextmanager
async def priced(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[tuple[Json, Json]]:
    """A service of one kind with the two operations: its configuration, and its prices."""
    prices: Json = {"a1": 100}
    if kind == "langchain":
        (folder / "priced_chain.py").write_text(LANGCHAIN)
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        importlib.invalidate_caches()
        yield {"module": "priced_chain"}, importlib.import_module("priced_chain").PRICES
        return
    if kind == "websocket":
        async with SocketServer.open() as socket:

            async def reply(message: Json, _: Any) -> list[Any]:
                given = message["params"]
                prices[given["sku"]] = given.get("cents", prices[given["sku"]])
                return [{"jsonrpc": "2.0", "id": message["id"], "result": {"cents": prices[given["sku"]]}}]

            socket.answer = reply
            tools = [{**one, "method": one["name"]} for one in OPERATIONS]
            yield {"urls": [socket.url], "allow_private": True, "tools": tools}, prices
        return
    async with HttpServer.open() as server:

        def answer(got: Got) -> Answer:
            given: Json = orjson.loads(got.body or b"{}")
            sku = given.get("sku") or got.path.rpartition("/")[2]
            prices[sku] = given.get("cents", prices[sku])
            return json_answer({"cents": prices[sku]})

        server.otherwise = answer
        place: Json = {"urls": [server.url], "allow_private": True}
        if kind == "openapi":
            yield {**place, "openapi": DOCUMENT}, prices
        elif kind == "functions":
            named = {"getPrice": GET, "setPrice": PUT}
            yield (
                {**place, "declarations": [declared("anthropic", name, takes) for name, takes in named.items()]},
                prices,
            )
        else:
            where = {"getPrice": "GET", "setPrice": "PUT"}
            tools = [{**one, "method": where[one["name"]], "path": "/prices/{sku}"} for one in OPERATIONS]
            yield {**place, "tools": tools}, prices


@pytest.mark.shows("OpenAPI", "undo")
@pytest.mark.shows("HTTP, described by a file", "undo")
@pytest.mark.shows("WebSocket", "undo")
@pytest.mark.shows("Function schemas of a provider", "undo")
@pytest.mark.shows("LangChain tools", "undo")
@pytest.mark.parametrize("kind", ["openapi", "http", "websocket", "functions", "langchain"])
async def test_an_operation_of_any_service_is_undone_the_same_way(
    home: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    undo = {
        "before": {"tool": "getPrice", "arguments": {"sku": "/input/sku"}},
        "tool": "setPrice",
        "arguments": {"sku": "/input/sku", "cents": "/before/cents"},
        "example": {"sku": "a1", "cents": 1},
    }
    read = {**READ, "result_schema": PRICE}
    write = {"mutation_class": "write_reversible", "undo": undo, "result_schema": PRICE}
    overlay = {"tools": {"getPrice": read, "setPrice": write}}
    async with (
        priced(kind, home.parent, monkeypatch) as (config, prices),
        Interlock.open(home, housekeeping=False) as app,
    ):
        report = await app.upstreams.add("shop", kind, config, by=app.caller, overlay=overlay)
        offered = {one.name: one for one in report.tools}
        assert offered["setPrice"].state == "admitted", offered["setPrice"].reason
        assert prices == {"a1": 100}
        done = await app.call(offered["setPrice"].address, {"sku": "a1", "cents": 250}, key="one")
        assert (done.ok, prices) == (True, {"a1": 250}), done.error
        assert (await app.undo(done.invocation_id, key="undo-one")).ok
        assert prices == {"a1": 100}


@pytest.mark.shows("gRPC", "undo")
async def test_a_method_of_a_grpc_service_is_undone_the_same_way(home: Path) -> None:
    names = {7: "seven"}
    async with ShopServer.open(home.parent) as server, Interlock.open(home, housekeeping=False) as app:

        async def answer(asked: Asked, _: Any) -> Any:
            number = asked.message.thing_id if asked.method == "Get" else asked.message.id
            if asked.method == "Put":
                names[number] = asked.message.name
            return server.message("shop.common.Thing")(id=number, name=names[number])

        server.answer = answer
        undo = {
            "before": {"tool": "shop.v1.Shop.Get", "arguments": {"thing_id": "/input/id"}},
            "tool": "shop.v1.Shop.Put",
            "arguments": {"id": "/input/id", "name": "/before/name"},
            "example": {"id": 7, "name": "trial"},
        }
        tools: Json = {
            "shop.v1.Shop.Get": READ,
            "shop.v1.Shop.Put": {"mutation_class": "write_reversible", "undo": undo},
        }
        config = {"targets": [f"127.0.0.1:{server.port}"], "plaintext": True, "allow_private": True}
        report = await app.upstreams.add("shop", "grpc", config, by=app.caller, overlay={"tools": tools})
        put = next(one for one in report.tools if one.name == "shop.v1.Shop.Put")
        assert put.state == "admitted", put.reason
        assert names == {7: "seven"}
        done = await app.call(put.address, {"id": 7, "name": "eight"}, key="one")
        assert (done.ok, names) == (True, {7: "eight"}), done.error
        assert (await app.undo(done.invocation_id, key="undo-one")).ok
        assert names == {7: "seven"}


@pytest.mark.shows("MCP over HTTP", "undo")
async def test_a_write_of_a_server_by_url_is_undone_the_same_way(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = home.parent / "notes.txt"
    file.write_text("first\n")
    monkeypatch.setattr(notes_server, "FILE", file)
    served_app = notes_server.server.streamable_http_app()
    async with served(served_app) as url, Interlock.open(home, housekeeping=False) as app:
        config = {"url": f"{url}/mcp", "allow_private": True}
        report = await app.upstreams.add("notes", "mcp", config, by=app.caller, overlay={"tools": {"add": ADD}})
        assert {one.name: one.state for one in report.tools}["add"] == "admitted"
        done = await app.call("notes.add", {"text": "milk"}, key="one")
        assert (done.ok, file.read_text()) == (True, "first\nmilk\n"), done.error
        assert (await app.undo(done.invocation_id, key="undo-one")).ok
        assert file.read_text() == "first\n"


async def test_a_changed_tool_of_a_recipe_keeps_the_recipe_out_until_a_person_accepts_it(home: Path) -> None:
    """What undoes a write is pinned like the write: an undo by a tool that is another one now does not run."""
    program = (ROOT / "tests/support/mcp_servers/notes.py").read_text()
    script, file = home.parent / "notes.py", home.parent / "notes.txt"
    script.write_text(program)
    async with Interlock.open(home, housekeeping=False) as app:
        config: Json = {"command": [sys.executable, str(script), str(file)]}
        await app.upstreams.add("notes", "mcp", config, by=app.caller, overlay={"tools": {"add": ADD}})
        done = await app.call("notes.add", {"text": "milk"}, key="one")
        assert done.ok, done.error
    script.write_text(program.replace("Remove the note with this number", "Remove all notes"))
    async with Interlock.open(home, housekeeping=False) as app:
        undone = await app.undo(done.invocation_id, key="undo-one")
        assert code(undone) == "E3210"
        report = await app.upstreams.refresh("notes", by=app.caller)
        states = {one.name: one.state for one in report.tools}
        assert (states["add"], states["remove"], states["read"]) == ("changed", "changed", "admitted")
        assert file.read_text() == "milk\n"

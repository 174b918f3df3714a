"""Parts of a large result over every endpoint: the same part, for the caller that made the call and nobody else."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from interlock import Interlock
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.data.schema import Json
from interlock.window.tokens import estimate
from tests.support.calls import admit
from tests.support.identities import did_of
from tests.support.orders import ORDERS, orders
from tests.support.wires import WIRES, Wires, wired

PARTS: list[Json] = [
    {},
    {"at": "/orders/1/name"},
    {"query": "orders[?id < `3`].name"},
    {"at": "/orders", "start": 198},
    {"at": "/orders/0/name", "start": -7, "stop": -2},
    {"query": "orders[].id", "start": 0, "stop": 3},
    {"at": "/orders", "tokens": 200},
]
REFUSED: list[Json] = [
    {"at": "/nothing"}, {"at": "orders"}, {"query": "orders["}, {"query": "a" * 1001}, {"start": 1},
    {"at": "/orders", "tokens": 1}, {"tokens": 0}, {"tokens": 100_000_001}, {"start": 2**41}, {"stop": -(2**41)},
]  # fmt: skip


@pytest_asyncio.fixture
async def wires(home: Path) -> AsyncGenerator[Wires]:
    async with Interlock.open(home, housekeeping=False, surface="search", surface_unloaded="load") as app:
        await admit(app, orders)
        async with wired(app) as opened:
            yield opened


async def _kept(wires: Wires) -> str:
    called = await wires.http.post("/v1/tools/invoke", json={"tool_id": "shop.orders", "parameters": {"many": 200}})
    return called.json()["payload_ref"]


def _mcp_tool(modern: bool) -> Any:
    async def read(wires: Wires, ref: str, part: Json) -> Json:
        arguments = {"ref": ref, "tokens": 20_000, **part}
        params = {"name": "read_result", "arguments": arguments}
        result = orjson.loads(await wires.mcp("tools/call", params, modern=modern))["result"]
        if result.get("isError"):
            return result["_meta"]["interlock/error"]
        assert orjson.loads(result["content"][0]["text"]) == result["structuredContent"]
        return result["structuredContent"]

    return read


def _over(wire: str) -> Any:
    async def read(wires: Wires, ref: str, part: Json) -> Json:
        return await wires.rows[wire].part(ref, part)

    return read


WAYS: dict[str, Any] = {
    **{wire: _over(wire) for wire in WIRES}, "mcp tool": _mcp_tool(True), "mcp tool handshake": _mcp_tool(False),
}  # fmt: skip


@pytest.mark.proves("LIFE-20")
async def test_every_endpoint_reads_the_same_part_and_nothing_is_stored_for_it(wires: Wires) -> None:
    ref = await _kept(wires)
    stored = wires.app.journal.reader.all("SELECT count(*) FROM payload")
    for part in PARTS:
        expected = await wires.rows["rest"].part(ref, part)
        assert "value" in expected, part
        for name, read in WAYS.items():
            told = await read(wires, ref, part)
            assert {key: told[key] for key in ("value", "of", "tokens", "truncated")} == expected, (name, part)
    assert (await wires.rows["jsonrpc"].part(ref, {}))["value"] == ORDERS
    assert wires.app.journal.reader.all("SELECT count(*) FROM payload") == stored


async def test_every_endpoint_refuses_the_same_parts(wires: Wires) -> None:
    ref = await _kept(wires)
    for part in REFUSED:
        for name, read in WAYS.items():
            code = (await read(wires, ref, part))["error_code"]
            # REST has the bounds of numbers in its schema.
            assert code == "E3004" or (name == "rest" and code == "E3301"), (name, part)


async def test_no_endpoint_reads_the_result_of_somebody_else(wires: Wires) -> None:
    ref, app = await _kept(wires), wires.app
    await app.identities.register(Identity(did=did_of("ann"), name="ann", kind="agent"), by="test")
    wires.bear(await app.tokens.issue(subject=did_of("ann"), tools=[ToolGrant("*")], by=app.caller))
    for name, read in WAYS.items():
        for asked in (ref, "payload:01ARZ3NDEKTSV4RRFFQ69G5FAV"):
            assert (await read(wires, asked, {"at": "/orders"}))["error_code"] == "E3702", name


async def test_a_model_that_names_no_size_gets_a_part_it_can_hold(wires: Wires) -> None:
    ref = await _kept(wires)
    params: Json = {"name": "read_result", "arguments": {"ref": ref}}
    told = orjson.loads(await wires.mcp("tools/call", params, modern=True))["result"]["structuredContent"]
    assert told["truncated"]
    assert told["tokens"] <= 2000
    assert estimate(orjson.dumps(told["value"]).decode()) <= 2200
    for address in ("?at", "?what=1", "?start=x", "?at=/orders&start=1&stop=2&tokens=9&query=a&at=/x"):
        uri = f"{ref}{address}"
        answer = orjson.loads(await wires.mcp("resources/read", {"uri": uri}, modern=True))
        assert answer["error"]["data"]["error_code"] == "E3004", address
    listed = orjson.loads(await wires.mcp("resources/templates/list", {}, modern=True))["result"]
    assert listed["resourceTemplates"][0]["uriTemplate"] == "payload:{id}{?at,query,start,stop,tokens}"

"""No single peer, caller or request takes the server from the others."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import orjson
import pytest
import pytest_asyncio
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct

from interlock import Failure, Interlock
from interlock.api.service import Service
from interlock.call.capability import ToolGrant
from interlock.core.threads import INPUTS
from interlock.doors.grpc import GrpcDoor
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.doors.mcp import McpDoor
from tests.support.calls import turn
from tests.support.endpoints import dialled
from tests.support.identities import OPERATOR
from tests.support.mcp import AGENT, prepare
from tests.support.mcp import serving as mcp_serving
from tests.support.servers import Place, place

MOST = 1000
PATIENCE_S = 90.0
MODERN = {
    "accept": "application/json, text/event-stream",
    "mcp-protocol-version": "2026-07-28",
    "mcp-method": "tools/call",
    "mcp-name": "demo.echo",
}


@pytest_asyncio.fixture
async def small(home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Place]:
    """A server with narrow bounds."""
    monkeypatch.setenv("INTERLOCK_MAX_VALUES", str(MOST))
    monkeypatch.setenv("INTERLOCK_MAX_CONNECTIONS_PER_PEER", "3")
    monkeypatch.setenv("INTERLOCK_MAX_MCP_SESSIONS", "2")
    async with place(home) as made:
        yield made


def asked(values: int) -> dict[str, Any]:
    return {"value": [7] * values}


Json = dict[str, Any]
REQUESTS: dict[str, Callable[[Json], Json]] = {
    "/v1/tools/invoke": lambda given: {"tool_id": "demo.echo", "parameters": given},
    "/v1/tools/negotiate": lambda given: {"expected": {"demo.echo": given}},
    "/rpc": lambda given: {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools.invoke",
        "params": {"tool_id": "demo.echo", "parameters": given},
    },
}


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_body_of_too_many_values_is_refused_with_the_bound_and_what_to_do(small: Place, path: str) -> None:
    async with httpx.AsyncClient(base_url=small.base, timeout=PATIENCE_S, headers=small.bearer) as client:
        answer = await client.post(path, json=REQUESTS[path](asked(5 * MOST)))
        told = answer.json()["error"]
        envelope = told.get("data", told)
        assert (envelope["error_code"], envelope["details"]) == ("E3004", {"mostValues": MOST})
        assert "max_values" in envelope["resolution"]


@pytest.mark.parametrize("path", ["/v1/tools/invoke", "/rpc"])
async def test_a_long_text_full_of_commas_is_one_value(small: Place, path: str) -> None:
    async with httpx.AsyncClient(base_url=small.base, timeout=PATIENCE_S, headers=small.bearer) as client:
        answer = await client.post(path, json=REQUESTS[path]({"value": "[," * 5 * MOST}))
        assert answer.status_code == 200, answer.text
        assert "error" not in answer.json()


async def test_the_values_of_a_batch_are_counted_together(small: Place) -> None:
    one = REQUESTS["/rpc"](asked(MOST // 4))
    async with httpx.AsyncClient(base_url=small.base, timeout=PATIENCE_S, headers=small.bearer) as client:
        assert len((await client.post("/rpc", json=[one] * 3)).json()) == 3
        assert (await client.post("/rpc", json=[one] * 8)).json()["error"]["data"]["error_code"] == "E3004"


@pytest.mark.parametrize("headers", [MODERN, {"accept": MODERN["accept"]}], ids=["modern", "handshake"])
async def test_mcp_refuses_too_many_values_before_it_looks_at_them(small: Place, headers: dict[str, str]) -> None:
    request = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "demo.echo", "arguments": asked(5 * MOST)},
    }
    async with httpx.AsyncClient(
        base_url=small.base, timeout=PATIENCE_S, headers={**small.bearer, **headers}
    ) as client:
        answer = await client.post("/mcp", json=request)
        assert answer.status_code == 400
        assert answer.json()["interlock"]["details"] == {"mostValues": MOST}
        assert answer.json()["error"] == "invalid_request", "nothing is temporary about it"


@pytest.mark.parametrize("form", ["struct", "json"])
async def test_grpc_refuses_too_many_values(small: Place, form: str) -> None:
    door = GrpcDoor(Service(small.app), address="127.0.0.1:0")
    port = await door.start()
    given = asked(5 * MOST)
    request = wire.InvokeRequest(tool_id="demo.echo")
    if form == "struct":
        request.arguments.CopyFrom(ParseDict(given, Struct()))
    else:
        request.arguments_json = orjson.dumps(given)
    try:
        async with dialled(port) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Invoke(request, metadata=(("authorization", small.bearer["authorization"]),))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"{MOST:,} values" in (refused.value.details() or "")
    finally:
        await door.stop()


LARGE = {"value": "a, b" * 5000}


@pytest.mark.parametrize("path", ["/v1/tools/invoke", "/rpc", "/mcp", "grpc"])
async def test_small_calls_go_on_while_large_ones_wait_for_the_thread_that_reads_them(small: Place, path: str) -> None:
    free = threading.Event()
    held = asyncio.create_task(INPUTS.run(free.wait))
    door = GrpcDoor(Service(small.app), address="127.0.0.1:0")
    port = await door.start()
    try:
        async with (
            httpx.AsyncClient(base_url=small.base, headers={**small.bearer, **MODERN}, timeout=PATIENCE_S) as client,
            dialled(port) as stub,
        ):

            async def ask(given: Json) -> str:
                if path == "grpc":
                    request = wire.InvokeRequest(tool_id="demo.echo", arguments_json=orjson.dumps(given))
                    bearer = (("authorization", small.bearer["authorization"]),)
                    return str(await stub.Invoke(request, metadata=bearer))
                return (await client.post(path, json=_call(path, given))).text

            large = [asyncio.create_task(ask(LARGE)) for _ in range(2)]
            assert "small" in await ask({"value": "small"})
            assert not any(one.done() for one in large)
            free.set()
            assert all("a, ba, b" in one for one in await asyncio.gather(*large))
    finally:
        free.set()
        await held
        await door.stop()


def _call(path: str, given: Json) -> Json:
    if path in REQUESTS:
        return REQUESTS[path](given)
    meta = {
        "io.modelcontextprotocol/protocolVersion": MODERN["mcp-protocol-version"],
        "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    params = {"name": MODERN["mcp-name"], "arguments": given, "_meta": meta}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


DIGITS = "9" * 309


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_number_of_more_digits_than_is_useful_is_refused_before_it_is_parsed(small: Place, path: str) -> None:
    async with httpx.AsyncClient(base_url=small.base, timeout=PATIENCE_S, headers=small.bearer) as client:
        body = orjson.dumps(REQUESTS[path]({"value": "HERE"})).decode()
        for number in (DIGITS, f"-{DIGITS}", f"[1,{DIGITS}.5]", f"{DIGITS}e-300", "9" * 1_000_000):
            answer = await client.post(path, content=body.replace('"HERE"', number))
            told = answer.json()["error"]
            envelope = told.get("data", told)
            assert (envelope["error_code"], envelope["details"]) == ("E3004", {"mostDigits": 308}), number[:20]
            assert "as text" in envelope["resolution"]


@pytest.mark.parametrize(
    "said", [f'"{DIGITS}"', f'"a\\"{DIGITS}"', f"0.{DIGITS}", f"1e-{DIGITS}", "9" * 308, "-" + "9" * 308]
)
async def test_digits_of_texts_and_fractions_are_no_whole_number(small: Place, said: str) -> None:
    async with httpx.AsyncClient(base_url=small.base, timeout=PATIENCE_S, headers=small.bearer) as client:
        body = orjson.dumps(REQUESTS["/v1/tools/invoke"]({"value": "HERE"})).decode().replace('"HERE"', said)
        answer = await client.post("/v1/tools/invoke", content=body)
        assert answer.status_code == 200, answer.text[:200]
        assert answer.json()["result"] == json.loads(said)


@pytest.mark.parametrize("headers", [MODERN, {"accept": MODERN["accept"]}], ids=["modern", "handshake"])
async def test_mcp_refuses_a_number_of_too_many_digits(small: Place, headers: dict[str, str]) -> None:
    call = '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"demo.echo","arguments":{"value":%s}}}'
    async with httpx.AsyncClient(
        base_url=small.base, timeout=PATIENCE_S, headers={**small.bearer, **headers}
    ) as client:
        answer = await client.post("/mcp", content=call % (DIGITS * 10), headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["interlock"]["details"] == {"mostDigits": 308}


@pytest.mark.parametrize("said", [DIGITS, "NaN", "-Infinity", "1e999", '"\\ud800"'])
async def test_grpc_refuses_what_the_other_doors_refuse(small: Place, said: str) -> None:
    door = GrpcDoor(Service(small.app), address="127.0.0.1:0")
    port = await door.start()
    try:
        async with dialled(port) as stub:
            for beside in ("1", "9" * 40):
                request = wire.InvokeRequest(tool_id="demo.echo")
                request.arguments_json = f'{{"value": [{said}, {beside}]}}'.encode()
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Invoke(request, metadata=(("authorization", small.bearer["authorization"]),))
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    finally:
        await door.stop()


async def test_the_library_refuses_a_number_of_too_many_digits(small: Place) -> None:
    for number in (10**309, -(10**309), 2 * 10**308, 10**5000):
        refused = await small.app.call("demo.echo", {"value": [number]})
        assert isinstance(refused.error, Failure)
        assert refused.error.code == "E3004", refused.error
    # Whatever is finite as a double is taken.
    for number in (10**308 - 1, 10**308, 1e308):
        assert (await small.app.call("demo.echo", {"value": number})).value == number


async def test_the_library_refuses_too_many_values(small: Place) -> None:
    refused = await small.app.call("demo.echo", asked(5 * MOST))
    assert isinstance(refused.error, Failure)
    assert (refused.error.code, refused.error.details) == ("E3004", {"mostValues": MOST})
    assert (await small.app.call("demo.echo", asked(MOST // 2))).ok


async def test_a_peer_at_its_cap_loses_the_connection_that_was_idle_longest(small: Place) -> None:
    health = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    oldest, second, third = [await small.raw() for _ in range(3)]
    for peer in (oldest, second, third, second, oldest):
        peer.writer.write(health)
        assert (await peer.reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    fourth = await small.raw(health)
    assert (await fourth.reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    with suppress(ConnectionResetError):  # which is an end, too
        assert await third.reader.read() == b""
    for peer in (oldest, second):
        peer.writer.write(health)
        assert (await peer.reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")


async def test_a_peer_at_its_cap_whose_connections_all_work_gets_no_more(small: Place) -> None:
    begun = b"POST /rpc HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 10\r\n\r\n"
    for _ in range(3):
        await small.raw(begun)
    async with asyncio.timeout(60):
        while sum(task.get_name() == "request" for task in asyncio.all_tasks()) < 3:
            await turn()
    refused = await small.raw()
    assert (await refused.answer()).startswith(b"HTTP/1.1 503")


HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}},
}
PING = {"jsonrpc": "2.0", "id": 2, "method": "ping"}


async def test_a_caller_at_the_cap_of_sessions_loses_the_one_that_was_idle_longest(home: Path) -> None:
    async with AsyncExitStack() as stack:
        app = await stack.enter_async_context(Interlock.open(home, housekeeping=False, max_mcp_sessions=2))
        await prepare(app)
        door = McpDoor(Service(app))
        await stack.enter_async_context(door.lifespan())
        port = await stack.enter_async_context(mcp_serving(door))
        token = await app.tokens.issue(subject=AGENT, by=OPERATOR, tools=[ToolGrant("*")])
        headers = {"authorization": f"Bearer {token}", "accept": MODERN["accept"]}
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, headers=headers)
        await stack.enter_async_context(client)

        async def opened() -> dict[str, str]:
            answer = await client.post("/mcp", json=HELLO)
            assert answer.status_code == 200, answer.text
            return {"mcp-session-id": answer.headers["mcp-session-id"], "mcp-protocol-version": "2025-06-18"}

        async def ping(session: dict[str, str]) -> int:
            return (await client.post("/mcp", json=PING, headers=session)).status_code

        def held() -> list[str]:
            return door._sdk.sessions.held(f"local/{AGENT}")  # pyright: ignore[reportPrivateUsage]

        first, second = await opened(), await opened()
        assert await ping(first) == 200
        third = await opened()
        assert sorted(held()) == sorted(one["mcp-session-id"] for one in (first, third))
        assert await ping(second) == 200
        assert sorted(held()) == sorted(one["mcp-session-id"] for one in (second, third))

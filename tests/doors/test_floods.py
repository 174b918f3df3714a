"""Requests that cost their sender little and would cost the server much: in parsing, or in what it answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from interlock.http import connection
from interlock.http.connection import ServerConnection
from tests.support import connections
from tests.support.servers import Place

Json = dict[str, Any]
App = connections.Place
door = connections.place  # a fixture: a connection over an application that echoes
META: Json = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
CHUNKED = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
LARGEST_ANSWER = 64 << 10


# On the wire


@pytest.mark.parametrize(
    "endless", [b"1\r\nx\r\n0\r\nX-A: ", b"1\r\nx\r\n0\r\nX-A: b\r\n", b"1;", b"1\r\nx\r\n1;"],
    ids=["one trailer", "trailers", "an extension", "a later extension"],
)  # fmt: skip
async def test_what_frames_a_body_is_bounded_by_the_body(door: App, endless: bytes) -> None:
    wire = await door.wire()
    wire.send(CHUNKED + endless)
    piece = b"X-A: b\r\n" * 2048 if endless.endswith(b"b\r\n") else b"a" * 16384
    for _ in range(16):
        wire.send(piece)
    async with asyncio.timeout(30):
        assert (await wire.rest()).startswith(b"HTTP/1.1 400 ")


async def test_a_body_in_chunks_of_one_byte_is_whole(door: App) -> None:
    wire = await door.wire()
    wire.send(CHUNKED.replace(b"Host: x", b"Host: x\r\nConnection: close") + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n")
    async with asyncio.timeout(60):
        assert (await wire.rest()).endswith(b"x" * 50_000)


async def test_few_of_many_requests_that_come_together_are_read_before_the_first_is_answered(
    door: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ServerConnection] = []
    made = ServerConnection.connection_made

    def note(self: ServerConnection, transport: asyncio.BaseTransport) -> None:
        seen.append(self)
        made(self, transport)

    monkeypatch.setattr(ServerConnection, "connection_made", note)
    early = b"GET /early HTTP/1.1\r\nHost: x\r\n\r\n"
    wire = await door.wire()
    wire.send(
        b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" + early * 7000, early.replace(b"x\r\n", b"x\r\nConnection: close\r\n")
    )
    async with asyncio.timeout(60):
        await door.waiting.wait()
        await asyncio.sleep(0)
        waiting = len(seen[0]._waiting)  # pyright: ignore[reportPrivateUsage] - what the bound is about
        assert 0 < waiting <= connection.SLICE // len(early)
        door.gate.set()
        assert (await wire.rest()).count(b"early") == 7001, "all are answered, in time"


async def test_any_number_of_offers_to_upgrade_is_passed_over(door: App) -> None:
    offer = b"GET /early HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"
    wire = await door.wire()
    wire.send(offer * 3000 + b"GET /early HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    async with asyncio.timeout(60):
        assert (await wire.rest()).count(b"early") == 3001


# In answers


def _mcp(method: str, params: Json, meta: Json | None = None) -> tuple[str, Json, dict[str, str]]:
    headers = {
        "accept": "application/json, text/event-stream", "mcp-protocol-version": "2026-07-28", "mcp-method": method,
        "mcp-name": str(params.get("name") or params.get("uri") or "x"),
    }  # fmt: skip
    return (
        "/mcp",
        {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": META | (meta or {})}},
        headers,
    )


def _invoke(door: str, given: Json) -> tuple[str, Json, dict[str, str]]:
    asked = {"tool_id": "demo.add", "parameters": given}
    if door == "rest":
        return "/v1/tools/invoke", asked, {}
    if door == "rpc":
        return "/rpc", {"jsonrpc": "2.0", "id": 1, "method": "tools.invoke", "params": asked}, {}
    return _mcp("tools/call", {"name": "demo-add", "arguments": given})


LONG = "n" * 1_000_000
LONG_NAME = "n" * 10_000  # it stands in a header too
WRONG: dict[str, Json] = {
    "a long name": {LONG: 1},
    "many names": {f"k{number}": 1 for number in range(20_000)},
    "a long name within": {"a": {LONG: {LONG[:1000]: 1}}},
    "large values": {"a": ["x" * 1000] * 1000, "b": {f"k{number}": "x" for number in range(20_000)}},
}


async def _refused(here: Place, request: tuple[str, Json, dict[str, str]]) -> httpx.Response:
    path, body, headers = request
    async with httpx.AsyncClient(base_url=here.base, headers={**here.bearer, **headers}, timeout=60) as client:
        return await client.post(path, json=body)


@pytest.mark.parametrize("door", ["rest", "rpc", "mcp"])
@pytest.mark.parametrize("wrong", WRONG)
async def test_what_is_wrong_with_an_input_is_told_in_a_few_words(here: Place, door: str, wrong: str) -> None:
    answer = await _refused(here, _invoke(door, WRONG[wrong]))
    assert "E3301" in answer.text
    assert len(answer.content) < LARGEST_ANSWER
    (record,) = here.app.journal.reader.all("SELECT max(length(body)) FROM journal WHERE kind = 'closed'")
    assert record[0] < LARGEST_ANSWER, "what is on record is short too"


async def test_the_first_hundred_faults_are_told_and_that_there_are_more(here: Place) -> None:
    told = (await _refused(here, _invoke("rest", WRONG["many names"]))).json()["error"]["details"]["faults"]
    assert len(told) == 101
    assert told[-1] == {"pointer": "", "message": "more is wrong than these 100 faults"}
    assert all("is not a parameter" in one["message"] for one in told[:-1])


MALFORMED: dict[str, tuple[str, Any]] = {
    "a long field": ("/v1/approvals/standing", {LONG: 1}),
    "many fields": ("/v1/approvals/standing", {f"k{number}": 1 for number in range(20_000)}),
    "a list of other things": ("/v1/tokens/delegate", {"to": "x", "resources": list(range(20_000))}),
    "an object of other things": ("/v1/upstreams/x/accept", {"reason": "x", "shown": WRONG["many names"]}),
    "too much expected": ("/v1/tools/negotiate", {"expected": WRONG["many names"]}),
}


@pytest.mark.parametrize("what", MALFORMED)
async def test_a_malformed_request_is_answered_shortly(here: Place, what: str) -> None:
    path, body = MALFORMED[what]
    answer = await _refused(here, (path, body, {}))
    assert (answer.status_code, answer.json()["error"]["error_code"]) == (400, "E3004")
    assert len(answer.content) < LARGEST_ANSWER
    assert len(answer.json()["error"]["details"]["faults"]) < 20, "what cannot be right is not looked at in full"


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"v{number}" for number in range(3000)]},
        {"oneOf": [{"properties": {"a": {"const": number}}} for number in range(1000)]},
        {"properties": {f"k{number}": {"type": "string"} for number in range(2000)}},
    ],
    ids=["enum", "oneOf", "properties"],
)
@pytest.mark.parametrize("door", ["rest", "rpc", "rpc-list", "mcp"])
async def test_an_expectation_of_too_many_values_is_refused_before_it_is_compiled(
    here: Place, door: str, schema: Json
) -> None:
    expected = {"expected": {"demo.add": schema}}
    requests: dict[str, tuple[str, Json, dict[str, str]]] = {
        "rest": ("/v1/tools/negotiate", expected, {}),
        "rpc": ("/rpc", {"jsonrpc": "2.0", "id": 1, "method": "tools.negotiate", "params": expected}, {}),
        "rpc-list": ("/rpc", {"jsonrpc": "2.0", "id": 1, "method": "tools.list", "params": expected}, {}),
        "mcp": _mcp("tools/list", {}, {"interlock/expects": {"demo-add": schema}}),
    }
    answer = await _refused(here, requests[door])
    assert "E3004" in answer.text
    assert "more than 2,500 values" in answer.text


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("resources/read", {"uri": f"payload:{LONG_NAME}"}),
        ("resources/read", {"uri": f"trace:{LONG_NAME}"}),
        ("resources/read", {"uri": f"other:{LONG_NAME}"}),
        ("prompts/get", {"name": LONG_NAME}),
        (
            "completion/complete",
            {"ref": {"type": "ref/prompt", "name": LONG_NAME}, "argument": {"name": "x", "value": "y"}},
        ),
    ],
    ids=["payload", "trace", "resource", "prompt", "completion"],
)
async def test_long_addresses_are_not_sent_back_to_mcp_clients(here: Place, method: str, params: Json) -> None:
    answer = await _refused(here, _mcp(method, params))
    assert "E3004" in answer.text
    assert LONG_NAME not in answer.text


async def test_a_long_query_is_refused_before_it_is_parsed(here: Place) -> None:
    async with httpx.AsyncClient(base_url=here.base, headers=here.bearer, timeout=60) as client:
        answer = await client.get("/v1/calls?" + "&".join(f"k{number}=1" for number in range(2000)))
    assert (answer.status_code, answer.json()["error"]["error_code"]) == (400, "E3004")


async def test_a_large_body_of_nobody_is_not_parsed(here: Place) -> None:
    body = json.dumps({"tool": "demo.add", "arguments": {f"k{number}": 1 for number in range(20_000)}}).encode()
    async with httpx.AsyncClient(base_url=here.base, timeout=60) as client:
        answer = await client.post(
            "/v1/approvals/standing", content=body[:-1], headers={"content-type": "application/json"}
        )
    assert (answer.status_code, answer.json()["error"]["error_code"]) == (401, "E3212"), "not that it is malformed"


# Ids that are sent back

LONGEST_ID = 256
TOO_LONG: dict[str, Any] = {
    "a text": "x" * (LONGEST_ID + 1),
    "a large text": "x" * 3_900_000,
    "an integer": 2**63,
    "a large integer": -(10**300),
}


def _initialize() -> tuple[str, Json, dict[str, str]]:
    """The first request of the handshake era."""
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    request: Json = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    return "/mcp", request, {"accept": "application/json, text/event-stream"}


ASKED = {
    "rpc": lambda: _invoke("rpc", {"a": 1, "b": 2}),
    "mcp": lambda: _invoke("mcp", {"a": 1, "b": 2}),
    "mcp, handshake": _initialize,
}


@pytest.mark.parametrize("door", ASKED)
@pytest.mark.parametrize("too_long", TOO_LONG)
async def test_an_id_that_is_too_long_is_refused_and_not_sent_back(here: Place, door: str, too_long: str) -> None:
    path, body, headers = ASKED[door]()
    answer = await _refused(here, (path, {**body, "id": TOO_LONG[too_long]}, headers))
    told = answer.json()
    assert (told["id"], told["error"]["code"]) == (None, -32600)
    assert told["error"]["data"]["error_code"] == "E3004"
    assert "at most 256 characters" in told["error"]["message"]
    assert len(answer.content) < 2000
    assert here.app.journal.reader.all("SELECT count(*) FROM journal WHERE kind = 'closed'") == [(0,)]


@pytest.mark.parametrize("request_id", ["x" * LONGEST_ID, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("door", ["rpc", "mcp"])
async def test_an_id_within_the_bound_is_sent_back(here: Place, door: str, request_id: Any) -> None:
    path, body, headers = ASKED[door]()
    told = (await _refused(here, (path, {**body, "id": request_id}, headers))).json()
    assert (told["id"], "result" in told) == (request_id, True)


async def test_a_progress_token_that_is_too_long_is_refused(here: Place) -> None:
    path, body, headers = _mcp("tools/call", {"name": "demo-add", "arguments": {}}, {"progressToken": "x" * 1_000_000})
    answer = await _refused(here, (path, body, headers))
    assert (answer.status_code, answer.json()["error"]["data"]["error_code"]) == (400, "E3004")
    assert len(answer.content) < 2000


@pytest.mark.parametrize("method", ["PUT", "PATCH", "OPTIONS"])
@pytest.mark.parametrize(("path", "served"), [("/mcp", "GET, POST, DELETE"), ("/rpc", "POST")])
async def test_a_path_names_its_methods_to_a_client_that_uses_another(
    here: Place, path: str, served: str, method: str
) -> None:
    async with httpx.AsyncClient(base_url=here.base, headers=here.bearer, timeout=60) as client:
        answer = await client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, served)
    told = answer.json()["error"]
    assert told.get("data", told)["error_code"] == "E3004"

"""No plain text leaves a door: what the MCP SDK and the servers below the doors refuse has the envelope too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import grpc.aio
import orjson
import pytest
import pytest_asyncio

from interlock.contract.contract import ERROR_SCHEMA
from interlock.core.errors import Failure
from interlock.data.schema import Json, Schema
from interlock.http import connection
from tests.support.answers import Heard, typed_refusal
from tests.support.endpoints import BOTH, META, MODERN
from tests.support.faults import sound
from tests.support.wires import Wires, opened

LIST: Json = {"jsonrpc": "2.0", "id": 7, "method": "tools/list", "params": {}}
NEW: Json = {**LIST, "params": {"_meta": META}}
THERE = {"mcp-protocol-version": MODERN, "mcp-method": "tools/list"}
AWAY = {"mcp-session-id": "0" * 32}

# The method, headers and body of each request that the SDK refuses, and the status of its refusal.
REFUSED: dict[str, tuple[str, Json, Any, int]] = {
    "no session": ("POST", {}, LIST, 400),
    "unknown session": ("POST", AWAY, LIST, 404),
    "stream without a session": ("GET", {"accept": "text/event-stream"}, None, 400),
    "stream of an unknown session": ("GET", {"accept": "text/event-stream", **AWAY}, None, 404),
    "stream that is not accepted": ("GET", {"accept": "text/html"}, None, 406),
    "end of no session": ("DELETE", {}, None, 400),
    "end of an unknown session": ("DELETE", AWAY, None, 404),
    "another method": ("PUT", {}, LIST, 405),
    "a method nobody knows": ("FROBNICATE", {}, LIST, 400),
    "no answer is accepted": ("POST", {"accept": "text/html"}, LIST, 406),
    "half of the answers is accepted": ("POST", {"accept": "application/json"}, LIST, 406),
    "broken JSON": ("POST", {}, b'{"password": "hunter2hunter2"', 400),
    "no object": ("POST", {}, 7, 400),
    "a batch": ("POST", {}, [LIST], 400),
    "no request": ("POST", {}, {"jsonrpc": "2.0", "id": 1, "password": "hunter2hunter2"}, 400),
    "another version": ("POST", {"mcp-protocol-version": "1999-01-01"}, LIST, 400),
    "another media type": ("POST", {"content-type": "text/plain"}, LIST, 400),
    "new: another method": ("GET", THERE, None, 405),
    "new: end": ("DELETE", THERE, None, 405),
    "new: no answer is accepted": ("POST", {**THERE, "accept": "text/html"}, NEW, 406),
    "new: broken JSON": ("POST", THERE, b'{"password": "hunter2hunter2"', 400),
    "new: a batch": ("POST", THERE, [NEW], 400),
    "new: no version in the body": ("POST", THERE, LIST, 400),
    "new: the header names another method": ("POST", {**THERE, "mcp-method": "tools/call"}, NEW, 400),
    "new: an unknown method": ("POST", {**THERE, "mcp-method": "tools/x"}, {**NEW, "method": "tools/x"}, 404),
    "another host": ("POST", {"host": "elsewhere.example"}, LIST, 400),
    "another origin": ("POST", {"origin": "http://elsewhere.example"}, LIST, 400),
}


@pytest_asyncio.fixture
async def wires(home: Path) -> AsyncGenerator[Wires]:
    async with opened(home) as made:
        yield made


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("case", REFUSED)
async def test_a_refusal_of_the_mcp_sdk_has_the_envelope_and_is_no_plain_text(wires: Wires, case: str) -> None:
    method, headers, body, status = REFUSED[case]
    content = body if isinstance(body, bytes) or body is None else orjson.dumps(body)
    said = {"accept": BOTH, "content-type": "application/json", **headers}
    answer = await wires.http.request(method, "/mcp", content=content, headers=said)
    assert answer.status_code == status or (status == 400 and answer.status_code in (403, 404, 421)), answer.text
    assert answer.headers["content-type"].partition(";")[0] == "application/json"
    assert int(answer.headers["content-length"]) == len(answer.content)
    told: Json = answer.json()
    error: Json = told["error"]
    if told.get("jsonrpc") == "2.0":
        assert isinstance(error["code"], int)
        assert error["message"] == error["data"]["humanMessage"]
        envelope = {name: value for name, value in error["data"].items() if name in FIELDS}
    else:
        envelope = error
    sound(Heard(answer.text, answer.status_code, envelope=envelope), "rest")
    assert envelope["retryable"] is False
    assert "hunter2" not in answer.text
    assert "mcp-session-id" not in answer.headers


FIELDS = Failure("E3004").envelope("t").keys()


@pytest.mark.supports("CONTRACT-13")
async def test_what_the_protocol_says_of_a_refusal_stays_beside_the_envelope(wires: Wires) -> None:
    body = {**NEW, "params": {"_meta": {**META, "io.modelcontextprotocol/protocolVersion": "1999-01-01"}}}
    said = {"accept": BOTH, "mcp-protocol-version": "1999-01-01", "mcp-method": "tools/list"}
    answer = await wires.http.post("/mcp", json=body, headers=said)
    assert answer.status_code == 400
    data: Json = answer.json()["error"]["data"]
    assert data["errorCode"] == "INVALID_INPUT"
    assert answer.json()["id"] in (7, None)
    assert Schema(ERROR_SCHEMA).valid({name: value for name, value in data.items() if name in FIELDS})


@pytest.mark.proves("CONTRACT-13")
async def test_an_rpc_that_grpc_does_not_know_or_cannot_read_has_the_envelope(wires: Wires) -> None:
    token = wires.metadata()
    for path, sent in (
        ("/interlock.v1.Gateway/Nothing", b""),
        ("/elsewhere.Service/Do", b""),
        ("/interlock.v1.Gateway/Describe", b"\xff\xff\xff"),
        ("/interlock.v1.Gateway/Invoke", b"\xff\xff\xff"),
    ):
        asked = cast("Any", wires.channel).unary_unary(path, None, None)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asked(sent, metadata=token)
        envelope = sound(typed_refusal(refused.value), "grpc")
        assert (envelope["error_code"], envelope["errorCode"]) == ("E3004", "INVALID_INPUT"), path
        assert envelope["resolution"]


# What is refused before there is a request: its bytes, the status and the code.
BROKEN: dict[str, tuple[bytes, int, str]] = {
    "no HTTP": (b"\0\0 hunter2hunter2\r\n\r\n", 400, "E3004"),
    "another tunnel": (b"CONNECT hunter2hunter2.example:80 HTTP/1.1\r\nhost: x\r\n\r\n", 400, "E3004"),
    "a long head": (b"GET / HTTP/1.1\r\n" + b"x: hunter2hunter2\r\n" * 8000 + b"\r\n", 431, "E3004"),
    "an unknown coding": (b"POST /rpc HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 501, "E3004"),
    "another HTTP": (b"GET / HTTP/2.0\r\nhost: x\r\n\r\n", 505, "E3004"),
    "one connection too many": (b"", 503, "E3001"),
}


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("case", BROKEN)
async def test_what_is_refused_before_there_is_a_request_has_the_envelope(
    wires: Wires, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    sent, status, code = BROKEN[case]
    if not sent:
        monkeypatch.setattr(connection, "MAX_CONNECTIONS", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", wires.http.base_url.port)
    try:
        writer.write(sent)
        async with asyncio.timeout(60):
            told = await reader.read()
    finally:
        writer.close()
    head, _, body = told.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), told
    assert b"content-type: application/json" in head
    envelope = sound(Heard(told.decode(), status, envelope=orjson.loads(body)["error"]), "rest")
    assert envelope["error_code"] == code
    assert envelope["resolution"]
    assert b"hunter2" not in told

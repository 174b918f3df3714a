"""The server against clients that mean harm, and against those that merely do not behave."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench import soak
from interlock import Interlock
from interlock.api import background_calls
from interlock.api.service import Ask
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.core.errors import Failure
from interlock.http import asgi, connection
from tests import sample
from tests.support.calls import admit, until
from tests.support.identities import did_of
from tests.support.rest import stepwise
from tests.support.servers import LOOPBACK, Peer, Place, place, post

Json = dict[str, Any]
LONG = "1111111111111111111"  # a number that the quick parser would round
META: Json = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
BOTH = "application/json, text/event-stream"


def head(here: Place, request: str, *headers: str) -> bytes:
    lines = (f"{request} HTTP/1.1", "host: 127.0.0.1", f"authorization: {here.bearer['authorization']}", *headers)
    return "\r\n".join((*lines, "", "")).encode()


async def token(app: Interlock, name: str, *, tenant: str = "local", scopes: tuple[str, ...] = (), **facts: Any) -> str:
    await app.identities.register(
        Identity(did=did_of(name), name=name, kind="human", tenant=tenant, **facts), by="test"
    )
    return await app.tokens.issue(subject=did_of(name), tools=[ToolGrant("*")], scopes=scopes, by=app.caller)


# Bodies


@pytest.mark.parametrize("said", ['"\\ud800"', "NaN", "-Infinity", "1e999", "[" * 2000 + "]" * 2000, '"\x00"', "{"])
async def test_what_is_not_json_is_refused_the_same_way_with_and_without_long_numbers(here: Place, said: str) -> None:
    for body in (f'{{"tool_id": {said}}}', f'{{"tool_id": {said}, "timeout_ms": {LONG}}}', f"{{{said}: {LONG}}}"):
        answer = await post(here, "/v1/tools/invoke", body)
        assert (answer.status_code, answer.json()["error"]["error_code"]) == (400, "E3004"), body[:80]
        assert "sys." not in answer.text
    for body in (
        f'{{"jsonrpc": "2.0", "id": {said}, "method": "tools.list", "params": {{"limit": {LONG}}}}}',
        f'{{"jsonrpc": "2.0", "id": {LONG}, "method": "calls.status", "params": {{"invocation_id": {said}}}}}',
    ):
        answer = await post(here, "/rpc", body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (200, -32700), body[:80]


async def test_long_whole_numbers_arrive_as_they_were_sent(here: Place) -> None:
    for number in (LONG, "9" * 308):
        body = f'{{"tool_id": "demo.echo", "parameters": {{"value": {number}}}}}'
        assert (await post(here, "/v1/tools/invoke", body)).json()["result"] == int(number)


@pytest.mark.parametrize(
    "params",
    [
        {"timeout_ms": -5}, {"timeout_ms": 10**300}, {"timeout_ms": True}, {"timeout_ms": 1e300}, {"dry_run": "yes"},
        {"dry_run": 1}, {"session_id": "s" * 5000}, {"idempotency_key": "k" * 5000}, {"x" * 5000: 1},
    ],
)  # fmt: skip
async def test_json_rpc_parameters_have_bounds(here: Place, params: Json) -> None:
    asked: Json = {"tool_id": "demo.add", "parameters": {"a": 1}, **params}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools.invoke", "params": asked})
    answer = await post(here, "/rpc", body)
    assert answer.json()["error"]["code"] == -32602
    assert not any(one * 200 in answer.text for one in "skx"), "what was sent is not sent back"


@pytest.mark.parametrize("field", ["session_id", "task"])
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_names_that_would_fill_the_journal_are_refused(here: Place, field: str, mode: str) -> None:
    asked: Json = {"tool_id": "demo.add", "parameters": {"a": 1}, "execution_mode": mode, field: "n" * 601}
    answer = await post(here, "/v1/tools/invoke", json.dumps(asked))
    assert (answer.status_code, answer.json()["error"]["error_code"]) == (400, "E3004")
    assert not here.app.journal.reader.all("SELECT 1 FROM journal WHERE kind = 'closed'")


async def test_bodies_that_are_begun_and_not_ended_are_bounded_together(
    here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asgi, "MOST_COMING", 100_000)
    begun = [await here.raw(head(here, "POST /rpc", "content-length: 90000") + b"x" * 60_000) for _ in range(2)]
    refused = [asyncio.create_task(peer.reader.readline()) for peer in begun]
    done, _ = await asyncio.wait(refused, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert all(one.result().startswith(b"HTTP/1.1 503") for one in done)
    assert len(done) == 1
    for peer in begun:
        peer.writer.close()
    await asyncio.gather(*refused, return_exceptions=True)
    await until(lambda: _connections(here) == 0)
    body = '{"jsonrpc": "2.0", "id": 1, "method": "tools.list"}' + " " * 90_000
    assert "result" in (await post(here, "/rpc", body)).json(), "room is made again"


# Connections


@pytest.mark.parametrize(
    "hosts",
    [
        ("evil.example", "127.0.0.1"),
        ("127.0.0.1", "evil.example"),
        ("127.0.0.1:80@evil.example",),
        ("127.0.0.1/x",),
        ("",),
    ],
)
async def test_a_host_is_one_plain_name(here: Place, hosts: tuple[str, ...]) -> None:
    lines = "".join(f"host: {one}\r\n" for one in hosts)
    peer = await here.raw(f"GET /health HTTP/1.1\r\n{lines}connection: close\r\n\r\n".encode())
    assert (await peer.answer()).startswith(b"HTTP/1.1 403")


@pytest.mark.parametrize(
    "smuggled",
    [
        "content-length: 4\r\ntransfer-encoding: chunked", "content-length: 4\r\ncontent-length: 5",
        "transfer-encoding: xchunked", "transfer-encoding: chunked, identity", "content-length : 4", "x: a\r\n b",
        "content-length: +4", "x: a\x00b",
    ],
)  # fmt: skip
async def test_requests_that_two_readers_could_read_differently_end_the_connection(here: Place, smuggled: str) -> None:
    tail = b"0\r\n\r\nGET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    peer = await here.raw(head(here, "POST /rpc", smuggled) + tail)
    answer = await peer.answer()
    # A coding that nobody knows is said to be just that; what cannot be right in any reading is a bad request.
    assert answer.startswith(b"HTTP/1.1 501" if smuggled == "transfer-encoding: xchunked" else b"HTTP/1.1 400")
    assert len(re.findall(rb"HTTP/1\.1 [0-9]{3} ", answer)) == 1


async def test_what_follows_a_body_is_no_header(here: Place) -> None:
    body = b'{"jsonrpc":"2.0","id":1,"method":"tools.list"}'
    begun = b"POST /rpc HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    trailer = f"authorization: {here.bearer['authorization']}\r\n".encode()
    peer = await here.raw(begun + b"%x\r\n%b\r\n0\r\n" % (len(body), body) + trailer + b"\r\n")
    assert b"E3212" in await peer.answer()


@pytest.mark.parametrize("protocol", ["websocket", "h2c", "anything"])
async def test_a_connection_is_not_upgraded_and_not_left_hanging(here: Place, protocol: str) -> None:
    peer = await here.raw(head(here, "GET /health", "connection: upgrade", f"upgrade: {protocol}"))
    async with asyncio.timeout(60):
        assert (await peer.reader.readuntil(b"healthy")).startswith(b"HTTP/1.1 200")
        peer.writer.write(head(here, "GET /health", "connection: close"))
        assert (await _rest(peer)).count(b"HTTP/1.1 200") == 1, "it goes on as it began"


async def test_a_body_that_goes_on_after_its_answer_is_not_waited_for(
    here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    peer = await here.raw(head(here, "GET /metrics", "content-length: 1000") + b"x")
    async with asyncio.timeout(60):
        assert (await _rest(peer)).startswith(b"HTTP/1.1 200")
    peer = await here.raw(head(here, "GET /metrics", "content-length: 2") + b"xx" + head(here, "GET /health"))
    assert (await peer.reader.readuntil(b"healthy")).count(b"HTTP/1.1 200") == 2, "a whole one is followed by the next"


async def _rest(peer: Peer) -> bytes:
    """All that comes until the other end closes, however it does."""
    heard = bytearray()
    try:
        while more := await peer.reader.read(65536):
            heard += more
    except ConnectionError:
        pass
    return bytes(heard)


async def test_a_client_that_never_reads_is_let_go(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALLED_S", 0.1)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(deaf, ("127.0.0.1", here.server.port))
    await loop.sock_sendall(deaf, head(here, "GET /openapi.json") * 100)
    await until(lambda: _connections(here) == 1)
    await until(lambda: _connections(here) == 0)
    deaf.close()


def _connections(here: Place) -> int:
    http = here.server._http  # pyright: ignore[reportPrivateUsage] - uvicorn counts them, and nobody else need know
    assert http is not None
    return len(http.server_state.connections)


async def test_a_request_behind_a_stream_ends_the_stream(here: Place) -> None:
    await admit(here.app, stepwise)
    sample.world.gate = asyncio.Event()
    answer = await post(
        here, "/v1/tools/invoke", '{"tool_id": "demo.stepwise", "parameters": {"steps": 1}, "execution_mode": "async"}'
    )
    call = answer.json()["invocation_id"]
    listeners = here.app.gateway.observer.followers
    before = len(listeners)
    peer = await here.raw(head(here, f"GET /v1/calls/{call}/events"))
    await until(lambda: len(listeners) == before + 1)
    peer.writer.write(head(here, "GET /health"))
    async with asyncio.timeout(60):
        assert b"healthy" not in await peer.answer()
    sample.world.gate.set()
    await until(lambda: len(listeners) == before)


# Other people's calls


async def test_calls_are_seen_cancelled_and_resumed_by_their_own_callers_only(here: Place) -> None:
    await admit(here.app, stepwise)
    sample.world.gate = asyncio.Event()
    app = here.app
    others = {
        "another caller": await token(app, "ben"),
        "another tenant's auditor": await token(app, "eve", tenant="acme", scopes=("audit:read",)),
    }
    auditor = await token(app, "kim", scopes=("audit:read",))
    asked: Json = {"tool_id": "demo.stepwise", "parameters": {"steps": 1}, "execution_mode": "async"}
    running = (await post(here, "/v1/tools/invoke", json.dumps(asked))).json()["invocation_id"]
    await until(lambda: sample.world.runs == 1)
    ended = (await post(here, "/v1/tools/invoke", '{"tool_id": "demo.add", "parameters": {"a": 1}}')).json()
    async with httpx.AsyncClient(base_url=here.base, timeout=60) as client:
        for who, held in others.items():
            bearer = {"authorization": f"Bearer {held}"}
            for call in (running, ended["invocation_id"]):
                for method, path in (
                    ("GET", f"/v1/calls/{call}"), ("GET", f"/v1/calls/{call}/events"),
                    ("POST", f"/v1/calls/{call}/cancel"), ("POST", f"/v1/tools/resume/{call}"),
                ):  # fmt: skip
                    answer = await client.request(method, path, headers=bearer)
                    assert answer.status_code == 404, (who, path)
                for name in ("status", "cancel", "resume"):
                    body = {"jsonrpc": "2.0", "id": 1, "method": f"calls.{name}", "params": [call]}
                    answer = await client.post("/rpc", json=body, headers=bearer)
                    assert answer.json()["error"]["data"]["error_code"] == "E3702", (who, name)
        watching = {"authorization": f"Bearer {auditor}"}
        path = f"/v1/calls/{ended['invocation_id']}"
        assert (await client.get(path, headers=watching)).status_code == 200
        assert (await client.post(f"{path}/cancel", headers=watching)).status_code == 404
        sample.world.gate.set()
        ann = await app.caller_of(here.bearer["authorization"].removeprefix("Bearer "))
        await until(lambda: here.server._service.calls.result(running, ann))  # pyright: ignore[reportPrivateUsage]
        for held in (*others.values(), auditor):
            seen = await client.get(f"/v1/calls/{running}", headers={"authorization": f"Bearer {held}"})
            assert seen.json().get("result") is None


async def test_nobody_agrees_to_their_own_call(here: Place) -> None:
    held = await token(here.app, "ron", groups=frozenset(("operators", "security", "approvers")))
    bearer = {"authorization": f"Bearer {held}"}
    async with httpx.AsyncClient(base_url=here.base, headers=bearer, timeout=60) as client:
        body = {"tool_id": "demo.send", "parameters": {"to": "x"}, "idempotency_key": "1"}
        pending = await client.post("/v1/tools/invoke", json=body)
        assert pending.status_code == 202, pending.text
        ticket = pending.json()["pending"]["ticketId"]
        answer = await client.post(f"/v1/approvals/{ticket}/approve", json={})
        assert answer.status_code == 403
        said = {"jsonrpc": "2.0", "id": 1, "method": "approvals.approve", "params": [ticket]}
        assert "error" in (await client.post("/rpc", json=said)).json()
        status = await client.get(f"/v1/calls/{pending.json()['invocation_id']}")
        assert status.json()["status"] == "pending"


async def test_nobody_fills_the_background_alone(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    await admit(here.app, stepwise)
    monkeypatch.setitem(vars(here.app.settings), "max_background_per_caller", 2)
    monkeypatch.setattr(background_calls, "MOST_CALLS_EACH", 1)
    sample.world.gate = asyncio.Event()
    service = here.server._service  # pyright: ignore[reportPrivateUsage] - the calls of this very server
    ann = await here.app.caller_of(here.bearer["authorization"].removeprefix("Bearer "))
    ben = await here.app.caller_of(await token(here.app, "ben"))
    ask = Ask("demo.stepwise", {"steps": 1})
    first, second = [await service.calls.start(ask, ann, door="rest") for _ in range(2)]
    with pytest.raises(Failure) as refused:
        await service.calls.start(ask, ann, door="rest")
    assert refused.value.code == "E3701"
    third = await service.calls.start(ask, ben, door="rest")
    sample.world.gate.set()

    async def ended() -> bool:
        return {(await service.calls.status(one, ann))["status"] for one in (first, second)} == {"succeeded"}

    await until(lambda: service.calls.result(third, ben))
    await until(ended)
    in_memory = service.calls.background._results  # pyright: ignore[reportPrivateUsage]
    assert len(in_memory.keys() & {first, second}) == 1
    for one in (first, second):  # the other one is read from the store
        await until(lambda one=one: service.calls.result(one, ann))


# Ending


async def test_ending_waits_for_calls_and_not_for_whoever_listens_or_dawdles(home: Path) -> None:
    """The drain time is ten minutes here; what is open would hold it for as long, if it were waited for."""
    import grpc.aio
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    sample.world.gate = asyncio.Event()
    async with place(home, replace(LOOPBACK, ports={"grpc": 0}, drain_s=600)) as here:
        await admit(here.app, stepwise)
        await here.raw(b"")
        await here.raw(head(here, "GET /hea")[:-20])
        await here.raw(head(here, "POST /v1/tools/invoke", "content-length: 100") + b"{")
        idle = await here.raw(head(here, "GET /health"))
        await idle.reader.readuntil(b"healthy")
        asked: Json = {"tool_id": "demo.stepwise", "parameters": {"steps": 1}, "execution_mode": "async"}
        behind = (await post(here, "/v1/tools/invoke", json.dumps(asked))).json()["invocation_id"]
        events = await here.raw(head(here, f"GET /v1/calls/{behind}/events"))
        await events.reader.readuntil(b"\r\n\r\n")
        session = await _mcp_session(here)
        stream = await here.raw(head(here, "GET /mcp", f"mcp-session-id: {session}", "accept: text/event-stream"))
        assert b"200" in await stream.reader.readline()
        listening = await here.raw(_listen(here))
        assert b"200" in await listening.reader.readline()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{here.server.ports['grpc']}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watching = stub.Watch(health_pb2.HealthCheckRequest())
            await watching.read()
            called = asyncio.create_task(
                post(here, "/v1/tools/invoke", json.dumps({**asked, "execution_mode": "sync"}))
            )
            await until(lambda: sample.world.runs == 2)
            ending = asyncio.create_task(here.server.stop())
            await until(lambda: _connections(here) == 1)
            assert not ending.done()
            sample.world.gate.set()
            async with asyncio.timeout(60):
                assert (await called).json()["result"] == 1
                await ending
        rows = here.app.journal.reader.all("SELECT 1 FROM journal WHERE kind = 'closed' AND call = ?", (behind,))
        assert rows, "what ran in the background has ended too, on record"


async def _mcp_session(here: Place) -> str:
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    async with httpx.AsyncClient(base_url=here.base, headers={**here.bearer, "accept": BOTH}, timeout=60) as client:
        said = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
        session = (await client.post("/mcp", json=said)).headers["mcp-session-id"]
        ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        await client.post("/mcp", json=ready, headers={"mcp-session-id": session})
        return session


def _listen(here: Place) -> bytes:
    params: Json = {"notifications": {"toolsListChanged": True}, "_meta": META}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen", "params": params}).encode()
    return head(
        here, "POST /mcp", "mcp-protocol-version: 2026-07-28", "mcp-method: subscriptions/listen", f"accept: {BOTH}",
        "content-type: application/json", f"content-length: {len(body)}",
    ) + body  # fmt: skip


# Memory


async def test_memory_does_not_grow_with_what_callers_choose() -> None:
    """A short soak; `./dev bench soak` is the long one."""
    async with soak.served() as server:
        soaked = await soak.soak(server, 1500)
    (half, before), (whole, after) = soaked.rss[len(soaked.rss) // 2 - 1], soaked.rss[-1]
    assert (after - before) / (whole - half) < 16, f"KiB are kept of each request: {soaked}"
    # On a machine with much else to do, a call may come to its deadline.
    assert {"200", "202", "400", "401", "404", "OK", "NOT_FOUND"} == set(soaked.answers) - {"504", "DEADLINE_EXCEEDED"}

"""The server as the network meets it: real sockets, real signals, clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from interlock import Interlock
from interlock.authority.identities import Identity
from interlock.core.errors import Failure
from interlock.doors.server import Listening
from interlock.http import asgi, connection
from tests.support.calls import turn
from tests.support.grpc import certificate
from tests.support.identities import did_of
from tests.support.servers import LOOPBACK, Place, place
from tests.support.source import ROOT

Json = dict[str, Any]
ADD = {"tool_id": "demo.add", "parameters": {"a": 2, "b": 3}}


@pytest.mark.parametrize("path", ["/v1/tools", "/v1/tools/invoke", "/rpc", "/mcp", "/health", "/metrics"])
async def test_nobody_reaches_it_by_a_name_of_their_own(here: Place, path: str) -> None:
    method = "POST" if path in ("/v1/tools/invoke", "/rpc", "/mcp") else "GET"
    async with httpx.AsyncClient(base_url=here.base, headers=here.bearer, timeout=60) as client:
        for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}, {"origin": "null"}):
            answer = await client.request(method, path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["error_code"]) == (403, "E3210"), headers
        page = {"origin": here.base.replace("http:", "chrome-extension:")}
        assert (await client.request(method, path, headers=page)).status_code == 403, "a page's scheme is part of it"
        welcome = await client.request(
            method, path, headers={"origin": here.base}, json=ADD if method == "POST" else None
        )
        assert welcome.status_code != 403


async def test_a_request_without_a_host_is_refused(here: Place) -> None:
    peer = await here.raw(b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n")
    assert (await peer.answer()).startswith(b"HTTP/1.1 403")


async def test_heads_that_are_too_long_or_too_slow_end_the_connection(
    here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = await here.raw(b"GET /health HTTP/1.1\r\n", *(b"x-n: " + b"y" * 1000 + b"\r\n",) * 100)
    assert (await peer.answer()).startswith(b"HTTP/1.1 431")
    monkeypatch.setattr(connection, "HEAD_S", 0.1)
    for begun in (b"", b"GET /hea"):
        peer = await here.raw(begun)
        assert (await peer.answer()).startswith(b"HTTP/1.1 408")
    peer = await here.raw(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    assert (await peer.reader.readline()).startswith(b"HTTP/1.1 200"), "others are served"


async def test_connections_are_counted(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 1)
    busy = await here.raw(b"POST /rpc HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 10\r\n\r\n")
    async with asyncio.timeout(60):
        while not any(task.get_name() == "request" for task in asyncio.all_tasks()):
            await turn()
    peer = await here.raw(b"")
    assert (await peer.answer()).startswith(b"HTTP/1.1 503"), "none is idle"
    busy.writer.close()


@pytest.mark.parametrize("path", ["/v1/tools/invoke", "/v1/tools/register", "/rpc", "/mcp"])
async def test_bodies_are_bounded_in_size_and_time(here: Place, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with httpx.AsyncClient(base_url=here.base, headers=here.bearer, timeout=60) as client:
        large = await client.post(
            path, content=b" " * (asgi.MAX_BODY + 1), headers={"content-type": "application/json"}
        )
        assert (large.status_code, large.json()["error"]["error_code"]) == (413, "E3309")
        assert large.json()["error"]["traceId"]
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: {here.bearer['authorization']}\r\n"
    monkeypatch.setattr(connection, "BODY_S", 0.1)
    begun = f"{head}content-type: application/json\r\ncontent-length: 10\r\n\r\n{{".encode()
    peer = await here.raw(begun)
    assert (await peer.reader.readline()).startswith(b"HTTP/1.1 504")
    _, gone = await here.raw(begun)
    gone.close()  # half a body, and then nobody


async def test_a_thousand_connections_are_held_and_served(here: Place) -> None:
    request = orjson.dumps(ADD)
    head = f"POST /v1/tools/invoke HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: {here.bearer['authorization']}\r\n"
    whole = head.encode() + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(request) + request
    held = [await here.raw(b"") for _ in range(1000)]
    # A hundred ask at once: a call has a few seconds from when it came, and waits for those before it.
    for first in [*range(0, 1000, 100)] * 2:
        asking = held[first : first + 100]
        for _, writer in asking:
            writer.write(whole)
        answers = await asyncio.gather(*(_answer(reader) for reader, _ in asking))
        assert [answer for answer in answers if answer.get("result") != 5] == []


async def _answer(reader: asyncio.StreamReader) -> Json:
    length = 0
    while (line := await reader.readline()) != b"\r\n":
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return orjson.loads(await reader.readexactly(length))


async def test_it_speaks_tls_with_two_files(home: Path, tmp_path: Path) -> None:
    chain, key = certificate(tmp_path)
    async with place(home, replace(LOOPBACK, certificate=chain, key=key)) as here:
        trusting = ssl.create_default_context(cafile=str(chain))
        async with httpx.AsyncClient(base_url=here.base, headers=here.bearer, verify=trusting, timeout=60) as client:
            assert (await client.post("/v1/tools/invoke", json=ADD)).json()["result"] == 5
        async with httpx.AsyncClient(base_url=here.base, timeout=60) as stranger:
            with pytest.raises(httpx.ConnectError):
                await stranger.get("/health")


async def test_metrics_are_for_everybody_on_loopback_and_for_some_on_a_network(home: Path) -> None:
    async with place(home) as here, httpx.AsyncClient(base_url=here.base, timeout=60) as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.head("/metrics")).status_code == 200
    public = Listening(host="0.0.0.0", port=0, ports={}, names=("tools.example",))
    async with place(home, public) as here, httpx.AsyncClient(base_url=here.base, timeout=60) as client:
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers=here.bearer)).status_code == 403
        for name, tenant, status in (("eve", "acme", 403), ("operator", "local", 200)):
            watcher = Identity(did=did_of(name), name=name, kind="human", tenant=tenant)
            await here.app.identities.register(watcher, by="test")
            token = await here.app.tokens.issue(subject=watcher.did, scopes=("metrics:read",), by=here.app.caller)
            answer = await client.get("/metrics", headers={"authorization": f"Bearer {token}"})
            assert answer.status_code == status, tenant
        named = await client.get("/health", headers={"host": "tools.example"})
        assert named.status_code == 200


async def test_readiness_names_upstreams_to_those_who_may_see_the_metrics_and_to_nobody_else(home: Path) -> None:
    command = [sys.executable, "-I", "-S", str(ROOT / "tests" / "support" / "mcp_servers" / "scripted.py")]

    async def told(here: Place, **headers: str) -> set[str]:
        async with httpx.AsyncClient(base_url=here.base, timeout=60) as client:
            answer = await client.get("/ready", headers=headers)
        assert answer.status_code == 200
        assert answer.json()["dependencies"]["upstreams"] == "healthy"
        return {name for name in answer.json()["dependencies"] if name.startswith("upstreams.")}

    async with place(home, replace(LOOPBACK, names=("tools.example",))) as here:
        overlay = {"tools": {"state": {"mutation_class": "read_only"}}}
        await here.app.upstreams.add("desk", "mcp", {"command": command}, by=here.app.caller, overlay=overlay)
        assert await told(here) == {"upstreams.desk"}
        assert await told(here, host="tools.example") == set(), "another name may stand for a proxy"
    public = Listening(host="0.0.0.0", port=0, ports={}, names=("tools.example",))
    async with place(home, public) as here:
        await here.app.upstreams.probe_all()
        assert await told(here) == set()
        assert await told(here, **here.bearer) == set()
        assert await told(here, authorization="Bearer x") == set()
        watcher = Identity(did=did_of("operator"), name="operator", kind="human", tenant="local")
        await here.app.identities.register(watcher, by="test")
        token = await here.app.tokens.issue(subject=watcher.did, scopes=("metrics:read",), by=here.app.caller)
        assert await told(here, authorization=f"Bearer {token}") == {"upstreams.desk"}


async def test_a_port_in_use_is_told_in_words(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(Failure) as refused:
            async with place(home, replace(LOOPBACK, port=taken.getsockname()[1])):
                pass
        assert (refused.value.code, "choose another port with --port" in refused.value.message) == ("E3108", True)


@pytest.mark.sqlite_only("the program is started as people do, and knows nothing of the stores of tests")
async def test_a_signal_under_load_loses_no_call_that_was_acknowledged(tmp_path: Path) -> None:
    """SIGTERM while 32 clients post: whatever was answered with success is in the journal, and nothing twice."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "interlock.cli", "--home", str(tmp_path / "home"), "serve", "--port", "0", "--no-grpc",
        "--token", "--json", stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    facts: Json = json.loads(await process.stdout.readline())
    done: list[str] = []
    ending = asyncio.Event()

    async def post(client: httpx.AsyncClient, number: int) -> None:
        for step in range(1000):
            key = f"{number}-{step}"
            body = {"tool_id": "demo.post", "parameters": {"account": "cash", "cents": 1}, "idempotency_key": key}
            try:
                answer = await client.post("/tools/invoke", json=body)
            except httpx.HTTPError:
                return
            if answer.status_code != 200:
                return
            done.append(answer.json()["invocation_id"])
            if len(done) > 100:
                ending.set()

    limits = httpx.Limits(max_connections=32)
    bearer = {"authorization": f"Bearer {facts['token']}"}
    async with httpx.AsyncClient(base_url=facts["rest"], headers=bearer, limits=limits, timeout=60) as client:
        clients = [asyncio.create_task(post(client, number)) for number in range(32)]
        await ending.wait()
        os.kill(process.pid, signal.SIGTERM)
        await asyncio.gather(*clients)
    assert await process.wait() == 0
    async with Interlock.open(tmp_path / "home", housekeeping=False) as app:
        rows = app.journal.reader.all("SELECT call, body FROM journal WHERE kind = 'closed'")
        closed = {call: orjson.loads(body) for call, body in rows}
        assert set(done) <= {call for call, body in closed.items() if body["status"] == "SUCCESS"}
        intents = app.journal.reader.all("SELECT call FROM journal WHERE kind = 'intent'")
        assert {call for (call,) in intents} <= closed.keys(), "nothing is left hanging"

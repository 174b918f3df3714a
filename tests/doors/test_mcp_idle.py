"""Sessions of the handshake era that their clients drop without a word."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from tests.support.servers import Place, place

PATIENCE_S = 60
MANY = 25
HEADERS = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
HELLO = {
    "jsonrpc": "2.0", "id": 1, "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}  # fmt: skip


async def _drop_one(here: Place) -> str:
    """Open a session over a connection of its own, say that it is ready, and go away."""
    async with httpx.AsyncClient(base_url=here.base, headers={**here.bearer, **HEADERS}, timeout=PATIENCE_S) as client:
        opened = await client.post("/mcp", json=HELLO)
        assert opened.status_code == 200
        session = opened.headers["mcp-session-id"]
        ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        await client.post("/mcp", json=ready, headers={"mcp-session-id": session})
        return session


async def test_dropped_sessions_end_with_their_tasks_once_they_have_been_idle_and_are_opened_again_when_used(
    home: Path,
) -> None:
    (home / "settings.toml").write_text("mcp_session_idle_s = 2.0\n")
    async with place(home) as here:
        await _drop_one(here)  # loads what has to be loaded once
        before = len(asyncio.all_tasks())
        sessions: list[str] = []
        most = 0
        for _ in range(MANY):
            sessions.append(await _drop_one(here))
            most = max(most, len(asyncio.all_tasks()))
        assert most > before  # on a busy machine the first have ended by now
        async with asyncio.timeout(PATIENCE_S):
            while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110 - tasks end without an event
                await asyncio.sleep(0.05)
        async with httpx.AsyncClient(base_url=here.base, headers={**here.bearer, **HEADERS}, timeout=60) as client:
            ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
            session = {"mcp-session-id": sessions[0]}
            answer = await client.post("/mcp", json=ping, headers=session)
            assert (answer.status_code, answer.headers["mcp-session-id"]) == (200, sessions[0])
            # A client that ends its session has ended it.
            assert (await client.delete("/mcp", headers=session)).status_code == 200
            assert (await client.post("/mcp", json=ping, headers=session)).status_code == 404


async def test_a_session_whose_client_listens_is_not_idle(home: Path) -> None:
    (home / "settings.toml").write_text("mcp_session_idle_s = 0.2\n")
    async with place(home) as here, httpx.AsyncClient(base_url=here.base, timeout=PATIENCE_S) as client:
        client.headers.update({**here.bearer, **HEADERS})
        opened = await client.post("/mcp", json=HELLO)
        session = {"mcp-session-id": opened.headers["mcp-session-id"]}
        async with client.stream("GET", "/mcp", headers=session) as news:
            assert news.status_code == 200
            before = len(asyncio.all_tasks())
            for _ in range(3):
                await _drop_one(here)
            async with asyncio.timeout(PATIENCE_S):
                while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110 - tasks end without an event
                    await asyncio.sleep(0.05)
            assert (await client.post("/mcp", json=PING, headers=session)).status_code == 200
            # A session that was opened again would have no stream.
            assert (await client.get("/mcp", headers=session)).status_code == 409


PING = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
REFUSED: dict[str, tuple[int, dict[str, Any]]] = {
    "a body that is not JSON": (400, {"method": "POST", "content": b"{nope"}),
    "a list of nothing": (400, {"method": "POST", "content": b"[]"}),
    "a form": (400, {"method": "POST", "content": b"a=b", "headers": {"content-type": "text/plain"}}),
    "a client that accepts nothing": (406, {"method": "POST", "json": HELLO, "headers": {"accept": "image/png"}}),
    "a request before the greeting": (400, {"method": "POST", "json": PING}),
    "a greeting without an id": (400, {"method": "POST", "json": {**HELLO, "id": None}}),
    "a greeting without parameters": (200, {"method": "POST", "json": {**HELLO, "params": {}}}),
    "a stream that is not accepted": (406, {"method": "GET", "headers": {"accept": "application/json"}}),
    "a stream of no session": (400, {"method": "GET"}),
    "an end of no session": (400, {"method": "DELETE"}),
}


async def test_a_refused_request_leaves_no_session_ends_none_and_names_none(home: Path) -> None:
    (home / "settings.toml").write_text("max_mcp_sessions = 1\n")
    async with place(home) as here, httpx.AsyncClient(base_url=here.base, timeout=PATIENCE_S) as client:
        client.headers.update({**here.bearer, **HEADERS})
        opened = await client.post("/mcp", json=HELLO)
        session = {"mcp-session-id": opened.headers["mcp-session-id"]}
        assert (await client.post("/mcp", json=PING, headers=session)).status_code == 200
        before = len(asyncio.all_tasks())
        for name, (status, request) in REFUSED.items():
            answer = await client.request(url="/mcp", **request)
            assert answer.status_code == status, name
            assert '"error"' in answer.text, name
            assert "mcp-session-id" not in answer.headers, name
            assert (await client.post("/mcp", json=PING, headers=session)).status_code == 200, name
        async with asyncio.timeout(PATIENCE_S):
            while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110 - tasks end without an event
                await asyncio.sleep(0.05)


async def test_a_further_session_takes_the_place_of_an_idle_one_and_is_refused_where_all_are_in_use(
    home: Path,
) -> None:
    (home / "settings.toml").write_text("max_mcp_sessions = 1\n")
    async with place(home) as here, httpx.AsyncClient(base_url=here.base, timeout=PATIENCE_S) as client:
        client.headers.update({**here.bearer, **HEADERS})
        first, second = [
            {"mcp-session-id": (await client.post("/mcp", json=HELLO)).headers["mcp-session-id"]} for _ in range(2)
        ]
        # It is opened again when it is used, and takes the place of the other one.
        assert (await client.post("/mcp", json=PING, headers=first)).status_code == 200
        async with client.stream("GET", "/mcp", headers=second) as news:
            assert news.status_code == 200
            before = len(asyncio.all_tasks())
            refused = await client.post("/mcp", json=HELLO)
            assert "E3407" in refused.text
            assert "mcp-session-id" not in refused.headers
            assert "E3407" in (await client.post("/mcp", json=PING, headers=first)).text
            assert (await client.post("/mcp", json=PING, headers=second)).status_code == 200
            async with asyncio.timeout(PATIENCE_S):
                while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110 - tasks end without an event
                    await asyncio.sleep(0.05)

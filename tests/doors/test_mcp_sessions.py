"""Sessions of the handshake era go on at every server of a store, whichever answered the handshake."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio

from interlock import Interlock
from interlock.api.offers import Offers
from interlock.api.service import Service
from interlock.core.clock import Clock
from interlock.doors.mcp import McpDoor
from interlock.doors.mcp.session_ids import LIVES_S, Agreed, SessionIds
from tests.support.asking import upstream
from tests.support.mcp import AGENT, OTHER, PATIENCE_S, World, serving
from tests.support.mcp import world as world

ACCEPT = {"accept": "application/json, text/event-stream"}
READY = {"jsonrpc": "2.0", "method": "notifications/initialized"}
ASKS: dict[str, Any] = {"elicitation": {}, "sampling": {}, "roots": {}}


@pytest_asyncio.fixture
async def other(world: World) -> AsyncGenerator[McpDoor]:
    """A second server on the same store."""
    door = McpDoor(Service(world.app))
    async with door.lifespan():
        yield door


@asynccontextmanager
async def clients(world: World, other: McpDoor, subject: str = AGENT) -> AsyncGenerator[tuple[httpx.AsyncClient, ...]]:
    """Connections of one caller to both servers."""
    headers = {"authorization": f"Bearer {await world.token(subject=subject)}", **ACCEPT}
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(serving(other))
        yield tuple(
            [
                await stack.enter_async_context(httpx.AsyncClient(base_url=base, headers=headers, timeout=PATIENCE_S))
                for base in (world.base, f"http://127.0.0.1:{port}")
            ]
        )


async def opened(client: httpx.AsyncClient, **capabilities: Any) -> dict[str, str]:
    """Open a session; the headers of its requests."""
    params = {
        "protocolVersion": "2025-06-18", "capabilities": capabilities, "clientInfo": {"name": "t", "version": "1"},
    }  # fmt: skip
    answer = await client.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params})
    assert answer.status_code == 200, answer.text
    return {"mcp-session-id": answer.headers["mcp-session-id"], "mcp-protocol-version": "2025-06-18"}


def request(method: str, number: int = 2, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


def message(answer: httpx.Response) -> Any:
    (line,) = [line for line in answer.text.splitlines() if line.startswith("data:") and line[5:].strip()]
    return json.loads(line[5:])


async def test_every_request_of_a_session_is_answered_at_a_server_that_did_not_open_it(
    world: World, other: McpDoor
) -> None:
    async with clients(world, other) as (here, there):
        session = await opened(here)
        assert (await there.post("/mcp", json=READY, headers=session)).status_code == 202
        asked = (
            request("ping"), request("tools/list"), request("tools/call", name="demo-add", arguments={"a": 1, "b": 2}),
            request("resources/list"), request("prompts/list"), request("logging/setLevel", level="info"),
        )  # fmt: skip
        for one in asked:
            answers = [await client.post("/mcp", json=one, headers=session) for client in (there, here)]
            assert [answer.status_code for answer in answers] == [200, 200], one["method"]
            assert {answer.headers["mcp-session-id"] for answer in answers} == {session["mcp-session-id"]}
            assert all("result" in message(answer) for answer in answers), one["method"]
        # A request is known by its session and id at whichever server it arrives.
        called = [
            message(await client.post("/mcp", json={**asked[2], "id": number}, headers=session))
            for number, client in enumerate((here, there), 10)
        ]
        ids = {one["result"]["_meta"]["interlock/call"]["id"] for one in called}
        assert len(ids) == 2


async def test_a_session_goes_on_at_many_servers_at_once_and_is_opened_once_at_each(
    world: World, other: McpDoor
) -> None:
    async with clients(world, other) as (here, there):
        session = await opened(here)
        answers = await asyncio.gather(
            *(there.post("/mcp", json=request("tools/list", number), headers=session) for number in range(2, 22))
        )
        assert {answer.status_code for answer in answers} == {200}
        assert len({message(answer)["id"] for answer in answers}) == 20
        assert other._sdk.sessions.held(f"local/{AGENT}") == [session["mcp-session-id"]]  # pyright: ignore[reportPrivateUsage]
        within = other._sdk._manager._server_instances  # pyright: ignore[reportPrivateUsage]
        assert len(within) == 1


async def test_a_request_whose_session_is_opened_while_its_id_is_read_goes_on_in_that_session(
    world: World, other: McpDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SessionIds.read
    reading, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(ids: SessionIds, name: str, owner: str) -> Agreed | None:
        found = await read(ids, name, owner)
        if not reading.is_set():
            reading.set()
            await go_on.wait()
        return found

    async with clients(world, other) as (here, there):
        session = await opened(here)
        monkeypatch.setattr(SessionIds, "read", slowly)
        first = asyncio.create_task(there.post("/mcp", json=request("tools/list", 2), headers=session))
        await reading.wait()
        assert (await there.post("/mcp", json=request("tools/list", 3), headers=session)).status_code == 200
        go_on.set()
        assert (await first).status_code == 200
        assert len(other._sdk._manager._server_instances) == 1  # pyright: ignore[reportPrivateUsage]


async def test_a_session_hears_of_changes_from_when_it_is_ready_however_long_the_store_takes(
    world: World, other: McpDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(*_: object) -> None:
        begun.set()
        await go_on.wait()

    monkeypatch.setattr(Offers, "attend", slowly)
    async with clients(world, other) as (here, _):
        session = await opened(here)
        async with here.stream("GET", "/mcp", headers=session) as stream:
            await begun.wait()
            await world.door.tools_changed()
            async with asyncio.timeout(PATIENCE_S):
                async for line in stream.aiter_lines():
                    if "notifications/tools/list_changed" in line:
                        break
        go_on.set()


async def test_a_session_that_was_opened_at_another_server_hears_of_changes_where_it_listens(
    world: World, other: McpDoor
) -> None:
    async with clients(world, other) as (here, there):
        session = await opened(here)
        await here.post("/mcp", json=READY, headers=session)
        async with there.stream("GET", "/mcp", headers=session) as stream:
            assert (stream.status_code, stream.headers["mcp-session-id"]) == (200, session["mcp-session-id"])
            assert (await there.post("/mcp", json=request("tools/list"), headers=session)).status_code == 200
            await other.tools_changed()
            async with asyncio.timeout(PATIENCE_S):
                async for line in stream.aiter_lines():
                    if "notifications/tools/list_changed" in line:
                        break


async def test_an_id_opens_nothing_for_another_caller_or_with_a_byte_changed(world: World, other: McpDoor) -> None:
    async with clients(world, other) as (here, there), clients(world, other, OTHER) as strangers:
        session = await opened(here)
        name = session["mcp-session-id"]
        raw = bytearray(base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)))
        raw[20] ^= 1
        changed = base64.urlsafe_b64encode(bytes(raw)).decode().rstrip("=")
        for refused in (changed, name[:-8], "", "a" * 40, "é", "0" * 32):
            headers: Any = {**session, "mcp-session-id": refused.encode()}
            answer = await there.post("/mcp", json=request("ping"), headers=headers)
            assert answer.status_code in (400, 404), refused
            assert "E3" in answer.text
        for stranger in strangers:
            for _ in range(2):
                assert (await stranger.post("/mcp", json=request("ping"), headers=session)).status_code == 404
        # Nor has any of them ended it.
        for client in (here, there):
            assert (await client.post("/mcp", json=request("ping"), headers=session)).status_code == 200


async def test_a_session_that_its_client_ended_is_not_opened_again_there(world: World, other: McpDoor) -> None:
    async with clients(world, other) as (here, there):
        session = await opened(here)
        assert (await there.delete("/mcp", headers=session)).status_code == 200
        assert (await there.post("/mcp", json=request("ping"), headers=session)).status_code == 404
        assert (await there.delete("/mcp", headers=session)).status_code == 404
        assert (await here.delete("/mcp", headers=session)).status_code == 200
        assert (await here.post("/mcp", json=request("ping"), headers=session)).status_code == 404


async def test_an_answer_reaches_the_question_that_it_answers_or_is_refused(world: World, other: McpDoor) -> None:
    """One session, one call at each server: both ask at the same time, and the answers arrive at the wrong ones."""
    async with upstream(world, "http", protocol="handshake") as asking, clients(world, other) as (here, there):
        asking.expected = 2
        session = await opened(here, **ASKS)
        questions: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

        async def call(client: httpx.AsyncClient, name: str) -> str:
            arguments = {"name": f"n-{name}", "idempotency_key": name}
            asked = request("tools/call", 7, name="asks-ask", arguments=arguments)
            async with client.stream("POST", "/mcp", json=asked, headers=session) as stream:
                async for line in stream.aiter_lines():
                    told: Any = json.loads(line[5:]) if line.startswith("data:") and line[5:].strip() else {}
                    if told.get("method") == "elicitation/create":
                        questions.put_nowait((name, told["id"]))
                    if "result" in told:
                        return told["result"]["content"][0]["text"]
            return ""

        calls = [asyncio.ensure_future(call(client, name)) for client, name in ((here, "here"), (there, "there"))]
        ids = dict([await questions.get() for _ in calls])
        assert ids["here"] != ids["there"]

        async def answer(client: httpx.AsyncClient, name: str) -> httpx.Response:
            content = {"action": "accept", "content": {"answer": f"for {name}"}}
            return await client.post(
                "/mcp", json={"jsonrpc": "2.0", "id": ids[name], "result": content}, headers=session
            )

        for client, name in ((here, "there"), (there, "here")):
            refused = await answer(client, name)
            assert refused.status_code == 409
            error = refused.json()["error"]
            assert error["data"]["error_code"] == "E3411"
            assert "Mcp-Session-Id" in error["data"]["resolution"]
        assert not any(one.done() for one in calls)
        for client, name in ((here, "here"), (there, "there")):
            assert (await answer(client, name)).status_code == 202
        assert await asyncio.gather(*calls) == ["for here", "for there"]


async def test_ids_hold_what_was_agreed_and_are_of_no_use_after_a_month(home: Path) -> None:
    now = 1_800_000_000_000
    clock = Clock(now_ms=lambda: now)
    async with Interlock.open(home, clock=clock, housekeeping=False) as app:
        ids = SessionIds(app)
        shows = {"io.modelcontextprotocol/ui": {"mimeTypes": ["text/html"]}}
        agreed = Agreed("2025-11-25", {"elicitation": {"form": {}}, "extensions": shows})
        made = await ids.make("local/a\nNone", agreed)
        assert made.isascii()
        assert made.isprintable()
        assert await ids.read(made, "local/a\nNone") == agreed
        assert await SessionIds(app).read(made, "local/a\nNone") == agreed
        assert await ids.read(made, "local/a\nsomebody") is None
        # What a client states beyond bounds is not in the id, and what this server does not use never is.
        large = Agreed("2025-11-25", {"elicitation": {}, "roots": {"x": "y" * 5000}, "other": {}})
        assert await ids.read(await ids.make("o", large), "o") == Agreed("2025-11-25", {"elicitation": {}, "roots": {}})
        many = Agreed("2025-11-25", {"experimental": {str(one): {} for one in range(1000)}, "sampling": {}})
        small = await ids.make("o", many)
        assert len(small) < 200
        assert orjson.dumps((await ids.read(small, "o") or agreed).capabilities) == b'{"sampling":{}}'
        now += (LIVES_S - 60) * 1000
        assert await ids.read(made, "local/a\nNone") == agreed
        now += 120_000
        assert await ids.read(made, "local/a\nNone") is None

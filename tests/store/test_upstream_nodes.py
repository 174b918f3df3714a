"""Three servers on one PostgreSQL store share an upstream: one of them probes it and looks at what it changed."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import psycopg

from tests import warm
from tests.support.cli import Cli
from tests.support.cluster import SERVE, address_of, prepare
from tests.support.postgres import Server

NODES = 3
PROBES = 10
ROUNDS = 10
PATIENCE_S = 120.0
VERSION = "2025-06-18"
CHANGED = b'data: {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}\n\n'
TOOLS = '''
from typing import Annotated

from interlock import Field, tool


@tool(version="1.0.0", mutation_class="read_only", namespace="own")
async def look(name: Annotated[str, Field(description="a name", examples=["a"])]) -> str:
    """Look at something."""
    return name
'''


class Shop:
    """An MCP server that remembers which conversation listed its tools, and which looked at all that it has."""

    def __init__(self) -> None:
        self.names = ["look"]
        self.listed: list[str] = []
        self.discovered: list[str] = []
        self.streams: dict[str, asyncio.StreamWriter] = {}
        self._numbers = itertools.count(1)
        self._writers: set[asyncio.StreamWriter] = set()

    def change(self, name: str) -> None:
        """Offer one more tool, and tell every conversation."""
        self.names.append(name)
        for writer in self.streams.values():
            writer.write(CHANGED)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._answer(reader, writer):
                pass
        self._writers.discard(writer)
        writer.close()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {line.split(":", 1)[0].lower(): line.split(":", 1)[1].strip() for line in lines[1:] if line}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        session = headers.get("mcp-session-id", "")
        if lines[0].startswith("GET"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
            self.streams[session] = writer
            await reader.read()
            del self.streams[session]
            return False
        request: Any = json.loads(body) if body else {}
        if "id" not in request:
            writer.write(b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n")
            return True
        answer = {"jsonrpc": "2.0", "id": request["id"], **self._result(request["method"], session)}
        text = json.dumps(answer).encode()
        named = f"mcp-session-id: s{next(self._numbers)}\r\n" if request["method"] == "initialize" else ""
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{named}content-length: {len(text)}\r\n\r\n"
        writer.write(head.encode() + text)
        return True

    def _result(self, method: str, session: str) -> Any:
        match method:
            case "initialize":
                offered = {"tools": {"listChanged": True}, "resources": {}}
                info = {"name": "shop", "version": "1"}
                return {"result": {"protocolVersion": VERSION, "capabilities": offered, "serverInfo": info}}
            case "tools/list":
                self.listed.append(session)
                tools: list[Any] = [
                    {
                        "name": name,
                        "description": f"Tells {name}.",
                        "inputSchema": {"type": "object", "properties": {}},
                        "annotations": {"readOnlyHint": True},
                    }
                    for name in self.names
                ]
                return {"result": {"tools": tools}}
            case "resources/list":
                self.discovered.append(session)
                return {"result": {"resources": []}}
            case "resources/templates/list":
                return {"result": {"resourceTemplates": []}}
            case "tools/call":
                return {"result": {"content": [{"type": "text", "text": "good"}]}}
            case "ping":
                return {"result": {}}
            case _:
                return {"error": {"code": -32601, "message": "unknown method"}}


async def until(reached: Callable[[], Any], what: str) -> None:
    """Wait for something that other processes do."""
    began = time.monotonic()
    while not reached():
        assert time.monotonic() - began < PATIENCE_S, what
        await asyncio.sleep(0.02)


@asynccontextmanager
async def shop() -> AsyncGenerator[tuple[Shop, str]]:
    one = Shop()
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    try:
        yield one, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    finally:
        server.close()
        one.close()
        await server.wait_closed()


async def test_one_of_three_nodes_probes_an_upstream_and_looks_at_its_changes_and_is_replaced_when_it_dies(
    tmp_path: Path, postgres_server: Server
) -> None:
    address = postgres_server.new_schema()
    (tmp_path / "own_tools.py").write_text(TOOLS)
    clis = [Cli(tmp_path / str(number), {"INTERLOCK_STORE": address}) for number in range(NODES)]
    settings = "upstream_probe_s = 0.2\n"
    with ExitStack() as stack:
        async with shop() as (upstream, url), httpx.AsyncClient(timeout=PATIENCE_S) as web:
            token = await asyncio.to_thread(prepare, clis, tmp_path / "own_tools.py", "shop.*", settings)
            web.headers["authorization"] = f"Bearer {token}"
            words = ("upstream", "add", "mcp", "shop", url, "--allow-private", "--accept-hints")
            added = await asyncio.to_thread(clis[0], *words)
            assert added.code == 0, added.out + added.err
            assert len(upstream.discovered) == 1
            nodes: dict[str, tuple[warm.Started, str]] = {}
            for cli in clis:
                process = stack.enter_context(warm.start(SERVE, cli.environment, cli.path))
                nodes[str(cli.home)] = process, await asyncio.to_thread(address_of, process)

            async def called(rest: str) -> None:
                sent: Any = {"tool_id": "shop.look", "parameters": {}}
                answer = await web.post(f"{rest}/tools/invoke", json=sent)
                assert answer.status_code == 200, answer.text

            for _, rest in nodes.values():
                await called(rest)
            await until(lambda: len(upstream.streams) >= NODES, "every node is connected")
            first = await _prober(upstream, "the first")

            with closing(psycopg.connect(address, autocommit=True)) as connection:
                row = connection.execute(
                    "SELECT i.id, convert_from(i.report, 'UTF8') FROM instance i JOIN fact f"
                    " ON f.name = 'upstream_prober:shop' AND f.value LIKE i.id || ' %'"
                ).fetchone()
                assert row is not None
                holder = next(place for place in nodes if f'"{place}"' in row[1])
                process, _ = nodes.pop(holder)
                process.send_signal(signal.SIGKILL)
                await asyncio.to_thread(process.wait)
                connection.execute("UPDATE instance SET until_ms = 1 WHERE id = %s", (row[0],))  # 15 seconds later
            assert await _prober(upstream, "the next", but=first) != first

            # Every node hears of a change at once. One that is slow to hear of it may look as well.
            looks: list[int] = []
            for number in range(ROUNDS):
                before, name = len(upstream.discovered), f"more{number}"
                upstream.change(name)
                await asyncio.gather(*(_served(web, rest, f"shop.{name}") for _, rest in nodes.values()))
                looks.append(len(upstream.discovered) - before)
                assert looks[-1] >= 1
                if looks[-1] == 1:
                    break
            assert 1 in looks, looks


async def _prober(upstream: Shop, what: str, but: str = "") -> str:
    """The one conversation that lists the tools, of several probes."""
    start = len(upstream.listed)
    if but:
        await until(lambda: {*upstream.listed[start:]} - {but}, f"{what} node probes")
        start = len(upstream.listed)
    await until(lambda: len(upstream.listed) >= start + PROBES, f"{what} node probes on")
    (one,) = set(upstream.listed[start:])
    return one


async def _served(web: httpx.AsyncClient, rest: str, tool: str) -> None:
    began = time.monotonic()
    while tool not in [one["tool_id"] for one in (await web.get(f"{rest}/tools")).json()["tools"]]:
        assert time.monotonic() - began < PATIENCE_S, tool
        await asyncio.sleep(0.02)

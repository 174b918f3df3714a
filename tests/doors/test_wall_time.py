"""The wall time of an answer at the deadline, at every wire, for every kind of tool that overruns.

One try of many in which nothing else kept the machine busy is enough: the clause speaks of an idle machine.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from interlock import Interlock, tool
from interlock.registry.source import load
from tests.sample import Text
from tests.support import isolated_tools as cell
from tests.support.answers import Wish
from tests.support.calls import admit, write
from tests.support.mcp_upstreams import SCRIPTED, sdk_server
from tests.support.openapi import document
from tests.support.programs import manifest, written
from tests.support.upstream_servers import Answer, HttpServer, ShopServer, SocketServer, json_answer
from tests.support.wires import DOORS, Wires, opened

Json = dict[str, Any]
# A tool that overruns, and its arguments.
Target = tuple[str, Json]
ALLOWED_MS = 1000
LATEST_MS = 100
TRIES = 60
READ_ONLY: Json = {"mutation_class": "read_only", "timeout_default": 1}


@tool(version="1.0.0", mutation_class="read_only", namespace="late", timeout_s=1)
async def waits() -> str:
    """Wait for ever."""
    await asyncio.Event().wait()
    return "never"


@asynccontextmanager
async def function(app: Interlock, folder: Path) -> AsyncGenerator[Target]:
    await admit(app, waits)
    yield "late.waits", {}


@asynccontextmanager
async def sandboxed_function(app: Interlock, folder: Path) -> AsyncGenerator[Target]:
    await admit(app, cell.lingers)
    yield "cell.lingers", {"marker": "98743"}


@asynccontextmanager
async def program(app: Interlock, folder: Path) -> AsyncGenerator[Target]:
    _, tools = load(written(folder / "program.json", manifest("naps", ["sleep", "98741"], timeout_default=1)))
    await admit(app, *tools)
    yield "prog.naps", {}


@asynccontextmanager
async def mcp_by_command(app: Interlock, folder: Path) -> AsyncGenerator[Target]:
    config: Json = {"command": [sys.executable, "-I", "-S", str(SCRIPTED)]}
    yield await added(app, "mcp", config, "hang")


@asynccontextmanager
async def mcp_by_address(app: Interlock, folder: Path) -> AsyncGenerator[Target]:
    async with sdk_server() as url:
        yield await added(app, "mcp", {"url": url, "allow_private": True}, "hang")


@asynccontextmanager
async def openapi(app: Interlock, folder: Path) -> AsyncGenerator[Target]:
    paths: Json = {"/thing": {"get": {"operationId": "look", "responses": {"200": {"description": "it"}}}}}
    async with HttpServer.open() as server:
        config: Json = {"urls": [server.url], "allow_private": True, "openapi": document(paths)}
        server.otherwise = lambda _: json_answer({})
        target = await added(app, "openapi", config, "look")
        server.otherwise = lambda _: Answer(hang=True)
        yield target


@asynccontextmanager
async def http(app: Interlock, folder: Path) -> AsyncGenerator[Target]:
    async with HttpServer.open() as server:
        looks: Json = {"name": "look", "description": "Look at a thing.", "method": "GET", "path": "/thing"}
        looks |= {"input_schema": {"type": "object"}, "output_schema": {"type": "object"}}
        server.otherwise = lambda _: json_answer({})
        target = await added(app, "http", {"urls": [server.url], "allow_private": True, "tools": [looks]}, "look")
        server.otherwise = lambda _: Answer(hang=True)
        yield target


@asynccontextmanager
async def grpc(app: Interlock, folder: Path) -> AsyncGenerator[Target]:
    async def hang(*_: Any) -> Any:
        await asyncio.Event().wait()

    async with ShopServer.open(folder) as server:
        config: Json = {"targets": [f"127.0.0.1:{server.port}"], "plaintext": True, "allow_private": True}
        target = await added(app, "grpc", config, "shop.v1.Shop.Get")
        server.answer = hang
        yield target


@asynccontextmanager
async def websocket(app: Interlock, folder: Path) -> AsyncGenerator[Target]:
    async with SocketServer.open() as server:
        looks: Json = {"name": "look", "description": "Look at a thing.", "method": "look"}
        looks |= {"input_schema": {"type": "object"}, "output_schema": {"type": "object"}}
        target = await added(app, "websocket", {"urls": [server.url], "allow_private": True, "tools": [looks]}, "look")
        server.answer = _silent
        yield target


async def _silent(*_: Any) -> list[Any]:
    return []


async def pay(name: Text) -> str:
    """Pay for ever, on the event loop."""
    await asyncio.Event().wait()
    return "never"


@asynccontextmanager
async def write_of_python(app: Interlock, folder: Path) -> AsyncGenerator[Target]:
    await admit(app, write(pay, timeout_s=1, changes="account:{name}"))
    yield "demo.pay", {}


async def added(app: Interlock, kind: str, config: Json, name: str) -> Target:
    """The address of a tool of an upstream that was added."""
    overlay: Json = {"tools": {name: READ_ONLY}}
    report = await app.upstreams.add("far", kind, config, by=app.caller, overlay=overlay)
    (one,) = (one for one in report.tools if one.name == name)
    assert one.state == "admitted", one.reason
    return one.address, {}


KINDS: dict[str, Callable[[Interlock, Path], AbstractAsyncContextManager[Target]]] = {
    "Python function": function,
    "sandboxed Python function": sandboxed_function,
    "program": program,
    "MCP over stdio": mcp_by_command,
    "MCP over HTTP": mcp_by_address,
    "OpenAPI": openapi,
    "HTTP, described by a file": http,
    "gRPC": grpc,
    "WebSocket": websocket,
    "write of Python": write_of_python,
}


@pytest.mark.proves("LIFE-10")
@pytest.mark.parametrize("kind", KINDS)
async def test_at_every_wire_whatever_overruns_is_answered_within_a_tenth_of_a_second_of_the_deadline(
    tmp_path: Path, kind: str
) -> None:
    async with opened(tmp_path / "home") as wires, KINDS[kind](wires.app, tmp_path) as target:
        late_ms: dict[str, list[float]] = {door: [] for door in DOORS}
        for _ in range(TRIES):
            behind = [door for door, found in late_ms.items() if min(found, default=LATEST_MS) >= LATEST_MS]
            if not behind:
                break
            found = await asyncio.gather(*(_late_ms(wires, door, *target) for door in behind))
            for door, late in zip(behind, found, strict=True):
                late_ms[door].append(late)
            await wires.app.gateway.services.answers("far")  # calls that ran out of time open the breaker
        assert all(min(late) < LATEST_MS for late in late_ms.values()), late_ms


async def _late_ms(wires: Wires, door: str, address: str, arguments: Json) -> float:
    """How far from its deadline a call is answered, as its client measures it."""
    writes = address == "demo.pay"
    key = f"{door}-{time.monotonic_ns()}" if writes else None
    arguments = {"name": key} if writes else arguments  # so that none waits for another
    began = time.monotonic()
    heard = await wires.rows[door].heard(Wish(address, arguments, key=key))
    took_ms = (time.monotonic() - began) * 1000
    # A write that was cut off may have taken effect.
    assert heard.triple[1:] == ("DEADLINE_EXCEEDED", "timeout", not writes), (door, heard.text)
    return abs(took_ms - ALLOWED_MS)

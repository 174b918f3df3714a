"""The MCP endpoint over HTTP and stdio, and clients of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx2
import mcp_types as types
import pytest
import pytest_asyncio
import uvicorn
from hypothesis import strategies as st
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from interlock import Caller, Context, Failure, Field, Interlock, tool
from interlock.api.service import Service
from interlock.authority.dids import make_did_key
from interlock.authority.identities import Identity
from interlock.authority.keys import make_private
from interlock.call.capability import ToolGrant
from interlock.doors.mcp import McpDoor
from tests import sample
from tests.sample import TOOLS
from tests.support import forked, postgres
from tests.support.calls import publish
from tests.support.identities import OPERATOR

DOOR = pytest.mark.proves("OPS-02")
PATIENCE_S = 120
AGENT, OTHER = (make_did_key(make_private("EdDSA").public_key()) for _ in range(2))
REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))


@tool(version="1.0.0", mutation_class="read_only", namespace="slow", timeout_class="long_running")
async def count(ctx: Context, to: sample.Number) -> int:
    """Count, and say how far it is; above a hundred, wait for somebody to give up on it."""
    for step in range(min(to, 3)):
        ctx.progress(f"step {step}", percent=100 * step / 3)
    if to > 100:
        ctx.progress("waiting")
        await asyncio.Event().wait()
    return to


@tool(version="1.0.0", mutation_class="read_only", namespace="shapes")
async def point(x: sample.Number) -> sample.Point:
    """An object."""
    return sample.Point(x, 2)


@tool(version="1.0.0", mutation_class="read_only", namespace="shapes", max_inline_chars=200)
async def long_text(length: Annotated[int, Field(description="how long", examples=[3])]) -> str:
    """A text of that length."""
    return "x" * length


@tool(version="1.0.0", mutation_class="read_only", namespace="shapes")
async def broken(x: sample.Number) -> int:
    """A tool that fails, with content of its own or without."""
    details = {"content": [{"type": "text", "text": "no"}, {"type": "image", "data": "aa==", "mimeType": "image/png"}]}
    raise Failure("EXECUTION_FAILED", "it failed", details=details if x else None)


OWN = (count, point, long_text, broken)


class World:
    """A server on a port of its own, and tokens for it."""

    def __init__(self, app: Interlock, home: Path, door: McpDoor, port: int) -> None:
        self.app = app
        self.home = home
        self.door = door
        self.base = f"http://127.0.0.1:{port}"
        self.url = f"{self.base}/mcp"

    async def token(self, tools: Sequence[str] = ("*",), subject: str = AGENT) -> str:
        return await self.app.tokens.issue(subject=subject, by=OPERATOR, tools=[ToolGrant(one) for one in tools])

    @asynccontextmanager
    async def client(self, mode: str, token: str | None = None, **options: Any) -> AsyncGenerator[Client]:
        headers = {"authorization": f"Bearer {token or await self.token()}"}
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=PATIENCE_S))
            transport = streamable_http_client(self.url, http_client=http)
            client = Client(transport, mode=mode, read_timeout_seconds=PATIENCE_S, **options)
            yield await stack.enter_async_context(client)


async def prepare(app: Interlock) -> None:
    """Put the tools of this file and two agents into a home."""
    for one in OWN:
        await app.journal.commit(publish(one))
    for one in (*TOOLS, *OWN):
        app.catalog.attach(one)
    for did in (AGENT, OTHER):
        await app.identities.register(Identity(did=did, trust=90), by="test")
    app.issuer_keys.init("EdDSA")


@asynccontextmanager
async def serving(app: Any) -> AsyncGenerator[int]:
    """Serve an application on a free port."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup(sockets=[listening])
        try:
            yield listening.getsockname()[1]
        finally:
            server.force_exit = True
            await server.shutdown(sockets=[listening])


@pytest_asyncio.fixture
async def world(home: Path) -> AsyncGenerator[World]:
    async with Interlock.open(home, housekeeping=False) as app:
        await prepare(app)
        door = McpDoor(Service(app))
        async with door.lifespan(), serving(door) as port:
            yield World(app, home, door, port)


def text(result: Any) -> str:
    return "".join(block.text for block in result.content if block.type == "text")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SERVER = """
import asyncio, sys
from interlock import Interlock
from interlock.doors.mcp import McpDoor
from interlock.api.service import Service
from tests.sample import add

async def main() -> None:
    async with Interlock.open(sys.argv[1], housekeeping=False) as app:
        app.catalog.attach(add)
        await McpDoor(Service(app)).run_stdio(*sys.argv[2:])

asyncio.run(main())
"""


def stdio(world: World, *arguments: str, **env: str) -> StdioServerParameters:
    root = str(Path(__file__).parents[2])
    command, *words = forked.python()
    args = [*words, "-c", SERVER, str(world.home), *arguments]
    return StdioServerParameters(command=command, args=args, env={**env, **postgres.given()}, cwd=root)


class Person:
    """Answers questions with a word of theirs, and the question."""

    def __init__(self, who: str = "ann", action: Any = "accept") -> None:
        self.who = who
        self.action = action
        self.asked: list[str] = []
        self.held: asyncio.Event | None = None

    async def elicit(self, context: Any, params: Any) -> types.ElicitResult:
        self.asked.append(params.message)
        if self.held is not None:
            await self.held.wait()
        content: Any = {"answer": f"{self.who}:{params.message}"} if self.action == "accept" else None
        return types.ElicitResult(action=self.action, content=content)

    async def sample(self, context: Any, params: Any) -> types.CreateMessageResult | types.ErrorData:
        if self.action != "accept":
            return types.ErrorData(code=-1, message="User rejected sampling request")
        return types.CreateMessageResult(role="assistant", content=types.TextContent(text=self.who), model="m")

    async def roots(self, context: Any) -> types.ListRootsResult:
        return types.ListRootsResult(roots=[types.Root(uri="file:///home/ann")])  # pyright: ignore[reportArgumentType]

    @property
    def options(self) -> dict[str, Any]:
        return {
            "elicitation_callback": self.elicit,
            "sampling_callback": self.sample,
            "list_roots_callback": self.roots,
        }

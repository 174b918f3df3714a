"""A server with all its endpoints open, and every wire to it: the library, HTTP, gRPC, and MCP in both eras.

The table of the wires is `wire_rows.ROWS`: a row is a class with every request that tests make over several wires.
Answers are in the same terms whatever the wire, so that wires can be compared (`call`), or word for word, for tests
that look for what must not be in them, or must (`heard`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from interlock import Interlock
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.doors.grpc.v1 import gateway_pb2 as messages
from interlock.doors.server import Listening, serving
from tests.support.answers import Heard, Json, Wish
from tests.support.endpoints import ERAS, Endpoints
from tests.support.identities import did_of
from tests.support.wire_rows import ROWS, Wire

DOORS = tuple(ROWS)
WIRES = tuple(name for name in DOORS if name != "library")
# Those that name a call by its id, whoever made it.
BY_ID = tuple(name for name in DOORS if name not in ERAS)


class Wires(Endpoints):
    """Every wire to one server."""

    # Whether the MCP calls of `told` are those of the SDK's client.
    BY_SDK: tuple[str, ...] = ()

    def __init__(self, service: Service, port: int, grpc_port: int, tokens: dict[str, str]) -> None:
        super().__init__(service, port, grpc_port, tokens)
        self.rows: dict[str, Wire] = {
            name: make(name, self, by_sdk=name in self.BY_SDK) for name, make in ROWS.items()
        }  # fmt: skip

    async def call(self, door: str, tool: str, arguments: Json, key: str | None = None) -> Heard:
        """One call over one wire, word for word."""
        return await self.rows[door].heard(Wish(tool, arguments, key))

    async def texts(self, door: str, tool: str) -> Sequence[str]:
        """All that a wire tells about a tool to those who look for it."""
        return await self.rows[door].texts(tool)

    async def discovered(self, query: str = "", by: str = "") -> Sequence[messages.Tool]:
        """The tools that the gRPC endpoint lists."""
        return (await self.stub.Discover(messages.DiscoverRequest(query=query, by=by), metadata=self.metadata())).tools


class SdkWires(Wires):
    """The same, with the calls of MCP as its SDK makes and reads them."""

    BY_SDK = tuple(ERAS)


W = TypeVar("W", bound=Wires)


@asynccontextmanager
async def served(app: Interlock, tokens: dict[str, str], kind: Callable[..., W] = SdkWires) -> AsyncGenerator[W]:
    """A server over an open home, and every wire to it."""
    service = Service(app)
    async with serving(service, Listening(port=0, ports={"grpc": 0})) as server:
        wires = kind(service, server.port, server.ports["grpc"], tokens)
        try:
            yield wires
        finally:
            await wires.close()


@asynccontextmanager
async def wired(app: Interlock) -> AsyncGenerator[Wires]:
    """A server over an open home, and every wire to it by a token for all tools."""
    if not app.issuer_keys.all():
        app.issuer_keys.init("EdDSA")
    await app.identities.register(Identity(did=did_of("bot"), name="bot", kind="agent", trust=80), by="test")
    token = await app.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("*")], by=app.caller)
    async with served(app, {"full": token}, Wires) as wires:
        yield wires


@asynccontextmanager
async def opened(home: Path, **settings: Any) -> AsyncGenerator[Wires]:
    """The same over a home on disk."""
    async with Interlock.open(home, housekeeping=False, **settings) as app, wired(app) as wires:
        yield wires

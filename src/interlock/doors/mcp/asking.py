"""Questions that an MCP upstream puts to its caller in the middle of a call, relayed to clients that take them.

In the handshake era the upstream pushes its question and waits; in the modern era the call ends with the question, and
the client makes it again with the answer. Either way the upstream is told the capabilities of the very client that
calls, so it never asks what that client cannot answer. A call that nobody can be asked for is made without any.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from interlock.core.connector import Connector, Discovered, RemoteCall
from interlock.upstreams.mcp import Interaction, McpUpstream

# How the client of the call that runs in this context can be asked.
INTERACTION: ContextVar[Interaction | None] = ContextVar("interlock.doors.mcp.interaction", default=None)


def relaying(connect: Callable[[str], Connector]) -> Callable[[str], Connector]:
    """Connections through which upstreams reach the clients of the calls they serve."""

    def connected(name: str) -> Connector:
        connector = connect(name)
        return Relay(connector) if isinstance(connector, McpUpstream) else connector

    return connected


class Relay:
    """An MCP upstream, called with the means to ask back."""

    def __init__(self, server: McpUpstream) -> None:
        self._server = server

    async def call(self, call: RemoteCall) -> Any:
        return await self._server.call(call, INTERACTION.get() or Interaction())

    async def discover(self) -> Discovered:
        return await self._server.discover()

    async def probe(self) -> None:
        await self._server.probe()

    async def close(self) -> None:
        await self._server.close()

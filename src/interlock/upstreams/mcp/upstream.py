"""One MCP server as an upstream: its tools are found and called, its resources and prompts are passed on."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.call.connector import Discovered, RemoteCall
from interlock.core.clock import Clock
from interlock.data.schema import Json
from interlock.upstreams.mcp.answers import understood
from interlock.upstreams.mcp.config import McpConfig
from interlock.upstreams.mcp.content import Content, list_of, session_for
from interlock.upstreams.mcp.protocol import LIST_S
from interlock.upstreams.mcp.sessions import Sessions
from interlock.upstreams.mcp.tool_calls import ToolCalls
from interlock.upstreams.supervisor import Restarts

if TYPE_CHECKING:
    from interlock.resilience.services import Services


class McpUpstream:
    """One MCP server, connected when first needed. `content` has its resources and prompts.

    `alert` is called when it cannot be kept running.
    """

    def __init__(
        self,
        name: str,
        config: McpConfig,
        *,
        clock: Clock,
        on_change: Callable[[], None],
        logs: Path | None = None,
        alert: Callable[[str], None] | None = None,
        restarts: Restarts | None = None,
        services: Services | None = None,
    ) -> None:
        self._name = name
        self._config = config
        self._on_change = on_change
        self._sessions = Sessions(
            name, config, clock=clock, on_change=self._changed, logs=logs, alert=alert, restarts=restarts
        )
        self._calls = ToolCalls(name, config, self._sessions, clock=clock, on_change=self._changed, services=services)
        self.content = Content(name, config, self._sessions)

    def _changed(self) -> None:
        self.forget()
        self._on_change()

    def call(self, call: RemoteCall) -> Coroutine[Any, Any, Any]:
        """Return the tool's value: always `content`, with `structuredContent` and `_meta` if the server gave them."""
        return self._calls.make(call)

    def mapping(self, native: Json, reported: Json) -> Json | None:
        pinned = {"kind": "mcp", "server_id": self._name, "method": "tools/call", "tool_name": native["name"]}
        return {**pinned, **reported}

    async def discover(self, credentials: Mapping[str, str] | None = None) -> Discovered:
        """Return everything the server offers now. Raises E3502 if no version of the protocol is common to both."""
        async with session_for(self._sessions, self._config, credentials) as session:
            server = session.server
            listed = await session.tools(LIST_S, anew=True)
            tools, refused = understood(listed, headers=self._config.url is not None)
            about: Json = {
                "name": server.name,
                "version": server.version,
                "protocol": server.protocol,
                "capabilities": server.capabilities,
                "instructions": server.instructions,
                "resources": await list_of(session, "resources", "resources"),
                "resourceTemplates": await list_of(session, "resources", "resourceTemplates"),
                "prompts": await list_of(session, "prompts", "prompts"),
            }
        return Discovered(tools, refused, about, server.instructions or "")

    def attend(self, hear: Callable[[str], None]) -> None:
        """Call `hear` with the server's list that changed: tools, resources or prompts."""
        self._sessions.opener.attend(hear)

    async def probe(self, credentials: Mapping[str, str] | None = None) -> None:
        """Check that it answers within five seconds. A program that does not is ended, and so restarted."""
        await self._sessions.probe(credentials)

    async def replace(self) -> None:
        """Restart everything without losing a call: the new one is up before the old one is asked to finish."""
        await self._sessions.replace()

    def forget(self) -> None:
        self._calls.forget()

    async def close(self) -> None:
        """End every conversation and every program."""
        await self._sessions.close()

    def health(self) -> Json:
        """The state of the shared conversation, and the number of conversations, for monitoring."""
        return self._sessions.health()

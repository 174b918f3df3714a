"""MCP clients that hear when their list of tools may be another, each with the surface that it was shown.

A surface belongs to the holder of a token. What is loaded with the token, in whatever process and by whatever endpoint,
changes the lists of all its clients, and of nobody else. Clients of the modern era listen by a stream of the SDK, which
gets events from a bus; sessions of the handshake era are notified one by one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from typing import Any

from mcp.server.session import ServerSession
from mcp.server.subscriptions import PromptsListChanged, ResourcesListChanged, ServerEvent, ToolsListChanged

from interlock.api.surfaces import holder_of
from interlock.call.context import Caller

_log = logging.getLogger("interlock.doors.mcp")

Deliver = Callable[[ServerEvent], None]
# Reads the names of the tools that each of some holders has loaded.
Loaded = Callable[[Sequence[str]], Awaitable[dict[str, frozenset[str]]]]

# The notifications by which clients of either era learn that a list may have changed.
LISTS: dict[str, tuple[Callable[[], ServerEvent], Callable[[ServerSession], Coroutine[Any, Any, None]]]] = {
    "tools": (ToolsListChanged, ServerSession.send_tool_list_changed),
    "resources": (ResourcesListChanged, ServerSession.send_resource_list_changed),
    "prompts": (PromptsListChanged, ServerSession.send_prompt_list_changed),
}
# Whose stream is being opened: the SDK subscribes in the request that opens it.
_OPENING: ContextVar[str] = ContextVar("interlock.mcp.opening", default="")


class Audience:
    """The sessions and streams of one endpoint. For the SDK it is the bus of its streams."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._streams: dict[object, tuple[str, Deliver]] = {}
        self._sessions: dict[ServerSession, str] = {}
        # The tools that each holder had loaded when its clients were told last.
        self._known: dict[str, frozenset[str]] = {}
        self._comparing = asyncio.Lock()

    @property
    def sessions(self) -> list[ServerSession]:
        return list(self._sessions)

    # Coming and going

    async def open_stream(self, caller: Caller) -> None:
        """Expect a stream of this caller. It subscribes in the same task."""
        holder = holder_of(caller)
        _OPENING.set(holder)
        await self._attend(holder)

    def subscribe(self, listener: Deliver) -> Callable[[], None]:
        """Add a stream; returns what takes it away again."""
        token = object()
        self._streams[token] = _OPENING.get(), listener

        def leave() -> None:
            self._streams.pop(token, None)
            self._forget()

        return leave

    async def enter(self, session: ServerSession, caller: Caller) -> None:
        """Add a session, or note that it is shown the surface of another token from now on."""
        holder = holder_of(caller)
        if self._sessions.get(session) != holder:
            self._sessions[session] = holder
            await self._attend(holder)

    def leave(self, session: ServerSession) -> None:
        self._sessions.pop(session, None)
        self._forget()

    def __contains__(self, session: object) -> bool:
        return session in self._sessions

    async def _attend(self, holder: str) -> None:
        async with self._comparing:
            if holder not in self._known:
                self._known |= await self._loaded([holder])

    def _forget(self) -> None:
        """Forget what was told to holders without a client."""
        if len(self._known) > 2 * (len(self._sessions) + len(self._streams)) + 100:
            present = self._holders()
            self._known = {holder: names for holder, names in self._known.items() if holder in present}

    def _holders(self) -> set[str]:
        return {*self._sessions.values(), *(holder for holder, _ in self._streams.values())}

    # Telling

    async def publish(self, event: ServerEvent) -> None:
        """Give an event to every stream."""
        for _, deliver in list(self._streams.values()):
            deliver(event)
        await asyncio.sleep(0)  # a burst of events lets the streams send between them

    async def tell_all(self, kind: str) -> None:
        """Tell everybody that a list may be another."""
        event, send = LISTS[kind]
        await self.publish(event())
        for session in self.sessions:
            await sent(send(session))

    async def tell_of_loads(self, *holders: str) -> None:
        """Tell the clients of holders whose loaded tools are others than when they were told last."""
        async with self._comparing:
            now = await self._loaded(holders or sorted(self._holders()))
            changed = {holder for holder, names in now.items() if self._known.get(holder) != names}
            self._known |= now
        if not changed:
            return
        for holder, deliver in list(self._streams.values()):
            if holder in changed:
                deliver(ToolsListChanged())
        for session, holder in list(self._sessions.items()):
            if holder in changed:
                await sent(session.send_tool_list_changed())


async def sent(telling: Awaitable[None]) -> None:
    """Send a notification. A client that went away does not keep the others from hearing."""
    try:
        await telling
    except Exception:  # noqa: BLE001 - whatever is wrong with one client
        _log.debug("a client could not be told of a change", exc_info=True)

"""Sends list_changed and resource-updated notifications to subscribed MCP clients.

Clients of the modern era listen in a request that lasts; sessions of the handshake era are told by name, for as long as
they last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import mcp_types as types
from mcp.server.session import ServerSession
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ToolsListChanged,
)
from mcp.shared.exceptions import MCPError

from interlock.api.service import Service
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.doors.mcp.context import CALLER, Context, connection, missing, named, state
from interlock.doors.mcp.offers import Offers
from interlock.doors.mcp.resource_subscriptions import Watching

_log = logging.getLogger("interlock.doors.mcp")

# Where a session of the handshake era remembers what it watches.
_WATCHED = "interlock.watched"
MAX_WATCHED = 100

# The messages to clients of either era that a list may have changed.
_LISTS = {
    "tools": (ToolsListChanged, ServerSession.send_tool_list_changed),
    "resources": (ResourcesListChanged, ServerSession.send_resource_list_changed),
    "prompts": (PromptsListChanged, ServerSession.send_prompt_list_changed),
}


class Changes:
    """The subscribers to changes of tools, resources and prompts. `caller` identifies the caller of a request."""

    def __init__(self, service: Service, caller: Callable[[Context], Awaitable[Caller]]) -> None:
        self.offers = Offers(service, self._list_changed)
        self._caller = caller
        self._supervisor = service.lock.supervisor
        self._bus = InMemorySubscriptionBus()
        self._listen = ListenHandler(self._bus)
        self._watching = Watching(service, self.offers, self._resource_changed)
        self._sessions: set[ServerSession] = set()
        self._untold: set[str] = set()
        self._telling: set[asyncio.Task[None]] = set()

    # Lists

    async def remember(self, ctx: Context, _: types.NotificationParams) -> None:
        """Notify sessions of the handshake era of changes by name, for as long as they last."""
        session = ctx.session
        kept = connection(ctx)
        if kept.state.setdefault(CALLER, session) is session:  # however often a client says that it is ready
            await self.offers.attend(await self._caller(ctx))
            self._sessions.add(session)
            kept.exit_stack.callback(self._sessions.discard, session)

    async def tools_changed(self) -> None:
        """Tell clients of both eras that their lists may be others: an upstream comes and goes with all that it has."""
        for kind in _LISTS:
            await self._notify_all(kind)

    async def loaded(self, ctx: Context) -> None:
        """Tell the session whose caller has loaded tools. A client of the modern era has the tools in its answer."""
        # Each request has a session object of its own. Only the remembered one reaches the client's stream.
        session: Any = connection(ctx).state.get(CALLER)
        if session in self._sessions:
            await self._sent(ServerSession.send_tool_list_changed(session))

    def _list_changed(self, kind: str) -> None:
        """Tell clients of a list that an upstream changed. Tools change when the registry does, which tells itself."""
        if kind != "tools" and kind not in self._untold:
            self._untold.add(kind)
            task = self._supervisor.spawn(f"telling of changed {kind}", self._notify_all(kind))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _notify_all(self, kind: str) -> None:
        self._untold.discard(kind)
        event, send = _LISTS[kind]
        await self._bus.publish(event())
        for session in list(self._sessions):
            await self._sent(send(session))

    @staticmethod
    async def _sent(telling: Coroutine[Any, Any, None]) -> None:
        try:
            await telling
        except Exception:  # noqa: BLE001 - a client that went away must not keep the others from hearing
            _log.debug("a client could not be told of a change", exc_info=True)

    # Changes of resources

    async def subscribe(self, ctx: Context, params: types.SubscribeRequestParams) -> Json:
        """Watch a resource for a session of the handshake era, until it says so or ends."""
        caller, uri, kept = await self._caller(ctx), named(str(params.uri)), connection(ctx)
        watched: dict[str, Callable[[], None]] = kept.state.setdefault(_WATCHED, {})
        if uri in watched:
            return {}
        if len(watched) >= MAX_WATCHED:
            raise MCPError(types.INVALID_PARAMS, f"A session watches at most {MAX_WATCHED} resources")
        try:
            leave = await self._watching.watch(uri, caller)
        except Failure as failure:
            raise missing(failure, f"Resource not found: {uri}", uri=uri) from None
        if uri in watched:  # the client asked twice at once
            leave()
        else:
            watched[uri] = leave
            kept.exit_stack.callback(leave)
        return {}

    async def unsubscribe(self, ctx: Context, params: types.UnsubscribeRequestParams) -> Json:
        """Watch it no longer."""
        leave = connection(ctx).state.get(_WATCHED, {}).pop(str(params.uri), None)
        if leave is not None:
            leave()
        return {}

    async def listen(
        self, ctx: Context, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        """Tell a client of the modern era of changes: of the resources it names, those that it may have."""
        caller, wanted = await self._caller(ctx), params.notifications
        await self.offers.attend(caller)
        with contextlib.ExitStack() as watched:
            granted: list[str] = []
            for uri in map(named, dict.fromkeys((wanted.resource_subscriptions or [])[:MAX_WATCHED])):
                try:
                    watched.callback(await self._watching.watch(uri, caller))
                except Failure:
                    continue  # the acknowledgement names the others only
                granted.append(uri)
            honored = wanted.model_copy(update={"resource_subscriptions": granted or None})
            return await self._listen(ctx, params.model_copy(update={"notifications": honored}))

    async def _resource_changed(self, uri: str) -> None:
        await self._bus.publish(ResourceUpdated(uri))
        for session in list(self._sessions):
            if uri in state(session).get(_WATCHED, {}):
                await self._sent(session.send_resource_updated(uri))

    def close(self) -> None:
        """Watch nothing any more, and end what listens."""
        self._watching.close()
        self._listen.close()

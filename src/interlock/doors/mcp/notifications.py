"""Sends list_changed and resource-updated notifications to subscribed MCP clients.

Clients of the modern era listen in a request that lasts; sessions of the handshake era are told by name, for as long as
they last.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import mcp_types as types
from mcp.server.subscriptions import ListenHandler, ResourceUpdated
from mcp.shared.exceptions import MCPError

from interlock.api.list_changes import loaded_names
from interlock.api.offers import Offers
from interlock.api.service import Service
from interlock.api.surfaces import holder_of
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.doors.mcp.audience import LISTS, Audience, sent
from interlock.doors.mcp.context import CALLER, Context, connection, missing, named, state
from interlock.doors.mcp.resource_subscriptions import Watching

# Where a session of the handshake era remembers what it watches.
_WATCHED = "interlock.watched"
MAX_WATCHED = 100


class Changes:
    """The subscribers to changes of tools, resources and prompts. `caller` identifies the caller of a request."""

    def __init__(self, service: Service, caller: Callable[[Context], Awaitable[Caller]]) -> None:
        self.offers = Offers(service.app, service.tools, self._list_changed)
        self._caller = caller
        self._supervisor = service.app.supervisor
        self._audience = Audience(partial(loaded_names, service.app))
        self._listen = ListenHandler(self._audience)
        self._watching = Watching(service, self.offers, self._resource_changed)
        self._untold: set[str] = set()
        self._telling: set[asyncio.Task[None]] = set()

    # Lists

    async def remember(self, ctx: Context, _: types.NotificationParams) -> None:
        """Notify sessions of the handshake era of changes by name, for as long as they last."""
        session = ctx.session
        connected = connection(ctx)
        if connected.state.setdefault(CALLER, session) is session:  # however often a client says that it is ready
            caller = await self._caller(ctx)
            # Before the store is read: what changes meanwhile would not be told to this session.
            connected.exit_stack.callback(self._audience.leave, session)
            await self._audience.enter(session, caller)
            await self.offers.attend(caller)

    async def tools_changed(self) -> None:
        """Tell clients of both eras that their lists may be others: an upstream comes and goes with all that it has."""
        for kind in LISTS:
            await self._notify_all(kind)

    async def surfaces_changed(self) -> None:
        """Tell the clients whose tokens have loaded other tools, here or in another process."""
        await self._audience.tell_of_loads()

    async def loaded(self, ctx: Context) -> None:
        """Tell the clients of a caller who has loaded tools, before the answer. One of the modern era has the tools
        in its answer.
        """
        caller = await self._caller(ctx)
        await self.listed(ctx, caller)
        await self._audience.tell_of_loads(holder_of(caller))

    async def listed(self, ctx: Context, caller: Caller) -> None:
        """Note with which token a session lists tools: a client may renew its token."""
        # Each request has a session object of its own. Only the remembered one reaches the client's stream.
        session: Any = connection(ctx).state.get(CALLER)
        if session in self._audience:
            await self._audience.enter(session, caller)

    def _list_changed(self, kind: str) -> None:
        """Tell clients of a list that an upstream changed. Tools change when the registry does, which tells itself."""
        if kind != "tools" and kind not in self._untold:
            self._untold.add(kind)
            task = self._supervisor.spawn(f"telling of changed {kind}", self._notify_all(kind))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _notify_all(self, kind: str) -> None:
        self._untold.discard(kind)
        await self._audience.tell_all(kind)

    # Changes of resources

    async def subscribe(self, ctx: Context, params: types.SubscribeRequestParams) -> Json:
        """Watch a resource for a session of the handshake era, until it says so or ends."""
        caller, uri, connected = await self._caller(ctx), named(str(params.uri)), connection(ctx)
        watched: dict[str, Callable[[], None]] = connected.state.setdefault(_WATCHED, {})
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
            connected.exit_stack.callback(leave)
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
            await self._audience.open_stream(caller)
            return await self._listen(ctx, params.model_copy(update={"notifications": honored}))

    async def _resource_changed(self, uri: str) -> None:
        await self._audience.publish(ResourceUpdated(uri))
        for session in self._audience.sessions:
            if uri in state(session).get(_WATCHED, {}):
                await sent(session.send_resource_updated(uri))

    def close(self) -> None:
        """Watch nothing any more, and end what listens."""
        self._watching.close()
        self._listen.close()

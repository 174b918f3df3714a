"""The door on the official SDK's low-level server: both eras, over streamable HTTP and stdio.

This module is imported when a door is first opened, for the SDK takes its time to load.

Who calls is asked for each request: over HTTP it is in the request's scope, where only the entrance puts it; over stdio
it is whoever started the process. The SDK keeps handshake-era sessions apart by the `user` of the scope.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import mcp_types as types
from mcp.server import NotificationOptions, Server, ServerRequestContext
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.models import InitializationOptions
from mcp.server.session import ServerSession
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ToolsListChanged,
)
from mcp.server.transport_security import TransportSecurityMiddleware, TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from mcp_types import methods
from pydantic import ValidationError
from starlette.requests import Request

from interlock._version import __version__
from interlock.core.connector import ALONE, Interaction
from interlock.core.context import Caller
from interlock.core.errors import Failure
from interlock.core.schema import Json
from interlock.doors.mcp.calling import Calling, Fault, Wanted, questions
from interlock.doors.mcp.listing import Listing
from interlock.doors.mcp.names import Names
from interlock.doors.mcp.offers import Offers
from interlock.doors.mcp.thin import MODERN, Message, Receive, Send
from interlock.doors.mcp.watching import Watching
from interlock.service import Service
from interlock.telemetry.w3c import joined
from interlock.upstreams.mcp_session import LOG_LEVEL, Listening

if TYPE_CHECKING:
    from mcp.server.connection import Connection

_log = logging.getLogger("interlock.doors.mcp")

Context = ServerRequestContext[Any, Any]
# What is heard of a call under way: progress, or a message of the log. None: it has ended.
News = asyncio.Queue[tuple[str, Json] | None]
CALLER = "interlock.caller"  # where the entrance leaves the caller in a request's scope
# What is remembered of a session of the handshake era: from which level on it hears logs, and what it watches.
_LEVEL, _WATCHED = "interlock.level", "interlock.watched"
MAX_WATCHED = 100
MAX_WAITING = 1000

# What an upstream may ask of a client, and how the modern era brings the answers.
_ASKED = ("elicitation", "sampling", "roots")
_ANSWERS = ("inputResponses", "requestState")

_COMPLETE: Json = {"resultType": "complete"}
# What a caller is told is for that caller, and true now. (Earlier eras do not know of this; the SDK leaves it out.)
_OWN: Json = {**_COMPLETE, "ttlMs": 0, "cacheScope": "private"}

# How clients of either era are told that a list may be another.
_LISTS = {
    "tools": (ToolsListChanged, ServerSession.send_tool_list_changed),
    "resources": (ResourcesListChanged, ServerSession.send_resource_list_changed),
    "prompts": (PromptsListChanged, ServerSession.send_prompt_list_changed),
}

INSTRUCTIONS = (
    "Every call of these tools is checked, authorized and recorded by Interlock. A result with isError says what went "
    "wrong and what to do. A result that says `Not done yet` waits for a person: tell your user, and make the same "
    "call again with the same arguments once they have agreed."
)


class Sdk:
    """The SDK's server with our handlers in it."""

    def __init__(
        self,
        service: Service,
        names: Names,
        listing: Listing,
        calling: Calling,
        *,
        name: str,
        hosts: list[str],
        origins: list[str],
        max_body: int,
    ) -> None:
        self._service = service
        self._names = names
        self._listing = listing
        self._calling = calling
        self._offers = Offers(service, self._list_changed)
        self._bus = InMemorySubscriptionBus()
        self._listen = ListenHandler(self._bus)
        self._watching = Watching(service, self._offers, self._resource_changed)
        self._sessions: set[ServerSession] = set()
        self._untold: set[str] = set()
        self._telling: set[asyncio.Task[None]] = set()
        self.stdio_caller: Callable[[], Awaitable[Caller]] | None = None
        self.server = _Server(
            name,
            version=__version__,
            title="Interlock",
            instructions=INSTRUCTIONS,
            on_subscriptions_listen=self._listen_to,
            get_tool_input_schema=self._input_schema,
        )
        # Calls are traced by the gateway, whichever way they come in.
        self.server.middleware.clear()
        self.server.add_request_handler("tools/list", types.PaginatedRequestParams, self._list_tools)
        self.server.add_request_handler("tools/call", types.CallToolRequestParams, self._call_tool)
        self.server.add_request_handler("resources/list", types.PaginatedRequestParams, self._list_resources)
        self.server.add_request_handler("resources/read", types.ReadResourceRequestParams, self._read_resource)
        self.server.add_request_handler("resources/templates/list", types.PaginatedRequestParams, self._list_templates)
        self.server.add_request_handler("prompts/list", types.PaginatedRequestParams, self._list_prompts)
        self.server.add_request_handler("prompts/get", types.GetPromptRequestParams, self._get_prompt)
        self.server.add_request_handler("resources/subscribe", types.SubscribeRequestParams, self._subscribe)
        self.server.add_request_handler("resources/unsubscribe", types.UnsubscribeRequestParams, self._unsubscribe)
        self.server.add_request_handler("completion/complete", types.CompleteRequestParams, self._complete)
        self.server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, self._set_level)
        self.server.add_notification_handler(
            "notifications/initialized", types.NotificationParams, self._remember_session
        )
        security = TransportSecuritySettings(allowed_hosts=hosts, allowed_origins=origins)
        self._security = TransportSecurityMiddleware(security)
        self._manager = StreamableHTTPSessionManager(
            self.server, security_settings=security, max_request_body_size=max_body
        )

    # Lists

    async def _list_tools(self, ctx: Context, params: types.PaginatedRequestParams) -> Json:
        described, cursor = self._listing.page(await self._caller(ctx), params.cursor)
        more = {} if cursor is None else {"nextCursor": cursor}
        return {"tools": [one.document for one in described], **_OWN, **more}

    def _input_schema(self, name: str) -> Mapping[str, Any] | None:
        """What the SDK compares a call's headers with. It asks before anybody is asked who calls."""
        try:
            return self._service.lock.catalog.resolve(self._names.address(name)).contract.input.model_facing
        except Failure:
            return None

    async def _remember_session(self, ctx: Context, _: types.NotificationParams) -> None:
        """Sessions of the handshake era are told of changes by name, for as long as they last."""
        session = ctx.session
        connection = _connection(ctx)
        if connection.state.setdefault(CALLER, session) is session:  # however often a client says that it is ready
            self._offers.attend(await self._caller(ctx))
            self._sessions.add(session)
            connection.exit_stack.callback(self._sessions.discard, session)

    async def tools_changed(self) -> None:
        """Tell clients of both eras that their lists may be others: an upstream comes and goes with all that it has."""
        for kind in _LISTS:
            await self._tell_of(kind)

    def _list_changed(self, kind: str) -> None:
        """Tell clients of a list that an upstream changed. Tools change when the registry does, which tells itself."""
        if kind != "tools" and kind not in self._untold:
            self._untold.add(kind)
            task = asyncio.ensure_future(self._tell_of(kind))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell_of(self, kind: str) -> None:
        self._untold.discard(kind)
        event, send = _LISTS[kind]
        await self._bus.publish(event())
        for session in list(self._sessions):
            await self._told(send(session))

    @staticmethod
    async def _told(telling: Coroutine[Any, Any, None]) -> None:
        try:
            await telling
        except Exception:  # noqa: BLE001 - a client that went away must not keep the others from hearing
            _log.debug("a client could not be told of a change", exc_info=True)

    # Calls

    async def _call_tool(self, ctx: Context, params: types.CallToolRequestParams) -> Json:
        caller = await self._caller(ctx)
        sent = _meta(ctx)
        said: Mapping[str, str] = {} if ctx.request is None else ctx.request.headers
        trace = joined(said.get("traceparent"), said.get("tracestate"))
        news: News = asyncio.Queue()
        wanted = Wanted(params.name, params.arguments or {}, sent, trace, self._listening(ctx, news))
        progress = None if sent.get("progressToken") is None else partial(_hear, news, "progress")
        try:
            if progress is None and not isinstance(wanted.interaction, Listening):
                return await self._calling.call(wanted, caller)
            return await self._with_news(ctx, self._calling.call(wanted, caller, progress), news)
        except Fault as fault:
            raise _fault(fault) from None

    def _listening(self, ctx: Context, news: News) -> Interaction | None:
        """How the client of a call can be asked, and told what a server logs, if it said that it wants to hear it."""
        interaction = self._interaction(ctx)
        level = _meta(ctx).get(LOG_LEVEL) if ctx.protocol_version == MODERN else _connection(ctx).state.get(_LEVEL)
        if level is None:
            return interaction
        able = interaction or ALONE
        tell = partial(_hear, news, "message")
        return Listening(able.capabilities, able.ask, able.answers, level=level, tell=tell)

    def _interaction(self, ctx: Context) -> Interaction | None:
        """How the client of a request can be asked, if it said that it can."""
        declared = ctx.session.client_capabilities
        said: Json = {} if declared is None else declared.model_dump(by_alias=True, mode="json", exclude_none=True)
        capabilities = {name: said[name] for name in _ASKED if name in said}
        if not capabilities:
            return None
        if ctx.protocol_version != MODERN:
            return Interaction(capabilities, ask=lambda method, params: self._ask(ctx, method, params))
        sent = ctx.params or {}
        return Interaction(capabilities, answers={name: sent[name] for name in _ANSWERS if name in sent})

    async def _ask(self, ctx: Context, method: str, params: Json) -> Json:
        """Put an upstream's question to the client of this call; a Failure declines it."""
        metadata = ServerMessageMetadata(related_request_id=ctx.request_id)
        said = {"method": method, "params": params}
        try:
            if method == "elicitation/create":
                asked = types.ElicitRequest.model_validate(said, by_name=False)
                answer = await ctx.session.send_request(asked, types.ElicitResult, metadata=metadata)
            else:
                wished = types.CreateMessageRequest.model_validate(said, by_name=False)
                answer = await ctx.session.send_request(wished, types.CreateMessageResult, metadata=metadata)
        except (MCPError, ValidationError) as error:
            raise Failure("E3411", "the client does not answer the upstream's question") from error
        return answer.model_dump(by_alias=True, mode="json", exclude_none=True)

    async def _with_news(self, ctx: Context, making: Coroutine[Any, Any, Json], news: News) -> Json:
        """Make a call and pass on what is heard of it, in order and before its answer."""
        call = asyncio.ensure_future(making)
        call.add_done_callback(lambda _: news.put_nowait(None))
        far = -1.0
        try:
            while (told := await news.get()) is not None:
                kind, facts = told
                if kind == "message":
                    await self._pass_on(ctx, facts)
                    continue
                # INVARIANT: progress never stands still or goes back, whatever the tool says.
                percent: float | None = facts["percent"]
                far = percent if percent is not None and percent > far else far + (1.0 if percent is None else 0.001)
                total = None if percent is None else 100.0
                await ctx.session.report_progress(far, total, facts["message"] or None)
        except BaseException:
            call.cancel()
            raise
        return await call

    @staticmethod
    async def _pass_on(ctx: Context, said: Json) -> None:
        message = types.LoggingMessageNotification(params=types.LoggingMessageNotificationParams.model_validate(said))
        await ctx.session.send_notification(message, related_request_id=ctx.request_id)

    async def _set_level(self, ctx: Context, params: types.SetLevelRequestParams) -> Json:
        """From which level on a session of the handshake era hears what upstreams log during its calls."""
        _connection(ctx).state[_LEVEL] = params.level
        return {}

    # Resources and prompts

    async def _list_resources(self, ctx: Context, _: types.PaginatedRequestParams) -> Json:
        return {"resources": await self._offers.resources(await self._caller(ctx)), **_OWN}

    async def _list_templates(self, ctx: Context, _: types.PaginatedRequestParams) -> Json:
        return {"resourceTemplates": await self._offers.templates(await self._caller(ctx)), **_OWN}

    async def _list_prompts(self, ctx: Context, _: types.PaginatedRequestParams) -> Json:
        return {"prompts": await self._offers.prompts(await self._caller(ctx)), **_OWN}

    async def _read_resource(self, ctx: Context, params: types.ReadResourceRequestParams) -> Json:
        """A result that was kept, for whoever made the call; or what an upstream has."""
        caller, uri = await self._caller(ctx), str(params.uri)
        if not uri.startswith("payload:"):
            interaction = self._interaction(ctx) or ALONE
            reading = self._offers.read(uri, caller, interaction)
            return await self._offered(reading, interaction, _OWN, f"Resource not found: {uri}", uri=uri)
        try:
            body = self._service.lock.read_payload(uri, caller=caller)
        except Failure as failure:
            raise _missing(failure, f"Resource not found: {uri}", uri=uri) from None
        return {"contents": [{"uri": uri, "mimeType": "application/json", "text": body.decode()}], **_OWN}

    async def _get_prompt(self, ctx: Context, params: types.GetPromptRequestParams) -> Json:
        interaction = self._interaction(ctx) or ALONE
        getting = self._offers.prompt(params.name, params.arguments or {}, await self._caller(ctx), interaction)
        return await self._offered(getting, interaction, _COMPLETE, f"Unknown prompt: {params.name}")

    @staticmethod
    async def _offered(
        asking: Coroutine[Any, Any, Json], by: Interaction, stamp: Json, missing: str, **data: str
    ) -> Json:
        """What an upstream has; or what it asks of the client first."""
        try:
            return {**await asking, **stamp}
        except Failure as failure:
            try:
                asked = questions(by.answers if by.capabilities and by.ask is None else None, failure)
            except Fault as fault:
                raise _fault(fault) from None
            if asked is None:
                raise _missing(failure, missing, **data) from None
            return asked

    async def _complete(self, ctx: Context, params: types.CompleteRequestParams) -> Json:
        sent, caller = ctx.params or {}, await self._caller(ctx)
        try:
            answer = await self._offers.complete(sent["ref"], sent["argument"], sent.get("context"), caller)
        except Failure as failure:
            raise _missing(failure, "There is nothing of that name to complete") from None
        return {**answer, **_COMPLETE}

    # Changes of resources

    async def _subscribe(self, ctx: Context, params: types.SubscribeRequestParams) -> Json:
        """Watch a resource for a session of the handshake era, until it says so or ends."""
        caller, uri, connection = await self._caller(ctx), str(params.uri), _connection(ctx)
        watched: dict[str, Callable[[], None]] = connection.state.setdefault(_WATCHED, {})
        if uri in watched:
            return {}
        if len(watched) >= MAX_WATCHED:
            raise MCPError(types.INVALID_PARAMS, f"A session watches at most {MAX_WATCHED} resources")
        try:
            leave = await self._watching.watch(uri, caller)
        except Failure as failure:
            raise _missing(failure, f"Resource not found: {uri}", uri=uri) from None
        if uri in watched:  # the client asked twice at once
            leave()
        else:
            watched[uri] = leave
            connection.exit_stack.callback(leave)
        return {}

    async def _unsubscribe(self, ctx: Context, params: types.UnsubscribeRequestParams) -> Json:
        leave = _connection(ctx).state.get(_WATCHED, {}).pop(str(params.uri), None)
        if leave is not None:
            leave()
        return {}

    async def _listen_to(
        self, ctx: Context, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        """Tell a client of the modern era of changes: of the resources it names, those that it may have."""
        caller, wanted = await self._caller(ctx), params.notifications
        self._offers.attend(caller)
        with contextlib.ExitStack() as watched:
            granted: list[str] = []
            for uri in dict.fromkeys((wanted.resource_subscriptions or [])[:MAX_WATCHED]):
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
            if uri in _state(session).get(_WATCHED, {}):
                await self._told(session.send_resource_updated(uri))

    # Who calls

    async def _caller(self, ctx: Context) -> Caller:
        if ctx.request is not None:
            return cast("Caller", ctx.request.scope[CALLER])
        assert self.stdio_caller is not None
        try:
            return await self.stdio_caller()
        except Failure as failure:
            raise MCPError(failure.row.jsonrpc, failure.message, failure.envelope("")) from None

    # Running

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Serve HTTP requests while inside.

        The SDK's manager must be left by the task that entered it, so it is given one of its own.
        """
        ready, over = asyncio.Event(), asyncio.Event()

        async def manage() -> None:
            async with self._manager.run():
                ready.set()
                await over.wait()

        task = asyncio.ensure_future(manage())
        task.add_done_callback(lambda _: ready.set())
        await ready.wait()
        try:
            yield
        finally:
            self._watching.close()
            self._listen.close()
            over.set()
            await task

    async def run_stdio(self, caller: Callable[[], Awaitable[Caller]]) -> None:
        """Serve one client over this process's own input and output, until it goes."""
        from mcp.server.stdio import stdio_server

        self.stdio_caller = caller
        try:
            async with stdio_server() as (reading, writing):
                await self.server.run(reading, writing, self.server.create_initialization_options())
        finally:
            self._watching.close()

    async def handle(self, scope: Message, receive: Receive, send: Send, caller: Caller) -> None:
        """Answer one HTTP request of a caller."""
        # A session of the handshake era answers only to whoever opened it; the SDK knows them by the scope's user.
        token = AccessToken(token="", client_id=f"{caller.tenant}/{caller.id}", subject=caller.acting, scopes=[])
        # Blanks around a value are no part of it, and not every HTTP server takes them away.
        headers = [(name, value.strip(b" \t")) for name, value in scope["headers"]]
        named = {**scope, "headers": headers, CALLER: caller, "user": AuthenticatedUser(token)}
        await self._manager.handle_request(named, receive, send)

    # What the thin path asks, so that it judges as the SDK does

    async def admits(self, host: str | None, origin: str | None) -> bool:
        """Whether requests to this host, from pages of this origin, are answered."""
        headers = [(b"host", host), (b"origin", origin), (b"content-type", "application/json")]
        raw = [(name, value.encode("latin-1")) for name, value in headers if value is not None]
        return await self._security.validate_request(Request({"type": "http", "headers": raw}), is_post=True) is None

    def fits(self, method: str, params: Json) -> bool:
        """Whether the parameters of a modern request are such as the SDK accepts."""
        try:
            methods.validate_client_request(method, MODERN, params)
        except ValidationError:
            return False
        return True

    def put(self, method: str, result: Json) -> Json:
        """A result in the form that the SDK gives it in the modern era."""
        try:
            return methods.serialize_server_result(method, MODERN, result)
        except ValidationError:
            raise Fault(types.INTERNAL_ERROR, "Handler returned an invalid result") from None


_CHANGES = NotificationOptions(tools_changed=True, resources_changed=True, prompts_changed=True)


class _Server(Server[Any]):
    """Says in the handshake that lists change; the SDK's own HTTP entrance has no place to say so."""

    def create_initialization_options(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
    ) -> InitializationOptions:
        return super().create_initialization_options(
            notification_options or _CHANGES, experimental_capabilities, extensions
        )


def _connection(ctx: Context) -> Connection:
    """What the SDK keeps for as long as a client is connected; it tells of the end in no other way."""
    return ctx.session._connection  # pyright: ignore[reportPrivateUsage]


def _state(session: ServerSession) -> dict[str, Any]:
    return session._connection.state  # pyright: ignore[reportPrivateUsage]


def _meta(ctx: Context) -> Mapping[str, Any]:
    return (ctx.params or {}).get("_meta") or {}


def _hear(news: News, kind: str, facts: Json) -> None:
    """Keep what is to be passed on. Who floods the client is not listened to until it has caught up."""
    if news.qsize() < MAX_WAITING:
        news.put_nowait((kind, facts))


def _fault(fault: Fault) -> MCPError:
    return MCPError(fault.code, fault.message, fault.data)


def _missing(failure: Failure, message: str, **data: str) -> MCPError:
    """What is not there, or not theirs, is a fault of the request; anything else is said as it is."""
    if failure.code in ("E3702", "E3401"):
        return MCPError(types.INVALID_PARAMS, message, {**data, **failure.envelope("")})
    return MCPError(failure.row.jsonrpc, failure.message, {**data, **failure.envelope("")})

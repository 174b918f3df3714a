"""The door on the official SDK's low-level server: both eras, over streamable HTTP and stdio.

This module is imported when a door is first opened, for the SDK takes its time to load.

Who calls is asked for each request: over HTTP it is in the request's scope, where only the entrance puts it; over stdio
it is whoever started the process. The SDK keeps handshake-era sessions apart by the `user` of the scope.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import mcp_types as types
from mcp.server import NotificationOptions, Server, ServerRequestContext
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.models import InitializationOptions
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from mcp.server.transport_security import TransportSecurityMiddleware, TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from mcp_types import methods
from pydantic import ValidationError
from starlette.requests import Request

from interlock._version import __version__
from interlock.core.connector import Interaction
from interlock.core.context import Caller
from interlock.core.errors import Failure
from interlock.core.schema import Json
from interlock.doors.mcp.calling import Calling, Fault, Wanted
from interlock.doors.mcp.listing import Listing
from interlock.doors.mcp.names import Names
from interlock.doors.mcp.offers import Offers
from interlock.doors.mcp.thin import MODERN, Message, Receive, Send
from interlock.service import Service

if TYPE_CHECKING:
    from mcp.server.session import ServerSession

_log = logging.getLogger("interlock.doors.mcp")

Context = ServerRequestContext[Any, Any]
CALLER = "interlock.caller"  # where the entrance leaves the caller in a request's scope

# What an upstream may ask of a client, and how the modern era brings the answers.
_ASKED = ("elicitation", "sampling", "roots")
_ANSWERS = ("inputResponses", "requestState")

# What a caller is told is for that caller, and true now. (Earlier eras do not know of this; the SDK leaves it out.)
_OWN: Json = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}

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
        self._offers = Offers(service)
        self._bus = InMemorySubscriptionBus()
        self._listen = ListenHandler(self._bus)
        self._sessions: set[ServerSession] = set()
        self.stdio_caller: Callable[[], Awaitable[Caller]] | None = None
        self.server = _Server(
            name,
            version=__version__,
            title="Interlock",
            instructions=INSTRUCTIONS,
            on_subscriptions_listen=self._listen,
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
        # The SDK tells of a connection's end in no other way.
        connection = session._connection  # pyright: ignore[reportPrivateUsage]
        if connection.state.setdefault(CALLER, session) is session:  # however often a client says that it is ready
            self._sessions.add(session)
            connection.exit_stack.callback(self._sessions.discard, session)

    async def tools_changed(self) -> None:
        """Tell clients of both eras that their list of tools may be another."""
        await self._bus.publish(ToolsListChanged())
        for session in list(self._sessions):
            try:
                await session.send_tool_list_changed()
            except Exception:  # noqa: BLE001 - a client that went away must not keep the others from hearing
                _log.debug("a client could not be told of changed tools", exc_info=True)

    # Calls

    async def _call_tool(self, ctx: Context, params: types.CallToolRequestParams) -> Json:
        caller = await self._caller(ctx)
        sent: Mapping[str, Any] = (ctx.params or {}).get("_meta") or {}
        trace = None if ctx.request is None else ctx.request.headers.get("traceparent")
        wanted = Wanted(params.name, params.arguments or {}, sent, trace, self._interaction(ctx))
        try:
            if sent.get("progressToken") is None:
                return await self._calling.call(wanted, caller)
            return await self._with_progress(ctx, wanted, caller)
        except Fault as fault:
            raise MCPError(fault.code, fault.message, fault.data) from None

    def _interaction(self, ctx: Context) -> Interaction | None:
        """How the client of a call can be asked, if it said that it can."""
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

    async def _with_progress(self, ctx: Context, wanted: Wanted, caller: Caller) -> Json:
        """Make a call and pass on what it reports, in order and before its answer."""
        said: asyncio.Queue[Json | None] = asyncio.Queue()
        call = asyncio.ensure_future(self._calling.call(wanted, caller, said.put_nowait))
        call.add_done_callback(lambda _: said.put_nowait(None))
        far = -1.0
        try:
            while (facts := await said.get()) is not None:
                # INVARIANT: progress never stands still or goes back, whatever the tool says.
                percent: float | None = facts["percent"]
                far = percent if percent is not None and percent > far else far + (1.0 if percent is None else 0.001)
                total = None if percent is None else 100.0
                await ctx.session.report_progress(far, total, facts["message"] or None)
        except asyncio.CancelledError:
            call.cancel()
            raise
        return await call

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
        try:
            if not uri.startswith("payload:"):
                return {**await self._offers.read(uri, caller), **_OWN}
            body = self._service.lock.read_payload(uri, caller=caller)
        except Failure as failure:
            raise _missing(failure, f"Resource not found: {uri}", uri=uri) from None
        return {"contents": [{"uri": uri, "mimeType": "application/json", "text": body.decode()}], **_OWN}

    async def _get_prompt(self, ctx: Context, params: types.GetPromptRequestParams) -> Json:
        caller = await self._caller(ctx)
        try:
            prompt = await self._offers.prompt(params.name, params.arguments or {}, caller)
        except Failure as failure:
            raise _missing(failure, f"Unknown prompt: {params.name}") from None
        return {**prompt, "resultType": "complete"}

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
            self._listen.close()
            over.set()
            await task

    async def run_stdio(self, caller: Callable[[], Awaitable[Caller]]) -> None:
        """Serve one client over this process's own input and output, until it goes."""
        from mcp.server.stdio import stdio_server

        self.stdio_caller = caller
        async with stdio_server() as (reading, writing):
            await self.server.run(reading, writing, self.server.create_initialization_options())

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


class _Server(Server[Any]):
    """Says in the handshake that lists change; the SDK's own HTTP entrance has no place to say so."""

    def create_initialization_options(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
    ) -> InitializationOptions:
        return super().create_initialization_options(
            notification_options or NotificationOptions(tools_changed=True), experimental_capabilities, extensions
        )


def _missing(failure: Failure, message: str, **data: str) -> MCPError:
    """What is not there, or not theirs, is a fault of the request; anything else is said as it is."""
    if failure.code in ("E3702", "E3401"):
        return MCPError(types.INVALID_PARAMS, message, {**data, **failure.envelope("")})
    return MCPError(failure.row.jsonrpc, failure.message, {**data, **failure.envelope("")})

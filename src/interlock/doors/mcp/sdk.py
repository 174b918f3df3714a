"""The door on the official SDK's low-level server: both eras, over streamable HTTP and stdio.

This module is imported when a door is first opened, for the SDK takes its time to load.

Who calls is asked for each request: over HTTP it is in the request's scope, where only the entrance puts it; over stdio
it is whoever started the process. The SDK keeps handshake-era sessions apart by the `user` of the scope.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, cast

import mcp_types as types
from mcp.server import NotificationOptions, Server
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.models import InitializationOptions
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecurityMiddleware, TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp_types import methods
from pydantic import ValidationError
from starlette.requests import Request

from interlock._version import __version__
from interlock.api.service import Service
from interlock.call.artifacts import is_file
from interlock.call.connector import ALONE, Interaction
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.data.canonical import encode
from interlock.data.schema import Json
from interlock.doors.ids import check_text
from interlock.doors.mcp import refusals
from interlock.doors.mcp.calling import Calling, Fault, Wanted, fault_of, no_trace, questions
from interlock.doors.mcp.context import CALLER, Context, connection, faulty, meta, missing, named, native_ids
from interlock.doors.mcp.elicitation import LEVEL, News, hear, interaction, listening, with_news
from interlock.doors.mcp.listing import EXPECTS, Listing
from interlock.doors.mcp.modern import MODERN
from interlock.doors.mcp.names import Names
from interlock.doors.mcp.notifications import Changes
from interlock.doors.mcp.refusals import Enveloped
from interlock.doors.mcp.sessions import Sessions
from interlock.http.asgi import Disconnected, Message, Receive, Send, header, read_body, read_with, refuse, replay
from interlock.telemetry.w3c import joined
from interlock.upstreams.mcp.protocol import Listening

_COMPLETE: Json = {"resultType": "complete"}
# What a caller is told is for that caller, and true now. (Earlier eras do not know of this; the SDK leaves it out.)
_OWN: Json = {**_COMPLETE, "ttlMs": 0, "cacheScope": "private"}

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
        self.changes = Changes(service, self._caller)
        self._offers = self.changes.offers
        self.stdio_caller: Callable[[], Awaitable[Caller]] | None = None
        self.server = _Server(
            name,
            version=__version__,
            title="Interlock",
            instructions=INSTRUCTIONS,
            on_subscriptions_listen=self.changes.listen,
            get_tool_input_schema=self._input_schema,
        )
        # Calls are traced by the gateway, whichever way they come in.
        self.server.middleware[:] = [_enveloped]
        answered: tuple[tuple[str, type[types.RequestParams], Callable[[Context, Any], Awaitable[Json]]], ...] = (
            ("tools/list", types.PaginatedRequestParams, self._list_tools),
            ("tools/call", types.CallToolRequestParams, self._call_tool),
            ("resources/list", types.PaginatedRequestParams, self._list_resources),
            ("resources/read", types.ReadResourceRequestParams, self._read_resource),
            ("resources/templates/list", types.PaginatedRequestParams, self._list_templates),
            ("prompts/list", types.PaginatedRequestParams, self._list_prompts),
            ("prompts/get", types.GetPromptRequestParams, self._get_prompt),
            ("resources/subscribe", types.SubscribeRequestParams, self.changes.subscribe),
            ("resources/unsubscribe", types.UnsubscribeRequestParams, self.changes.unsubscribe),
            ("completion/complete", types.CompleteRequestParams, self._complete),
            ("logging/setLevel", types.SetLevelRequestParams, self._set_level),
        )
        for method, params, handler in answered:
            self.server.add_request_handler(method, params, self._guarded(handler))
        self.server.add_notification_handler(
            "notifications/initialized", types.NotificationParams, self.changes.remember
        )
        security = TransportSecuritySettings(allowed_hosts=hosts, allowed_origins=origins)
        self._security = TransportSecurityMiddleware(security)
        self._max_body = max_body
        # A client that drops a session says nothing. Its tasks and memory stay until the session was idle long enough.
        self._manager = StreamableHTTPSessionManager(
            self.server,
            security_settings=security,
            max_request_body_size=max_body,
            session_idle_timeout=service.lock.settings.mcp_session_idle_s,
        )
        self.sessions = Sessions(self._manager.handle_request, service.lock.settings.max_mcp_sessions)

    def _guarded(self, handler: Callable[[Context, Any], Awaitable[Json]]) -> Callable[[Context, Any], Awaitable[Json]]:
        """A handler from which nothing but answers and faults gets out; the SDK would tell a client anything else."""

        async def answer(ctx: Context, params: Any) -> Json:
            try:
                return await handler(ctx, params)
            except MCPError:
                raise
            except Exception as error:  # noqa: BLE001 - a door answers whatever happens
                raise faulty(fault_of(error)) from None

        return answer

    # Lists

    async def _list_tools(self, ctx: Context, params: types.PaginatedRequestParams) -> Json:
        expected = meta(ctx).get(EXPECTS)
        if not isinstance(expected, dict | None):
            raise MCPError(types.INVALID_PARAMS, f"_meta[{EXPECTS!r}] must be an object, a schema for each tool")
        described, cursor = self._listing.page(await self._caller(ctx), params.cursor, cast("Json | None", expected))
        more = {} if cursor is None else {"nextCursor": cursor}
        return {"tools": [one.document for one in described], **_OWN, **more}

    def _input_schema(self, name: str) -> Mapping[str, Any] | None:
        """The schema that the SDK compares a call's headers with. It asks before the caller is authenticated."""
        try:
            return self._service.lock.catalog.resolve(self._names.address(name)).contract.input.model_facing
        except Failure:
            return None

    # Calls

    async def _call_tool(self, ctx: Context, params: types.CallToolRequestParams) -> Json:
        caller = await self._caller(ctx)
        sent = meta(ctx)
        said: Mapping[str, str] = {} if ctx.request is None else ctx.request.headers
        trace = joined(said.get("traceparent"), said.get("tracestate"))
        news: News = asyncio.Queue()
        ids = native_ids(ctx)
        wanted = Wanted(params.name, params.arguments or {}, sent, trace, listening(ctx, news), native=ids)
        progress = None if sent.get("progressToken") is None else partial(hear, news, "progress")
        try:
            if progress is None and not isinstance(wanted.interaction, Listening):
                return await self._calling.call(wanted, caller)
            return await with_news(ctx, self._calling.call(wanted, caller, progress), news)
        except Fault as fault:
            raise faulty(fault) from None

    async def _set_level(self, ctx: Context, params: types.SetLevelRequestParams) -> Json:
        """From which level on a session of the handshake era hears what upstreams log during its calls."""
        connection(ctx).state[LEVEL] = params.level
        return {}

    # Resources and prompts

    async def _list_resources(self, ctx: Context, _: types.PaginatedRequestParams) -> Json:
        return {"resources": await self._offers.resources(await self._caller(ctx)), **_OWN}

    async def _list_templates(self, ctx: Context, _: types.PaginatedRequestParams) -> Json:
        return {"resourceTemplates": await self._offers.templates(await self._caller(ctx)), **_OWN}

    async def _list_prompts(self, ctx: Context, _: types.PaginatedRequestParams) -> Json:
        return {"prompts": await self._offers.prompts(await self._caller(ctx)), **_OWN}

    async def _read_resource(self, ctx: Context, params: types.ReadResourceRequestParams) -> Json:
        """A result that was kept or the trace of a call, for whoever made the call; or what an upstream has."""
        caller, uri = await self._caller(ctx), named(str(params.uri))
        if uri.startswith("trace:"):
            try:
                told = await self._service.calls.trace(uri.removeprefix("trace:"), caller)
            except Failure as failure:
                raise missing(failure, f"Resource not found: {uri}", uri=uri) from None
            return {"contents": [{"uri": uri, **_result(encode(told))}], **_OWN}
        if not uri.startswith("payload:"):
            asked = interaction(ctx) or ALONE
            reading = self._offers.read(uri, caller, asked)
            return await self._offered(reading, asked, _OWN, f"Resource not found: {uri}", uri=uri)
        try:
            body = await self._service.lock.read_payload(uri, caller=caller)
        except Failure as failure:
            raise missing(failure, f"Resource not found: {uri}", uri=uri) from None
        return {"contents": [{"uri": uri, **(_file(body) if is_file(uri) else _result(body))}], **_OWN}

    async def _get_prompt(self, ctx: Context, params: types.GetPromptRequestParams) -> Json:
        asked = interaction(ctx) or ALONE
        getting = self._offers.prompt(named(params.name), params.arguments or {}, await self._caller(ctx), asked)
        return await self._offered(getting, asked, _COMPLETE, f"Unknown prompt: {params.name}")

    @staticmethod
    async def _offered(
        asking: Coroutine[Any, Any, Json], by: Interaction, stamp: Json, absent: str, **data: str
    ) -> Json:
        """The content of a resource or prompt of an upstream, or its questions to the client."""
        try:
            return {**await asking, **stamp}
        except Failure as failure:
            try:
                asked = questions(by.answers if by.capabilities and by.ask is None else None, failure)
            except Fault as fault:
                raise faulty(fault) from None
            if asked is None:
                raise missing(failure, absent, **data) from None
            return asked

    async def _complete(self, ctx: Context, params: types.CompleteRequestParams) -> Json:
        sent, caller = ctx.params or {}, await self._caller(ctx)
        named(str(sent["ref"].get("name") or sent["ref"].get("uri")))
        try:
            answer = await self._offers.complete(sent["ref"], sent["argument"], sent.get("context"), caller)
        except Failure as failure:
            raise missing(failure, "There is nothing of that name to complete") from None
        return {**answer, **_COMPLETE}

    # Who calls

    async def _caller(self, ctx: Context) -> Caller:
        if ctx.request is not None:
            return cast("Caller", ctx.request.scope[CALLER])
        assert self.stdio_caller is not None
        try:
            return await self.stdio_caller()
        except Failure as failure:
            raise MCPError(failure.row.jsonrpc, failure.message, failure.envelope(no_trace())) from None

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
            self.changes.close()
            over.set()
            await task

    async def run_stdio(self, caller: Callable[[], Awaitable[Caller]]) -> None:
        """Serve one client over this process's own input and output, until it goes."""
        from interlock.doors.mcp.stdio import stdio_streams

        self.stdio_caller = caller
        try:
            most = self._service.lock.settings.max_values
            async with stdio_streams(self._max_body, most, no_trace()) as (reading, writing):
                with contextlib.redirect_stdout(sys.stderr):
                    await self.server.run(reading, writing, self.server.create_initialization_options())
        finally:
            self.changes.close()

    async def handle(self, scope: Message, receive: Receive, send: Send, caller: Caller) -> None:
        """Answer one HTTP request of a caller."""
        if scope["method"] not in _SERVED:
            await refusals.refuse(send, 405, refusals.method_not_served(), (b"allow", ", ".join(_SERVED).encode()))
            return
        if scope["method"] == "POST":
            try:
                # The SDK refuses another media type and a large body in forms of its own, so these are found before.
                _check_media_type(scope)
                body = await read_body(receive, most=self._max_body)
            except Disconnected:
                return
            except Failure as failure:
                await refuse(send, failure)
                return
            try:
                await read_with(check_text, body)
            except Failure as failure:
                await refusals.refuse(send, 400, failure)
                return
            receive = replay(body, receive)
        # A session of the handshake era answers only to whoever opened it; the SDK knows them by the scope's user.
        token = AccessToken(token="", client_id=f"{caller.tenant}/{caller.id}", subject=caller.acting, scopes=[])
        # Blanks around a value are no part of it, and not every HTTP server takes them away.
        headers = [(name, value.strip(b" \t")) for name, value in scope["headers"]]
        named = {**scope, "headers": headers, CALLER: caller, "user": AuthenticatedUser(token)}
        await self.sessions.handle(f"{caller.tenant}/{caller.id}", named, receive, Enveloped(send))

    # The opinions that the route asks for, so that it judges as the SDK does

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


_SERVED = ("GET", "POST", "DELETE")


def _check_media_type(scope: Message) -> None:
    sent = header(scope, b"content-type") or ""
    if not sent.strip().lower().startswith("application/json"):
        raise Failure(
            "E3004",
            "the body of a request to /mcp must be JSON",
            resolution="send it with the header `content-type: application/json`",
        )


async def _enveloped(ctx: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:
    """Add the error envelope to errors that the SDK itself finds in a request."""
    try:
        return await call_next(ctx)
    except MCPError as error:
        fault = error.error
        if "errorCode" in _members(fault.data):
            raise  # ours
    except ValidationError:
        fault = types.ErrorData(code=types.INVALID_PARAMS, message="Invalid request parameters")
    # What the protocol itself has to say stays beside the envelope.
    kept = _members(fault.data)
    raise MCPError(fault.code, fault.message, {**kept, **Failure("E3004", fault.message).envelope(no_trace())})


def _members(data: Any) -> Json:
    return cast("Json", data) if isinstance(data, dict) else {}


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


def _result(body: bytes) -> Json:
    return {"mimeType": "application/json", "text": body.decode()}


def _file(body: bytes) -> Json:
    """A file that a tool left: text where it is text, and no claim as to what kind of text."""
    try:
        return {"mimeType": "text/plain", "text": body.decode()}
    except UnicodeDecodeError:
        return {"mimeType": "application/octet-stream", "blob": base64.b64encode(body).decode()}

"""The door on the official SDK's low-level server: both eras, over streamable HTTP and stdio.

This module is imported when a door is first opened, for the SDK takes its time to load.

The SDK keeps handshake-era sessions apart by the `user` of the request's scope.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

import mcp_types as types
from mcp.server import NotificationOptions, Server
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.models import InitializationOptions
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecurityMiddleware, TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import decode_header_value
from mcp_types import methods
from pydantic import ValidationError
from starlette.requests import Request

from interlock._version import __version__
from interlock.api.service import Service
from interlock.call.context import Caller
from interlock.call.mcp import TASKS
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.doors.ids import check_text
from interlock.doors.mcp import refusals
from interlock.doors.mcp.calling import Calling, Fault, no_trace
from interlock.doors.mcp.context import CALLER, Context
from interlock.doors.mcp.handlers import Handlers
from interlock.doors.mcp.modern import MODERN
from interlock.doors.mcp.refusals import Enveloped
from interlock.doors.mcp.sessions import Sessions
from interlock.http.asgi import Disconnected, Message, Receive, Send, header, read_body, read_with, refuse

if TYPE_CHECKING:
    from interlock.api.mcp_names import Names
    from interlock.doors.mcp.listing import Listing

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
        self._handlers = handlers = Handlers(service, names, listing, calling)
        self.changes = handlers.changes
        self.server = _Server(
            name,
            version=__version__,
            title="Interlock",
            instructions=INSTRUCTIONS,
            on_subscriptions_listen=self.changes.listen,
            get_tool_input_schema=handlers.input_schema,
        )
        # Calls are traced by the gateway, whichever way they come in.
        self.server.middleware[:] = [_enveloped]
        self.server.extensions = {TASKS: {}}
        for method, params, handler in handlers.all():
            self.server.add_request_handler(method, params, handler)
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
            session_idle_timeout=service.app.settings.mcp_session_idle_s,
        )
        self.sessions = Sessions(self._manager.handle_request, service.app)

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

        self._handlers.stdio_caller = caller
        try:
            most = self._service.app.settings.max_values
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
        body = b""
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
        # A session of the handshake era answers only to the client that opened it: for the SDK, the user of the scope.
        token = AccessToken(token="", client_id=f"{caller.tenant}/{caller.id}", subject=caller.acting, scopes=[])
        # Blanks around a value are no part of it, and not every HTTP server takes them away.
        headers = [(name, value.strip(b" \t")) for name, value in scope["headers"]]
        named = {**scope, "headers": headers, CALLER: caller, "user": AuthenticatedUser(token)}
        if header(named, b"mcp-method") == "tools/call":
            await self._handlers.look_up(decode_header_value(header(named, b"mcp-name")))
        by = f"{caller.tenant}/{caller.id}"
        await self.sessions.handle(by, caller.acting, named, receive, Enveloped(send), body)

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
    members = _members(fault.data)
    raise MCPError(fault.code, fault.message, {**members, **Failure("E3004", fault.message).envelope(no_trace())})


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
        # Tasks are of the modern era, which has no handshake.
        return super().create_initialization_options(
            notification_options or _CHANGES, experimental_capabilities, extensions or {}
        )

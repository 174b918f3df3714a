"""The MCP endpoint: governed tools for any MCP client.

    HTTP ──► route: who calls? ──► modern tools/call and tools/list
                              └──► SDK: everything else of both eras, streamable HTTP
    stdio ───────────────────────► SDK: both eras, one client

It translates descriptions (listing.py), calls and their answers (calling.py). What may be seen and done is decided
behind it, for the caller of each single request.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import orjson

from interlock.api.failed_authentication import IDENTITY
from interlock.api.list_changes import watch_lists
from interlock.api.mcp_names import Names
from interlock.api.service import Service
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.doors.door import ANY, Door, Key
from interlock.doors.mcp.calling import Calling, no_trace
from interlock.doors.mcp.listing import Listing
from interlock.doors.mcp.modern import McpRoute
from interlock.http.asgi import Receive, Scope, Send, answer, header
from interlock.http.route import Application, Prepared, Reply, Route

if TYPE_CHECKING:
    from interlock.doors.listening import Listening
    from interlock.doors.mcp.sdk import Sdk

__all__ = ["McpDoor", "open_door", "open_stdio"]

PATH = "/mcp"
METADATA_PATH = "/.well-known/oauth-protected-resource"
MAX_BODY = 4 * 1024 * 1024
LOOPBACK = ("127.0.0.1:*", "localhost:*", "[::1]:*")


def open_door(service: Service, listening: Listening) -> Door:
    return _HttpDoor(service, listening)


def open_stdio(service: Service) -> McpDoor:
    return McpDoor(service)


class _HttpDoor(Door):
    """MCP over HTTP, and where its clients learn how to get a token."""

    loaded_later = tuple((method, PATH) for method in ("GET", "POST", "DELETE", ANY))

    def __init__(self, service: Service, listening: Listening) -> None:
        hosts = [name for host in sorted(listening.hosts) for name in (host, f"{host}:*")]
        self._scheme = "https" if listening.secure else "http"
        origins = [*(f"{self._scheme}://{one}" for one in hosts), *listening.origins]
        self._door = McpDoor(service, hosts=hosts, origins=origins, base_url=listening.public_url)
        self._running = contextlib.AsyncExitStack()

    def routes(self) -> Mapping[Key, Route]:
        return {("GET", path): Application(self._metadata) for path in (METADATA_PATH, METADATA_PATH + PATH)}

    async def load(self) -> Route:
        await asyncio.to_thread(importlib.import_module, "interlock.doors.mcp.sdk")
        await self._running.enter_async_context(self._door.lifespan())
        return self._door.route

    def is_endless(self, head: Scope) -> bool:
        opens_stream = head["method"] == "GET" and head["path"] == PATH
        return opens_stream or (b"mcp-method", b"subscriptions/listen") in head["headers"]

    async def close(self) -> None:
        await self._running.aclose()

    async def _metadata(self, scope: Scope, receive: Receive, send: Send) -> None:
        base_url = f"{self._scheme}://{header(scope, b'host') or ''}"
        await answer(send, 200, orjson.dumps(self._door.metadata(base_url)))


class McpDoor(Route):
    """One Interlock, as MCP clients see it.

    `hosts` are the values of `Host` that are answered (`name:*` for any port), `origins` those of `Origin`. `base_url`
    is how clients reach this server, where that is not what their `Host` header says.
    """

    def __init__(
        self,
        service: Service,
        *,
        name: str = "interlock",
        hosts: Sequence[str] = LOOPBACK,
        origins: Sequence[str] | None = None,
        base_url: str | None = None,
        max_body: int = MAX_BODY,
    ) -> None:
        self._service = service
        self._name = name
        self._hosts = list(hosts)
        self._origins = [f"http://{host}" for host in hosts] if origins is None else list(origins)
        self._base_url = base_url
        self._max_body = max_body
        self._names = Names(service.app)
        self._listing = Listing(service, self._names)
        self._calling = Calling(service, self._names, self._listing)

    # HTTP

    async def prepare(self, head: Scope) -> Prepared:
        """Answer requests to `/mcp`, while `lifespan` is entered."""
        return await self.route.prepare(head)

    @cached_property
    def route(self) -> McpRoute:
        """The route itself. Asking for it loads the SDK."""
        sdk = self._sdk
        return McpRoute(
            self._service,
            self._names,
            self._listing,
            self._calling,
            sdk_rules=sdk,
            sdk=sdk.handle,
            stamp=sdk.server.server_info_stamp,
            max_body=self._max_body,
            refuse=self._refuse,
        )

    @cached_property
    def _sdk(self) -> Sdk:
        from interlock.doors.mcp.sdk import Sdk

        return Sdk(
            self._service,
            self._names,
            self._listing,
            self._calling,
            name=self._name,
            hosts=self._hosts,
            origins=self._origins,
            max_body=self._max_body,
        )

    def _refuse(self, head: Scope, failure: Failure) -> Reply:
        """Tell a client what is wrong with its request, or with its token and what it needs (RFC 6750, RFC 9728)."""
        identity = failure.code in IDENTITY
        of_the_request = "invalid_request" if failure.row.http < 500 else "temporarily_unavailable"
        body = orjson.dumps({
            "error": "invalid_token" if identity else of_the_request,
            "error_description": failure.message,
            "interlock": failure.envelope(no_trace()),
        })  # fmt: skip
        if not identity:
            return Reply(failure.row.http, body)
        return Reply(401, body, ((b"www-authenticate", self._challenge(head, failure).encode("ascii", "replace")),))

    def _challenge(self, scope: Scope, failure: Failure) -> str:
        where = f'resource_metadata="{_quoted(self._base(scope) + METADATA_PATH + PATH)}"'
        if failure.code == "E3212":
            return f"Bearer {where}"
        return f'Bearer error="invalid_token", error_description="{_quoted(failure.message)}", {where}'

    def _base(self, scope: Scope) -> str:
        if self._base_url is not None:
            return self._base_url.rstrip("/")
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "localhost")
        return f"{scope.get('scheme', 'http')}://{host}"

    def metadata(self, base_url: str) -> Json:
        """The protected resource's metadata (RFC 9728), served at METADATA_PATH and at METADATA_PATH + PATH."""
        issuers = [str(entry["iss"]) for entry in self._service.app.settings.trusted_issuers if "iss" in entry]
        return {
            "resource": (self._base_url or base_url).rstrip("/") + PATH,
            "resource_name": "Interlock",
            "bearer_methods_supported": ["header"],
            **({"authorization_servers": issuers} if issuers else {}),
        }

    # Running

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        """Serve HTTP while inside; calls that are under way at the end are given a moment."""
        async with self._sdk.serving(), self._watching():
            try:
                yield
            finally:
                await self._calling.close()

    async def run_stdio(self, token: str | None = None) -> None:
        """Serve one client over stdin and stdout: the bearer of a token (INTERLOCK_TOKEN), else the local user.

        A token that is empty is no token: every request of the client is refused (E3203).
        """
        held = os.environ.get("INTERLOCK_TOKEN") if token is None else token
        app = self._service.app

        async def caller() -> Caller:
            return app.caller if held is None else await self._service.authenticate(f"Bearer {held}")

        async with self._watching():
            try:
                await self._sdk.run_stdio(caller)
            finally:
                await self._calling.close()

    async def drain(self, within_s: float) -> None:
        """Wait until the calls under way have ended; after the given time they are cut off, which is on record."""
        await self._calling.close(within_s)

    async def tools_changed(self) -> None:
        """Tell clients of both eras that their lists may have changed. Changes of the registry tell by themselves."""
        await self._sdk.changes.tools_changed()

    @contextlib.asynccontextmanager
    async def _watching(self) -> AsyncGenerator[None]:
        app = self._service.app
        surfaces_changed = self._sdk.changes.surfaces_changed
        watch = partial(watch_lists, app, self.tools_changed, surfaces_changed)
        task = app.supervisor.keep("announcing of changed tools", watch)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')

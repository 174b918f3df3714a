"""The server: one port for REST, MCP, JSON-RPC, health and metrics, and gRPC beside it.

    head ─► Gate: Host and Origin ─► route (REST invoke, JSON-RPC, MCP, health, metrics)
                                 └─► the wide API

The gate is the route that the connection asks (see `http/route.py`); it asks the route of the path. Everything without
a route of its own is FastAPI's. All of them see only requests whose host is one of ours: a page in a browser must not
reach a server on loopback by a name of its own (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import importlib
import os
import re
import resource
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import orjson

from interlock.api.service import Service
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.data.bounds import MOST_REQUEST_VALUES, check_values
from interlock.data.schema import Json
from interlock.http.asgi import MAX_BODY, App, Receive, Scope, Send, answer, header, refuse, replay
from interlock.http.connection_limits import MOST_PER_PEER
from interlock.http.route import Application, Handler, Reply, Route, Stream, guarded, refused

if TYPE_CHECKING:
    import uvicorn

    from interlock.doors.grpc import GrpcDoor

LOOPBACK = ("127.0.0.1", "localhost", "::1")
DRAIN_S = 30
_LAST_WORDS_S = 5.0
# Requests leave next to no cycles behind, and with many in flight the usual 700 objects are those of a few of them:
# the collector would walk them all the time and find nothing.
COLLECT = (20_000, 20, 50)
# Connections that wait to be accepted, and how many of them are accepted in one turn of the event loop.
_BACKLOG = 2048
_ACCEPTED_AT_ONCE = 16
_WITH_BODY = frozenset(("POST", "PUT", "PATCH", "DELETE"))


@dataclass(frozen=True, slots=True)
class Listening:
    """Where and how to listen. `names` are the hosts by which clients may speak of us, besides loopback."""

    host: str = "127.0.0.1"
    port: int = 8080
    grpc_port: int | None = 8081
    certificate: Path | None = None
    key: Path | None = None
    names: Sequence[str] = ()
    origins: Sequence[str] = ()
    drain_s: int = DRAIN_S
    # Where clients find us, if something stands in between that has an address of its own.
    public_url: str | None = None

    @property
    def secure(self) -> bool:
        return self.certificate is not None

    @property
    def loopback(self) -> bool:
        return self.host in LOOPBACK

    @property
    def hosts(self) -> frozenset[str]:
        own = () if self.host in ("0.0.0.0", "::") else (self.host,)  # noqa: S104 - compared, not bound
        public = () if self.public_url is None else (urlsplit(self.public_url).hostname or "",)
        return frozenset((*LOOPBACK, *own, *public, *self.names))


# Stands for every method that a path has no route for: the path's own route refuses them (405).
ANY = "*"


class Gate(Route):
    """Every HTTP request passes here first: the gate finds the route that answers it."""

    def __init__(
        self,
        listening: Listening,
        routes: Mapping[tuple[str, str], Route],
        wide: Route,
        *,
        most_values: int = MOST_REQUEST_VALUES,
        most_per_peer: int = MOST_PER_PEER,
    ) -> None:
        self.most_per_peer = most_per_peer
        self._hosts = frozenset(one.lower().encode() for one in listening.hosts)
        self._origins = frozenset(one.lower() for one in listening.origins)
        self._routes = routes
        self._wide = wide
        self._wide_with_body = _CountedBody(wide, most_values)
        self._passed: set[bytes] = set()

    async def prepare(self, head: Scope) -> Handler | Reply | Stream:
        if head["type"] != "http":
            return _NO_HTTP
        unwelcome = self._unwelcome(head)
        if unwelcome is not None:
            return refused(unwelcome)
        method, path = head["method"], head["path"]
        route = self._routes.get((method, path))
        if route is None and method == "HEAD":
            route = self._routes.get(("GET", path))
        route = route or self._routes.get((ANY, path))
        if route is None and method in _WITH_BODY:
            return self._wide_with_body
        try:
            prepared = await (route or self._wide).prepare(head)
        except Exception as error:  # noqa: BLE001 - a door answers whatever happens
            return refused(error)
        return Stream(guarded(prepared.app)) if isinstance(prepared, Stream) else prepared

    def is_endless(self, head: Scope) -> bool:
        path: str = head["path"]
        return (head["method"] == "GET" and (path == "/mcp" or path.endswith("/events"))) or (
            (b"mcp-method", b"subscriptions/listen") in head["headers"]
        )

    def _unwelcome(self, scope: Scope) -> Failure | None:
        """Why a request is not let through: by the name it has for us, or the page it comes from."""
        host: bytes | None = None
        origin: bytes | None = None
        for name, value in scope["headers"]:
            if name == b"host":
                # Of two names, whoever comes after us might take the other.
                host = value if host is None else b""
            elif name == b"origin":
                origin = value if origin is None else b""
        if host not in self._passed and not self._ours(host):
            return Failure("E3210", "this server does not go by that name; see `interlock serve --name`")
        if origin is not None and not self._welcome(origin, host):
            return Failure("E3210", "pages of that origin may not call this server")
        return None

    def _ours(self, host: bytes | None) -> bool:
        if host is None:
            return False
        if _HOST(host) and _without_port(host.lower()) in self._hosts:
            if len(self._passed) < 1000:
                self._passed.add(host)
            return True
        return False

    def _welcome(self, origin: bytes, host: bytes | None) -> bool:
        said = origin.decode("latin-1").lower()
        if said in self._origins:
            return True
        scheme, _, place = said.partition("://")
        return scheme in ("http", "https") and bool(place) and host is not None and place.encode() == host.lower()


class _CountedBody:
    """Hands requests to an application whose framework would read a body without a bound on its values."""

    max_body = MAX_BODY

    def __init__(self, app: App, most_values: int) -> None:
        self._app = app
        self._most_values = most_values

    async def __call__(self, body: bytes) -> Stream:
        check_values(body, self._most_values)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app(scope, replay(body, receive), send)

        return Stream(guarded(app))

    def refuse(self, error: Exception) -> Reply:
        return refused(error)


async def _refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1003})


_NO_HTTP = Stream(_refuse_websocket)
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/@?#\s]{1,255})(:[0-9]{1,5})?").fullmatch


def _without_port(host: bytes) -> bytes:
    if host.startswith(b"["):
        return host[1:].partition(b"]")[0]
    return host.partition(b":")[0]


class Server:
    """All doors of one Interlock."""

    def __init__(self, service: Service, listening: Listening) -> None:
        self._service = service
        self._listening = listening
        self._stack = AsyncExitStack()
        self._http: uvicorn.Server | None = None
        self._grpc: GrpcDoor | None = None
        self._serving: asyncio.Task[None] | None = None
        self._loading: list[_Later] = []
        self._hurried = False
        self.port = 0
        self.grpc_port: int | None = None

    async def start(self) -> None:
        """Open the doors. Returns when they answer."""
        import uvicorn

        from interlock.http.connection import MAX_CONNECTIONS, Connection

        _allow_files(3 * MAX_CONNECTIONS)
        gc.set_threshold(*COLLECT)

        listening = self._listening
        config = uvicorn.Config(
            self._gate(),
            host=listening.host,
            port=listening.port,
            http=Connection,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_ACCEPTED_AT_ONCE,
            timeout_graceful_shutdown=listening.drain_s,
            ssl_certfile=listening.certificate,
            ssl_keyfile=listening.key,
        )
        bound = _bind(listening)
        self.port = bound.getsockname()[1]
        self._http = _quiet(config)
        connections = self._http.server_state.connections
        alerts = self._service.lock.gateway.telemetry.alerts
        alerts.watch("connections", lambda: len(connections) / MAX_CONNECTIONS)
        self._serving = asyncio.create_task(self._http.serve(sockets=[bound]))
        while not self._http.started:
            if self._serving.done():
                await self._serving
                raise Failure("E3108", "the server ended before it began")
            await asyncio.sleep(0.005)
        bound.listen(_BACKLOG)  # asyncio has set it to the number that it accepts per turn
        if listening.grpc_port is not None:
            await self._start_grpc(listening.grpc_port)

    def _gate(self) -> Gate:
        from interlock.doors import mcp, rest
        from interlock.doors.jsonrpc import JsonRpcDoor

        listening, service = self._listening, self._service
        hosts = [name for host in sorted(listening.hosts) for name in (host, f"{host}:*")]
        scheme = "https" if listening.secure else "http"
        origins = [*(f"{scheme}://{one}" for one in hosts), *listening.origins]
        door = mcp.McpDoor(service, hosts=hosts, origins=origins, base_url=listening.public_url)

        mcp_routes = [(method, mcp.PATH) for method in ("GET", "POST", "DELETE", ANY)]

        async def load_mcp() -> Route:
            await asyncio.to_thread(importlib.import_module, "interlock.doors.mcp.sdk")
            await self._stack.enter_async_context(door.lifespan())
            routes.update(dict.fromkeys(mcp_routes, door.route))
            return door.route

        async def load_rest() -> Route:
            return Application(await asyncio.to_thread(rest.rest_app, service))

        async def resource(scope: Scope, receive: Receive, send: Send) -> None:
            host = header(scope, b"host") or ""
            await answer(send, 200, orjson.dumps(door.metadata(f"{scheme}://{host}")))

        routes: dict[tuple[str, str], Route] = {
            ("POST", rest.INVOKE_PATH): rest.invoke_route(service),
            ("GET", "/metrics"): Application(self._metrics),
            # Whoever watches a server asks for these first. They do not wait until the wide API is loaded.
            ("GET", "/health"): Application(self._alive),
            ("GET", "/ready"): Application(self._ready),
            ("GET", mcp.METADATA_PATH): Application(resource),
            ("GET", mcp.METADATA_PATH + mcp.PATH): Application(resource),
        }
        slow, wide = self._later(load_mcp), self._later(load_rest)
        routes |= dict.fromkeys(mcp_routes, slow)
        rpc = JsonRpcDoor(service)
        routes |= {(method, "/rpc"): rpc for method in ("GET", "POST", ANY)}
        settings = service.lock.settings
        per_peer = settings.max_connections_per_peer
        return Gate(listening, routes, wide, most_values=settings.max_values, most_per_peer=per_peer)

    def _later(self, load: Callable[[], Awaitable[Route]]) -> Route:
        """A route that is loaded when it is first wanted: the SDK and FastAPI take their time."""
        later = _Later(load)
        self._loading.append(later)
        return later

    async def warm(self) -> None:
        """Load what would otherwise be loaded at the first request that wants it."""
        for one in self._loading:
            await one.loaded()

    async def _start_grpc(self, port: int) -> None:
        from interlock.doors.grpc import GrpcDoor

        listening = self._listening
        secure = (
            None if listening.certificate is None or listening.key is None else (listening.certificate, listening.key)
        )
        host = f"[{listening.host}]" if ":" in listening.host else listening.host
        self._grpc = GrpcDoor(self._service, address=f"{host}:{port}", tls=secure, drain_s=listening.drain_s)
        self.grpc_port = await self._grpc.start()

    async def _alive(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._tell_health(send, self._service.health.alive())

    async def _ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._tell_health(send, await self._service.health.readiness())

    @staticmethod
    async def _tell_health(send: Send, told: tuple[int, Json]) -> None:
        status, document = told
        await answer(send, status, orjson.dumps(document), [(b"x-trace-id", os.urandom(16).hex().encode())])

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """For Prometheus. For everybody who asks on loopback and by that name; for others, if they may see it."""
        host = _without_port((header(scope, b"host") or "").lower().encode()).decode()
        try:
            # What comes by another name comes through somebody else: from where, we cannot tell.
            if not self._listening.loopback or host not in LOOPBACK:
                _may_watch(await self._service.authenticate(header(scope, b"authorization")))
        except Failure as failure:
            await refuse(send, failure)
            return
        kind = b"text/plain; version=0.0.4; charset=utf-8"
        await answer(send, 200, self._service.lock.gateway.telemetry.metrics.render(), kind=kind)

    def hurry(self) -> None:
        """Wait no longer for calls in flight: they are cut off, which is on record, and their callers are told."""
        self._hurried = True
        if self._http is not None:
            self._http.force_exit = True
            for task in self._http.server_state.tasks:
                task.cancel()
        if self._grpc is not None:
            self._grpc.hurry()

    async def stop(self) -> None:
        """Let calls in flight end, whichever door they came by, all within one drain time; then close everything."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._listening.drain_s
        self._service.events.close()
        await asyncio.gather(self._stop_http(), self._stop_grpc())
        await asyncio.gather(*(one.settled() for one in self._loading))
        await self._stack.aclose()
        await self._service.close(within_s=0.0 if self._hurried else max(0.0, until - loop.time()))

    async def _stop_http(self) -> None:
        if self._http is not None and self._serving is not None:
            self._http.should_exit = True
            with contextlib.suppress(SystemExit):
                await self._serving
            # Those that were cut off have a moment to say so.
            if cut_off := self._http.server_state.tasks:
                await asyncio.wait(cut_off, timeout=_LAST_WORDS_S)

    async def _stop_grpc(self) -> None:
        if self._grpc is not None:
            await self._grpc.stop()


class _Later(Route):
    """A route that is not loaded yet."""

    def __init__(self, load: Callable[[], Awaitable[Route]]) -> None:
        self._load = load
        self._loading: asyncio.Future[Route] | None = None

    async def prepare(self, head: Scope) -> Handler | Reply | Stream:
        return await (await self.loaded()).prepare(head)

    async def loaded(self) -> Route:
        if self._loading is None:
            self._loading = asyncio.ensure_future(self._load())
        return await asyncio.shield(self._loading)

    async def settled(self) -> None:
        """Wait for a load that is under way, whatever comes of it."""
        if self._loading is not None:
            await asyncio.wait({self._loading})


def _may_watch(caller: Caller) -> None:
    if not caller.governs("metrics:read"):
        raise Failure("E3206", "reading metrics needs the scope `metrics:read`, in the tenant `local`")


def _allow_files(most: int) -> None:
    """Every connection is an open file, and many systems allow a process 1,024 of them unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _bind(listening: Listening) -> socket.socket:
    family = socket.AF_INET6 if ":" in listening.host else socket.AF_INET
    both = listening.host == "::" and socket.has_dualstack_ipv6()
    where = f"[{listening.host}]" if ":" in listening.host else listening.host
    try:
        return socket.create_server(
            (listening.host, listening.port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )  # fmt: skip
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        option = "another port with --port" if taken else "an address of this machine with --host"
        words = f"{where}:{listening.port} cannot be listened on: {error.strerror}; choose {option}"
        raise Failure("E3108", words) from None


def _quiet(config: uvicorn.Config) -> uvicorn.Server:
    """uvicorn's server, which leaves signals to whoever runs the program."""
    import uvicorn

    class Quiet(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    return Quiet(config)


@contextlib.asynccontextmanager
async def serving(service: Service, listening: Listening) -> AsyncGenerator[Server]:
    """The doors, open for as long as the block lasts."""
    server = Server(service, listening)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()

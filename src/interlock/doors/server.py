"""The server: opens the endpoints of call/endpoints.py on one HTTP port and on ports of their own.

    head ─► Gate: Host and Origin ─► the route of the path (REST invoke, JSON-RPC, MCP, health, metrics)
                                 └─► the wide API

The gate is the route that the connection asks (see `http/route.py`); it asks the route of the path. Everything without
a route of its own is FastAPI's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
from collections.abc import AsyncGenerator, Generator
from functools import partial
from typing import TYPE_CHECKING

from interlock.api.service import Service
from interlock.core.collector import collect_seldom
from interlock.core.errors import Failure
from interlock.doors.door import EVERYTHING_ELSE, Door, Key, Later
from interlock.doors.gate import Gate
from interlock.doors.listening import Listening
from interlock.doors.opening import open_doors
from interlock.http.route import Route

if TYPE_CHECKING:
    import uvicorn

_LAST_WORDS_S = 5.0
# Connections that wait to be accepted, and how many of them are accepted in one turn of the event loop.
_BACKLOG = 2048
_ACCEPTED_AT_ONCE = 16


class Server:
    """All endpoints of one Interlock."""

    def __init__(self, service: Service, listening: Listening) -> None:
        self._service = service
        self._listening = listening
        self._doors: dict[str, Door] = {}
        self._http: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._loading: list[Later] = []
        self._hurried = False
        self.port = 0
        # The ports of doors that have their own.
        self.ports: dict[str, int] = {}

    async def start(self) -> None:
        """Open the endpoints. Returns when they answer."""
        import uvicorn

        from interlock.http.connection import MAX_CONNECTIONS, ServerConnection

        _allow_files(3 * MAX_CONNECTIONS)
        collect_seldom()

        listening = self._listening
        # Only now: doors with a port of their own bound their connections by the files that the process may open.
        self._doors = open_doors(self._service, listening)
        config = uvicorn.Config(
            self._gate(),
            host=listening.host,
            port=listening.port,
            http=ServerConnection,
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
        alerts = self._service.app.telemetry.alerts
        alerts.watch("connections", lambda: len(connections) / MAX_CONNECTIONS)
        self._serving = asyncio.create_task(self._http.serve(sockets=[bound]))
        while not self._http.started:
            if self._serving.done():
                await self._serving
                raise Failure("E3108", "the server ended before it began")
            await asyncio.sleep(0.005)
        bound.listen(_BACKLOG)  # asyncio has set it to the number that it accepts per turn
        for name, door in self._doors.items():
            port = await door.start()
            if port is not None:
                self.ports[name] = port

    def _gate(self) -> Gate:
        """The routes of all doors, behind the gate."""
        routes: dict[Key, Route] = {}
        for door in self._doors.values():
            routes |= door.routes()
            if door.loaded_later:
                later = Later(partial(self._load, door, routes))
                # The wide API is loaded last, because nothing else waits for it.
                self._loading.insert(len(self._loading) if EVERYTHING_ELSE in door.loaded_later else 0, later)
                routes |= dict.fromkeys(door.loaded_later, later)
        settings = self._service.app.settings
        return Gate(
            self._listening,
            routes,
            routes.pop(EVERYTHING_ELSE),
            most_values=settings.max_values,
            most_per_peer=settings.max_connections_per_peer,
            endless=lambda head: any(door.is_endless(head) for door in self._doors.values()),
        )

    async def _load(self, door: Door, routes: dict[Key, Route]) -> Route:
        route = await door.load()
        # From now on requests find it without a detour.
        routes.update((key, route) for key in door.loaded_later if key in routes)
        return route

    async def warm(self) -> None:
        """Load what would otherwise be loaded at the first request that wants it."""
        for one in self._loading:
            await one.loaded()

    def announce_end(self) -> None:
        """Say that the server is about to end, and go on serving: `/ready` says no, and every answer closes its
        connection. A load balancer sends new calls elsewhere before connections are refused."""
        from interlock.http.connection import MAX_CONNECTIONS
        from interlock.http.connection_limits import limits_of

        self._service.health.ending = True
        if self._http is not None:
            limits_of(
                self._http.server_state, MAX_CONNECTIONS, self._service.app.settings.max_connections_per_peer
            ).ending = True

    def hurry(self) -> None:
        """Cut off the calls in flight, on record and with an answer to their callers."""
        self._hurried = True
        if self._http is not None:
            self._http.force_exit = True
            for task in self._http.server_state.tasks:
                task.cancel()
        for door in self._doors.values():
            door.hurry()

    async def stop(self) -> None:
        """Let calls in flight end, whichever door they came by, all within one drain time; then close everything."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._listening.drain_s
        self._service.events.close()
        await asyncio.gather(self._stop_http(), *(door.stop() for door in self._doors.values()))
        await asyncio.gather(*(one.settled() for one in self._loading))
        for door in self._doors.values():
            await door.close()
        await self._service.close(within_s=0.0 if self._hurried else max(0.0, until - loop.time()))

    async def _stop_http(self) -> None:
        if self._http is not None and self._serving is not None:
            self._http.should_exit = True
            with contextlib.suppress(SystemExit):
                await self._serving
            # Those that were cut off have a moment to say so.
            if cut_off := self._http.server_state.tasks:
                await asyncio.wait(cut_off, timeout=_LAST_WORDS_S)


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
    """uvicorn's server, which leaves signals to the program that runs it."""
    import uvicorn

    class Quiet(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    return Quiet(config)


@contextlib.asynccontextmanager
async def serving(service: Service, listening: Listening) -> AsyncGenerator[Server]:
    """Open the endpoints for as long as the block lasts."""
    server = Server(service, listening)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()

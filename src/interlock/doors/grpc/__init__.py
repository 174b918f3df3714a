"""The gRPC endpoint: typed messages, deadlines and cancellation that reach the tool, and a stream for long calls.

    gateway.proto ──► v1/ (written by generate.py)         the contract that clients compile
    messages.py       core values <-> messages, a failure -> google.rpc.Status
    servicer.py       one method per RPC, all behind one guard that lets out answers and statuses and nothing else
    places.py         how many RPCs one peer without a token, or one caller, may have open
    links.py          how many connections one peer may hold
    reflection.py     the contract for clients that ask the server for it

The door authenticates every RPC, then asks the service, and decides nothing. Time and cancellation are gRPC's own: the
client's deadline becomes the call's, and an RPC that is cancelled cancels its call, which is on record as such. Health
and reflection answer without a token; they tell what the contract says and nothing of this server's tools.
"""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from interlock.api.service import Service
from interlock.core.errors import Failure
from interlock.doors.door import Door
from interlock.doors.listening import Listening

if TYPE_CHECKING:
    from grpc.aio import Server

    from interlock.doors.grpc.links import Links
    from interlock.doors.grpc.servicer import Servicer

__all__ = ["GrpcDoor", "open_door"]

# Calls of all clients together; what comes on top is refused with RESOURCE_EXHAUSTED.
MOST_CALLS = 10_000
# Connections of all clients together; what comes on top is closed at once.
MOST_CONNECTIONS = 4096
# gRPC itself refuses without our envelope. Messages of up to so many times the limit are read and refused by us.
_ROOM = 4
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a port that is taken is refused, not shared
    ("grpc.max_metadata_size", 16_384),
    # A client that begins more before it has heard of the limit is refused, so the limit is far above honest use.
    ("grpc.max_concurrent_streams", 1000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Connections whose other end is gone are noticed within a minute and a half.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # A connection without a call is closed after five minutes. Clients connect again by themselves.
    ("grpc.max_connection_idle_ms", 300_000),
)


def open_door(service: Service, listening: Listening) -> Door | None:
    port = listening.ports.get("grpc")
    if port is None:
        return None
    secure = None if listening.certificate is None or listening.key is None else (listening.certificate, listening.key)
    host = f"[{listening.host}]" if ":" in listening.host else listening.host
    return GrpcDoor(service, address=f"{host}:{port}", tls=secure, drain_s=listening.drain_s)


class GrpcDoor(Door):
    """One listening gRPC server over one service.

    door = GrpcDoor(service, address="127.0.0.1:0")
    port = await door.start()
    await door.stop()
    """

    def __init__(
        self,
        service: Service,
        *,
        address: str = "127.0.0.1:8081",
        tls: tuple[str | os.PathLike[str], str | os.PathLike[str]] | None = None,
        max_message_bytes: int = 4 * 1024 * 1024,
        drain_s: float = 10.0,
        max_connections: int | None = None,
    ) -> None:
        """A door that does not listen yet.

        `tls` is a certificate chain and its private key, as PEM files. Without it the door speaks plain text.
        `max_connections` bounds the connections of all peers together, by default to a third of the files that the
        process may open, and to 4,096. The setting `max_connections_per_peer` bounds those of one peer.
        """
        self._service = service
        self._address = address
        self._tls = tls
        self._max_message_bytes = max_message_bytes
        self._drain_s = drain_s
        self._max_connections = max_connections or _most_connections()
        self._links: Links | None = None
        self._server: Server | None = None
        self._servicer: Servicer | None = None
        self._health: Any = None

    async def start(self) -> int:
        """Listen. The port, which matters where the address leaves it open; E3108 if it cannot be had."""
        # Its core prints every broken connection to stderr otherwise; operators who want that say so.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        import grpc.aio
        from grpc_health.v1 import health

        from interlock.doors.grpc import places, reflection
        from interlock.doors.grpc.links import Links
        from interlock.doors.grpc.servicer import NAME, Servicer

        self._servicer = Servicer(self._service, self._max_message_bytes)
        self._health = cast("Any", health).aio.HealthServicer()
        visits = places.Visits()
        handlers = (
            self._servicer.handler(),
            places.health_handler(self._health, health.SERVICE_NAME, visits),
            *reflection.handlers((NAME, health.SERVICE_NAME), visits),
            places.Unknown(visits),
        )
        bounds = (
            ("grpc.max_receive_message_length", _ROOM * self._max_message_bytes),
            ("grpc.max_allowed_incoming_connections", self._max_connections),
        )
        server: Server = cast("Any", grpc.aio).server(
            handlers=handlers,
            options=(*_OPTIONS, *bounds),
            maximum_concurrent_rpcs=MOST_CALLS,
        )
        port = self._bind(server)
        await server.start()
        self._server = server
        per_peer = self._service.app.settings.max_connections_per_peer
        most, busy = self._max_connections, self._servicer.peers
        self._links = Links(port, most=most, most_per_peer=per_peer, busy=busy)
        await self._health.set(NAME, _SERVING)
        return port

    def _bind(self, server: Server) -> int:
        import grpc

        try:
            if self._tls is None:
                return server.add_insecure_port(self._address)
            certificate, key = (Path(file).read_bytes() for file in self._tls)
            return server.add_secure_port(self._address, grpc.ssl_server_credentials([(key, certificate)]))
        except OSError as error:
            raise Failure("E3001", f"the certificate or its key cannot be read: {error.strerror}") from None
        except RuntimeError:
            what = "" if self._tls is None else ", or the certificate and key are not a pair of PEM files"
            words = f"gRPC cannot listen on {self._address}: it is taken or not ours{what}"
            raise Failure("E3108", f"{words}; choose another port with --grpc-port, or --no-grpc") from None

    def hurry(self) -> None:
        """Cut off the calls under way, with an answer to their callers."""
        if self._servicer is not None:
            self._servicer.hurry()

    async def stop(self) -> None:
        """Take no more calls, let those under way end, and cut off what has not ended in time. All is on record."""
        if self._server is None or self._servicer is None:
            return
        if self._health is not None:
            await self._health.enter_graceful_shutdown()
        server, self._server = self._server, None
        if self._links is not None:
            self._links.close()
        stopping = asyncio.ensure_future(server.stop(self._drain_s))
        # What is left once our own calls have ended are watchers of health and readers of the contract: they go on for
        # ever, and nothing is lost with them.
        await self._servicer.ended(self._drain_s)
        await server.stop(_LAST_WORDS_S)
        await stopping
        await self._servicer.ended()


def _most_connections() -> int:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(MOST_CONNECTIONS, files // 3))


_LAST_WORDS_S = 0.5  # for answers that are on their way
_SERVING = 1  # grpc.health.v1.HealthCheckResponse.SERVING

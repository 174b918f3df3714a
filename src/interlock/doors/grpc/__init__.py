"""The gRPC door: typed messages, deadlines and cancellation that reach the tool, and a stream for long calls.

    gateway.proto ──► v1/ (written by generate.py)         the contract that clients compile
    messages.py       core values <-> messages, a failure -> google.rpc.Status
    servicer.py       one method per RPC, all behind one guard that lets out answers and statuses and nothing else
    reflection.py     the contract for clients that ask the server for it

The door authenticates every RPC, then asks the service, and decides nothing. Time and cancellation are gRPC's own: the
client's deadline becomes the call's, and an RPC that is cancelled cancels its call, which is on record as such. Health
and reflection answer without a token; they tell what the contract says and nothing of this server's tools.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from interlock.core.errors import Failure
from interlock.service import Service

if TYPE_CHECKING:
    from grpc.aio import Server

    from interlock.doors.grpc.servicer import Servicer

__all__ = ["GrpcDoor"]

# Calls of all clients together; what comes on top is refused with RESOURCE_EXHAUSTED.
MOST_CALLS = 10_000
# gRPC itself refuses without our envelope. Messages of up to so many times the limit are read and refused by us.
_ROOM = 4
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a port that is taken is refused, not shared
    ("grpc.max_metadata_size", 16_384),
    ("grpc.max_concurrent_streams", 1000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Connections whose other end is gone are noticed within a minute and a half.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


class GrpcDoor:
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
    ) -> None:
        """`tls` is a certificate chain and its private key, as PEM files. Without it the door speaks plain text."""
        self._service = service
        self._address = address
        self._tls = tls
        self._max_message_bytes = max_message_bytes
        self._drain_s = drain_s
        self._server: Server | None = None
        self._servicer: Servicer | None = None
        self._health: Any = None

    async def start(self) -> int:
        """Listen. The port, which matters where the address leaves it open; E3108 if it cannot be had."""
        # Its core prints every broken connection to stderr otherwise; operators who want that say so.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        import grpc.aio
        from grpc_health.v1 import health, health_pb2_grpc

        from interlock.doors.grpc import reflection
        from interlock.doors.grpc.servicer import NAME, Servicer

        self._servicer = Servicer(self._service, self._max_message_bytes)
        server: Server = cast("Any", grpc.aio).server(
            handlers=(self._servicer.handler(), *reflection.handlers((NAME, health.SERVICE_NAME))),
            options=(*_OPTIONS, ("grpc.max_receive_message_length", _ROOM * self._max_message_bytes)),
            maximum_concurrent_rpcs=MOST_CALLS,
        )
        self._health = cast("Any", health).aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        port = self._bind(server)
        await server.start()
        self._server = server
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
        """Cut off the calls under way; their callers are told."""
        if self._servicer is not None:
            self._servicer.hurry()

    async def stop(self) -> None:
        """Take no more calls, let those under way end, and cut off what has not ended in time. All is on record."""
        if self._server is None or self._servicer is None:
            return
        if self._health is not None:
            await self._health.enter_graceful_shutdown()
        server, self._server = self._server, None
        stopping = asyncio.ensure_future(server.stop(self._drain_s))
        # What is left once our own calls have ended are watchers of health and readers of the contract: they go on for
        # ever, and nothing is lost with them.
        await self._servicer.ended(self._drain_s)
        await server.stop(_LAST_WORDS_S)
        await stopping
        await self._servicer.ended()


_LAST_WORDS_S = 0.5  # for answers that are on their way
_SERVING = 1  # grpc.health.v1.HealthCheckResponse.SERVING

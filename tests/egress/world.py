"""A small world for the proxy: servers that are really listened to, and names and addresses that lead to them.

Names resolve as the test says, mostly to public addresses; the dialler writes down every address it is asked for and
connects to the server that stands for it here. Whatever the dialler did not hear of was not reached.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from interlock.contract.manifest import NetworkPolicy
from interlock.executors.egress import Egress, EgressPolicy, EgressRefusal, Limits, Seen
from interlock.executors.egress.proxy import Streams
from interlock.testing import FakeClock

PUBLIC, OTHER = "93.184.216.34", "198.35.26.96"
SOON = 60.0
NAMES: dict[str, Sequence[str]] = {
    "api.example.com": [PUBLIC],
    "a.b.example.org": [PUBLIC],
    "xn--mnchen-3ya.example": [PUBLIC],
    "inside.example.com": ["10.0.0.5"],
    "metadata.example.com": ["169.254.169.254"],
    "mixed.example.com": [PUBLIC, "127.0.0.1"],
    "mapped.example.com": ["::ffff:10.0.0.5"],
    "evil.example": [OTHER],
}
LISTED = (*(name for name in NAMES if name.endswith("example.com")), "*.example.org", "xn--mnchen-3ya.example")

ANSWERS = {
    "/redirect": b"302 Found\r\nLocation: http://evil.example/\r\nContent-Length: 0\r\n\r\n",
    "/inward": b"302 Found\r\nLocation: http://169.254.169.254/latest\r\nContent-Length: 0\r\n\r\n",
    "/chunked": b"200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "/broken": b"200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n5\r\nhe",
    "/unframed": b"200 OK\r\n\r\nuntil the end",
    "/short": b"200 OK\r\nContent-Length: 100\r\n\r\nshort",
    "/nonsense": b"what?\r\n\r\n",
    "/upgrade": b"101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nraw",
    "/both": b"200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "/hops": b"200 OK\r\nConnection: x-a\r\nX-A: 1\r\nProxy-Authenticate: Basic\r\nContent-Length: 2\r\n\r\nok",
    "/big": b"200 OK\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1_000_000,
    "/heads": b"200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
}


def policy(*domains: str, ports: Sequence[int] = (80, 443), **facts: Any) -> NetworkPolicy:
    return NetworkPolicy(allowed_domains=domains, allowed_ports=tuple(ports), **facts)


def both(*domains: str, **facts: Any) -> EgressPolicy:
    return EgressPolicy(agent=policy(*domains, **facts), manifest=policy(*domains, **facts))


@dataclass
class Upstream:
    """A server that answers as its path says and remembers every byte it was sent."""

    connections: int = 0
    reached: int = 0
    heard: list[bytes] = field(default_factory=list[bytes])
    bodies: list[bytes] = field(default_factory=list[bytes])
    port: int = 0
    tasks: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        place = len(self.heard)
        self.heard.append(b"")
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.heard[place] += head
            await self.answer(head, reader, writer)
            # What comes after the request must be heard too: that is what smuggled bytes would be.
            while data := await reader.read(65536):
                self.heard[place] += data
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            self.tasks.discard(task)
            writer.transport.abort()

    async def close(self) -> None:
        """End it when every connection is over; those to it end with the proxy."""
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=SOON)
        assert not self.tasks

    async def answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = head.split(b" ")[1].decode()
        if path == "/reset":
            connection: socket.socket = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        if path in ("/reset", "/hang"):
            return
        if path == "/early":
            writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
            return
        if b"expect: 100-continue" in head.lower():
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.bodies.append(await self.body(head, reader))
        writer.write(b"HTTP/1.1 " + ANSWERS.get(path, b"200 OK\r\nContent-Length: 2\r\n\r\nok"))
        await writer.drain()
        if path in ("/unframed", "/short", "/broken"):
            writer.write_eof()

    async def body(self, head: bytes, reader: asyncio.StreamReader) -> bytes:
        lines = [line.lower().partition(b":") for line in head.split(b"\r\n")[1:]]
        said = {name: value.strip() for name, _, value in lines}
        if said.get(b"transfer-encoding") == b"chunked":
            body = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readexactly(2)
            return body
        return await reader.readexactly(int(said.get(b"content-length", b"0")))


@dataclass
class World:
    """The proxy, what it was asked to dial, and the servers behind it."""

    egress: Egress
    web: Upstream
    secure: Upstream
    port: int
    dialled: list[tuple[str, int]]
    events: list[EgressRefusal | Seen]
    names: dict[str, Sequence[str]]

    @property
    def proxy(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def reasons(self) -> list[str]:
        return [refusal.reason for refusal in self.egress.refusals]

    def client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(proxy=self.proxy, trust_env=False, timeout=SOON, **options)

    async def connect(self) -> Streams:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def say(self, raw: bytes, *, half_close: bool = True) -> bytes:
        """Everything the proxy answers to these bytes, until it closes."""
        async with asyncio.timeout(SOON):
            reader, writer = await self.connect()
            try:
                writer.write(raw)
                if half_close:
                    writer.write_eof()
                return await reader.read()
            except ConnectionResetError:
                return b""
            finally:
                writer.transport.abort()

    async def get(self, url: str, *, method: str = "GET", headers: str = "") -> int:
        """The status of a request for exactly this target, with a Host header that agrees."""
        host = url.partition("://")[2].partition("/")[0]
        answer = await self.say(f"{method} {url} HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n".encode())
        return int(answer.split(b" ")[1])

    async def connect_to(self, authority: str) -> int:
        """The status of a tunnel that nothing is then said in."""
        answer = await self.say(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode())
        return int(answer.split(b" ")[1])


async def becomes(true: Callable[[], bool]) -> None:
    """Wait until something has come about; the test fails when it does not."""
    async with asyncio.timeout(SOON):
        while not true():  # noqa: ASYNC110 - counters of the proxy are looked at from outside
            await asyncio.sleep(0.001)


class _Unforeseen(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(self.format(record))


@asynccontextmanager
async def world(
    allowed: EgressPolicy | None = None, *, limits: Limits | None = None, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[World]:
    """A world with its proxy running. Nothing unforeseen may have happened in it when it ends."""
    web, secure = Upstream(), Upstream()
    servers: list[asyncio.Server] = []
    for upstream, context in ((web, None), (secure, tls)):
        server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0, ssl=context)
        upstream.port = server.sockets[0].getsockname()[1]
        servers.append(server)
    dialled: list[tuple[str, int]] = []
    names = dict(NAMES)

    async def dial(address: str, port: int) -> Streams:
        dialled.append((address, port))
        upstream = secure if port == 443 else web
        streams = await asyncio.open_connection("127.0.0.1", upstream.port)
        upstream.reached += 1
        return streams

    async def resolve(name: str) -> Sequence[str]:
        if name not in names:
            raise OSError("no such name")
        return names[name]

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    events: list[EgressRefusal | Seen] = []
    egress = Egress(
        allowed or both(*LISTED),
        clock=FakeClock().clock,
        on_event=events.append,
        resolve=resolve,
        dial=dial,
        limits=limits or Limits(farewell_s=0.2),
    )
    unforeseen = _Unforeseen()
    log = logging.getLogger("interlock.executors.egress.proxy")
    log.addHandler(unforeseen)
    serving = asyncio.create_task(egress.serve(listener))
    try:
        yield World(egress, web, secure, port, dialled, events, names)
    finally:
        await egress.close()
        await serving
        log.removeHandler(unforeseen)
        for server, upstream in zip(servers, (web, secure), strict=True):
            # Who fails at TLS is no connection yet.
            await becomes(lambda upstream=upstream: bool(tls) or upstream.connections >= upstream.reached)
            server.close()
            await upstream.close()
    assert unforeseen.records == []
    assert len([event for event in events if isinstance(event, Seen)]) == len(egress.requests)

"""A server at the level of its connections, with an application that does as its paths say."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from typing import NamedTuple

import pytest_asyncio
import uvicorn

from interlock.http.asgi import Message, Receive, Scope, Send, answer, read_body
from interlock.http.connection import ServerConnection


class Wire(NamedTuple):
    """One end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    async def answer(self) -> tuple[bytes, bytes]:
        """The head and the body of the next answer."""
        async with asyncio.timeout(60):
            head = await self.reader.readuntil(b"\r\n\r\n")
            if b"transfer-encoding: chunked" not in head:
                length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                return head, await self.reader.readexactly(int(length or b"0"))
            body = b""
            while size := int(await self.reader.readline(), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readline()
            return head, body

    async def rest(self) -> bytes:
        async with asyncio.timeout(60):
            return await self.reader.read()


class Place:
    """A server whose application does as its paths say."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.waiting = asyncio.Event()
        self.gone = asyncio.Event()
        self.port = 0
        self.wires: list[Wire] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/echo":
            await answer(send, 200, await read_body(receive), kind=b"text/plain")
        elif path == "/wait":
            self.waiting.set()
            await self.gate.wait()
            await answer(send, 200, b"waited")
        elif path == "/watch":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone.set()
        elif path == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in (b"one ", b"", b"two"):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await self.gate.wait()
            await send({"type": "http.response.body", "body": b""})
        elif path == "/host":
            (host,) = [value for name, value in scope["headers"] if name == b"host"]
            await answer(send, 200, host)
        elif path == "/early":
            await answer(send, 200, b"early")
        elif path == "/nothing":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})
        elif path == "/split":
            await answer(send, 200, b"", [(b"x-name", b"a\r\nset-cookie: b")])
        elif path == "/split/stream":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-name", b"a\r\nset-cookie: b")]})
        elif path == "/short":
            await self._send(send, b"12345", length=b"9")
        elif path == "/raise":
            raise RuntimeError("no")

    @staticmethod
    async def _send(send: Send, body: bytes, length: bytes) -> None:
        start: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
        await send(start)
        await send({"type": "http.response.body", "body": body})

    async def wire(self) -> Wire:
        self.wires.append(Wire(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self.wires[-1]

    async def close(self) -> None:
        for wire in self.wires:
            wire.writer.close()
            with contextlib.suppress(ConnectionError):
                await wire.writer.wait_closed()


@pytest_asyncio.fixture
async def place() -> AsyncGenerator[Place]:
    place = Place()
    bound = socket.create_server(("127.0.0.1", 0))
    place.port = bound.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(place, http=ServerConnection, lifespan="off", log_level="critical"))
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        yield place
    finally:
        place.gate.set()
        await place.close()
        server.should_exit = True
        await serving

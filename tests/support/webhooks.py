"""A receiver of webhooks, and a resolver whose answers change."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
OLDER = "whsec_" + base64.b64encode(bytes(range(32, 64))).decode()


@dataclass
class Got:
    """A request that arrived."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    status: int = 204
    headers: str = ""
    body: bytes = b""


class Receiver:
    """A small HTTP server on this machine that answers as it is told and remembers what it was sent."""

    def __init__(self) -> None:
        self.got: list[Got] = []
        self.answers: list[Answer] = []
        self.connections = 0
        self.silent = False
        self.port = 0
        self.arrived = asyncio.Condition()
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook/s3cr3t-path"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {line.split(":", 1)[0].lower(): line.split(":", 1)[1].strip() for line in head[1:] if line}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                async with self.arrived:
                    self.got.append(Got(head[0].split()[1], headers, body))
                    self.arrived.notify_all()
                if self.silent:
                    continue
                answer = self.answers.pop(0) if self.answers else Answer()
                length = "" if answer.status == 204 else f"content-length: {len(answer.body)}\r\n"
                writer.write(f"HTTP/1.1 {answer.status} x\r\n{length}{answer.headers}\r\n".encode() + answer.body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    async def has_got(self, count: int) -> None:
        """Wait until so many requests have arrived."""
        async with asyncio.timeout(60), self.arrived:
            await self.arrived.wait_for(lambda: len(self.got) >= count)

    @classmethod
    @asynccontextmanager
    async def open(cls, tls: ssl.SSLContext | None = None) -> AsyncGenerator[Receiver]:
        receiver = cls()
        server = await asyncio.start_server(receiver._serve, "127.0.0.1", 0, ssl=tls)
        receiver.port = server.sockets[0].getsockname()[1]
        try:
            yield receiver
        finally:
            server.close()
            for writer in receiver._writers:
                writer.close()
            await server.wait_closed()


class Names:
    """A resolver whose answers change: each name's next answer, the last one for ever."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

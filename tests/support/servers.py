"""A server on a free port, with a token for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from interlock import Interlock
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.doors.server import Listening, Server, serving
from tests.sample import TOOLS
from tests.support.identities import did_of

LOOPBACK = Listening(port=0, ports={})


class Peer(NamedTuple):
    """One end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self) -> bytes:
        return await self.reader.read()


class Place:
    """A server on a free port, and a token for it."""

    def __init__(self, app: Interlock, server: Server, token: str, scheme: str = "http") -> None:
        self.app = app
        self.server = server
        self.bearer = {"authorization": f"Bearer {token}"}
        self._opened: list[asyncio.StreamWriter] = []
        self.base = f"{scheme}://localhost:{server.port}"

    async def raw(self, *parts: bytes) -> Peer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        self._opened.append(writer)
        for part in parts:
            writer.write(part)
            await writer.drain()
        return Peer(reader, writer)

    async def close(self) -> None:
        for writer in self._opened:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._opened), return_exceptions=True)


@asynccontextmanager
async def place(home: Path, listening: Listening = LOOPBACK, **settings: Any) -> AsyncGenerator[Place]:
    """Serve a data directory with the sample tools."""
    async with Interlock.open(home, housekeeping=False, **settings) as app:
        for one in TOOLS:
            app.catalog.attach(one)
        if not app.issuer_keys.all():
            app.issuer_keys.init("EdDSA")
            await app.identities.register(Identity(did=did_of("ann"), name="ann", kind="human"), by="test")
        token = await app.tokens.issue(subject=did_of("ann"), tools=[ToolGrant("*")], by=app.caller)
        async with serving(Service(app), listening) as server:
            made = Place(app, server, token, "https" if listening.secure else "http")
            yield made
            await made.close()


async def post(here: Place, path: str, body: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=here.base, headers=here.bearer, timeout=60) as client:
        return await client.post(path, content=body.encode(), headers={"content-type": "application/json"})

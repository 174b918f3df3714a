"""A host that a tool may reach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest_asyncio


@pytest_asyncio.fixture
async def upstream() -> AsyncGenerator[int]:
    """A host that the tool's manifest names, here on this machine."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()

"""Connections to MCP servers that pass on few bytes per turn, and count informational responses.

The library handles everything it has read before it reads again, and skips any number of `100 Continue`. It is
therefore given little at a time, and each informational response is charged to the conversation, which a flood of them
ends.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterable
from typing import Any, cast

import httpcore2

_PART = 4096
_INFORMATIONAL = re.compile(rb"HTTP/1\.[01] 1[0-9][0-9]")


class PacedNetwork(httpcore2.AsyncNetworkBackend):
    """Makes the connections of one conversation. `charge` raises when there were too many messages."""

    def __init__(self, charge: Callable[[int], None]) -> None:
        self._dial = cast("httpcore2.AsyncNetworkBackend", httpcore2.AnyIOBackend())
        self._charge = charge

    async def connect_tcp(self, *args: Any, **named: Any) -> httpcore2.AsyncNetworkStream:
        return _Paced(await self._dial.connect_tcp(*args, **named), self._charge)

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109 - the library's signature
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        raise NotImplementedError

    async def sleep(self, seconds: float) -> None:
        await self._dial.sleep(seconds)


class _Paced(httpcore2.AsyncNetworkStream):
    def __init__(self, inner: httpcore2.AsyncNetworkStream, charge: Callable[[int], None]) -> None:
        self._inner = inner
        self._charge = charge
        self._tail = b""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - the library's
        data = await self._inner.read(min(max_bytes, _PART), timeout)
        seen = self._tail + data
        self._tail = seen[-11:]  # one byte less than the searched text
        count = sum(1 for _ in _INFORMATIONAL.finditer(seen))
        if count:
            self._charge(count)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - the library's
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the library's signature
    ) -> httpcore2.AsyncNetworkStream:
        return _Paced(await self._inner.start_tls(ssl_context, server_hostname, timeout), self._charge)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)

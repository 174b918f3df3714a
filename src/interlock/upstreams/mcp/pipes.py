"""MCP over the pipes of a program that we run: a message is a line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import orjson

from interlock.core.schema import Json
from interlock.upstreams.children import Child, Program

if TYPE_CHECKING:
    from interlock.upstreams.mcp.session import Session

_log = logging.getLogger("interlock.upstreams.mcp")


class Pipes:
    """The pipes of a child."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.pid = child.pid

    @classmethod
    async def open(cls, program: Program, session: Session) -> Pipes:
        def hear(line: bytes) -> None:
            try:
                message = orjson.loads(line)
            except orjson.JSONDecodeError:
                _log.debug("an upstream wrote a line to its output that is not a message")
            else:
                session.hear(message)

        return cls(await Child.start(program, hear))

    @property
    def ended(self) -> asyncio.Future[str]:
        return self._child.ended

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        self._child.send(orjson.dumps(message))

    def abort(self) -> None:
        self._child.kill()

    async def close(self) -> None:
        await self._child.stop()

"""MCP over the pipes of a program that we run: a message is a line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from interlock.core.errors import Failure
from interlock.data.bounds import exactly
from interlock.data.canonical import encode
from interlock.data.schema import Json
from interlock.upstreams.children import Child, Program
from interlock.upstreams.response_limits import SMALL, Allowance, Intake, in_thread

if TYPE_CHECKING:
    from interlock.upstreams.mcp.session import Session

_log = logging.getLogger("interlock.upstreams.mcp")


class _Ear:
    """Reads the lines of a child as messages to a session."""

    def __init__(self, session: Session, intake: Intake, allowance: Allowance) -> None:
        self.intake = intake
        self.allowance = allowance
        self._session = session

    def hear(self, line: bytes) -> asyncio.Future[Any] | None:
        if len(line) > SMALL:
            return asyncio.ensure_future(self._hear_large(line))
        self._take(line, self._parse)
        return None

    async def _hear_large(self, line: bytes) -> None:
        try:
            message = await in_thread(self._parse, line)
        except (ValueError, Failure) as error:
            self._refuse(line, error)
        else:
            self._take(line, lambda _: message)

    def _parse(self, line: bytes) -> Any:
        self.intake.check(line)
        return exactly(line)

    def _take(self, line: bytes, parse: Callable[[bytes], Any]) -> None:
        try:
            message = parse(line)
        except (ValueError, Failure) as error:
            self._refuse(line, error)
            return
        if self._session.hear(message):
            self.allowance.give(1, len(line))

    def _refuse(self, line: bytes, error: Failure | ValueError) -> None:
        if isinstance(error, Failure):
            self._session.refuse(line, error)
        else:
            _log.debug("an upstream wrote a line to its output that is not a message")

    def oversize(self, ends: bytes) -> None:
        self._session.refuse(ends, self.intake.too_large())


class Pipes:
    """The pipes of a child."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.pid = child.pid

    @classmethod
    async def open(cls, program: Program, session: Session, intake: Intake, allowance: Allowance) -> Pipes:
        return cls(await Child.start(program, _Ear(session, intake, allowance)))

    @property
    def ended(self) -> asyncio.Future[str]:
        return self._child.ended

    def send(self, message: Json, headers: dict[str, str]) -> None:
        try:
            line = encode(message)
        except ValueError:
            raise Failure("E3302", "an argument is a text that is not Unicode", details={"sent": False}) from None
        self._child.send(line)

    def abort(self) -> None:
        self._child.kill()

    async def close(self) -> None:
        await self._child.stop()

"""The common parts of both eras of the protocol for its client: errors, and the interfaces of a conversation.

The names and constants of the protocol are in `call.mcp`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import field
from typing import Any, Literal, Protocol

from interlock._version import __version__
from interlock.call.mcp import MODERN
from interlock.core.record import dataclass
from interlock.data.schema import Json
from interlock.data.untrusted import members

ABOUT_US: Json = {"name": "interlock", "version": __version__}
UNSENT: Json = {"sent": False}
# How long a server has to list something, and for requests that belong to no call.
LIST_S = 30.0

Era = Literal["auto", "modern", "handshake"]
Progress = Callable[[Json], None]


class RpcError(Exception):
    """An error answer of the server, with the HTTP status if it came over HTTP."""

    def __init__(self, code: int, message: str, data: Any, status: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data
        self.native_ref = f"http:{status}" if status else None


class Wire(Protocol):
    """Carries messages. `ended` states why no more will come."""

    @property
    def ended(self) -> asyncio.Future[str]: ...

    def send(self, message: Json, headers: dict[str, str]) -> Awaitable[None] | None:
        """Send a message: at once, or when the result has been awaited. `headers` are the wire's own from then on.

        Raises, or awaiting raises, a Failure with details {"sent": False} if it certainly went nowhere.
        """
        ...

    def abort(self) -> None:
        """End now, without a handshake."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class ServerInfo:
    """The server's statements about itself when the version was negotiated."""

    protocol: str
    name: str = ""
    version: str = ""
    capabilities: Json = field(default_factory=dict[str, Any])
    instructions: str | None = None

    @property
    def modern(self) -> bool:
        return self.protocol in MODERN

    def offers(self, what: str) -> bool:
        return isinstance(self.capabilities.get(what), dict)

    def extends(self, extension: str) -> bool:
        return extension in members(self.capabilities.get("extensions"))

    def announces(self, what: str) -> bool:
        return self.offers(what) and self.capabilities[what].get("listChanged") is True

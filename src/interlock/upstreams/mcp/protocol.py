"""The common parts of both eras of the protocol: versions, names, limits, and the interfaces of a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import field
from typing import Any, Literal, Protocol, cast

from interlock._version import __version__
from interlock.call.connector import Interaction
from interlock.core.record import dataclass
from interlock.data.schema import Json

MODERN = ("2026-07-28",)
HANDSHAKE = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
ABOUT_US: Json = {"name": "interlock", "version": __version__}

INVALID_PARAMS = -32602
METHOD_NOT_FOUND = -32601
UNSUPPORTED_VERSION = -32022
META = "io.modelcontextprotocol/"
LOG_LEVEL = f"{META}logLevel"
LOG_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
INPUT_REQUIRED = "input_required"
# The extension with which a server answers a call with a task, and the type of such an answer.
TASKS = f"{META}tasks"
TASK = "task"
# What a client declares that shows the interfaces of MCP Apps.
APPS: Json = {f"{META}ui": {"mimeTypes": ["text/html;profile=mcp-app"]}}
LONGEST_TEXT = 16_384

# The questions that a server may ask a client during a call, and the capability that a client declares for each.
QUESTIONS = {"elicitation/create": "elicitation", "sampling/createMessage": "sampling", "roots/list": "roots"}

Era = Literal["auto", "modern", "handshake"]
Progress = Callable[[Json], None]
# Receives the log messages of a server during a call: level, data and, if there is one, logger.
OnLog = Callable[[Json], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening(Interaction):
    """A client that wants a server's log messages during its call, from this level on."""

    level: str
    on_log: OnLog


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
class Server:
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


UNSENT: Json = {"sent": False}


def strings(value: Any) -> list[str]:
    """Return the texts of a list; empty for anything else."""
    return [one for one in cast("list[Any]", value) if isinstance(one, str)] if isinstance(value, list) else []


def members(value: Any) -> Json:
    """Return the members of an object; empty for anything else."""
    return cast("Json", value) if isinstance(value, dict) else {}


def text_in(value: Any) -> str:
    """Return a text, cut first; empty for anything that is not a text."""
    return value[:LONGEST_TEXT] if isinstance(value, str) else ""

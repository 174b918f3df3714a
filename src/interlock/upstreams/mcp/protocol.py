"""What both eras of the protocol have in common: versions, names and limits, and what a conversation is made of."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

from interlock._version import __version__
from interlock.call.connector import Interaction
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
LONGEST_TEXT = 16_384

# What a server may ask a client in the middle of a call, and the ability a client declares for it.
QUESTIONS = {"elicitation/create": "elicitation", "sampling/createMessage": "sampling"}

Era = Literal["auto", "modern", "handshake"]
# Answers a question that a server puts to the client in the middle of a call: its method and parameters. A Failure
# declines.
Ask = Callable[[str, Json], Awaitable[Json]]
Progress = Callable[[Json], None]
# Is told what a server logs in the middle of a call: level, data and, where there is one, logger.
Tell = Callable[[Json], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening(Interaction):
    """A client that also wants to hear what a server logs during its call, from this level on."""

    level: str
    tell: Tell


class RpcError(Exception):
    """The server's own error answer."""

    def __init__(self, code: int, message: str, data: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class Wire(Protocol):
    """How messages travel. `ended` tells why no more will come."""

    @property
    def ended(self) -> asyncio.Future[str]: ...

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        """Hand a message over; raises Failure with details {"sent": False} when it certainly went nowhere."""
        ...

    def abort(self) -> None:
        """End now, without manners."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class Server:
    """What a server said of itself when the version was agreed on."""

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

    def announces(self, what: str) -> bool:
        return self.offers(what) and self.capabilities[what].get("listChanged") is True


UNSENT: Json = {"sent": False}


def strings(value: Any) -> list[str]:
    """The texts of a list; none of what is no list."""
    return [one for one in cast("list[Any]", value) if isinstance(one, str)] if isinstance(value, list) else []


def members(value: Any) -> Json:
    """The members of an object; none of what is no object."""
    return cast("Json", value) if isinstance(value, dict) else {}


def text_in(value: Any) -> str:
    """A text, cut before anything else looks at it; empty for what is no text, which is never made one."""
    return value[:LONGEST_TEXT] if isinstance(value, str) else ""

"""The vocabulary of the Model Context Protocol that its client and its server here share."""

from __future__ import annotations

from collections.abc import Callable

from interlock.call.connector import Interaction
from interlock.core.record import dataclass
from interlock.data.schema import Json

MODERN = ("2026-07-28",)
HANDSHAKE = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")

INVALID_PARAMS = -32602
METHOD_NOT_FOUND = -32601
MISSING_CAPABILITY = -32021
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

# The questions that a server may ask a client during a call, and the capability that a client declares for each.
QUESTIONS = {"elicitation/create": "elicitation", "sampling/createMessage": "sampling", "roots/list": "roots"}

# Receives the log messages of a server during a call: level, data and, if there is one, logger.
OnLog = Callable[[Json], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening(Interaction):
    """A client that wants a server's log messages during its call, from this level on."""

    level: str
    on_log: OnLog

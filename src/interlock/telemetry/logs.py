"""The log: standard logging, one line to an event, each with the trace and the call it belongs to where one is known.

A module logs as any Python module does and says what it knows with `extra={"trace_id": …, "invocation_id": …}`. What is
told was redacted by whoever knows the call; the formatter redacts once more, because libraries log too.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal, TextIO

import orjson

from interlock.core.clock import iso

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
Redact = Callable[[str], str]

# What a line says of its origin, besides time, level, logger and message.
_KNOWN = ("trace_id", "invocation_id", "signal", "severity")


class _Lines(logging.Formatter):
    """Redacted lines. A call's traces and ids are added where they are known."""

    def __init__(self, redact: Redact) -> None:
        super().__init__()
        self._redact = redact

    def _message(self, record: logging.LogRecord) -> str:
        return self._redact(record.getMessage())

    def _error(self, record: logging.LogRecord) -> str:
        if not record.exc_info or record.exc_info[1] is None:
            return ""
        return self._redact("".join(traceback.format_exception(record.exc_info[1])))

    def _known(self, record: logging.LogRecord) -> dict[str, str]:
        found = ((name, getattr(record, name, None)) for name in _KNOWN)
        return {name: str(value) for name, value in found if value}


class JsonLines(_Lines):
    """One JSON object to a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": iso(int(record.created * 1000)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._message(record),
            "trace_id": None,
            "invocation_id": None,
            **self._known(record),
        }
        error = self._error(record)
        if error:
            line["error"] = error
        return orjson.dumps(_encodable(line)).decode()


class TextLines(_Lines):
    """Lines for people."""

    def format(self, record: logging.LogRecord) -> str:
        known = "".join(f" {name}={value}" for name, value in self._known(record).items())
        head = f"{iso(int(record.created * 1000))} {record.levelname.lower():7} {record.name}: "
        error = self._error(record)
        return f"{head}{self._message(record)}{known}" + (f"\n{error.rstrip()}" if error else "")


def _encodable(line: dict[str, Any]) -> dict[str, Any]:
    """Text that is not valid Unicode is spelt out: a line must be written whatever is in it."""
    return {name: value and value.encode("utf-8", "backslashreplace").decode() for name, value in line.items()}


def configure(form: LogFormat, level: LogLevel, *, redact: Redact, stream: TextIO | None = None) -> Callable[[], None]:
    """Write all that is logged in this process, redacted, to a stream; stderr if none is given.

    `level` is for what Interlock itself has to say; libraries are heard when they warn. Returns the way to undo it.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(redact) if form == "json" else TextLines(redact))
    root, ours = logging.getLogger(), logging.getLogger("interlock")
    before, others = ours.level, list(root.handlers)
    root.handlers[:] = [handler]
    ours.setLevel(level.upper())

    def undo() -> None:
        root.handlers[:] = others
        ours.setLevel(before)

    return undo

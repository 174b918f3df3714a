"""Reads the server-sent events of an MCP server, each under the limits of its conversation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interlock.core.expressions import expression
from interlock.data.bounds import exactly
from interlock.upstreams.response_limits import PER_TURN, Allowance, Intake

# The field names and line ends around the data of an event.
_FRAMING = 4096
_END = expression(rb"(?>\r\n|\n|\r){2}")
_BOM = b"\xef\xbb\xbf"
_LONGEST_PAUSE_MS = 60_000


class Meter:
    """The limits of one conversation. `flood` ends it."""

    def __init__(self, intake: Intake, allowance: Allowance, flood: Callable[[], None]) -> None:
        self.intake = intake
        self.allowance = allowance
        self._flood = flood

    def charge(self, messages: int, size: int = 0) -> None:
        """Charge what arrived; ends the conversation and raises if it is a flood."""
        if not self.allowance.take(messages, size):
            self._flood()
            raise self.intake.flooded()


class Events:
    """One stream of events."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._held = bytearray()
        self._began = False
        self.charged = 0
        self.last_id = ""
        self.retry_ms: int | None = None

    def feed(self, piece: bytes) -> tuple[bytes, bool]:
        """Take a piece; returns the events that are whole now, and whether the piece has very many lines.

        Raises the failure of a stream that is over the limits.
        """
        lines = piece.count(b"\n") + piece.count(b"\r")
        self._meter.charge(1 + lines, len(piece))
        self.charged += 1 + lines + len(piece) // 4096
        held = self._held
        held += piece
        end = 0
        for match in _END.finditer(held, max(0, len(held) - len(piece) - 4)):
            end = match.end()
        if not end:
            if len(held) > self._meter.intake.max_bytes + _FRAMING:
                raise self._meter.intake.too_large()
            return b"", lines > PER_TURN
        whole = bytes(held[:end])
        del held[:end]
        return whole, lines > PER_TURN

    def rest(self) -> bytes:
        """Return an event that only the end of the stream has ended."""
        rest = bytes(self._held)
        self._held.clear()
        return rest + b"\n\n" if rest else b""

    def read(self, whole: bytes) -> list[Any]:
        """Parse whole events; a message that is not JSON is a ValueError in its place.

        Raises the failure of an event that is over the limits. An event without data only moves `last_id`.
        """
        self._meter.intake.check(whole)
        messages: list[Any] = []
        data: list[bytes] = []
        kind = b""
        if not self._began:
            self._began = True
            whole = whole.removeprefix(_BOM)
        for line in whole.splitlines():
            if line:
                name, _, value = line.partition(b":")
                value = value.removeprefix(b" ")
                if name == b"data":
                    data.append(value)
                elif name == b"event":
                    kind = value
                elif name == b"id" and b"\0" not in value:
                    self.last_id = value.decode("latin-1")
                elif name == b"retry" and value.isdigit():
                    self.retry_ms = min(int(value[:9]), _LONGEST_PAUSE_MS)
                continue
            if kind in (b"", b"message") and any(data):
                messages.append(_message(b"\n".join(data)))
            data, kind = [], b""
        return messages


def _message(text: bytes) -> Any:
    try:
        return exactly(text)
    except ValueError as error:
        return error

"""What happens to a call, told to whoever listens while it happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from interlock.core.clock import iso
from interlock.core.schema import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a call's life: its class (`tool.invocation.started`), which call, and the facts."""

    id: str
    type: str
    invocation_id: str
    tool: str
    at_ms: int
    data: Json

    def document(self) -> Json:
        return {
            "schema_version": "0.2.0",
            "event_id": self.id,
            "event_class": self.type,
            "occurred_at": iso(self.at_ms),
            "invocation_id": self.invocation_id,
            "tool_id": self.tool,
            "data": self.data,
        }


Listener = Callable[[Event], None]

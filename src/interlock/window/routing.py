"""The destinations of the output of a call: the next tool, the context of the model, memory, or nowhere.

Every output goes to the observation record, whatever else becomes of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any, Final, Literal

from interlock.core.record import dataclass
from interlock.data.canonical import canonical
from interlock.data.schema import Json

Destination = Literal["tool_input", "context", "memory", "discard", "observation"]
Layer = Literal["working", "session", "episodic"]
# For how long a record is remembered unless something else is said.
LIFETIMES_S: Final[dict[Layer, float]] = {"working": 600.0, "session": 86_400.0, "episodic": 30 * 86_400.0}


def destinations(*, successor: bool, reasoning: bool, memory: bool) -> tuple[Destination, ...]:
    """The destinations of an output. One that nobody needs is discarded; the observation record is always there."""
    nowhere = not (successor or reasoning or memory)
    chosen: list[tuple[Destination, bool]] = [
        ("tool_input", successor),
        ("context", reasoning),
        ("memory", memory),
        ("discard", nowhere),
    ]
    return (*(name for name, wanted in chosen if wanted), "observation")


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """Something to remember: what, from which call, in which layer, and until when."""

    content: Any
    tool: str
    invocation_id: str
    at_ms: int
    expires_ms: int
    layer: Layer

    @property
    def digest(self) -> str:
        """The same for the same content of the same tool."""
        return hashlib.sha256(canonical([self.tool, self.content])).hexdigest()

    def document(self) -> Json:
        return asdict(self)

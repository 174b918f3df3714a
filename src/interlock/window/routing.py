"""Where the output of a call goes: the next tool, the context of the model, memory, or nowhere.

Every output goes to the observation record, whatever else becomes of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final, Literal

from interlock.data.canonical import canonical

Destination = Literal["tool_input", "context", "memory", "observation"]
Layer = Literal["working", "session", "episodic"]
# For how long a record is remembered unless something else is said.
LIFETIMES_S: Final[dict[Layer, float]] = {"working": 600.0, "session": 86_400.0, "episodic": 30 * 86_400.0}
MOST_RECORDS: Final = 10_000


def destinations(*, successor: bool, reasoning: bool, memory: bool) -> tuple[Destination, ...]:
    """The destinations of an output. The observation record alone means that the output itself is discarded."""
    chosen: list[tuple[Destination, bool]] = [("tool_input", successor), ("context", reasoning), ("memory", memory)]
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


class Memory:
    """What a session remembers, in this process. The oldest records make room for new ones."""

    def __init__(self) -> None:
        self._records: dict[tuple[Layer, str], MemoryRecord] = {}

    def write(self, record: MemoryRecord) -> bool:
        """Remember something; False if the same is remembered in this layer already and has not expired."""
        key = record.layer, record.digest
        known = self._records.get(key)
        if known is not None and known.expires_ms > record.at_ms:
            return False
        self._records.pop(key, None)
        self._records[key] = record
        while len(self._records) > MOST_RECORDS:
            del self._records[next(iter(self._records))]
        return True

    def recall(self, now_ms: int, layer: Layer | None = None) -> list[MemoryRecord]:
        """What is remembered and has not expired, oldest first."""
        self._records = {key: one for key, one in self._records.items() if one.expires_ms > now_ms}
        return [one for one in self._records.values() if layer in (None, one.layer)]

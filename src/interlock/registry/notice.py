"""The notice that callers of a deprecated version get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from interlock.core.clock import iso

Json = dict[str, Any]


@dataclass(frozen=True)
class Notice:
    """The notice for callers of a deprecated version."""

    deprecated_ms: int
    removal_ms: int
    successor: str | None
    migration_guide: str | None

    def document(self) -> Json:
        return {
            "deprecatedAt": iso(self.deprecated_ms),
            "removalDate": iso(self.removal_ms),
            "successor": self.successor,
            "migrationGuide": self.migration_guide,
        }

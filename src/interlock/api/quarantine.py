"""Versions in quarantine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.call.context import Caller
from interlock.registry import quarantine

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.data.schema import Json


async def lift_quarantine(parts: Parts, tool: str, *, reason: str, by: Caller) -> None:
    """Release a version from quarantine, as a person who has looked at it. On record with the reason."""
    await parts.journal.commit(quarantine.lift(tool, by=by, reason=reason))
    await parts.quarantine.look()


async def quarantine_entries(parts: Parts) -> list[Json]:
    """The versions that are or were in quarantine, each with the reason."""
    return [one.document() for one in await parts.quarantine.all()]

"""The ways in which this host can isolate tools, for display only."""

from __future__ import annotations

from collections.abc import Sequence

from interlock.executors.sandbox.ladder import Rung
from interlock.executors.sandbox.supervisor import Sandbox


async def rungs() -> Sequence[Rung]:
    """Try every way of isolating, and return whether it works here, and if not, why."""
    async with await Sandbox.open(spares=0) as sandbox:
        return await sandbox.describe()

"""What this host offers to isolate tools with: for people who ask, and for nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from interlock.executors.sandbox.ladder import Rung
from interlock.executors.sandbox.supervisor import Sandbox


async def rungs() -> Sequence[Rung]:
    """Every way of isolating, tried by isolating: whether it holds here, and if not, why."""
    async with await Sandbox.open(spares=0) as sandbox:
        return await sandbox.describe()

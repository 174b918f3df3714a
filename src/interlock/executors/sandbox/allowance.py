"""Limits on what an agent's running calls use together. The sum of their limits never exceeds it.

Calls of this process are counted in memory, where waiting ones are woken when there is room. With a file that the
processes of a home share, they are counted there too: see `shares`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import field
from pathlib import Path
from typing import Literal

from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.executors.sandbox.job import GIB, Limits
from interlock.executors.sandbox.shares import Share, Shares

Excess = Literal["wait", "refuse"]
# How often a call that waits for one of another process checks whether that has ended.
LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Allowance:
    """Processor cores and memory of one agent."""

    cores: float = 4.0
    memory_bytes: int = 8 * GIB


@dataclass(slots=True)
class _Use:
    cores: float = 0.0
    memory_bytes: int = 0
    waiting: deque[tuple[Limits, asyncio.Future[None]]] = field(
        default_factory=deque[tuple[Limits, "asyncio.Future[None]"]]
    )
    # One call at a time searches for room among those of other processes, in the order in which they came.
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)


class Allowances:
    """Current use. Waiting calls are served in order, so that a large call is not starved by small ones."""

    def __init__(self, each: Allowance, shared: Path | None = None) -> None:
        self._each = each
        self._shares = None if shared is None else Shares(shared, cores=each.cores, memory_bytes=each.memory_bytes)
        self._uses: dict[str, _Use] = {}

    @asynccontextmanager
    async def taken(self, agent: str, limits: Limits, excess: Excess) -> AsyncGenerator[None]:
        """Hold a part of the agent's allowance. A call that does not fit now waits or is refused."""
        if limits.cpu_cores > self._each.cores or limits.memory_bytes > self._each.memory_bytes:
            raise Failure("E3407", "the call asks for more than its agent's whole allowance")
        use = self._uses.setdefault(agent, _Use())
        if use.waiting or not self._fits(use, limits):
            if excess == "refuse":
                raise _used_up()
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            use.waiting.append((limits, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._return(agent, use, limits)
                raise
        else:
            self._add(use, limits)
        try:
            if self._shares is None:
                yield
                return
            share = self._shares.ask(agent, limits)
            try:
                await _take(share, use.looking, excess)
                yield
            finally:
                share.close()
        finally:
            self._return(agent, use, limits)

    def _fits(self, use: _Use, limits: Limits) -> bool:
        return (
            use.cores + limits.cpu_cores <= self._each.cores
            and use.memory_bytes + limits.memory_bytes <= self._each.memory_bytes
        )

    def _add(self, use: _Use, limits: Limits) -> None:
        use.cores += limits.cpu_cores
        use.memory_bytes += limits.memory_bytes

    def _return(self, agent: str, use: _Use, limits: Limits) -> None:
        use.cores -= limits.cpu_cores
        use.memory_bytes -= limits.memory_bytes
        while use.waiting and (use.waiting[0][1].done() or self._fits(use, use.waiting[0][0])):
            waiting, turn = use.waiting.popleft()
            if not turn.done():
                self._add(use, waiting)
                turn.set_result(None)
        if not use.waiting and use.memory_bytes == 0:
            self._uses.pop(agent, None)


async def _take(share: Share, looking: asyncio.Lock, excess: Excess) -> None:
    """Take a share beside the calls of other processes."""
    if excess == "refuse" and (looking.locked() or not share.taken()):
        raise _used_up()
    if excess == "wait":
        async with looking:
            while True:
                if share.taken():
                    return
                await asyncio.sleep(LOOK_S)


def _used_up() -> Failure:
    return Failure("E3407", "the agent's running calls use its whole allowance; wait for one to end")

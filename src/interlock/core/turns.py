"""Order of the members of a batch: what may overlap runs beside others, everything else runs alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from interlock.core.errors import Failure

T = TypeVar("T")


class Turn:
    """The moment at which a member that has begun says whether it may overlap others, and waits until it may go on."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._overlaps: asyncio.Future[bool] = loop.create_future()
        self._given: asyncio.Future[Failure | None] = loop.create_future()

    async def take(self, *, overlaps: bool) -> None:
        """Wait, as the member, until it may go on. Raises the failure with which it is refused."""
        self._overlaps.set_result(overlaps)
        refusal = await self._given
        if refusal is not None:
            raise refusal

    async def asked(self, member: asyncio.Task[Any]) -> bool:
        """Wait until the member asks for its turn; returns whether it may overlap others. One that ended may."""
        await asyncio.wait({self._overlaps, member}, return_when=asyncio.FIRST_COMPLETED)
        return not self._overlaps.done() or self._overlaps.result()

    def give(self, refusal: Failure | None) -> None:
        """Let the member go on, or refuse it. One that was cancelled while it waited is past both."""
        if not self._given.done():
            self._given.set_result(refusal)


class Turns:
    """Runs work in the order in which it comes. Work that may not overlap waits for all that runs, and all wait for it.

    The one who starts a member that runs alone calls `clear` before, and `order` after the start of every member.
    """

    def __init__(self) -> None:
        self.active: set[asyncio.Task[Any]] = set()
        self.overlapped: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a member."""
        task = asyncio.get_running_loop().create_task(work)
        self.active.add(task)
        task.add_done_callback(self.active.discard)
        return task

    async def order(
        self, task: asyncio.Task[Any], overlaps: bool | Turn, refusal: Callable[[], Failure | None] = lambda: None
    ) -> None:
        """Wait until the next member may be started. One with a turn goes on in its turn, unless it is refused then."""
        if isinstance(overlaps, Turn):
            turn = overlaps
            try:
                overlaps = await turn.asked(task)
                if not overlaps:
                    await self.clear(but=task)
            finally:
                turn.give(refusal())
        if len(self.active) > 1:
            self.overlapped |= self.active
        if not overlaps:
            await self.clear()

    async def clear(self, but: asyncio.Task[Any] | None = None) -> None:
        """Wait until nothing runs, or nothing but one member."""
        while others := self.active - {but}:
            await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)

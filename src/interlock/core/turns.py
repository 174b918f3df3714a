"""Order of the members of a batch: what may overlap runs beside others, everything else runs alone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Turns:
    """Runs work in the order in which it comes. Work that may not overlap waits for all that runs, and all wait for it.

    The one who starts work that runs alone calls `clear` before and after.
    """

    def __init__(self) -> None:
        self.active: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a member."""
        task = asyncio.get_running_loop().create_task(work)
        self.active.add(task)
        task.add_done_callback(self.active.discard)
        return task

    async def clear(self) -> None:
        """Wait until nothing runs."""
        while self.active:
            await asyncio.wait(self.active, return_when=asyncio.FIRST_COMPLETED)

"""Work that may run where there is no event loop, such as commands that read a data directory at rest.

Loading asyncio takes a tenth of the time of such a command. What runs without a loop runs alone: no task waits for its
turn, and nobody else holds a lock.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread; None if there is none."""
    events = sys.modules.get("asyncio.events")
    return None if events is None else events._get_running_loop()


async def give_way() -> None:
    """Give other tasks their turn, where there can be any."""
    if running_loop() is not None:
        import asyncio

        await asyncio.sleep(0)


class Exclusive:
    """A lock for tasks, for `async with`. Where no event loop runs, nobody waits for it and it does nothing."""

    def __init__(self) -> None:
        self._lock: asyncio.Lock | None = None

    async def __aenter__(self) -> None:
        if running_loop() is None:
            return
        if self._lock is None:
            import asyncio

            self._lock = asyncio.Lock()
        await self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        if running_loop() is not None and self._lock is not None:
            self._lock.release()

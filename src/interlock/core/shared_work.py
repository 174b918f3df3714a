"""Work that several callers need at the same time is done once.

A thousand requests that arrive together with one token need its verification once. A store that is a file answers the
first of them before the second is looked at. A database server takes a moment, in which all of them would ask.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class SharedWork(Generic[T]):
    """Work under way, by key. All who ask for the same key meanwhile get the same outcome, also a failure.

    The key names everything that the outcome depends on. Work is done to its end if those who asked for it go.
    """

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Task[T]] = {}

    async def do(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the outcome of the work that runs under this key; begin it if none does."""
        import asyncio  # commands that read at once do without it

        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.ensure_future(work())

            def done(ended: asyncio.Task[T]) -> None:
                del self._running[key]
                if not ended.cancelled():
                    ended.exception()  # retrieved, so that asyncio logs no warning if nobody waits any more

            task.add_done_callback(done)
        return await asyncio.shield(task)

"""Resources of upstreams that clients watch: one subscription at the upstream for all of them.

A watch is a task that stays subscribed. When the upstream goes away it subscribes again, for as long as a client
watches, and then tells its clients to look: what changed meanwhile was not heard. A change is told by its address
alone; a client that wants to know more reads the resource, and its rights are checked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from interlock.api.offers import Offers, Source
from interlock.api.service import Service
from interlock.call.context import Caller
from interlock.core.errors import Failure

AGREE_S = 30.0
PAUSE_S = (1.0, 60.0)


class Watching:
    """The subscribed resources. `tell` gets the address of a resource that changed."""

    def __init__(self, service: Service, offers: Offers, tell: Callable[[str], Awaitable[None]]) -> None:
        self._service = service
        self._offers = offers
        self._tell = tell
        self._watches: dict[str, _Watch] = {}

    async def watch(self, uri: str, caller: Caller) -> Callable[[], None]:
        """Watch a resource until what comes back is called. E3702 for one that the caller may not have."""
        return await self._offers.of_resource(uri, caller, "resource.watch", self._begin)

    async def _begin(self, source: Source, own: str) -> Callable[[], None]:
        uri = source.uri(own)
        watch = self._watches.get(uri)
        if watch is None:
            watch = self._watches[uri] = _Watch(self._service, self._offers, source.name, own, lambda: self._tell(uri))
        watch.watchers += 1
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                watch.watchers -= 1
                if not watch.watchers:
                    watch.end()
                    if self._watches.get(uri) is watch:
                        del self._watches[uri]

        try:
            async with asyncio.timeout(AGREE_S):
                await asyncio.shield(watch.agreed)
        except TimeoutError:
            leave()
            raise Failure("E3503", f"`{source.name}` did not agree in time to tell of changes") from None
        except BaseException:
            leave()
            raise
        return leave

    def close(self) -> None:
        """Watch nothing any more."""
        for watch in self._watches.values():
            watch.end()
        self._watches.clear()


class _Watch:
    """One resource of one upstream. `agreed` is done once the upstream said, for the first time, that it will tell."""

    def __init__(
        self, service: Service, offers: Offers, upstream: str, own: str, tell: Callable[[], Awaitable[None]]
    ) -> None:
        self.watchers = 0
        self.agreed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Whether anybody waits for it or not, its failure is taken note of.
        self.agreed.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._offers = offers
        self._upstream = upstream
        self._own = own
        self._news = asyncio.Event()
        keep = service.app.supervisor.keep
        self._tasks = [
            keep(f"watching of a resource of {upstream}", self._stay),
            keep(f"telling of changed resources of {upstream}", lambda: self._pass_on(tell)),
        ]

    def end(self) -> None:
        self.agreed.cancel()
        for task in self._tasks:
            task.cancel()

    def _heard(self) -> None:
        if self.agreed.done():
            self._news.set()
        else:
            self.agreed.set_result(None)

    async def _pass_on(self, tell: Callable[[], Awaitable[None]]) -> None:
        """Report changes one by one; those that happen meanwhile are reported as one."""
        while True:
            await self._news.wait()
            self._news.clear()
            await tell()

    async def _stay(self) -> None:
        shortest, longest = PAUSE_S
        pause = shortest
        while True:
            try:
                await self._offers.content_of(self._upstream).watch(self._own, self._heard)
                pause = shortest
            except Failure as failure:
                if not self.agreed.done():
                    self.agreed.set_exception(failure)
                    return
            await asyncio.sleep(pause)
            pause = min(longest, pause * 2)

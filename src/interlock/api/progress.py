"""Events of calls for their followers, kept so that a follower can reconnect and get what it missed.

A trail begins when a call that runs is first followed, and holds the latest events, numbered. It outlives its last
follower by a moment, in which whoever lost the connection comes back and goes on behind the last event it has. Nothing
is heard, and so nothing costs anything, of calls that nobody follows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import islice
from typing import Protocol

from interlock.call.events import Event, Listener
from interlock.call.results import Result
from interlock.data.schema import Json

# How many events of a call are kept; how long after its last follower has gone; of how many such calls.
EVENTS = 1000
MOMENT_S = 60.0
LEFT = 250


class Listen(Protocol):
    """Subscribes to the events of one call; returns the function that ends the subscription."""

    def __call__(self, listener: Listener, *, call: str) -> Callable[[], None]: ...


class Trail:
    """The latest events of one call."""

    def __init__(self, call_id: str, count: int, listen: Listen) -> None:
        # The number of the latest event, and of the last that was not heard.
        self.count = self.began = count
        self.followers = 0
        self.until: asyncio.TimerHandle | None = None
        self._events: deque[Json] = deque(maxlen=EVENTS)
        self._news = asyncio.Event()
        self._deaf: Callable[[], None] | None = listen(self._hear, call=call_id)

    def _hear(self, event: Event) -> None:
        self._events.append(event.document())
        self.count += 1
        self._news.set()
        self._news = asyncio.Event()

    def behind(self, number: int) -> tuple[int, list[Json]]:
        """The number before the first event that is kept behind another, and all that are."""
        gone = self.count - len(self._events)
        before = max(number, gone)
        return before, list(islice(self._events, before - gone, None))

    async def news(self, task: asyncio.Task[Result]) -> None:
        """Wait for an event, or the end of the task that makes them."""
        heard = asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait({heard, task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            heard.cancel()

    def end(self) -> None:
        """Hear no more; what was heard is kept."""
        if self._deaf is not None:
            self._deaf()
            self._deaf = None


class Trails:
    """The trails of calls that are followed, or were a moment ago."""

    def __init__(self, listen: Listen) -> None:
        self._listen = listen
        self._trails: dict[str, Trail] = {}
        # Of calls that run and were ever followed: the latest number when a trail was let go of.
        self._numbers: dict[str, int] = {}

    @contextmanager
    def followed(self, call_id: str, task: asyncio.Task[Result] | None) -> Generator[tuple[Trail | None, bool]]:
        """The trail of a call, which is kept meanwhile and a moment longer, and whether nothing was kept before.

        Where none is kept it begins now, if the call has a task that runs.
        """
        trail = self._trails.get(call_id)
        anew = trail is None
        if trail is None and task is not None:
            trail = self._trails[call_id] = self._begin(call_id, task)
        if trail is None:
            yield None, anew
            return
        trail.followers += 1
        if trail.until is not None:
            trail.until.cancel()
        try:
            yield trail, anew
        finally:
            trail.followers -= 1
            if not trail.followers:
                self._leave(call_id, trail)

    def _begin(self, call_id: str, task: asyncio.Task[Result]) -> Trail:
        # INVARIANT: a number is given once in a call. Between two trails one is left out, for all that nobody heard.
        if call_id not in self._numbers:
            self._numbers[call_id] = -1
            task.add_done_callback(lambda _: self._end(call_id))
        return Trail(call_id, self._numbers[call_id] + 1, self._listen)

    def _end(self, call_id: str) -> None:
        self._numbers.pop(call_id, None)
        if call_id in self._trails:
            self._trails[call_id].end()

    def _leave(self, call_id: str, trail: Trail) -> None:
        trail.until = asyncio.get_running_loop().call_later(MOMENT_S, self._forget, call_id)
        left = [name for name, one in self._trails.items() if not one.followers]
        if len(left) > LEFT:
            self._forget(left[0])

    def _forget(self, call_id: str) -> None:
        trail = self._trails.pop(call_id, None)
        if trail is not None:
            trail.end()
            if call_id in self._numbers:
                self._numbers[call_id] = trail.count
            if trail.until is not None:
                trail.until.cancel()

    def close(self) -> None:
        for call_id in list(self._trails):
            self._forget(call_id)

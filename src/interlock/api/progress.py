"""Events of calls for their followers, kept so that a follower can reconnect and get what it missed.

A history begins when a running call is first followed, and holds the latest events, numbered. It is kept for a while
after its last follower has gone, so that a client that lost its connection can continue after the last event that it
has. Calls that nobody follows cost nothing.
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


class EventHistory:
    """The latest events of one call."""

    def __init__(self, call_id: str, count: int, listen: Listen) -> None:
        # The number of the latest event, and of the last one before this history.
        self.count = self.began = count
        self.followers = 0
        self.until: asyncio.TimerHandle | None = None
        self._events: deque[Json] = deque(maxlen=EVENTS)
        self._changed = asyncio.Event()
        self._unsubscribe: Callable[[], None] | None = listen(self._on_event, call=call_id)

    def _on_event(self, event: Event) -> None:
        self._events.append(event.document())
        self.count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def behind(self, number: int) -> tuple[int, list[Json]]:
        """The number before the first event that is kept behind another, and all that are."""
        gone = self.count - len(self._events)
        before = max(number, gone)
        return before, list(islice(self._events, before - gone, None))

    async def changed(self, task: asyncio.Task[Result]) -> None:
        """Wait for an event, or the end of the task that makes them."""
        waiting = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    def end(self) -> None:
        """End the subscription. The events so far are kept."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None


class EventHistories:
    """The histories of calls that are followed, or were a moment ago."""

    def __init__(self, listen: Listen) -> None:
        self._listen = listen
        self._histories: dict[str, EventHistory] = {}
        # The latest number of running calls whose histories were removed.
        self._numbers: dict[str, int] = {}

    @contextmanager
    def followed(self, call_id: str, task: asyncio.Task[Result] | None) -> Generator[tuple[EventHistory | None, bool]]:
        """The history of a call, which is kept meanwhile and a moment longer, and whether nothing was kept before.

        Where none is kept it begins now, if the call has a task that runs.
        """
        history = self._histories.get(call_id)
        anew = history is None
        if history is None and task is not None:
            history = self._histories[call_id] = self._begin(call_id, task)
        if history is None:
            yield None, anew
            return
        history.followers += 1
        if history.until is not None:
            history.until.cancel()
        try:
            yield history, anew
        finally:
            history.followers -= 1
            if not history.followers:
                self._leave(call_id, history)

    def _begin(self, call_id: str, task: asyncio.Task[Result]) -> EventHistory:
        # INVARIANT: a number is given once in a call. Between two histories one is left out, for all events in between.
        if call_id not in self._numbers:
            self._numbers[call_id] = -1
            task.add_done_callback(lambda _: self._end(call_id))
        return EventHistory(call_id, self._numbers[call_id] + 1, self._listen)

    def _end(self, call_id: str) -> None:
        self._numbers.pop(call_id, None)
        if call_id in self._histories:
            self._histories[call_id].end()

    def _leave(self, call_id: str, history: EventHistory) -> None:
        history.until = asyncio.get_running_loop().call_later(MOMENT_S, self._forget, call_id)
        left = [name for name, one in self._histories.items() if not one.followers]
        if len(left) > LEFT:
            self._forget(left[0])

    def _forget(self, call_id: str) -> None:
        history = self._histories.pop(call_id, None)
        if history is not None:
            history.end()
            if call_id in self._numbers:
                self._numbers[call_id] = history.count
            if history.until is not None:
                history.until.cancel()

    def close(self) -> None:
        for call_id in list(self._histories):
            self._forget(call_id)

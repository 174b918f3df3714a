"""All events of this server as one stream, for operators: of tools, of their surface, of every call, and alerts.

A reader that is too slow misses events, and is told how many. While somebody reads, every call goes through all phases:
the fast path of plain reads tells nobody what it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from interlock.api.audit import Audit
from interlock.call.context import Caller
from interlock.call.events import KINDS, Event
from interlock.core.errors import Failure
from interlock.data.schema import Json

if TYPE_CHECKING:
    from interlock.api.parts import Parts

MOST_WAITING = 1000
# Events that carry a part of a result to the call's own caller.
_PARTS = frozenset(("tool.invocation.partial_result", "tool.invocation.yielded"))
MOST_READERS = 16


class Events:
    """The stream of events. Reading it is reading the journal as it is written: it takes the same right."""

    def __init__(self, parts: Parts, audit: Audit) -> None:
        self._parts = parts
        self._audit = audit
        self._readers: set[_Reader] = set()

    async def follow(self, *, by: Caller, door: str) -> AsyncGenerator[tuple[int | None, Json]]:
        """Events from now on, numbered. Needs `audit:read` in the tenant `local`; that they are read is on record."""
        if len(self._readers) >= MOST_READERS:
            raise Failure("E3001", f"{MOST_READERS} readers of events are connected already", retry_after_ms=10_000)
        await self._audit.note("events", {}, by=by, door=door, everything=True)
        return self._stream()

    async def _stream(self) -> AsyncGenerator[tuple[int | None, Json]]:
        reader = _Reader()
        deaf = self._parts.listen(reader.hear)
        self._readers.add(reader)
        try:
            yield None, {"event_class": "tool.events.began", "classes": sorted({one.group for one in KINDS.values()})}
            number = 0
            while (document := await reader.waiting.get()) is not None:
                if reader.missed:
                    yield None, {"event_class": "tool.events.missed", "missed": reader.missed}
                    reader.missed = 0
                number += 1
                yield number, document
        finally:
            deaf()
            self._readers.discard(reader)

    def close(self) -> None:
        """End all streams."""
        for reader in self._readers:
            reader.end()


class _Reader:
    def __init__(self) -> None:
        self.waiting: asyncio.Queue[Json | None] = asyncio.Queue(MOST_WAITING + 1)
        self.missed = 0

    def hear(self, event: Event) -> None:
        if self.waiting.qsize() >= MOST_WAITING:
            self.missed += 1
            return
        document = event.document()
        # INVARIANT: results are their callers'. Who reads events learns that there are some, as from the journal.
        if event.type in _PARTS:
            document["data"] = {name: value for name, value in event.data.items() if name != "value"}
        if (known := KINDS.get(event.type)) is not None:
            document["group"] = known.group
        self.waiting.put_nowait(document)

    def end(self) -> None:
        if not self.waiting.full():
            self.waiting.put_nowait(None)

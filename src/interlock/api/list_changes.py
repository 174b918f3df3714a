"""Notice of changes to what callers can list: tools, and which of them can be called."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from interlock.store import epochs, secrets, surfaces

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.store.port import Reader

_FAMILIES = ("registry", "upstreams", "secrets", "config", "surfaces")

Announce = Callable[[], Awaitable[None]]


async def watch_lists(parts: Parts, changed: Announce, surfaces_changed: Announce) -> None:
    """Call `changed` after each change to everybody's lists, and `surfaces_changed` after loads, until cancelled.

    Lists change by what any process does to the registry, by upstreams that come and go, and by credentials and rules,
    without which a tool cannot be called; also by a credential that expires. What is loaded with a token changes the
    list of its clients alone.
    """
    news = asyncio.Event()
    stored: epochs.Epochs | None = None
    expiries: Sequence[int] = ()

    def load(reader: Reader) -> tuple[epochs.Epochs, Sequence[int]]:
        return epochs.read(reader), secrets.expiries(reader)

    def note(now: tuple[epochs.Epochs, Sequence[int]]) -> None:
        nonlocal stored, expiries
        stored, expiries = now
        news.set()

    def expired() -> int:
        now_ms = parts.clock.now_ms()
        return sum(at_ms <= now_ms for at_ms in expiries)

    def state() -> tuple[object, ...]:
        own = () if stored is None else (stored.registry, stored.secrets, expired())
        return *own, parts.upstream_states.unanswered(), parts.policy.state(anew=True)

    changes = parts.journal.changes
    end = changes.watch(_FAMILIES, load, note, also=lambda: (parts.policy.files(), expired()))
    try:
        changes.start()
        await changes.caught_up()
        seen, loads = state(), None
        while True:
            await news.wait()
            news.clear()
            now = state()
            if now != seen:
                await changed()
            seen = now
            if stored is not None and stored.surfaces != loads:
                loads = stored.surfaces
                await surfaces_changed()
    finally:
        end()


async def loaded_names(parts: Parts, holders: Sequence[str]) -> dict[str, frozenset[str]]:
    """The names of the tools that each of some holders of surfaces has loaded."""
    return await parts.journal.read(partial(surfaces.names, holders=holders))

"""Notice of changes to what callers can list: tools, and which of them can be called."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from interlock.store import epochs

if TYPE_CHECKING:
    from interlock.api.parts import Parts

_FAMILIES = ("registry", "upstreams", "secrets", "config")


async def watch_lists(parts: Parts, changed: Callable[[], Awaitable[None]]) -> None:
    """Call `changed` after each change to lists, until cancelled.

    Such are changes of any process to the registry, upstreams that come and go, and credentials and rules, without
    which a tool of a surface cannot be called.
    """
    news = asyncio.Event()
    stored: epochs.Epochs | None = None

    def note(now: epochs.Epochs) -> None:
        nonlocal stored
        stored = now
        news.set()

    def state() -> tuple[object, ...]:
        own = () if stored is None else (stored.registry, stored.secrets)
        return *own, parts.upstreams.connections.unanswered(), parts.policy.state(anew=True)

    changes = parts.journal.changes
    end = changes.watch(_FAMILIES, epochs.read, note, also=parts.policy.files)
    try:
        changes.start()
        await changes.caught_up()
        seen = state()
        while True:
            await news.wait()
            news.clear()
            now = state()
            if now != seen:
                await changed()
            seen = now
    finally:
        end()

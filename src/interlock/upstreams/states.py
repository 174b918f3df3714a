"""Whether upstreams answer, by what is stored: every process follows it, also one that has no connection to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from interlock.upstreams import repository

if TYPE_CHECKING:
    from interlock.core.clock import Clock
    from interlock.store.port import Store
    from interlock.upstreams.repository import Upstream


class UpstreamStates:
    """The upstreams of a data directory with their states, as they were last read."""

    def __init__(self, journal: Store, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, Upstream] = {}
        self._on_change: Callable[[Sequence[Upstream]], None] | None = None
        self._changes = journal.changes
        self._changes.watch(("upstreams",), repository.upstreams, self._follow)

    def listen(self, on_change: Callable[[Sequence[Upstream]], None]) -> None:
        """Hear of all upstreams after one of them has changed."""
        self._on_change = on_change

    def known(self, name: str) -> Upstream | None:
        """Return an upstream as it was last read."""
        return self._known.get(name)

    def now(self, name: str) -> Upstream | None:
        """Return an upstream as it is stored now."""
        self._refresh()
        return self._known.get(name)

    def answers(self, name: str) -> bool:
        """Whether an upstream answered its last request."""
        known = self.now(name)
        return known is not None and known.state == "available"

    def unanswered(self) -> frozenset[str]:
        """The upstreams that did not answer their last request, of this process or another."""
        self._refresh()
        return frozenset(name for name, known in self._known.items() if known.state != "available")

    def _refresh(self) -> None:
        if self._clock.monotonic() >= self._changes.fresh_until:
            self._changes.catch_up()

    def _follow(self, upstreams: Sequence[Upstream]) -> None:
        self._known = {one.name: one for one in upstreams}
        if self._on_change is not None:
            self._on_change(upstreams)

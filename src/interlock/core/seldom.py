"""A rate limit for messages: the same message is issued once per period, however often its cause recurs."""

from __future__ import annotations

from collections.abc import Callable, Hashable

# More keys than this at once means that the keys are too specific; the oldest are dropped.
MOST = 1000


class Seldom:
    """Allows each key once per period and counts how often it was held back meanwhile."""

    def __init__(self, period_s: float, monotonic: Callable[[], float]) -> None:
        self._period_s = period_s
        self._monotonic = monotonic
        self._allowed: dict[Hashable, tuple[float, int]] = {}

    def due(self, key: Hashable) -> int | None:
        """Return how often the key was held back since it was last allowed, or None if it is held back now."""
        now = self._monotonic()
        last, held_back = self._allowed.get(key, (float("-inf"), 0))
        if now - last < self._period_s:
            self._allowed[key] = last, held_back + 1
            return None
        self._allowed.pop(key, None)
        while len(self._allowed) >= MOST:
            del self._allowed[next(iter(self._allowed))]
        self._allowed[key] = now, 0
        return held_back

"""Requests whose sender could not be told: each is counted, and now and then they are told of together.

They leave no record: a journal that strangers can write to is one that they can fill. So that somebody who tries tokens
is seen all the same, `IDENTITY_REFUSED` is fired at the first of them, and then as often as a log can bear. Who came
without any token, as every browser does, is only counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from interlock.core.errors import Failure
from interlock.telemetry.setup import Telemetry

TELL_EVERY_S = 10.0


class Refusals:
    """The requests that were turned away at the doors of one process."""

    def __init__(self, telemetry: Telemetry, monotonic: Callable[[], float]) -> None:
        self._telemetry = telemetry
        self._monotonic = monotonic
        self._untold: Counter[str] = Counter()
        self._due = float("-inf")

    def note(self, failure: Failure) -> None:
        """Count one, and tell of those that nobody has been told of, unless that was done a moment ago."""
        self._telemetry.metrics.signals["IDENTITY_REFUSED"] += 1
        if failure.code == "E3212":
            return
        self._untold[failure.code] += 1
        now = self._monotonic()
        if now < self._due:
            return
        self._due = now + TELL_EVERY_S
        counted, self._untold = self._untold, Counter()
        said = ", ".join(f"{count} × {code}" for code, count in sorted(counted.items()))
        self._telemetry.alerts.fire("IDENTITY_REFUSED", facts={"reason": said, "refused": dict(counted)})

"""Counts requests with failed authentication, and raises rate-limited alerts about them.

They are not journalled, because strangers could then fill the journal. So that attempts to guess tokens are noticed,
`IDENTITY_REFUSED` is fired at the first of them, and then once for all that came within the next ten seconds. Requests
without any token, which every browser sends, are only counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from interlock.core.errors import Failure
from interlock.telemetry.setup import Telemetry

# What is wrong with the sender, and not with us: an issuer that cannot be reached is nobody's attempt.
IDENTITY = frozenset(("E3201", "E3202", "E3203", "E3207", "E3212"))
TELL_EVERY_S = 10.0


class Refusals:
    """The requests that the endpoints of one process refused."""

    def __init__(self, telemetry: Telemetry, tell_every_s: float = TELL_EVERY_S) -> None:
        self._telemetry = telemetry
        self._tell_every_s = tell_every_s
        self._untold: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def note(self, failure: Failure) -> None:
        """Count one, and tell of it: at once, or with the others that come within the next seconds."""
        if failure.code not in IDENTITY:
            return
        self._telemetry.metrics.signals["IDENTITY_REFUSED"] += 1
        if failure.code == "E3212":
            return
        self._untold[failure.code] += 1
        if self._timer is None:
            self._tell()

    def _tell(self) -> None:
        self._timer = None
        counted, self._untold = self._untold, Counter()
        if not counted:
            return
        self._timer = asyncio.get_running_loop().call_later(self._tell_every_s, self._tell)
        summary = ", ".join(f"{count} × {code}" for code, count in sorted(counted.items()))
        self._telemetry.alerts.fire("IDENTITY_REFUSED", facts={"reason": summary, "refused": dict(counted)})

    def close(self) -> None:
        """Tell of those that are left."""
        if self._timer is not None:
            self._timer.cancel()
            self._tell()
        if self._timer is not None:
            self._timer.cancel()

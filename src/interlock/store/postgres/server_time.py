"""The time of the database server, as a process knows it between two readings.

Nodes compare times with rows that other nodes wrote: the end of an open breaker, of an approval, of a record's term.
Their own wall clocks may be hours apart. So a process on a shared store goes by the server's clock everywhere. It
learns it with each read of the epochs and with each transaction; between readings it adds the uptime of the machine,
which nobody can set.

A reading takes a while, and nobody knows at which moment of it the server looked at its clock. So a reading gives
bounds. What is known already is moved only as far as a reading proves it wrong, and slow readings do no harm.
"""

from __future__ import annotations

import threading

from interlock.core.clock import Clock


class ServerTime:
    """The server's time for one process, by the clock of its machine. Threads may share it."""

    def __init__(self, clock: Clock) -> None:
        self.uptime = clock.uptime
        self._wall_ms = clock.now_ms
        # The server's time when the machine was started: what to add to the uptime. None before the first reading.
        self._offset_ms: float | None = None
        self._lock = threading.Lock()

    def learn(self, server_ms: int, asked_at: float) -> None:
        """Take over a reading that has just arrived. `asked_at` is the uptime from before it was asked for."""
        earliest, latest = server_ms - self.uptime() * 1000, server_ms - asked_at * 1000
        with self._lock:
            known = self._offset_ms
            self._offset_ms = earliest if known is None else min(max(known, earliest), latest)

    def now_ms(self) -> int:
        """The server's time now; that of the machine while nothing was learned."""
        offset_ms = self._offset_ms
        return self._wall_ms() if offset_ms is None else int(offset_ms + self.uptime() * 1000)

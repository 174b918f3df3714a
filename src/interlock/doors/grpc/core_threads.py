"""Lowers the priority of the threads that grpcio's core has started.

The core accepts connections and reads frames on threads of its own, before the event loop or any limit of ours hears of
them. A peer that opens and closes hundreds of connections keeps several of these threads busy, and on a machine with
few processors they take them from the thread of the event loop: every other call waited for 10 to 15 ms. With a lower
priority they wait for the event loop instead. It matters only while all processors are busy.

Linux has a priority per thread. Other systems are left alone.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NICE = 10
_TASKS = "/proc/self/task"
# As the core names them: its workers, and the thread that starts further workers.
_NAMES = ("event_engine", "lifeguard")


class CoreThreads:
    """The threads of the core. It starts further ones whenever it is busy, so they are looked for again and again."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def lower_priority(self) -> None:
        """Lower the priority of the threads that have been started since the last time."""
        try:
            tasks = set(os.listdir(_TASKS))
        except OSError:
            return
        for task in tasks - self._known:
            # A thread may end meanwhile.
            with contextlib.suppress(OSError):
                if Path(_TASKS, task, "comm").read_text().startswith(_NAMES):
                    os.setpriority(os.PRIO_PROCESS, int(task), _NICE)
        self._known = tasks

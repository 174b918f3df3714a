"""Lowers the priority of the threads that grpcio's core has started.

The core accepts connections and reads frames on threads of its own, before the event loop or any limit of ours hears of
them. A peer that opens and closes hundreds of connections keeps several of these threads busy, and on a machine with
few processors they take them from the thread of the event loop: every other call waited for 10 to 15 ms. With a lower
priority they wait for the event loop instead. It matters only while all processors are busy.

Linux has a priority per thread; a thread passes its own on to those that it starts. Other systems are left alone.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NICE = 10
_TASKS = Path("/proc/self/task")
# As the core names them: its workers, and the thread that starts further workers.
_NAMES = ("event_engine", "lifeguard")


def lower_priority() -> None:
    """Lower the priority of the core's threads, and with them of those that they will start."""
    with contextlib.suppress(OSError):
        for task in list(_TASKS.iterdir()):
            # A thread may end meanwhile.
            with contextlib.suppress(OSError):
                if task.joinpath("comm").read_text().startswith(_NAMES):
                    os.setpriority(os.PRIO_PROCESS, int(task.name), _NICE)

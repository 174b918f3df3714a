"""Zygotes that outlive the data directory they were started for, so that the next test need not start its own.

A zygote takes half a second of CPU to start and is the same for every data directory: it runs nothing of a call, and
its children hold what a call may do. Where one would be ended, because its sandbox is closed, it is kept instead and
lent to the next sandbox that wants one like it. Only zygotes without mounts are kept, which have nothing of a test in
them. The tests of the sandbox itself start their own (tests/sandbox/conftest.py).
"""

from __future__ import annotations

import atexit
import threading
from concurrent.futures import ThreadPoolExecutor

from interlock.executors.sandbox import pool
from interlock.executors.sandbox.cgroups import Cgroups
from interlock.executors.sandbox.child import Shape
from interlock.executors.sandbox.pool import Host, Zygote

THREAD = "tests-zygotes"
MOST_KEPT = 3  # of a kind: more are wanted only where a test opens several data directories
MOST_BORNE = 500

_kept: dict[object, list[_Lent]] = {}
_lock = threading.Lock()
# A zygote ends with the thread that started it, so one thread starts them all.
_thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD)


class _Lent(Zygote):
    """A zygote that is kept when its sandbox is closed."""

    def __init__(self, key: object, host: Host, shape: Shape, cgroups: Cgroups | None) -> None:
        self._key = key
        self._total = 0
        self._ready = False
        super().__init__(host, shape, cgroups)
        self._ready = True

    @property
    def pid(self) -> int:
        return self._process.pid

    def lend(self, cgroups: Cgroups | None) -> None:
        self._total += self.borne
        self._cgroups, self._retired, self.borne = cgroups, False, 0

    def end(self) -> None:
        super()._close()

    def _close(self) -> None:
        if self._ready and self.alive and self._total + self.borne < MOST_BORNE:
            with _lock:
                kept = _kept.setdefault(self._key, [])
                if len(kept) < MOST_KEPT:
                    self._cgroups = None
                    kept.append(self)
                    return
        self.end()


def lent(host: Host, shape: Shape, cgroups: Cgroups | None) -> Zygote:
    """A zygote for a sandbox: one that was kept, or a new one."""
    if shape.mounts or shape.tier == 3:
        return Zygote(host, shape, cgroups)
    key = (host, shape.heavy, cgroups is None)
    with _lock:
        kept = _kept.get(key, [])
        found = kept.pop() if kept else None
    if found is None:
        return _thread.submit(_Lent, key, host, shape, cgroups).result()
    if not found.alive:
        found.end()
        return lent(host, shape, cgroups)
    found.lend(cgroups)
    return found


def kept() -> set[int]:
    """The processes of the zygotes that nobody uses at the moment."""
    with _lock:
        return {one.pid for among in _kept.values() for one in among}


def share() -> None:
    """Have all sandboxes of this process share zygotes."""
    pool.Zygote = lent  # pyright: ignore[reportAttributeAccessIssue]


@atexit.register
def _end() -> None:
    for among in _kept.values():
        for one in among:
            one.end()
    _kept.clear()

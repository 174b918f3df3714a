"""Checks a data directory while a process runs on it: free disk space, and key files that others can read.

Both can change at any time by somebody else's hand, and the next start is too late to notice: a full disk stops every
call, and a key that others could read for a week is theirs.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from interlock.core.threads import DISK
from interlock.store.home import Home
from interlock.telemetry.alerts import Alerts

# Of a large disk, room beyond this does not count: a fifth of it left is an alert, a fifth of a terabyte is not.
COUNTED_BYTES = 25 * 2**30


class Condition:
    """Checks one data directory. `announce` gets keys that others can read, once for each until it is corrected."""

    def __init__(self, home: Home, alerts: Alerts, announce: Callable[..., None]) -> None:
        self._home = home
        self._alerts = alerts
        self._announce = announce
        self._exposed: frozenset[str] = frozenset()
        self._used: float | None = None
        alerts.watch("disk", lambda: self._used)

    async def look(self) -> None:
        """Look at the disk and the keys, in a thread: a disk can be slow. Tells of limits that are near as well."""
        self._used, exposed = await DISK.run(_look, self._home)
        for name in sorted(exposed - self._exposed):
            reason = f"the key `{name}` can be read by others; chmod 600 it, and put a new one in force if it was read"
            self._announce("tool.alert", "", "", alert="KEY_EXPOSED", key=name, reason=reason)
        self._exposed = exposed
        self._alerts.look()


def _look(home: Home) -> tuple[float | None, frozenset[str]]:
    return _used(home.path), frozenset(_exposed(home.keys))


def _used(path: Path) -> float | None:
    """The share of the disk's room that is used; None when nobody can tell."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return None
    free = disk.f_bavail * disk.f_frsize
    counted = min((disk.f_blocks - disk.f_bfree + disk.f_bavail) * disk.f_frsize, COUNTED_BYTES)
    return None if counted <= 0 else max(0.0, 1 - free / counted)


def _exposed(keys: Path) -> list[str]:
    """The key files that others than their owner can read or write. Public halves are for everybody."""
    found: list[str] = []
    for directory, _, names in os.walk(keys):
        for name in names:
            path = Path(directory, name)
            try:
                mode = path.lstat().st_mode
            except OSError:
                continue  # removed meanwhile
            if path.suffix != ".pub" and stat.S_ISREG(mode) and mode & 0o077:
                found.append(str(path.relative_to(keys)))
    return found

"""Record locks of the kernel, held by open file descriptions (`F_OFD_SETLK` on Linux).

A lock covers a range of offsets of a file; nothing needs to be stored there. It belongs to the open file description:
two descriptors that one process opened separately exclude each other. Closing one of them, or the end of its process,
releases the locks that it holds and no others.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi0q")  # struct flock: kind, whence, start, length, pid
# Not defined by the module where the system lacks these locks (macOS).
_TEST: int = getattr(fcntl, "F_OFD_GETLK", -1)
_SET: int = getattr(fcntl, "F_OFD_SETLK", -1)
_KIND = struct.Struct("h")
_FREE = _KIND.pack(fcntl.F_UNLCK)


def available() -> bool:
    """Whether this system has open file description locks."""
    return _TEST >= 0


def question(start: int, length: int) -> bytes:
    """Encode a range for `anyone`. A length of 0 reaches to the largest offset."""
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)


def anyone(file: int, range_: bytes) -> bool:
    """Whether others hold a lock in a range. The range is encoded beforehand, because this runs for every write."""
    return fcntl.fcntl(file, _TEST, range_)[:2] != _FREE


def any_lock(file: int, start: int, length: int) -> tuple[int, int] | None:
    """Return start and length of some lock (not necessarily the first) that others hold in a range, or None."""
    kind, _, at, size, _ = _FLOCK.unpack(fcntl.fcntl(file, _TEST, question(start, length)))
    return None if kind == fcntl.F_UNLCK else (at, size)


def take(file: int, start: int, length: int) -> bool:
    """Lock a range without waiting. Returns False if others hold a part of it."""
    try:
        _set(file, fcntl.F_WRLCK, start, length)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def give_back(file: int, start: int, length: int) -> None:
    """Release a range."""
    _set(file, fcntl.F_UNLCK, start, length)


def _set(file: int, kind: int, start: int, length: int) -> None:
    fcntl.fcntl(file, _SET, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))

"""Record locks of the kernel, as open file descriptions hold them (`F_OFD_SETLK` of Linux).

A lock covers a range of offsets of a file; nothing needs to be stored there. It belongs to the open file description:
two descriptors that one process opened separately exclude each other, and closing one of them, or the end of its
process, releases what it holds and nothing else.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi0q")  # struct flock: kind, whence, start, length, pid
# Unknown to the module where the system has none (macOS).
_TEST: int = getattr(fcntl, "F_OFD_GETLK", -1)
_SET: int = getattr(fcntl, "F_OFD_SETLK", -1)
_KIND = struct.Struct("h")
_FREE = _KIND.pack(fcntl.F_UNLCK)


def available() -> bool:
    """Whether this system has such locks."""
    return _TEST >= 0


def question(start: int, length: int) -> bytes:
    """A question for `anyone`. A length of 0 reaches to the end of all offsets."""
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)


def anyone(file: int, asked: bytes) -> bool:
    """Whether others hold a lock in a range. Takes a question made before: this runs for every write."""
    return fcntl.fcntl(file, _TEST, asked)[:2] != _FREE


def found(file: int, start: int, length: int) -> tuple[int, int] | None:
    """Start and length of a lock that others hold in a range: any of them, not the first. None where there is none."""
    kind, _, at, size, _ = _FLOCK.unpack(fcntl.fcntl(file, _TEST, question(start, length)))
    return None if kind == fcntl.F_UNLCK else (at, size)


def take(file: int, start: int, length: int) -> bool:
    """Lock a range, without waiting. False when others hold a part of it."""
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

"""A timer of the kernel that ends this process when others may take its locks, unless the process sets it anew.

A process that is stopped, or that runs a tool in a thread that nobody can stop, cannot end that tool by itself. The
kernel can: SIGKILL also ends a process that is stopped (SIGSTOP, a debugger, a frozen container), before it runs
another instruction. The clock of the timer counts the sleep of the machine. A virtual machine that is paused together
with its clock is not covered: its kernel does not run either.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from typing import Any


class _Event(ctypes.Structure):
    """`struct sigevent`, whose size is 64 bytes."""

    _fields_ = (  # pyright: ignore[reportUnannotatedClassAttribute]
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


class _Setting(ctypes.Structure):
    """`struct itimerspec`: seconds and nanoseconds of the interval, then of the first time."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "at_s", "at_ns"))  # pyright: ignore[reportUnannotatedClassAttribute]


_SIGEV_SIGNAL = 0
_TIMER_ABSTIME = 1


class Fence:
    """The timer of one process. A child process that is forked does not have it."""

    def __init__(self) -> None:
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        event = _Event(None, signal.SIGKILL, _SIGEV_SIGNAL, b"")
        if self._libc.timer_create(time.CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create")

    def end_at(self, at_s: float) -> None:
        """Have this process killed at a time of the boot clock, or at no time if it is 0."""
        seconds = int(at_s)
        setting = _Setting(0, 0, seconds, int((at_s - seconds) * 1e9))
        if self._libc.timer_settime(self._timer, _TIMER_ABSTIME, ctypes.byref(setting), None):
            raise OSError(ctypes.get_errno(), "timer_settime")

    def close(self) -> None:
        self._libc.timer_delete(self._timer)


def possible() -> bool:
    """Whether this system has such a timer: a 64-bit Linux."""
    return sys.platform == "linux" and sys.maxsize > 2**32 and hasattr(ctypes.CDLL(None), "timer_create")

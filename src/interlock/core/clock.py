"""Time, ids and randomness, passed in so that tests can replay them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache

from interlock.core.record import record

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]


class _Random:
    """Random bytes from the system, fetched many at a time: a system call per call is the larger part of an id."""

    def __init__(self) -> None:
        self._bytes = b""
        self._used = 0
        # INVARIANT: a child process never draws what its parent draws.
        os.register_at_fork(after_in_child=self._forget)

    def __call__(self, size: int) -> bytes:
        start, self._used = self._used, self._used + size
        if self._used > len(self._bytes):
            self._bytes = os.urandom(max(4096, size))
            start, self._used = 0, size
        return self._bytes[start : start + size]

    def _forget(self) -> None:
        self._bytes, self._used = b"", 0


_BOOT_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def _uptime() -> float:
    return time.monotonic() if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK)


@lru_cache(maxsize=1)
def _boot() -> str:
    """A name for this start of the machine; empty where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return "" if _BOOT_CLOCK is None else file.read().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Where time and randomness come from.

    `now_ms` is wall time since 1970, `monotonic` never goes back and measures durations. `uptime` is like it, but goes
    on while the machine sleeps; within one start of the machine, which `boot` names, all processes have the same. Where
    `boot` is empty, it cannot be compared.
    """

    now_ms: Callable[[], int] = field(default=lambda: time.time_ns() // 1_000_000)
    monotonic: Callable[[], float] = time.monotonic
    random_bytes: Callable[[int], bytes] = field(default_factory=_Random)
    uptime: Callable[[], float] = field(default=_uptime)
    boot: str = field(default_factory=_boot)


def new_id(now_ms: int, random: bytes) -> str:
    """A ULID, 26 characters that sort by time, from eight random bytes.

    The random part uses sixteen of the thirty-two letters a ULID may use: 64 random bits a millisecond are plenty, and
    writing them is one call.
    """
    return _seconds_part(now_ms >> 10) + _PAIRS[now_ms & 1023] + random.hex().upper()


def new_ids(now_ms: int, random: bytes) -> tuple[str, str]:
    """The id of a call, as `new_id` makes it, and that of a trace, from twenty-four random bytes."""
    digits = random.hex()
    return _seconds_part(now_ms >> 10) + _PAIRS[now_ms & 1023] + digits[:16].upper(), digits[16:]


def begun_ms(call_id: str) -> int | None:
    """The time in an id that `new_id` made; None for any other name."""
    if len(call_id) != 26 or not _ID.match(call_id):
        return None
    ms = 0
    for letter in call_id[:10]:
        ms = ms << 5 | _ALPHABET.index(letter)
    return ms


_ID = re.compile("[0-7][" + _ALPHABET + "]{25}")


@lru_cache(maxsize=4)
def _seconds_part(seconds: int) -> str:
    return "".join([_PAIRS[seconds >> shift & 1023] for shift in range(30, -1, -10)])


@lru_cache(maxsize=4)
def iso(now_ms: int) -> str:
    """ISO 8601 in UTC with milliseconds."""
    return f"{_to_the_second(now_ms // 1000)}.{now_ms % 1000:03d}Z"


@lru_cache(maxsize=4)
def _to_the_second(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"


@record
class Deadline:
    """A point in monotonic time that children may bring nearer and never push away."""

    at: float

    def remaining_s(self, monotonic: float) -> float:
        return self.at - monotonic

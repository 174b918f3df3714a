"""Time, ids and randomness, passed in so that tests can replay them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import field
from datetime import UTC, datetime
from functools import lru_cache

from interlock.core.expressions import expression
from interlock.core.record import dataclass, record

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]

# Times are below this, some thousand years from now; later ones come from no clock and no calendar can show them.
END_MS = 10**14


class _Random:
    """Random bytes from the system, fetched in blocks: one system call per id would cost more than the id itself."""

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
def boot_id() -> str:
    """An identifier for the current boot of the machine; empty where the system offers none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return "" if _BOOT_CLOCK is None else file.read().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Source of time and randomness.

    `now_ms` is wall time since 1970. `monotonic` never goes back and measures durations. `uptime` is like `monotonic`
    but also counts the time that the machine sleeps; it is the same in all processes within one boot, which `boot`
    identifies. Where `boot` is empty, values of `uptime` cannot be compared between processes.
    """

    now_ms: Callable[[], int] = field(default=lambda: time.time_ns() // 1_000_000)
    monotonic: Callable[[], float] = time.monotonic
    random_bytes: Callable[[int], bytes] = field(default_factory=_Random)
    uptime: Callable[[], float] = field(default=_uptime)
    boot: str = field(default_factory=boot_id)


def new_id(now_ms: int, random: bytes) -> str:
    """Make a ULID, 26 characters that sort by time, from eight random bytes.

    The random part uses sixteen of the thirty-two letters that a ULID may use: 64 random bits per millisecond are
    enough, and writing them is one call.
    """
    return _seconds_part(now_ms >> 10) + _PAIRS[now_ms & 1023] + random.hex().upper()


def new_ids(now_ms: int, random: bytes) -> tuple[str, str]:
    """Make the id of a call, as `new_id` does, and the id of its trace, from twenty-four random bytes."""
    digits = random.hex()
    return _seconds_part(now_ms >> 10) + _PAIRS[now_ms & 1023] + digits[:16].upper(), digits[16:]


def begun_ms(call_id: str) -> int | None:
    """Read the time from an id that `new_id` made; None for any other text."""
    if len(call_id) != 26 or not _ID.match(call_id):
        return None
    ms = 0
    for letter in call_id[:10]:
        ms = ms << 5 | _ALPHABET.index(letter)
    return ms


_ID = expression("[0-7][" + _ALPHABET + "]{25}")


@lru_cache(maxsize=4)
def _seconds_part(seconds: int) -> str:
    return "".join([_PAIRS[seconds >> shift & 1023] for shift in range(30, -1, -10)])


@lru_cache(maxsize=4)
def iso(now_ms: int) -> str:
    """Format a time as ISO 8601 in UTC with milliseconds."""
    return f"{_to_the_second(now_ms // 1000)}.{now_ms % 1000:03d}Z"


@lru_cache(maxsize=4)
def _to_the_second(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"


@record
class Deadline:
    """A point in monotonic time. Children may bring it nearer, but never push it away."""

    at: float

    def remaining_s(self, monotonic: float) -> float:
        return self.at - monotonic

"""How soon a change that one process makes counts in others: within a second of its acknowledgement.

A busy machine may not run a process for a while, and no bound is about that. So a lag is the time from the
acknowledgement to the last question that was answered as before the change. An answer that comes late does not count,
and a bound that was not met is measured again, with another change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

BOUND_S = 1.0
TRIES = 3
PATIENCE_S = 120.0


async def lag_of(reached: Callable[[], Awaitable[bool]], what: str = "") -> float:
    """Wait for something that another process does. Returns how long it certainly took, and prints it."""
    began, lag = time.monotonic(), 0.0
    while True:
        asked = time.monotonic()
        if await reached():
            break
        lag = asked - began
        assert lag < PATIENCE_S, what
        await asyncio.sleep(0.02)
    if what:
        print(f"{what}: {lag:.2f} s")
    return lag


async def until(reached: Callable[[], Awaitable[bool]], what: str = "") -> None:
    """Wait for something that another process does."""
    await lag_of(reached, what)


async def within_a_second(change: Callable[[int], Awaitable[float]]) -> None:
    """Make changes, up to three of them, until one has a lag within the bound. Each is given its number."""
    lags: list[float] = []
    for number in range(TRIES):
        lags.append(await change(number))
        if lags[-1] < BOUND_S:
            return
    raise AssertionError(f"it took longer than {BOUND_S} s each time: {lags}")

"""For tests of your own tools: `from interlock.testing import app` gives a fixture with an empty Interlock.

    from interlock.testing import app

    async def test_adding(app):
        await app.add(add)
        assert (await app.call("demo.add", a=1, b=2)).unwrap() == 3

Needs pytest and pytest-asyncio. `FakeClock` is a clock that moves when told to.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest_asyncio

from interlock.api.interlock import Interlock
from interlock.core.clock import Clock


@pytest_asyncio.fixture
async def app(tmp_path: Path) -> AsyncGenerator[Interlock]:
    """An Interlock over a data directory of this test's own."""
    async with Interlock.open(tmp_path / "home") as opened:
        yield opened


_BOOTS = itertools.count(1)


class FakeClock:
    """Time that stands still until `advance`d; ids and randomness that repeat from run to run."""

    def __init__(self, now_ms: int = 1_800_000_000_000, seed: str = "") -> None:
        self.now_ms = now_ms
        self._seed = seed
        self.monotonic_s = 1000.0
        self._numbers = itertools.count(1)
        self._boot = f"fake {next(_BOOTS)}"

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_ms += round(seconds * 1000)
        self.monotonic_s += seconds

    def _random_bytes(self, size: int) -> bytes:
        return hashlib.shake_128(f"{self._seed}:{next(self._numbers)}".encode()).digest(size)

    @property
    def clock(self) -> Clock:
        """The clock to hand to `Interlock.open`."""
        return Clock(
            now_ms=lambda: self.now_ms,
            monotonic=lambda: self.monotonic_s,
            random_bytes=self._random_bytes,
            uptime=lambda: self.monotonic_s,
            boot=self._boot,
        )

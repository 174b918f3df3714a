"""A data directory whose records are days apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from interlock import Interlock
from interlock.core.clock import Clock
from interlock.store.home import Home
from interlock.store.homes import home_at
from tests.support.chains import echo, post
from tests.support.stores import opened

DAY_MS = 86_400_000


def ms(year: int, month: int = 1, day: int = 1, hour: int = 0) -> int:
    return int(datetime(year, month, day, hour, tzinfo=UTC).timestamp() * 1000)


@dataclass
class Time:
    """A clock that stands where it is put."""

    now_ms: int
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(now_ms=lambda: self.now_ms)


async def make_home(path: Path, *, start_ms: int = ms(2020), reads: int = 3) -> Home:
    """A home whose records are a day apart: two registrations, reads, a write (three records), a read."""
    time = Time(start_ms)
    async with Interlock.open(path, clock=time.clock) as app:
        await app.add(echo, post)
        for number in range(reads):
            time.now_ms += DAY_MS
            await app.call("demo.echo", account=f"a{number}")
        time.now_ms += DAY_MS
        await app.call("demo.post", account="cash", cents=1, key="k")
        time.now_ms += DAY_MS
        await app.call("demo.echo", account="last")
        await app.journal.drain()
    return home_at(path)


def stored(home: Home) -> list[tuple[int, str]]:
    with opened(home) as db:
        return db.execute("SELECT seq, kind FROM journal ORDER BY seq").fetchall()

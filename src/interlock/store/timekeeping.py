"""The store's time: it never goes back, and it knows when the machine's clock was set.

Theory of operation. A machine has two clocks. The wall clock tells the date, and people, time servers and empty
batteries set it. The uptime counts from the start of the machine, runs on while the machine sleeps, and nobody can set
it. Between two looks at both, they must go on alike. Where they differ by more than `STEP_MS`, the wall clock was set:

- *Behind* the store's time: the store's time goes on by the uptime until the wall clock has caught up.
- *Ahead* of it: which of the two was right, nobody can tell. The store's time follows, so that what is new is dated as
  everybody else dates it, and the step is written down: the time that the store left, and the time that it reached.

A step lengthens no life and ends none. An idempotency key that was in its window before the step is in doubt until as
much time has passed, by the uptime, as its window is long (`in_doubt_until`). Until then it blocks.

The last look (a *sample*) lies in the database, so that the next process goes on from there. Uptimes can be compared
within one start of the machine only. After another start, a wall clock that is not behind the sample is believed.

INVARIANT: what `read` returns never decreases, whatever the wall clock does and whichever process reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from interlock.core.clock import Clock, iso
from interlock.core.formatting import span
from interlock.core.record import NamedTuple
from interlock.store.port import Reader, Transaction

_log = logging.getLogger("interlock.journal")

STEP_MS = 60_000
# Longer than the longest window of a key.
STORED_MS = 400 * 86_400_000
_SAMPLE = "clock"
# When keys whose window had passed were removed last.
EVICTED = "clock.evicted"
_STEP = "clock.step:"
_SAVE = "INSERT INTO fact (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
_STEPS = "SELECT name, value FROM fact WHERE name > 'clock.step:' AND name < 'clock.step;'"


class Step(NamedTuple):
    """A time that the store left, and the one that it reached, when the wall clock was found to be ahead."""

    before_ms: int
    after_ms: int

    def document(self) -> dict[str, Any]:
        return {
            "from": iso(self.before_ms),
            "to": iso(self.after_ms),
            "seconds": (self.after_ms - self.before_ms) / 1000,
        }


class StoreTime:
    """The time of one process on a home. Not safe for threads: the journal's lock protects it."""

    def __init__(self, clock: Clock, reader: Reader) -> None:
        self._clock = clock
        self._up = clock.uptime()
        self._last = self._ms = clock.now_ms()
        sample = _sampled(reader, clock.boot)
        if sample is not None:
            ms, up = sample
            # Of another start of the machine: nothing was measured between, and only that time never goes back is sure.
            self._ms, self._up = (max(self._ms, ms), self._up) if up is None else (ms, up)
            self._last = ms
        self._behind = False
        self._saved = False
        self._steps: list[Step] = []
        self.on_step: Callable[[dict[str, Any]], None] | None = None

    @property
    def due(self) -> bool:
        """Whether `write` has something to write that must not wait."""
        return not self._saved

    def read(self) -> int:
        """The store's time now."""
        wall, up = self._clock.now_ms(), self._clock.uptime()
        expected = self._ms + round((up - self._up) * 1000)
        ahead = wall - expected
        if ahead < -STEP_MS:
            if not self._behind:
                self._behind, self._saved = True, False
                self._report("behind the store's time", expected, wall)
            self._last = max(expected, self._last)
            return self._last
        if ahead > STEP_MS:
            self._steps.append(Step(expected, wall))
            self._saved = False
        self._behind = False
        self._last = self._ms = max(wall, self._last)
        self._up = up
        return self._last

    def write(self, execute: Callable[[str, Sequence[Any]], Any], reader: Reader) -> None:
        """Write the sample down, and the steps that no other process has written yet. Part of a transaction."""
        sample = _sampled(reader, self._clock.boot)
        for step in self._steps:
            known = sample is not None and sample[1] is not None and abs(self._offset(*sample) - self._now()) <= STEP_MS
            if not known:
                execute(_SAVE, (f"{_STEP}{step.after_ms}", str(step.before_ms)))
        value = {"ms": self._last, "up": self._clock.uptime(), "boot": self._clock.boot}
        execute(_SAVE, (_SAMPLE, orjson.dumps(value).decode()))

    def written(self) -> None:
        """Note that what `write` wrote is on disk."""
        steps, self._steps, self._saved = self._steps, [], True
        for step in steps:
            self._report("ahead of the store's time", *step)

    def _offset(self, ms: int, up: float | None) -> float:
        return ms - (up or 0.0) * 1000

    def _now(self) -> float:
        return self._offset(self._ms, self._up)

    def _report(self, how: str, store_ms: int, wall_ms: int) -> None:
        facts = {**Step(store_ms, wall_ms).document(), "how": how}
        words = "the clock of this machine was set: it is %s %s; see interlock doctor"
        _log.warning(words, span(abs(wall_ms - store_ms)), how)
        if self.on_step is not None:
            self.on_step(facts)


def _sampled(reader: Reader, boot: str) -> tuple[int, float | None] | None:
    """The last sample: the store's time and the uptime; no uptime when it is of another start of the machine."""
    row = reader.one("SELECT value FROM fact WHERE name = ?", (_SAMPLE,))
    if row is None:
        return None
    value: dict[str, Any] = orjson.loads(row[0])
    return int(value["ms"]), float(value["up"]) if boot and value["boot"] == boot else None


def reached(reader: Reader) -> int:
    """Return the store's time as far as it is written."""
    sample = _sampled(reader, "")
    row = reader.one("SELECT value FROM fact WHERE name = ?", (EVICTED,))
    return max(0 if sample is None else sample[0], 0 if row is None else int(row[0]))


def steps(reader: Reader) -> list[Step]:
    """The steps on record, the oldest first."""
    rows = reader.all(_STEPS)
    return sorted(Step(int(before), int(str(name).removeprefix(_STEP))) for name, before in rows)


def in_doubt_until(known: Sequence[Step], from_ms: int, until_ms: int) -> int:
    """When a span of the store's time has passed for certain, however the wall clock was set meanwhile."""
    for before_ms, after_ms in known:
        if from_ms <= before_ms < until_ms:
            until_ms += after_ms - before_ms
    return until_ms


def forget(transaction: Transaction, now_ms: int) -> None:
    """Remove the steps that no window reaches back to any more."""
    transaction.execute("DELETE FROM fact WHERE name > ? AND name < ?", (_STEP, f"{_STEP}{now_ms - STORED_MS}"))

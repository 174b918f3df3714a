"""Turns of the processes that write to one home.

Theory of operation. SQLite lets one process write at a time, but it keeps no queue: a process that writes without a
pause takes its lock again before one that waits has looked. So those who wait stand in a queue of their own, which the
kernel keeps as record locks on one file. Nothing is stored in that file.

A process that finds the database locked takes a *place*: it locks the offset that equals the monotonic clock in
nanoseconds, which all processes of a machine share. Earlier arrivals have lower offsets. Before it begins a
transaction, every process asks the kernel whether anybody has a place. If so, it takes one too and waits until no lower
offset is locked. Only the first of the queue tries to begin. When it has begun, it gives its place up. Hence somebody
who waits is passed by one transaction of each other process at most: one that was begun before the place was taken.

The kernel releases the places of a process that dies. One that is stopped, or gets no processor, keeps its place but
does not use it. To be told apart, a process that runs moves its place up by one offset every `BEAT_S`. A place that was
the first for `STALLED_S` and did not move is passed over until it moves again. So each stopped process costs every
other one a single pause of that length.

Exclusion stays SQLite's: whatever goes wrong here, nobody writes who may not. Where the system has no such locks, the
file cannot be used or its file system does not keep locks, there is no queue, and everybody tries to begin again and
again.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from interlock.core import record_locks
from interlock.store.port import StoreError

# The first of the queue tries again after this long, then after twice as long, up to the second figure.
TRY_AFTER_S = 0.0005
TRY_AT_LEAST_S = 0.002
BEAT_S = 0.010
STALLED_S = 0.050
# After a wait, a home counts as contended for so long.
CONTENDED_S = 1.0
# Nobody waits for so long. A place that is older was taken by another clock.
LONGEST_S = 60.0

_ALL = 0  # as a length: up to the end of all offsets


class Turns:
    """The turns of one writer. Not safe for threads: its owner's lock protects it."""

    def __init__(self, path: Path) -> None:
        self._file = -1
        if record_locks.available():
            try:
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError:
                pass  # another user's, or a full disk: without a queue
        # Places up to this one are not waited for.
        self._passed_over = 0
        self._anyone = record_locks.question(1, _ALL)
        self._place = 0
        self._waited_at = -math.inf
        self._beat_at = 0.0
        self._first = 0
        self._first_since = 0.0

    def begin(self, execute: Callable[[str], Any], patience_s: float) -> bool:
        """Begin a transaction that writes. False when others did not let go of the database in time.

        With no patience it does not wait, and does not pass anybody who does. The connection must have no busy timeout.
        """
        if not self._others_wait() and _begun(execute):
            return True
        return patience_s > 0 and self._begin_in_turn(execute, patience_s)

    @property
    def contended(self) -> bool:
        """Whether this process had to wait for another lately, or another for this one."""
        return time.monotonic() - self._waited_at < CONTENDED_S

    def look(self) -> None:
        """Note whether another process waits. To be called after a transaction, before others have had their turn.

        A process that waits only for short transactions is gone from the queue when the next one begins here.
        """
        if self._others_wait():
            self._waited_at = time.monotonic()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _begin_in_turn(self, execute: Callable[[str], Any], patience_s: float) -> bool:
        now = time.monotonic()
        give_up, pause = now + patience_s, TRY_AFTER_S
        self._take_place(now)
        try:
            while not (self._may_try(now) and _begun(execute)):
                if now >= give_up:
                    return _begun(execute)
                time.sleep(pause)
                pause = min(pause * 2, TRY_AT_LEAST_S)
                now = time.monotonic()
                if now - self._beat_at >= BEAT_S:
                    self._beat(now)
            return True
        finally:
            self._give_up_place()
            self._waited_at = now

    # The queue

    def _others_wait(self) -> bool:
        if self._file < 0:
            return False
        try:
            return record_locks.anyone(self._file, self._anyone)
        except OSError:
            self.close()
            return False

    def _take_place(self, now: float) -> None:
        self._first = 0
        self._lock_place(time.monotonic_ns(), now)

    def _beat(self, now: float) -> None:
        """Show that this process runs. The new place is taken before the old one is given up, so none is lost."""
        if before := self._place:
            self._lock_place(before + 1, now)
            self._release(before)

    def _lock_place(self, place: int, now: float) -> None:
        if self._file < 0:
            return
        try:
            while not record_locks.take(self._file, place, 1):
                place += 1
            self._place, self._beat_at = place, now
        except OSError:
            self.close()

    def _give_up_place(self) -> None:
        self._release(self._place)
        self._place = 0

    def _release(self, place: int) -> None:
        if self._file < 0 or not place:
            return
        try:
            record_locks.give_back(self._file, place, 1)
        except OSError:
            self.close()

    def _may_try(self, now: float) -> bool:
        """Whether everybody before this place has had their turn, or does not take it."""
        while (first := self._first_ahead()) is not None:
            if first != self._first:
                self._first, self._first_since = first, now
            if now - self._first_since < STALLED_S and first > (now - LONGEST_S) * 1e9:
                return False
            self._passed_over = first
            self._anyone = record_locks.question(first + 1, _ALL)
        return True

    def _first_ahead(self) -> int | None:
        """The lowest place before this one, as far as it is waited for."""
        first, end = None, self._place
        try:
            while self._file >= 0 and end - 1 > self._passed_over:
                start = self._passed_over + 1
                lock = record_locks.any_lock(self._file, start, end - start)
                if lock is None:
                    break
                first = end = max(lock[0], start)
        except OSError:
            self.close()
            return None
        return first


def _begun(execute: Callable[[str], Any]) -> bool:
    try:
        execute("BEGIN IMMEDIATE")
    except StoreError as error:
        if "locked" in str(error):
            return False
        raise
    return True

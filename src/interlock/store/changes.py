"""Changes that other processes make to what this one keeps in memory, noticed by one reader for all caches.

Theory of operation. A transaction that changes tools, identities, revocations, quarantines, breakers or upstreams
raises an *epoch*. One thread reads all epochs in one statement, every `READ_EVERY_S`, and at once when another process
on a server notifies it. A cache watches some of them (`watch`): when one has changed, its `load` reads what the cache
needs, still on the thread, and its `apply` takes that over on the event loop. The loop itself reads in three cases
only: after a change of this process, which must count at once (`look`), when the thread is late, and when the process
was idle, in which the thread reads seldom (`catch_up`). If the store is on a server, it reads once, before anything is
known; other threads read the rest. `caught_up` and `look` wait for a read of the thread without blocking the loop.
`catch_up` refuses (E3801). Before anything is known, or a new cache knows anything, it blocks the loop first, until
that read ends, but for no longer than `_PATIENCE_HERE_S`.

    thread   epochs ─ changed? ─ load ─┐                    epochs ─ not changed ─ fresh_until moves on
    loop                               └ apply, fresh_until moves on

A cache compares the time with `fresh_until` before it answers, and calls `catch_up` if that has passed. While the
thread reads, and when the store cannot be read, caches go on with what they know for `max_stale_s` seconds since the
last read, and then refuse (E3801). They refuse at once where an epoch is known to have changed and its family cannot be
loaded. The next read that succeeds ends this. A database that was removed, or replaced by another file, counts as one
that cannot be read: the open file would still show what was there.

INVARIANT: a read counts as the last one only after every cache has taken over all that was read.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.core.threads import DISK
from interlock.store.epochs import Epochs
from interlock.store.failures import store_failure
from interlock.store.home import Home
from interlock.store.port import Listener, Reader, StoreConnection, StoreError

T = TypeVar("T")
_log = logging.getLogger("interlock.store")

READ_EVERY_S = 0.03
# A process that was not asked anything for so long reads less often. An idle server uses next to no processor time.
IDLE_AFTER_S = 1.0
READ_IDLE_EVERY_S = 0.5
# What is known is used for so long before the loop reads by itself. A thread that runs as it should is faster.
FRESH_S = 0.05
# How long calls go on while the store cannot be read.
MAX_STALE_S = 2.0
# How long a read on the thread may take, from when it began, for a caller to wait for it. One that takes longer hangs.
_PATIENCE_S = 2.0
# The same of a caller on the event loop that has nothing yet from a database on another machine.
_PATIENCE_HERE_S = 1.0
_LOOK_AGAIN_S = 0.002
_NEVER = float("-inf")


class Watch(Generic[T]):
    """A cache and the epochs that it depends on. `also` gives something else that it depends on, such as file names."""

    __slots__ = ("also", "apply", "families", "load", "seen")

    def __init__(
        self,
        families: tuple[str, ...],
        load: Callable[[Reader], T],
        apply: Callable[[T], None],
        also: Callable[[], object] | None,
    ) -> None:
        self.families = families
        self.load = load
        self.apply = apply
        self.also = also
        self.seen: object = None

    def of(self, now: Epochs) -> object:
        """The part of all epochs that concerns this cache."""
        return *(getattr(now, family) for family in self.families), None if self.also is None else self.also()


class _Read(NamedTuple):
    """A read: its number, when it began, for whom, and for each cache that has to change what it saw and loaded."""

    number: int
    at: float
    watches: tuple[Watch[Any], ...]
    loaded: list[tuple[Watch[Any], object, Any]]


# many methods: the loop and its thread share one state under one lock
class ChangeReader:
    """The reader of a process's changes. It belongs to the event loop that made it, but for its thread."""

    def __init__(self, home: Home, *, monotonic: Callable[[], float], max_stale_s: float = MAX_STALE_S) -> None:
        self._home = home
        self._file = home.identity()
        self._monotonic = monotonic
        self._max_stale_s = max_stale_s
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._connection: StoreConnection | None = None
        # Held while reading, and where a watch is added.
        self._lock = threading.Lock()
        self._watches: tuple[Watch[Any], ...] = ()
        self._number = self._applied = 0
        self._read_at = _NEVER
        # When the read that is under way began, by the real clock: the injected one may jump.
        self._began_at: float | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        # Whether a process has said that it changed something, since the last read began.
        self._news = False
        self._listener: Listener | None = None
        self._stopped = False
        self._asked_at = _NEVER
        self._reported = False
        # Caches compare the time with this before they answer. From then on they have to call `catch_up`.
        self.fresh_until = _NEVER
        self.reads = 0

    @property
    def age_s(self) -> float:
        """Seconds since the last read that succeeded and was taken over; infinite before the first."""
        return self._monotonic() - self._read_at

    def stale_share(self) -> float | None:
        """The share of `max_stale_s` that has passed since the last read; None where the thread does not read."""
        return None if self._thread is None or self._read_at == _NEVER else max(0.0, self.age_s) / self._max_stale_s

    def watch(
        self,
        families: tuple[str, ...],
        load: Callable[[Reader], T],
        apply: Callable[[T], None],
        *,
        also: Callable[[], object] | None = None,
    ) -> Callable[[], None]:
        """Keep a cache up to date, from the next use on. Returns a function that ends this.

        `load` runs on any thread and only reads. `apply` runs on the loop.
        """
        watch = Watch(families, load, apply, also)
        with self._lock:
            self._watches += (watch,)
            self._read_at = self.fresh_until = _NEVER

        def end() -> None:
            with self._lock:
                self._watches = tuple(one for one in self._watches if one is not watch)

        return end

    # On the loop

    def start(self) -> None:
        """Start the thread, so that caches follow changes although nobody calls `catch_up`."""
        if self._thread is None and not self._stopped:
            self._thread = threading.Thread(target=self._run, name="interlock-changes", daemon=True)
            self._thread.start()
            self._listener = self._home.listener(self.note_news)

    async def look(self) -> None:
        """Read now, so that what this process has just committed counts. Raises where the store cannot be read."""
        try:
            if self._home.near:
                await self._wait_for(lambda: self._lock.acquire(blocking=False))
                try:
                    read = self._read()
                finally:
                    self._lock.release()
            else:
                read = await DISK.run(self._read_apart)
        except BaseException:
            self._distrust()
            raise
        self._deliver(read)

    async def caught_up(self) -> None:
        """Make sure that what caches know is recent enough to be used; E3801, E3803 or E3804 where it is not.

        Waits for a read that is under way on the thread. Calls begin with this, before they use caches.
        """
        while self._monotonic() >= self.fresh_until and self._far_and_unread():
            self.hurry()
            await self.look()  # meanwhile another cache may be added
        if self._monotonic() >= self.fresh_until:
            await self._wait_for(self.try_catch_up)

    def catch_up(self) -> None:
        """The same for caches that cannot wait: E3801 while the thread reads, if what is known is too old.

        Where nothing is known, as when a cache was just added, it waits for the end of that read, unless that hangs.
        """
        far = self._far_and_unread()
        wait_s = 0.0
        if far or self._read_at == _NEVER:
            began_at = self._began_at
            wait_s = _PATIENCE_HERE_S if began_at is None else began_at + _PATIENCE_HERE_S - time.monotonic()
        if not self._try_catch_up(here=self._home.near or far, wait_s=max(0.0, wait_s)):
            raise _unanswered()

    def try_catch_up(self) -> bool:
        """The same. False if what is known is too old and cannot be read at once: `caught_up` waits for it."""
        return self._try_catch_up(here=self._home.near)

    def _far_and_unread(self) -> bool:
        """Whether nothing is known yet, or a cache was added since, and the database is on another machine."""
        return not self._home.near and (self._thread is None or self._read_at == _NEVER)

    def _try_catch_up(self, *, here: bool, wait_s: float = 0) -> bool:
        self.hurry()
        now = self._monotonic()
        known = now - self._read_at < self._max_stale_s
        read, failure = None, None
        # While the thread reads, what is known is good enough for a little longer. A database on another machine may
        # not answer for a while, so only threads wait for it, unless a cache that cannot wait has nothing yet.
        if here and self._lock.acquire(timeout=wait_s):
            try:
                read = self._read()
            except Failure as error:
                failure = error
            finally:
                self._lock.release()
            if read is not None:
                self._deliver(read)
                return True
            known = now - self._read_at < self._max_stale_s
        if known:
            # Asked again soon, but not by every call: a call that finds something fresh takes less time.
            self.fresh_until = min(now + FRESH_S, self._read_at + self._max_stale_s)
            if self._read_at == _NEVER:  # the thread has found by now that what is known cannot be trusted
                self.fresh_until = _NEVER
        elif failure is not None:
            raise failure
        return known

    async def _wait_for(self, done: Callable[[], bool]) -> None:
        """Try something until the thread's read lets it succeed; E3801 for a read that hangs. The loop goes on.

        The limit counts from the beginning of the read, so one that hangs delays callers once. It is generous, because
        a thread may not run for a while on a busy machine. The real clock measures it: the injected one may jump.
        """
        asked_at = time.monotonic()
        while not done():
            began_at = self._began_at
            if time.monotonic() - (asked_at if began_at is None else min(asked_at, began_at)) >= _PATIENCE_S:
                raise _unanswered()
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _deliver(self, read: _Read) -> None:
        """Take over a read of `look` or `catch_up`. Other threads than the loop's may call `catch_up` too."""
        if threading.get_ident() == self._loop_thread:
            self._take_over(read)
            return
        self._loop.call_soon_threadsafe(self._take_over, read)
        if self._read_at == _NEVER:
            raise _unanswered()

    def _take_over(self, read: _Read) -> None:
        if read.number < self._applied:
            return  # the loop has read by itself since
        self._applied = read.number
        for watch, seen, loaded in read.loaded:
            if watch.seen != seen:  # the thread reads on until this runs
                watch.apply(loaded)
                watch.seen = seen
        self._note(read)

    def _note(self, read: _Read) -> None:
        # A watch that was added since has nothing yet.
        if read.watches is self._watches:
            self._read_at, self.fresh_until = read.at, read.at + FRESH_S
            self._reported = False

    def _distrust(self) -> None:
        """Mark everything as stale until the next read: a change is known, its content is not."""
        self._read_at = self.fresh_until = _NEVER

    def _read_apart(self) -> _Read:
        """Read on a thread that may wait for a server; E3801 if another read hangs."""
        if not self._lock.acquire(timeout=_PATIENCE_S):
            raise _unanswered()
        try:
            return self._read()
        finally:
            self._lock.release()

    # On either side, with the lock

    def _read(self) -> _Read:
        """Read the epochs, and for caches that depend on one that changed what they need."""
        at = self._monotonic()
        self._number += 1
        self.reads += 1
        if self._stopped:
            raise Failure("E3801", "the store is closed")
        self._began_at = time.monotonic()
        try:
            if self._home.identity() != self._file:
                raise Failure(
                    "E3801",
                    "the database of this data directory was removed or replaced while it was open",
                    resolution="put the database back, or end this process and start it again",
                )
            reader = self._connection
            if reader is None:
                reader = self._connection = self._home.reading(0)
            now = self._home.epochs(reader)
            changed = [(watch, seen) for watch in self._watches if (seen := watch.of(now)) != watch.seen]
            try:
                loaded = [(watch, seen, watch.load(reader)) for watch, seen in changed]
            except BaseException:
                self._distrust()
                raise
        except StoreError as error:
            raise store_failure(error, "read") from None
        finally:
            self._began_at = None
        return _Read(self._number, at, self._watches, loaded)

    # The thread

    def hurry(self) -> None:
        """Read soon and often, as for calls: somebody asks, or a message says that something has changed."""
        before, self._asked_at = self._asked_at, time.monotonic()
        if self._thread is not None:
            if self._asked_at - before >= IDLE_AFTER_S:
                self._wake.set()
        elif self._number:  # not before the second time: most commands are over by then
            self.start()

    def note_news(self) -> None:
        """Read at once, on the thread: a process has changed something."""
        self._news = True
        self._wake.set()

    def _run(self) -> None:
        while not self._stopped:
            idle = time.monotonic() - self._asked_at >= IDLE_AFTER_S
            if self._wake.wait(READ_IDLE_EVERY_S if idle else READ_EVERY_S):
                self._wake.clear()
                if not self._news:
                    continue
            self._news = False
            with self._lock:
                try:
                    read = self._read()
                except Exception as error:  # noqa: BLE001 - the thread must not end; callers are refused when it is time
                    if not self._stopped:  # which may have come after this read began
                        self._report(error)
                    continue
                if not read.loaded and read.number > self._applied:
                    self._note(read)
                    continue
            try:
                self._loop.call_soon_threadsafe(self._take_over, read)
            except RuntimeError:
                return  # the loop is gone, and with it everybody who asks

    def _report(self, error: Exception) -> None:
        if not self._reported:
            self._reported = True
            words = error.message if isinstance(error, Failure) else repr(error)
            _log.warning("changes of other processes cannot be read: %s", words)

    def stop(self) -> None:
        """End the thread and close the connection. Waits for a read that is under way; later ones are refused."""
        self._stopped = True
        if self._listener is not None:
            self._listener.close()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            if self._connection is not None:
                self._connection.close()


def _unanswered() -> Failure:
    return Failure("E3801", "the store does not answer, so it is not known what other processes changed")

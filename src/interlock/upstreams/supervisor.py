"""Keeps one instance of anything running that can be started and can end.

It is started when first needed and restarted when it ends, with growing pauses, during which calls fail at once. One
that ends within ten seconds of its start has failed; after ten unsuccessful restarts it is given up, an alert is
raised, and calls fail at once until it is replaced. A replacement is up before the one it replaces is asked to finish.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from math import ceil
from typing import Any, Generic, Literal, Protocol, TypeVar

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.upstreams.children import Crashed

_log = logging.getLogger("interlock.upstreams")

WAITED_OUT_S = 1.0


class Supervised(Protocol):
    """Something that a supervisor keeps running: it reports its end and its number of users, and can
    be asked to end.
    """

    @property
    def ended(self) -> asyncio.Future[str]: ...

    @property
    def busy(self) -> int: ...

    def close(self, drain_s: float = 0.0) -> Coroutine[Any, Any, None]: ...


T = TypeVar("T", bound=Supervised)

State = Literal["idle", "starting", "up", "failed", "closed"]


@dataclass(frozen=True, slots=True)
class Restarts:
    """Limits and pauses of restarts."""

    limit: int = 10
    healthy_s: float = 10.0
    pause_s: float = 0.1
    longest_s: float = 30.0

    def pause(self, failures: int) -> float:
        """Return the pause before the next start. One that had stayed up is restarted at once."""
        return 0.0 if failures == 0 else min(self.longest_s, self.pause_s * 2 ** (failures - 1))


class _Pause:
    """The pause before a restart, which somebody may cut short."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: float | None = None
        self._hurry = asyncio.Event()

    @property
    def left_s(self) -> float:
        return 0.0 if self._until is None else self._until - self._clock.monotonic()

    async def take(self, pause_s: float) -> None:
        self._hurry.clear()
        self._until = self._clock.monotonic() + pause_s if pause_s else None
        try:
            async with asyncio.timeout(pause_s):
                await self._hurry.wait()
        except TimeoutError:
            pass  # nobody waited for it
        finally:
            self._until = None

    def cut_short(self) -> None:
        self._until = None
        self._hurry.set()


class Supervisor(Generic[T]):
    """Keeps one T running. Without `restarts` it is started again only when it is next needed."""

    def __init__(
        self,
        start: Callable[[], Awaitable[T]],
        *,
        clock: Clock,
        restarts: Restarts | None = None,
        alert: Callable[[str], None] | None = None,
        name: str = "",
    ) -> None:
        self._name = name
        self.restarted = 0
        self.reason = ""
        self.used = clock.monotonic()
        self._start = start
        self._clock = clock
        self._restarts = restarts
        self._alert = alert
        self._current: T | None = None
        self._since = 0.0
        self._failures = 0
        self._gave_up = False
        self._closed = False
        self._pause = _Pause(clock)
        self._bringing: asyncio.Task[None] | None = None
        self._attempt: asyncio.Future[T | Failure] | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> State:
        if self._closed:
            return "closed"
        if self._gave_up:
            return "failed"
        if self._current is not None:
            return "up"
        return "idle" if self._bringing is None else "starting"

    @property
    def current(self) -> T | None:
        return self._current

    @property
    def busy(self) -> int:
        return 0 if self._current is None else self._current.busy

    async def get(self, within_s: float) -> T:
        """Return the running instance, started if need be; a short pause before its start is waited out.

        Raises E3502 if the start under way does not succeed, or is not due for long.
        """
        self.used = self._clock.monotonic()
        if self._current is not None:
            return self._current
        if self._closed or self._gave_up:
            raise Failure("E3502", self.reason or "the upstream is closed", details={"sent": False})
        if (left_s := self._pause.left_s) > WAITED_OUT_S:
            raise self._pausing(left_s)
        if self._bringing is None:
            self._bring_up()
        assert self._attempt is not None
        done, _ = await asyncio.wait({self._attempt}, timeout=within_s)
        if not done:
            raise Failure("E3502", "the upstream did not start in time", details={"sent": False})
        outcome = done.pop().result()
        if isinstance(outcome, Failure):
            raise outcome
        return outcome

    def _pausing(self, left_s: float) -> Failure:
        """The failure for calls during a pause that is too long to wait: it says when to try again."""
        words = f"the upstream keeps ending, and is left alone for a moment before it is started again; {self.reason}"
        details = {"sent": False, "left_alone": True}
        return Failure("E3502", words, details=details, retry_after_ms=ceil(left_s * 1000))

    def discard(self, useless: T) -> None:
        """Drop an instance that is no longer usable, whether it has ended or not."""
        if useless is self._current:
            self._current = None
            self._end(useless)

    async def replace(self, drain_s: float, within_s: float = 60.0) -> None:
        """Start another instance, then let the old one finish its work and end it.

        This also gives an instance that was given up another chance.
        """
        self._gave_up, self._failures, self.reason = False, 0, ""
        old = self._current
        if old is None:
            self._pause.cut_short()
            await self.get(within_s)
            return
        fresh = await self._start()
        if self._current is not old or self._closed:
            await fresh.close()  # the old one ended meanwhile and has a successor already
            return
        self._adopt(fresh)
        await old.close(drain_s)

    async def close(self, drain_s: float = 0.0) -> None:
        """End it for good."""
        self._closed = True
        if self._bringing is not None:
            self._bringing.cancel()
            await asyncio.wait({self._bringing})
            _settle(self._attempt, Failure("E3502", "the upstream is closed", details={"sent": False}))
        current, self._current = self._current, None
        if current is not None:
            await current.close(drain_s)
        await asyncio.gather(*self._leaving)

    def _adopt(self, started: T) -> None:
        self._current = started
        self._since = self._clock.monotonic()
        started.ended.add_done_callback(lambda _: self._lost(started))

    def _lost(self, gone: T) -> None:
        if gone is not self._current or self._closed:
            return  # replaced or closed: its end was intended
        self._current = None
        self._end(gone)
        if self._restarts is not None and self._may_restart(gone.ended.result(), self._since):
            self._bring_up(again=True)

    def _end(self, gone: T) -> None:
        leaving = asyncio.create_task(gone.close())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    def _may_restart(self, reason: str, since: float) -> bool:
        """Count an end, and give up on an instance that has ended too soon too often."""
        assert self._restarts is not None
        soon = self._clock.monotonic() - since < self._restarts.healthy_s
        self._failures = self._failures + 1 if soon else 0
        self.reason = reason
        _log.warning("%s: %s", self._name or "an upstream", reason)
        if self._failures <= self._restarts.limit:
            return True
        self._gave_up = True
        self.reason = f"the upstream was started {self._restarts.limit} times again and did not stay up; {reason}"
        if self._alert is not None:
            self._alert(self.reason)
        return False

    def _bring_up(self, *, again: bool = False) -> None:
        self._attempt = asyncio.get_running_loop().create_future()
        self._bringing = asyncio.create_task(self._start_until_up(again))

    async def _start_until_up(self, again: bool) -> None:
        while True:
            if again:
                assert self._restarts is not None
                self.restarted += 1
                await self._pause.take(self._restarts.pause(self._failures))
            since = self._clock.monotonic()
            try:
                started = await self._start()
            except Failure as failure:
                again = (
                    isinstance(failure, Crashed)
                    and self._restarts is not None
                    and self._may_restart(failure.message, since)
                )
                attempt, self._attempt = self._attempt, asyncio.get_running_loop().create_future()
                if not again:
                    self._bringing = None
                _settle(attempt, failure)
                if not again:
                    return
            except Exception as error:  # noqa: BLE001 - a fault of this program must not leave callers waiting
                _log.exception("%s could not be started", self._name or "an upstream")
                self._bringing = None
                words = f"the upstream could not be started: {type(error).__name__}"
                _settle(self._attempt, Failure("E3502", words, details={"sent": False}))
                return
            else:
                self._bringing = None
                self._adopt(started)
                _settle(self._attempt, started)
                return


def _settle(attempt: asyncio.Future[T | Failure] | None, outcome: T | Failure) -> None:
    if attempt is not None and not attempt.done():
        attempt.set_result(outcome)

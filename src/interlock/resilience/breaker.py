"""A circuit breaker: after repeated failures of a service, calls to it are refused for a while, then a few are let
through.

Theory of operation.

    closed     calls pass. `failure_threshold` failures within the window open it; so does a share of failures, where
               one is set.
    open       calls are refused at once. The first call after `timeout_seconds` makes it half open.
    half_open  `half_open_max_calls` calls pass, the one that made it half open among them; the others are refused. One
               failure opens it again, `success_threshold` successes close it. Where a canary share is set, only that
               share of the calls passes at first, and more with every success.

Whether the n-th failure opens the breaker depends only on the time of the n-th last one, so only n times are stored.

Every state is a round of its own and every call belongs to the round that admitted it: what a call reports after its
round has ended is ignored. A call may also end without a verdict on the service; it then returns its slot. If all slots
are taken and nothing is decided after `timeout_seconds`, the slots of calls that did not report are given out again in
a new round, so that no lost call keeps a breaker half open for ever.

A breaker does no I/O and may be used by several threads. While it is closed, admitting a call takes no lock.

INVARIANT: no half-open round admits more than `half_open_max_calls` calls that reported, or may yet report, on the
service.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from interlock.core.errors import Failure
from interlock.core.formatting import wait

if TYPE_CHECKING:
    from interlock.contract.manifest import CircuitBreakerConfig

State = Literal["closed", "open", "half_open"]

SLICES = 60
# Suggested wait for a call that was refused because other calls are testing the service at the moment.
TRYING_MS = 1000
# Ten times 0.1 adds up to slightly less than one.
_WHOLE = 1.0 - 1e-9

# Codes that count against the service: it was not reached, broke off, or did not answer in time.
_AGAINST = frozenset(
    {"E3001", "E3002", "E3402", "E3502", "E3503", "E3851", "E3853", "E3856", "E3901", "E3907"}
)  # fmt: skip
_TIMEOUTS = frozenset({"E3002", "E3402", "E3503", "E3853"})
# Codes that show that the service returned a result, even though it was rejected.
_RESULTS = frozenset({"E3303", "E3416", "E3417"})


def counts(failure: Failure, *, own_deadline: bool) -> bool:
    """Whether a failure counts against the service: it was unreachable, or exceeded the time its contract allows.

    A caller that sends invalid input, lacks a permission or disconnects could open the breaker for everybody else, so
    none of that counts, nor does a timeout if the caller allows less time than the contract (`own_deadline`). Neither
    does "not now" (E3504), which suspends the service for as long as it asks; a tool that crashed (E3404), which is a
    fault on our side; or the breaker's own refusal.
    """
    return failure.code in _AGAINST and not (own_deadline and _timed_out(failure))


def _timed_out(failure: Failure) -> bool:
    """Whether time is a reason of a failure; of several endpoints, whether it is for one of them."""
    endpoints = (failure.details or {}).get("endpoints", ())
    return failure.code in _TIMEOUTS or any(one["error_code"] in _TIMEOUTS for one in endpoints)


def answered(failure: Failure) -> bool:
    """Whether a failure is an answer of the service, which proves that it is up."""
    if failure.code in _AGAINST or failure.code == "E3504":
        return False
    return failure.code in _RESULTS or failure.native_error_ref is not None


def _unheard(old: State, new: State) -> None:
    """Default for `moved`: ignore the change."""


# many methods: one state machine; its events and transitions share all of its fields
class Breaker:
    """The breaker of one service. `moved` is called for every state change that calls cause."""

    def __init__(
        self,
        config: CircuitBreakerConfig,
        *,
        monotonic: Callable[[], float],
        service: str = "service",
        moved: Callable[[State, State], None] = _unheard,
    ) -> None:
        self.config = config
        self.service = service
        self.state: State = "closed"
        self._monotonic = monotonic
        self._moved = moved
        # Reentrant, because a listener may query the breaker.
        self._lock = threading.RLock()
        self._round = 0
        self._until = 0.0
        self._failures: deque[float] = deque(maxlen=config.failure_threshold)
        self._tally = None if config.failure_rate is None else _Tally(config.window_seconds)
        self._passed = 0
        self._successes = 0
        self._credit = 0.0

    # Used by callers

    def admit(self) -> int:
        """Admit a call, or refuse it with E3501. The number returned is passed back when the call ends."""
        admitted = self._round
        if self.state == "closed":
            return admitted
        with self._lock:
            now = self._monotonic()
            if self.state == "open" and now >= self._until:
                self._move("half_open", now + self.config.timeout_seconds)
            if self.state == "open":
                raise self._refusal(now)
            if self.state == "half_open":
                if not self._has_room(now) or not self._drawn():
                    raise self._refusal(now)
                self._passed += 1
            return self._round

    def succeeded(self, admitted: int) -> None:
        """Record that the service answered a call."""
        if self.state == "closed" and self._tally is None:
            return
        with self._lock:
            if admitted != self._round:
                return
            if self._tally is not None and self.state == "closed":
                self._tally.add(self._monotonic(), failures=0)
            elif self.state == "half_open":
                self._successes += 1
                if self._successes >= self._needed:
                    self._move("closed", 0.0)

    def failed(self, admitted: int) -> bool:
        """Record that the service failed a call. Returns whether the breaker counted it, and is still closed."""
        with self._lock:
            if admitted != self._round:
                return False
            now = self._monotonic()
            if self.state == "half_open" or (self.state == "closed" and self._trips(now)):
                self._move("open", now + self.config.timeout_seconds)
            return self.state == "closed"

    def trip(self, admitted: int) -> None:
        """Open if the breaker is closed as when a call was admitted: all processes together saw enough failures."""
        with self._lock:
            if self.state == "closed" and admitted == self._round:
                self._move("open", self._monotonic() + self.config.timeout_seconds)

    def abandoned(self, admitted: int) -> None:
        """Record that a call ended without a verdict on the service."""
        if self.state == "half_open":
            with self._lock:
                if self.state == "half_open" and admitted == self._round:
                    self._passed -= 1

    # Decisions of other processes

    def hold(self, until: float) -> None:
        """Become or stay open until a time that another process has set."""
        with self._lock:
            self._enter("open", until)

    def close(self) -> None:
        """Close, because another process found the service healthy."""
        with self._lock:
            self._enter("closed", 0.0)

    def retune(self, config: CircuitBreakerConfig) -> None:
        """Use other thresholds from now on."""
        with self._lock:
            self.config = config
            self._failures = deque(self._failures, maxlen=config.failure_threshold)
            self._tally = None if config.failure_rate is None else _Tally(config.window_seconds)

    @property
    def wait_s(self) -> float:
        """The time during which certainly no call will pass."""
        return max(0.0, self._until - self._monotonic()) if self.state == "open" else 0.0

    @property
    def failures(self) -> int:
        """The number of failures in the window, up to the number that opens the breaker."""
        since = self._monotonic() - self.config.window_seconds
        return sum(at > since for at in tuple(self._failures))

    # State machine

    @property
    def _needed(self) -> int:
        # A round can never see more successes than calls that it admits.
        return min(self.config.success_threshold, self.config.half_open_max_calls)

    def _trips(self, now: float) -> bool:
        """Record a failure; returns whether it opens the breaker."""
        failures, config = self._failures, self.config
        failures.append(now)
        if len(failures) == failures.maxlen and now - failures[0] < config.window_seconds:
            return True
        if self._tally is None or config.failure_rate is None:
            return False
        self._tally.add(now, failures=1)
        calls, failed = self._tally.sums(now)
        return calls >= config.failure_rate_calls and failed >= config.failure_rate * calls

    def _has_room(self, now: float) -> bool:
        """Whether a slot is left to test the service. Slots of calls that never reported are returned."""
        if self._passed >= self.config.half_open_max_calls and now >= self._until:
            self._round += 1
            self._until = now + self.config.timeout_seconds
            self._passed = self._successes
        return self._passed < self.config.half_open_max_calls

    def _move(self, state: State, until: float) -> None:
        old = self.state
        self._enter(state, until)
        self._moved(old, state)

    def _enter(self, state: State, until: float) -> None:
        self.state = state
        self._round += 1
        self._until = until
        self._failures.clear()
        if self._tally is not None:
            self._tally.clear()
        self._passed = self._successes = 0
        self._credit = 1.0  # the first call of a round is never thinned out

    def _drawn(self) -> bool:
        """Whether a call belongs to the share that passes: shares accumulate until they make a whole call."""
        share = self.config.canary_share
        if share is None:
            return True
        if self._credit < _WHOLE:
            self._credit += share + (1.0 - share) * self._successes / self._needed
        if self._credit < _WHOLE:
            return False
        self._credit -= 1.0
        return True

    def _refusal(self, now: float) -> Failure:
        wait_ms = max(1, math.ceil(round((self._until - now) * 1000, 3)))
        if self.state == "half_open":
            wait_ms = min(wait_ms, TRYING_MS)
            words = f"the service `{self.service}` failed and is being tested; try again in {wait(wait_ms)}"
        else:
            words = f"the service `{self.service}` keeps failing; calls to it are refused for another {wait(wait_ms)}"
        details = {"service": self.service, "state": self.state, "sent": False}
        return Failure("E3501", words, details=details, retry_after_ms=wait_ms)


class _Tally:
    """Numbers of calls and failures in the window, counted in slices so that memory stays small."""

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / SLICES
        self._slices: deque[list[int]] = deque()  # number, calls, failures

    def add(self, now: float, *, failures: int) -> None:
        number = int(now / self._slice_s)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append([number, 0, 0])
            self._drop(number)
        self._slices[-1][1] += 1
        self._slices[-1][2] += failures

    def sums(self, now: float) -> tuple[int, int]:
        self._drop(int(now / self._slice_s))
        return sum(one[1] for one in self._slices), sum(one[2] for one in self._slices)

    def clear(self) -> None:
        self._slices.clear()

    def _drop(self, number: int) -> None:
        while self._slices and self._slices[0][0] <= number - SLICES:
            self._slices.popleft()

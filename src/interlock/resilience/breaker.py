"""A circuit breaker: a service that keeps failing is left alone for a while, then tried with a few calls.

Theory of operation.

    closed     calls pass. `failure_threshold` failures within the window open it; so does a share of failures, where
               one is set.
    open       calls are refused at once. The first call after `timeout_seconds` makes it half open.
    half_open  `half_open_max_calls` calls pass, the one that made it half open among them; the others are refused. One
               failure opens it again, `success_threshold` successes close it. Where a canary share is set, only that
               share of the calls passes at first, and more with every success.

What decides whether the n-th failure opens it is the time of the n-th last one, so n times are all that is kept.

Every state is a round of its own and every call belongs to the round that admitted it: what a call reports when its
round is over says nothing about the present one. A call may also end without saying anything about the service; it
gives its place back. If all places are taken and nothing is decided `timeout_seconds` later, the places of calls that
were not heard of are given again in a new round, so that no lost call keeps a breaker half open for ever.

A breaker does no I/O and may be used by several threads. While it is closed, admitting a call takes no lock.

INVARIANT: no half-open round admits more than `half_open_max_calls` calls that reported, or may yet report, on the
service.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal

from interlock.contract.manifest import CircuitBreakerConfig
from interlock.core.errors import Failure
from interlock.core.formatting import wait

State = Literal["closed", "open", "half_open"]

SLICES = 60
# How soon a call may ask again that was refused because others are trying the service just now.
TRYING_MS = 1000
# Ten tenths make a little less than one.
_WHOLE = 1.0 - 1e-9

# The service was not reached, broke off, or let us wait.
_AGAINST = frozenset(
    {"E3001", "E3002", "E3402", "E3502", "E3503", "E3851", "E3853", "E3856", "E3901", "E3907"}
)  # fmt: skip
# A result came, whatever we thought of it.
_RESULTS = frozenset({"E3303", "E3416", "E3417"})


def counts(failure: Failure, *, own_deadline: bool) -> bool:
    """Whether a failure counts against the service: it was away, or did not answer in the time its contract gives it.

    A caller that gives less time than the contract does (`own_deadline`), sends nonsense, may not or goes away could
    open the breaker for everybody else, so none of that counts. Nor does "not now" (E3504), which suspends the service
    for as long as it asks; a tool that crashed (E3404), which is a fault of ours; or a breaker's own refusal.
    """
    return failure.code in _AGAINST and not own_deadline


def answered(failure: Failure) -> bool:
    """Whether a failure is an answer of the service, and so shows that it is there."""
    if failure.code in _AGAINST or failure.code == "E3504":
        return False
    return failure.code in _RESULTS or failure.native_error_ref is not None


def _unheard(old: State, new: State) -> None:
    """For a breaker that nobody listens to."""


class Breaker:
    """The breaker of one service. `moved` is told of every change that calls bring about."""

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
        # Listeners may ask the breaker something; hence not a plain lock.
        self._lock = threading.RLock()
        self._round = 0
        self._until = 0.0
        self._failures: deque[float] = deque(maxlen=config.failure_threshold)
        self._tally = None if config.failure_rate is None else _Tally(config.window_seconds)
        self._passed = 0
        self._successes = 0
        self._credit = 0.0

    # What callers do

    def admit(self) -> int:
        """Let a call through; what it gives is to be handed back with the call's end. E3501 when refused."""
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
        """The service answered a call."""
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

    def failed(self, admitted: int) -> None:
        """The service failed a call."""
        with self._lock:
            if admitted != self._round:
                return
            now = self._monotonic()
            if self.state == "half_open" or (self.state == "closed" and self._trips(now)):
                self._move("open", now + self.config.timeout_seconds)

    def abandoned(self, admitted: int) -> None:
        """A call ended without telling anything about the service."""
        if self.state == "half_open":
            with self._lock:
                if self.state == "half_open" and admitted == self._round:
                    self._passed -= 1

    # What others found out

    def hold(self, until: float) -> None:
        """Stay, or become, open until a moment that somebody else has set."""
        with self._lock:
            self._enter("open", until)

    def close(self) -> None:
        """Somebody else found the service well."""
        with self._lock:
            self._enter("closed", 0.0)

    def retune(self, config: CircuitBreakerConfig) -> None:
        """Go by other numbers from now on."""
        with self._lock:
            self.config = config
            self._failures = deque(self._failures, maxlen=config.failure_threshold)
            self._tally = None if config.failure_rate is None else _Tally(config.window_seconds)

    @property
    def wait_s(self) -> float:
        """How long no call will pass for sure."""
        return max(0.0, self._until - self._monotonic()) if self.state == "open" else 0.0

    @property
    def failures(self) -> int:
        """How many failures are in the window; no more than open the breaker are counted."""
        since = self._monotonic() - self.config.window_seconds
        return sum(at > since for at in tuple(self._failures))

    # The machine

    @property
    def _needed(self) -> int:
        # More successes than calls may pass would never come.
        return min(self.config.success_threshold, self.config.half_open_max_calls)

    def _trips(self, now: float) -> bool:
        """Note a failure; whether it is the one that opens the breaker."""
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
        """Whether a place is left to try the service; places of calls that are not heard of any more come back."""
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
        self._credit = 1.0  # the call that begins a round is never thinned out

    def _drawn(self) -> bool:
        """Whether a call is among the share that passes: the share is saved up until it makes a whole call."""
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
            words = f"the service `{self.service}` failed and is just being tried; ask again in {wait(wait_ms)}"
        else:
            words = f"the service `{self.service}` keeps failing and is left alone for another {wait(wait_ms)}"
        details = {"service": self.service, "state": self.state, "sent": False}
        return Failure("E3501", words, details=details, retry_after_ms=wait_ms)


class _Tally:
    """How many calls of the window ended, and how many of them failed; counted in slices, so that it stays small."""

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

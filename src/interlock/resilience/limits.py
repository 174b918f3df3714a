"""Rate limits: how many calls all processes on a home together admit within a period.

Theory of operation. Every admitted call appends its time to the log of each limit that covers it, under the next
number. A limit of n in a window w admits a call unless the n-th last entry of its log is younger than w. That one entry
decides, however long the log is, and it also gives the exact time at which the next call will pass. The log is read and
written in the journal's write transaction, of which there is one at a time on a home, and its times are the store's.

A service that answers "not now" is suspended for all callers until the time that it named.

INVARIANT: in no window (t - w, t] are more calls admitted than the limit allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import orjson

from interlock.core.errors import Failure
from interlock.core.formatting import wait
from interlock.core.record import NamedTuple
from interlock.store import breakers, rates

if TYPE_CHECKING:
    from interlock.call.allowances import LoopLimits, RateLimit
    from interlock.call.context import Caller
    from interlock.store.port import Transaction, Unit

EVICT_AT_ONCE = 10_000
# On average, one call in this many prunes the log.
PRUNE_EVERY = 17
# A service cannot request a suspension longer than this.
MAX_SUSPENSION_MS = 86_400_000
# No window is longer than a day (see RateLimit), so older entries are irrelevant.
_LONGEST_WINDOW_MS = 86_400_000


class Bucket(NamedTuple):
    """A rate limit as it applies to one call: its log, the number of calls, the window."""

    key: str
    limit: int
    window_ms: int
    name: str


def buckets(limits: Sequence[RateLimit], *, caller: Caller, tool: str, services: Sequence[str]) -> tuple[Bucket, ...]:
    """Collect every limit that covers a call. Where rules share a log, the lowest limit applies."""
    subjects: dict[str, Sequence[tuple[str, ...]]] = {
        "caller": ((caller.tenant, caller.id),),
        "tenant": ((caller.tenant,),),
        "tool": ((tool,),),
        "service": [(service,) for service in services],
    }
    lowest: dict[str, Bucket] = {}
    for rule in limits:
        if not rule.covers(tool):
            continue
        window_ms = round(rule.window_s * 1000)
        for subject in subjects[rule.per]:
            key = orjson.dumps([rule.per, rule.tools, window_ms, *subject]).decode()
            if key not in lowest or rule.limit < lowest[key].limit:
                lowest[key] = Bucket(key, rule.limit, window_ms, rule.name)
    return tuple(lowest.values())


def check(transaction: Transaction, among: Sequence[Bucket]) -> None:
    """Refuse (E3003) a call that a limit has no room for, with the time until all limits have. Writes nothing."""
    wait_ms, reached = 0, None
    for bucket in among:
        began_ms = transaction.now_ms - bucket.window_ms
        at_ms = rates.nth_last_ms(transaction, bucket.key, bucket.limit)
        if at_ms is not None and at_ms - began_ms > wait_ms:
            wait_ms, reached = at_ms - began_ms, bucket
    if reached is not None:
        raise Failure(
            "E3003",
            f"the limit of {reached.name} is reached; the next call passes in {wait(wait_ms)}",
            details={"rateLimit": reached.name, "limit": reached.limit, "windowMs": reached.window_ms},
            retry_after_ms=wait_ms,
        )


def count(transaction: Transaction, among: Sequence[Bucket]) -> None:
    """Append an admitted call to every log; occasionally drop entries that no limit needs."""
    now_ms = transaction.now_ms
    for key, limit, _, _ in among:
        rates.insert(transaction, key, now_ms)
        if now_ms % PRUNE_EVERY == 0:
            rates.keep_last(transaction, key, limit)


def admit(transaction: Transaction, among: Sequence[Bucket]) -> None:
    """Count a call under every limit, or refuse it (E3003) before anything is written."""
    check(transaction, among)
    count(transaction, among)


def suspend(service: str, until_ms: int) -> Unit[None]:
    """Unit that suspends a service until a time, for a day at most. A suspension can be extended, not shortened."""

    def unit(transaction: Transaction) -> None:
        breakers.suspend(transaction, service, min(until_ms, transaction.now_ms + MAX_SUSPENSION_MS))

    return unit


def check_suspended(transaction: Transaction, services: Sequence[str]) -> None:
    """Refuse (E3504) a call that needs a suspended service. Writes nothing."""
    wait_ms, waiting = 0, None
    for service in services:
        until_ms = breakers.suspended_until(transaction, service)
        if until_ms is not None and until_ms - transaction.now_ms > wait_ms:
            wait_ms, waiting = until_ms - transaction.now_ms, service
    if waiting is not None:
        raise Failure(
            "E3504",
            f"the service `{waiting}` asked for a pause; calls to it are refused for another {wait(wait_ms)}",
            details={"service": waiting},
            retry_after_ms=wait_ms,
        )


def evict(transaction: Transaction) -> int:
    """Remove entries that no limit counts any more and suspensions that have ended, a bounded number at a time."""
    now_ms = transaction.now_ms
    breakers.delete_suspensions(transaction, now_ms)
    return rates.delete_until(transaction, now_ms - _LONGEST_WINDOW_MS, EVICT_AT_ONCE)


class LoopWatch:
    """Detects a caller that is caught in a loop: too many calls in a window, or too many identical ones.

    Windows follow one another and each starts at zero; an anomaly is reported once per window. The counts are those of
    this process. They only cause alerts; no call is refused.
    """

    MAX_COUNTS = 100_000

    def __init__(self, limits: LoopLimits) -> None:
        self._window_s = limits.window_s
        self._odd_calls = limits.calls + 1
        self._odd_same = limits.identical + 1
        self._until = float("-inf")
        self._calls: dict[tuple[str, str], int] = {}
        self._same: dict[tuple[tuple[str, str], str, str], int] = {}

    def seen(self, caller: Caller, tool: str, input_hash: str, now: float) -> str | None:
        """Count a call. Returns a description of the anomaly at the moment when a threshold is
        reached, otherwise None.
        """
        if now >= self._until:
            self._until = now + self._window_s
            self._calls.clear()
            self._same.clear()
        who = (caller.tenant, caller.id)
        calls = self._calls[who] = self._calls.get(who, 0) + 1
        this = (who, tool, input_hash)
        same = self._same[this] = self._same.get(this, 0) + 1
        if same != self._odd_same and calls != self._odd_calls:
            if same == 1 and len(self._same) > self.MAX_COUNTS:
                self._same.clear()
            return None
        what = f"{calls} calls" if calls == self._odd_calls else f"{same} calls of {tool} with the same input"
        return f"`{caller.id}` made {what} within {self._window_s:g} s"

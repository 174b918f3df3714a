"""Retries: the same call, under the same key, until it is clear how it ended.

The `retryable` flag of a failure is the only judge: what is not retryable is never sent again. Delays are drawn with
full jitter, so that clients that failed together do not come back together; a delay that the other side asks for
overrides the draw. Nothing sleeps past the deadline.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Literal

from interlock.core.errors import Failure
from interlock.core.manifest import RetryPolicy
from interlock.core.record import record
from interlock.core.results import Result

BASE_S = 0.1


@record
class Pacing:
    """How long to wait between attempts, and by which clock and dice."""

    monotonic: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    uniform: Callable[[float, float], float]
    base_s: float = BASE_S
    mode: Literal["full", "proportional"] = "full"
    jitter_factor: float = 0.2


def delay_s(policy: RetryPolicy, pacing: Pacing, retry: int) -> float:
    """The delay before retry number `retry` (the first is 1)."""
    capped = min(float(policy.backoff_max_seconds), pacing.base_s * policy.backoff_multiplier ** (retry - 1))
    if pacing.mode == "full":
        return pacing.uniform(0.0, capped)
    return max(0.0, capped + pacing.uniform(-pacing.jitter_factor * capped, pacing.jitter_factor * capped))


def may_retry(failure: Failure, policy: RetryPolicy) -> bool:
    """Whether a failure may be met by sending the same call again."""
    if not failure.retryable or failure.code == "E3208":
        return False  # an approval is waited for, not asked for again and again
    kind, _, status = (failure.native_error_ref or "").partition(":")
    return kind != "http" or not status.isdigit() or int(status) in policy.retry_on_status_codes


async def call_with_retries(
    attempt: Callable[[], Awaitable[Result]],
    policy: RetryPolicy,
    pacing: Pacing,
    *,
    deadline: float,
    on_exhausted: Callable[[Result, int], None],
) -> Result:
    """Attempt until success, a failure that must not be repeated, the attempt limit or the deadline."""
    result = await attempt()
    for retry in range(1, policy.max_attempts + 1):
        if result.error is None or not may_retry(result.error, policy):
            return result
        if retry == policy.max_attempts:
            on_exhausted(result, retry)
            return _exhausted(result, retry)
        asked_ms = result.error.retry_after_ms
        pause = delay_s(policy, pacing, retry) if asked_ms is None else asked_ms / 1000
        if pacing.monotonic() + pause >= deadline:
            return result  # waiting would only find the deadline passed; this is the last word
        await pacing.sleep(pause)
        result = await attempt()
    return result


def _exhausted(result: Result, attempts: int) -> Result:
    last = result.error
    assert last is not None
    details = {"attempts": attempts, "last_error": last.envelope(result.trace_id)}
    return replace(
        result, error=Failure("E3415", f"gave up after {attempts} attempts: {last.message}", details=details)
    )

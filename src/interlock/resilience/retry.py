"""Retries: the same call, under the same idempotency key, until its outcome is known.

The `retryable` flag of a failure alone decides: a failure that is not retryable is never retried. Delays are drawn with
full jitter, so that clients that failed together do not come back together, or with proportional jitter if the policy
says so; a delay that the other side asks for overrides the draw. Nothing sleeps past the deadline. Each attempt has a
deadline of its own (`attempt_deadline`).

There are two places to retry. `call_with_retries` repeats whole calls, which their idempotency key protects from being
carried out twice. `sending` repeats one request to an upstream within a call. An upstream does not know our idempotency
keys: a request that may have reached it is repeated only if doing it twice does no harm. Both share one allowance:
attempts made within a call count when the call is repeated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from interlock.core.errors import Failure
from interlock.core.record import record

if TYPE_CHECKING:
    from interlock.call.results import Result
    from interlock.contract.manifest import RetryPolicy

T = TypeVar("T")

BASE_S = 0.1
# The share of a call's time that its first attempt leaves to the following ones.
RESERVED = 0.2
# An attempt with less than this share of the call's time left could not finish and is not started.
LEAST = 0.01


@record
class Pacing:
    """The clock, the sleep and the random numbers that determine the pause between attempts."""

    monotonic: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    uniform: Callable[[float, float], float]
    base_s: float = BASE_S


def _backoff_s(policy: RetryPolicy, pacing: Pacing, retry: int) -> float:
    return min(float(policy.backoff_max_seconds), pacing.base_s * policy.backoff_multiplier ** (retry - 1))


def longest_delay_s(policy: RetryPolicy, pacing: Pacing, retry: int) -> float:
    """The longest delay that may be drawn before retry number `retry`."""
    return _backoff_s(policy, pacing, retry) * (1.0 if policy.jitter == "full" else 1.0 + policy.jitter_factor)


def delay_s(policy: RetryPolicy, pacing: Pacing, retry: int) -> float:
    """The delay before retry number `retry` (the first is 1)."""
    capped = _backoff_s(policy, pacing, retry)
    if policy.jitter == "full":
        return pacing.uniform(0.0, capped)
    return max(0.0, capped + pacing.uniform(-policy.jitter_factor * capped, policy.jitter_factor * capped))


def attempt_deadline(policy: RetryPolicy, pacing: Pacing, attempt: int, began: float, deadline: float) -> float:
    """Compute the deadline of attempt number `attempt` (the first is 1) that begins now, of a call that began earlier.

    It lies within the call's deadline, which follows from the timeout class. Up to a fifth of the time left is reserved
    for the attempts that the policy still allows, in equal parts, so that one that hangs leaves time for another. Where
    another might not fit into that time, nothing is reserved, so that a caller whose upstream hangs is answered at the
    deadline and not before.
    """
    later = max(0, policy.max_attempts - attempt)
    if later == 0:
        return deadline
    reserved = (deadline - pacing.monotonic()) * RESERVED * later / (policy.max_attempts - 1)
    fits = reserved > longest_delay_s(policy, pacing, attempt) + LEAST * (deadline - began)
    return deadline - reserved if fits else deadline


def http_status(failure: Failure) -> int | None:
    """Return the HTTP status that caused a failure, if there was one."""
    kind, _, status = (failure.native_error_ref or "").partition(":")
    return int(status) if kind == "http" and status.isdigit() else None


def may_retry(failure: Failure, policy: RetryPolicy, status_of: Callable[[Failure], int | None] = http_status) -> bool:
    """Whether the same call may be sent again after a failure."""
    if not failure.retryable or failure.code == "E3208":
        return False  # an approval is waited for, not requested again and again
    if (failure.details or {}).get("left_alone"):
        return False  # the suspension lasts longer than a call should wait
    status = status_of(failure)
    return status is None or status in policy.retry_on_status_codes


def unsent(failure: Failure) -> bool:
    """Whether a failure proves that nothing was sent to the upstream."""
    return failure.details is not None and failure.details.get("sent") is False


async def call_with_retries(
    attempt: Callable[[float], Awaitable[Result]],
    policy: RetryPolicy,
    pacing: Pacing,
    *,
    deadline: float,
    on_exhausted: Callable[[Result, int], None],
) -> Result:
    """Attempt until success, a failure that must not be repeated, the attempt limit or the deadline.

    `attempt` receives the deadline of each attempt.
    """
    attempts, began = 0, pacing.monotonic()
    while True:
        result = await attempt(attempt_deadline(policy, pacing, attempts + 1, began, deadline))
        failure = result.error
        if failure is None or not may_retry(failure, policy):
            return result
        attempts += _attempts_below(failure)
        if attempts >= policy.max_attempts:
            on_exhausted(result, attempts)
            return _exhausted(result, failure, attempts)
        if not await _paused(failure, policy, pacing, attempts, began, deadline):
            return result


async def sending(
    attempt: Callable[[float], Awaitable[T]],
    policy: RetryPolicy,
    pacing: Pacing,
    *,
    deadline: float,
    safe: bool,
    status_of: Callable[[Failure], int | None] = http_status,
) -> T:
    """Send one request to an upstream and return its answer, or raise the last failure with the number of attempts.

    `safe`: doing it twice does no harm, because it is a read or because the upstream promised to do it once under its
    key. A breaker's refusal is not waited out: its purpose is to fail fast. `attempt` receives the deadline of each
    attempt; a request that must not be sent twice has the whole time of the call.
    """
    attempts, reached, began = 0, False, pacing.monotonic()
    while True:
        attempts += 1
        try:
            until = attempt_deadline(policy, pacing, attempts, began, deadline) if safe else deadline
            return await attempt(until)
        except Failure as failure:
            reached = reached or not unsent(failure)
            # INVARIANT: a request that may have been carried out and must not be carried out twice is never sent again.
            again = (safe or not reached) and failure.code != "E3501" and may_retry(failure, policy, status_of)
            more = again and attempts < policy.max_attempts
            if more and await _paused(failure, policy, pacing, attempts, began, deadline):
                continue
            if attempts == 1:
                raise
            raise _after(failure, attempts, reached) from failure


async def _paused(
    failure: Failure, policy: RetryPolicy, pacing: Pacing, retry: int, began: float, deadline: float
) -> bool:
    """Wait until the next attempt is due. Returns False at once if it could not finish in the time left then."""
    asked_ms = failure.retry_after_ms
    pause = delay_s(policy, pacing, retry) if asked_ms is None else asked_ms / 1000
    if pacing.monotonic() + pause >= deadline - LEAST * (deadline - began):
        return False
    await pacing.sleep(pause)
    return True


def _attempts_below(failure: Failure) -> int:
    made = (failure.details or {}).get("attempts")
    return made if isinstance(made, int) and made > 0 else 1


def _after(failure: Failure, attempts: int, reached: bool) -> Failure:
    """Combine failures of several attempts: "not sent" is true only if no attempt was sent."""
    details: Mapping[str, Any] = {**(failure.details or {}), "attempts": attempts, "sent": reached}
    return failure.saying(failure.message, details)


def _exhausted(result: Result, last: Failure, attempts: int) -> Result:
    details = {"attempts": attempts, "last_error": last.envelope(result.trace_id)}
    return replace(
        result, error=Failure("E3415", f"gave up after {attempts} attempts: {last.message}", details=details)
    )

"""Failures of tools, prepared for their callers."""

from __future__ import annotations

from interlock.call.phases import Call
from interlock.core.errors import Failure
from interlock.core.threads import INPUTS
from interlock.data.bounds import LARGE_INPUT
from interlock.gateway.failure_log import FailureLog

# A connector that gives up so shortly before the deadline has waited for it: timers are not exact.
_AT_DEADLINE_S = 0.1


async def clean_failure(failure_log: FailureLog, call: Call, failure: Failure) -> Failure:
    """Return a failure without private values. A large input or message is searched for them in a thread."""
    if len(call.model_input) <= LARGE_INPUT and len(failure.message) <= LARGE_INPUT:
        return failure_log.redact_and_log(call, failure)
    return await INPUTS.run(failure_log.redact_and_log, call, failure)


def at_deadline(call: Call, failure: Failure, now: float) -> Failure:
    """Return E3402 for a connector that waited in vain until the call's deadline. An upstream's own statement, such as
    status 504, stays what it is.
    """
    if failure.code != "E3503" or failure.native_error_ref is not None or call.deadline - now > _AT_DEADLINE_S:
        return failure
    return Failure("E3402", f"{call.ref} ran out of time: {failure.message}", details=failure.details)


def tool_failure(writes: bool, ref: str, error: BaseException) -> Failure:
    """Return the failure that an unexpected exception of a tool means."""
    if isinstance(error, MemoryError):
        return Failure("E3403", f"{ref} ran out of memory")
    # A write that failed unexpectedly may be half done; only a read is safe to send again.
    return Failure("E3401", f"{ref} failed: {type(error).__name__}", retryable=not writes)

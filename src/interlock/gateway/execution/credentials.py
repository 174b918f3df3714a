"""Credentials that are lent to one call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from interlock.call.connector import secret_of
from interlock.call.phases import Call, Lease, Requested
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.gateway.execution.clean_failure import clean_failure
from interlock.gateway.failure_log import FailureLog

# The time for which a rate-limited credential is not used, if its service did not state one.
REST_MS = 60_000


class Credentials:
    """Lends credentials to calls."""

    def __init__(
        self, lend: Callable[[tuple[str, ...], float], Awaitable[Lease]], clock: Clock, failure_log: FailureLog
    ) -> None:
        self._lend = lend
        self._clock = clock
        self._failure_log = failure_log

    async def lend_to(self, requested: Requested) -> None:
        """Give a call the credentials that its manifest names, until it ends."""
        left_s = requested.deadline - self._clock.monotonic()
        caller = requested.request.caller
        # INVARIANT: a secret that is the caller's own is that of nobody else.
        names = tuple(secret_of(name, caller) for name in requested.tool.credentials)
        try:
            requested.more.private = True
            requested.more.lease = await self._lend(names, left_s)
        except Failure as failure:
            # The source of secrets is another system, and its message may contain anything.
            raise await clean_failure(self._failure_log, requested, failure) from failure

    async def note_limit(self, call: Call, failure: Failure) -> None:
        """Stop using the credentials of a call that its service rate-limits. The next call gets others, if any."""
        if call.more.lease is None or call.tool is None or failure.code != "E3504" or call.more.borrowed:
            return
        for name in (secret_of(name, call.request.caller) for name in call.tool.credentials):
            await call.more.lease.rate_limited(name, failure.retry_after_ms or REST_MS)

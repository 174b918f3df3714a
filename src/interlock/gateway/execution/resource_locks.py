"""Lock the resources of a call, and check the state that its caller assumed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from interlock.call.phases import Call, Granted, Requested
from interlock.contract.effects import expected
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.effects.locks import LockRequest, Locks, check_preconditions
from interlock.gateway.execution.cancellation import Cancellation
from interlock.gateway.execution.effect_audit import EffectAudit
from interlock.gateway.failure_log import FailureLog
from interlock.gateway.handlers import consult
from interlock.gateway.persistence.sessions import session_id


class ResourceLocks:
    """Locks the resources that calls change, observe or depend on."""

    def __init__(
        self, locks: Locks, audit: EffectAudit, cancellation: Cancellation, clock: Clock, failure_log: FailureLog
    ) -> None:
        self._locks = locks
        self.leased = locks.leased
        self._audit = audit
        self._cancellation = cancellation
        self._clock = clock
        self._failure_log = failure_log

    def needed(self, granted: Granted) -> bool:
        """Whether a read needs locks as a write does: a call below another, and every one while effects are audited."""
        return self._audit.active or granted.request.parent is not None

    async def hold(self, granted: Granted) -> None:
        """Lock the predicted and the stated resources of a call, then check its preconditions."""
        call, tool = granted, granted.tool
        requests = [
            *[
                _lock_on(call, one.resource) if one.resource.startswith("session:") else LockRequest(one.resource)
                for one in call.more.predicted
            ],
            *self._audit.lock_requests,
        ]
        preconditions = tool.contract.manifest.preconditions
        stated = expected(preconditions, granted.input) if preconditions else ()
        requests += [LockRequest(resource, "read") for resource, _ in stated]
        call.more.held = held = await self._locks.hold(call.id, requests, granted.deadline, call.request.parent)
        if requests:
            held.on_expiry = partial(self._cancellation.stop, call.id, "expired")
        if stated and call.request.operation == "invoke":
            try:
                await self._check_preconditions(granted, stated)
            except BaseException:
                held.rest()
                raise

    def rest(self, call: Call) -> None:
        """Note that the tool of a call has ended. Its locks are held until its outcome is on record."""
        if call.more.held is not None and not call.more.runs_on:
            call.more.held.rest()

    def close(self) -> None:
        """Release all locks of this process."""
        self._locks.close()

    async def _check_preconditions(self, requested: Requested, stated: Sequence[tuple[str, str]]) -> None:
        """Refuse a call whose assumed state is out of date. From here on only this call can change that state."""
        look = requested.tool.handler("version_of")
        assert look is not None
        now: dict[str, str | None] = {}
        try:
            for resource in {resource for resource, _ in stated}:
                found = await consult(look, requested.deadline - self._clock.monotonic(), resource)
                now[resource] = None if found is None else str(found)
            check_preconditions(stated, now)
        except Failure as failure:
            raise self._failure_log.redact_and_log(requested, failure) from failure


def _lock_on(call: Call, resource: str) -> LockRequest:
    """Return the exclusive lock on a resource of a session, which is one of that session only."""
    name = resource.removeprefix("session:")
    if call.request.caller is None:
        return LockRequest(resource)
    return LockRequest(f"session:{session_id(call.request.caller, call.request.session).hex()}/{name}")

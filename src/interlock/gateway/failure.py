"""Close calls that fail. A failure is a result too, and on record like any other."""

from __future__ import annotations

import asyncio

from interlock.call.phases import Call
from interlock.call.results import Result
from interlock.core.errors import Failure
from interlock.gateway.execute import Execution
from interlock.gateway.execution.cancellation import Cancellation
from interlock.gateway.failure_log import FailureLog
from interlock.gateway.hooks import Hooks
from interlock.gateway.results.outcome import terminal_state
from interlock.gateway.results.record_failure import FailureWriter
from interlock.telemetry.trace import Recording


class FailedCalls:
    """Closes failed calls, whatever breaks meanwhile."""

    def __init__(
        self,
        failure_log: FailureLog,
        hooks: Hooks,
        cancellation: Cancellation,
        execution: Execution,
        writer: FailureWriter,
    ) -> None:
        self._failure_log = failure_log
        self._hooks = hooks
        self._cancellation = cancellation
        self._execution = execution
        self._writer = writer

    async def close(self, call: Call, failure: Failure) -> Result:
        """Close a failed call. Hooks and the disk take time, and cancelling the caller stops neither."""
        closing = asyncio.ensure_future(self._close(call, failure))
        try:
            return await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait({closing})
            if not closing.cancelled() and self._cancellation.was_called_off(call):
                return closing.result()  # it had failed before it was called off
            raise
        finally:
            # The failure has been logged. Its frames refer to everything that the function held.
            failure.__cause__ = failure.__context__ = failure.__traceback__ = None

    async def _close(self, call: Call, failure: Failure) -> Result:
        """Record a failure and return it as a result.

        INVARIANT: whatever breaks while a call is closed, the call ends, on record, and its key is settled.
        """
        try:
            return await self._record(call, failure)
        except Exception as error:  # noqa: BLE001 - from a report of the tool, a hook or the disk
            self._failure_log.log(call, "the call could not be closed", error)
            return await self._writer.end(call, error)

    async def _record(self, call: Call, failure: Failure) -> Result:
        if self._hooks.registered and call.state in ("running", "partial_result", "yielded"):
            await self._hooks.after_failure(call, failure)
        if call.more.hook_outputs:
            self._hooks.redact_outputs(call)
        if call.id != call.own_id and not call.more.used:
            # The approval was not used, so this attempt is not the call that it was given for.
            self._execution.release(call)
            call.id, call.extend().approval = call.own_id, None
        if isinstance(call.more.span, Recording):
            call.more.span.fail(failure)
        if call.phases[-1] != "return":
            call.phases.append("return")
        return await self._writer.fail(call, failure, terminal_state(failure, call.state))

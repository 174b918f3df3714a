"""Phase 2. Check that the input fits the contract. A refusal lists everything that is wrong with it."""

from __future__ import annotations

from typing import cast

from interlock.call.phases import Checked, Requested
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.threads import INPUTS
from interlock.data.bounds import LARGE_INPUT
from interlock.data.canonical import decode, private_copy
from interlock.data.schema import Json
from interlock.gateway.failure_log import FailureLog
from interlock.gateway.hooks import Hooks
from interlock.gateway.input_checks import check_input, check_key, check_meaning
from interlock.gateway.observe import Observer
from interlock.gateway.paging import Cursors
from interlock.gateway.redaction import CallRedaction


class Validator:
    """Validates the inputs of calls."""

    def __init__(
        self,
        *,
        clock: Clock,
        observer: Observer,
        redaction: CallRedaction,
        failure_log: FailureLog,
        hooks: Hooks,
        cursors: Cursors,
    ) -> None:
        self._clock = clock
        self._observer = observer
        self._redaction = redaction
        self._failure_log = failure_log
        self._hooks = hooks
        self._cursors = cursors

    async def validate(self, requested: Requested) -> Checked:
        """Check the input against the contract, run the tool's own checks, and run the pre-hooks."""
        call, tool = requested, requested.tool
        call.phases.append("validate")
        if call.request.operation == "compensate":
            check_key(requested)
            arguments: Json = decode(requested.model_input)
            call.input = arguments
        else:
            assert isinstance(call.request.arguments, dict)
            given = call.request.arguments
            # One that is not large cannot contain more private values than a call may have.
            large = len(requested.model_input) > LARGE_INPUT
            if not large and (tool.writes or tool.has_checks or self._hooks.registered):
                # INVARIANT: code outside of Interlock has no reference to the input that is checked from here on. A
                # plain read runs at once, so there is no moment at which its caller could change the input.
                given = private_copy(given)
            if tool.paged:
                given = self._cursors.restore(requested, given)
            if large and self._redaction.has_private_values(call):
                await INPUTS.run(self._redaction.check_private_values, call)
            try:
                arguments = await INPUTS.run(check_input, call, given) if large else check_input(requested, given)
            except Failure as failure:
                redact = self._redaction.redact_failure
                raise await INPUTS.run(redact, call, failure) if large else redact(call, failure) from None
            call.input = arguments
            if tool.has_checks:
                await self._check_meaning(requested, arguments)
        call.move("arguments_ready")
        if self._observer.audience:
            self._observer.emit("tool.invocation.arguments_ready", call)
        if self._hooks.registered:
            before = arguments
            arguments = await self._hooks.before(requested, arguments)
            if tool.has_checks and arguments != before:
                await self._check_meaning(requested, arguments)
        call.extend().private = self._redaction.has_private_values(call)
        return cast("Checked", requested)

    async def _check_meaning(self, requested: Requested, arguments: Json) -> None:
        left_s = requested.deadline - self._clock.monotonic()
        try:
            await check_meaning(requested.tool, arguments, left_s)
        except Failure as failure:
            raise self._failure_log.redact_and_log(requested, failure) from failure

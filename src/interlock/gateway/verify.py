"""Phase 5. Check that the result fits its contract and that the effect is confirmed, and redact the result."""

from __future__ import annotations

from typing import Any, cast

import orjson

from interlock.call.phases import Ran, Verified
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.threads import INPUTS, WALKS
from interlock.data.bounds import LARGE, LARGE_INPUT, size_of
from interlock.gateway.failure_log import FailureLog
from interlock.gateway.observe import Observer
from interlock.gateway.paging import Cursors
from interlock.gateway.redaction import CallRedaction
from interlock.gateway.results import map_output
from interlock.gateway.results.confirm_effects import confirm_effects
from interlock.gateway.results.outputs import Outputs
from interlock.gateway.results.replay import Replays
from interlock.privacy.scrub import scrubbed_at

_MOST_PLACES = 5


class ResultVerifier:
    """Verifies calls whose tools have run."""

    def __init__(
        self,
        *,
        clock: Clock,
        observer: Observer,
        redaction: CallRedaction,
        failure_log: FailureLog,
        outputs: Outputs,
        replays: Replays,
        cursors: Cursors,
    ) -> None:
        self._clock = clock
        self._observer = observer
        self._redaction = redaction
        self._failure_log = failure_log
        self._outputs = outputs
        self._replays = replays
        self._cursors = cursors

    async def verify(self, ran: Ran) -> Verified:
        """Check, redact and page the output of a call."""
        call, tool = ran, ran.tool
        call.phases.append("verify")
        source = call.more.source
        if source == "replay":
            return await self._replays.recall(ran)
        if source == "preview" or call.request.operation == "compensate":
            value = self._redaction.redact_data(call, ran.output) if source == "preview" else None
            ran.value, ran.encoded = value, orjson.dumps(value)
            return cast("Verified", ran)
        # The private values of the input are searched for in the result, so a large input needs a thread as well.
        large = len(call.model_input) > LARGE_INPUT
        small = size_of(ran.output, LARGE, map_output.MOST_STEPS) <= LARGE
        most = self._outputs.most_bytes(tool)
        threads = WALKS if not small else INPUTS if large else None
        try:
            value, removed = (
                self._mapped(ran, most, small) if threads is None else await threads.run(self._mapped, ran, most, small)
            )
        except Failure as failure:
            if failure.code != "E3303":
                raise
            bare = self._redaction.redact_failure(call, failure)
            at = [fault["pointer"] for fault in (bare.details or {}).get("faults", ())]
            self._observer.alert((failure.details or {})["violation"], call, at=at)
            raise bare from failure
        if call.more.attestations or tool.has_verifier:
            try:
                await confirm_effects(tool, ran, value, ran.deadline - self._clock.monotonic())
            except Failure as failure:
                raise self._failure_log.redact_and_log(call, failure) from failure
        redact = self._outputs.redact
        verified = redact(ran, value, most) if threads is None else await threads.run(redact, ran, value, most)
        if removed:
            verified.extend().redacted = tuple(dict.fromkeys((*removed, *verified.more.redacted)))
        if tool.paged:
            verified = self._cursors.split(verified)
        if call.more.files:
            verified.extend().artifacts = await self._outputs.refer(call)
        return verified

    def _mapped(self, ran: Ran, most: int, small: bool) -> tuple[Any, tuple[str, ...]]:
        """Return an output as its contract describes it, and the places where private values were removed."""
        tool = ran.tool
        try:
            value = map_output.map_output(tool, ran.output, most, small=small)
            if ran.more.faults:
                raise map_output.violation(tool, ran.more.faults)
        except Failure as failure:
            details = failure.details or {}
            if not tool.contract.tolerates_off_schema or details.get("violation") != "TOOL_OUTPUT_SCHEMA_VIOLATION":
                raise
            places = ", ".join(fault["pointer"] or "/" for fault in details["faults"][:_MOST_PLACES])
            ran.extend().warnings.append(f"OUTPUT_OFF_SCHEMA at={places}")
            value = ran.output  # JSON data already: the connector of its upstream made it
        if not ran.more.private:
            return value, ()
        # INVARIANT: a credential that was lent or sent never leaves with the result.
        bare = self._redaction.without_private_values(ran, value, keep=tool.members)
        return bare, () if bare is value else tuple(scrubbed_at(value, bare))

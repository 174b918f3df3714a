"""Phase 6. Record how a call succeeded, then return its result.

A plain read leaves only a closing record. Every other success is written by `record_success`, failures are written by
`record_failure`, and a call that ran before is answered by `replay`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from interlock.call.results import INLINE, Persistence, Result
from interlock.data.bounds import is_longer
from interlock.gateway.results import outcome
from interlock.gateway.results.placement import persistence_of
from interlock.store import records

if TYPE_CHECKING:
    from interlock.call.phases import Call, Verified
    from interlock.core.clock import Clock
    from interlock.gateway.allowances import Allowances
    from interlock.gateway.observe import Observer
    from interlock.gateway.persistence.inputs import InputStore
    from interlock.gateway.results.metadata import ResultMetadata
    from interlock.gateway.results.outputs import Outputs
    from interlock.gateway.results.record_success import SuccessWriter
    from interlock.gateway.results.replay import Replays
    from interlock.settings import Settings
    from interlock.store.port import Store
    from interlock.store.started_reads import StartedReads


class Finisher:
    """Closes calls that succeeded."""

    def __init__(
        self,
        *,
        journal: Store,
        clock: Clock,
        settings: Settings,
        observer: Observer,
        allowances: Allowances,
        inputs: InputStore,
        outputs: Outputs,
        metadata: ResultMetadata,
        success: SuccessWriter,
        replays: Replays,
        started: StartedReads,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._observer = observer
        self._allowances = allowances
        self._inputs = inputs
        self._outputs = outputs
        self._metadata = metadata
        self._success = success
        self._replays = replays
        self._started = started
        self._batched = settings.audit == "batched"

    async def succeed(self, verified: Verified) -> Result:
        """Record a success, then return its result."""
        call, tool = verified, verified.tool
        call.phases.append("return")
        if call.more.source == "replay":
            return await self._replays.close(verified)
        redacted = call.more.redacted
        most, encoded = tool.max_inline, verified.encoded
        large = most is not None and len(encoded) > most and is_longer(encoded, most)
        persistence = persistence_of(verified, redacted=bool(redacted)) if large or redacted else INLINE
        metadata = self._metadata.of(call)
        now_ms = self._clock.now_ms()
        context = call.more.context
        if context is not None and context.attached:
            self._metadata.attach(call, context.attached, now_ms, metadata)
        if call.more.provenance:
            metadata |= self._outputs.cleaned_facts(call, call.more.provenance)
        if (
            not tool.writes and persistence.ref is None and not call.more.noted and not call.more.files
            and (context is None or outcome.left_nothing(call, metadata))
            and not self._allowances.counts(call)
            and not ((call.more.mutations or self._inputs.keeps_all) and self._inputs.wanted(call))
        ):  # fmt: skip
            body = records.closed_read(call, now_ms, metadata["latency_ms"], call.more.source, verified)
            batched = self._batched and not self._journal.crowded
            if not batched or not self._started.answer(call.id, body, self._journal.record):
                written = self._journal.append("closed", call.id, body, awaited=not batched)
                call.recorded = True
                await written
        else:
            withheld = await self._success.write(verified, persistence, now_ms, metadata)
            if withheld and persistence.ref is not None:
                persistence = replace(persistence, decision="link", reason=withheld)
        call.move("succeeded")
        self._observer.closed(call, metadata, call.more.source)
        if self._observer.audience:
            self._announce(call, persistence, redacted)
        # Positional on purpose: keyword construction costs about 50 % more here.
        return Result(
            call.id, tool.ref, "succeeded", now_ms, call.trace_id, metadata, verified.value, None, call.more.source,
            persistence, redacted, call.more.artifacts,
        )  # fmt: skip

    def _announce(self, call: Call, persistence: Persistence, redacted: tuple[str, ...]) -> None:
        if persistence.ref is not None:
            self._observer.emit("tool.result.persisted", call, **persistence.document(call.id))
        if redacted:
            self._observer.emit("tool.result.redacted", call, paths=list(redacted))
        self._observer.emit("tool.invocation.succeeded", call)
        self._observer.emit("tool.result.created", call)

"""Build what verifies and records the outcomes of calls."""

from __future__ import annotations

from interlock.api.wiring.shared import Outside, Shared
from interlock.gateway.finish import Finisher
from interlock.gateway.results.metadata import ResultMetadata
from interlock.gateway.results.outputs import Outputs
from interlock.gateway.results.record_failure import FailureWriter
from interlock.gateway.results.record_success import SuccessWriter
from interlock.gateway.results.replay import Replays
from interlock.gateway.results.unrecorded import UnrecordedOutcomes
from interlock.gateway.results.waiting import PendingResults
from interlock.gateway.verify import ResultVerifier
from interlock.store.started_reads import StartedReads


class Returning:
    """The Verify and Return phases."""

    def __init__(self, outside: Outside, shared: Shared) -> None:
        journal, clock, settings = outside.journal, outside.clock, outside.settings
        observer, redaction, failure_log = shared.observer, shared.redaction, shared.failure_log
        allowances, storage = shared.allowances, shared.storage
        self.outputs = outputs = Outputs(outside.redactor, settings, observer, redaction, clock.random_bytes)
        self.unrecorded = unrecorded = UnrecordedOutcomes(journal, clock, observer)
        metadata = ResultMetadata(clock, observer, redaction, outputs)
        replays = Replays(journal, clock, observer, storage, outputs, metadata)
        self.verifier = ResultVerifier(
            clock=clock,
            observer=observer,
            redaction=redaction,
            failure_log=failure_log,
            outputs=outputs,
            replays=replays,
            cursors=outside.cursors,
        )
        self.started = StartedReads(outside.instance.home.instances, outside.instance.id)
        self.pending = PendingResults(clock, metadata, outside.box)
        self.finisher = Finisher(
            journal=journal,
            clock=clock,
            settings=settings,
            observer=observer,
            allowances=allowances,
            inputs=storage.inputs,
            outputs=outputs,
            metadata=metadata,
            success=SuccessWriter(redaction, allowances, storage, outputs, metadata, unrecorded),
            replays=replays,
            started=self.started,
        )
        self.failures = FailureWriter(
            journal=journal,
            clock=clock,
            observer=observer,
            failure_log=failure_log,
            allowances=allowances,
            storage=storage,
            outputs=outputs,
            metadata=metadata,
            unrecorded=unrecorded,
        )

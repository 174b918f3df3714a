"""Record how a call failed: in one transaction with its idempotency key, the changes it reported, and its cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.call.results import Result
from interlock.contract.standard.states import MOVES, State
from interlock.core.errors import Failure
from interlock.core.record import record
from interlock.data.schema import Json
from interlock.gateway import idempotency, reconcile
from interlock.gateway.allowances import Allowances
from interlock.gateway.persistence.storage import CallStorage
from interlock.gateway.results import outcome
from interlock.gateway.results.metadata import ResultMetadata
from interlock.gateway.results.outcome import stored, unsettled
from interlock.gateway.results.outputs import Outputs
from interlock.gateway.results.unrecorded import UnrecordedOutcomes
from interlock.store import records

if TYPE_CHECKING:
    from interlock.authority.budgets import Overrun
    from interlock.call.phases import Call, Source
    from interlock.core.clock import Clock
    from interlock.gateway.failure_log import FailureLog
    from interlock.gateway.observe import Observer
    from interlock.store.port import Store, Transaction, Unit

_EVENT_OF_STATE: dict[State, str] = {
    "canceled": "canceled",
    "timed_out": "timed_out",
    "validation_failed": "validation_failed",
}


class FailureWriter:
    """Records failures."""

    def __init__(
        self,
        *,
        journal: Store,
        clock: Clock,
        observer: Observer,
        failure_log: FailureLog,
        allowances: Allowances,
        storage: CallStorage,
        outputs: Outputs,
        metadata: ResultMetadata,
        unrecorded: UnrecordedOutcomes,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._observer = observer
        self._failure_log = failure_log
        self._allowances = allowances
        self._storage = storage
        self._outputs = outputs
        self._metadata = metadata
        self._unrecorded = unrecorded

    async def fail(self, call: Call, failure: Failure, state: State) -> Result:
        """Record a failure, then return it as a result."""
        now_ms = self._clock.now_ms()
        settlement = outcome.settlement(call, failure, state)
        if settlement == "unknown":
            failure = unsettled(call, failure)
        elif outcome.effect_stands(call):
            failure = outcome.carried_out(call, failure)
        cause = outcome.synthetic_cause(call, failure, state)
        source: Source = "compute" if cause is None else "synthetic"
        extra: Json = {} if settlement is None else {"outcome": settlement}
        if failure.details is not None and "replay_of" in failure.details:
            source, extra["replayOf"] = "replay", failure.details["replay_of"]
        metadata = self._metadata.of(call)
        if cause is not None:
            metadata["synthetic_cause"] = extra["syntheticCause"] = cause
        # A tool that still runs goes on costing, so what it set aside stays set aside until it ends.
        counted = (call.more.used or call.launched) and not call.more.runs_on and self._allowances.counts(call)
        cost = self._allowances.charge(call, metadata, extra) if counted else None
        reported = () if call.more.context is None else call.more.context.changes
        changes = self._outputs.writable(call, (*reported, *call.more.detected))

        common = records.head(call, now_ms)

        def record(withheld_inputs: Json, failure: Failure = failure) -> bytes:
            return records.closed(
                call, now_ms, state=state, latency_ms=metadata["latency_ms"], source=source, summary=None,
                failure=failure, effects=changes, extra={**extra, **withheld_inputs}, common=common,
            )  # fmt: skip

        body = record({})
        # Changes that were reported or detected before the failure have happened, so they are recorded too.
        sent = await self._storage.inputs.prepare(call)
        values = None if call.tool is None or not changes else self._outputs.private_values(call, call.tool)
        mutations = [] if values is None else [records.mutation(call, common, one, values.shown) for one in changes]

        def unit(transaction: Transaction) -> _Written:
            ended_before = False
            if call.more.scope is not None and settlement is not None:
                # INVARIANT: a success that is on record, or a late outcome, is never overwritten by how the wait ended.
                ended_before = not idempotency.is_open(transaction, call.more.scope, call.id)
                if not ended_before:
                    done = settlement == "done"
                    result = self._storage.outcomes.seal(transaction, call.id, stored(failure)) if done else None
                    idempotency.settle(transaction, call.more.scope, call.id, settlement, result)
                elif call.recorded:
                    return _Written(ended_before=True)
            elif call.recorded and transaction.has("closed", call.id):
                return _Written(ended_before=False)
            elif call.more.noted:
                reconcile.end(transaction, call.id)
            booked = self._allowances.settle(transaction, call, cost)
            if values is not None and call.request.caller is not None:
                self._storage.changes.store(transaction, call.id, call.request.caller, values)
            withheld_inputs = {} if ended_before else self._storage.inputs.store(transaction, call, sent)
            for mutation in mutations:
                transaction.append("mutation", call.id, mutation)
            document = record(withheld_inputs) if withheld_inputs else body
            transaction.append("closed", call.id, records.with_budgets(document, booked.rows))
            return _Written(ended_before=ended_before, overrun=booked.overrun)

        written, failure = await self._record_failure(call, failure, unit)
        self._storage.inputs.abandon(sent)
        self._allowances.alert_overrun(call, written.overrun)
        self._allowances.note_limit(call, failure)
        call.move(state)
        if settlement == "unknown" and not written.ended_before:
            self._unrecorded.alert_unknown(call)
        self._observer.closed(call, metadata, source, failure)
        if self._observer.has_listeners(call) and self._observer.is_first_end(call.id):
            event = _EVENT_OF_STATE.get(state, "failed")
            self._observer.emit(f"tool.invocation.{event}", call, error_code=failure.code)
            self._observer.emit("tool.result.created", call)
        return Result(
            invocation_id=call.id,
            tool=call.ref,
            state=state,
            created_ms=now_ms,
            trace_id=call.trace_id,
            metadata=metadata,
            error=outcome.with_cause(call, failure, cause),
            source=source,
        )

    async def end(self, call: Call, error: Exception) -> Result:
        """End a call that could not be closed, with a record that contains nothing from its tool.

        Closing a call reads, redacts and writes what the tool reported, so a report can break it. Whatever broke it,
        the call ends here and its key is settled: as unknown if the tool ran, since what it did is not on record.
        """
        now_ms = self._clock.now_ms()
        withheld = isinstance(error, Failure) and error.code == "E3304"
        words = "what the call reported could not be redacted" if withheld else "something went wrong inside Interlock"
        failure = Failure("E3304" if withheld else "E3000", f"{words} while the call was closed")
        settlement = outcome.broken(call)
        if settlement == "unknown":
            failure = unsettled(call, failure)
        latency_ms = call.latency_ms(self._clock.monotonic())
        body = records.ended(call, now_ms, failure, settlement, latency_ms)

        def unit(transaction: Transaction) -> _Written:
            if transaction.has("closed", call.id):
                return _Written(ended_before=True)
            if call.more.scope is not None and settlement is not None:
                if idempotency.is_open(transaction, call.more.scope, call.id):
                    idempotency.settle(transaction, call.more.scope, call.id, settlement, None)
            elif call.more.noted:
                reconcile.end(transaction, call.id)
            booked = self._allowances.keep(transaction, call)
            transaction.append("closed", call.id, records.with_budgets(body, booked.rows))
            return _Written(ended_before=False)

        try:
            written, failure = await self._record_failure(call, failure, unit)
        except Exception as error:  # noqa: BLE001 - a journal that breaks in an unforeseen way
            # INVARIANT: no exception leaves a call. Its idempotency key stays open, and the call is not run again.
            self._failure_log.log(call, "the end of the call could not be recorded", error)
            written = _Written(ended_before=False)
        if "failed" in MOVES[call.state]:
            call.move("failed")
        if settlement == "unknown" and not written.ended_before:
            self._unrecorded.alert_unknown(call)
        if self._observer.has_listeners(call) and self._observer.is_first_end(call.id):
            self._observer.emit("tool.invocation.failed", call, error_code=failure.code)
            self._observer.emit("tool.result.created", call)
        metadata: Json = {"latency_ms": latency_ms}
        return Result(
            invocation_id=call.id,
            tool=call.ref,
            state="failed",
            created_ms=now_ms,
            trace_id=call.trace_id,
            metadata=metadata,
            error=failure,
        )

    async def _record_failure(self, call: Call, failure: Failure, unit: Unit[_Written]) -> tuple[_Written, Failure]:
        """Commit the record of a failure. Returns the failure to report: this one, or that it could not be written."""
        if failure.code == "E3409" and call.more.scope is not None:
            # The closing that failed is written later, and will say how the call really ended.
            return _Written(ended_before=False), failure
        try:
            if call.more.scope is not None:
                written = await self._unrecorded.write(call, unit)
            else:
                written = await self._journal.commit(unit)
        except Failure as unwritten:
            # A failure of the journal is reported as it is; any other is replaced by the failure to record it.
            reported = failure if failure.code in ("E3801", "E3803") else unwritten
            return _Written(ended_before=False), reported
        return written, failure


@record
class _Written:
    """The effect of the write that closes a failed call: whether the call had ended before, and budgets it overran."""

    ended_before: bool
    overrun: tuple[Overrun, ...] = ()

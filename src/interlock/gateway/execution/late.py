"""Record the outcome of a write that ends after its call was cut off, so that it is no longer unknown."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from interlock.core.errors import Failure
from interlock.core.threads import WALKS
from interlock.data.bounds import LARGE, size_of
from interlock.gateway import idempotency
from interlock.gateway.allowances import Allowances
from interlock.gateway.failure_log import FailureLog
from interlock.gateway.persistence.pieces import Sealed
from interlock.gateway.persistence.storage import CallStorage
from interlock.gateway.results.map_output import MOST_STEPS, map_output
from interlock.gateway.results.outcome import stored
from interlock.gateway.results.outputs import Outputs
from interlock.gateway.results.placement import payload_ref, persistence_of, result_hash
from interlock.gateway.results.unrecorded import UnrecordedOutcomes
from interlock.store import idempotency as idempotency_rows
from interlock.store import records

if TYPE_CHECKING:
    from interlock.call.executor import Unfinished
    from interlock.call.phases import Granted, Ran, Verified
    from interlock.core.clock import Clock
    from interlock.data.schema import Json
    from interlock.store.port import Transaction


class LateOutcomes:
    """Waits for writes that continue after their calls were cut off, and records how they ended."""

    def __init__(
        self,
        clock: Clock,
        failure_log: FailureLog,
        allowances: Allowances,
        storage: CallStorage,
        outputs: Outputs,
        unrecorded: UnrecordedOutcomes,
    ) -> None:
        self._clock = clock
        self._failure_log = failure_log
        self._allowances = allowances
        self._storage = storage
        self._outputs = outputs
        self._unrecorded = unrecorded
        self._settling: set[asyncio.Task[None]] = set()

    def watch(self, granted: Granted, tool: Unfinished) -> None:
        """Record the outcome of a call when its tool ends. If the loop is closed by then, it stays unknown, and
        reconcile lists it.
        """
        tool.listeners.append(lambda: self._settle(granted, tool))

    async def close(self) -> None:
        """Wait until every outcome that is being recorded is on record."""
        while self._settling:
            await asyncio.wait(self._settling)

    def _settle(self, granted: Granted, done: Unfinished) -> None:
        if granted.more.held is not None:
            granted.more.held.rest()
        task = asyncio.ensure_future(self._record(granted, done))
        self._settling.add(task)

        def settled(task: asyncio.Task[None]) -> None:
            self._settling.discard(task)
            if granted.more.held is not None:
                granted.more.held.release()
            if not task.cancelled() and (error := task.exception()) is not None:
                self._failure_log.log(granted, "the late outcome of the call could not be recorded", error)

        task.add_done_callback(settled)

    async def _record(self, granted: Granted, done: Unfinished) -> None:
        """Record the outcome of a write that was cut off; later, like any closing, if it cannot be written now."""
        call, scope, caller, storage = granted, granted.more.scope, granted.request.caller, self._storage
        assert scope is not None
        assert caller is not None
        bodies, for_the_key = dict[str, bytes](), None
        facts: Json = {}
        try:
            verified = await self._result(granted, done)
        except Failure as failure:
            outcome = stored(self._failure_log.redact_and_log(call, failure))
        else:
            persistence = persistence_of(verified, redacted=False)
            size = len(verified.encoded)
            ref = payload_ref(call, persistence, size)
            outcome = {
                "value": verified.value if ref is None else None,
                "persistence": [persistence.decision, ref, size, persistence.reason],
                "redacted": verified.more.redacted,
                "metadata": {"late": True},
            }
            facts["resultHash"] = await result_hash(verified)
            if ref is not None:
                bodies[ref] = verified.encoded
            for_the_key = ref if persistence.ref is None else None
        facts |= {"succeeded": "error" not in outcome, "traceId": call.trace_id}
        cost = self._allowances.charge(call, {}, facts) if self._allowances.counts(call) else None
        now_ms = self._clock.now_ms()
        body = records.about("late", call, now_ms, **facts)

        def unit(transaction: Transaction, ahead: Mapping[str, Sealed]) -> None:
            booked = self._allowances.settle(transaction, call, cost)
            if idempotency_rows.state_of_call(transaction, scope, call.id) in ("unknown", "executing"):
                withheld = storage.payloads.why_withheld(transaction, caller, bodies) if bodies else ""
                idempotency.settle(
                    transaction, scope, call.id, "done", storage.outcomes.seal(transaction, call.id, outcome)
                )
                storage.payloads.store(transaction, call, bodies, withheld, ahead, for_the_key)
                transaction.append("late", call.id, records.with_budgets(body, booked.rows))
            elif booked.rows:
                # A person settled the call meanwhile. Its cost counts all the same.
                spent = records.about("authority", call, now_ms, act="cost.late", by="interlock", **facts)
                transaction.append("authority", call.id, records.with_budgets(spent, booked.rows))

        try:
            ahead = await storage.payloads.write_ahead(caller, bodies, strict=False)
            await self._unrecorded.write(call, lambda transaction: unit(transaction, ahead))
        except Failure as failure:
            if failure.code != "E3409":
                raise  # `settled` logs it; the outcome stays unknown, and its idempotency key blocked
            # The closing is written later, and that has been logged.
        finally:
            storage.payloads.abandon(bodies)

    async def _result(self, granted: Granted, done: Unfinished) -> Verified:
        """Return the output of a write that was cut off, checked and redacted."""
        try:
            output = done.result()
        except Failure:
            raise
        except BaseException as error:  # noqa: BLE001 - the tool may raise anything, SystemExit too
            raise Failure("E3401", f"{granted.ref} failed: {type(error).__name__}") from None

        def walk() -> Verified:
            most = self._outputs.most_bytes(granted.tool)
            value = map_output(granted.tool, output, most)
            # The credentials of a lease are void by now, so they cannot be searched for in the output.
            return self._outputs.redact(cast("Ran", granted), value if granted.more.lease is None else None, most)

        try:
            return walk() if size_of(output, LARGE, MOST_STEPS) <= LARGE else await WALKS.run(walk)
        except Failure:
            raise
        except Exception as error:  # noqa: BLE001 - the output is the tool's, and reading it may raise anything
            raise Failure("E3401", f"{granted.ref} failed: {type(error).__name__}") from None

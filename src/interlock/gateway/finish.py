"""Phase 6. Whatever the outcome, it is on record before it is told.

One write closes a call: the idempotency record, the session's state, the mutation records, a payload too large to
travel, the files it left, the means to undo, and the closing record. They commit together or not at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from interlock.approvals.ticket import Ticket
from interlock.authority.budgets import Booked, Overrun
from interlock.call.allowances import MILLION
from interlock.call.artifacts import Artifact, recalled, refer
from interlock.call.cost import FREE, Cost
from interlock.call.phases import Call, Granted, Ran, Source, Verified
from interlock.call.prepared import Prepared
from interlock.call.results import INLINE, Persistence, Result, without_private_fields
from interlock.contract.attached import Attached, binary, cleaned, handoffs
from interlock.contract.effects import Change
from interlock.contract.standard.states import MOVES, State
from interlock.core.clock import Clock, iso
from interlock.core.errors import Failure
from interlock.core.record import record
from interlock.core.threads import WALKS
from interlock.data.bounds import LARGE, result_too_large
from interlock.data.canonical import decode, digest, encode
from interlock.data.schema import Json
from interlock.effects.session import SessionState
from interlock.gateway import idempotency, outcome, reconcile, verify
from interlock.gateway.allowances import Allowances
from interlock.gateway.observe import Observer
from interlock.gateway.outcome import stored, unsettled
from interlock.gateway.persistence import Kept, PrivateValues, Sealed, compensation, owner_of, session_id
from interlock.gateway.preview_diff import broken_promises
from interlock.privacy.redact import Redactor, SchemaRedactor
from interlock.privacy.scrub import holds
from interlock.settings import Settings
from interlock.store import idempotency as idempotency_rows
from interlock.store import records
from interlock.store.port import Store, Transaction, Unit
from interlock.store.sealing import Box

T = TypeVar("T")
_log = logging.getLogger("interlock.gateway")

# What of the metadata is part of a result, and is told again with a replay.
_ATTACHED = ("content", "views", "handoffs", "data_version", "confidence")
_EVENT_OF_STATE: dict[State, str] = {
    "canceled": "canceled",
    "timed_out": "timed_out",
    "validation_failed": "validation_failed",
}


class Closer:
    """Closes calls."""

    def __init__(
        self,
        journal: Store,
        clock: Clock,
        redactor: Redactor,
        settings: Settings,
        observer: Observer,
        allowances: Allowances,
        box: Box,
        process: str,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._redactor = redactor
        self._settings = settings
        self._observer = observer
        self._allowances = allowances
        self.kept = Kept(journal, observer, settings, box, process)
        self._batched = settings.audit == "batched"
        self._keeps_all_inputs = settings.keep_inputs == "always"
        self._redactors: dict[str, SchemaRedactor] = {}
        # Outcomes of writes that could not be recorded (a full disk); they go first with the next chance.
        self._owed: list[tuple[Call, Unit[Any]]] = []
        self._paying = asyncio.Lock()

    # Success

    async def succeed(self, verified: Verified) -> Result:
        """Record a success, then tell it."""
        ran = verified
        requested = ran
        call, tool = requested, requested.tool
        call.phases.append("return")
        if ran.more.source == "replay":
            return await self._close_replay(verified)
        size = len(verified.encoded)
        fits = tool.max_inline is None or size <= tool.max_inline
        persistence = INLINE if fits and not verified.more.redacted else _persistence(call.id, size, tool, fits=fits)
        metadata = self._metadata(call)
        now_ms = self._clock.now_ms()
        if ran.more.context is not None and ran.more.context.attached:
            self._attach(call, ran.more.context.attached, now_ms, metadata)
        if call.more.provenance:
            metadata |= self._cleaned_facts(call, call.more.provenance)
        if (
            not tool.writes and persistence.ref is None and not call.more.noted and not call.more.files
            and (ran.more.context is None or outcome.left_nothing(call, metadata))
            and not self._allowances.counts(call)
            and not ((call.more.mutations or self._keeps_all_inputs) and self.kept.keeps_inputs(call))
        ):  # fmt: skip
            body = records.closed_read(call, now_ms, metadata["latency_ms"], ran.more.source, verified)
            if self._batched and not self._journal.crowded:
                self._journal.record("closed", call.id, body)
            else:
                call.recorded = True
                await self._journal.append("closed", call.id, body)
        else:
            withheld = await self._record_success(verified, persistence, now_ms, metadata)
            if withheld and persistence.ref is not None:
                persistence = replace(persistence, decision="link", reason=withheld)
        call.move("succeeded")
        self._observer.closed(call, metadata, ran.more.source)
        if self._observer.heard(call):
            self._tell(call, persistence, verified.more.redacted)
        # In order of its fields; by name it would take half as long again.
        return Result(
            call.id, tool.ref, "succeeded", now_ms, call.trace_id, metadata, verified.value, None, ran.more.source,
            persistence, verified.more.redacted, verified.more.artifacts,
        )  # fmt: skip

    def _tell(self, call: Call, persistence: Persistence, redacted: tuple[str, ...]) -> None:
        if persistence.ref is not None:
            self._observer.emit("tool.result.persisted", call, **persistence.document(call.id))
        if redacted:
            self._observer.emit("tool.result.redacted", call, paths=list(redacted))
        self._observer.emit("tool.invocation.succeeded", call)
        self._observer.emit("tool.result.created", call)

    async def _record_success(self, verified: Verified, persistence: Persistence, now_ms: int, metadata: Json) -> str:
        """Write all that a success leaves behind, in one transaction. Returns why its payloads were withheld, if so."""
        ran = verified
        requested = ran
        call, request = requested, requested.request
        assert request.caller is not None
        caller = request.caller
        session = None if ran.more.context is None else ran.more.context.session
        assert session is None or isinstance(session, SessionState)
        if session is not None and self._observer.hides(call):
            session.rewrite(lambda value: self._observer.without(call, value))
        told = (*ran.more.changes, *(() if session is None else session.changes()))
        changes = self.told(call, (*told, *call.more.detected))
        if call.more.promised is not None and ran.more.context is not None:
            # The values of what was seen from outside are descriptions, which no preview promises.
            seen = (replace(one, after=None) for one in call.more.detected)
            self._compare(call, self.told(call, (*told, *seen)), metadata)
        can_tell = ran.more.context is not None and not requested.tool.remote
        if call.more.scope is not None and can_tell and not changes and request.operation == "invoke":
            # Only a tool that can report its changes can be seen to have made none.
            call.extend().warnings.append("WRITE_TOOL_NO_MUTATION")
            metadata["warnings"] = call.more.warnings
            self._observer.alert("WRITE_TOOL_NO_MUTATION", call)
        undo = compensation(verified)
        kept = _kept_at(call, persistence, len(verified.encoded))
        outcome: Json = {
            "value": None if kept is not None else verified.value,
            "persistence": [persistence.decision, kept, persistence.size, persistence.reason],
            "redacted": verified.more.redacted,
        }
        if any(change.source.startswith("reviewer:") for change in call.more.mutations):
            # Whoever asks again under the key is told too that this is not what they asked for.
            outcome["metadata"] = {"input_mutations": metadata["input_mutations"]}
        told_beside = {name: metadata[name] for name in _ATTACHED if name in metadata}
        if told_beside:
            outcome["metadata"] = {**outcome.get("metadata", {}), **told_beside}
        extra: Json = {}
        if "handoffs" in metadata:
            extra["handoffs"] = metadata["handoffs"]
        if call.more.scope is not None:
            large = len(verified.encoded) > LARGE
            extra["resultHash"] = await WALKS.run(digest, verified.value) if large else digest(verified.value)
        if verified.more.artifacts:
            outcome["artifacts"] = extra["artifacts"] = [one.document() for one in verified.more.artifacts]
        cost = self._cost(call, metadata, extra)
        if persistence is not INLINE:
            extra["persistence"] = records.persistence(persistence)
        if session is not None and session.changed:
            extra |= {"sessionVersion": session.version + 1, "sessionHash": digest(session.values_now())}
        if "previewDifferences" in metadata:
            extra["previewDifferences"] = metadata["previewDifferences"]
        if undo is not None:
            extra["compensation"] = {"ref": f"undo:{call.id}", "sha256": digest(undo)}

        def record(withheld: str = "", more: Json | None = None) -> bytes:
            more = {**(more or {}), **({"withheld": withheld} if withheld else {})}
            if withheld and persistence.ref is not None:
                gone = replace(persistence, decision="link", reason=withheld)
                more["persistence"] = records.persistence(gone)
            summary = records.summarize(verified.value, len(verified.encoded))
            return records.closed(
                call, now_ms, state="succeeded", latency_ms=metadata["latency_ms"], source=ran.more.source,
                effects=changes, summary=summary, extra={**extra, **more},
            )  # fmt: skip

        body = record()
        bodies = {
            artifact.ref: file.content for artifact, file in zip(verified.more.artifacts, call.more.files, strict=True)
        }
        if kept is not None:
            bodies[kept] = verified.encoded
        untold = kept if persistence.ref is None else None
        values = self._private_values(call, requested.tool)
        state = {} if session is None else dict.fromkeys(self._resources(call, session.changes()), session.version + 1)
        mutations = [
            records.mutation(call, now_ms, change, values.shown, state.get(change.resource)) for change in changes
        ]
        hidden = [] if undo is None else self._observer.hidden(call)
        owner = owner_of(caller)
        sent = await self.kept.inputs_of(call)

        def unit(transaction: Transaction, ahead: Mapping[str, Sealed]) -> tuple[str, tuple[Overrun, ...]]:
            withheld = ""
            if bodies and call.more.scope is None:
                self.kept.check_room(transaction, caller, sum(map(len, bodies.values())))
            elif bodies:
                withheld = self.kept.why_withheld(transaction, caller, bodies)
            if session is not None and session.changed:
                self.kept.store_session(transaction, session_id(caller, request.session), session)
            if call.more.scope is not None:
                idempotency.settle(
                    transaction, call.more.scope, call.id, "done", self.kept.sealed_outcome(call.id, outcome)
                )
            elif call.more.noted:
                reconcile.end(transaction, call.id)
            self.kept.store_payloads(transaction, call, bodies, withheld, ahead, untold)
            if undo is not None:
                self.kept.store_undo(transaction, call.id, owner, undo, hidden)
            unkept = self.kept.store_inputs(transaction, call, sent)
            booked = Booked() if cost is None else self._allowances.settle(transaction, call, cost)
            self.kept.store_values(transaction, call.id, caller, values)
            for mutation in mutations:
                transaction.append("mutation", call.id, mutation)
            told = record(withheld, unkept) if withheld or unkept else body
            transaction.append("closed", call.id, records.with_budgets(told, booked.rows))
            return withheld, booked.overrun

        closing = self._close_with(call, bodies, unit)
        try:
            # INVARIANT: a write is not cut off between its effect and its record.
            withheld, overrun = await (closing if call.more.scope is None or not bodies else _to_the_end(closing))
        finally:
            self.kept.abandon_inputs(sent)
        self._allowances.tell(call, overrun)
        return withheld

    async def _close_with(
        self, call: Call, bodies: Mapping[str, bytes], unit: Callable[[Transaction, Mapping[str, Sealed]], T]
    ) -> T:
        """Commit the closing of a call with the payloads that it leaves. Large ones are written ahead, in pieces."""
        caller = call.request.caller
        assert caller is not None
        try:
            ahead = await self.kept.write_ahead(caller, bodies, strict=call.more.scope is None)
            call.recorded = True
            return await self._close_write(call, lambda transaction: unit(transaction, ahead))
        except BaseException:
            self.kept.abandon(bodies)
            raise

    def _attach(self, call: Call, attached: Attached, now_ms: int, metadata: Json) -> None:
        """Put what a call hands out beside its value into its metadata, without what its reader may not see."""
        observer, caller = self._observer, call.request.caller
        assert caller is not None
        hidden = observer.hidden(call) if observer.hides(call) else []
        # INVARIANT: a credential that was lent or sent does not leave in an image either.
        if holds([binary(item) for item in attached.content], hidden):
            raise Failure("E3304", f"{call.ref} attached something with what the call was given in private")
        clean = partial(self._clean, call)

        if attached.content and call.tool is not None:
            stated = call.tool.contract.manifest.content_types
            strange = sorted({str(one["type"]) for one in attached.content}.difference(stated)) if stated else ()
            if strange:
                call.extend().warnings.extend(f"UNDECLARED_CONTENT type={one}" for one in strange)
                metadata["warnings"] = call.more.warnings
            if not call.tool.private:
                metadata["content"] = cleaned(attached.content, clean)
        if attached.views:
            metadata["views"] = clean(attached.views)
        if attached.handoffs:
            metadata["handoffs"] = clean(handoffs(attached, call.id, caller, now_ms))
        if attached.provenance:
            metadata |= self._cleaned_facts(call, attached.provenance)

    def _clean(self, call: Call, value: Any) -> Any:
        return self._observer.without(call, self._redactor.value(value).value)

    def _cleaned_facts(self, call: Call, facts: Json) -> Json:
        """Facts about the data of a result, without what its reader may not see."""
        return {name: self._clean(call, one) if isinstance(one, str) else one for name, one in facts.items()}

    def _compare(self, call: Call, changes: tuple[Change, ...], metadata: Json) -> None:
        """Hold what the call did against what its reviewer was shown."""
        assert call.more.promised is not None
        differences = broken_promises(call.more.promised, changes)
        if differences:
            metadata["previewDifferences"] = [self._observer.hide(call, difference) for difference in differences]
            self._observer.alert("PREVIEW_MISMATCH", call, differences=metadata["previewDifferences"])

    def _cost(self, call: Call, metadata: Json, extra: Json) -> Cost | None:
        """What a call has cost, told with its result and written into its record; None when nobody counts."""
        if call.tool is None or not self._allowances.counts(call):
            return None
        cost = self._allowances.cost(call)
        metadata["cost"] = cost.total / MILLION
        metadata["cost_parts"] = extra["cost"] = cost.document()
        return cost

    def give_back(self, transaction: Transaction, call: Call) -> None:
        """Free what a call set aside that will not run."""
        if self._allowances.counts(call):
            self._allowances.settle(transaction, call, FREE)

    # Waiting

    def await_person(self, call: Call, ticket: Ticket) -> Result:
        """The answer to a call that waits for a person: on record with its ticket, and neither done nor failed."""
        pending = ticket.pending()
        words = f"{call.ref} waits for a person to agree: {ticket.reason}"
        refs = () if call.decision is None else call.decision.rules
        return Result(
            invocation_id=call.id,
            tool=call.ref,
            state="awaiting_approval",
            created_ms=self._clock.now_ms(),
            trace_id=call.trace_id,
            metadata={**self._metadata(call), "pending": pending},
            error=Failure("E3208", words, details=pending, policy_refs=refs),
            source="synthetic",
        )

    async def _close_write(self, call: Call, unit: Unit[T]) -> T:
        """Commit the closing of a call that may have changed something. Returns what its unit returned.

        If it cannot be written now, the effect stands and its record is owed: it is kept and goes first next time, and
        the caller is told that the outcome is not on record, not that all is well. An error that the store did not
        raise is raised again when a second attempt meets it too: what the tool reported cannot be written at all.
        """
        try:
            if self._owed:
                await asyncio.shield(self.pay())
            return await self._twice(call, unit)
        except Failure as failure:
            if failure.code == "E3410" or call.more.scope is None:
                raise
            self._owed.append((call, unit))
            _log.error("the outcome of call %s could not be recorded: %s", call.id, failure.message)
            raise Failure(
                "E3409",
                f"the call was carried out, but the journal could not record how it ended: {failure.message}",
                details={"invocation_id": call.id, "executed": True},
            ) from failure

    async def _twice(self, call: Call, unit: Unit[T]) -> T:
        """Commit a unit, after an error that nobody foresaw once more. A caller that goes away does not stop it."""
        try:
            return await asyncio.shield(self._journal.submit(unit))
        except Failure:
            raise
        except Exception as error:  # noqa: BLE001 - a second error is raised
            _log.error("the closing of call %s failed", call.id, exc_info=error)
            return await asyncio.shield(self._journal.submit(unit))

    def commit_or_owe(self, call: Call, unit: Unit[Any]) -> None:
        """Commit a unit without waiting for it. If it cannot be written now, it is owed like a closing."""

        def note(written: asyncio.Future[Any]) -> None:
            if not written.cancelled() and written.exception() is not None:
                self._owed.append((call, unit))

        asyncio.ensure_future(self._journal.commit(unit)).add_done_callback(note)

    @property
    def owes(self) -> bool:
        """Whether there are outcomes that could not be recorded yet."""
        return bool(self._owed)

    async def pay(self) -> None:
        """Write the closings that are owed, oldest first, for as long as the journal takes them."""
        async with self._paying:
            while self._owed:
                call, unit = self._owed[0]
                try:
                    await self._twice(call, unit)
                except Exception as error:  # noqa: BLE001 - one closing that cannot be written must not keep the rest
                    if isinstance(error, Failure) and error.code != "E3410":
                        return
                    # Its session has moved on, or its closing cannot be written at all. What it did stands, and a
                    # person must look.
                    if await self._journal.commit(_as_unknown(call, self._clock)):
                        self._tell_unknown(call)
                del self._owed[0]

    # Replays

    async def recall(self, ran: Ran) -> Verified:
        """The stored outcome as a verified result; a stored failure is raised again."""
        found: idempotency.Replay = ran.output
        outcome = self.kept.outcome(found)
        if "error" in outcome:
            error: Json = outcome["error"]
            details: Json = {
                **cast("Json", error["details"] or {}),
                "replay_of": found.call,
                "ran_at": iso(found.at_ms),
            }
            # Nobody is told to send again what has had its effect, whatever the code says of others.
            executed = details.get("executed") is True
            raise Failure(error["code"], error["message"], details=details, retryable=False, unsettled=executed)
        ref, value, large = outcome["persistence"][1], outcome["value"], False
        if ref is not None:
            payload = await self.kept.payload(ref)
            large = payload is not None and len(payload) > LARGE
            value = None if payload is None else await WALKS.run(decode, payload) if large else decode(payload)
        # What the caller may see is decided now, not when the call ran.
        more = ran.extend()
        ran.value = None
        if value is not None:
            await WALKS.run(self.redact, ran, value) if large else self.redact(ran, value)
        ran.encoded = b""
        more.redacted, more.artifacts = (
            tuple({*outcome["redacted"], *more.redacted}),
            recalled(outcome.get("artifacts", ())),
        )
        return cast("Verified", ran)

    async def _close_replay(self, verified: Verified) -> Result:
        ran = verified
        found: idempotency.Replay = ran.output
        requested = ran
        call = requested
        metadata = self._metadata(call)
        now_ms = self._clock.now_ms()
        told = [one.document() for one in verified.more.artifacts]
        extra: Json = {"replayOf": found.call, **({"artifacts": told} if told else {})}
        sent = await self.kept.inputs_of(call)

        def unit(transaction: Transaction) -> None:
            unkept = self.kept.store_inputs(transaction, call, sent)
            body = records.closed(
                call, now_ms, state="succeeded", latency_ms=metadata["latency_ms"], source="replay", summary=None,
                extra={**extra, **unkept},
            )  # fmt: skip
            transaction.append("closed", call.id, body)

        call.recorded = True
        try:
            await self._journal.commit(unit)
        finally:
            self.kept.abandon_inputs(sent)
        call.move("succeeded")
        self._observer.closed(call, metadata, "replay")
        outcome = self.kept.outcome(found)
        decision, ref, size, reason = outcome["persistence"]
        if ref is not None and verified.value is None:
            decision, reason = "link", self.kept.why_gone(ref)
        elif decision in ("inline", "redact"):
            ref = None  # kept for the key alone
        metadata |= {"original_invocation_id": found.call, "executed_at": iso(found.at_ms)}
        metadata |= outcome.get("metadata", {})
        return Result(
            invocation_id=call.id,
            tool=requested.tool.ref,
            state="succeeded",
            created_ms=now_ms,
            trace_id=call.trace_id,
            metadata=metadata,
            value=verified.value,
            source="replay",
            persistence=Persistence(
                decision=decision, ref=ref, size=size, reason=reason, private=ref is not None and requested.tool.private
            ),
            redacted=verified.more.redacted,
            artifacts=verified.more.artifacts,
        )

    # Failure

    async def fail(self, call: Call, failure: Failure, state: State) -> Result:
        """Record a failure, then tell it."""
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
        metadata = self._metadata(call)
        if cause is not None:
            metadata["synthetic_cause"] = extra["syntheticCause"] = cause
        # A tool that runs on goes on costing; what it set aside stays set aside until it ends.
        counted = (call.more.claimed or call.launched) and not call.more.runs_on
        cost = self._cost(call, metadata, extra) if counted else None
        reported = () if call.more.context is None else call.more.context.changes
        changes = self.told(call, (*reported, *call.more.detected))

        def record(unkept: Json, failure: Failure = failure) -> bytes:
            return records.closed(
                call, now_ms, state=state, latency_ms=metadata["latency_ms"], source=source, summary=None,
                failure=failure, effects=changes, extra={**extra, **unkept},
            )  # fmt: skip

        body = record({})
        # What a tool reported or was seen to do before it failed has happened, whatever became of the call.
        sent = await self.kept.inputs_of(call)
        values = None if call.tool is None or not changes else self._private_values(call, call.tool)
        mutations = [] if values is None else [records.mutation(call, now_ms, one, values.shown) for one in changes]

        def unit(transaction: Transaction) -> _Written:
            ended_before = False
            if call.more.scope is not None and settlement is not None:
                # INVARIANT: a success that is on record, or a late outcome, is never overwritten by how the wait ended.
                ended_before = not idempotency.is_open(transaction, call.more.scope, call.id)
                if not ended_before:
                    done = settlement == "done"
                    result = self.kept.sealed_outcome(call.id, stored(failure)) if done else None
                    idempotency.settle(transaction, call.more.scope, call.id, settlement, result)
                elif call.recorded:
                    return _Written(ended_before=True)
            elif call.recorded and transaction.has("closed", call.id):
                return _Written(ended_before=False)
            elif call.more.noted:
                reconcile.end(transaction, call.id)
            booked = Booked() if cost is None else self._allowances.settle(transaction, call, cost)
            if values is not None and call.request.caller is not None:
                self.kept.store_values(transaction, call.id, call.request.caller, values)
            unkept = {} if ended_before else self.kept.store_inputs(transaction, call, sent)
            for mutation in mutations:
                transaction.append("mutation", call.id, mutation)
            told = record(unkept) if unkept else body
            transaction.append("closed", call.id, records.with_budgets(told, booked.rows))
            return _Written(ended_before=ended_before, overrun=booked.overrun)

        written, failure = await self._record_failure(call, failure, unit)
        self.kept.abandon_inputs(sent)
        self._allowances.tell(call, written.overrun)
        self._allowances.note_limit(call, failure)
        call.move(state)
        if settlement == "unknown" and not written.ended_before:
            self._tell_unknown(call)
        self._observer.closed(call, metadata, source, failure)
        if self._observer.heard(call):
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
            error=outcome.told(call, failure, cause),
            source=source,
        )

    async def end(self, call: Call, error: Exception) -> Result:
        """End a call that could not be closed, with a record that holds nothing of what its tool said.

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
        latency_ms = _latency_ms(call, self._clock)
        body = records.ended(call, now_ms, failure, settlement, latency_ms)

        def unit(transaction: Transaction) -> _Written:
            if transaction.has("closed", call.id):
                return _Written(ended_before=True)
            if call.more.scope is not None and settlement is not None:
                if idempotency.is_open(transaction, call.more.scope, call.id):
                    idempotency.settle(transaction, call.more.scope, call.id, settlement, None)
            elif call.more.noted:
                reconcile.end(transaction, call.id)
            booked = Booked()
            if call.tool is not None and call.request.caller is not None:
                booked = self._allowances.keep(transaction, call)
            transaction.append("closed", call.id, records.with_budgets(body, booked.rows))
            return _Written(ended_before=False)

        try:
            written, failure = await self._record_failure(call, failure, unit)
        except Exception as error:  # noqa: BLE001 - a journal that breaks in an unforeseen way
            # INVARIANT: no exception leaves a call. What was begun stays open, and nobody runs it again.
            self._observer.log_failure(call, "the end of the call could not be recorded", error)
            written = _Written(ended_before=False)
        if "failed" in MOVES[call.state]:
            call.move("failed")
        if settlement == "unknown" and not written.ended_before:
            self._tell_unknown(call)
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

    def _tell_unknown(self, call: Call) -> None:
        self._observer.alert("OUTCOME_UNKNOWN", call, reason=reconcile.advice(call.id))

    async def _record_failure(self, call: Call, failure: Failure, unit: Unit[_Written]) -> tuple[_Written, Failure]:
        """Write a failure down. Returns the failure to tell: this one, or that it could not be written."""
        if failure.code == "E3409" and call.more.scope is not None:
            # The closing that failed is owed already, and will say how the call really ended.
            return _Written(ended_before=False), failure
        try:
            if call.more.scope is not None:
                written = await self._close_write(call, unit)
            else:
                written = await self._journal.commit(unit)
        except Failure as unwritten:
            # A failure about the journal says it all; any other gives way to the fact that nothing is on record.
            told = failure if failure.code in ("E3801", "E3803") else unwritten
            return _Written(ended_before=False), told
        return written, failure

    async def settle_late(self, granted: Granted, done: Future[Any]) -> None:
        """A write that was cut off has ended after all: its outcome is no longer unknown.

        What cannot be recorded now is owed like any closing.
        """
        requested = granted
        call, scope = requested, requested.more.scope
        assert scope is not None
        bodies, untold = dict[str, bytes](), None
        facts: Json = {}
        assert call.request.caller is not None
        caller = call.request.caller
        try:
            verified = await self._late_result(granted, done)
        except Failure as failure:
            outcome = stored(self._observer.clean(call, failure))
        else:
            size = len(verified.encoded)
            fits = requested.tool.max_inline is None or size <= requested.tool.max_inline
            persistence = INLINE if fits else _persistence(call.id, size, requested.tool, fits=False)
            kept = _kept_at(call, persistence, size)
            outcome = {
                "value": verified.value if kept is None else None,
                "persistence": [persistence.decision, kept, size, persistence.reason],
                "redacted": verified.more.redacted,
                "metadata": {"late": True},
            }
            facts["resultHash"] = await WALKS.run(digest, verified.value) if size > LARGE else digest(verified.value)
            if kept is not None:
                bodies[kept] = verified.encoded
            untold = kept if persistence.ref is None else None
        facts |= {"succeeded": "error" not in outcome, "traceId": call.trace_id}
        cost = self._cost(call, {}, facts)
        now_ms = self._clock.now_ms()
        body = records.about("late", call, now_ms, **facts)

        def unit(transaction: Transaction, ahead: Mapping[str, Sealed]) -> None:
            booked = Booked() if cost is None else self._allowances.settle(transaction, call, cost)
            if idempotency_rows.state_of_call(transaction, scope, call.id) in ("unknown", "executing"):
                withheld = self.kept.why_withheld(transaction, caller, bodies) if bodies else ""
                idempotency.settle(transaction, scope, call.id, "done", self.kept.sealed_outcome(call.id, outcome))
                self.kept.store_payloads(transaction, call, bodies, withheld, ahead, untold)
                transaction.append("late", call.id, records.with_budgets(body, booked.rows))
            elif booked.rows:
                # A person settled it meanwhile. What it cost counts all the same.
                spent = records.about("authority", call, now_ms, act="cost.late", by="interlock", **facts)
                transaction.append("authority", call.id, records.with_budgets(spent, booked.rows))

        try:
            ahead = await self.kept.write_ahead(caller, bodies, strict=False)
            await self._close_write(call, lambda transaction: unit(transaction, ahead))
        except Failure as failure:
            if failure.code != "E3409":
                raise  # the caller of this logs it; the outcome stays unknown, and its idempotency key blocked
            # The closing is owed, and that has been logged.
        finally:
            self.kept.abandon(bodies)

    async def _late_result(self, granted: Granted, done: Future[Any]) -> Verified:
        """What a write that was cut off returned in the end, checked and redacted."""
        try:
            output = done.result()
        except Failure:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever the tool raised after its time, SystemExit too
            raise Failure("E3401", f"{granted.ref} failed: {type(error).__name__}") from None

        def walk() -> Verified:
            value = verify.map_output(granted.tool, output, self.most_bytes(granted.tool))
            # The credentials of a lease are void by now, so nobody can take them out of what the tool says.
            return self.redact(cast("Ran", granted), value if granted.more.lease is None else None)

        try:
            return walk() if verify.is_small(output) else await WALKS.run(walk)
        except Failure:
            raise
        except Exception as error:  # noqa: BLE001 - the output is the tool's, and whatever it does when it is read
            raise Failure("E3401", f"{granted.ref} failed: {type(error).__name__}") from None

    # Pieces

    def most_bytes(self, tool: Prepared) -> int:
        """How many bytes a tool's result may have as JSON. The tool can lower the limit of the settings."""
        most = self._settings.max_result_bytes
        return most if tool.max_result is None else min(tool.max_result, most)

    def redact(self, ran: Ran, value: Any) -> Verified:
        """The verified result with nothing in it that its reader may not see."""
        requested = ran
        redactor = requested.tool.redactor or self.redactor_of(requested.tool)
        if redactor.trivial:
            encoded, paths = encode(value), ()
        else:
            caller = requested.request.caller
            shown = redactor.apply(value, disclose=frozenset() if caller is None else caller.scopes)
            value, encoded, paths = shown.value, encode(shown.value), shown.paths
        if ran.more.source != "replay" and len(encoded) > (most := self.most_bytes(requested.tool)):
            raise result_too_large(requested.tool.ref, most, writes=requested.tool.writes)
        ran.value, ran.encoded = value, encoded
        if paths or ran.more.redacted:
            ran.extend().redacted = paths
        return cast("Verified", ran)

    async def refer(self, call: Call) -> tuple[Artifact, ...]:
        """The files of a call, by reference. E3304 if one of them holds what the call was given in private."""
        observer, files = self._observer, call.more.files
        hidden = observer.hidden(call) if observer.hides(call) else []

        def look() -> tuple[Artifact, ...] | None:
            shown = (content for file in files for content in (file.path.encode(), file.content))
            return None if holds(shown, hidden) else refer(call.id, files, self._redactor.text)

        # Large files take a while to be looked through, and calls of others should not wait for it.
        found = await WALKS.run(look)
        # INVARIANT: a credential that was lent or sent is never kept. Of a lease that is over nobody can say any more.
        if found is None or (call.more.lease is not None and call.more.lease.closed):
            raise Failure("E3304", f"{call.ref} left a file with something in it that the call was given in private")
        return found

    def shown_part(self, granted: Granted, value: Any) -> Any:
        """A part of a result as its reader may see it."""
        requested = granted
        if requested.tool.private:
            return None  # that there is a part is told, and nothing of it
        verify.check_size(requested.tool, value, self.most_bytes(requested.tool))
        caller = requested.request.caller
        part = self.redactor_of(requested.tool).apply(value, disclose=frozenset() if caller is None else caller.scopes)
        return self._observer.without(requested, self._redactor.value(part.value).value)

    def told(self, call: Call, changes: tuple[Change, ...]) -> tuple[Change, ...]:
        """Changes as they may be written down: without what the call was given in private."""
        if not changes or not self._observer.hides(call):
            return changes
        clean = self._observer.without
        return tuple(
            replace(
                change,
                resource=clean(call, change.resource),
                before=clean(call, change.before),
                after=clean(call, change.after),
            )
            for change in changes
        )

    def redactor_of(self, tool: Prepared) -> SchemaRedactor:
        found = self._redactors.get(tool.digest)
        if found is None:
            patterns = tool.contract.manifest.redact_results and self._settings.redacts(tool.contract.id.namespace)
            found = self._redactor.for_schema(tool.contract.output.document, patterns=patterns)
            self._redactors[tool.digest] = found
        tool.redactor = found
        return found

    def _resources(self, call: Call, changes: tuple[Change, ...]) -> list[str]:
        return [change.resource for change in self.told(call, changes)]

    def _private_values(self, call: Call, tool: Prepared) -> PrivateValues:
        """Judges values: private by the name of their resource, by either schema or by themselves."""
        schemas = (self.redactor_of(tool), self._observer.sink(call))

        def private(resource: str, value: Any) -> bool:
            if self._redactor.names_secret(resource) or self._redactor.value(value).paths:
                return True
            return any(schema.for_sinks(value).paths for schema in schemas)

        return PrivateValues(call.id, private, self._clock.random_bytes)

    def _metadata(self, call: Call) -> Json:
        metadata: Json = {"latency_ms": int((self._clock.monotonic() - call.started) * 1_000_000) / 1000}
        if call.decision is not None:
            metadata["policy_refs"] = call.decision.rules
        if call.more.approval_outcome is not None:
            metadata["approval"] = call.more.approval_outcome
        if call.tool is not None and call.tool.notice is not None:
            metadata["deprecation"] = call.tool.notice
        if call.more.mutations:
            metadata["input_mutations"] = [{"source": m.source, "pointer": m.pointer} for m in call.more.mutations]
        if call.more.pagination is not None:
            metadata["pagination"] = call.more.pagination
        if call.more.warnings:
            metadata["warnings"] = call.more.warnings
        if call.more.hook_outputs:
            metadata["hook_outputs"] = call.more.hook_outputs
        if call.more.parts:
            metadata["parts"] = [part.value for part in call.more.parts]
            yielded = [index for index, part in enumerate(call.more.parts, 1) if part.yielded]
            metadata |= {"yielded_parts": yielded} if yielded else {}
        if call.more.context is not None and call.more.context.last_progress is not None:
            metadata["progress"] = self._observer.shown(call, call.more.context.last_progress)
        if call.more.context is not None and call.more.context.modifiers:
            metadata["context_modifiers"] = self._observer.without(call, call.more.context.modifiers)
        return metadata


@record
class _Written:
    """What the write that closes a failed call came to: whether the call had ended before, and budgets it overran."""

    ended_before: bool
    overrun: tuple[Overrun, ...] = ()


def _persistence(call_id: str, size: int, tool: Prepared, *, fits: bool) -> Persistence:
    """What becomes of a result that is not told as it is: it is kept and referred to, or was redacted."""
    if fits:
        return without_private_fields(size)
    ref = f"payload:{call_id}"
    if tool.private:
        return Persistence(
            decision="persist", ref=ref, size=size, reason="results of this tool are private", private=True
        )
    return Persistence(decision="preview", ref=ref, size=size, reason="larger than max_inline_chars")


def _kept_at(call: Call, persistence: Persistence, size: int) -> str | None:
    """The payload that holds a result; None where the result is told as it is and stands in the row of its key.

    A large result that is told as it is becomes a payload for as long as the key lives: a row of that size would keep
    all other writers waiting.
    """
    if persistence.ref is None and call.more.scope is not None and size > LARGE:
        return f"payload:{call.id}"
    return persistence.ref


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Do some work. Where the caller is cancelled meanwhile, that is raised when the work has ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # it has been told: what could not be recorded is owed
        raise


def _latency_ms(call: Call, clock: Clock) -> float:
    return int((clock.monotonic() - call.started) * 1_000_000) / 1000


def _as_unknown(call: Call, clock: Clock) -> Unit[bool]:
    """A unit that blocks the key of a call that is still open and closes the call; whether it was open."""
    failure = Failure("E3409", "how the call ended could not be recorded")
    body = records.ended(call, clock.now_ms(), failure, "unknown", _latency_ms(call, clock))

    def unit(transaction: Transaction) -> bool:
        if call.more.scope is None or not idempotency.is_open(transaction, call.more.scope, call.id):
            return False
        idempotency.settle(transaction, call.more.scope, call.id, "unknown", None)
        if not transaction.has("closed", call.id):
            transaction.append("closed", call.id, body)
        return True

    return unit

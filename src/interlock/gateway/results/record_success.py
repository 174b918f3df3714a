"""Write everything that a successful call leaves behind, in one transaction.

The idempotency record, the session's state, the mutation records, payloads, files, the means to undo the call, its cost
and its closing record commit together or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from interlock.call.phases import Call, Verified
from interlock.call.results import INLINE, Persistence
from interlock.core.clock import iso
from interlock.data.canonical import digest
from interlock.effects.session import SessionState
from interlock.gateway import idempotency, reconcile
from interlock.gateway.allowances import Allowances
from interlock.gateway.persistence.storage import CallStorage
from interlock.gateway.redaction import CallRedaction
from interlock.gateway.results.metadata import ResultMetadata
from interlock.gateway.results.outputs import Outputs
from interlock.gateway.results.placement import payload_ref, result_hash
from interlock.gateway.results.unrecorded import UnrecordedOutcomes
from interlock.store import records

if TYPE_CHECKING:
    from interlock.authority.budgets import Overrun
    from interlock.contract.effects import Change
    from interlock.data.schema import Json
    from interlock.gateway.persistence.pieces import Sealed
    from interlock.store.port import Transaction

T = TypeVar("T")

_NONE_AHEAD: Mapping[str, Sealed] = {}
# The metadata that belongs to the result itself, so that a replay returns it again.
_REPLAYED = ("content", "views", "handoffs", "data_version", "confidence")


class SuccessWriter:
    """Records successes that leave more behind than a closing record."""

    def __init__(
        self,
        redaction: CallRedaction,
        allowances: Allowances,
        storage: CallStorage,
        outputs: Outputs,
        metadata: ResultMetadata,
        unrecorded: UnrecordedOutcomes,
    ) -> None:
        self._redaction = redaction
        self._allowances = allowances
        self._storage = storage
        self._outputs = outputs
        self._metadata = metadata
        self._unrecorded = unrecorded

    async def write(self, verified: Verified, persistence: Persistence, now_ms: int, metadata: Json) -> str:
        """Record a success. Returns why its payloads were withheld, or an empty string."""
        call, request = verified, verified.request
        assert request.caller is not None
        caller, storage = request.caller, self._storage
        session = self._changed_session(verified)
        changes = self._changes(verified, session, metadata)
        undo = storage.undo.compensation(verified)
        ref = payload_ref(call, persistence, len(verified.encoded))
        outcome = _outcome(verified, persistence, ref, metadata)
        extra: Json = {}
        if "handoffs" in metadata:
            extra["handoffs"] = metadata["handoffs"]
        if call.more.scope is not None:
            extra["resultHash"] = await result_hash(verified)
        if verified.more.artifacts:
            outcome["artifacts"] = extra["artifacts"] = [one.document() for one in verified.more.artifacts]
        cost = self._allowances.charge(call, metadata, extra) if self._allowances.counts(call) else None
        if persistence is not INLINE:
            extra["persistence"] = records.persistence(persistence)
        if session is not None:
            extra |= {"sessionVersion": session.version + 1, "sessionHash": digest(session.values_now())}
        if "previewDifferences" in metadata:
            extra["previewDifferences"] = metadata["previewDifferences"]
        if undo is not None:
            extra["compensation"] = {"ref": f"undo:{call.id}", "sha256": digest(undo)}

        # A call with an intent repeats the id and the other common fields of the intent's record.
        intent = call.more.head
        common = records.head(call, now_ms) if intent is None else {**intent, "timestamp": iso(now_ms)}

        summary = records.summarize(verified.value, len(verified.encoded))
        record = partial(
            records.closed, call, now_ms, state="succeeded", latency_ms=metadata["latency_ms"],
            source=call.more.source, effects=changes, summary=summary, common=common,
        )  # fmt: skip
        body = record(extra=extra)
        bodies = {
            artifact.ref: file.content for artifact, file in zip(verified.more.artifacts, call.more.files, strict=True)
        }
        if ref is not None:
            bodies[ref] = verified.encoded
        for_the_key = ref if persistence.ref is None else None
        values = self._outputs.private_values(call, verified.tool)
        versions: dict[str, int] = {}
        if session is not None:
            versions = dict.fromkeys(self._outputs.resources(call, session.changes()), session.version + 1)
        mutations = [
            records.mutation(call, common, change, values.shown, versions.get(change.resource)) for change in changes
        ]
        hidden = self._redaction.private_values(call) if undo is not None and call.more.private else []
        sent = await storage.inputs.prepare(call) if call.more.mutations or storage.inputs.keeps_all else None

        def unit(
            transaction: Transaction, ahead: Mapping[str, Sealed] = _NONE_AHEAD
        ) -> tuple[str, tuple[Overrun, ...]]:
            withheld = ""
            if bodies and call.more.scope is None:
                storage.payloads.check_room(transaction, caller, sum(map(len, bodies.values())))
            elif bodies:
                withheld = storage.payloads.why_withheld(transaction, caller, bodies)
            if session is not None:
                storage.sessions.store(transaction, caller, request.session, session)
            if call.more.scope is not None:
                sealed = storage.outcomes.seal(transaction, call.id, outcome)
                idempotency.settle(transaction, call.more.scope, call.id, "done", sealed)
            elif call.more.noted:
                reconcile.end(transaction, call.id)
            storage.payloads.store(transaction, call, bodies, withheld, ahead, for_the_key)
            if undo is not None:
                storage.undo.store(transaction, call.id, caller, undo, hidden)
            withheld_inputs = storage.inputs.store(transaction, call, sent)
            booked = self._allowances.settle(transaction, call, cost)
            storage.changes.store(transaction, call.id, caller, values)
            for mutation in mutations:
                transaction.append("mutation", call.id, mutation)
            document = body
            if withheld or withheld_inputs:
                document = record(extra={**extra, **_without(persistence, withheld, withheld_inputs)})
            transaction.append("closed", call.id, records.with_budgets(document, booked.rows))
            return withheld, booked.overrun

        try:
            if not bodies:
                call.recorded = True
                withheld, overrun = await self._unrecorded.write(call, unit)
            else:
                closing = self._commit(call, bodies, unit)
                # INVARIANT: a write is not cut off between its effect and its record.
                withheld, overrun = await (closing if call.more.scope is None else _to_the_end(closing))
        finally:
            if sent is not None:
                storage.inputs.abandon(sent)
        if overrun:
            self._allowances.alert_overrun(call, overrun)
        return withheld

    def _changed_session(self, verified: Verified) -> SessionState | None:
        """Return the session, without the private values of the call; None if the tool has not changed it."""
        context = verified.more.context
        session = None if context is None else context.session
        assert session is None or isinstance(session, SessionState)
        if session is None:
            return None
        if verified.more.private:
            session.rewrite(lambda value: self._redaction.without_private_values(verified, value))
        return session if session.changed else None

    def _changes(self, verified: Verified, session: SessionState | None, metadata: Json) -> tuple[Change, ...]:
        """Return the changes of a call as they are recorded. Compares them with the preview that was approved."""
        call, more = verified, verified.more
        reported = (*more.changes, *(() if session is None else session.changes()))
        changes = (*reported, *more.detected)
        if more.private:
            changes = self._outputs.writable(call, changes)
        if more.previewed is not None and more.context is not None:
            # Values of detected changes are descriptions, which no preview contains.
            detected = (replace(one, after=None) for one in more.detected)
            made = self._outputs.writable(call, (*reported, *detected))
            self._metadata.compare_with_preview(call, made, metadata)
        reports = more.context is not None and not verified.tool.remote
        if more.scope is not None and reports and not changes and verified.request.operation == "invoke":
            # A tool without a context cannot report changes, so an empty report of such a tool means nothing.
            self._metadata.warn_unreported(call, metadata)
        return changes

    async def _commit(
        self, call: Call, bodies: Mapping[str, bytes], unit: Callable[[Transaction, Mapping[str, Sealed]], T]
    ) -> T:
        """Commit the closing of a call with the payloads that it leaves. Large ones are written ahead, in pieces."""
        caller = call.request.caller
        assert caller is not None
        try:
            ahead = await self._storage.payloads.write_ahead(caller, bodies, strict=call.more.scope is None)
            call.recorded = True
            return await self._unrecorded.write(call, lambda transaction: unit(transaction, ahead))
        except BaseException:
            self._storage.payloads.abandon(bodies)
            raise


def _without(persistence: Persistence, withheld: str, inputs: Json) -> Json:
    """Return what the closing record says of payloads and inputs that are not stored."""
    more = {**inputs, "withheld": withheld} if withheld else inputs
    if withheld and persistence.ref is not None:
        more["persistence"] = records.persistence(replace(persistence, decision="link", reason=withheld))
    return more


def _outcome(verified: Verified, persistence: Persistence, ref: str | None, metadata: Json) -> Json:
    """Return the outcome as its idempotency key keeps it, for replays."""
    outcome: Json = {
        "value": None if ref is not None else verified.value,
        "persistence": [persistence.decision, ref, persistence.size, persistence.reason],
        "redacted": verified.more.redacted,
    }
    if any(change.source.startswith("reviewer:") for change in verified.more.mutations):
        # A replay too says that a reviewer changed the input.
        outcome["metadata"] = {"input_mutations": metadata["input_mutations"]}
    replayed = {name: metadata[name] for name in _REPLAYED if name in metadata}
    if replayed:
        outcome["metadata"] = {**outcome.get("metadata", {}), **replayed}
    return outcome


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Finish some work although the caller is cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # logged already; the outcome is recorded later
        raise

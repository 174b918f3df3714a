"""Phase 6. Whatever the outcome, it is on record before it is told.

One write closes a call: the idempotency record, the session's state, the mutation records, a payload too large to
travel, the means to undo, and the closing record. They commit together or not at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

import orjson

from interlock.core.canonical import digest, sealed_digest
from interlock.core.clock import Clock, iso
from interlock.core.context import Caller, Change
from interlock.core.errors import ErrorClass, ErrorCode, Failure
from interlock.core.phases import Call, Granted, Ran, Source, Verified
from interlock.core.redact import Redactor, SchemaRedactor
from interlock.core.results import Persistence, Result
from interlock.core.schema import Json
from interlock.core.states import MOVES, State
from interlock.effects.session import SessionState
from interlock.gateway import keys
from interlock.registry.catalog import Version
from interlock.settings import Settings
from interlock.store import records
from interlock.store.journal import Journal, Transaction

_log = logging.getLogger("interlock.gateway")
_DAY_MS = 86_400_000

_STATE_OF_CLASS: dict[ErrorClass, State] = {
    ErrorClass.TIMEOUT: "timed_out",
    ErrorClass.CANCELED: "canceled",
    ErrorClass.SIBLING_CANCELED: "canceled",
    ErrorClass.STREAMING_FALLBACK_DISCARDED: "canceled",
    ErrorClass.HOOK_BLOCKED: "blocked",
    ErrorClass.POLICY_BLOCKED: "blocked",
    ErrorClass.SCHEMA_NOT_LOADED: "blocked",
    ErrorClass.PERMISSION_DENIED: "denied",
    ErrorClass.APPROVAL_REJECTED: "denied",
}


def terminal_state(failure: Failure, current: State) -> State:
    """The state in which a failed call ends, as far as the table allows it from where the call is."""
    wanted = _STATE_OF_CLASS.get(failure.row.error_class, "failed")
    if failure.row.error_code is ErrorCode.INVALID_INPUT and wanted == "failed":
        wanted = "schema_parse_failed" if failure.code == "E3004" else "validation_failed"
    return wanted if wanted in MOVES[current] else "failed"


class Closer:
    """Closes calls."""

    def __init__(
        self,
        journal: Journal,
        clock: Clock,
        redactor: Redactor,
        settings: Settings,
        redactor_of: Callable[[Version], SchemaRedactor],
        emit: Callable[..., None],
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._redactor = redactor
        self._settings = settings
        self._redactor_of = redactor_of
        self._emit = emit
        # Outcomes of writes that could not be recorded (a full disk); they go first with the next chance.
        self._unrecorded: list[Callable[[Transaction], None]] = []

    # Sessions

    def load_session(self, caller: Caller, session: str) -> SessionState:
        rows = self._journal.read("SELECT version, state FROM session WHERE id = ?", (session_id(caller, session),))
        return SessionState(rows[0][0], rows[0][1]) if rows else SessionState(0, "{}")

    # Success

    async def succeed(self, verified: Verified, compensation: Json | None) -> Result:
        """Record a success, then tell it."""
        ran = verified.ran
        requested = ran.granted.checked.requested
        call, contract = requested.call, requested.tool.contract
        if ran.source == "replay":
            return await self._close_replay(verified)
        persistence = self._persistence(verified)
        latency_ms = round((self._clock.monotonic() - call.started) * 1000, 3)
        metadata = self._metadata(call, latency_ms)
        now_ms = self._clock.now_ms()
        if not contract.mutation.writes and ran.context is None and persistence.ref is None:
            body = records.closed(
                call, now_ms, state="succeeded", latency_ms=latency_ms, source=ran.source,
                summary=records.summarize(verified.value, len(verified.encoded)),
            )  # fmt: skip
            await self._append(call.id, body)
        else:
            await self._commit_success(verified, persistence, compensation, latency_ms, now_ms, metadata)
        call.trail.move("succeeded")
        if persistence.ref is not None or verified.redacted:
            kind = "tool.result.persisted" if persistence.ref is not None else "tool.result.redacted"
            self._emit(kind, call, **persistence.document(call.id))
        self._emit("tool.invocation.succeeded", call, latency_ms=latency_ms)
        self._emit("tool.result.created", call)
        return Result(
            invocation_id=call.id,
            tool=contract.ref,
            state="succeeded",
            created_ms=now_ms,
            trace_id=call.trace_id,
            value=verified.value,
            source=ran.source,
            persistence=persistence,
            redacted=verified.redacted,
            metadata=metadata,
        )

    async def _append(self, call_id: str, body: bytes) -> None:
        """One record of a read: awaited, unless the operator chose batched audit."""
        if self._settings.audit == "batched" and not self._journal.crowded:
            self._journal.post(lambda transaction: transaction.append("closed", call_id, body))
        else:
            await self._journal.commit(lambda transaction: transaction.append("closed", call_id, body))

    async def _commit_success(
        self,
        verified: Verified,
        persistence: Persistence,
        compensation: Json | None,
        latency_ms: float,
        now_ms: int,
        metadata: Json,
    ) -> None:
        ran = verified.ran
        requested = ran.granted.checked.requested
        call, request = requested.call, requested.call.request
        assert request.caller is not None
        assert isinstance(requested.tool, Version)
        session = ran.context.session if ran.context is not None else None
        assert session is None or isinstance(session, SessionState)
        changes = (*ran.changes, *(session.changes() if session is not None else ()))
        if ran.source == "compute" and ran.context is not None and call.scope is not None and not changes:
            call.warnings.append("WRITE_TOOL_NO_MUTATION")
            metadata["warnings"] = call.warnings
        undo = None if compensation is None else orjson.dumps(compensation)
        outcome: Json = {
            "value": None if persistence.ref is not None else verified.value,
            "persistence": [persistence.decision, persistence.ref, persistence.size, persistence.reason],
            "redacted": verified.redacted,
            "metadata": metadata,
        }
        extra: Json = {"resultHash": digest(verified.value)} if call.scope is not None else {}
        if undo is not None:
            extra["compensation"] = {"ref": f"undo:{call.id}", "sha256": digest(orjson.loads(undo))}
        body = records.closed(
            call, now_ms, state="succeeded", latency_ms=latency_ms, source=ran.source, effects=changes, extra=extra,
            summary=records.summarize(verified.value, len(verified.encoded)),
        )  # fmt: skip
        schemas = (self._redactor_of(requested.tool),)
        mutations = [records.mutation(call, now_ms, change, self._redactor, schemas) for change in changes]
        owner = f"{request.caller.tenant}/{request.caller.id}"
        changed = session is not None and session.changed

        def unit(transaction: Transaction) -> None:
            if changed and session is not None:
                assert request.caller is not None
                _store_session(transaction, session_id(request.caller, request.session), session)
            if call.scope is not None:
                keys.settle(transaction, call.scope, call.id, "done", outcome)
            if persistence.ref is not None:
                _store_payload(
                    transaction, persistence.ref, call.id, owner, verified.encoded, self._settings.payload_days
                )
            if undo is not None:
                _store_payload(transaction, f"undo:{call.id}", call.id, owner, undo, self._settings.undo_days)
            for mutation in mutations:
                transaction.append("mutation", call.id, mutation)
            transaction.append("closed", call.id, body)

        await self._close_write(call, unit)

    async def _close_write(self, call: Call, unit: Callable[[Transaction], None]) -> None:
        """Commit the closing of a call that may have changed something.

        If it cannot be written now, the effect stands and its record is owed: it is kept and goes first next time, and
        the caller is told that the outcome is not on record, not that all is well.
        """
        owed, self._unrecorded = self._unrecorded, []
        try:
            for earlier in owed:
                await asyncio.shield(self._journal.commit(earlier))
            await asyncio.shield(self._journal.commit(unit))
        except Failure as failure:
            if failure.code == "E3410" or call.scope is None:
                raise
            self._unrecorded = [*owed, unit]
            _log.error("the outcome of call %s could not be recorded: %s", call.id, failure.message)
            raise Failure(
                "E3409",
                f"the call took effect, but the journal could not record it: {failure.message}",
                details={"invocation_id": call.id, "executed": True},
            ) from failure

    # Replays

    def replayed(self, ran: Ran, found: keys.Replay) -> Verified:
        """The stored outcome as a verified result; a stored failure is raised again."""
        outcome = found.outcome
        if "error" in outcome:
            raise _stored_failure(outcome["error"], found)
        ref = outcome["persistence"][1]
        value = outcome["value"]
        if ref is not None:
            rows = self._journal.read("SELECT body FROM payload WHERE ref = ?", (ref,))
            value = orjson.loads(rows[0][0]) if rows and rows[0][0] is not None else None
        return Verified(ran=ran, value=value, encoded=b"", redacted=tuple(outcome["redacted"]))

    async def _close_replay(self, verified: Verified) -> Result:
        ran = verified.ran
        found: keys.Replay = ran.output
        requested = ran.granted.checked.requested
        call, contract = requested.call, requested.tool.contract
        latency_ms = round((self._clock.monotonic() - call.started) * 1000, 3)
        now_ms = self._clock.now_ms()
        body = records.closed(
            call, now_ms, state="succeeded", latency_ms=latency_ms, source="replay", summary=None,
            extra={"replayOf": found.call},
        )  # fmt: skip
        await self._journal.commit(lambda transaction: transaction.append("closed", call.id, body))
        call.trail.move("succeeded")
        decision, ref, size, reason = found.outcome["persistence"]
        return Result(
            invocation_id=call.id,
            tool=contract.ref,
            state="succeeded",
            created_ms=now_ms,
            trace_id=call.trace_id,
            value=verified.value,
            source="replay",
            persistence=Persistence(decision=decision, ref=ref, size=size, reason=reason),
            redacted=verified.redacted,
            metadata={
                **self._metadata(call, latency_ms),
                "original_invocation_id": found.call,
                "executed_at": iso(found.at_ms),
            },
        )

    # Failure

    async def fail(self, call: Call, failure: Failure, state: State) -> Result:
        """Record a failure, then tell it. If even that cannot be recorded, a read's caller is told so instead."""
        latency_ms = round((self._clock.monotonic() - call.started) * 1000, 3)
        now_ms = self._clock.now_ms()
        settlement = self._settlement(call, failure, state)
        source: Source = "synthetic" if state in ("timed_out", "canceled") else "compute"
        extra: Json = {} if settlement is None else {"outcome": settlement}
        if failure.details and "replay_of" in failure.details:
            source, extra = "replay", {"replayOf": failure.details["replay_of"]}
        body = records.closed(
            call, now_ms, state=state, latency_ms=latency_ms, source=source, summary=None, failure=failure,
            effects=tuple(call.context.changes) if call.context else (), extra=extra,
        )  # fmt: skip
        outcome: Json = {"error": {"code": failure.code, "message": failure.message, "details": failure.details}}

        def unit(transaction: Transaction) -> None:
            if call.scope is not None and settlement is not None:
                keys.settle(transaction, call.scope, call.id, settlement, outcome if settlement == "done" else None)
            transaction.append("closed", call.id, body)

        try:
            if failure.code != "E3409" or call.scope is None:
                await (self._close_write(call, unit) if call.scope is not None else self._journal.commit(unit))
        except Failure as unwritten:
            failure = unwritten if unwritten.code == "E3409" or failure.code[:3] != "E38" else failure
        call.trail.move(state)
        self._emit(f"tool.invocation.{_EVENT.get(call.trail.state, 'failed')}", call, error_code=failure.code)
        self._emit("tool.result.created", call)
        return Result(
            invocation_id=call.id,
            tool=call.contract.ref if call.contract else call.request.tool,
            state=call.trail.state,
            created_ms=now_ms,
            trace_id=call.trace_id,
            error=failure,
            source=source,
            metadata=self._metadata(call, latency_ms),
        )

    def _settlement(self, call: Call, failure: Failure, state: State) -> keys.Settlement | None:
        """What becomes of the key: kept with the failure, freed for a retry, or blocked until a person looks."""
        if call.scope is None:
            return None
        assert call.contract is not None
        reported: list[Change] = call.context.changes if call.context is not None else []
        cut_off = state in ("timed_out", "canceled")
        if cut_off and not call.contract.manifest.restart_safe:
            return "unknown"
        if cut_off or failure.retryable:
            # INVARIANT: a retry may run again only when nothing was changed.
            return "unknown" if reported else "released"
        return "done"

    def settle_late(self, granted: Granted, verified: Verified | None, failure: Failure | None) -> None:
        """A write that was cut off has ended after all: its outcome is no longer unknown."""
        call = granted.checked.requested.call
        scope = call.scope
        if scope is None:
            return
        now_ms = self._clock.now_ms()
        outcome: Json
        if verified is not None:
            outcome = {
                "value": verified.value, "persistence": ["inline", None, len(verified.encoded), ""],
                "redacted": verified.redacted, "metadata": {"late": True},
            }  # fmt: skip
        else:
            assert failure is not None
            outcome = {"error": {"code": failure.code, "message": failure.message, "details": failure.details}}
        body = records.plain("late", call.id, now_ms, succeeded=verified is not None, traceId=call.trace_id)

        def unit(transaction: Transaction) -> None:
            row = transaction.one("SELECT state FROM reservation WHERE scope = ? AND call = ?", (scope, call.id))
            if row is not None and row[0] in ("unknown", "executing"):
                keys.settle(transaction, scope, call.id, "done", outcome)
                transaction.append("late", call.id, body)

        self._journal.post(unit)

    # Pieces

    def _persistence(self, verified: Verified) -> Persistence:
        """Inline, redacted, or kept and referred to: decided for every result."""
        manifest = verified.ran.granted.checked.requested.tool.contract.manifest
        size = len(verified.encoded)
        if size > manifest.max_inline_chars and manifest.persist_output:
            ref = f"payload:{verified.ran.granted.checked.requested.call.id}"
            return Persistence(decision="persist", ref=ref, size=size, reason="larger than max_inline_chars")
        if verified.redacted:
            return Persistence(decision="redact", size=size, reason="private fields were removed")
        return Persistence(decision="inline", size=size)

    def _metadata(self, call: Call, latency_ms: float) -> Json:
        metadata: Json = {"latency_ms": latency_ms}
        if call.decision is not None:
            metadata["policy_refs"] = call.decision.rules
        if call.warnings:
            metadata["warnings"] = call.warnings
        if call.additional_context:
            metadata["additional_context"] = call.additional_context
        if call.parts:
            metadata["parts"] = call.parts
        if call.context is not None and call.context.modifiers:
            metadata["context_modifiers"] = call.context.modifiers
        return metadata


_EVENT = {"canceled": "canceled", "timed_out": "timed_out", "validation_failed": "validation_failed"}


def session_id(caller: Caller, session: str) -> bytes:
    """The row of a session: visible only to the tenant and caller that own it."""
    return sealed_digest(caller.tenant, caller.id, session)


def _store_session(transaction: Transaction, row_id: bytes, session: SessionState) -> None:
    row = transaction.one("SELECT version FROM session WHERE id = ?", (row_id,))
    if (row[0] if row else 0) != session.version:
        raise Failure("E3410", "the session was changed by another call meanwhile", retry_after_ms=10)
    transaction.execute(
        "INSERT OR REPLACE INTO session (id, version, state) VALUES (?, ?, ?)",
        (row_id, session.version + 1, orjson.dumps(session.values_now()).decode()),
    )


def _store_payload(transaction: Transaction, ref: str, call: str, owner: str, body: bytes, days: int) -> None:
    transaction.execute(
        "INSERT INTO payload (ref, call, owner, body, size, created_ms, expires_ms, reason)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, '')",
        (ref, call, owner, body, len(body), transaction.now_ms, transaction.now_ms + days * _DAY_MS),
    )


def _stored_failure(error: Json, found: keys.Replay) -> Failure:
    details = {**cast("Json", error.get("details") or {}), "replay_of": found.call, "ran_at": iso(found.at_ms)}
    return Failure(error["code"], error["message"], details=details, retryable=False)

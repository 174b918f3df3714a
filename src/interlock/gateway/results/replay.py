"""Replays: a call that ran before under its idempotency key is answered with the stored outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from interlock.call.artifacts import recalled
from interlock.call.phases import Ran, Verified
from interlock.call.results import Persistence, Result
from interlock.core.clock import Clock, iso
from interlock.core.errors import Failure
from interlock.core.threads import WALKS
from interlock.data.bounds import LARGE, preview_chars
from interlock.data.canonical import decode
from interlock.data.schema import Json
from interlock.gateway.idempotency import Replay
from interlock.gateway.observe import Observer
from interlock.gateway.persistence.storage import CallStorage
from interlock.gateway.results.metadata import ResultMetadata
from interlock.gateway.results.outputs import Outputs
from interlock.store import records

if TYPE_CHECKING:
    from interlock.store.port import Store, Transaction


class Replays:
    """Reads stored outcomes and closes the calls that they answer."""

    def __init__(
        self,
        journal: Store,
        clock: Clock,
        observer: Observer,
        storage: CallStorage,
        outputs: Outputs,
        metadata: ResultMetadata,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._observer = observer
        self._storage = storage
        self._outputs = outputs
        self._metadata = metadata

    async def recall(self, ran: Ran) -> Verified:
        """Return the stored outcome as a verified result. A stored failure is raised again."""
        found: Replay = ran.output
        outcome = self._storage.outcomes.open(found)
        if "error" in outcome:
            error: Json = outcome["error"]
            details: Json = {
                **cast("Json", error["details"] or {}),
                "replay_of": found.call,
                "ran_at": iso(found.at_ms),
            }
            # Never retryable: the call has had its effect, whatever the code says of other calls.
            executed = details.get("executed") is True
            raise Failure(error["code"], error["message"], details=details, retryable=False, unsettled=executed)
        ref, value, large = outcome["persistence"][1], outcome["value"], False
        if ref is not None:
            payload = await self._storage.payloads.read(ref)
            large = payload is not None and len(payload) > LARGE
            value = None if payload is None else await WALKS.run(decode, payload) if large else decode(payload)
        # The caller's scopes of now decide what is redacted, not those of the call that ran.
        more = ran.extend()
        ran.value = None
        if value is not None:
            redact = self._outputs.redact
            await WALKS.run(redact, ran, value) if large else redact(ran, value)
        ran.encoded = b""
        more.redacted, more.artifacts = (
            tuple({*outcome["redacted"], *more.redacted}),
            recalled(outcome.get("artifacts", ())),
        )
        return cast("Verified", ran)

    async def close(self, verified: Verified) -> Result:
        """Record that a call was answered with a stored outcome, and return its result."""
        found: Replay = verified.output
        call, tool = verified, verified.tool
        metadata = self._metadata.of(call)
        now_ms = self._clock.now_ms()
        artifacts = [one.document() for one in verified.more.artifacts]
        extra: Json = {"replayOf": found.call, **({"artifacts": artifacts} if artifacts else {})}
        sent = await self._storage.inputs.prepare(call)

        def unit(transaction: Transaction) -> None:
            withheld_inputs = self._storage.inputs.store(transaction, call, sent)
            body = records.closed(
                call, now_ms, state="succeeded", latency_ms=metadata["latency_ms"], source="replay", summary=None,
                extra={**extra, **withheld_inputs},
            )  # fmt: skip
            transaction.append("closed", call.id, body)

        call.recorded = True
        try:
            await self._journal.commit(unit)
        finally:
            self._storage.inputs.abandon(sent)
        call.move("succeeded")
        self._observer.closed(call, metadata, "replay")
        if self._observer.audience:
            self._observer.emit("tool.invocation.succeeded", call)
            self._observer.emit("tool.result.created", call)
        outcome = self._storage.outcomes.open(found)
        decision, ref, size, reason = outcome["persistence"]
        if ref is not None and verified.value is None:
            decision, reason = "link", await self._storage.payloads.why_gone(ref)
        elif decision in ("inline", "redact"):
            ref = None  # the payload exists for the key alone
        metadata |= {"original_invocation_id": found.call, "executed_at": iso(found.at_ms)}
        metadata |= outcome.get("metadata", {})
        return Result(
            invocation_id=call.id,
            tool=tool.ref,
            state="succeeded",
            created_ms=now_ms,
            trace_id=call.trace_id,
            metadata=metadata,
            value=verified.value,
            source="replay",
            persistence=Persistence(
                decision=decision,
                ref=ref,
                size=size,
                reason=reason,
                private=ref is not None and tool.private,
                shown=preview_chars(tool.contract.manifest.max_inline_chars),
            ),
            redacted=verified.more.redacted,
            artifacts=verified.more.artifacts,
        )

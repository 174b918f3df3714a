"""Background calls in the store: every server on it can tell their callers how they are, and give them the results.

A row is written before the id of the call is given away, and again with the result. It is encrypted, counts against the
caller's quotas and expires by the time of the store, as stored results do. A call whose server has died without a
result is closed by the first process that notices (`gateway.reconcile`), and the journal tells of it from then on.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

from interlock.call.artifacts import recalled
from interlock.call.results import Persistence, Result
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.core.threads import DEFINITIONS, INPUTS
from interlock.data.bounds import LARGE_INPUT, size_of
from interlock.data.canonical import decode, digest, encode
from interlock.gateway import reconcile
from interlock.store import payloads, records
from interlock.store.payloads import Payload

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.call.context import Caller
    from interlock.call.phases import Request
    from interlock.data.schema import Json
    from interlock.store.port import Transaction, Unit

_log = logging.getLogger("interlock.api")

LIFETIME_MS: Final = 86_400_000
# A larger result is kept by the server that ran the call, and by no other.
LARGEST: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A background call in the store.

    `running`: its server lives and has not written the end yet. `abandoned`: its server died before that.
    """

    tool: str
    version: str | None
    running: bool
    abandoned: bool
    discarded: bool
    result: Result | None


class BackgroundResults:
    """Writes and reads the rows of background calls."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def begin(self, request: Request, call_id: str, caller: Caller) -> None:
        """Note that this server runs a call."""
        mine = self._parts.instance.id
        document = {"at": mine, "tool": request.tool, "version": request.version}
        put = self._put(call_id, caller, document, checked=False)
        # Other servers find out whom to ask to cancel it, and close it if this one dies before it has any record.
        ask = reconcile.ask(call_id, mine, await self._record(request))

        def unit(transaction: Transaction) -> None:
            put(transaction)
            ask(transaction)

        await self._parts.journal.commit(unit)

    async def _record(self, request: Request) -> bytes:
        """Return the facts about a call that are known before it begins, in the form of a record."""
        from interlock.gateway.open_call import open_call  # those who look at calls make none

        parts = self._parts
        call = open_call(request, parts.clock)
        capability = None if request.caller is None else request.caller.capability
        with suppress(Failure):  # the call will be refused for it
            version = await parts.catalog.resolve(request.tool, request.version, capability, request.caller)
            if not version.at_hand:
                await DEFINITIONS.run(version.compile)
            call.tool = version.prepared
        with suppress(Failure):
            large = size_of(request.arguments, LARGE_INPUT) > LARGE_INPUT
            call.input_hash = await INPUTS.run(digest, request.arguments) if large else digest(request.arguments)
        return records.encode(records.head(call, call.started_ms))

    def forget(self, call_id: str) -> None:
        """Remove what was noted of a call that is not made after all."""

        def unit(transaction: Transaction) -> None:
            payloads.remove(transaction, _ref(call_id))
            reconcile.end(transaction, call_id)

        self._parts.journal.post(unit)

    async def keep(self, call_id: str, caller: Caller, tool: str, version: str | None, result: Result | None) -> None:
        """Store the end of a call, with its result if there is one and it fits."""
        document: Json = {"at": None, "tool": tool, "version": version}
        try:
            await self._end(call_id, self._put(call_id, caller, {**document, "result": _written(result)}))
        except (Failure, TypeError, ValueError) as error:
            _log.warning("the result of background call %s stays at this server: %s", call_id, error)
            await self._end(call_id, self._put(call_id, caller, document, checked=False))

    async def _end(self, call_id: str, put: Unit[None]) -> None:
        def unit(transaction: Transaction) -> None:
            put(transaction)
            reconcile.end(transaction, call_id)

        await self._parts.journal.commit(unit)

    async def discard(self, call_id: str, caller: Caller) -> None:
        """Let go of a result, at every server."""
        stored = await self.find(call_id, caller)
        if stored is not None:
            document = {"at": None, "tool": stored.tool, "version": stored.version, "discarded": True}
            await self._parts.journal.commit(self._put(call_id, caller, document, checked=False))

    async def find(self, call_id: str, caller: Caller) -> Stored | None:
        """Return a background call of this caller; None for calls of others, and once its time is over."""
        ref, now_ms = _ref(call_id), self._parts.clock.now_ms()
        found = await self._parts.journal.read(lambda reader: payloads.owned_until(reader, ref, now_ms))
        if found is None or found.body is None or found.owner != f"{caller.tenant}/{caller.id}":
            return None
        document = cast("Json", decode(self._parts.box.open(found.body, purpose="payload", about=ref)))
        at: str | None = document["at"]
        running = at is not None and self._parts.instance.alive(at)
        written: Json | None = document.get("result")
        result = None if written is None else _read(written)
        abandoned = at is not None and not running
        return Stored(
            document["tool"], document["version"], running, abandoned, bool(document.get("discarded")), result
        )

    def _put(self, call_id: str, caller: Caller, document: Json, *, checked: bool = True) -> Unit[None]:
        ref, body = _ref(call_id), encode(document)
        owner = f"{caller.tenant}/{caller.id}"
        if len(body) > LARGEST:
            raise Failure("E3416", f"it has more than {LARGEST:,} bytes")

        def unit(transaction: Transaction) -> None:
            if checked:
                self._parts.storage.payloads.check_room(transaction, caller, len(body))
            payloads.remove(transaction, ref)
            sealed = self._parts.box.seal(body, purpose="payload", about=ref)
            now_ms = transaction.now_ms
            payloads.insert(
                transaction, Payload(ref, call_id, owner, sealed, len(body), now_ms, now_ms + LIFETIME_MS, "")
            )

        return unit


def _ref(call_id: str) -> str:
    return f"background:{call_id}"


def _written(result: Result | None) -> Json | None:
    if result is None:
        return None
    kept = result.persistence
    return {
        "call": result.invocation_id,
        "tool": result.tool,
        "state": result.state,
        "created_ms": result.created_ms,
        "trace_id": result.trace_id,
        "metadata": dict(result.metadata),
        "value": result.value,
        "error": None if result.error is None else _written_failure(result.error),
        "source": result.source,
        "persistence": {
            "decision": kept.decision, "ref": kept.ref, "size": kept.size, "reason": kept.reason,
            "private": kept.private, "shown": kept.shown,
        },
        "redacted": list(result.redacted),
        "artifacts": [one.document() for one in result.artifacts],
    }  # fmt: skip


def _read(written: Json) -> Result:
    error: Json | None = written["error"]
    return Result[Any](
        invocation_id=written["call"],
        tool=written["tool"],
        state=written["state"],
        created_ms=written["created_ms"],
        trace_id=written["trace_id"],
        metadata=written["metadata"],
        value=written["value"],
        error=None if error is None else _read_failure(error),
        source=written["source"],
        persistence=Persistence(**written["persistence"]),
        redacted=tuple(written["redacted"]),
        artifacts=recalled(written["artifacts"]),
    )


def _written_failure(failure: Failure) -> Json:
    return {
        "code": failure.code,
        "message": failure.message,
        "details": None if failure.details is None else dict(failure.details),
        "retryable": failure.retryable,
        "retry_after_ms": failure.retry_after_ms,
        "native_error_ref": failure.native_error_ref,
        "policy_refs": list(failure.policy_refs),
        "evidence_refs": list(failure.evidence_refs),
        "resolution": failure.resolution,
        "unsettled": failure.unsettled,
    }


def _read_failure(written: Json) -> Failure:
    more: Json = {name: one for name, one in written.items() if name not in ("code", "message")}
    more["policy_refs"], more["evidence_refs"] = tuple(more["policy_refs"]), tuple(more["evidence_refs"])
    return Failure(written["code"], written["message"], **more)

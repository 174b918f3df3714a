"""Operations on calls that were made: end them, undo them, read what they left.

Rights: a caller with a token reaches the calls that are theirs (`gateway.ownership`); others do not exist for them
(E3702). A caller without a token is the user of the data directory itself or a program that uses the library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from interlock.call.phases import Reason, Request
from interlock.core.clock import new_id
from interlock.core.errors import Failure
from interlock.data.canonical import derive_key, tenant_secret
from interlock.gateway import inputs
from interlock.gateway.inputs import Inputs
from interlock.store import ledger, payloads, records

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.call.checkpoints import Checkpoint
    from interlock.call.context import Caller
    from interlock.call.results import Result
    from interlock.data.schema import Json


class CallRecords:
    """The calls of one data directory, after they were made."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def cancel(self, call_id: str, reason: Reason) -> str:
        """End a call that this process runs. Answers canceled, unsupported or finished."""
        if await self._parts.remote_cancel.runs(call_id) is not None:
            return "unsupported"  # at once; `call_off` asks the process that runs it
        return self._parts.gateway.cancellation.cancel(call_id, reason)

    async def call_off(self, call_id: str, reason: Reason) -> str:
        """End a call, whichever process runs it. With the reason `discard`, remove what a finished call left."""
        parts = self._parts
        owner = await parts.remote_cancel.runs(call_id)
        if owner is not None:
            return await parts.remote_cancel.cancel(call_id, owner, reason)
        answer = parts.gateway.cancellation.cancel(call_id, reason)
        if answer == "finished" and reason == "discard":
            await parts.journal.commit(parts.storage.payloads.discard(call_id))
        return answer

    async def undo(
        self,
        call_id: str,
        *,
        by: Caller,
        key: str,
        door: str,
        trace_id: str | None = None,
        on_progress: Callable[[Json], None] | None = None,
    ) -> Result:
        """Run the compensation that a call stored when it succeeded. Governed like any call of the caller."""
        await self._require_own(call_id, by)
        closed = await self._closed(call_id)
        if closed is None:
            raise Failure("E3702", f"no call {call_id} is on record")
        return await self._parts.gateway.invoke(
            Request(
                tool=closed["toolId"],
                arguments={},
                caller=by,
                key=key,
                trace_id=trace_id,
                operation="compensate",
                parent=call_id,
                door=door,
                on_progress=on_progress,
            )
        )

    async def payload(self, ref: str, *, by: Caller) -> bytes:
        """The full bytes of a result that was kept instead of sent. Only for the caller that made the call."""
        parts = self._parts
        found = await parts.journal.read(lambda reader: payloads.find(reader, ref))
        if found is None or found.owner != f"{by.tenant}/{by.id}" or not ref.startswith("payload:"):
            raise Failure("E3702", f"no payload `{ref}`")
        if not await self._is_own(found.call, by):
            raise Failure("E3702", f"no payload `{ref}`")
        body = await parts.storage.payloads.read(ref)
        if body is None:
            why = await parts.journal.read(lambda reader: payloads.reason(reader, ref))
            raise Failure("E3702", f"the payload `{ref}` is gone: {why}")
        return body

    async def payload_of(self, call: str, *, by: Caller) -> str:
        """The reference of the result of a call that was kept, by the id of the call or its beginning (E3702)."""
        from interlock.api.history import find

        parts = self._parts
        history = await find(parts, call, by)
        ref = f"payload:{history.facts.get('replayOf') or history.call}"
        if not await parts.journal.read(lambda reader: payloads.exists(reader, ref)):
            files = "its files: interlock calls save" if history.facts.get("artifacts") else "see interlock calls show"
            raise Failure("E3702", f"call {history.call} has no result that was kept", resolution=files)
        return ref

    async def checkpoints(self, call_id: str, *, by: Caller) -> list[Checkpoint]:
        """The checkpoints that a call has saved, oldest first. Only for the caller that made it."""
        await self._require_own(call_id, by)
        return await self._parts.gateway.checkpoints.seen_by(by, call_id)

    async def inputs(self, call_id: str) -> Callable[[], Inputs]:
        """The four inputs of a call, found and not opened yet: they may be large, and can be opened on another thread.

        E3702 if the call is not on record. Values are as they were, private ones too: callers redact them.
        """
        parts = self._parts
        stored = await parts.storage.inputs.find(call_id)
        if stored is not None:
            return lambda: inputs.read(stored())
        closed = await self._closed(call_id)
        if closed is None:
            raise Failure("E3702", f"no call `{call_id}` has ended")
        from interlock.data.defaults import default_at

        try:
            contract = (await parts.catalog.exact(closed["toolId"], closed["version"])).contract
            default_of = partial(default_at, contract.input)
        except (Failure, KeyError):
            default_of = _without_default  # the tool was removed, or never existed
        changes = inputs.from_record(closed, default_of)
        return lambda: Inputs(None, None, None, None, changes, closed.get("inputsWithheld", ""))

    def note_reading(self, call_id: str, caller: Caller) -> None:
        """Record that somebody reads calls of others, which is reading the journal."""
        clock = self._parts.clock
        ref, sought = new_id(clock.now_ms(), clock.random_bytes(10)), {"call": call_id}
        body = records.plain("audit.read", ref, clock.now_ms(), by=caller.acting, what="call", sought=sought)
        self._parts.journal.record("audit.read", ref, body)

    async def key_for(self, tool: str, step: str, params: Mapping[str, Any], *, session: str, by: Caller) -> str:
        """An idempotency key that the same step of the same tenant always gives again, also after a restart."""
        from interlock.api.shared_secrets import home_secret  # loaded where somebody derives a key

        secret = tenant_secret(await home_secret(self._parts.journal), by.tenant)
        return derive_key(secret, session_id=session, tool_id=tool, step_id=step, params=dict(params))

    async def _closed(self, call_id: str) -> Json | None:
        record = await self._parts.journal.read(lambda reader: ledger.newest_of_kind(reader, call_id, "closed"))
        return None if record is None else orjson.loads(record)

    async def _is_own(self, call_id: str, by: Caller) -> bool:
        return by.capability is None or await self._parts.ownership.has_call(by, call_id)

    async def _require_own(self, call_id: str, by: Caller) -> None:
        if not await self._is_own(call_id, by):
            raise Failure("E3702", f"no call `{call_id}` of yours is on record")


def _without_default(_: str) -> None:
    return None

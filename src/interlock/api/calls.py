"""Calls, as endpoints make and follow them: in the foreground or background, with progress and status."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from interlock.api.background_calls import BackgroundCalls
from interlock.api.call_records import CallRecords
from interlock.api.call_views import evidence, failure_on_record, inputs_for_auditors, persistence_of, span_on_record
from interlock.api.progress import EventHistories
from interlock.api.rights import require
from interlock.call.connector import Interaction
from interlock.call.phases import REASONS, Reason, Request
from interlock.call.results import Result
from interlock.core.clock import Deadline, new_ids
from interlock.core.errors import Failure
from interlock.core.record import step
from interlock.data.bounds import LONGEST_NAME
from interlock.store.calls import facts_in
from interlock.telemetry.w3c import joined

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.api.surfaces import Surfaces
    from interlock.call.context import Caller
    from interlock.call.prepared import Prepared
    from interlock.core.clock import Clock
    from interlock.core.turns import Turn
    from interlock.data.schema import Json
    from interlock.gateway.fast_path import RunningRead

LONGEST_ID = 200


@step
class Ask:
    """A call as a wire asks for it. `trace` is a W3C traceparent."""

    tool: str
    arguments: Mapping[str, Any]
    version: str | None = None
    key: str | None = None
    session: str = ""
    timeout_s: float | None = None
    dry_run: bool = False
    task: str | None = None
    trace: str | None = None
    interaction: Interaction | None = None
    # By which ids the one who asks knows this call; see `native_id`.
    native: Mapping[str, Any] | None = None
    # The client's own identity of this request, where its wire has one.
    identity: str | None = None


def native_id(stated: object) -> int | str:
    """An id of the caller's making as it may be kept: one that is too long for that by its digest."""
    if type(stated) is int and -(2**63) <= stated < 2**63:
        return stated
    text = str(stated)
    if len(text) <= LONGEST_ID:
        return text
    return f"sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"


# many methods: one for each request that a client can make about its calls
class Calls:
    """The calls of one server."""

    def __init__(self, parts: Parts, surfaces: Surfaces | None = None) -> None:
        self._parts = parts
        self._surfaces = surfaces
        self._records = CallRecords(parts)
        self.background = BackgroundCalls(parts)
        self._histories = EventHistories(parts.listen)

    # Making

    @cached_property
    def finish(self) -> Callable[[RunningRead], Coroutine[Any, Any, Result]]:
        """Wait for a read that `begin` has begun; returns its result. If it is cancelled, that is put on record."""
        return self._parts.gateway.finish  # not called from here: a read would pass one more function

    async def invoke(
        self,
        ask: Ask,
        caller: Caller,
        *,
        door: str,
        call_id: str | None = None,
        on_progress: Callable[[Json], None] | None = None,
        turn: Turn | None = None,
    ) -> Result:
        """Make a call and wait for its end, or for the news that a person must agree first."""
        if self._surfaces is not None and self._surfaces.concern(door):
            caller = await self._surfaces.attach(caller, door)
        request = _request(ask, caller, self._parts.clock, door, on_progress, call_id=call_id)
        return await self._parts.gateway.invoke(request, turn)

    def open(
        self,
        ask: Ask,
        caller: Caller,
        *,
        door: str,
        on_progress: Callable[[Json], None] | None = None,
        tool: Prepared | None = None,
    ) -> tuple[str, Coroutine[Any, Any, Result]]:
        """Return the id of a call, by which it can be stopped, and what makes it and returns its result.

        The caller has their surface already. `tool` is what the catalog has for the call, if it was just looked up.
        """
        return self._parts.gateway.open(_request(ask, caller, self._parts.clock, door, on_progress), tool)

    def begin(
        self,
        address: str,
        arguments: Json,
        caller: Caller,
        door: str,
        native: Mapping[str, Any] | None,
        trace: str | None,
        tool: Prepared,
    ) -> Result | RunningRead | None:
        """Begin a call with arguments and a trace and nothing else, if it may take the fast path.

        `tool` is what the catalog has for the address. Returns the result, or a read of which `finish` returns it. None
        if nothing has happened: `invoke` makes the call.
        """
        request = Request(
            address, arguments, caller, None, None, None, "", trace, None, None, False, "invoke", native, None, door
        )  # fmt: skip
        return self._parts.gateway.fast_path.take(request, tool)

    async def start(self, ask: Ask, caller: Caller, *, door: str) -> str:
        """Make a call in the background. Its id, by which it is followed at any server on the store."""
        _refuse_long(ask)
        clock = self._parts.clock
        call_id, trace_id = new_ids(clock.now_ms(), clock.random_bytes(24))
        request = _request(ask, caller, clock, door, call_id=call_id)
        if request.trace_id is None:
            request = replace(request, trace_id=trace_id)
        await self.background.announce(request, call_id, caller)
        self.background.add(call_id, ask, caller, asyncio.create_task(self._attach_and_invoke(request, caller)))
        return call_id

    async def _attach_and_invoke(self, request: Request, caller: Caller) -> Result:
        if self._surfaces is not None and self._surfaces.concern(request.door):
            request = replace(request, caller=await self._surfaces.attach(caller, request.door))
        return await self._parts.gateway.invoke(request)

    async def adopt(self, call_id: str, ask: Ask, caller: Caller, door: str, task: asyncio.Task[Result]) -> None:
        """Go on in the background with a call that somebody waited for until now. Raises E3701 if there is no room."""
        request = _request(ask, caller, self._parts.clock, door, call_id=call_id)
        await self.background.adopt(request, call_id, caller, task)

    # Following

    async def result(self, call_id: str, caller: Caller) -> Result | None:
        """The result of a background call of this caller, while it is kept."""
        return await self.background.result(call_id, caller)

    async def outcome(self, call_id: str, caller: Caller) -> Result | None:
        """The result of a call that the caller may see (`find` says so), while it is kept; of a failure, what is on
        record for as long as the journal has it. None while the call runs in the background.
        """
        if await self.background.runs_for(call_id, caller):
            return None  # its record may be there already, and the result with all its words comes a moment later
        kept = await self.result(call_id, caller)
        return kept or failure_on_record(await self._history(call_id, caller))

    async def _history(self, call_id: str, caller: Caller) -> list[Json]:
        """The records of a call. If its server has died, the call is closed first, so that it has one end for all."""
        history = await self._parts.ownership.history(call_id)
        closed = any(record.get("kind") == "closed" for record in history)
        if not closed and await self.background.is_abandoned(call_id, caller):
            await self._parts.background.close_dead_calls()
            history = await self._parts.ownership.history(call_id)
        return history

    async def status(self, call_id: str, caller: Caller, *, own: bool = False) -> Json:
        """The state of a call by the journal; E3702 for calls that the caller may not see.

        Auditors see those of their tenant, and local ones all; but with `own` it must be the caller's.
        """
        if await self.background.runs_for(call_id, caller):
            return {"invocation_id": call_id, "status": "running"}
        outcome = await self.result(call_id, caller)
        history = await self._history(call_id, caller)
        if outcome is not None:
            result = outcome.document()
            return {
                "invocation_id": call_id, "status": outcome.state, "result": result, **evidence(history),
            }  # fmt: skip
        facts = facts_in(history)
        closed = any(record.get("kind") == "closed" for record in history)
        mine = await self._parts.ownership.has(caller, facts)
        audited = "audit:read" in caller.scopes and caller.tenant in ("local", facts.get("tenant"))
        if not history or not (mine or (audited and not own)):
            raise Failure("E3702", f"no call `{call_id}` of yours is on record")
        if not mine:
            self._records.note_reading(call_id, caller)
        states: list[str] = facts.get("states") or []
        failed = failure_on_record(history)
        return {
            "invocation_id": call_id,
            "status": states[-1]
            if closed and states
            else "awaiting_approval"
            if facts.get("approvalTicketId")
            else "running",
            "tool_id": facts.get("toolId"),
            "version": facts.get("version"),
            "error_code": facts.get("error_code"),
            "approval_ticket_id": facts.get("approvalTicketId"),
            "approval": facts.get("approval"),
            "trace_id": facts.get("traceId"),
            "latency_ms": facts.get("latencyMs"),
            "outcome": facts.get("outcome"),
            "artifacts": facts.get("artifacts", []),
            "handoffs": facts.get("handoffs", []),
            "persistence": await persistence_of(facts, self._parts.storage.payloads),
            **({} if failed is None else {"result": failed.document()}),
            **evidence(history),
        }

    async def find(self, call_id: str, caller: Caller, *, own: bool = False) -> Json:
        """The same of a call that may just have ended, so that its record is not written yet (`audit = "batched"`)."""
        try:
            return await self.status(call_id, caller, own=own)
        except Failure:
            await self._parts.journal.commit(lambda _: None)  # behind all that is on its way to the disk
            return await self.status(call_id, caller, own=own)

    async def trace(self, call_id: str, caller: Caller) -> Json:
        """The spans of the trace that a call belongs to, oldest first; E3702 for calls that the caller may not see.

        Callers see the calls of the trace that are their own, auditors (audit:read) all of their tenant. `complete` is
        false where the spans of the call itself are not kept in this process: it was not traced, another process made
        it, or later calls took their place. Then one span tells what the journal has of the call.
        """
        await self._parts.journal.commit(lambda _: None)  # the record of a read may not be written yet
        await self.status(call_id, caller)
        facts = facts_in(await self._parts.ownership.history(call_id))
        trace_id = str(facts.get("traceId") or "")
        telemetry, own = self._parts.telemetry, self._parts.ownership
        reached = telemetry.traced_calls(trace_id, caller)
        if "audit:read" not in caller.scopes:
            reached = {one for one in reached if await own.has_call(caller, one)}
        spans = telemetry.trace(trace_id, caller, reached.__contains__)
        complete = any(span["attributes"].get("tool.invocation_id") == call_id for span in spans)
        if not complete and facts.get("kind") == "closed":
            spans = sorted([*spans, span_on_record(call_id, trace_id, facts)], key=lambda span: span["start"])
        return {"invocation_id": call_id, "trace_id": trace_id, "complete": complete, "spans": spans}

    async def inputs(self, call_id: str, caller: Caller) -> Json:
        """The four inputs of a call and their differences, redacted, for auditors (audit:read). Each look is on record.

        A hook may put values into an input that are not for the caller, so who made a call does not see them. They may
        be large, so they are opened and redacted beside the event loop.
        """
        require(caller, "audit:read", "to see the inputs of calls")
        await self.find(call_id, caller)
        self._records.note_reading(call_id, caller)
        facts = facts_in(await self._parts.ownership.history(call_id))
        schema: Json = {}
        with suppress(Failure, KeyError):
            version = await self._parts.catalog.exact(facts["toolId"], facts["version"])
            schema = version.contract.input.document
        found = await self._records.inputs(call_id)
        shown = await inputs_for_auditors(found, self._parts.authority.redactor.for_schema(schema))
        return {"invocation_id": call_id, "input_hash": facts.get("inputHash"), **shown}

    async def checkpoints(
        self, call_id: str, caller: Caller, *, after: int, limit: int
    ) -> tuple[list[Json], int | None]:
        """A page of the checkpoints of a call of this caller, and its cursor; E3702 for calls of others."""
        await self.status(call_id, caller, own=True)
        found = await self._parts.gateway.checkpoints.of(call_id, after=after, limit=limit)
        return [one.document() for one in found], found[-1].sequence if len(found) == limit else None

    async def follow(
        self, call_id: str, caller: Caller, *, after: int | None = None
    ) -> AsyncGenerator[tuple[int | None, Json]]:
        """Events of a call as they happen, each with its number, then its status. Ends when the call does.

        With `after` it goes on behind that event. Where those that came next are kept no longer, that is told instead,
        by what has no number. Of a call that another process on this home runs, only the status is heard.
        """
        task = self.background.task(call_id)
        await self.find(call_id, caller)  # is it theirs
        at = after or 0
        with self._histories.followed(call_id, task) as (history, anew):
            if history is not None:
                # Without a place to go on from, it is heard from now on.
                at = history.count if anew or after is None else min(at, history.count)
            if anew and after is not None:
                yield None, _missed(call_id, None)
            while history is not None:
                before, events = history.behind(at)
                if before > at:
                    yield None, _missed(call_id, before - at if at >= history.began else None)
                for number, event in enumerate(events, before + 1):
                    yield number, event
                at = before + len(events)
                if at < history.count:
                    continue
                if task is None or task.done():
                    break
                await history.changed(task)
        if task is not None:
            await asyncio.wait({task})  # even where it is done: its result is kept a turn later
            status = await self.status(call_id, caller)
        else:
            await self.background.ended(call_id, caller)
            await self._parts.remote_cancel.ended(call_id)
            status = await self.find(call_id, caller)  # it may have ended since the first look
        yield at + 1, {"event_class": "tool.invocation.status", **status}

    # Ending

    async def cancel(self, call_id: str, caller: Caller, reason: str | None = None) -> str:
        """Ask for a call to end that runs, is queued or waits for a person: canceled, unsupported or finished.

        With the reason `discard`, the result and the files of a finished call are let go of; its envelope stays.
        """
        if reason is not None and reason not in REASONS:
            raise Failure("E3004", f"`reason` is one of {', '.join(REASONS)}")
        why = cast("Reason", reason or "interruption")
        await self.find(call_id, caller, own=True)
        if await self._parts.approvals.withdraw(call_id, by=caller):
            return "canceled"
        answer = await self._records.call_off(call_id, why)
        if why == "discard":
            await self.background.discard(call_id, caller)
        return answer

    def interrupt(self, call_id: str) -> str:
        """The same for a call of this process whose client is gone. It need not be on record yet."""
        return self._parts.cancel_here(call_id, "interruption")

    async def resume(self, call_id: str, caller: Caller) -> Result:
        """Go on with a call that a person has agreed to. Nothing else can be resumed: no profile states it (E3109)."""
        status = await self.find(call_id, caller, own=True)
        ticket = status.get("approval_ticket_id") or _ticket(await self.result(call_id, caller))
        if ticket is None:
            raise Failure("E3109", f"call `{call_id}` does not wait for a decision, and its tool cannot be resumed")
        return await self._parts.approved_calls.resume(ticket)

    async def close(self, within_s: float = 10.0) -> None:
        """Let background calls end; after the given time they are cut off, which is on record."""
        await self.background.close(within_s)
        self._histories.close()


def _request(
    ask: Ask,
    caller: Caller,
    clock: Clock,
    door: str,
    on_progress: Callable[[Json], None] | None = None,
    call_id: str | None = None,
) -> Request:
    """The request of a call."""
    if ask.session or ask.task:
        _refuse_long(ask)
    deadline = None if ask.timeout_s is None else Deadline(at=clock.monotonic() + ask.timeout_s)
    trace = None if ask.trace is None else joined(ask.trace)
    return Request(
        ask.tool, ask.arguments, caller, call_id, ask.version, ask.key, ask.session, trace, None, deadline, ask.dry_run,
        "invoke", ask.native, None, door, on_progress, ask.task, None, (), ask.interaction, ask.identity,
    )  # fmt: skip


def _refuse_long(ask: Ask) -> None:
    """Refuse (E3004) names that would fill the journal, where each call leaves them."""
    if len(ask.session) > LONGEST_NAME or (ask.task is not None and len(ask.task) > LONGEST_NAME):
        raise Failure("E3004", f"sessions and tasks have names of at most {LONGEST_NAME} characters")


def _missed(call_id: str, count: int | None) -> Json:
    """Tells a follower of events that are kept no longer; of None, nobody knows how many."""
    return {"event_class": "tool.invocation.events_missed", "invocation_id": call_id, "missed": count}


def _ticket(result: Result | None) -> str | None:
    return None if result is None or not result.pending else result.metadata["pending"]["ticketId"]

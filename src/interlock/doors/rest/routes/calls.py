"""Calls that were made: where they stand, what happens to them, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response, StreamingResponse

from interlock.api.listing import Wanted, moment
from interlock.call.artifacts import is_file
from interlock.core.errors import Failure
from interlock.data.canonical import encode
from interlock.data.schema import Json
from interlock.doors.rest import models
from interlock.doors.rest.answers import of_result, of_status
from interlock.doors.rest.invoke import DOOR, unforeseen
from interlock.doors.rest.models import administration
from interlock.doors.rest.operation import ACCEPTED, Ask, Id, json, reply, says, streams
from interlock.doors.rest.progress import SILENCE_S

FILE = "application/octet-stream"
_LONGEST_NUMBER = 16
LastEvent = Annotated[str, Header(description="the last event you have: the stream goes on behind it")]
_APART = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}

router = APIRouter(prefix="/v1", tags=["calls"])


@router.get("/calls", **says(models.CallLines))
async def list_calls(ask: Ask, query: Annotated[models.CallsQuery, Query()]) -> Response:
    """Calls of yours, newest first: those that run or wait for a person, and those that have ended.

    With `audit:read`, those of all callers of your tenant; that they were read is on record.
    """
    wanted = Wanted(
        state=query.state, error=query.error, tool=query.tool, caller=query.caller,
        since=_iso(query.since, "since"), until=_iso(query.until, "until"),
    )  # fmt: skip
    found, before = await ask.service.listing.page(wanted, by=ask.caller, before=query.before, limit=query.limit)
    return json({"calls": found, "before": before})


@router.get("/calls/top", **says(models.CallsTop))
async def top_calls(ask: Ask, query: Annotated[models.TopQuery, Query()]) -> Response:
    """Which tools fail most or are called most, or who spent most. Needs `audit:read`."""
    since, until = _iso(query.since, "since"), _iso(query.until, "until")
    return json(await ask.service.listing.top(query.by, by=ask.caller, since=since, until=until, limit=query.limit))


@router.get("/calls/unknown", **says(administration.UnknownCalls))
async def list_unknown_calls(ask: Ask) -> Response:
    """Calls whose outcome is unknown, which a person has to settle. Needs `calls:reconcile` in the tenant `local`."""
    return json({"unknown": await ask.service.administration.unknown_calls.unknown(by=ask.caller)})


def _iso(at: datetime | None, name: str) -> str | None:
    return None if at is None else moment(at.isoformat(), name)


@router.get("/calls/{invocation_id}", **says(models.CallStatus))
async def show_call(invocation_id: Id, ask: Ask) -> Response:
    """The state of a call of yours, and its outcome: a result while that is stored, a failure always."""
    calls = ask.service.calls
    return json(of_status(await calls.find(invocation_id, ask.caller), await calls.outcome(invocation_id, ask.caller)))


@router.get(
    "/calls/{invocation_id}/events",
    **streams("text/event-stream", "events as they happen, then the status", {"type": "string"}),
)
async def follow_call(invocation_id: Id, ask: Ask, last_event_id: LastEvent = "") -> Response:
    """The events of a call of yours, as server-sent events: progress, partial results and states."""
    calls = ask.service.calls
    await calls.find(invocation_id, ask.caller)  # refused before the stream begins
    known = last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < _LONGEST_NUMBER
    events = frames(ask, calls.follow(invocation_id, ask.caller, after=int(last_event_id) if known else None))
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def frames(ask: Ask, events: AsyncGenerator[tuple[int | None, Json]]) -> AsyncGenerator[bytes]:
    """Events as frames of a stream, with a comment now and then while nothing happens.

    A stream outlives its request, so its token is checked again before each frame. When it has expired or was revoked,
    the envelope that says so is the last frame. So is that of a failure midway, whose status can be told no more.
    """
    coming = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=SILENCE_S)
            if (refused := ask.service.refusal(ask.caller)) is not None:
                yield b"event: error\ndata: " + encode(refused.envelope(ask.trace_id)) + b"\n\n"
                return
            if not done:
                yield b": nothing new\n\n"
                continue
            try:
                result = coming.result()
            except Exception as error:  # noqa: BLE001 - no exception leaves an endpoint
                failure = error if isinstance(error, Failure) else unforeseen(error, ask.trace_id)
                yield b"event: error\ndata: " + encode(failure.envelope(ask.trace_id)) + b"\n\n"
                return
            if result is None:
                return
            number, event = result
            place = "" if number is None else f"id: {number}\n"
            yield f"{place}event: {event['event_class']}\ndata: ".encode() + encode(event) + b"\n\n"
            coming = asyncio.ensure_future(anext(events, None))
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await events.aclose()


@router.get("/calls/{invocation_id}/checkpoints", **says(models.Checkpoints))
async def list_checkpoints(invocation_id: Id, ask: Ask, query: Annotated[models.CheckpointsQuery, Query()]) -> Response:
    """The checkpoints of a call of yours, oldest first. A damaged one has an error (E3904)."""
    saved, after = await ask.service.calls.checkpoints(invocation_id, ask.caller, after=query.after, limit=query.limit)
    return json({"checkpoints": saved, "after": after})


@router.get("/calls/{invocation_id}/inputs", **says(models.CallInputs))
async def read_inputs(invocation_id: Id, ask: Ask) -> Response:
    """The four inputs of a call and their differences, redacted. Needs `audit:read`; each look is on record."""
    return json(await ask.service.calls.inputs(invocation_id, ask.caller))


@router.get("/calls/{invocation_id}/trace", **says(models.CallTrace))
async def read_trace(invocation_id: Id, ask: Ask) -> Response:
    """The spans of the trace that a call of yours belongs to. With `audit:read`, of every call of your tenant."""
    return json(await ask.service.calls.trace(invocation_id, ask.caller))


@router.post("/calls/{invocation_id}/cancel", **says(models.Cancelled))
async def cancel_call(invocation_id: Id, ask: Ask, query: Annotated[models.CancelQuery, Query()]) -> Response:
    """Ask for a call of yours to end. `discard` also lets go of the result and the files of one that has ended."""
    outcome = await ask.service.calls.cancel(invocation_id, ask.caller, query.reason)
    return json({"invocation_id": invocation_id, "outcome": outcome})


@router.post("/calls/{invocation_id}/undo", **says(models.Called, 200, "it succeeded", also=ACCEPTED))
async def undo_call(invocation_id: Id, body: models.UndoBody, ask: Ask) -> Response:
    """Undo a call of yours, if it stored how. Governed like any call."""
    undone = await ask.service.undo(invocation_id, by=ask.caller, key=body.idempotency_key, door=DOOR, trace=ask.trace)
    return reply(of_result(undone))


@router.post("/calls/{invocation_id}/settle", **says(administration.Settled))
async def settle_call(invocation_id: Id, body: administration.SettleBody, ask: Ask) -> Response:
    """Settle a call whose outcome is unknown, after looking at the world. Needs `calls:reconcile` in the tenant
    `local`."""
    stated = "result" in body.model_fields_set
    settled = await ask.service.administration.unknown_calls.settle(
        invocation_id, by=ask.caller, happened=body.happened, result=body.result, stated=stated
    )
    return json({"settled": settled})


@router.get("/payloads/{ref}", **streams("application/json", "the whole result", {}, also=FILE))
async def read_payload(ref: Id, ask: Ask) -> Response:
    """A result of yours that was too large to be sent with its call, or a file that a call of yours left."""
    body = await ask.service.app.read_payload(ref, caller=ask.caller)
    if is_file(ref):
        # INVARIANT: what a tool wrote is never taken for a page of ours.
        return Response(body, media_type=FILE, headers=_APART)
    return Response(body, media_type="application/json")

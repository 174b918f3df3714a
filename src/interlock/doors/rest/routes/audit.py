"""The journal, read and proven."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response, StreamingResponse

from interlock.api.audit import Sought
from interlock.core.clock import iso
from interlock.core.errors import Failure
from interlock.data.canonical import encode
from interlock.doors.rest import models
from interlock.doors.rest.invoke import DOOR, unforeseen
from interlock.doors.rest.operation import Ask, json, says, streams
from interlock.doors.rest.routes.calls import frames

router = APIRouter(prefix="/v1", tags=["audit"])


@router.get("/audit/records", **says(models.Records))
async def list_records(ask: Ask, query: Annotated[models.RecordsQuery, Query()]) -> Response:
    """Records of the journal, in their order. Needs `audit:read`; that they were read is on record too."""
    sought = Sought(
        call=query.call, tool=query.tool, caller=query.caller, kind=query.kind, since=_iso(query.since),
        until=_iso(query.until),
    )  # fmt: skip
    found, after = await ask.service.audit.records(
        sought, by=ask.caller, door=DOOR, after=query.after, limit=query.limit
    )
    return json({"records": found, "after": after})


def _iso(at: datetime | None) -> str | None:
    return None if at is None else iso(round(at.timestamp() * 1000))


@router.get("/audit/verify", **says(models.Verdict))
async def verify_journal(ask: Ask) -> Response:
    """Recompute the whole chain and check it against its signed heads. Needs `audit:read`."""
    return json(await ask.service.audit.verify(by=ask.caller, door=DOOR))


@router.get(
    "/audit/export",
    **streams("application/x-ndjson", "every record, a line for each", {"type": "string"}),
)
async def export_journal(ask: Ask) -> Response:
    """The whole journal as JSON lines, byte for byte as it is chained. Needs `audit:read`."""
    lines = _to_the_end(ask, await ask.service.audit.export(by=ask.caller, door=DOOR))
    return StreamingResponse(lines, media_type="application/x-ndjson")


async def _to_the_end(ask: Ask, lines: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The lines of an export. After a failure midway the last line is its envelope, so it does not pass for whole."""
    try:
        async for some in lines:
            yield some
    except Exception as error:  # noqa: BLE001 - no exception leaves an endpoint
        failure = error if isinstance(error, Failure) else unforeseen(error, ask.trace_id)
        yield encode({"error": failure.envelope(ask.trace_id)}) + b"\n"
    finally:
        await lines.aclose()


@router.get("/events", **streams("text/event-stream", "events as they happen", {"type": "string"}))
async def follow_events(ask: Ask) -> Response:
    """All events of this server as they happen, as server-sent events: declarations, changes of the list of tools,
    calls, hooks, decisions, results, errors and alerts. Needs `audit:read` in the tenant `local`; that they are read is
    on record."""
    events = frames(ask, await ask.service.events.follow(by=ask.caller, door=DOOR))
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})

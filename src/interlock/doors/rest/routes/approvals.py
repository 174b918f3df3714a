"""Calls that wait for a person, and what was agreed to in advance."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response

from interlock.doors.rest import models
from interlock.doors.rest.operation import Ask, Id, json, says

router = APIRouter(prefix="/v1", tags=["approvals"])


@router.get("/approvals", **says(models.Tickets))
async def list_tickets(ask: Ask, query: Annotated[models.TicketsQuery, Query()]) -> Response:
    """Calls that wait for a person: those you asked for, and those you may decide on."""
    return json({"tickets": await ask.service.approvals.tickets(by=ask.caller, every=query.all)})


@router.get("/approvals/standing", **says(models.Advances))
async def list_standing(ask: Ask) -> Response:
    """Standing approvals that you gave or that apply to you."""
    return json({"standing": await ask.service.approvals.standing(by=ask.caller)})


@router.post("/approvals/standing", **says(models.Advance, 201, "agreed"))
async def grant_standing(body: models.GrantBody, ask: Ask) -> Response:
    """Agree in advance to calls of one tool by one caller, within bounds. For people in the tool's groups."""
    granted = await ask.service.approvals.agree_in_advance(
        body.tool, by=ask.caller, caller=body.caller, arguments=body.arguments, uses=body.uses,
        lifetime_s=body.expires_in_s, versions=body.versions,
    )  # fmt: skip
    return json(granted, 201)


@router.delete("/approvals/standing/{standing_id}", **says(models.Advance))
async def revoke_standing(standing_id: Id, ask: Ask) -> Response:
    """Take back what was agreed to in advance. It counts at once."""
    return json(await ask.service.approvals.take_back(standing_id, by=ask.caller))


@router.get("/approvals/{ticket_id}", **says(models.Ticket))
async def show_ticket(ticket_id: Id, ask: Ask) -> Response:
    """One ticket: who asks for what, what it would change, who was told, what was decided."""
    return json(await ask.service.approvals.ticket(ticket_id, by=ask.caller))


@router.post("/approvals/{ticket_id}/approve", **says(models.Ticket))
async def approve_ticket(ticket_id: Id, body: models.ApproveBody, ask: Ask) -> Response:
    """Agree to one call, once. For people in a group that was asked, and never for the caller itself."""
    approvals = ask.service.approvals
    return json(await approvals.approve(ticket_id, by=ask.caller, comment=body.comment, edit=body.edit))


@router.post("/approvals/{ticket_id}/deny", **says(models.Ticket))
async def deny_ticket(ticket_id: Id, body: models.DenyBody, ask: Ask) -> Response:
    """Say no. The call ends and nothing is run."""
    return json(await ask.service.approvals.deny(ticket_id, by=ask.caller, comment=body.comment))

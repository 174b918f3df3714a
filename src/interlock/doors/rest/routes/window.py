"""Tools in the context window of a model: what they take, and which to load."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from interlock.doors.rest.models import window as models
from interlock.doors.rest.operation import Ask, json, says

router = APIRouter(prefix="/v1")


@router.get("/tools/cost", tags=["tools"], **says(models.TokenCosts))
async def count_tokens(ask: Ask) -> Response:
    """The tokens that the tools you can use take in a model's context window: as an index, and with full schemas."""
    return json(await ask.service.lock.token_costs(caller=ask.caller))

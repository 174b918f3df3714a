"""Tools in the context window of a model: what they take, and which to load."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response

from interlock.doors.rest.models import window as models
from interlock.doors.rest.operation import Ask, Id, json, says
from interlock.window.reading import Part

router = APIRouter(prefix="/v1")


@router.get("/tools/cost", tags=["tools"], **says(models.TokenCosts))
async def count_tokens(ask: Ask) -> Response:
    """The tokens that the tools you can use take in a model's context window: as an index, and with full schemas."""
    return json(await ask.service.app.token_costs(caller=ask.caller))


@router.get("/tools/affordances", tags=["tools"], **says(models.Affordances))
async def fit_tools(ask: Ask, query: Annotated[models.AffordancesQuery, Query()]) -> Response:
    """The tools you can use within a budget of tokens: a line for each, and full schemas of the most useful."""
    found = await ask.service.app.affordances(budget=query.budget, query=query.q, caller=ask.caller)
    return json(found.document())


@router.get("/tools/{tool_id}/schema", tags=["tools"], **says(models.SchemaPart))
async def show_schema(tool_id: Id, ask: Ask, query: Annotated[models.SchemaQuery, Query()]) -> Response:
    """A part of a tool's input schema, by its JSON pointer: what `affordances` left out under `x-detail`."""
    return json(await ask.service.app.schema_part(tool_id, query.at, caller=ask.caller))


@router.get("/payloads/{ref}/part", tags=["calls"], **says(models.PayloadPart))
async def read_part(ref: Id, ask: Ask, query: Annotated[models.PartQuery, Query()]) -> Response:
    """A part of a result of yours that was too large to be sent: by JSON pointer, by JMESPath, by range."""
    part = Part(at=query.at, query=query.q, start=query.start, stop=query.stop, tokens=query.tokens)
    return json(await ask.service.app.read_part(ref, part, caller=ask.caller))

"""Surfaces: what a caller is offered, and loading what is not."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response

from interlock.doors.rest.models import surface as models
from interlock.doors.rest.operation import Ask, json, says
from interlock.doors.rest.routes.tools import tool_document

router = APIRouter(prefix="/v1")


@router.get("/surface", tags=["tools"], **says(models.Surface))
async def show_surface(ask: Ask, query: Annotated[models.SurfaceQuery, Query()]) -> Response:
    """The tools you are offered, each with the reason: loaded, deferred or blocked. The surface of another
    caller, and all that is blocked or excluded, needs `tools:admin`."""
    views = ask.service.surface_views
    return json(await views.show(by=ask.caller, who=query.caller, cursor=query.cursor, limit=query.limit))


@router.post("/tools/load", tags=["tools"], **says(models.Loaded))
async def load_tools(body: models.LoadBody, ask: Ask) -> Response:
    """Load deferred tools, by name: returns what they take. They are on your surface from then on."""
    found = await ask.service.surfaces.load(body.names, ask.caller)
    return json({"tools": [tool_document(ask.service.tools, one) for one in found]})


@router.get("/tools/recommendations", tags=["tools"], **says(models.Recommendations))
async def recommend_tools(ask: Ask, query: Annotated[models.RecommendationsQuery, Query()]) -> Response:
    """Tools that are used together with one, or that others of your groups use. From the calls of your own tenant."""
    found = await ask.service.app.recommend(query.tool, caller=ask.caller)
    return json({"tools": [one.document() for one in found]})


@router.post("/tools/select", tags=["tools"], **says(models.Selected))
async def select_tool(body: models.SelectBody, ask: Ask) -> Response:
    """Choose a tool for a request among those that you can see, and say how. No call is made; it is on record."""
    made = await ask.service.app.select(
        body.request,
        caller=ask.caller,
        allocation=body.allocation,
        cheaper=body.cheaper,
        faster=body.faster,
        intent=body.intent,
        session=body.session,
        door="rest",
    )
    return json(made.document())

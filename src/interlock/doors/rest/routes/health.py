"""Whether the process is alive, and whether calls can be served. Needs no token."""

from __future__ import annotations

from typing import cast

from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.service import Service
from interlock.doors.rest import models
from interlock.doors.rest.operation import json

router = APIRouter(tags=["health"])


@router.get("/health", status_code=200, response_model=None, responses={200: {"model": models.Alive}})
async def tell_health(request: Request) -> Response:
    """Whether the process is alive. Needs no token."""
    status, document = cast("Service", request.scope["interlock.service"]).health.alive()
    return json(document, status)


@router.get(
    "/ready",
    status_code=200,
    response_model=None,
    responses={200: {"model": models.Ready}, 503: {"model": models.Ready, "description": "a dependency is down"}},
)
async def tell_readiness(request: Request) -> Response:
    """Whether calls can be served, dependency by dependency. Needs no token."""
    status, document = await cast("Service", request.scope["interlock.service"]).health.readiness()
    return json(document, status)

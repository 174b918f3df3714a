"""Routes of upstreams: list, show, probe, add, refresh, accept changes, remove."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from interlock.doors.rest import models
from interlock.doors.rest.operation import Ask, Id, json, says

router = APIRouter(prefix="/v1", tags=["upstreams"])


@router.get("/upstreams", **says(models.Upstreams))
async def list_upstreams(ask: Ask) -> Response:
    """Every upstream with its tools and their states. Needs `tools:admin`."""
    return json(await ask.service.upstreams.all(by=ask.caller))


@router.post("/upstreams", **says(models.Report, 201, "connected"))
async def add_upstream(body: models.AddUpstreamBody, ask: Ask) -> Response:
    """Connect to a system that runs elsewhere, and serve those of its tools that are admitted. Needs `tools:admin`."""
    upstreams = ask.service.upstreams
    return json(await upstreams.add(body.name, body.kind, body.config, by=ask.caller, overlay=body.overlay), 201)


@router.post("/upstreams/preview", **says(models.Report))
async def preview_upstream(body: models.AddUpstreamBody, ask: Ask) -> Response:
    """Report what adding an upstream would do. Connects to it, and changes nothing. Needs `tools:admin`."""
    upstreams = ask.service.upstreams
    return json(await upstreams.preview(body.name, body.kind, body.config, by=ask.caller, overlay=body.overlay))


@router.get("/upstreams/{name}", **says(models.Upstream))
async def show_upstream(name: Id, ask: Ask) -> Response:
    """One upstream. For a tool that changed: `changes`, each part as it was admitted and as it is offered now, and
    `seen`, the digest to accept it by. Needs `tools:admin`."""
    return json(await ask.service.upstreams.one(name, by=ask.caller))


@router.post("/upstreams/{name}/probe", **says(models.Probed))
async def probe_upstream(name: Id, ask: Ask) -> Response:
    """Check whether an upstream answers, and whether it offers the same tools as before. Needs `tools:admin`."""
    return json(await ask.service.upstreams.probe(name, by=ask.caller))


@router.delete("/upstreams/{name}", **says(models.Removed))
async def remove_upstream(name: Id, ask: Ask) -> Response:
    """Remove an upstream; its tools are sunset. Needs `tools:admin`."""
    return json(await ask.service.upstreams.remove(name, by=ask.caller))


@router.post("/upstreams/{name}/refresh", **says(models.Report))
async def refresh_upstream(name: Id, body: models.RefreshBody, ask: Ask) -> Response:
    """Discover the tools of an upstream again. Changed ones wait until a person accepts them. Needs `tools:admin`."""
    report = await ask.service.upstreams.refresh(
        name, by=ask.caller, overlay=body.overlay, accept_hints=body.accept_hints
    )
    return json(report)


@router.post("/upstreams/{name}/accept", **says(models.Report))
async def accept_upstream(name: Id, body: models.AcceptBody, ask: Ask) -> Response:
    """Accept changed definitions as new versions. For people with `tools:admin`."""
    report = await ask.service.upstreams.accept(
        name, by=ask.caller, tools=body.tools, reason=body.reason, shown=body.shown
    )
    return json(report)

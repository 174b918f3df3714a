"""Tools, as callers see them and operators register them; and how they are called."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from fastapi.responses import Response

from interlock.api.tools import DEFAULT_LIMIT, PAGE, Tools, Version
from interlock.contract.standard.export import shown
from interlock.core.clock import iso
from interlock.data.schema import Json
from interlock.doors.rest import models
from interlock.doors.rest.answers import of_result
from interlock.doors.rest.invoke import DOOR
from interlock.doors.rest.operation import ACCEPTED, Ask, Id, bearer, json, reply, says

router = APIRouter(prefix="/v1")


@router.post("/tools/register", tags=["tools"], **says(models.Registered, 201, "admitted"))
async def register_tool(manifest: models.ManifestBody, ask: Ask) -> Response:
    """Register a tool by its manifest. Needs `tools:admin`. Refused with every gap it has (E3105)."""
    return json(await ask.service.registration.register(manifest.root, by=ask.caller), 201)


@router.get("/tools", tags=["tools"], **says(models.Tools))
async def list_tools(ask: Ask, query: Annotated[models.ToolsQuery, Query()]) -> Response:
    """The tools that your token lets you use, a page at a time; with `q`, those that fit it, best first.

    With `expected`, without those that do not take the input that you would send.
    """
    tools, surfaces = ask.service.tools, ask.service.surfaces
    if query.q is not None:
        most = query.limit or DEFAULT_LIMIT
        found, loaded, deferred = await surfaces.search_at(query.q, ask.caller, DOOR, most, query.by, query.expected)
        scored = [{**tool_document(tools, one.version), "score": one.score} for one in loaded]
        return json({"tools": scored, "deferred": deferred, "cursor": None, **found.facts()})
    shown = await surfaces.page(ask.caller, DOOR, query.cursor, query.limit or PAGE, query.expected)
    return json({"tools": [tool_document(tools, version) for version in shown.versions], "cursor": shown.cursor})


@router.post(
    "/tools/invoke",
    tags=["calls"],
    dependencies=[Depends(bearer)],
    **says(models.Called, 200, "it succeeded", also=ACCEPTED),
)
async def invoke_tool(
    call: models.InvokeBody,
    idempotency_key: Annotated[str | None, Header(description="the same as in the body")] = None,
) -> Response:
    """Call a tool. A call that changes something needs a key of your own: sent twice, it is done once.

    With `Accept: text/event-stream`, its progress is told in events until the last one, whose data is the status and
    the body of the answer.
    """
    raise AssertionError(call, idempotency_key)  # the edge hands these requests to the invoke route


@router.post("/tools/negotiate", tags=["tools"], **says(models.Negotiated))
async def negotiate_tools(body: models.NegotiateBody, ask: Ask) -> Response:
    """Compare tools with what you expect of them; returns those that you can use."""
    matches = await ask.service.tools.negotiate(body.expected, ask.caller)
    usable = [tool_document(ask.service.tools, one.version) for one in matches if one.usable]
    return json({"matches": [one.document() for one in matches], "tools": usable})


@router.get("/tools/declarations", tags=["tools"], **says(models.Declarations))
async def declare_tools(ask: Ask, query: Annotated[models.DeclarationsQuery, Query()]) -> Response:
    """The tools that your token lets you use, as OpenAI, Anthropic or Gemini take them, a page at a time."""
    found, cursor = await ask.service.providers.declarations(
        query.provider, ask.caller, strict=query.strict, names=query.tool, cursor=query.cursor, limit=query.limit
    )
    return json({"tools": found, "cursor": cursor})


@router.post("/tools/calls", tags=["calls"], **says(models.ProviderAnswer, 200, "it is made, or waits for a person"))
async def call_as_asked(body: models.ProviderCallBody, ask: Ask) -> Response:
    """Make a call that a model asked for, and get the message that tells it. The provider's id of it is its key.

    A call that fails is a message too, so that the model reads why; so is a tool that does not exist, and arguments
    that are not JSON.
    """
    made = await ask.service.providers.call(
        body.call, ask.caller, door=DOOR, key=body.idempotency_key, session=body.session_id, trace=ask.trace
    )
    words = {"message": made.message, "follow_up": made.follow_up}
    return json({"invocation_id": made.result.invocation_id, "state": made.result.state, **words})


@router.post("/tools/resume/{invocation_id}", tags=["calls"], **says(models.Called, 200, "it succeeded", also=ACCEPTED))
async def resume_call(invocation_id: Id, ask: Ask) -> Response:
    """Go on with a call that a person has agreed to."""
    return reply(of_result(await ask.service.calls.resume(invocation_id, ask.caller)))


@router.get("/tools/{tool_id}", tags=["tools"], **says(models.Tool))
async def show_tool(tool_id: Id, ask: Ask, query: Annotated[models.ToolQuery, Query()]) -> Response:
    """One tool: what it takes, what it gives, what it changes, and its interface."""
    found = await ask.service.tools.find(tool_id, query.version, ask.caller)
    about = {"interface": ask.service.tools.interface(found), "warnings": list(found.contract.warnings)}
    return json({**tool_document(ask.service.tools, found), **about})


@router.get("/tools/{tool_id}/versions", tags=["tools"], **says(models.Versions))
async def list_versions(tool_id: Id, ask: Ask) -> Response:
    """Every version of a tool that your token lets you use, the oldest first, with its state."""
    versions = await ask.service.tools.versions(tool_id, ask.caller)
    return json({"tool_id": versions[0].row.address, "versions": [_version(one) for one in versions]})


@router.get("/tools/{tool_id}/diff", tags=["tools"], **says(models.Comparison))
async def compare_versions(tool_id: Id, ask: Ask, query: Annotated[models.CompareQuery, Query()]) -> Response:
    """The changes between two versions of a tool, and the step up in version that they need."""
    return json(await ask.service.tools.compare(tool_id, query.old, query.new, ask.caller))


@router.post("/tools/{tool_id}/deprecate", tags=["tools"], **says(models.Deprecated))
async def deprecate_tool(tool_id: Id, body: models.DeprecateBody, ask: Ask) -> Response:
    """Announce the end of one version, or correct what was announced. It runs on until its removal date. Needs
    `tools:admin`."""
    return json(await ask.service.registration.deprecate(tool_id, by=ask.caller, **body.model_dump()))


@router.get("/quarantine", tags=["tools"], **says(models.QuarantineEntries))
async def list_quarantine(ask: Ask) -> Response:
    """The versions that are or were in quarantine, each with the reason. Needs `tools:admin`."""
    return json({"quarantine": await ask.service.registration.quarantined(by=ask.caller)})


@router.post("/quarantine/release", tags=["tools"], **says(models.Released))
async def release_tool(body: models.ReleaseBody, ask: Ask) -> Response:
    """Release a version from quarantine. For people with `tools:admin`; on record with the reason."""
    return json(await ask.service.registration.release(body.tool, reason=body.reason, by=ask.caller))


def _version(version: Version) -> Json:
    row = version.row
    notice = None if row.notice is None else row.notice.document()
    return {"version": row.version, "state": row.state, "published_at": iso(row.published_ms), "deprecation": notice}


def tool_document(tools: Tools, version: Version) -> Json:
    """A tool for those who call it; what runs it and where it came from is the operator's affair."""
    document = shown(version.contract)
    document.pop("namespace", None)
    availability = tools.availability(version)
    about = {"availability": availability, "timeout": tools.timeout(version)}
    return {**document, "tool_id": version.row.address, **_version(version), **about}

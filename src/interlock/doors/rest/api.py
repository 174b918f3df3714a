"""The wide API: everything a client may do over REST, described by an OpenAPI 3.1 document.

    Edge ──► FastAPI ──► Service
      └────► Invoke            the hot route, which needs no framework

The edge bounds every body before anything reads it, puts each request into its trace, and answers for whatever was not
foreseen. Operations translate and do nothing else; who may do what is the service's to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException

from interlock import __version__
from interlock.core.canonical import encode
from interlock.core.clock import iso
from interlock.core.context import Caller
from interlock.core.errors import Failure
from interlock.core.schema import Json
from interlock.doors.asgi import App, Disconnected, Message, Receive, Scope, Send, answer, header, read_body, replay
from interlock.doors.rest import models
from interlock.doors.rest.answers import Reply, of_failure, of_result, of_status
from interlock.doors.rest.hot import DOOR, Invoke, unforeseen
from interlock.doors.rest.page import CSP, page
from interlock.registry.catalog import Version
from interlock.service import Service
from interlock.service.admin import Sought
from interlock.service.tools import sees
from interlock.telemetry.w3c import joined

# How long a stream of events is silent at most: what sits between may cut a connection on which nothing moves.
SILENCE_S = 15.0

_bearer = HTTPBearer(auto_error=False, bearerFormat="JWT", description="a capability token: interlock token issue")


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks, with which token, in which trace, and whom."""

    service: Service
    caller: Caller
    token: str
    trace: str | None


async def _asked(request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)] = None) -> Asked:
    service = cast("Service", request.app.state.service)
    authorization = request.headers.get("authorization")
    caller = service.known(authorization) or await service.authenticate(authorization)
    assert authorization is not None
    return Asked(service, caller, authorization.partition(" ")[2].strip(), request.scope["interlock.trace"])


Ask = Annotated[Asked, Depends(_asked)]
Id = Annotated[str, Path(min_length=1, max_length=600)]

_TRACED: Json = {"X-Trace-Id": {"description": "the trace that this belongs to", "schema": {"type": "string"}}}
_LATER: Json = {"Retry-After": {"description": "seconds to wait before trying again", "schema": {"type": "integer"}}}


def _refused(words: str) -> Json:
    return {"model": models.Refusal, "description": words, "headers": _TRACED | _LATER}


_REFUSALS: dict[int | str, Json] = {
    400: _refused("the request is malformed (E3004), or the input does not fit (E33xx)"),
    401: _refused("no token, or one that does not hold"),
    403: _refused("not allowed"),
    404: _refused("there is no such thing, or not for you"),
    "4XX": _refused("refused; the error table in the reference has every code"),
    "5XX": _refused("failed; `retryable` says whether to try again"),
}


def _says(model: Any, status: int = 200, words: str = "as asked", **more: Any) -> Json:
    """What an operation answers, for the document."""
    responses = {
        status: {"model": model, "description": words, "headers": _TRACED},
        **more.pop("also", {}),
        **_REFUSALS,
    }
    return {"status_code": status, "response_model": None, "responses": responses, **more}


def _streams(media_type: str, words: str, schema: Json) -> Json:
    content: Json = {media_type: {"schema": schema}}
    responses = {200: {"description": words, "content": content, "headers": _TRACED}, **_REFUSALS}
    return {"response_model": None, "response_class": Response, "responses": responses}


_ACCEPTED: dict[int | str, Json] = {
    202: {"model": models.Accepted, "description": "it goes on in the background, or waits for a person"}
}

api = APIRouter(prefix="/v1")


def _json(document: Any, status: int = 200) -> Response:
    return Response(encode(document), status, media_type="application/json")


def _reply(reply: Reply) -> Response:
    response = Response(reply.body, reply.status, media_type="application/json")
    response.raw_headers.extend(reply.headers)
    return response


# Tools


@api.post("/tools/register", tags=["tools"], **_says(models.Registered, 201, "admitted"))
async def register_tool(manifest: models.ManifestBody, ask: Ask) -> Response:
    """Register a tool by its manifest. Needs `tools:admin`. Refused with every gap it has (E3105)."""
    return _json(await ask.service.admin.register(manifest.root, by=ask.caller), 201)


@api.get("/tools", tags=["tools"], **_says(models.Tools))
async def list_tools(ask: Ask, query: Annotated[models.ToolsQuery, Query()]) -> Response:
    """The tools that your token lets you use, a page at a time; with `q`, those that fit it, best first."""
    tools = ask.service.tools
    if query.q is not None:
        found = tools.search(query.q, ask.caller, query.limit)
        return _json({"tools": [_tool(version) for version in found], "cursor": None})
    shown = tools.page(ask.caller, query.cursor, query.limit)
    return _json({"tools": [_tool(version) for version in shown.versions], "cursor": shown.cursor})


@api.post(
    "/tools/invoke",
    tags=["calls"],
    dependencies=[Depends(_bearer)],
    **_says(models.Called, 200, "it succeeded", also=_ACCEPTED),
)
async def invoke_tool(
    call: models.InvokeBody,
    idempotency_key: Annotated[str | None, Header(description="the same as in the body")] = None,
) -> Response:
    """Call a tool. A call that changes something needs a key of your own: sent twice, it is done once."""
    raise AssertionError(call, idempotency_key)  # the edge hands these requests to the hot route


@api.post("/tools/resume/{invocation_id}", tags=["calls"], **_says(models.Called, 200, "it succeeded", also=_ACCEPTED))
async def resume_call(invocation_id: Id, ask: Ask) -> Response:
    """Go on with a call that a person has agreed to."""
    return _reply(of_result(await ask.service.calls.resume(invocation_id, ask.caller)))


@api.get("/tools/{tool_id}", tags=["tools"], **_says(models.Tool))
async def show_tool(tool_id: Id, ask: Ask, query: Annotated[models.ToolQuery, Query()]) -> Response:
    """One tool: what it takes, what it gives, what it changes."""
    return _json(_tool(ask.service.tools.find(tool_id, query.version, ask.caller)))


@api.get("/tools/{tool_id}/versions", tags=["tools"], **_says(models.Versions))
async def list_versions(tool_id: Id, ask: Ask) -> Response:
    """Every version of a tool that your token lets you use, the oldest first, with its state."""
    newest = ask.service.tools.find(tool_id, None, ask.caller)
    versions = ask.service.lock.catalog.versions(newest.row.address).values()
    shown = [one for one in versions if sees(ask.caller, one)]
    return _json({"tool_id": newest.row.address, "versions": [_version(one) for one in shown]})


@api.post("/tools/{tool_id}/deprecate", tags=["tools"], **_says(models.Deprecated))
async def deprecate_tool(tool_id: Id, body: models.DeprecateBody, ask: Ask) -> Response:
    """Announce the end of one version. It runs on until its removal date. Needs `tools:admin`."""
    return _json(await ask.service.admin.deprecate(tool_id, by=ask.caller, **body.model_dump()))


def _version(version: Version) -> Json:
    row = version.row
    notice = None if row.notice is None else row.notice.document()
    return {"version": row.version, "state": row.state, "published_at": iso(row.published_ms), "deprecation": notice}


def _tool(version: Version) -> Json:
    """A tool for those who call it; what runs it and where it came from is the operator's affair."""
    manifest = version.contract.manifest
    told = manifest.document()
    for name in ("execution", "sandbox", "tool_id", "namespace", "lifecycle_state"):
        told.pop(name, None)
    return {"mutation_class": manifest.mutation_class, **told, "tool_id": manifest.address, **_version(version)}


# Calls


@api.get("/calls/{invocation_id}", tags=["calls"], **_says(models.CallStatus))
async def show_call(invocation_id: Id, ask: Ask) -> Response:
    """Where a call of yours stands, and its outcome while that is kept."""
    calls = ask.service.calls
    return _json(of_status(calls.status(invocation_id, ask.caller), calls.result(invocation_id, ask.caller)))


@api.get(
    "/calls/{invocation_id}/events",
    tags=["calls"],
    **_streams("text/event-stream", "events as they happen, then the status", {"type": "string"}),
)
async def follow_call(invocation_id: Id, ask: Ask) -> Response:
    """What happens to a call of yours, as server-sent events: progress, partial results, states, and how it stands."""
    calls = ask.service.calls
    calls.status(invocation_id, ask.caller)  # refused before the stream begins
    events = _frames(calls.follow(invocation_id, ask.caller))
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def _frames(events: AsyncGenerator[Json]) -> AsyncGenerator[bytes]:
    """Events as frames of a stream, with a comment now and then while nothing happens."""
    number = 0
    coming = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=SILENCE_S)
            if not done:
                yield b": still running\n\n"
                continue
            event = coming.result()
            if event is None:
                return
            number += 1
            yield f"id: {number}\nevent: {event['event_class']}\n".encode() + b"data: " + encode(event) + b"\n\n"
            coming = asyncio.ensure_future(anext(events, None))
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await events.aclose()


@api.post("/calls/{invocation_id}/cancel", tags=["calls"], **_says(models.Cancelled))
async def cancel_call(invocation_id: Id, ask: Ask) -> Response:
    """Ask for a call of yours to end."""
    outcome = ask.service.calls.cancel(invocation_id, ask.caller)
    return _json({"invocation_id": invocation_id, "outcome": outcome})


@api.post("/calls/{invocation_id}/undo", tags=["calls"], **_says(models.Called, 200, "it succeeded", also=_ACCEPTED))
async def undo_call(invocation_id: Id, body: models.UndoBody, ask: Ask) -> Response:
    """Undo a call of yours, if it stored how. Governed like any call."""
    undone = await ask.service.admin.undo(
        invocation_id, by=ask.caller, key=body.idempotency_key, door=DOOR, trace=ask.trace
    )
    return _reply(of_result(undone))


@api.get("/payloads/{ref}", tags=["calls"], **_streams("application/json", "the whole result", {}))
async def read_payload(ref: Id, ask: Ask) -> Response:
    """A result that was too large to be sent with its call."""
    body = ask.service.lock.read_payload(ref, caller=ask.caller)
    return Response(body, media_type="application/json")


# Approvals


@api.get("/approvals", tags=["approvals"], **_says(models.Tickets))
async def list_tickets(ask: Ask, query: Annotated[models.TicketsQuery, Query()]) -> Response:
    """Calls that wait for a person: those you asked for, and those you may decide on."""
    return _json({"tickets": ask.service.admin.tickets(by=ask.caller, every=query.all)})


@api.get("/approvals/standing", tags=["approvals"], **_says(models.Advances))
async def list_standing(ask: Ask) -> Response:
    """What was agreed to in advance, by you or for you."""
    return _json({"standing": ask.service.admin.standing(by=ask.caller)})


@api.post("/approvals/standing", tags=["approvals"], **_says(models.Advance, 201, "agreed"))
async def grant_standing(body: models.GrantBody, ask: Ask) -> Response:
    """Agree in advance to calls of one tool by one caller, within bounds. For people in the tool's groups."""
    granted = await ask.service.admin.agree_in_advance(
        body.tool, by=ask.caller, caller=body.caller, arguments=body.arguments, uses=body.uses,
        lifetime_s=body.expires_in_s, versions=body.versions,
    )  # fmt: skip
    return _json(granted, 201)


@api.delete("/approvals/standing/{standing_id}", tags=["approvals"], **_says(models.Advance))
async def revoke_standing(standing_id: Id, ask: Ask) -> Response:
    """Take back what was agreed to in advance. It counts at once."""
    return _json(await ask.service.admin.take_back(standing_id, by=ask.caller))


@api.get("/approvals/{ticket_id}", tags=["approvals"], **_says(models.Ticket))
async def show_ticket(ticket_id: Id, ask: Ask) -> Response:
    """One ticket: who asks for what, what it would change, who was told, what was decided."""
    return _json(await ask.service.admin.ticket(ticket_id, by=ask.caller))


@api.post("/approvals/{ticket_id}/approve", tags=["approvals"], **_says(models.Ticket))
async def approve_ticket(ticket_id: Id, body: models.ApproveBody, ask: Ask) -> Response:
    """Agree to one call, once. For people in a group that was asked, and never for whoever asked."""
    admin = ask.service.admin
    return _json(await admin.approve(ticket_id, by=ask.caller, comment=body.comment, edit=body.edit))


@api.post("/approvals/{ticket_id}/deny", tags=["approvals"], **_says(models.Ticket))
async def deny_ticket(ticket_id: Id, body: models.DenyBody, ask: Ask) -> Response:
    """Say no. The call ends and nothing is run."""
    return _json(await ask.service.admin.deny(ticket_id, by=ask.caller, comment=body.comment))


# Tokens


@api.post("/tokens/issue", tags=["tokens"], **_says(models.Issued, 201, "issued"))
async def issue_token(body: models.IssueBody, ask: Ask) -> Response:
    """Issue a token, which hangs below yours and holds no more. Needs `tokens:issue`."""
    issued = await ask.service.admin.issue(
        by=ask.caller, agent=body.agent, person=body.person, user=body.behalf, scopes=body.scopes, ttl_s=body.ttl_s,
        **_narrowing(body),
    )  # fmt: skip
    return _json(issued, 201)


@api.post("/tokens/delegate", tags=["tokens"], **_says(models.Issued, 201, "passed on"))
async def delegate_token(body: models.DelegateBody, ask: Ask) -> Response:
    """Pass a token on, narrowed: what is not said stays as it is, and nothing can become more."""
    passed = await ask.service.admin.delegate(
        body.token or ask.token, by=ask.caller, to=body.to, scopes=body.scopes, ttl_s=body.ttl_s, **_narrowing(body)
    )
    return _json(passed, 201)


@api.post("/tokens/revoke", tags=["tokens"], **_says(models.Revoked))
async def revoke_token(body: models.RevokeBody, ask: Ask) -> Response:
    """Void a token, a link, an identity or a key, and everything that hangs on it. Needs `tokens:issue`."""
    return _json(await ask.service.admin.revoke(body.ref, by=ask.caller, reason=body.reason))


@api.post("/tokens/inspect", tags=["tokens"], **_says(models.TokenPicture))
async def inspect_token(body: models.InspectBody, ask: Ask) -> Response:
    """Whether a token holds, and why not; who gave it to whom, and what each of them may do."""
    return _json(await ask.service.admin.inspect(body.token))


def _narrowing(body: models.Narrowing) -> Json:
    limits = None if body.constraints is None else body.constraints.model_dump(exclude_none=True)
    return {"tools": body.tools, "resources": body.resources, "constraints": limits}


# Policy


@api.get("/policy", tags=["policy"], **_says(models.Policy))
async def show_policy(ask: Ask) -> Response:
    """The rules in force, as they are written. Needs `policy:read`."""
    return _json(ask.service.admin.policy(by=ask.caller))


@api.put("/policy", tags=["policy"], **_says(models.Applied))
async def apply_policy(body: models.ApplyBody, ask: Ask) -> Response:
    """Make a text the policy, if it has no faults. Needs `policy:admin`; on record."""
    return _json(await ask.service.admin.apply_policy(body.text, by=ask.caller, instead_of=body.instead_of))


@api.post("/policy/check", tags=["policy"], **_says(models.Checked))
async def check_policy(body: models.PolicyBody, ask: Ask) -> Response:
    """What is wrong with a policy, by the tools there are. Needs `policy:read`."""
    return _json(ask.service.admin.check_policy(body.text, by=ask.caller))


@api.post("/policy/explain", tags=["policy"], **_says(models.Explanation))
async def explain_policy(body: models.ExplainBody, ask: Ask) -> Response:
    """Why somebody may make a call, or may not, and what would have to change. Needs `policy:read`."""
    return _json(ask.service.admin.explain(by=ask.caller, door=DOOR, **body.model_dump()))


# Audit


@api.get("/audit/records", tags=["audit"], **_says(models.Records))
async def list_records(ask: Ask, query: Annotated[models.RecordsQuery, Query()]) -> Response:
    """Records of the journal, in their order. Needs `audit:read`; that they were read is on record too."""
    sought = Sought(
        call=query.call, tool=query.tool, caller=query.caller, kind=query.kind, since=_iso(query.since),
        until=_iso(query.until),
    )  # fmt: skip
    found, after = await ask.service.admin.records(
        sought, by=ask.caller, door=DOOR, after=query.after, limit=query.limit
    )
    return _json({"records": found, "after": after})


def _iso(at: datetime | None) -> str | None:
    return None if at is None else iso(round(at.timestamp() * 1000))


@api.get("/audit/verify", tags=["audit"], **_says(models.Verdict))
async def verify_journal(ask: Ask) -> Response:
    """Recompute the whole chain and check it against its signed heads. Needs `audit:read`."""
    return _json(await ask.service.admin.verify(by=ask.caller, door=DOOR))


@api.get(
    "/audit/export",
    tags=["audit"],
    **_streams("application/x-ndjson", "every record, a line for each", {"type": "string"}),
)
async def export_journal(ask: Ask) -> Response:
    """The whole journal as JSON lines, byte for byte as it is chained. Needs `audit:read`."""
    lines = await ask.service.admin.export(by=ask.caller, door=DOOR)
    return StreamingResponse(lines, media_type="application/x-ndjson")


# Upstreams


@api.get("/upstreams", tags=["upstreams"], **_says(models.Upstreams))
async def list_upstreams(ask: Ask) -> Response:
    """Every upstream, what it offers, and what became of that. Needs `tools:admin`."""
    return _json({"upstreams": ask.service.admin.upstreams(by=ask.caller)})


@api.post("/upstreams", tags=["upstreams"], **_says(models.Report, 201, "connected"))
async def add_upstream(body: models.AddUpstreamBody, ask: Ask) -> Response:
    """Connect to a system that runs elsewhere, and serve those of its tools that are admitted. Needs `tools:admin`."""
    admin = ask.service.admin
    return _json(await admin.add_upstream(body.name, body.kind, body.config, by=ask.caller, overlay=body.overlay), 201)


@api.delete("/upstreams/{name}", tags=["upstreams"], **_says(models.Removed))
async def remove_upstream(name: Id, ask: Ask) -> Response:
    """Let go of an upstream; its tools are sunset. Needs `tools:admin`."""
    return _json(await ask.service.admin.remove_upstream(name, by=ask.caller))


@api.post("/upstreams/{name}/refresh", tags=["upstreams"], **_says(models.Report))
async def refresh_upstream(name: Id, body: models.RefreshBody, ask: Ask) -> Response:
    """Look again at what an upstream offers. What has changed waits until a person accepts it. Needs `tools:admin`."""
    return _json(await ask.service.admin.refresh_upstream(name, by=ask.caller, overlay=body.overlay))


@api.post("/upstreams/{name}/accept", tags=["upstreams"], **_says(models.Report))
async def accept_upstream(name: Id, body: models.AcceptBody, ask: Ask) -> Response:
    """Accept changed definitions as new versions. For people with `tools:admin`."""
    admin = ask.service.admin
    report = await admin.accept_upstream(name, by=ask.caller, tools=body.tools, reason=body.reason, shown=body.shown)
    return _json(report)


# Health

health = APIRouter(tags=["health"])


@health.get("/health", status_code=200, response_model=None, responses={200: {"model": models.Alive}})
async def tell_health() -> Response:
    """Whether the process is alive. Needs no token."""
    return _json({"status": "healthy", "version": __version__})


@health.get(
    "/ready",
    status_code=200,
    response_model=None,
    responses={200: {"model": models.Ready}, 503: {"model": models.Ready, "description": "a dependency is down"}},
)
async def tell_readiness(request: Request) -> Response:
    """Whether calls can be served, dependency by dependency. Needs no token."""
    status, parts = await cast("Service", request.app.state.service).admin.ready()
    return _json({"status": status, "dependencies": parts}, 503 if status == "down" else 200)


# The application


def make_app(service: Service) -> App:
    """The whole of it over one service."""
    app = FastAPI(
        title="Interlock",
        version=__version__,
        summary="Tools for agents, under control.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.service = service
    app.include_router(api)
    app.include_router(health)
    app.add_api_route("/docs", _docs, include_in_schema=False, response_class=HTMLResponse)
    app.add_exception_handler(Failure, _on_failure)
    app.add_exception_handler(RequestValidationError, _on_malformed)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_unforeseen)
    return Edge(app, Invoke(service))


async def _docs(request: Request) -> HTMLResponse:
    return HTMLResponse(page(cast("FastAPI", request.app).openapi()), headers={"content-security-policy": CSP})


def _trace_id(request: Request) -> str:
    return str(request.scope["interlock.trace_id"])


async def _on_failure(request: Request, failure: Exception) -> Response:
    return _reply(of_failure(cast("Failure", failure), _trace_id(request)))


async def _on_malformed(request: Request, error: Exception) -> Response:
    """What does not fit the document, place by place; never what was sent."""
    faults = [
        {"pointer": "/" + "/".join(map(str, one["loc"])), "message": str(one["msg"])}
        for one in cast("RequestValidationError", error).errors()
    ]
    words = "; ".join(f"{fault['pointer']} {fault['message'].lower()}" for fault in faults[:5])
    failure = Failure("E3004", f"the request is malformed: {words}", details={"faults": faults[:100]})
    return _reply(of_failure(failure, _trace_id(request)))


async def _on_http(request: Request, error: Exception) -> Response:
    """Paths and methods that there are not: HTTP's own status, the table's code."""
    raised = cast("HTTPException", error)
    words = {404: "there is no such path; see /docs", 405: "the path is there, but not for this method; see /docs"}
    failure = Failure("E3004", words.get(raised.status_code, "the request is malformed"))
    reply = of_failure(failure, _trace_id(request))
    status = raised.status_code if raised.status_code in words else 400
    allow = tuple((name.lower().encode(), value.encode()) for name, value in (raised.headers or {}).items())
    return _reply(Reply(status, reply.body, (*reply.headers, *allow)))


async def _on_unforeseen(request: Request, error: Exception) -> Response:
    return _reply(unforeseen(error, _trace_id(request)))


class Edge:
    """What every request passes: its trace, a bound on its body, and an answer whatever happens."""

    def __init__(self, app: FastAPI, invoke: Invoke) -> None:
        self.app = app
        self._invoke = invoke

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self._invoke.matches(scope):
            await self._invoke(scope, receive, send)
            return
        trace = joined(header(scope, b"traceparent"), header(scope, b"tracestate"))
        trace_id = self._invoke.trace_id(trace)
        traced = self._invoke.traced(trace_id, trace)
        begun = False

        async def send_traced(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message = {**message, "headers": [*message["headers"], *traced]}
            await send(message)

        try:
            body = await read_body(receive)
            scope = {**scope, "interlock.trace": trace, "interlock.trace_id": trace_id}
            await self.app(scope, replay(body, receive), send_traced)
        except Disconnected:
            return
        except Failure as failure:
            reply = of_failure(failure, trace_id)
            await answer(send, reply.status, reply.body, (*reply.headers, *traced))
        except Exception as error:  # noqa: BLE001 - a door answers whatever happens
            # The framework answers first and raises afterwards; what it answered, it has logged.
            if not begun:
                reply = unforeseen(error, trace_id)
                await answer(send, reply.status, reply.body, (*reply.headers, *traced))

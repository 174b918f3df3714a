"""The REST API: every operation of a client, described by an OpenAPI 3.1 document.

    Edge ──► FastAPI ──► Service
      └────► Invoke            the route of `POST /v1/tools/invoke`, which needs no framework

The edge bounds every body before anything reads it, adds each request to its trace, and answers unexpected errors. The
operations are in `routes`.
"""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException

from interlock._version import __version__
from interlock.api.service import Service
from interlock.core.errors import Failure
from interlock.core.threads import INPUTS
from interlock.data.documents import Doubled, Malformed, read_json
from interlock.doors.rest.answers import of_failure
from interlock.doors.rest.invoke import Invoke, unforeseen
from interlock.doors.rest.operation import reply
from interlock.doors.rest.page import CSP, page
from interlock.doors.rest.routes import ROUTERS
from interlock.http.asgi import App, Disconnected, Message, Receive, Scope, Send, answer, header, read_body, replay
from interlock.http.route import Reply
from interlock.telemetry.w3c import joined


def make_app(service: Service) -> App:
    """The ASGI application of one service."""
    return Edge(_framework(), service, Invoke(service))


@cache
def _framework() -> FastAPI:
    """The operations and their document, once for all services: FastAPI takes 0.2 s to make their models.

    The service of a request is in its scope, where the edge puts it.
    """
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
    for router in ROUTERS:
        app.include_router(router)
    app.add_api_route("/docs", _docs, include_in_schema=False, response_class=HTMLResponse)
    app.add_exception_handler(Failure, _on_failure)
    app.add_exception_handler(RequestValidationError, _on_malformed)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_unforeseen)
    return app


async def _docs(request: Request) -> HTMLResponse:
    return HTMLResponse(page(cast("FastAPI", request.app).openapi()), headers={"content-security-policy": CSP})


def _trace_id(request: Request) -> str:
    return str(request.scope["interlock.trace_id"])


async def _on_failure(request: Request, failure: Exception) -> Response:
    return reply(of_failure(cast("Failure", failure), _trace_id(request)))


async def _on_malformed(request: Request, error: Exception) -> Response:
    """Refuse a request that does not fit the OpenAPI document. Names each place, never the value sent."""
    faults = [
        {"pointer": "/" + "/".join(str(part)[:_LONGEST_PART] for part in one["loc"]), "message": str(one["msg"])}
        for one in islice(cast("RequestValidationError", error).errors(), _MOST_FAULTS)
    ]
    words = "; ".join(f"{fault['pointer']} {fault['message'].lower()}" for fault in faults[:5])
    failure = Failure("E3004", f"the request is malformed: {words}", details={"faults": faults})
    return reply(of_failure(failure, _trace_id(request)))


async def _on_http(request: Request, error: Exception) -> Response:
    """Answer unknown paths and methods with their HTTP status and a code of the error table."""
    raised = cast("HTTPException", error)
    words = {404: "there is no such path; see /docs", 405: "the path is there, but not for this method; see /docs"}
    failure = Failure("E3004", words.get(raised.status_code, "the request is malformed"))
    made = of_failure(failure, _trace_id(request))
    status = raised.status_code if raised.status_code in words else 400
    allow = tuple((name.lower().encode(), value.encode()) for name, value in (raised.headers or {}).items())
    return reply(Reply(status, made.body, (*made.headers, *allow)))


async def _on_unforeseen(request: Request, error: Exception) -> Response:
    return reply(of_failure(unforeseen(error, _trace_id(request)), _trace_id(request)))


_MOST_FAULTS = 100
_LONGEST_PART = 100
_LONGEST_QUERY = 8192
_LARGE = 65_536  # bytes; parsing a larger body on the event loop would delay other requests


def _refuse_doubled(body: bytes) -> None:
    """Refuse (E3004) a body with duplicate members. Other faults are left to its reader."""
    try:
        if body:
            read_json(body)
    except Doubled as error:
        raise Failure("E3004", f"the body says two things at once: {error}") from None
    except Malformed:
        pass


class Edge:
    """Wraps every request: adds its trace, bounds its body, and always answers."""

    def __init__(self, app: FastAPI, service: Service, invoke: Invoke) -> None:
        self.app = app
        self._service = service
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
            if len(scope["query_string"]) > _LONGEST_QUERY:
                raise Failure("E3004", f"the query has more than {_LONGEST_QUERY:,} bytes")  # noqa: TRY301
            body = await read_body(receive)
            if len(body) < _LARGE:
                _refuse_doubled(body)
            else:
                # A large body is checked and parsed only for authenticated callers.
                authorization = header(scope, b"authorization")
                _ = self._service.known(authorization) or await self._service.authenticate(authorization)
                await INPUTS.run(_refuse_doubled, body)
            ours = {"interlock.service": self._service, "interlock.trace": trace, "interlock.trace_id": trace_id}
            scope = {**scope, **ours}
            await self.app(scope, replay(body, receive), send_traced)
        except Disconnected:
            return
        except Failure as failure:
            made = of_failure(failure, trace_id)
            await answer(send, made.status, made.body, (*made.headers, *traced))
        except Exception as error:  # noqa: BLE001 - an endpoint always answers
            # The framework sends and logs its answer first and raises afterwards.
            if not begun:
                made = of_failure(unforeseen(error, trace_id), trace_id)
                await answer(send, made.status, made.body, (*made.headers, *traced))

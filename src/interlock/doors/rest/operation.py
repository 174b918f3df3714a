"""The parts that all operations share: the caller, the OpenAPI description, and the answer."""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastapi import Depends, Path, Request
from fastapi.responses import Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from interlock.api.service import Service
from interlock.call.context import Caller
from interlock.core.record import dataclass
from interlock.data.canonical import encode
from interlock.data.schema import Json
from interlock.doors.rest import models
from interlock.http.route import Reply

bearer = HTTPBearer(auto_error=False, bearerFormat="JWT", description="a capability token: interlock token issue")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: the service, the caller, the token and the trace."""

    service: Service
    caller: Caller
    token: str
    trace: str | None
    trace_id: str


async def _asked(request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)] = None) -> Asked:
    service = cast("Service", request.scope["interlock.service"])
    authorization = request.headers.get("authorization")
    caller = service.known(authorization) or await service.authenticate(authorization)
    assert authorization is not None
    token = authorization.partition(" ")[2].strip()
    return Asked(service, caller, token, request.scope["interlock.trace"], request.scope["interlock.trace_id"])


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
    413: _refused("the request is larger than the server accepts (E3309)"),
    "4XX": _refused("refused; the error table in the reference has every code"),
    "5XX": _refused("failed; `retryable` says whether to try again"),
}


def says(model: Any, status: int = 200, words: str = "as asked", **more: Any) -> Json:
    """The OpenAPI description of an operation's answers."""
    responses = {
        status: {"model": model, "description": words, "headers": _TRACED},
        **more.pop("also", {}),
        **_REFUSALS,
    }
    return {"status_code": status, "response_model": None, "responses": responses, **more}


def streams(media_type: str, words: str, schema: Json, *, also: str | None = None) -> Json:
    """The OpenAPI description of an operation that answers with a stream or with bytes of another type."""
    content: Json = {media_type: {"schema": schema}, **({} if also is None else {also: {}})}
    responses = {200: {"description": words, "content": content, "headers": _TRACED}, **_REFUSALS}
    return {"response_model": None, "response_class": Response, "responses": responses}


ACCEPTED: dict[int | str, Json] = {
    202: {"model": models.Accepted, "description": "it goes on in the background, or waits for a person"}
}


def json(document: Any, status: int = 200) -> Response:
    """A document as an answer."""
    return Response(encode(document), status, media_type="application/json")


def reply(made: Reply) -> Response:
    """An answer that is made already."""
    response = Response(made.body, made.status, media_type="application/json")
    response.raw_headers.extend(made.headers)
    return response

"""Routes: how an endpoint answers requests, in two steps.

    prepare(head)       ──► Handler   the head is in order: handler(body, sent) answers the request
                       ├──► Reply     the head is refused; the body is not read
                       ├──► HeadRefusal     the same, with a reply that depends on the headers of this one request
                       └──► ResponseStream  an ASGI application reads the body itself and sends the response

    handler(body, sent) ──► Reply     a whole response
                       └──► ResponseStream  an ASGI application sends the response; the body has been read already

`prepare` does everything that depends on the head alone. Keep-alive clients resend the same head, so a connection keeps
the handler with the cached head (`request_cache`) and calls it with the body of each further request. The headers that
belong to one request (PER_REQUEST) may differ: `sent` has those of the request that is answered.

INVARIANT: a handler checks again, for every body, whatever can change between two requests: the token, the policy, the
tool.

INVARIANT: `prepare` does not see the values of the headers that belong to one request, only that they are there. So
nothing of one request can reach the next one through its handler.

A route is also an ASGI application, for servers of others that mount it and for tests: `Route.__call__` is the adapter.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

import orjson

from interlock.core.errors import Failure
from interlock.core.record import NamedTuple, dataclass
from interlock.http.asgi import App, Disconnected, Receive, Scope, Send, answer, read_body, refusal, retry_after

_log = logging.getLogger("interlock.doors")

NO_BODY = frozenset((204, 304))
# Headers whose values belong to one request. Clients that trace their requests send another value with each.
PER_REQUEST = frozenset(
    (b"traceparent", b"tracestate", b"baggage", b"idempotency-key", b"x-request-id", b"x-correlation-id")
)
# Their values; of a header that is sent twice, the first.
PerRequest = Mapping[bytes, bytes]


class Reply(NamedTuple):
    """A whole response: a status, a JSON body, and the headers besides those that every response has."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class ResponseStream:
    """A response that an ASGI application sends."""

    app: App


@dataclass(frozen=True, slots=True)
class HeadRefusal:
    """The refusal of a head, as a function of the headers that belong to the one request."""

    reply: Callable[[PerRequest], Reply]


class Handler(Protocol):
    """Answers requests whose heads differ only in the length of the body and in headers that belong to one request."""

    @property
    def max_body(self) -> int:
        """The most bytes that a body may have."""
        ...

    async def __call__(self, body: bytes, sent: PerRequest, /) -> Reply | ResponseStream: ...

    def refuse(self, error: Exception, sent: PerRequest, /) -> Reply:
        """The response where the body could not be read, or the handler has failed."""
        ...


Prepared = Handler | HeadRefusal | Reply | ResponseStream


class Route(ABC):
    """Answers the requests of one endpoint."""

    @abstractmethod
    async def prepare(self, head: Scope) -> Prepared:
        """Decide what the head alone decides. The scope is not to be changed; headers of one request have no value."""

    def is_endless(self, head: Scope) -> bool:
        """Whether a request is answered with events for as long as the client listens. No call depends on it."""
        return False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request through ASGI."""
        try:
            response, _ = await respond(self, scope, receive)
        except Disconnected:
            return
        if isinstance(response, Reply):
            await send_reply(send, response)
        else:
            await response.app(scope, receive, send)


class Application(Route):
    """An ASGI application as a route."""

    def __init__(self, app: App) -> None:
        self._stream = ResponseStream(app)

    async def prepare(self, head: Scope) -> ResponseStream:
        return self._stream


async def respond(route: Route, head: Scope, receive: Receive) -> tuple[Reply | ResponseStream, Handler | None]:
    """The response to one request; and the handler, which further requests with the same head can use."""
    sent = per_request(head)
    prepared = await route.prepare(_without_values(head) if sent else head)
    if isinstance(prepared, HeadRefusal):
        return prepared.reply(sent), None
    if isinstance(prepared, Reply | ResponseStream):
        return prepared, None
    try:
        body = await read_body(receive, most=prepared.max_body)
        return await prepared(body, sent), prepared
    except Disconnected:
        raise
    except Exception as error:  # noqa: BLE001 - an endpoint answers whatever happens
        return prepared.refuse(error, sent), prepared


def per_request(head: Scope) -> PerRequest:
    """The headers of a head that belong to one request."""
    return {name: value for name, value in reversed(head["headers"]) if name in PER_REQUEST}


def _without_values(head: Scope) -> Scope:
    headers = [(name, b"" if name in PER_REQUEST else value) for name, value in head["headers"]]
    return {**head, "headers": headers}


def guarded(app: App) -> App:
    """An application whose errors are answered in the common form.

    Where the response has begun, this raises too, and the connection is cut.
    """

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - an endpoint answers whatever happens
            await send_reply(send, refused(error))

    return guard


def refused(error: Exception) -> Reply:
    """The common form of a refusal. Of an unforeseen error, the client gets the trace id; the log has the rest."""
    trace_id = os.urandom(16).hex()
    if isinstance(error, Failure):
        failure = error
    else:
        _log.error("a request failed", exc_info=error, extra={"trace_id": trace_id})
        failure = Failure("E3000", "something went wrong inside Interlock")
    return Reply(failure.row.http, orjson.dumps(refusal(failure, trace_id)), retry_after(failure))


async def send_reply(send: Send, reply: Reply) -> None:
    """Send a whole response through ASGI."""
    status, body, headers = reply
    if status in NO_BODY:
        await send({"type": "http.response.start", "status": status, "headers": [*headers]})
        await send({"type": "http.response.body", "body": b""})
    else:
        await answer(send, status, body, headers)

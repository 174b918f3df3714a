"""Routes: how an endpoint answers requests, in two steps.

    prepare(head) ──► Handler   the head is in order: handler(body) answers the request
                 ├──► Reply     the head is refused; the body is not read
                 └──► Stream    an ASGI application reads the body itself and sends the response

    handler(body) ──► Reply     a whole response
                 └──► Stream    an ASGI application sends the response; the body has been read already

`prepare` does everything that depends on the head alone. Keep-alive clients resend identical heads, so a connection
keeps the handler with the cached head (`request_cache`) and calls it with the body of each further request.

INVARIANT: a handler checks again, for every body, whatever can change between two requests: the token, the policy, the
tool.

A route is also an ASGI application, for servers of others that mount it and for tests: `Route.__call__` is the adapter.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import orjson

from interlock.core.errors import Failure
from interlock.http.asgi import App, Disconnected, Receive, Scope, Send, answer, read_body, refusal, retry_after

_log = logging.getLogger("interlock.doors")

NO_BODY = frozenset((204, 304))


class Reply(NamedTuple):
    """A whole response: a status, a JSON body, and the headers besides those that every response has."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Stream:
    """A response that an ASGI application sends."""

    app: App


class Handler(Protocol):
    """Answers requests that have one head."""

    @property
    def max_body(self) -> int:
        """The most bytes that a body may have."""
        ...

    async def __call__(self, body: bytes) -> Reply | Stream: ...

    def refuse(self, error: Exception) -> Reply:
        """The response where the body could not be read, or the handler has failed."""
        ...


class Route(ABC):
    """Answers the requests of one endpoint."""

    @abstractmethod
    async def prepare(self, head: Scope) -> Handler | Reply | Stream:
        """Decide what the head alone decides. The scope is not to be changed."""

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
        self._stream = Stream(app)

    async def prepare(self, head: Scope) -> Stream:
        return self._stream


async def respond(route: Route, head: Scope, receive: Receive) -> tuple[Reply | Stream, Handler | None]:
    """The response to one request; and the handler, which further requests with the same head can use."""
    prepared = await route.prepare(head)
    if isinstance(prepared, Reply | Stream):
        return prepared, None
    try:
        body = await read_body(receive, most=prepared.max_body)
        return await prepared(body), prepared
    except Disconnected:
        raise
    except Exception as error:  # noqa: BLE001 - an endpoint answers whatever happens
        return prepared.refuse(error), prepared


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
    """The common form of a refusal. Of an unforeseen error, the client is told the trace id; the log has the rest."""
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

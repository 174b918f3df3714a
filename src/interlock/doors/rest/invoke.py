"""`POST /v1/tools/invoke`, without a framework: a body in, one governed call, a body out.

What the body may hold is FIELDS, and the OpenAPI document says the same; a test holds the two against each other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

from interlock.api.service import Ask, Service, bearer
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.data.bounds import LONGEST_NAME
from interlock.doors.response_template import Templates
from interlock.doors.rest.answers import Reply, of_failure, of_result, running, success
from interlock.http.asgi import (
    MAX_BODY,
    Disconnected,
    Receive,
    Scope,
    Send,
    answer,
    document,
    headers,
    read_body,
    text,
)
from interlock.http.request_cache import Way
from interlock.telemetry.w3c import joined

PATH = "/v1/tools/invoke"
DOOR = "rest"
LONGEST_MS = 86_400_000

# What the body may say, and in which JSON type.
FIELDS: Mapping[str, type] = {
    "tool_id": str,
    "tool_version": str,
    "parameters": dict,
    "execution_mode": str,
    "idempotency_key": str,
    "session_id": str,
    "timeout_ms": int,
    "dry_run": bool,
    "task": str,
}
_WORDS = {str: "a text", dict: "an object", int: "a whole number", bool: "true or false"}

_log = logging.getLogger("interlock.rest")


def invoke_route(service: Service, *, most: int = MAX_BODY) -> Invoke:
    """The invoke route of one service."""
    return Invoke(service, most=most)


class Invoke:
    """The route as an ASGI application. `matches` says whether a request is its own."""

    def __init__(self, service: Service, *, most: int = MAX_BODY) -> None:
        self._service = service
        self._most = most
        self._most_values = service.lock.settings.max_values
        self._templates = Templates()

    def matches(self, scope: Scope) -> bool:
        return scope["path"] == PATH and scope["method"] == "POST"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = headers(scope)
        trace = joined(text(sent, b"traceparent"), text(sent, b"tracestate")) if b"traceparent" in sent else None
        try:
            service, authorization = self._service, text(sent, b"authorization")
            caller = service.known(authorization) or await service.authenticate(authorization)
            body = await read_body(receive, most=self._most)
        except Disconnected:
            return
        except Failure as failure:
            trace_id = self.trace_id(trace)
            reply = of_failure(failure, trace_id)
        except Exception as error:  # noqa: BLE001 - a door answers whatever happens
            trace_id = self.trace_id(trace)
            reply = unforeseen(error, trace_id)
        else:
            reply, trace_id = await self._reply(body, sent, caller, trace)
        await answer(send, reply.status, reply.body, (*reply.headers, *self.traced(trace_id, trace)))

    def way(self, scope: Scope) -> Way | None:
        """The short way behind the head of a call that joins no trace."""
        sent = headers(scope)
        digest, recall, most = bearer(text(sent, b"authorization")), self._service.recall, self._most
        if digest is None or b"traceparent" in sent:
            return None

        async def way(body: bytes) -> tuple[int, bytes, bytes] | None:
            try:
                caller = recall(digest)
            except Exception:  # noqa: BLE001 - nothing has happened: the application finds the same, and says so
                return None
            if caller is None or len(body) > most:
                return None
            reply, trace_id = await self._reply(body, sent, caller, None)
            further = b"".join([b"%b: %b\r\n" % one for one in reply.headers]) if reply.headers else b""
            return reply.status, reply.body, b"%bx-trace-id: %b\r\n" % (further, trace_id.encode())

        return way

    async def _reply(
        self, body: bytes, sent: Mapping[bytes, bytes], caller: Caller, trace: str | None
    ) -> tuple[Reply, str]:
        """The reply to a caller's body, and the id of its trace."""
        try:
            ask, in_background = read(_json(body, sent, self._most_values), text(sent, b"idempotency-key"), trace)
            calls = self._service.calls
            if in_background:
                return running(calls.start(ask, caller, door=DOOR)), self.trace_id(trace)
            result = await calls.invoke(ask, caller, door=DOOR)
            if result.plain:
                return Reply(200, self._templates.of(result.tool, success).fill(result)), result.trace_id
            return of_result(result), result.trace_id
        except Failure as failure:
            trace_id = self.trace_id(trace)
            return of_failure(failure, trace_id), trace_id
        except Exception as error:  # noqa: BLE001 - a door answers whatever happens
            trace_id = self.trace_id(trace)
            return unforeseen(error, trace_id), trace_id

    def trace_id(self, trace: str | None) -> str:
        """The id of the trace a request belongs to: its caller's, or a new one."""
        return self._service.lock.clock.random_bytes(16).hex() if trace is None else trace[3:35]

    def traced(self, trace_id: str, trace: str | None) -> tuple[tuple[bytes, bytes], ...]:
        """The headers by which a client finds its trace again; the W3C's own for those who began one."""
        named = (b"x-trace-id", trace_id.encode())
        if trace is None:
            return (named,)
        span = self._service.lock.clock.random_bytes(8).hex()
        return named, (b"traceresponse", f"00-{trace_id}-{span}-00".encode())


def _json(body: bytes, sent: Mapping[bytes, bytes], most_values: int) -> Any:
    if sent.get(b"content-type", b"json").find(b"json") < 0:
        raise Failure("E3004", "send the body as JSON: `Content-Type: application/json`")
    return document(body, most_values)


def read(sent: Any, key: str | None, trace: str | None) -> tuple[Ask, bool]:
    """The call that a body asks for, and whether in the background. E3004 for what is not of the documented form."""
    if not isinstance(sent, dict):
        raise Failure("E3004", "the body must be an object with a `tool_id`")
    said = cast("dict[str, Any]", sent)
    for name, value in said.items():
        wanted = FIELDS.get(name)
        if wanted is None:
            raise Failure("E3004", f"`{name[:100]}` is not a field of this request; there are {', '.join(FIELDS)}")
        if value.__class__ is not wanted:
            raise Failure("E3004", f"`{name}` must be {_WORDS[wanted]}")
    tool = said.get("tool_id")
    if not tool or len(tool) > LONGEST_NAME:
        raise Failure("E3004", f"say which tool: `tool_id`, in at most {LONGEST_NAME} characters")
    timeout_ms = said.get("timeout_ms")
    if timeout_ms is not None and not 0 < timeout_ms <= LONGEST_MS:
        raise Failure("E3004", f"`timeout_ms` must be between 1 and {LONGEST_MS}")
    mode = said.get("execution_mode", "sync")
    if mode not in ("sync", "async"):
        raise Failure("E3004", "`execution_mode` must be sync or async")
    own = said.get("idempotency_key") or key
    if key is not None and own != key:
        raise Failure("E3004", "`idempotency_key` and the Idempotency-Key header say different things")
    ask = Ask(
        tool,
        said.get("parameters", {}),
        said.get("tool_version") or None,
        own,
        said.get("session_id", ""),
        None if timeout_ms is None else timeout_ms / 1000,
        said.get("dry_run", False),
        said.get("task") or None,
        trace,
    )
    return ask, mode == "async"


def unforeseen(error: Exception, trace_id: str) -> Reply:
    """The reply to what should not have happened: the trace's id and nothing else. The rest is in the log."""
    _log.error("a request failed", exc_info=error, extra={"trace_id": trace_id})
    return of_failure(Failure("E3000", "something went wrong inside Interlock"), trace_id)

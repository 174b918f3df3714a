"""The route `POST /v1/tools/invoke`, without a framework: a body in, one governed call, a body out.

What the body may hold is FIELDS, and the OpenAPI document says the same; a test holds the two against each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from interlock.api.service import Ask, Service, bearer
from interlock.call.context import Caller
from interlock.call.results import Result
from interlock.core.errors import Failure
from interlock.data.bounds import LONGEST_NAME
from interlock.data.schema import Json
from interlock.doors.response_template import Templates
from interlock.doors.rest.answers import of_failure, of_result, running, success
from interlock.doors.rest.progress import EVENTS, streamed
from interlock.http.asgi import MAX_BODY, Scope, headers, read_document, text
from interlock.http.route import HeadRefusal, PerRequest, Reply, ResponseStream, Route
from interlock.telemetry.w3c import sent as trace_sent

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


class Invoke(Route):
    """The route of one service. `matches` says whether a request is its own."""

    def __init__(self, service: Service, *, most: int = MAX_BODY) -> None:
        self.service = service
        self.max_body = most
        self.templates = Templates()

    def matches(self, scope: Scope) -> bool:
        return scope["path"] == PATH and scope["method"] == "POST"

    async def prepare(self, head: Scope) -> _Handler | HeadRefusal:
        handler = _Handler(self, headers(head))
        try:
            await handler.authenticate()
        except Exception as error:  # noqa: BLE001 - a door answers whatever happens
            return HeadRefusal(partial(handler.refuse, error))
        return handler

    def trace_id(self, trace: str | None) -> str:
        """The id of the trace a request belongs to: its caller's, or a new one."""
        return self.service.app.clock.random_bytes(16).hex() if trace is None else trace[3:35]

    def traced(self, trace_id: str, trace: str | None) -> tuple[tuple[bytes, bytes], ...]:
        """The headers by which a client finds its trace again; the W3C's own for those who began one."""
        named = (b"x-trace-id", trace_id.encode())
        if trace is None:
            return (named,)
        span = self.service.app.clock.random_bytes(8).hex()
        return named, (b"traceresponse", f"00-{trace_id}-{span}-00".encode())


class _Handler:
    """Answers requests with one head: with one token."""

    __slots__ = (
        "_authorization", "_calls", "_digest", "_is_json", "_most_values", "_recall", "_route", "_streams", "max_body",
    )  # fmt: skip

    def __init__(self, route: Invoke, head: Mapping[bytes, bytes]) -> None:
        service = route.service
        self._route = route
        self._calls = service.calls
        self._recall = service.recall
        self.max_body = route.max_body
        self._most_values = service.app.settings.max_values
        self._authorization = text(head, b"authorization")
        self._digest = bearer(self._authorization) or b""
        self._is_json = b"json" in head.get(b"content-type", b"json")
        self._streams = EVENTS in head.get(b"accept", b"")

    async def authenticate(self) -> Caller:
        """The caller whose token the head has, as things stand now."""
        return self._recall(self._digest) or await self._route.service.authenticate(self._authorization)

    async def __call__(self, body: bytes, sent: PerRequest) -> Reply | ResponseStream:
        trace, key = (trace_sent(sent), text(sent, b"idempotency-key")) if sent else (None, None)
        try:
            caller = self._recall(self._digest) or await self.authenticate()
            if not self._is_json:
                raise Failure("E3004", "send the body as JSON: `Content-Type: application/json`")  # noqa: TRY301
            asked = await read_document(body, self._most_values)
            ask, in_background = read(asked, key, trace)
            if in_background:
                reply, trace_id = running(await self._calls.start(ask, caller, door=DOOR)), self._route.trace_id(trace)
            elif self._streams:
                refusal = self._route.service.refusal
                return streamed(partial(self._observed, ask, caller, sent), lambda: refusal(caller) is None)
            else:
                result = await self._calls.invoke(ask, caller, door=DOOR)
                reply, trace_id = self._reply(result), result.trace_id
        except Exception as error:  # noqa: BLE001 - a door answers whatever happens
            return self.refuse(error, sent)
        return Reply(reply.status, reply.body, (*reply.headers, *self._route.traced(trace_id, trace)))

    def _reply(self, result: Result) -> Reply:
        made = self._route.templates.answer(result, success)
        return of_result(result) if made is None else Reply(200, made)

    async def _observed(self, ask: Ask, caller: Caller, sent: PerRequest, on_progress: Callable[[Json], None]) -> Reply:
        """The reply to a call whose progress is reported."""
        try:
            return self._reply(await self._calls.invoke(ask, caller, door=DOOR, on_progress=on_progress))
        except Exception as error:  # noqa: BLE001 - a door answers whatever happens
            return self.refuse(error, sent)

    def refuse(self, error: Exception, sent: PerRequest) -> Reply:
        """The response to what was refused, or failed, before there was a result."""
        trace = trace_sent(sent)
        trace_id = self._route.trace_id(trace)
        failure = error if isinstance(error, Failure) else unforeseen(error, trace_id)
        made = of_failure(failure, trace_id)
        return Reply(made.status, made.body, (*made.headers, *self._route.traced(trace_id, trace)))


def read(sent: Any, key: str | None, trace: str | None) -> tuple[Ask, bool]:
    """The call that a body asks for, and whether in the background. E3004 for what is not of the documented form."""
    if not isinstance(sent, dict):
        raise Failure("E3004", "the body must be an object with a `tool_id`")
    members = cast("dict[str, Any]", sent)
    for name, value in members.items():
        wanted = FIELDS.get(name)
        if wanted is None:
            raise Failure("E3004", f"`{name[:100]}` is not a field of this request; there are {', '.join(FIELDS)}")
        if value.__class__ is not wanted:
            raise Failure("E3004", f"`{name}` must be {_WORDS[wanted]}")
    tool = members.get("tool_id")
    if not tool or len(tool) > LONGEST_NAME:
        raise Failure("E3004", f"say which tool: `tool_id`, in at most {LONGEST_NAME} characters")
    timeout_ms = members.get("timeout_ms")
    if timeout_ms is not None and not 0 < timeout_ms <= LONGEST_MS:
        raise Failure("E3004", f"`timeout_ms` must be between 1 and {LONGEST_MS}")
    mode = members.get("execution_mode", "sync")
    if mode not in ("sync", "async"):
        raise Failure("E3004", "`execution_mode` must be sync or async")
    own = members.get("idempotency_key") or key or None
    if key and own != key:
        raise Failure("E3004", "`idempotency_key` and the Idempotency-Key header say different things")
    ask = Ask(
        tool,
        members.get("parameters", {}),
        members.get("tool_version") or None,
        own,
        members.get("session_id", ""),
        None if timeout_ms is None else timeout_ms / 1000,
        members.get("dry_run", False),
        members.get("task") or None,
        trace,
    )
    return ask, mode == "async"


def unforeseen(error: Exception, trace_id: str) -> Failure:
    """The failure to tell instead of what should not have happened, which is in the log."""
    _log.error("a request failed", exc_info=error, extra={"trace_id": trace_id})
    return Failure("E3000", "something went wrong inside Interlock")

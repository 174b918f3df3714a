"""JSON-RPC 2.0, to the letter: requests, notifications and batches over HTTP POST.

    POST /rpc   {"jsonrpc": "2.0", "id": 1, "method": "tools.invoke", "params": {"tool_id": …, "parameters": {…}}}

The reserved codes are for faults of the protocol; whatever Interlock itself refuses has its own code from the one error
table. The envelope is in `error.data` of both. A call that waits for a person is a result that says so.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from interlock.api.service import Service, bearer, native_id
from interlock.call.results import Result
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.core.turns import Turn, Turns
from interlock.data.canonical import encode
from interlock.doors.door import ANY, Door, Key
from interlock.doors.jsonrpc.messages import (
    ABSENT,
    INTERNAL,
    INVALID,
    NO_METHOD,
    PARAMS,
    PARSE,
    Fault,
    error_message,
    failed,
    id_in,
    request_in,
    success,
)
from interlock.doors.jsonrpc.methods import Method, Methods
from interlock.doors.response_template import Templates
from interlock.http.asgi import MAX_BODY, Scope, header, read_document, refusal
from interlock.http.route import PerRequest, Reply, Route, refused
from interlock.telemetry.w3c import sent as trace_sent

if TYPE_CHECKING:
    from interlock.data.schema import Json
    from interlock.doors.listening import Listening

_log = logging.getLogger("interlock.jsonrpc")

MAX_BATCH = 100
_AT_ONCE = 4
_LARGE = 1 << 14
# Methods that change nothing.
_LOOKING = frozenset(
    {
        "tools.list", "tools.search", "tools.describe", "tools.negotiate", "tools.recommend", "surface.show",
        "calls.list", "calls.top", "calls.status", "calls.trace", "calls.part", "approvals.list", "approvals.show",
    }
)  # fmt: skip


PATH = "/rpc"


def open_door(service: Service, listening: Listening) -> Door:
    return _Door(service)


class _Door(Door):
    def __init__(self, service: Service) -> None:
        self._route = JsonRpcDoor(service)

    def routes(self) -> Mapping[Key, Route]:
        return {(method, PATH): self._route for method in ("GET", "POST", ANY)}


class JsonRpcDoor(Route):
    """The route of one service: the methods, and how their answers are written."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._templates = Templates()
        methods = Methods(service)
        self._methods, self._invoke = methods.table, methods.invoke
        self._parameters = {name: _parameters(method) for name, method in self._methods.items()}

    async def prepare(self, head: Scope) -> _Handler | Reply:
        if head["method"] != "POST":
            failure = Failure("E3004", "JSON-RPC is spoken by POST")
            return Reply(405, encode(refusal(failure, self._trace_id(None))), ((b"allow", b"POST"),))
        return _Handler(self, head)

    async def handle(self, body: bytes, sender: _Sender) -> bytes | None:
        """The answer to what was sent; None where the protocol wants none."""
        trace = sender.trace
        try:
            sent: Any = await read_document(body, self._service.app.settings.max_values)
        except Failure as failure:
            if failure.details is not None:  # too many values
                return encode(failed(None, failure, self._trace_id(trace)))
            return encode(error_message(None, PARSE, "parse error: the body is not JSON", self._trace_id(trace)))
        if not isinstance(sent, list):
            return await self._one(sent, sender)
        batch = cast("list[Any]", sent)
        if not batch or len(batch) > MAX_BATCH:
            words = f"a batch has 1 to {MAX_BATCH} requests"
            return encode(error_message(None, INVALID, f"invalid request: {words}", self._trace_id(trace)))
        answers = await self._all(batch, len(body), sender)
        given = [one for one in answers if one is not None]
        return b"[%b]" % b",".join(given) if given else None

    async def _all(self, batch: list[Any], size: int, sender: _Sender) -> list[bytes | None]:
        """The answers to a batch. Of a large one, a few requests run at a time: each turn of the loop stays short.

        Calls run beside others only where their tools declare it, like those of a batch of the library; so do methods
        that only look something up. Everything else runs alone.
        """
        places = asyncio.Semaphore(_AT_ONCE if size > _LARGE else len(batch))
        turns, tasks = Turns(), list[asyncio.Task[bytes | None]]()

        async def answered(one: Any, turn: Turn | None) -> bytes | None:
            async with places:
                return await self._one(one, sender, _Place(turns, turn))

        try:
            for one in batch:
                overlaps = await self._may_overlap(one, sender)
                if overlaps is False:
                    await turns.clear()
                turn = Turn() if overlaps is None else None
                tasks.append(turns.start(answered(one, turn)))
                await turns.order(tasks[-1], turn or overlaps is True)
            return await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise

    async def _may_overlap(self, sent: Any, sender: _Sender) -> bool | None:
        """Whether a request of a batch may run beside others; None if its tool decides by the input.

        What is refused for its form runs nothing.
        """
        try:
            method, parameters = self._method(request_in(sent))
        except Fault:
            return True
        if method != "tools.invoke":
            return method in _LOOKING
        # The first request of a caller who is not known yet runs alone, and makes them known.
        caller = self._service.recall(sender.digest)
        tool, version, given = (parameters.get(name) for name in ("tool_id", "tool_version", "parameters"))
        if caller is None or not isinstance(tool, str) or not isinstance(version, str | None):
            return False
        if not isinstance(given, dict | None):
            return False
        app, arguments = self._service.app, cast("Json", given or {})
        return await app.may_overlap(app.request(tool, arguments, version=version, caller=caller))

    async def _one(self, sent: Any, sender: _Sender, place: _Place | None = None) -> bytes | None:
        """The answer to one request; None to a notification. `place` is where it stands in a batch."""
        answered = await self._answer(sent, sender, place)
        return encode(answered) if isinstance(answered, dict) else answered

    async def _answer(self, sent: Any, sender: _Sender, place: _Place | None) -> Json | bytes | None:
        request_id: Any = None
        trace = sender.trace
        try:
            request = request_in(sent)
            request_id = id_in(request)
            method, parameters = self._method(request)
        except Fault as fault:
            if request_id is ABSENT and fault.code != INVALID:
                return None  # a notification is not answered, not even if it asks for nothing we know
            known = None if request_id is ABSENT else request_id
            return error_message(known, fault.code, str(fault), self._trace_id(trace))
        quiet = request_id is ABSENT
        try:
            service = self._service
            caller = service.recall(sender.digest) or await service.authenticate(sender.authorization)
            if self._methods[method] == self._invoke:
                ids = None if quiet or request_id is None else {"jsonrpc_request_id": native_id(request_id)}
                parameters = {**parameters, "trace": trace, "native": ids, "turn": place and place.turn}
            result = await self._methods[method](caller, **parameters)
        except Failure as failure:
            return None if quiet else failed(request_id, failure, self._trace_id(trace))
        except Fault as fault:
            return None if quiet else error_message(request_id, fault.code, str(fault), self._trace_id(trace))
        except Exception:  # noqa: BLE001 - a broken door still answers, and tells nobody why
            trace_id = self._trace_id(trace)
            _log.exception("a JSON-RPC request failed", extra={"trace_id": trace_id})
            failure = Failure("E3000", "something went wrong inside Interlock")
            return None if quiet else failed(request_id, failure, trace_id, INTERNAL)
        if isinstance(result, Result):
            ended = cast("Result", result)
            if place is not None and place.overlapped:
                ended = ended.without_modifiers()
            if ended.error is not None and not ended.pending:
                return None if quiet else failed(request_id, ended.error, ended.trace_id)
            made = None if quiet else self._templates.answer(ended, success, request_id)
            if made is not None:
                return made
            result = ended.document()
        return None if quiet else {"jsonrpc": "2.0", "id": request_id, "result": result}

    def _trace_id(self, trace: str | None) -> str:
        """The trace id of a failure that happened before there was a call."""
        return self._service.app.clock.random_bytes(16).hex() if trace is None else trace[3:35]

    def _method(self, request: Json) -> tuple[str, Json]:
        method: Any = request.get("method")
        if not isinstance(method, str):
            raise Fault(INVALID, "invalid request: `method` must be a string")
        given: Any = request.get("params", {})
        if not isinstance(given, dict | list):
            raise Fault(INVALID, "invalid request: `params` must be an object or an array")
        if method not in self._methods:
            raise Fault(NO_METHOD, "method not found")
        names, needed = self._parameters[method]
        if isinstance(given, list):
            positional = cast("list[Any]", given)
            if len(positional) > len(names):
                raise Fault(PARAMS, f"invalid params: {method} takes at most {len(names)}")
            parameters: Json = dict(zip(names, positional, strict=False))
        else:
            parameters = cast("Json", given)
        strange = next((name for name in parameters if name not in names), None)
        missing = sorted(needed.difference(parameters))
        if strange is not None or missing:
            words = f"`{missing[0]}` is missing" if strange is None else f"`{strange[:100]}` is not known"
            raise Fault(PARAMS, f"invalid params: {words}; {method} takes {', '.join(names)}")
        return method, parameters


class _Sender(NamedTuple):
    """The sender of a body: the `Authorization` with its digest, and the trace.

    Who that is, is asked for each request in a body, because a refusal is answered in the form of the protocol.
    """

    authorization: str | None
    digest: bytes
    trace: str | None


class _Handler:
    """Answers requests with one head: with one `Authorization`."""

    __slots__ = ("_door", "_sender")
    max_body = MAX_BODY

    def __init__(self, door: JsonRpcDoor, head: Scope) -> None:
        self._door = door
        authorization = header(head, b"authorization")
        self._sender = _Sender(authorization, bearer(authorization) or b"", None)

    async def __call__(self, body: bytes, sent: PerRequest) -> Reply:
        sender = self._sender._replace(trace=trace_sent(sent)) if sent else self._sender
        answered = await self._door.handle(body, sender)
        return Reply(204, b"") if answered is None else Reply(200, answered)

    def refuse(self, error: Exception, sent: PerRequest) -> Reply:
        return refused(error)


class _Place(NamedTuple):
    """The place of a request in a batch, with the turn that its call takes, if any."""

    turns: Turns
    turn: Turn | None

    @property
    def overlapped(self) -> bool:
        """Whether the request that is being answered ran beside others."""
        return asyncio.current_task() in self.turns.overlapped


def _parameters(method: Method) -> tuple[tuple[str, ...], frozenset[str]]:
    """A method's parameters in order, and those that cannot be left out."""
    found = list(inspect.signature(method).parameters.values())[1:]
    wire = [one for one in found if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return tuple(one.name for one in wire), frozenset(one.name for one in wire if one.default is one.empty)

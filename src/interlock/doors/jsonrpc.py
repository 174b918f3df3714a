"""JSON-RPC 2.0, to the letter: requests, notifications and batches over HTTP POST.

    POST /rpc   {"jsonrpc": "2.0", "id": 1, "method": "tools.invoke", "params": {"tool_id": …, "parameters": {…}}}

The reserved codes are for faults of the protocol; whatever Interlock itself refuses has its own code from the one error
table. The envelope is in `error.data` of both. A call that waits for a person is a result that says so.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from interlock.api.listing import LEADS, Wanted, moment
from interlock.api.search import DEFAULT_LIMIT, MOST_FOUND
from interlock.api.service import Ask, Service, bearer, native_id
from interlock.call.context import Caller
from interlock.call.results import Result
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.core.turns import Turn, Turns
from interlock.data.canonical import encode
from interlock.doors.door import ANY, Door, Key
from interlock.doors.ids import RULE, usable
from interlock.doors.response_template import REQUEST, Templates
from interlock.http.asgi import MAX_BODY, Scope, header, read_document, refusal
from interlock.http.route import PerRequest, Reply, Route, refused
from interlock.telemetry.w3c import sent as trace_sent

if TYPE_CHECKING:
    from interlock.api.tools import Version
    from interlock.data.schema import Json
    from interlock.doors.listening import Listening

_log = logging.getLogger("interlock.jsonrpc")

MAX_BATCH = 100
_AT_ONCE = 4
_LARGE = 1 << 14
LONGEST_MS = 86_400_000
LONGEST_TEXT = 4000

_PARSE, _INVALID, _NO_METHOD, _PARAMS, _INTERNAL = -32700, -32600, -32601, -32602, -32603
_ABSENT = object()
# Methods that change nothing.
_LOOKING = frozenset(
    {
        "tools.list", "tools.search", "tools.describe", "tools.negotiate", "tools.recommend", "surface.show",
        "calls.list", "calls.top", "calls.status", "calls.trace", "calls.part", "approvals.list", "approvals.show",
    }
)  # fmt: skip

Method = Callable[..., Awaitable[Any]]


class _Fault(Exception):  # noqa: N818 - a fault of the protocol, which is answered
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


PATH = "/rpc"


def open_door(service: Service, listening: Listening) -> Door:
    return _Door(service)


class _Door(Door):
    def __init__(self, service: Service) -> None:
        self._route = JsonRpcDoor(service)

    def routes(self) -> Mapping[Key, Route]:
        return {(method, PATH): self._route for method in ("GET", "POST", ANY)}


# many methods: one method per method of the protocol
class JsonRpcDoor(Route):
    """The route of one service: the methods, and how their answers are written."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._templates = Templates()
        self._methods: Mapping[str, Method] = {
            "tools.list": self._tools,
            "tools.search": self._search,
            "tools.describe": self._tool,
            "tools.negotiate": self._negotiate,
            "tools.load": self._load,
            "tools.select": self._select,
            "tools.recommend": self._recommend,
            "surface.show": self._surface,
            "tools.invoke": self._invoke,
            "calls.list": self._calls,
            "calls.top": self._top,
            "calls.status": self._status,
            "calls.trace": self._trace,
            "calls.part": self._part,
            "calls.cancel": self._cancel,
            "calls.resume": self._resume,
            "approvals.list": self._approvals,
            "approvals.show": self._approval,
            "approvals.approve": self._approve,
            "approvals.deny": self._deny,
        }
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
                return encode(_failed(None, failure, self._trace_id(trace)))
            return encode(_error(None, _PARSE, "parse error: the body is not JSON", self._trace_id(trace)))
        if not isinstance(sent, list):
            return await self._one(sent, sender)
        batch = cast("list[Any]", sent)
        if not batch or len(batch) > MAX_BATCH:
            words = f"a batch has 1 to {MAX_BATCH} requests"
            return encode(_error(None, _INVALID, f"invalid request: {words}", self._trace_id(trace)))
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
            method, parameters = self._method(_object(sent))
        except _Fault:
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
            request = _object(sent)
            request_id = _id(request)
            method, parameters = self._method(request)
        except _Fault as fault:
            if request_id is _ABSENT and fault.code != _INVALID:
                return None  # a notification is not answered, not even if it asks for nothing we know
            known = None if request_id is _ABSENT else request_id
            return _error(known, fault.code, str(fault), self._trace_id(trace))
        quiet = request_id is _ABSENT
        try:
            service = self._service
            caller = service.recall(sender.digest) or await service.authenticate(sender.authorization)
            if self._methods[method] == self._invoke:
                ids = None if quiet or request_id is None else {"jsonrpc_request_id": native_id(request_id)}
                parameters = {**parameters, "trace": trace, "native": ids, "turn": place and place.turn}
            result = await self._methods[method](caller, **parameters)
        except Failure as failure:
            return None if quiet else _failed(request_id, failure, self._trace_id(trace))
        except _Fault as fault:
            return None if quiet else _error(request_id, fault.code, str(fault), self._trace_id(trace))
        except Exception:  # noqa: BLE001 - a broken door still answers, and tells nobody why
            trace_id = self._trace_id(trace)
            _log.exception("a JSON-RPC request failed", extra={"trace_id": trace_id})
            failure = Failure("E3000", "something went wrong inside Interlock")
            return None if quiet else _failed(request_id, failure, trace_id, _INTERNAL)
        if isinstance(result, Result):
            ended = cast("Result", result)
            if place is not None and place.overlapped:
                ended = ended.without_modifiers()
            if ended.error is not None and not ended.pending:
                return None if quiet else _failed(request_id, ended.error, ended.trace_id)
            made = None if quiet else self._templates.answer(ended, _success, request_id)
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
            raise _Fault(_INVALID, "invalid request: `method` must be a string")
        given: Any = request.get("params", {})
        if not isinstance(given, dict | list):
            raise _Fault(_INVALID, "invalid request: `params` must be an object or an array")
        if method not in self._methods:
            raise _Fault(_NO_METHOD, "method not found")
        names, needed = self._parameters[method]
        if isinstance(given, list):
            positional = cast("list[Any]", given)
            if len(positional) > len(names):
                raise _Fault(_PARAMS, f"invalid params: {method} takes at most {len(names)}")
            parameters: Json = dict(zip(names, positional, strict=False))
        else:
            parameters = cast("Json", given)
        strange = next((name for name in parameters if name not in names), None)
        missing = sorted(needed.difference(parameters))
        if strange is not None or missing:
            words = f"`{missing[0]}` is missing" if strange is None else f"`{strange[:100]}` is not known"
            raise _Fault(_PARAMS, f"invalid params: {words}; {method} takes {', '.join(names)}")
        return method, parameters

    # Tools

    async def _tools(
        self, caller: Caller, cursor: str | None = None, limit: int = 100, expected: Json | None = None
    ) -> Json:
        if limit.__class__ is not int or not 1 <= limit <= 1000:
            raise _Fault(_PARAMS, "invalid params: `limit` is a number from 1 to 1000")
        page = await self._service.surfaces.page(caller, "jsonrpc", _text(cursor, "cursor"), limit, _expected(expected))
        return {"tools": [self._brief(one) for one in page.versions], "cursor": page.cursor}

    async def _search(self, caller: Caller, query: str, limit: int = DEFAULT_LIMIT, by: str = "both") -> Json:
        if limit.__class__ is not int or not 1 <= limit <= MOST_FOUND:
            raise _Fault(_PARAMS, f"invalid params: `limit` is a number from 1 to {MOST_FOUND}")
        asked, by_which = _text(query, "query") or "", _text(by, "by") or "both"
        found, loaded, deferred = await self._service.surfaces.search_at(asked, caller, "jsonrpc", limit, by_which)
        tools = [{**self._brief(one.version), "score": one.score} for one in loaded]
        return {"tools": tools, "deferred": deferred, **found.facts()}

    async def _negotiate(self, caller: Caller, expected: Json) -> Json:
        matches = await self._service.tools.negotiate(_expected(expected) or {}, caller)
        return {"matches": [one.document() for one in matches]}

    async def _load(self, caller: Caller, names: Any) -> Json:
        texts = cast("list[Any]", names) if isinstance(names, list) else []
        if not texts:
            raise _Fault(_PARAMS, "invalid params: `names` is a list of names")
        found = await self._service.surfaces.load([_text(one, "names") or "" for one in texts], caller)
        schemas = [{"input_schema": one.contract.input.model_facing} for one in found]
        return {"tools": [{**self._brief(one), **schema} for one, schema in zip(found, schemas, strict=True)]}

    async def _select(
        self,
        caller: Caller,
        request: Any,
        allocation: Any = None,
        cheaper: Any = False,
        faster: Any = False,
        intent: Any = True,
        session: Any = "",
    ) -> Json:
        if allocation is not None and (allocation.__class__ is not int or allocation < 0):
            raise _Fault(_PARAMS, "invalid params: `allocation` is a whole number from 0 on")
        if any(one.__class__ is not bool for one in (cheaper, faster, intent)):
            raise _Fault(_PARAMS, "invalid params: `cheaper`, `faster` and `intent` are true or false")
        made = await self._service.app.select(
            _text(request, "request") or "",
            caller=caller,
            allocation=allocation,
            cheaper=cheaper,
            faster=faster,
            intent=intent,
            session=_text(session, "session") or "",
            door="jsonrpc",
        )
        return made.document()

    async def _recommend(self, caller: Caller, tool: Any = None) -> Json:
        found = await self._service.app.recommend(_text(tool, "tool"), caller=caller)
        return {"tools": [one.document() for one in found]}

    async def _surface(self, asks: Caller, caller: Any = None, cursor: Any = None, limit: Any = 200) -> Json:
        who, place, most = _text(caller, "caller"), _text(cursor, "cursor"), _whole(limit, "limit", 1000)
        return await self._service.surface_views.show(by=asks, who=who, cursor=place, limit=most)

    async def _tool(self, caller: Caller, tool_id: str, tool_version: str | None = None) -> Json:
        found = await self._service.tools.find(
            _text(tool_id, "tool_id") or "", _text(tool_version, "tool_version"), caller
        )
        contract = found.contract
        return {
            **self._brief(found),
            "input_schema": contract.input.model_facing,
            "output_schema": contract.delivers,
            "interface": self._service.tools.interface(found),
            "timeout": self._service.tools.timeout(found),
            "warnings": list(contract.warnings),
        }

    def _brief(self, version: Version) -> Json:
        manifest = version.contract.manifest
        return {
            "tool_id": version.row.address,
            "version": version.row.version,
            "title": manifest.title or manifest.name,
            "description": manifest.full_description,
            "mutation_class": manifest.mutation_class,
            "known_pairs": len(manifest.known_pairs),
            "availability": self._service.tools.availability(version),
        }

    async def _invoke(
        self,
        caller: Caller,
        tool_id: str,
        parameters: Json | None = None,
        tool_version: str | None = None,
        idempotency_key: str | None = None,
        session_id: str = "",
        timeout_ms: float | None = None,
        dry_run: bool = False,
        execution_mode: str = "sync",
        *,
        trace: str | None = None,
        native: Json | None = None,
        turn: Turn | None = None,
    ) -> Result | Json:
        if parameters is not None and not isinstance(parameters, dict):  # pyright: ignore[reportUnnecessaryIsInstance] - from a wire
            raise _Fault(_PARAMS, "invalid params: `parameters` is an object")
        if timeout_ms is not None and (timeout_ms.__class__ not in (int, float) or not 0 < timeout_ms <= LONGEST_MS):
            raise _Fault(_PARAMS, f"invalid params: `timeout_ms` is a number, more than 0 and at most {LONGEST_MS}")
        if dry_run.__class__ is not bool:
            raise _Fault(_PARAMS, "invalid params: `dry_run` is true or false")
        if execution_mode not in ("sync", "async"):
            raise _Fault(_PARAMS, "invalid params: `execution_mode` is sync or async")
        ask = Ask(
            _text(tool_id, "tool_id") or "",
            parameters or {},
            version=_text(tool_version, "tool_version"),
            key=_text(idempotency_key, "idempotency_key"),
            session=_text(session_id, "session_id") or "",
            timeout_s=None if timeout_ms is None else timeout_ms / 1000,
            dry_run=dry_run,
            trace=trace,
            native=native,
        )
        if execution_mode == "async":
            return {"invocation_id": self._service.calls.start(ask, caller, door="jsonrpc"), "status": "running"}
        return await self._service.calls.invoke(ask, caller, door="jsonrpc", turn=turn)

    # Calls

    async def _calls(
        self, asks: Caller, state: Any = None, error: Any = None, tool: Any = None, caller: Any = None,
        since: Any = None, until: Any = None, before: Any = None, limit: Any = 100,
    ) -> Json:  # fmt: skip
        wanted = Wanted(
            state=_text(state, "state"), error=_text(error, "error"), tool=_text(tool, "tool"),
            caller=_text(caller, "caller"), since=moment(_text(since, "since"), "since"),
            until=moment(_text(until, "until"), "until"),
        )  # fmt: skip
        place = None if before is None else _whole(before, "before", 2**62)
        most = _whole(limit, "limit", 1000)
        found, place = await self._service.listing.page(wanted, by=asks, before=place, limit=most)
        return {"calls": found, "before": place}

    async def _top(
        self, caller: Caller, by: Any = "failures", since: Any = None, until: Any = None, limit: Any = 10
    ) -> Json:
        if by not in LEADS:
            raise _Fault(_PARAMS, f"invalid params: `by` is one of {', '.join(LEADS)}")
        begin, end = moment(_text(since, "since"), "since"), moment(_text(until, "until"), "until")
        return await self._service.listing.top(by, by=caller, since=begin, until=end, limit=_whole(limit, "limit", 100))

    async def _status(self, caller: Caller, invocation_id: str) -> Json:
        return await self._service.calls.find(_text(invocation_id, "invocation_id") or "", caller)

    async def _trace(self, caller: Caller, invocation_id: str) -> Json:
        return await self._service.calls.trace(_text(invocation_id, "invocation_id") or "", caller)

    async def _part(
        self, caller: Caller, ref: str, at: Any = "", query: Any = "", start: Any = None, stop: Any = None,
        tokens: Any = None,
    ) -> Json:  # fmt: skip
        part: Json = {"at": at, "query": query, "start": start, "stop": stop, "tokens": tokens}
        return await self._service.app.read_part(_text(ref, "ref") or "", part, caller=caller)

    async def _cancel(self, caller: Caller, invocation_id: str, reason: str | None = None) -> Json:
        call_id, why = _text(invocation_id, "invocation_id") or "", _text(reason, "reason")
        return {"answer": await self._service.calls.cancel(call_id, caller, why)}

    async def _resume(self, caller: Caller, invocation_id: str) -> Result:
        return await self._service.calls.resume(_text(invocation_id, "invocation_id") or "", caller)

    # Approvals

    async def _approvals(self, caller: Caller) -> Json:
        return {"approvals": await self._service.approvals.tickets(by=caller)}

    async def _approval(self, caller: Caller, ticket_id: str) -> Json:
        return await self._service.approvals.ticket(_text(ticket_id, "ticket_id") or "", by=caller)

    async def _approve(self, caller: Caller, ticket_id: str, comment: str = "", edit: Json | None = None) -> Json:
        ticket = _text(ticket_id, "ticket_id") or ""
        if edit is not None and not isinstance(edit, dict):  # pyright: ignore[reportUnnecessaryIsInstance] - from a wire
            raise _Fault(_PARAMS, "invalid params: `edit` is an object")
        approvals = self._service.approvals
        return await approvals.approve(ticket, by=caller, comment=_text(comment, "comment") or "", edit=edit)

    async def _deny(self, caller: Caller, ticket_id: str, comment: str = "") -> Json:
        ticket = _text(ticket_id, "ticket_id") or ""
        return await self._service.approvals.deny(ticket, by=caller, comment=_text(comment, "comment") or "")


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


def _success(result: Result) -> Json:
    return {"jsonrpc": "2.0", "id": REQUEST, "result": result.document()}


def _expected(sent: Any) -> Json | None:
    if sent is None or isinstance(sent, dict):
        return cast("Json | None", sent)
    raise _Fault(_PARAMS, "invalid params: `expected` is an object, a schema for each tool")


def _parameters(method: Method) -> tuple[tuple[str, ...], frozenset[str]]:
    """A method's parameters in order, and those that cannot be left out."""
    found = list(inspect.signature(method).parameters.values())[1:]
    wire = [one for one in found if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return tuple(one.name for one in wire), frozenset(one.name for one in wire if one.default is one.empty)


def _object(sent: Any) -> Json:
    if not isinstance(sent, dict):
        raise _Fault(_INVALID, "invalid request: a request is an object")
    request = cast("Json", sent)
    if request.get("jsonrpc") != "2.0":
        raise _Fault(_INVALID, 'invalid request: `jsonrpc` must be "2.0"')
    return request


def _id(request: Json) -> Any:
    found: Any = request.get("id", _ABSENT)
    # A number with a fraction is short, whatever it is.
    if found is _ABSENT or found is None or found.__class__ is float or usable(found):
        return found
    raise _Fault(_INVALID, f"invalid request: `id` is null or {RULE}")


def _whole(value: Any, name: str, most: int) -> int:
    if type(value) is int and 1 <= value <= most:
        return value
    raise _Fault(_PARAMS, f"invalid params: `{name}` is a whole number from 1 to {most}")


def _text(value: Any, name: str) -> str | None:
    if value is None or (isinstance(value, str) and len(value) <= LONGEST_TEXT):
        return value
    raise _Fault(_PARAMS, f"invalid params: `{name}` is a string of at most {LONGEST_TEXT} characters")


def _failed(request_id: Any, failure: Failure, trace_id: str, code: int | None = None) -> Json:
    data = failure.envelope(trace_id)
    error = {"code": failure.row.jsonrpc if code is None else code, "message": failure.message, "data": data}
    return {"jsonrpc": "2.0", "id": request_id, "error": error}


def _error(request_id: Any, code: int, message: str, trace_id: str) -> Json:
    data = Failure("E3004", message).envelope(trace_id)
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message, "data": data}}

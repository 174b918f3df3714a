"""The route `/mcp`: `tools/call` and `tools/list` of the modern era, and the way to the SDK for everything else.

A modern request is one POST with everything in it, so the common case needs none of the SDK's sessions, streams and
models. This route answers a request only if it is sure of it: every header and every member is there once, has the
plain form, and agrees with the body. Whatever else arrives, malformed, unusual or merely rare (progress, retries with
input, parameters as headers), is handed to the SDK untouched, which answers it as it always would. So the two cannot
disagree on what is refused; differential tests show that they agree on what is answered.

A client cancels by closing its connection. A call of a tool that only computes is over before that could matter; any
other is watched, and kept alive by comments once it takes long, as the SDK does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import orjson

from interlock.api.service import Service, bearer, native_id
from interlock.call.context import Caller
from interlock.call.prepared import Prepared
from interlock.call.results import Result
from interlock.core.errors import Failure
from interlock.data.canonical import encode, may_hold_long_number
from interlock.data.schema import Json
from interlock.doors.ids import usable
from interlock.doors.mcp.calling import (
    DOOR,
    INVALID_PARAMS,
    MISSING_CAPABILITY,
    OPTIONS,
    Calling,
    Fault,
    RunningCall,
    Wanted,
    fault_of,
    not_made,
    own_result,
)
from interlock.doors.mcp.listing import EXPECTS, KEY, Form, Listing, can_sample, shows_apps
from interlock.doors.mcp.watched import watched
from interlock.doors.response_template import REQUEST, Templates
from interlock.http.asgi import LARGE_BODY, Receive, Scope, Send, check_body, header, read_with, replay, text
from interlock.http.route import PerRequest, Reply, ResponseStream, Route, guarded, refused
from interlock.telemetry.w3c import sent as trace_sent

if TYPE_CHECKING:
    from interlock.api.mcp_names import Names
    from interlock.api.types import RunningRead

Handle = Callable[[Scope, Receive, Send, Caller], Awaitable[None]]

MODERN = "2026-07-28"
# A call that takes longer than this is cancelled when its client goes; before, it is left to end.
WATCH_AFTER_S = 0.25
_VERSION = "io.modelcontextprotocol/protocolVersion"
_CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
_INFO = "io.modelcontextprotocol/clientInfo"
_SERVER = "io.modelcontextprotocol/serverInfo"
_RESERVED = "io.modelcontextprotocol/"
_METHODS = {b"tools/call": "tools/call", b"tools/list": "tools/list"}
# The headers that decide whether a request is for us; those of one client hardly ever differ from request to request.
_DECIDING = (b"mcp-protocol-version", b"mcp-method", b"content-type", b"accept", b"host", b"origin")
_KNOWN = 1000
# Longer values are checked each time: a client chooses them, and must not fill the memory with them.
_BRIEF = 1024


class SdkRules(Protocol):
    """The checks of the SDK for parts of a request that repeat: made once for each, and remembered."""

    async def admits(self, host: str | None, origin: str | None) -> bool: ...

    def fits(self, method: str, params: Json) -> bool: ...

    def put(self, method: str, result: Json) -> Json: ...


class _ForSdk(Exception):  # noqa: N818 - a branch, not an error
    """A request that the SDK answers."""


class _Recognition:
    """Which requests are plain ones of this era. Heads and introductions repeat, so each is judged once."""

    def __init__(self, sdk_rules: SdkRules) -> None:
        self._sdk_rules = sdk_rules
        self._decided: dict[tuple[bytes | None, ...], bool] = {}
        self._known_clients: set[bytes] = set()

    async def is_ours(self, headers: dict[bytes, bytes]) -> bool:
        """Whether the headers say all that the SDK demands and nothing rare."""
        deciding = tuple(map(headers.get, _DECIDING))
        ours = self._decided.get(deciding)
        if ours is None:
            ours = await self._decide(*deciding)
            if len(self._decided) < _KNOWN and sum(len(one or b"") for one in deciding) <= _BRIEF:
                self._decided[deciding] = ours
        return ours

    async def _decide(
        self,
        version: bytes | None,
        method: bytes | None,
        content: bytes | None,
        accept: bytes | None,
        host: bytes | None,
        origin: bytes | None,
    ) -> bool:
        return (
            version == MODERN.encode()
            and method in _METHODS
            and (content or b"").lower().startswith(b"application/json")
            and _takes_both(accept or b"")
            and await self._sdk_rules.admits(_latin(host), _latin(origin))
        )

    def read(self, body: bytes, method: str) -> Json:
        """The request in a body, if it is a plain one of this method."""
        try:
            request: Any = orjson.loads(body)
        except ValueError:
            raise _ForSdk from None
        if not isinstance(request, dict):
            raise _ForSdk
        one = cast("Json", request)
        params: Any = one.get("params")
        chosen: Any = one.get("id")
        if (
            len(one) != 4
            or one.get("jsonrpc") != "2.0"
            or not ((type(chosen) is int and 0 <= chosen < _SMALL) or usable(chosen))
            or one.get("method") != method
            or not isinstance(params, dict)
        ):
            raise _ForSdk
        members = cast("Json", params)
        meta, arguments = members.get("_meta"), members.get("arguments", _NOTHING)
        usual = orjson.dumps(meta) in self._known_clients
        # The two parsers read a long number differently; what came out as a whole one was none.
        exact = usual and arguments.__class__ is dict and _EXACT.issuperset(map(type, arguments.values()))
        if not exact and may_hold_long_number(body):
            raise _ForSdk
        if not usual:
            self._check_client(meta)
        return one

    def _check_client(self, meta: Any) -> None:
        """Check how the client introduces itself. Few clients differ, so each introduction is judged once."""
        if not isinstance(meta, dict):
            raise _ForSdk
        members = cast("Json", meta)
        if members.get(_VERSION) != MODERN or _CAPABILITIES not in members or "progressToken" in members:
            raise _ForSdk
        known = {name: members[name] for name in members if name.startswith(_RESERVED)}
        if not known.keys() <= {_VERSION, _CAPABILITIES, _INFO}:
            raise _ForSdk
        introduction = orjson.dumps(known)
        if introduction not in self._known_clients:
            if not self._sdk_rules.fits("tools/list", {"_meta": known}):
                raise _ForSdk
            if len(self._known_clients) < _KNOWN and len(introduction) <= _BRIEF:
                self._known_clients.add(introduction)


class McpRoute(Route):
    """The requests of one endpoint. `refuse` puts failures of authentication into the form that MCP clients expect."""

    def __init__(
        self,
        service: Service,
        names: Names,
        listing: Listing,
        calling: Calling,
        *,
        sdk_rules: SdkRules,
        sdk: Handle,
        stamp: Json,
        max_body: int,
        refuse: Callable[[Scope, Failure], Reply],
    ) -> None:
        self.service = service
        self.whole = service.surfaces.whole(DOOR)
        self.calling = calling
        self.max_body = max_body
        self.max_values = service.app.settings.max_values
        self.small = 2 * self.max_values  # bytes of JSON that cannot hold more values than that
        self.refuse = refuse
        self._names = names
        self._listing = listing
        self._sdk_rules = sdk_rules
        self._sdk = sdk
        self._server_info = stamp
        self._encoded_server_info = orjson.dumps({_SERVER: stamp})
        self.recognition = _Recognition(sdk_rules)
        self._templates = Templates()

    async def prepare(self, head: Scope) -> _Handler | Reply | ResponseStream:
        authorization = header(head, b"authorization")
        try:
            caller = self.service.known(authorization) or await self.service.authenticate(authorization)
            if id(caller) not in self.whole:
                caller = await self.service.surfaces.attach(caller, DOOR)
        except Failure as failure:
            return self.refuse(head, failure)
        headers = _once(head)
        if headers is not None and not await self.recognition.is_ours(headers):
            headers = None
        counted = head["method"] == "POST" and _may_be_long(head, self.small, self.max_body)
        if headers is None and not counted:
            return self.to_sdk(caller)
        return _Handler(self, head, authorization, headers, counted)

    def to_sdk(self, caller: Caller, body: bytes | None = None) -> ResponseStream:
        """Have the SDK answer a request, whose body may have been read already."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._sdk(scope, receive if body is None else replay(body, receive), send, caller)

        return ResponseStream(guarded(app))

    async def tool(self, params: Json, named: str | None, caller: Caller) -> tuple[Prepared, Form, str]:
        """The tool that is called, the form of its results, and its address."""
        name = params.get("name")
        if (
            not isinstance(name, str)
            or not isinstance(params.get("arguments", _NOTHING), dict)
            or named != name
            or name.startswith("=?")
            or not params.keys() <= _CALLS
        ):
            raise _ForSdk
        address = self._names.address(name)
        try:
            tool = self.service.tools.named.at_hand(address, None, caller.capability)
            if tool is None:
                tool = await self._looked_up(address, caller)
        except Failure:
            raise _ForSdk from None
        form = self._listing.form(tool)
        if form.headers:
            raise _ForSdk  # the SDK checks them
        able = params["_meta"][_CAPABILITIES]
        if able and (form.native or ("extensions" in able and self._may_be_task(tool))):
            raise _ForSdk  # the SDK relays what an upstream asks of a client that can be asked, and makes tasks
        return tool, form, address

    def _may_be_task(self, tool: Prepared) -> bool:
        """Whether calls of a tool may take so long that they become tasks, for clients that take them."""
        return tool.contract.timeout.max_s > self.service.app.settings.mcp_task_after_s

    async def _looked_up(self, address: str, caller: Caller) -> Prepared:
        version = await self.service.tools.named.resolve(address, None, caller.capability)
        if not version.at_hand:
            raise _ForSdk  # its contract has to be compiled first
        return version.prepared

    # Answering

    async def listed(self, request: Json, caller: Caller) -> Reply:
        """The answer to `tools/list`."""
        try:
            return Reply(200, await self._list(request, caller))
        except _ForSdk:
            raise
        except Exception as error:  # noqa: BLE001 - a door answers whatever happens
            return _faulty(request["id"], fault_of(error))

    async def _list(self, request: Json, caller: Caller) -> bytes:
        params: Json = request["params"]
        cursor = params.get("cursor")
        if not params.keys() <= {"cursor", "_meta"} or not isinstance(cursor, str | None) or EXPECTS in params["_meta"]:
            raise _ForSdk
        able = params["_meta"][_CAPABILITIES]
        shows, samples = shows_apps(able), can_sample(able)
        described, more = await self._listing.page(caller, cursor, shows_apps=shows, samples=samples)
        # Each description was encoded once; a list of them is put together, not encoded again.
        return b"".join((
            b'{"jsonrpc":"2.0","id":', orjson.dumps(request["id"]), b',"result":{"tools":[',
            b",".join([one.encoded for one in described]),
            b'],"ttlMs":0,"cacheScope":"private","resultType":"complete",',
            b"" if more is None else b'"nextCursor":' + orjson.dumps(more) + b",",
            b'"_meta":', self._encoded_server_info, b"}}",
        ))  # fmt: skip

    async def called(
        self, request_id: int | str, wanted: Wanted, caller: Caller, tool: Prepared, form: Form
    ) -> Reply | ResponseStream:
        """The answer to a `tools/call`. A read on the fast path is made in the task of the request."""
        begun = None
        try:
            try:
                simple = OPTIONS.isdisjoint(wanted.meta) and KEY not in wanted.arguments and not wanted.key
                if simple and tool.fast_path:
                    begun = self.service.calls.begin(
                        wanted.address or wanted.name, wanted.arguments, caller, DOOR, wanted.native, wanted.trace, tool
                    )
                if begun is None:
                    if not tool.computes or "interlock/version" in wanted.meta:
                        call = await self.calling.begin(wanted, caller)
                        return await watched(
                            call, partial(self._answer_of, request_id, wanted, call, tool, form), WATCH_AFTER_S
                        )
                    result = await self.calling.call_here(wanted, caller)
                elif isinstance(begun, Result):
                    result = begun
                elif begun.function.waiter is None or await self._ends_soon(begun):
                    result = await self.service.calls.finish(begun)
                else:
                    call = self.calling.follow(begun)
                    return await watched(call, partial(self._answer_of, request_id, wanted, call, tool, form))
            except Failure as failure:
                return self._reply(request_id, not_made(wanted, failure))
            return self._from_template(request_id, result, tool, form) or self._reply(
                request_id, await self.calling.answer(wanted, result)
            )
        except Exception as error:  # noqa: BLE001 - a door answers whatever happens
            return _faulty(request_id, error if isinstance(error, Fault) else fault_of(error))

    def _from_template(self, request_id: int | str, result: Result, tool: Prepared, form: Form) -> Reply | None:
        """The answer to a call that simply succeeded, from the template of its tool; None for any other."""
        # Another version may have come since the form was looked up; `answer` looks again.
        if form.native or result.tool != tool.ref:
            return None
        made = self._templates.answer(result, lambda one: self._response(REQUEST, own_result(one, form)), request_id)
        return None if made is None else Reply(200, made)

    async def _ends_soon(self, read: RunningRead) -> bool:
        """Whether a read on the fast path ends before it takes so long that its client is watched."""
        function = read.function
        assert function.waiter is not None
        if WATCH_AFTER_S > 0:
            try:
                await function.waiter
            except asyncio.CancelledError:
                await self.service.calls.finish(read)  # which puts the cancellation on record
                raise
        return function.done

    async def _answer_of(
        self, request_id: int | str, wanted: Wanted, call: RunningCall, tool: Prepared, form: Form
    ) -> Reply:
        """The answer to a call that has ended."""
        try:
            try:
                result = call.task.result()
            except Failure as failure:
                return self._reply(request_id, not_made(wanted, failure))
            return self._from_template(request_id, result, tool, form) or self._reply(
                request_id, await self.calling.answer(wanted, result)
            )
        except Exception as error:  # noqa: BLE001 - a door answers whatever happens
            return _faulty(request_id, error if isinstance(error, Fault) else fault_of(error))

    def _reply(self, request_id: int | str, result: Json) -> Reply:
        """A result as a response, in the form that the SDK would give it."""
        if not _is_our_own_form(result):
            result = self._sdk_rules.put("tools/call", result)
        return Reply(200, encode(self._response(request_id, result)))

    def _response(self, request_id: int | str, result: Json) -> Json:
        result["_meta"][_SERVER] = self._server_info
        return {"jsonrpc": "2.0", "id": request_id, "result": result}


class _Handler:
    """Answers requests with one head. `headers` are None where the SDK answers them."""

    __slots__ = (
        "_authorization", "_counted", "_digest", "_head", "_method", "_name", "_read", "_recall", "_route", "max_body",
    )  # fmt: skip

    def __init__(
        self,
        route: McpRoute,
        head: Scope,
        authorization: str | None,
        headers: dict[bytes, bytes] | None,
        counted: bool,
    ) -> None:
        self._route = route
        self._head = head
        self._counted = counted
        self._authorization = authorization
        self._digest = bearer(authorization) or b""
        self._recall = route.service.recall
        self._read = route.recognition.read
        self.max_body = route.max_body
        self._method = None if headers is None else _METHODS[headers[b"mcp-method"]]
        self._name = None if headers is None else text(headers, b"mcp-name")

    async def __call__(self, body: bytes, sent: PerRequest) -> Reply | ResponseStream:
        route = self._route
        try:
            caller = self._recall(self._digest) or await route.service.authenticate(self._authorization)
            # Those who see the whole catalog are most of all callers, and are known at once.
            if id(caller) not in route.whole:
                caller = await route.service.surfaces.attach(caller, DOOR)
            if len(body) > route.small:
                await check_body(body, route.max_values)
        except Failure as failure:
            return route.refuse(self._head, failure)
        if self._method is None:
            return route.to_sdk(caller, body)
        try:
            if len(body) <= LARGE_BODY:
                request = self._read(body, self._method)
            else:
                request = await read_with(self._read, body, self._method)
            if self._method == "tools/list":
                return await route.listed(request, caller)
            params: Json = request["params"]
            tool, form, address = await route.tool(params, self._name, caller)
        except _ForSdk:
            return route.to_sdk(caller, body)
        except Exception as error:  # noqa: BLE001 - a door answers whatever happens
            return refused(error)
        request_id, meta = request["id"], params["_meta"]
        known_as = request_id if request_id.__class__ is int else native_id(request_id)
        ids = {"jsonrpc_request_id": known_as, "mcp_protocol_version": MODERN}
        arguments = params.get("arguments", {})
        trace, key = (trace_sent(sent), text(sent, b"idempotency-key")) if sent else (None, None)
        wanted = Wanted(params["name"], arguments, meta, trace, None, address, ids, (tool, form), key)
        return await route.called(request_id, wanted, caller, tool, form)

    def refuse(self, error: Exception, sent: PerRequest) -> Reply:
        """The response where the body could not be read."""
        if self._counted and isinstance(error, Failure):
            return self._route.refuse(self._head, error)
        return refused(error)


def _faulty(request_id: int | str, fault: Fault) -> Reply:
    error = {"code": fault.code, "message": fault.message, **({"data": fault.data} if fault.data else {})}
    status = 400 if fault.code in (INVALID_PARAMS, MISSING_CAPABILITY) else 200
    return Reply(status, orjson.dumps({"jsonrpc": "2.0", "id": request_id, "error": error}))


def _may_be_long(head: Scope, small: int, most: int) -> bool:
    """Whether a body is to be read and counted here, by what its head says. One over the limit is not even read."""
    size = header(head, b"content-length")
    return size is None or not size.isdecimal() or small < int(size) <= most


def _once(head: Scope) -> dict[bytes, bytes] | None:
    """The headers of a request, if each of them is there once and none is rare."""
    sent: list[tuple[bytes, bytes]] = head["headers"]
    headers = dict(sent)
    rare = head["method"] != "POST" or len(headers) != len(sent) or b"\n".join(headers).find(b"mcp-param-") >= 0
    return None if rare else headers


def _takes_both(accept: bytes) -> bool:
    """Whether a client takes JSON and event streams, as the SDK reads its word for it."""
    types = {part.split(b";")[0].strip().lower() for part in accept.split(b",")}
    json = not types.isdisjoint((b"*/*", b"application/json", b"application/*"))
    return json and not types.isdisjoint((b"*/*", b"text/event-stream", b"text/*"))


def _is_our_own_form(result: Json) -> bool:
    """Whether an answer holds nothing but our own words, whose form is known."""
    for block in result["content"]:
        if block["type"] not in ("text", "resource_link") or not block.keys() <= _OURS:
            return False
    return True


_NOTHING: Json = {}
# Most clients number their requests. Such an id needs no closer look.
_SMALL = 2**31
_EXACT = frozenset((str, int, bool, type(None)))
_CALLS = frozenset(("name", "arguments", "_meta"))
_OURS = frozenset(("type", "text", "uri", "name", "mimeType", "size"))


def _latin(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")

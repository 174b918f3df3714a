"""A short way for the two requests that agents make all day: `tools/call` and `tools/list` of the modern era.

A modern request is one POST with everything in it, so the common case needs none of the SDK's sessions, streams and
models. This path takes a request only if it is sure of it: every header and every member is there once, has the plain
form, and says what the body says. Whatever else arrives, malformed, unusual or merely rare (progress, retries with
input, parameters as headers), is handed to the SDK untouched, which answers it as it always would. So the two cannot
disagree on what is refused; that they agree on what is answered is what the differential tests are for.

A client cancels by closing its connection. A call of a tool that only computes is over before that could matter; any
other is watched, and kept alive by comments once it takes long, as the SDK does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, cast

import orjson

from interlock.api.service import Service, bearer, native_id
from interlock.call.context import Caller
from interlock.call.prepared import Prepared
from interlock.core.errors import Failure
from interlock.data.bounds import more_values
from interlock.data.canonical import encode, may_hold_long_number
from interlock.data.schema import Json
from interlock.doors.ids import usable
from interlock.doors.mcp.calling import (
    DOOR,
    INVALID_PARAMS,
    MISSING_CAPABILITY,
    Calling,
    Fault,
    Wanted,
    own,
    unadorned,
    unforeseen,
)
from interlock.doors.mcp.listing import EXPECTS, Form, Listing
from interlock.doors.mcp.names import Names
from interlock.doors.response_template import REQUEST, Templates
from interlock.http.asgi import Message, Receive, Send, answer
from interlock.http.request_cache import Reply, Way
from interlock.telemetry.w3c import joined

Handle = Callable[[Message, Receive, Send, Caller], Awaitable[None]]

MODERN = "2026-07-28"
PING_AFTER_S = 15.0
_VERSION = "io.modelcontextprotocol/protocolVersion"
_CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
_INFO = "io.modelcontextprotocol/clientInfo"
_SERVER = "io.modelcontextprotocol/serverInfo"
_RESERVED = "io.modelcontextprotocol/"
_METHODS = {b"tools/call": "tools/call", b"tools/list": "tools/list"}
# The headers that decide whether a request is ours; those of one client hardly ever differ from request to request.
_DECIDING = (b"mcp-protocol-version", b"mcp-method", b"content-type", b"accept", b"host", b"origin")
_SSE = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"connection", b"keep-alive"),
    (b"x-accel-buffering", b"no"),
]
_KNOWN = 1000
# What is longer is checked each time: a client chooses it, and must not fill the memory with it.
_BRIEF = 1024


class Judge(Protocol):
    """What the SDK thinks of parts of a request that repeat: asked once for each, and remembered."""

    async def admits(self, host: str | None, origin: str | None) -> bool: ...

    def fits(self, method: str, params: Json) -> bool: ...

    def put(self, method: str, result: Json) -> Json: ...


class _NotOurs(Exception):  # noqa: N818 - a turn in the road, not an error
    """A request for the SDK."""


class Thin:
    """The short way, in front of the SDK's application."""

    def __init__(
        self,
        service: Service,
        names: Names,
        listing: Listing,
        calling: Calling,
        *,
        judge: Judge,
        sdk: Handle,
        stamp: Json,
        max_body: int,
    ) -> None:
        self._most_values = service.lock.settings.max_values
        self._service = service
        self._names = names
        self._listing = listing
        self._calling = calling
        self._judge = judge
        self._sdk = sdk
        self._stamp = stamp
        self._stamped = orjson.dumps({_SERVER: stamp})
        self._max_body = max_body
        self._decided: dict[tuple[bytes | None, ...], bool] = {}
        self._introduced: set[bytes] = set()
        self._templates = Templates()

    async def __call__(self, scope: Message, receive: Receive, send: Send, caller: Caller) -> None:
        try:
            headers = await self._headers(scope)
        except _NotOurs:
            return await self._sdk(scope, receive, send, caller)
        read: list[Message] = []
        try:
            request = await self._request(headers, receive, read)
            if request["method"] == "tools/list":
                return await answer(send, *self._listed(request, caller))
            wanted, quick = self._wanted(request, headers, caller)
        except _NotOurs:
            return await self._sdk(scope, _again(read, receive), send, caller)
        if quick:
            reply = await self._reply(request["id"], self._calling.call_at_once(wanted, caller))
            return await answer(send, *reply)
        return await self._watched(self._reply(request["id"], self._calling.call(wanted, caller)), receive, send)

    def way(self, scope: Message, authorization: str | None) -> Way | None:
        """The short way behind the head of a `tools/call`, if only its body can still make it the SDK's."""
        headers, digest = _once(scope), bearer(authorization)
        if (
            headers is None
            or digest is None
            or headers.get(b"mcp-method") != b"tools/call"
            or b"traceparent" in headers
        ):
            return None
        if not self._decided.get(tuple(map(headers.get, _DECIDING))):
            return None
        name, recall = _latin(headers.get(b"mcp-name")), self._service.lock.tokens.recall
        caller = recall(digest)
        if name is None or caller is None or not self._quick(name, caller):
            return None
        invoke, templates = self._service.calls.invoke_plainly, self._templates

        async def way(body: bytes) -> Reply | None:
            try:
                caller = recall(digest)
                if caller is None or len(body) > self._max_body or more_values(body, self._most_values):
                    return None
                request, usual = self._read(body, "tools/call")
                params: Json = request["params"]
                tool, form, address = self._tool(params, name, caller)
            except Exception:  # noqa: BLE001 - the SDK's, or wrong: nothing has happened, and the application says so
                return None
            request_id, arguments = request["id"], params.get("arguments", {})
            if not tool.quick or not unadorned(_NOTHING if usual else params["_meta"], arguments):
                return None
            native = {"jsonrpc_request_id": native_id(request_id), "mcp_protocol_version": MODERN}
            try:
                result = await invoke(address, arguments, caller, DOOR, native)
                # Another version may have come since the form was looked up; `answer` looks again.
                if result.plain and not form.native and result.tool == tool.ref:
                    template = templates.known(tool.ref)
                    if template is None:
                        template = templates.of(tool.ref, lambda one: self._told(REQUEST, own(one, form)))
                    return 200, template.fill(result, request_id), b""
            except Exception as error:  # noqa: BLE001 - a door answers whatever happens
                return *_faulty(request_id, unforeseen(error)), b""
            told = self._calling.answer(Wanted(name, arguments, {}), result)
            return *await self._reply(request_id, told), b""

        return way

    def _quick(self, name: str, caller: Caller) -> bool:
        """Whether a tool only computes, as far as can be told now."""
        try:
            return self._service.lock.catalog.prepared(self._names.address(name), None, caller.capability).quick
        except Failure:
            return False

    # Is it ours?

    async def _headers(self, scope: Message) -> dict[bytes, bytes]:
        """The headers, if they say all that the SDK demands and nothing rare."""
        headers = _once(scope)
        if headers is None:
            raise _NotOurs
        deciding = tuple(map(headers.get, _DECIDING))
        ours = self._decided.get(deciding)
        if ours is None:
            ours = await self._decide(*deciding)
            if len(self._decided) < _KNOWN and sum(len(one or b"") for one in deciding) <= _BRIEF:
                self._decided[deciding] = ours
        if not ours:
            raise _NotOurs
        return headers

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
            and await self._judge.admits(_latin(host), _latin(origin))
        )

    async def _request(self, headers: dict[bytes, bytes], receive: Receive, read: list[Message]) -> Json:
        """The body, if it is one plain request that says what its headers say."""
        size = 0
        while True:
            message = await receive()
            read.append(message)
            if message["type"] != "http.request":
                raise _NotOurs
            size += len(message.get("body", b""))
            if size > self._max_body:
                raise _NotOurs
            if not message.get("more_body", False):
                break
        body: bytes = read[0]["body"] if len(read) == 1 else b"".join(one.get("body", b"") for one in read)
        return self._read(body, _METHODS[headers[b"mcp-method"]])[0]

    def _read(self, body: bytes, method: str) -> tuple[Json, bool]:
        """The request in a body, if it is a plain one of this method, and whether its client says just the usual."""
        try:
            request: Any = orjson.loads(body)
        except ValueError:
            raise _NotOurs from None
        if not isinstance(request, dict):
            raise _NotOurs
        one = cast("Json", request)
        params = one.get("params")
        if (
            len(one) != 4
            or one.get("jsonrpc") != "2.0"
            or not usable(one.get("id"))
            or one.get("method") != method
            or not isinstance(params, dict)
        ):
            raise _NotOurs
        said = cast("Json", params)
        meta, arguments = said.get("_meta"), said.get("arguments", _NOTHING)
        usual = orjson.dumps(meta) in self._introduced
        # The two parsers read a long number differently; what came out as a whole one was none.
        exact = usual and arguments.__class__ is dict and _EXACT.issuperset(map(type, arguments.values()))
        if not exact and may_hold_long_number(body):
            raise _NotOurs
        if not usual:
            self._introduce(meta)
        return one, usual

    def _introduce(self, meta: Any) -> None:
        """Who the client says it is. Few clients differ, so each introduction is judged once."""
        if not isinstance(meta, dict):
            raise _NotOurs
        said = cast("Json", meta)
        if said.get(_VERSION) != MODERN or _CAPABILITIES not in said or "progressToken" in said:
            raise _NotOurs
        known = {name: said[name] for name in said if name.startswith(_RESERVED)}
        if not known.keys() <= {_VERSION, _CAPABILITIES, _INFO}:
            raise _NotOurs
        introduction = orjson.dumps(known)
        if introduction not in self._introduced:
            if not self._judge.fits("tools/list", {"_meta": known}):
                raise _NotOurs
            if len(self._introduced) < _KNOWN and len(introduction) <= _BRIEF:
                self._introduced.add(introduction)

    def _tool(self, params: Json, named: str | None, caller: Caller) -> tuple[Prepared, Form, str]:
        """The tool that a call is of, how its results are put, and its address."""
        name = params.get("name")
        if (
            not isinstance(name, str)
            or not isinstance(params.get("arguments", _NOTHING), dict)
            or named != name
            or name.startswith("=?")
            or not params.keys() <= _CALLS
        ):
            raise _NotOurs
        address = self._names.address(name)
        try:
            tool = self._service.lock.catalog.prepared(address, None, caller.capability)
        except Failure:
            raise _NotOurs from None
        form = self._listing.form(tool)
        if form.headers or (form.native and params["_meta"][_CAPABILITIES]):
            raise _NotOurs  # the SDK checks headers, and relays what an upstream asks of a client that can be asked
        return tool, form, address

    def _wanted(self, request: Json, headers: dict[bytes, bytes], caller: Caller) -> tuple[Wanted, bool]:
        """The call that a request asks for, and whether its tool only computes."""
        params: Json = request["params"]
        tool, _, address = self._tool(params, _latin(headers.get(b"mcp-name")), caller)
        quick = tool.quick and "interlock/version" not in params["_meta"]
        trace = None
        if b"traceparent" in headers:
            trace = joined(_latin(headers[b"traceparent"]), _latin(headers.get(b"tracestate")))
        ids = {"jsonrpc_request_id": native_id(request["id"]), "mcp_protocol_version": MODERN}
        wanted = Wanted(params["name"], params.get("arguments", {}), params["_meta"], trace, None, address, ids)
        return wanted, quick

    # Answering

    def _listed(self, request: Json, caller: Caller) -> tuple[int, bytes]:
        try:
            return 200, self._list(request, caller)
        except _NotOurs:
            raise
        except Exception as error:  # noqa: BLE001 - a door answers whatever happens
            return _faulty(request["id"], unforeseen(error))

    def _list(self, request: Json, caller: Caller) -> bytes:
        params: Json = request["params"]
        cursor = params.get("cursor")
        if not params.keys() <= {"cursor", "_meta"} or not isinstance(cursor, str | None) or EXPECTS in params["_meta"]:
            raise _NotOurs
        described, more = self._listing.page(caller, cursor)
        # Each description was encoded once; a list of them is put together, not encoded again.
        return b"".join((
            b'{"jsonrpc":"2.0","id":', orjson.dumps(request["id"]), b',"result":{"tools":[',
            b",".join([one.encoded for one in described]),
            b'],"ttlMs":0,"cacheScope":"private","resultType":"complete",',
            b"" if more is None else b'"nextCursor":' + orjson.dumps(more) + b",",
            b'"_meta":', self._stamped, b"}}",
        ))  # fmt: skip

    async def _reply(self, request_id: int | str, call: Coroutine[Any, Any, Json]) -> tuple[int, bytes]:
        try:
            result = await call
            if not _plain(result):
                result = self._judge.put("tools/call", result)
        except Fault as fault:
            return _faulty(request_id, fault)
        except Exception as error:  # noqa: BLE001 - a door answers whatever happens
            return _faulty(request_id, unforeseen(error))
        return 200, encode(self._told(request_id, result))

    def _told(self, request_id: int | str, result: Json) -> Json:
        result["_meta"][_SERVER] = self._stamp
        return {"jsonrpc": "2.0", "id": request_id, "result": result}

    async def _watched(self, reply: Coroutine[Any, Any, tuple[int, bytes]], receive: Receive, send: Send) -> None:
        """Answer when the call is done, unless its client goes first: then the call is cancelled, on record."""
        replying = asyncio.ensure_future(reply)
        gone = asyncio.ensure_future(receive())
        streaming = False
        try:
            while True:
                await asyncio.wait({replying, gone}, timeout=PING_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
                if replying.done() or gone.done():
                    break
                if not streaming:
                    streaming = True
                    await send({"type": "http.response.start", "status": 200, "headers": _SSE})
                await send({"type": "http.response.body", "body": b": ping\r\n\r\n", "more_body": True})
            if not replying.done():
                return
            status, body = replying.result()
            if streaming:
                await send({"type": "http.response.body", "body": b"event: message\r\ndata: " + body + b"\r\n\r\n"})
            else:
                await answer(send, status, body)
        finally:
            gone.cancel()
            replying.cancel()


def _faulty(request_id: int | str, fault: Fault) -> tuple[int, bytes]:
    error = {"code": fault.code, "message": fault.message, **({"data": fault.data} if fault.data else {})}
    status = 400 if fault.code in (INVALID_PARAMS, MISSING_CAPABILITY) else 200
    return status, orjson.dumps({"jsonrpc": "2.0", "id": request_id, "error": error})


def _again(read: list[Message], receive: Receive) -> Receive:
    """What was read, to be read again."""
    pending = iter(read)

    async def replay() -> Message:
        return next(pending, None) or await receive()

    return replay


def _once(scope: Message) -> dict[bytes, bytes] | None:
    """The headers of a request, if each of them is there once and none is rare."""
    sent: list[tuple[bytes, bytes]] = scope["headers"]
    headers = dict(sent)
    rare = scope["method"] != "POST" or len(headers) != len(sent) or b"\n".join(headers).find(b"mcp-param-") >= 0
    return None if rare else headers


def _takes_both(accept: bytes) -> bool:
    """Whether a client takes JSON and event streams, as the SDK reads its word for it."""
    types = {part.split(b";")[0].strip().lower() for part in accept.split(b",")}
    json = not types.isdisjoint((b"*/*", b"application/json", b"application/*"))
    return json and not types.isdisjoint((b"*/*", b"text/event-stream", b"text/*"))


def _plain(result: Json) -> bool:
    """Whether an answer holds nothing but our own words, whose form is known."""
    for block in result["content"]:
        if block["type"] not in ("text", "resource_link") or not block.keys() <= _OURS:
            return False
    return True


_NOTHING: Json = {}
_EXACT = frozenset((str, int, bool, type(None)))
_CALLS = frozenset(("name", "arguments", "_meta"))
_OURS = frozenset(("type", "text", "uri", "name", "mimeType", "size"))


def _latin(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")

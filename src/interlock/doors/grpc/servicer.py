"""The methods of the contract, each behind one guard. Imported when the door opens, because grpc takes its time.

    raw bytes ─► guard ─► who asks ─► what is asked ─► service ─► message or status

The guard takes messages apart itself, so that bytes which are no message get the envelope too. What a method raises
leaves as a status: a Failure as the table has it, anything else as E3000 and without a word of what it was.

A stream hears of its call through one listener on the gateway, which all streams share. The first call that starts in a
stream's own task is the stream's, whatever its id: a call that goes on after approval takes the id it had first.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from interlock.api import surface_view
from interlock.api.service import Service
from interlock.api.tools import DEFAULT_LIMIT, Version
from interlock.call.context import Caller
from interlock.call.events import Event
from interlock.call.results import Result
from interlock.core.clock import new_id
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.data.canonical import encode
from interlock.doors.grpc import messages, places
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.http.asgi import server_ended, too_large
from interlock.telemetry import w3c

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock

# Raw bytes in and out: the guard parses and serializes.
Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"

_log = logging.getLogger("interlock.doors.grpc")

SERVICE = wire.DESCRIPTOR.services_by_name["Gateway"]
NAME = SERVICE.full_name
DOOR = "grpc"
PAGE, LARGEST_PAGE = 100, 1000
# A call ends a little before its client gives up, so that the client hears why from us and not from its own clock.
HEAD_START_S = 0.05
# Progress that a slow reader has not fetched; what comes on top is left out. Parts of results never are.
UNREAD = 1000


class Unsuccessful(Exception):  # noqa: N818 - a call that failed is not an error of the program
    """A call that ended in a failure, which its RPC is to end in too."""

    def __init__(self, result: Result, failure: Failure) -> None:
        self.result = result
        self.failure = failure


class Rpc(NamedTuple):
    """One RPC with the headers that Interlock uses. Kept, because gRPC builds the metadata again for every access."""

    context: Context
    headers: Mapping[str, str]

    @classmethod
    def of(cls, context: Context) -> Rpc:
        metadata = cast("Sequence[tuple[str, str]]", context.invocation_metadata() or ())
        # Of a header that was sent twice, the first counts.
        return cls(context, {name: value for name, value in reversed(metadata) if name in _HEEDED})

    @property
    def left_s(self) -> float | None:
        """The seconds until the client's deadline; None if it gave none."""
        left_s = cast("float | None", self.context.time_remaining())
        return None if left_s is None else left_s - min(HEAD_START_S, left_s / 10)


# None of them is binary, so their values are text.
_HEEDED = frozenset(("authorization", "traceparent", "tracestate"))


class _Method(Protocol):
    """The type of a method with one request and one answer."""

    def __call__(self, request: Any, caller: Caller, rpc: Rpc) -> Awaitable[Message]: ...


class _Methods:
    """A generic handler: finds the way to handle an RPC when its headers are here."""

    def __init__(self, unary: Mapping[str, Any], streams: Mapping[str, Any], awaits: Callable[[str | None], bool]):
        self._unary = unary
        self._streams = streams
        self._awaits = awaits

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        found = self._unary.get(method)
        if found is not None:
            metadata = cast("Sequence[tuple[str, str]]", handler_call_details.invocation_metadata)
            authorization = next((value for name, value in metadata if name == "authorization"), None)
            if self._awaits(authorization):
                return found
        return self._streams.get(method)


# many methods: one method per RPC of the service
class Servicer:
    """The methods of the gRPC service."""

    def __init__(self, service: Service, most: int) -> None:
        self._service = service
        self._most = most
        self._hurried = False
        self._held = places.RunningRpcs()
        self._ears = Ears(service.app)
        self._at_work: dict[asyncio.Task[Any], Rpc] = {}

    def handler(self) -> grpc.GenericRpcHandler[bytes, bytes]:
        """The methods, as a server takes them."""
        made = cast("Any", grpc)  # its stubs leave these functions open
        streams: dict[str, Any] = {f"/{NAME}/Run": made.stream_stream_rpc_method_handler(self._stream)}
        unary: dict[str, Any] = {}
        for method in SERVICE.methods:
            path = f"/{NAME}/{method.name}"
            if path not in streams:
                parse = GetMessageClass(method.input_type).FromString
                soon, late = self._unary(parse, getattr(self, method.name.lower()))
                unary[path] = made.unary_unary_rpc_method_handler(soon)
                streams[path] = made.stream_stream_rpc_method_handler(late)
        return cast("Any", _Methods(unary, streams, self._awaits))

    def _awaits(self, authorization: str | None) -> bool:
        """Whether gRPC may await the message of an RPC before we see it: the token is known, and few are awaited."""
        try:
            caller = self._service.known(authorization)
        except Exception:  # noqa: BLE001 - the guard finds the same, and says what is wrong
            return False
        return caller is not None and self._held.awaits((caller.tenant, caller.id))

    def hurry(self) -> None:
        """Cut off the calls under way, with an answer to their callers."""
        self._hurried = True
        for task in self._at_work:
            task.cancel()

    async def ended(self, within_s: float = 10.0) -> None:
        """Wait until what was cut off is on record."""
        if self._at_work:
            await asyncio.wait(self._at_work, timeout=within_s)

    def peers(self) -> Iterator[str]:
        """Those with a call under way, as gRPC writes addresses."""
        return (rpc.context.peer() for rpc in self._at_work.values())

    # The guard

    def _unary(self, parse: Callable[[bytes], Message], method: _Method) -> tuple[places.Method, places.Method]:
        """A method of one request and one answer, for RPCs whose message is here and for those where it is not."""

        async def act(rpc: Rpc, raw: bytes | None) -> bytes:
            caller = await self._caller(rpc)
            owner = caller.tenant, caller.id
            if raw is not None:
                self._held.came(owner)
            self._held.enter(owner)
            try:
                asked = _parsed(parse, await places.first_message(rpc.context) if raw is None else raw, self._most)
                return (await method(asked, caller, rpc)).SerializeToString()
            finally:
                self._held.leave(owner)

        async def soon(raw: bytes, context: Context) -> bytes | None:
            rpc = Rpc.of(context)
            return await self._guarded(act(rpc, raw), rpc)

        async def late(_: Any, context: Context) -> None:
            rpc = Rpc.of(context)
            answer = await self._guarded(act(rpc, None), rpc)
            if answer is not None:
                await context.write(answer)

        return soon, late

    async def _stream(self, _: Any, context: Context) -> None:
        rpc = Rpc.of(context)
        await self._guarded(self._run(rpc), rpc)

    async def _guarded(self, work: Awaitable[bytes | None], rpc: Rpc) -> bytes | None:
        """The result of the work; a failure becomes a status."""
        task = asyncio.current_task()
        assert task is not None
        self._at_work[task] = rpc
        trace_id, call = "", ""
        try:
            return await work
        except Unsuccessful as unsuccessful:
            failure, ended = unsuccessful.failure, unsuccessful.result
            trace_id, call = ended.trace_id, ended.invocation_id
        except Failure as refused:
            failure = refused
        except asyncio.CancelledError:
            if not self._hurried:
                raise
            failure = server_ended()
        except Exception as error:  # noqa: BLE001 - a door: nothing but answers and statuses leaves it
            trace_id = self._trace_id(rpc)
            where = "".join(traceback.format_tb(error.__traceback__))
            _log.error("an RPC failed: %s\n%s", type(error).__name__, where, extra={"trace_id": trace_id})
            failure = Failure("E3000", "something went wrong inside Interlock")
        finally:
            self._at_work.pop(task, None)
        status = messages.status(failure, trace_id or self._trace_id(rpc), call)
        details = (("grpc-status-details-bin", status.SerializeToString()),)
        return await rpc.context.abort(messages.status_code(failure), status.message, details)

    async def _caller(self, rpc: Rpc) -> Caller:
        authorization = rpc.headers.get("authorization")
        return self._service.known(authorization) or await self._service.authenticate(authorization)

    def _trace_id(self, rpc: Rpc) -> str:
        """The trace id of a failure that happened before there was a call."""
        found = w3c.read(rpc.headers.get("traceparent", ""))
        return self._service.app.clock.random_bytes(16).hex() if found is None else found.trace_id

    # Methods

    async def discover(self, request: wire.DiscoverRequest, caller: Caller, _: Rpc) -> wire.DiscoverResponse:
        if request.page_size < 0:
            raise Failure("E3004", "`page_size` must be 0 or more")
        limit = min(request.page_size or (DEFAULT_LIMIT if request.query else PAGE), LARGEST_PAGE)
        surfaces = self._service.surfaces
        expected = request.expected_json if request.HasField("expected_json") else None
        if request.query:
            by = request.by or "both"
            found, loaded, deferred = await surfaces.search_at(request.query, caller, DOOR, limit, by, expected)
            shown = [self._tool(one.version) for one in loaded]
            return wire.DiscoverResponse(
                tools=shown,
                searched_by=found.by,
                note=found.note or "",
                deferred_json=map(encode, deferred),
                outcome=found.outcome,
                pending=found.pending,
            )
        page = await surfaces.page(caller, DOOR, request.page_token or None, limit, expected)
        return wire.DiscoverResponse(tools=map(self._tool, page.versions), next_page_token=page.cursor)

    async def describe(self, request: wire.DescribeRequest, caller: Caller, _: Rpc) -> wire.Tool:
        spec = request.version if request.HasField("version") else None
        return self._tool(await self._service.tools.find(request.tool_id, spec, caller))

    async def load(self, request: wire.LoadRequest, caller: Caller, _: Rpc) -> wire.LoadResponse:
        found = await self._service.surfaces.load(list(request.names), caller)
        return wire.LoadResponse(tools=map(self._tool, found))

    async def select(self, request: wire.SelectRequest, caller: Caller, _: Rpc) -> wire.SelectResponse:
        allocation = request.allocation if request.HasField("allocation") else None
        if allocation is not None and allocation < 0:
            raise Failure("E3004", "`allocation` must be 0 or more")
        made = await self._service.app.select(
            request.request,
            caller=caller,
            allocation=allocation,
            cheaper=request.cheaper,
            faster=request.faster,
            intent=not request.without_intent,
            session=request.session,
            door=DOOR,
        )
        return messages.selection(made.document())

    async def recommend(self, request: wire.RecommendRequest, caller: Caller, _: Rpc) -> wire.RecommendResponse:
        found = await self._service.app.recommend(request.tool or None, caller=caller)
        return wire.RecommendResponse(tools=[wire.Recommendation(**one.document()) for one in found])

    async def surface(self, request: wire.SurfaceRequest, caller: Caller, _: Rpc) -> wire.SurfaceResponse:
        who, cursor = request.caller or None, request.page_token or None
        size = request.page_size or surface_view.PAGE
        return messages.surface(await self._service.surface_views.show(by=caller, who=who, cursor=cursor, limit=size))

    def _tool(self, version: Version) -> wire.Tool:
        tools = self._service.tools
        return messages.tool(version, tools.availability(version), tools.timeout(version)["class"])

    async def invoke(self, request: wire.InvokeRequest, caller: Caller, rpc: Rpc) -> wire.CallResult:
        return _call_result(await self._invoke(request, caller, rpc))

    async def _invoke(
        self, request: wire.InvokeRequest, caller: Caller, rpc: Rpc, call_id: str | None = None
    ) -> Result:
        trace = w3c.joined(rpc.headers.get("traceparent"), rpc.headers.get("tracestate"))
        most = self._service.app.settings.max_values
        ask = await messages.ask(request, timeout_s=rpc.left_s, trace=trace, most_values=most)
        return await self._service.calls.invoke(ask, caller, door=DOOR, call_id=call_id)

    async def calls(self, request: wire.CallsRequest, caller: Caller, _: Rpc) -> wire.CallsResponse:
        wanted, before, limit = messages.wanted(request)
        found, place = await self._service.listing.page(wanted, by=caller, before=before, limit=limit)
        return wire.CallsResponse(calls=[wire.CallLine(**line) for line in found], before=place)

    async def top(self, request: wire.TopRequest, caller: Caller, _: Rpc) -> wire.TopResponse:
        lead, since, until, limit = messages.top_asked(request)
        document = await self._service.listing.top(lead, by=caller, since=since, until=until, limit=limit)
        return messages.top(document)

    async def status(self, request: wire.StatusRequest, caller: Caller, _: Rpc) -> wire.StatusResponse:
        calls, call_id = self._service.calls, request.invocation_id
        return messages.call_status(await calls.find(call_id, caller), await calls.outcome(call_id, caller))

    async def trace(self, request: wire.TraceRequest, caller: Caller, _: Rpc) -> wire.TraceResponse:
        return messages.trace(await self._service.calls.trace(request.invocation_id, caller))

    async def part(self, request: wire.PartRequest, caller: Caller, _: Rpc) -> wire.PartResponse:
        part = messages.part(request)
        return messages.part_read(await self._service.app.read_part(request.ref, part, caller=caller))

    async def cancel(self, request: wire.CancelRequest, caller: Caller, _: Rpc) -> wire.CancelResponse:
        reason = request.reason or None
        return messages.cancelled(await self._service.calls.cancel(request.invocation_id, caller, reason))

    async def resume(self, request: wire.ResumeRequest, caller: Caller, _: Rpc) -> wire.CallResult:
        # It goes on whether or not this client waits for it: others may.
        return _call_result(await self._service.calls.resume(request.invocation_id, caller))

    # Long-running calls

    async def _run(self, rpc: Rpc) -> None:
        """One stream of a caller, as one of the RPCs that it has under way."""
        caller = await self._caller(rpc)
        owner = caller.tenant, caller.id
        self._held.enter(owner)
        try:
            await self._follow(rpc, caller)
        finally:
            self._held.leave(owner)

    async def _follow(self, rpc: Rpc, caller: Caller) -> None:
        """One call, told while it happens. However the stream ends, its call has ended before it."""
        context = rpc.context
        first = _request(await places.first_message(context), self._most)
        if first.WhichOneof("message") != "start":
            raise Failure("E3004", "the first message of a stream must be `start`")
        clock = self._service.app.clock
        call_id = new_id(clock.now_ms(), clock.random_bytes(8))
        call = asyncio.create_task(self._invoke(first.start, caller, rpc, call_id))
        stream = self._ears.open(call, call_id)
        obeying = asyncio.create_task(self._obey(context, stream))
        try:
            while (event := await stream.next()) is not None:
                await context.write(event.SerializeToString())
        finally:
            obeying.cancel()
            call.cancel()
            await asyncio.gather(obeying, call, return_exceptions=True)
            self._ears.close(stream)
        if call.cancelled():
            raise stream.refused or Failure("E3703", f"the call of `{first.start.tool_id}` was cancelled by its caller")
        await context.write(wire.RunEvent(result=_call_result(call.result())).SerializeToString())

    async def _obey(self, context: Context, stream: CallStream) -> None:
        """Do what later messages say, until there are none."""
        try:
            while (message := await _read(context, self._most)) is not None:
                if message.WhichOneof("message") != "cancel":
                    raise Failure("E3004", "after `start`, a stream takes `cancel` and nothing else")  # noqa: TRY301
                answer = await self._service.app.cancel(stream.call_id or stream.first_id)
                # The next message is read when this one was answered: a flood of them waits at its sender.
                await stream.tell(wire.RunEvent(cancel=messages.cancelled(answer)))
        except Failure as failure:
            stream.refused = failure
            stream.call.cancel()


class CallStream:
    """The events of one call, in order, until it has ended."""

    def __init__(self, call: asyncio.Task[Result], first_id: str) -> None:
        self.call = call
        self.first_id = first_id
        self.call_id: str | None = None  # once it has started
        self.refused: Failure | None = None
        self._events: asyncio.Queue[wire.RunEvent | None] = asyncio.Queue()
        self._taken = False
        call.add_done_callback(lambda _: self._events.put_nowait(None))

    def put(self, event: wire.RunEvent) -> None:
        if self._events.qsize() < UNREAD or not event.HasField("progress"):
            self._events.put_nowait(event)

    async def tell(self, event: wire.RunEvent) -> None:
        """Put an event and wait until everything up to it was written."""
        self.put(event)
        await self._events.join()

    async def next(self) -> wire.RunEvent | None:
        """The next event; None when the call has ended. The one before it was written."""
        if self._taken:
            self._events.task_done()
        self._taken = True
        return await self._events.get()


class Ears:
    """Hears the gateway's events while there are streams, and hands each to the stream whose call it is about."""

    def __init__(self, app: Interlock) -> None:
        self._app = app
        self._by_task: dict[asyncio.Task[Any], CallStream] = {}
        self._by_call: dict[str, CallStream] = {}
        self._stop: Callable[[], None] | None = None

    def open(self, call: asyncio.Task[Result], first_id: str) -> CallStream:
        """Begin to hear of the call that a task makes."""
        if self._stop is None:
            self._stop = self._app.listen(self._hear)
        stream = self._by_task[call] = CallStream(call, first_id)
        return stream

    def close(self, stream: CallStream) -> None:
        """Hear of it no more."""
        del self._by_task[stream.call]
        if stream.call_id is not None:
            self._by_call.pop(stream.call_id, None)
        if not self._by_task and self._stop is not None:
            self._stop()
            self._stop = None

    def _hear(self, event: Event) -> None:
        stream = self._by_call.get(event.invocation_id)
        if stream is None and event.type == "tool.invocation.started":
            # INVARIANT: a call starts in the task that makes it, and before any call that it makes itself.
            task = asyncio.current_task()
            stream = None if task is None else self._by_task.get(task)
            if stream is None or stream.call_id is not None:
                return
            stream.call_id = event.invocation_id
            self._by_call[event.invocation_id] = stream
        if stream is not None and (message := messages.happening(event)) is not None:
            stream.put(message)


def _call_result(result: Result) -> wire.CallResult:
    """A result as a message. A failure ends the RPC, but for the diagnostics that the table gives the status OK."""
    if result.error is not None and not result.pending and result.error.row.grpc != "OK":
        raise Unsuccessful(result, result.error)
    return messages.result(result)


def _parsed(parse: Callable[[bytes], Message], raw: bytes, most: int) -> Message:
    if len(raw) > most:
        raise too_large(most)
    try:
        return parse(raw)
    except DecodeError:
        raise Failure("E3004", "what was sent is not a message of the contract") from None


async def _read(context: Context, most: int) -> wire.RunRequest | None:
    """The next message of a stream; None after the last."""
    raw = await context.read()
    return None if raw is cast("Any", grpc.aio).EOF else _request(raw, most)


def _request(raw: bytes, most: int) -> wire.RunRequest:
    return cast("wire.RunRequest", _parsed(wire.RunRequest.FromString, raw, most))

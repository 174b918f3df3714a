"""gRPC services: discovered by server reflection, called with the pinned descriptors.

Theory of operation. Discovery asks the server for the descriptors of its services. Each method is pinned together with
the messages it takes and returns and nothing else: a descriptor set in `native`. A call therefore needs no reflection,
and a change elsewhere in the service leaves the pin unchanged. Arguments and values are messages in the JSON form of
protobuf, with the field names of the .proto file. Methods with one request become tools; streamed answers are
collected, and methods that take a stream of requests are refused by name.

There is one channel for each endpoint, which all calls share (`grpc_channels`); a caller's credential is metadata of
the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from interlock.call.connector import Definition, Discovered, RemoteCall
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.net import addresses
from interlock.upstreams import protobuf, wire
from interlock.upstreams.grpc_channels import Channels
from interlock.upstreams.grpc_config import GrpcConfig
from interlock.upstreams.grpc_reflection import DISCOVERY_S, Metadata, reflect
from interlock.upstreams.kinds import Site
from interlock.upstreams.remote_config import Lent, Look
from interlock.upstreams.response_limits import Intake, in_thread
from interlock.upstreams.sender import Sender, Sleep

if TYPE_CHECKING:
    import grpc
    import grpc.aio

    from interlock.resilience.services import Services

# Details of a status that are passed on.
MOST_DETAILS = 10
# Answers that cannot hold more values are decoded on the event loop.
SMALL_VALUES = 1000
# The words of the status that the library of gRPC makes when a deadline of ours is over.
_OWN_DEADLINE = ("", "Deadline Exceeded")


class GrpcUpstream:
    """Calls one gRPC service."""

    def __init__(
        self,
        name: str,
        config: GrpcConfig,
        *,
        clock: Clock,
        resolve: addresses.Resolve = addresses.resolve_by_system,
        sleep: Sleep = asyncio.sleep,
        services: Services | None = None,
    ) -> None:
        self._name = name
        self._config = config
        self._intake = Intake(name, config.max_response_bytes, config.max_response_values)
        scheme = "grpc" if config.plaintext else "grpcs"
        urls = [f"{scheme}://{target}" for target in config.targets]
        self._sender = Sender(name, urls, idempotent=config.idempotent, clock=clock, sleep=sleep, services=services)
        self._channels = Channels(name, config, resolve)

    async def call(self, call: RemoteCall) -> Any:
        method = protobuf.pinned(call.native)
        message = method.encode(call.arguments)
        return await self._sender.send(
            call,
            lambda one, url: wire.within(one, self._name, self._ask(one, method, message, url.partition("://")[2])),
        )

    def mapping(self, native: Json, reported: Json) -> Json | None:
        return None

    async def discover(self, credentials: Mapping[str, str] | None = None) -> Discovered:
        import grpc.aio

        config, look = self._config, Look(credentials or {})
        metadata = self._metadata(look)
        try:
            async with asyncio.timeout(DISCOVERY_S), self._channels.get(config.targets[0]) as one:
                reflected = await reflect(self._name, one.channel, config.services, metadata)
        except TimeoutError:
            raise wire.late(self._name) from None
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, look) from None
        tools: list[Definition] = []
        refused: list[tuple[str, str]] = []
        for service, files in reflected.items():
            if isinstance(files, str):
                refused.append((service, files))
                continue
            # Thousands of messages may be described here, and every one is converted to a schema.
            for method, definition in await in_thread(protobuf.all_definitions, service, files):
                if isinstance(definition, str):
                    refused.append((method, definition))
                else:
                    tools.append(definition)
        return Discovered(tools=tools, refused=refused, about={"services": sorted(reflected)})

    async def probe(self, credentials: Mapping[str, str] | None = None) -> None:
        async with self._channels.get(self._config.targets[0]):
            pass

    def forget(self) -> None:
        self._sender.forget()

    async def close(self) -> None:
        self._sender.close()
        await self._channels.close()

    async def _ask(self, call: RemoteCall, method: protobuf.Method, message: bytes, target: str) -> Any:
        """Make one attempt at one endpoint."""
        import grpc.aio

        wire.check_egress(call, f"//{target}")
        metadata = self._metadata(call, **wire.context_headers(call, self._config))
        path = str(call.native["method"])
        async with self._channels.get(target) as used:
            channel: Any = used.channel  # grpc's stubs do not type it
            try:
                if not call.native.get("streams"):
                    unary = channel.unary_unary(path, None, None)
                    answer = await unary(message, timeout=call.left_s, metadata=metadata)
                    _note_status(call, "OK")
                    return (await self._decoded(method, answer, 0))[0]
                stream = channel.unary_stream(path, None, None)(message, timeout=call.left_s, metadata=metadata)
                messages = await self._collected(stream, method)
                _note_status(call, "OK")
                return {"messages": messages}
            except grpc.aio.AioRpcError as error:
                _note_status(call, error.code().name)
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    used.retired = True  # the channel may take a while to notice that its connection is gone
                raise self._failure(error, call) from None
            except grpc.aio.UsageError:
                raise wire.unreached(self._name, "was removed") from None
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise wire.broken(self._name) from None  # the channel was closed; we were not cancelled

    async def _collected(self, stream: Any, method: protobuf.Method) -> list[Any]:
        values: list[Any] = []
        size = counted = 0
        async for part in stream:
            size += len(part)
            try:
                if size > self._intake.max_bytes:
                    raise self._intake.too_large()
                value, counted = await self._decoded(method, part, counted)
            except Failure:
                stream.cancel()
                raise
            values.append(value)
        return values

    async def _decoded(self, method: protobuf.Method, data: bytes, before: int) -> tuple[Any, int]:
        """Decode a message to JSON, and return the total number of values. They are counted before it is expanded.

        A message may be expanded to many times its size: each empty message in it is written with all its fields.
        """
        most = before + method.most_values(len(data))
        if most <= SMALL_VALUES:
            return method.decode(data), most

        def work() -> tuple[Any, int]:
            counted = before + method.count_values(data, self._intake.max_values - before)
            if counted > self._intake.max_values:
                raise self._intake.too_many()
            return method.decode(data), counted

        return await in_thread(work)

    def _metadata(self, lent: Lent, **context: str) -> Metadata:
        """The metadata of a call; the deadline is gRPC's own `grpc-timeout`, and ours for servers that
        do not see that.
        """
        pairs = self._config.headers | context
        if self._config.auth is not None and (shown := self._config.auth.header(lent)) is not None:
            pairs[shown[0]] = shown[1]
        return tuple(pairs.items())

    def _failure(self, error: grpc.aio.AioRpcError, lent: Lent) -> Failure:
        """Convert a status that is no success to a failure."""
        import grpc

        code, words = error.code(), error.details() or ""
        message = wire.excerpt(words, lent)
        details: Json = {"status": code.name, "sent": True, "body": message}
        if stated := [wire.excerpt(one, lent) for one in _stated(error)]:
            details["details"] = stated
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            if words in _OWN_DEADLINE and not stated:
                return wire.late(self._name)
            # The service says so. It has no reference to the status: at the deadline of the call, which services are
            # told and may tell us again, it is E3402, as if nobody had answered.
            return Failure("E3503", f"`{self._name}` answered {code.name}: {message}".rstrip(": "), details=details)
        if code is grpc.StatusCode.UNAVAILABLE:
            broken = wire.broken(self._name).message + (f": {message}" if message else "")
            return Failure("E3502", broken, details=details, native_error_ref=f"grpc:{code.name}")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            # Limits of size are reported like limits of rate, by our own library and by the server's.
            if "CLIENT: Received message larger than max" in words:
                return self._intake.too_large()
            if "received metadata size exceeds" in words:
                return Failure("E3416", f"`{self._name}` answered with more metadata than gRPC takes, which is 16 KiB")
            if "message larger than max" in words:
                refused = f"`{self._name}` does not take a request of this size: {message}"
                return Failure("E3401", refused, details=details, native_error_ref=f"grpc:{code.name}")
            pause_ms = _pause_ms(error)
            often = f"`{self._name}` is asked too often" + (f": {message}" if message else "")
            return Failure(
                "E3504", often, details=details, retry_after_ms=pause_ms, native_error_ref=f"grpc:{code.name}"
            )
        answered = f"`{self._name}` answered {code.name}" + (f": {message}" if message else "")
        # The service's own fault, like 5xx over HTTP; any other status is a refusal of this very request.
        failed = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
        return Failure(
            "E3502" if code in failed else "E3401", answered, details=details, native_error_ref=f"grpc:{code.name}"
        )


def _note_status(call: RemoteCall, status: str) -> None:
    if call.span is not None:
        call.span.note({"rpc.response.status_code": status})


def _stated(error: grpc.aio.AioRpcError) -> Iterator[str]:
    """Yield the details in the status of an error, each as JSON in a text, if their type is known."""
    from google.protobuf import json_format
    from google.protobuf.message import DecodeError
    from google.rpc.error_details_pb2 import ErrorInfo
    from google.rpc.status_pb2 import Status

    assert ErrorInfo  # it and its like are known from here on
    pairs = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    packed = dict(pairs).get("grpc-status-details-bin")
    if not isinstance(packed, bytes):
        return
    try:
        details = Status.FromString(packed).details[:MOST_DETAILS]
    except DecodeError:
        return
    for detail in details:
        with suppress(DecodeError, TypeError, ValueError, json_format.SerializeToJsonError):
            yield json_format.MessageToJson(detail, indent=None)


def _pause_ms(error: grpc.aio.AioRpcError) -> int | None:
    """Return the pause that the server requests: a RetryInfo in its status, or pushback."""
    from google.protobuf.message import DecodeError
    from google.rpc.error_details_pb2 import RetryInfo
    from google.rpc.status_pb2 import Status

    pairs = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    trailers = dict(pairs)
    pushback = trailers.get("grpc-retry-pushback-ms")
    if isinstance(pushback, str) and pushback.isdecimal():
        return min(int(pushback[:12]), wire.LONGEST_PAUSE_MS)
    packed = trailers.get("grpc-status-details-bin")
    if isinstance(packed, bytes):
        try:
            for detail in Status.FromString(packed).details:
                info = RetryInfo()
                if detail.Unpack(info):
                    return min(max(int(info.retry_delay.ToMilliseconds()), 0), wire.LONGEST_PAUSE_MS)
        except DecodeError:
            pass  # nothing that we understand
    return None


def make(name: str, config: Json, site: Site) -> GrpcUpstream:
    """Make the connector of one upstream, not connected yet."""
    return GrpcUpstream(name, GrpcConfig.from_document(config), clock=site.clock, services=site.services)

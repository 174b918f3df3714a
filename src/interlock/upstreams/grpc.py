"""gRPC services: discovered by server reflection, called with the pinned descriptors.

Theory of operation. Discovery asks the server for the descriptors of its services. Each method is pinned together with
the messages it takes and returns and nothing else: a descriptor set in `native`. A call therefore needs no reflection,
and a change elsewhere in the service leaves the pin unchanged. Arguments and values are messages in the JSON form of
protobuf, with the field names of the .proto file. Methods with one request become tools; streamed answers are
collected, and methods that take a stream of requests are refused by name.

There is one channel for each endpoint, which all calls share; a caller's credential is metadata of the call. Names are
resolved under `net.addresses`, and the channel connects to the addresses that were checked there. A call waits until
its channel is connected before it is sent, so that an unreachable server has surely received nothing. A channel that
does not connect is closed when its last call has ended, and the name is resolved anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import pydantic

from interlock.call.connector import Definition, Discovered, RemoteCall
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.net import addresses
from interlock.upstreams import protobuf, wire
from interlock.upstreams.configuration import read_config
from interlock.upstreams.kinds import Site
from interlock.upstreams.response_limits import Intake, in_thread
from interlock.upstreams.wire import RemoteConfig

if TYPE_CHECKING:
    import grpc
    import grpc.aio
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    from interlock.resilience.services import Services

_Metadata = tuple[tuple[str, str], ...]

# Details of a status that are passed on.
MOST_DETAILS = 10
DISCOVERY_S = 30.0
# Answers that cannot hold more values are decoded on the event loop.
SMALL_VALUES = 1000
MAX_FILES = 5000
MAX_DESCRIPTION = 67_108_864
_REFLECTION = "/grpc.reflection.{}.ServerReflection/ServerReflectionInfo"
_PLUMBING = ("grpc.reflection.", "grpc.health.", "grpc.channelz.")


class GrpcConfig(RemoteConfig):
    """A gRPC service: `targets` are host:port. `services` names the ones to offer; by default all of them."""

    targets: tuple[str, ...] = pydantic.Field(min_length=1, max_length=3)
    plaintext: bool = False
    services: tuple[str, ...] = ()

    @pydantic.field_validator("targets")
    @classmethod
    def _addresses(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        for target in targets:
            host, _, port = target.rpartition(":")
            if not host or "/" in target or "@" in target or not port.isdecimal():
                raise ValueError("a target is host:port")
        return targets

    @pydantic.model_validator(mode="after")
    def _usable(self) -> GrpcConfig:
        if self.auth is not None and self.auth.kind == "query":
            raise ValueError("gRPC has no query; show the credential as bearer, basic or header")
        wire.keep_hidden(self, plain=self.plaintext)
        return self


class _Line:
    """A channel and how many use it."""

    __slots__ = ("channel", "retired", "users")

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.users = 0
        self.retired = False


class GrpcUpstream:
    """Calls one gRPC service."""

    def __init__(
        self,
        name: str,
        config: GrpcConfig,
        *,
        clock: Clock,
        resolve: addresses.Resolve = addresses.resolve_by_system,
        sleep: wire.Sleep = asyncio.sleep,
        services: Services | None = None,
    ) -> None:
        self._name = name
        self._config = config
        self._resolve = resolve
        self._intake = Intake(name, config.max_response_bytes, config.max_response_values)
        scheme = "grpc" if config.plaintext else "grpcs"
        urls = [f"{scheme}://{target}" for target in config.targets]
        self._sender = wire.Sender(name, urls, config, clock=clock, sleep=sleep, services=services)
        self._lines: dict[str, _Line] = {}
        self._opening = asyncio.Lock()

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
        look = wire.Look(credentials or {})
        metadata = self._metadata(look)
        try:
            async with asyncio.timeout(DISCOVERY_S), self._line(self._config.targets[0]) as line:
                reflected = await self._reflect(line.channel, look, metadata)
        except TimeoutError:
            raise wire.late(self._name) from None
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
        async with self._line(self._config.targets[0]):
            pass

    async def close(self) -> None:
        self._sender.close()
        lines, self._lines = self._lines, {}
        for line in lines.values():
            await line.channel.close(None)

    async def _ask(self, call: RemoteCall, method: protobuf.Method, message: bytes, target: str) -> Any:
        """Make one attempt at one endpoint."""
        import grpc.aio

        wire.check_egress(call, f"//{target}")
        metadata = self._metadata(call, **wire.context_headers(call, self._config))
        path = str(call.native["method"])
        async with self._line(target) as line:
            channel: Any = line.channel  # grpc's stubs do not type it
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
                    line.retired = True  # the channel may take a while to notice that its connection is gone
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

    def _metadata(self, lent: wire.Lent, **context: str) -> _Metadata:
        """The metadata of a call; the deadline is gRPC's own `grpc-timeout`, and ours for servers that
        do not see that.
        """
        pairs = self._config.headers | context
        if self._config.auth is not None and (shown := self._config.auth.header(lent)) is not None:
            pairs[shown[0]] = shown[1]
        return tuple(pairs.items())

    def _failure(self, error: grpc.aio.AioRpcError, lent: wire.Lent) -> Failure:
        """Convert a status that is no success to a failure."""
        import grpc

        code, words = error.code(), error.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return wire.late(self._name)
        message = wire.excerpt(words, lent)
        details: Json = {"status": code.name, "sent": True, "body": message}
        if stated := [wire.excerpt(one, lent) for one in _stated(error)]:
            details["details"] = stated
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
            return Failure(
                "E3504", f"`{self._name}` is asked too often", details=details, retry_after_ms=pause_ms,
                native_error_ref=f"grpc:{code.name}",
            )  # fmt: skip
        answered = f"`{self._name}` answered {code.name}" + (f": {message}" if message else "")
        # The service's own fault, like 5xx over HTTP; any other status is a refusal of this very request.
        failed = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
        return Failure(
            "E3502" if code in failed else "E3401", answered, details=details, native_error_ref=f"grpc:{code.name}"
        )

    # Channels

    @asynccontextmanager
    async def _line(self, target: str) -> AsyncGenerator[_Line]:
        """The connected channel of an endpoint. A retired one gets no more calls, and is closed after its last."""
        line = self._lines.get(target)
        if line is None:
            async with self._opening:
                line = self._lines.get(target)
                if line is None:
                    line = self._lines[target] = _Line(await self._open(target))
        line.users += 1
        try:
            if not await self._connected(line.channel):
                line.retired = True
                raise wire.unreached(self._name)
            yield line
        finally:
            line.users -= 1
            if line.retired and self._lines.get(target) is line:
                del self._lines[target]
            if line.retired and not line.users:
                await line.channel.close(None)

    async def _connected(self, channel: grpc.aio.Channel) -> bool:
        from grpc import ChannelConnectivity as State
        from grpc.aio import UsageError

        try:
            if channel.get_state(try_to_connect=True) is State.READY:
                return True  # as nearly always
            async with asyncio.timeout(self._config.connect_timeout_s):
                while (state := channel.get_state(try_to_connect=True)) is not State.READY:
                    if state in (State.TRANSIENT_FAILURE, State.SHUTDOWN):
                        return False
                    await channel.wait_for_state_change(state)
        except (TimeoutError, UsageError):
            return False  # too slow, or closed meanwhile
        return True

    async def _open(self, target: str) -> grpc.aio.Channel:
        import grpc
        import grpc.aio

        host, _, port = target.rpartition(":")
        host = host.strip("[]")
        try:
            addresses_ = await addresses.checked(host, allow_private=self._config.allow_private, resolve=self._resolve)
        except OSError:
            raise wire.unreached(self._name, "has a name without an address") from None
        pinned = addresses.grpc_target(addresses_, port)
        options: list[tuple[str, Any]] = [
            ("grpc.default_authority", target),
            ("grpc.max_receive_message_length", self._config.max_response_bytes),
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),  # retries are decided here
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.keepalive_time_ms", 300_000),  # servers hang up on clients that ping more often
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.primary_user_agent", "interlock"),
        ]
        if self._config.plaintext:
            return grpc.aio.insecure_channel(pinned, options=options)
        # The certificate is checked for the name, although the channel connects to an address.
        options.append(("grpc.ssl_target_name_override", host))
        return grpc.aio.secure_channel(pinned, self._credentials, options=options)

    @cached_property
    def _credentials(self) -> grpc.ChannelCredentials:
        import grpc

        tls = self._config.tls
        return grpc.ssl_channel_credentials(tls.read("ca_file"), tls.read("key_file"), tls.read("cert_file"))

    # Reflection

    async def _reflect(
        self, channel: Any, look: wire.Look, metadata: _Metadata
    ) -> dict[str, dict[str, FileDescriptorProto] | str]:
        """Return the files that describe each service, or why there are none."""
        import grpc
        import grpc.aio

        versions = ["v1", "v1alpha"]
        for version in versions:
            try:
                return await self._reflect_by(channel, _REFLECTION.format(version), metadata)
            except grpc.aio.AioRpcError as error:
                # Writing to a stream that the server has already ended fails without the reason of the end.
                if error.code() is grpc.StatusCode.INTERNAL and versions.count(version) == 1:
                    versions.append(version)
                elif error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise self._failure(error, look) from None
        raise Failure("E3109", f"`{self._name}` has no server reflection, which says what it offers; turn it on there")

    async def _reflect_by(
        self, channel: Any, path: str, metadata: _Metadata
    ) -> dict[str, dict[str, FileDescriptorProto] | str]:
        from google.protobuf.descriptor_pb2 import FileDescriptorProto
        from google.protobuf.message import DecodeError
        from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

        method = channel.stream_stream(
            path, ServerReflectionRequest.SerializeToString, ServerReflectionResponse.FromString
        )
        stream = method(metadata=metadata, timeout=DISCOVERY_S)
        files: dict[str, FileDescriptorProto] = {}
        heard = 0

        async def ask(request: ServerReflectionRequest) -> ServerReflectionResponse:
            nonlocal heard
            await stream.write(request)
            answer = await stream.read()
            if not isinstance(answer, ServerReflectionResponse):
                await stream.code()
                raise wire.broken(self._name)
            heard += answer.ByteSize()
            if heard > MAX_DESCRIPTION:
                raise Failure("E3407", f"`{self._name}` describes itself with more than {MAX_DESCRIPTION} bytes")
            try:
                for given in answer.file_descriptor_response.file_descriptor_proto:
                    file = FileDescriptorProto.FromString(given)
                    files.setdefault(file.name, file)
            except DecodeError:
                raise Failure("E3401", f"`{self._name}` describes itself in a form that is none") from None
            if len(files) > MAX_FILES:
                raise Failure("E3407", f"`{self._name}` describes itself with more than {MAX_FILES} files")
            return answer

        listed = [
            one.name for one in (await ask(ServerReflectionRequest(list_services="*"))).list_services_response.service
        ]
        wanted = self._config.services or [name for name in sorted(listed) if not name.startswith(_PLUMBING)]
        described: dict[str, dict[str, FileDescriptorProto] | str] = {}
        for service in wanted:
            answer = await ask(ServerReflectionRequest(file_containing_symbol=service))
            if answer.HasField("error_response"):
                described[service] = "the server does not describe it"
                continue
            while lacking := sorted(protobuf.lacking(files)):
                answer = await ask(ServerReflectionRequest(file_by_filename=lacking[0]))
                if lacking[0] not in files:
                    break
            described[service] = files
        await stream.done_writing()
        return described


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
    return GrpcUpstream(name, read_config(GrpcConfig, config), clock=site.clock, services=site.services)

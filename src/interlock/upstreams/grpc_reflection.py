"""Server reflection: asks a gRPC server for the descriptors of its services, within limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from interlock.core.errors import Failure
from interlock.upstreams import protobuf, wire

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

DISCOVERY_S = 30.0
MAX_FILES = 5000
MAX_DESCRIPTION = 67_108_864
_REFLECTION = "/grpc.reflection.{}.ServerReflection/ServerReflectionInfo"
_PLUMBING = ("grpc.reflection.", "grpc.health.", "grpc.channelz.")

Metadata = tuple[tuple[str, str], ...]
Described = dict[str, "dict[str, FileDescriptorProto] | str"]


async def reflect(name: str, channel: Any, services: Sequence[str], metadata: Metadata) -> Described:
    """Return the files that describe each service, or why there are none. `services` names the ones to describe; by
    default all of them.

    Raises E3109 if the server has no reflection, and `AioRpcError` if it refuses.
    """
    import grpc
    import grpc.aio

    versions = ["v1", "v1alpha"]
    for version in versions:
        try:
            return await _reflect_by(name, channel, _REFLECTION.format(version), services, metadata)
        except grpc.aio.AioRpcError as error:
            # Writing to a stream that the server has already ended fails without the reason of the end.
            if error.code() is grpc.StatusCode.INTERNAL and versions.count(version) == 1:
                versions.append(version)
            elif error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
    raise Failure("E3109", f"`{name}` has no server reflection, which says what it offers; turn it on there")


async def _reflect_by(name: str, channel: Any, path: str, services: Sequence[str], metadata: Metadata) -> Described:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.message import DecodeError
    from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

    method = channel.stream_stream(path, ServerReflectionRequest.SerializeToString, ServerReflectionResponse.FromString)
    stream = method(metadata=metadata, timeout=DISCOVERY_S)
    files: dict[str, FileDescriptorProto] = {}
    heard = 0

    async def ask(request: ServerReflectionRequest) -> ServerReflectionResponse:
        nonlocal heard
        await stream.write(request)
        answer = await stream.read()
        if not isinstance(answer, ServerReflectionResponse):
            await stream.code()
            raise wire.broken(name)
        heard += answer.ByteSize()
        if heard > MAX_DESCRIPTION:
            raise Failure("E3407", f"`{name}` describes itself with more than {MAX_DESCRIPTION} bytes")
        try:
            for given in answer.file_descriptor_response.file_descriptor_proto:
                file = FileDescriptorProto.FromString(given)
                files.setdefault(file.name, file)
        except DecodeError:
            raise Failure("E3401", f"`{name}` sent an invalid service description") from None
        if len(files) > MAX_FILES:
            raise Failure("E3407", f"`{name}` describes itself with more than {MAX_FILES} files")
        return answer

    listed = [
        one.name for one in (await ask(ServerReflectionRequest(list_services="*"))).list_services_response.service
    ]
    wanted = services or [one for one in sorted(listed) if not one.startswith(_PLUMBING)]
    described: Described = {}
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

"""Server reflection: a client that knows the address and nothing else learns the contract from the server.

There are two versions of it, and clients ask for either: v1 is v1alpha under another name, with the same messages, so
one servicer answers both. It tells of the services it was given and what they are made of, and of nothing else that
this process has loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection, reflection_pb2

from interlock.doors.grpc.places import Visits

OLD = "grpc.reflection.v1alpha.ServerReflection"
NEW = "grpc.reflection.v1.ServerReflection"


def handlers(services: Iterable[str], visits: Visits) -> tuple[grpc.GenericRpcHandler[bytes, bytes], ...]:
    """Both versions over some services and themselves, as a server takes them."""
    made = cast("Any", grpc)  # its stubs leave these functions open
    known = (*services, OLD)
    answering = cast("Any", reflection).aio.ReflectionServicer((*known, NEW), pool=_Pool(_pool(known)))

    async def tell(requests: Any, context: Any) -> None:
        async for answer in answering.ServerReflectionInfo(requests, context):
            await context.write(answer)

    method = made.stream_stream_rpc_method_handler(
        visits.bounded(tell),
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return tuple(made.method_handlers_generic_handler(name, {"ServerReflectionInfo": method}) for name in (OLD, NEW))


class _Pool:
    """A pool of descriptors in which methods are found too: a client may ask about one, and protobuf's own has none."""

    def __init__(self, pool: DescriptorPool) -> None:
        self._pool: Any = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802 - so the servicer calls it
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file


def _pool(services: Iterable[str]) -> DescriptorPool:
    """The files that describe some services, and the new version of reflection."""
    pool, everything = DescriptorPool(), cast("Any", descriptor_pool).Default()
    added: set[str] = set()

    def add(file: FileDescriptor) -> None:
        if file.name not in added:
            added.add(file.name)
            for one in file.dependencies:
                add(one)
            pool.AddSerializedFile(file.serialized_pb)

    for name in services:
        add(everything.FindFileContainingSymbol(name))
    pool.AddSerializedFile(_new().SerializeToString())
    return pool


def _new() -> FileDescriptorProto:
    old = FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    new = text_format.Parse(str(old).replace("v1alpha", "v1"), FileDescriptorProto())
    new.options.ClearField("deprecated")
    return new

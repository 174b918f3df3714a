"""Protobuf messages as JSON: the request and response of a gRPC method, pinned so that a call needs nothing else.

A pin holds the descriptors of a method's two messages and of all they refer to, and nothing else of their files; the
well-known messages are our own. Schemas are in the JSON form of protobuf, and read from the pin, so that they describe
exactly what a call can do. Fields have the names of the .proto file (`unit_price`, not `unitPrice`); pins that do not
say so are older, and keep the names of the JSON form. Nothing here opens a connection.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from interlock.call.connector import Definition
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.data.schema import Json
from interlock.upstreams import wire

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, MethodDescriptor
    from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import Message

MOST_PINS = 1024
MAX_PIN_BYTES = 4_194_304
_WELL_KNOWN = "google/protobuf/"
_ANY_WIDTH = 1000
# Bytes per number in packed fields, by the type of the field; 1 for others.
_LEAST_PACKED = {1: 8, 2: 4, 6: 8, 7: 4, 15: 4, 16: 8}


def lacking(files: Mapping[str, FileDescriptorProto]) -> set[str]:
    """Return the files that these need and that only their server knows."""
    needed = {name for file in files.values() for name in file.dependency}
    return {name for name in needed if name not in files and not name.startswith(_WELL_KNOWN)}


class Method(NamedTuple):
    """A pinned method's messages."""

    request: type[Message]
    response: type[Message]
    pool: DescriptorPool
    widest: int  # the largest number of values that one field on the wire can become
    proto_names: bool  # whether answers have the names of the .proto file; requests are read in both

    def encode(self, arguments: Json) -> bytes:
        """Encode the request; E3301 for arguments that the message cannot hold."""
        from google.protobuf import json_format
        from google.protobuf.message import EncodeError

        try:
            message = json_format.ParseDict(arguments, self.request(), descriptor_pool=self.pool)
            return message.SerializeToString()
        except (json_format.ParseError, EncodeError, ValueError, TypeError) as error:
            raise Failure("E3301", f"the arguments do not fit the message: {wire.excerpt(str(error), None)}") from None

    def most_values(self, size: int) -> int:
        """Return the largest number of values that a number of bytes can become: a field takes two bytes, packed
        numbers one each.
        """
        return (size + 1) * self.widest

    def count_values(self, data: bytes, limit: int) -> int:
        """Count the values in the JSON form of a message, from its bytes; stops above `limit`."""
        return count_values(data, _descriptor(self.response), self.pool, limit)

    def decode(self, data: bytes) -> Any:
        """The JSON form of an answer."""
        from google.protobuf import json_format
        from google.protobuf.message import DecodeError

        try:
            return json_format.MessageToDict(
                self.response.FromString(data),
                always_print_fields_with_no_presence=True,
                preserving_proto_field_name=self.proto_names,
                descriptor_pool=self.pool,
            )
        except (DecodeError, json_format.SerializeToJsonError, TypeError, ValueError):
            raise Failure("E3401", "the answer is not the message that the method gives") from None


def pinned(native: Json) -> Method:
    """Load the messages of a method from its pin."""
    return _pinned(
        str(native["descriptors"]), str(native["input"]), str(native["output"]), native.get("names") == "proto"
    )


@lru_cache(maxsize=MOST_PINS)
def _pinned(descriptors: str, request: str, response: str, proto_names: bool) -> Method:
    from google.protobuf import message_factory
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    unpacked = zlib.decompressobj().decompress(base64.b64decode(descriptors), MAX_PIN_BYTES)
    pool = _pool(FileDescriptorSet.FromString(unpacked).file)

    def message(name: str) -> type[Message]:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))

    request_type, given = message(request), message(response)
    return Method(request_type, given, pool, _widest(_descriptor(given)), proto_names)


def _widest(root: Descriptor) -> int:
    """Return the number of fields of the widest message that a message can hold, plus one for itself."""
    widest, seen, left = 1, {root.full_name}, [root]
    while left:
        one = left.pop()
        if one.full_name == "google.protobuf.Any":
            return _ANY_WIDTH  # which can hold any other
        widest = max(widest, 1 + len(one.fields))
        for field in one.fields:
            inner = field.message_type
            if inner is not None and inner.full_name not in seen:
                seen.add(inner.full_name)
                left.append(inner)
    return widest


def count_values(data: bytes, root: Descriptor, pool: DescriptorPool, limit: int) -> int:
    """Count the values of a message's JSON form in its bytes, without parsing a message.

    Every message counts as one value plus one for each field that is written even if absent. Invalid bytes are counted
    as far as they go: the parser refuses them. Stops above `limit`.
    """
    count = _written(root)
    left = [(root, memoryview(data))]
    while left and count <= limit:
        count = _count_one(*left.pop(), pool, left, count, limit)
    return count


def _count_one(
    root: Descriptor,
    body: memoryview,
    pool: DescriptorPool,
    left: list[tuple[Descriptor, memoryview]],
    count: int,
    limit: int,
) -> int:
    """Add the fields of one message to the count; the messages in it are added to `left`."""
    message: Descriptor | None = root
    groups: list[Descriptor | None] = []
    packed: dict[int, memoryview] = {}  # the two fields of an Any, of which the last ones are read
    at = 0
    while at < len(body) and count <= limit:
        tag, at = _varint(body, at)
        field = None if message is None else message.fields_by_number.get(tag >> 3)
        inner = None if field is None else field.message_type
        kind = tag & 7
        count += 1
        if kind == 2:
            length, at = _varint(body, at)
            part, at = body[at : at + length], at + length
            if inner is not None:
                count += _written(inner)
                left.append((inner, part))
            elif field is not None and field.type not in (field.TYPE_STRING, field.TYPE_BYTES):
                count += len(part) // _LEAST_PACKED.get(field.type, 1)
            elif root.full_name == "google.protobuf.Any":
                packed[tag >> 3] = part
        elif kind == 0:
            _, at = _varint(body, at)
        elif kind == 3:
            groups.append(message)
            message, count = inner, count + (0 if inner is None else _written(inner))
        elif kind == 4:
            message = groups.pop() if groups else message
        else:
            at += 8 if kind == 1 else 4
    if 2 in packed:
        name = bytes(packed.get(1, body[:0])[-500:]).decode(errors="replace").rpartition("/")[2]
        try:
            held = pool.FindMessageTypeByName(name)
        except KeyError:
            return count  # the parser refuses it
        left.append((held, packed[2]))
        count += _written(held)
    return count


@lru_cache(maxsize=MOST_PINS)
def _written(message: Descriptor) -> int:
    """Return the number of values that an empty message is written with."""
    return 1 + sum(field.is_repeated or not field.has_presence for field in message.fields)


def _varint(body: memoryview, at: int) -> tuple[int, int]:
    """Return the number at a place, and the place after it; zero at the end of the bytes."""
    value = shift = 0
    while at < len(body) and shift < 70:
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, at


def _pool(files: Iterable[FileDescriptorProto]) -> DescriptorPool:
    """Make a pool of these files and the well-known ones, each after what it needs; KeyError or
    TypeError if invalid.
    """
    from google.protobuf import (
        any_pb2,
        api_pb2,
        descriptor_pb2,
        descriptor_pool,
        duration_pb2,
        empty_pb2,
        field_mask_pb2,
        source_context_pb2,
        struct_pb2,
        timestamp_pb2,
        type_pb2,
        wrappers_pb2,
    )

    known = (
        any_pb2, api_pb2, descriptor_pb2, duration_pb2, empty_pb2, field_mask_pb2, source_context_pb2, struct_pb2,
        timestamp_pb2, type_pb2, wrappers_pb2,
    )  # fmt: skip
    waiting = {file.name: file for file in files}
    for module in known:
        waiting[module.DESCRIPTOR.name] = descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
    pool = descriptor_pool.DescriptorPool()
    # An explicit stack: the server determines how deep files depend on one another.
    while waiting:
        stack = [next(iter(waiting))]
        while stack:
            file = waiting.get(stack[-1])
            needed = [] if file is None else [name for name in file.dependency if name in waiting and name not in stack]
            if needed:
                stack.append(needed[0])
                continue
            stack.pop()
            if file is not None:
                pool.AddSerializedFile(file.SerializeToString())
                del waiting[file.name]
    return pool


def definitions(service: str, files: Mapping[str, FileDescriptorProto]) -> Iterable[tuple[str, Definition | str]]:
    """Yield a definition for each method of a service, or why there is none."""
    from google.protobuf.message import DecodeError

    try:
        pool = _pool(_closure(service, files))
        methods = list(pool.FindServiceByName(service).methods)
    except (KeyError, TypeError, ValueError):
        yield service, "its description is not whole"
        return
    for method in methods:
        if method.client_streaming:
            kind = "bidirectional streaming" if method.server_streaming else "client streaming"
            yield method.full_name, f"its method uses {kind}, which a call with one request cannot do"
            continue
        try:
            yield method.full_name, _definition(service, method, files)
        except (KeyError, TypeError, ValueError, RecursionError, DecodeError):
            yield method.full_name, "its messages cannot be described"


def all_definitions(service: str, files: Mapping[str, FileDescriptorProto]) -> list[tuple[str, Definition | str]]:
    """All of them at once, for a thread."""
    return list(definitions(service, files))


def _closure(service: str, files: Mapping[str, FileDescriptorProto]) -> list[FileDescriptorProto]:
    """Return the file of a service and all that it needs."""
    needed: dict[str, FileDescriptorProto] = {}
    left = [file.name for file in files.values() if service in _services(file)]
    while left:
        name = left.pop()
        if name in files and name not in needed:
            needed[name] = files[name]
            left += files[name].dependency
    return list(needed.values())


def _services(file: FileDescriptorProto) -> set[str]:
    return {f"{file.package}.{one.name}".lstrip(".") for one in file.service}


def _definition(service: str, method: MethodDescriptor, files: Mapping[str, FileDescriptorProto]) -> Definition:
    given, gives = method.input_type, method.output_type
    streams = bool(method.server_streaming)
    native: Json = {
        "protocol": "grpc",
        "method": f"/{service}/{method.name}",
        "input": given.full_name,
        "output": gives.full_name,
        "descriptors": _pin((given, gives), files),
        "names": "proto",
    }
    if streams:
        native["streams"] = True
    # The pin must suffice for a call, so the schemas are read from it.
    method_ = pinned(native)
    level = method.GetOptions().idempotency_level
    hints = {1: {"readOnlyHint": True}, 2: {"idempotentHint": True}}.get(level, {})
    returns = f"{'stream ' if streams else ''}{gives.full_name}"
    return Definition(
        name=method.full_name,
        description=f"rpc {method.name}({given.full_name}) returns ({returns})",
        input_schema=_Scribe(taken=True).document(_descriptor(method_.request)),
        output_schema=_Scribe(taken=False).document(_descriptor(method_.response), many=streams),
        native=native,
        hints=hints,
    )


def _descriptor(message: type[Message]) -> Descriptor:
    return cast("Descriptor", message.DESCRIPTOR)


def _pin(roots: Iterable[Descriptor], files: Mapping[str, FileDescriptorProto]) -> str:
    """Pack the files that describe some messages, with nothing else in them, as text."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

    used: dict[str, set[str]] = {}  # by file, the names of its types at the top
    needs: dict[str, set[str]] = {}  # by file, the files that its types refer to
    left: list[Descriptor | EnumDescriptor] = list(roots)
    seen: set[str] = set()
    while left:
        one = left.pop()
        while one.containing_type is not None:
            one = one.containing_type
        if one.full_name in seen:
            continue
        seen.add(one.full_name)
        file = one.file.name
        used.setdefault(file, set()).add(one.name)
        for other in _referred(one):
            needs.setdefault(file, set()).add(other.file.name)
            left.append(other)
    pinned_files = FileDescriptorSet()
    for name in sorted(used):
        if name.startswith(_WELL_KNOWN):
            continue
        file = FileDescriptorProto()
        file.CopyFrom(files[name])
        for field in ("service", "extension", "source_code_info", "dependency", "public_dependency", "weak_dependency"):
            file.ClearField(field)
        _keep_only(file, used[name])
        file.dependency.extend(sorted(needs.get(name, set()) - {name}))
        pinned_files.file.append(file)
    return base64.b64encode(zlib.compress(pinned_files.SerializeToString(deterministic=True), 9)).decode()


def _keep_only(file: FileDescriptorProto, names: set[str]) -> None:
    for types in (file.message_type, file.enum_type):
        for index in reversed(range(len(types))):
            if types[index].name not in names:
                del types[index]
    for message in file.message_type:
        _drop_extensions(message)


def _drop_extensions(message: DescriptorProto) -> None:
    """Remove extensions, which extend types that are not kept; the JSON form does not need them."""
    message.ClearField("extension")
    for inner in message.nested_type:
        _drop_extensions(inner)


def _referred(one: Descriptor | EnumDescriptor) -> Iterable[Descriptor | EnumDescriptor]:
    """Return the types that the fields of a message refer to, including its nested messages."""
    left: list[Any] = [one]
    while left:
        inner = left.pop()
        for field in cast("Iterable[FieldDescriptor]", getattr(inner, "fields", ())):
            for other in (field.message_type, field.enum_type):
                if other is not None:
                    yield other
        left += getattr(inner, "nested_types", ())


_INTEGER: Json = {"type": "integer"}
_TEXT_NUMBER: Json = {"type": "string", "pattern": "^-?[0-9]+$"}
_ODD_NUMBERS = ["NaN", "Infinity", "-Infinity"]
# The JSON form of the well-known messages, which is not an object of their fields.
_SPECIAL: Mapping[str, Json] = {
    "Timestamp": {"type": "string", "format": "date-time"},
    "Duration": {"type": "string", "pattern": r"^-?[0-9]+(\.[0-9]+)?s$"},
    "FieldMask": {"type": "string"},
    "Struct": {"type": "object"},
    "ListValue": {"type": "array"},
    "Value": {},
    "Empty": {"type": "object"},
    "Any": {"type": "object", "properties": {"@type": {"type": "string"}}},
}  # fmt: skip
_WRAPPERS = frozenset(
    {
        "DoubleValue", "FloatValue", "Int64Value", "UInt64Value", "Int32Value", "UInt32Value", "BoolValue",
        "StringValue", "BytesValue",
    }
)  # fmt: skip


class _Scribe:
    """Converts messages to JSON Schema, in the JSON form of protobuf with the field names of the .proto file.

    Requests (`taken`) are strict, responses are not.
    """

    def __init__(self, *, taken: bool) -> None:
        self._taken = taken
        self._defs: Json = {}

    def document(self, message: Descriptor, *, many: bool = False) -> Json:
        # The outermost message is at the top, and among the definitions only if something refers to it.
        root = self._message(message) if many else self._special(message) or self._body({}, message)
        if many:
            listed: Json = {"type": "array", "items": root}
            root = {"type": "object", "properties": {"messages": listed}, "required": ["messages"]}
        return {**root, "$defs": self._defs} if self._defs else root

    def _special(self, message: Descriptor) -> Json | None:
        package, _, short = message.full_name.rpartition(".")
        if package != "google.protobuf":
            return None
        if short in _WRAPPERS:
            return {"anyOf": [self._single(message.fields_by_name["value"]), {"type": "null"}]}
        return dict(_SPECIAL[short]) if short in _SPECIAL else None

    def _message(self, message: Descriptor) -> Json:
        special = self._special(message)
        if special is not None:
            return special
        name = message.full_name
        if name not in self._defs:
            # Entered before it is written: a message may refer to itself.
            self._defs[name] = {}
            self._body(self._defs[name], message)
        return {"$ref": f"#/$defs/{name}"}

    def _body(self, body: Json, message: Descriptor) -> Json:
        body |= {"type": "object", "properties": {field.name: self._field(field) for field in message.fields}}
        required = [field.name for field in message.fields if self._is_there(field)]
        if required:
            body["required"] = required
        if self._taken:
            body["additionalProperties"] = False
        return body

    def _is_there(self, field: FieldDescriptor) -> bool:
        """Whether a field is always present: a value that we write has every field that cannot be absent."""
        return field.is_required or (not self._taken and (field.is_repeated or not field.has_presence))

    def _field(self, field: FieldDescriptor) -> Json:
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            return {"type": "object", "additionalProperties": self._single(inner.fields_by_name["value"])}
        single = self._single(field)
        return {"type": "array", "items": single} if field.is_repeated else single

    def _single(self, field: FieldDescriptor) -> Json:
        if field.message_type is not None:
            return self._message(field.message_type)
        if field.enum_type is not None:
            if field.enum_type.full_name == "google.protobuf.NullValue":
                return {"type": "null"}
            named: Json = {"type": "string", "enum": [value.name for value in field.enum_type.values]}
            # By name or by number. A newer server may return a value that was unknown when the method was pinned.
            return {"anyOf": [named, {"type": "integer"}]}
        match field.cpp_type:
            case field.CPPTYPE_BOOL:
                return {"type": "boolean"}
            case field.CPPTYPE_STRING:
                raw = field.type == field.TYPE_BYTES
                return {"type": "string", "contentEncoding": "base64"} if raw else {"type": "string"}
            case field.CPPTYPE_FLOAT | field.CPPTYPE_DOUBLE:
                return {"anyOf": [{"type": "number"}, {"type": "string", "enum": _ODD_NUMBERS}]}
            case field.CPPTYPE_INT64:
                return dict(_INTEGER if self._taken else _TEXT_NUMBER)
            case field.CPPTYPE_UINT64:
                return {"type": "integer", "minimum": 0} if self._taken else dict(_TEXT_NUMBER)
            case field.CPPTYPE_UINT32:
                return {"type": "integer", "minimum": 0}
            case _:
                return dict(_INTEGER)

"""Writes the Python of the gRPC contracts from their proto files: `python -m interlock.doors.grpc.generate`.

There are two: the gateway's own, which clients compile, and that of a policy engine elsewhere, which the operator's
engine serves and Interlock calls.

What protoc makes demands the very versions of protobuf and grpcio it was made with, or newer ones, although it uses
nothing that older ones lack. Those demands are taken out, so that Interlock runs with what it declares. Of the classes
for gRPC the client stays, with types, which protoc does not make; the door registers its methods itself.

`released.binpb` and `policy.binpb` are the contracts as others know them. A change that would break
them is refused here, and by the tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.core.record import NamedTuple

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import (
        DescriptorProto,
        EnumDescriptorProto,
        FileDescriptorProto,
        MethodDescriptorProto,
    )

HERE = Path(__file__).parent


class Contract(NamedTuple):
    """A proto file, the package that its Python lives in, and what others rely on of it."""

    proto: str
    package: str
    released: Path
    client: bool  # whether a client comes with the messages

    @property
    def module(self) -> str:
        return f"{Path(self.proto).stem}_pb2"

    @property
    def folder(self) -> Path:
        return HERE.parents[2].joinpath(*self.package.split("."))


GATEWAY = Contract(
    "interlock/v1/gateway.proto",
    "interlock.doors.grpc.v1",
    HERE / "proto" / "interlock" / "v1" / "released.binpb",
    True,
)
POLICY = Contract(
    "interlock/policy/v1/policy.proto",
    "interlock.authority.policy_v1",
    HERE / "proto" / "interlock" / "policy" / "v1" / "policy.binpb",
    client=False,
)

_HEADER = """\
# Written by interlock.doors.grpc.generate from {}; not by hand.
# ruff: noqa
# fmt: off
# pyright: basic
"""
_NOT_OURS = (
    re.compile(r"^from google\.protobuf import runtime_version as _runtime_version\n", re.MULTILINE),
    re.compile(r"^_runtime_version\.ValidateProtobufRuntimeVersion\(.*?^\)\n", re.MULTILINE | re.DOTALL),
    re.compile(r"^import grpc\nimport warnings\n\n", re.MULTILINE),
    re.compile(r"^GRPC_GENERATED_VERSION = .*?^    \)\n\n", re.MULTILINE | re.DOTALL),
    re.compile(r"\n\nclass \w+Servicer.*\Z", re.DOTALL),
)
_KINDS: Mapping[tuple[bool, bool], str] = {
    (False, False): "UnaryUnary",
    (False, True): "UnaryStream",
    (True, False): "StreamUnary",
    (True, True): "StreamStream",
}


def generate(contract: Contract = GATEWAY) -> dict[str, bytes]:
    """The files of a contract's Python, by name."""
    with tempfile.TemporaryDirectory() as into:
        outputs = [f"--python_out={into}", f"--pyi_out={into}"]
        if contract.client:
            outputs.append(f"--grpc_python_out={into}")
        protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{HERE / 'proto'}", *outputs, contract.proto]
        subprocess.run(protoc, check=True)  # noqa: S603 - our own compiler on our own file
        made = {file.name: file.read_text() for file in Path(into, contract.proto).parent.iterdir()}
    if contract.client:
        made[f"{contract.module}_grpc.pyi"] = _client_types(contract, _descriptor(made[f"{contract.module}.py"]))
    return {name: _ours(contract, text).encode() for name, text in sorted(made.items())}


def _ours(contract: Contract, text: str) -> str:
    for part in _NOT_OURS:
        text = part.sub("", text)
    theirs = ".".join(Path(contract.proto).parent.parts)
    text = text.replace(f"from {theirs} import", f"from {contract.package} import")
    text = text.replace(f"'{theirs}.{contract.module}'", f"'{contract.package}.{contract.module}'")
    return _HEADER.format(contract.proto) + text


def _descriptor(source: str) -> FileDescriptorProto:
    """The contract as the generated code states it."""
    import ast

    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    literal = re.search(r"AddSerializedFile\((b'.*')\)$", source, re.MULTILINE)
    assert literal is not None
    return FileDescriptorProto.FromString(ast.literal_eval(literal[1]))


def _client_types(contract: Contract, file: FileDescriptorProto) -> str:
    lines = ["import grpc.aio as _aio", f"from {contract.package} import {contract.module} as _wire", ""]
    for service in file.service:
        lines += [f"class {service.name}Stub:", "    def __init__(self, channel: _aio.Channel) -> None: ..."]
        for method in service.method:
            kind = _KINDS[method.client_streaming, method.server_streaming]
            sent, got = (name.rpartition(".")[2] for name in (method.input_type, method.output_type))
            lines.append(f"    {method.name}: _aio.{kind}MultiCallable[_wire.{sent}, _wire.{got}]")
    return "\n".join(lines) + "\n"


# What clients rely on


def breaks(old: FileDescriptorProto, new: FileDescriptorProto) -> list[str]:
    """The changes of the new contract that would break a client of the old one."""
    return sorted(_breaks(old, new))


def _breaks(old: FileDescriptorProto, new: FileDescriptorProto) -> Iterator[str]:
    if old.package != new.package:
        yield f"the package {old.package} is now {new.package}"
    messages = {message.name: message for message in new.message_type}
    for message in old.message_type:
        if message.name in messages:
            yield from _breaks_in_message(message, messages[message.name])
        else:
            yield f"message {message.name} is gone"
    enums = {enum.name: enum for enum in new.enum_type}
    for enum in old.enum_type:
        yield from _breaks_in_enum(enum, enums.get(enum.name))
    methods = {(service.name, method.name): method for service in new.service for method in service.method}
    for service in old.service:
        for method in service.method:
            if _signature(method) != _signature(methods.get((service.name, method.name))):
                yield f"method {service.name}.{method.name} is gone or has another signature"


def _breaks_in_message(old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    fields = {field.number: field for field in new.field}
    free = {number for gap in new.reserved_range for number in range(gap.start, gap.end)}
    for was in old.field:
        now = fields.get(was.number)
        if now is None:
            # Its number may never mean anything else again.
            if was.number not in free:
                yield f"{old.name}.{was.name} is gone and {was.number} is not reserved"
            continue
        group = old.oneof_decl[was.oneof_index].name if was.HasField("oneof_index") else None
        group_now = new.oneof_decl[now.oneof_index].name if now.HasField("oneof_index") else None
        before = (was.name, was.type, was.label, was.type_name, group)
        if before != (now.name, now.type, now.label, now.type_name, group_now):
            yield f"{old.name}.{was.name} (number {was.number}) is not what it was"


def _breaks_in_enum(old: EnumDescriptorProto, new: EnumDescriptorProto | None) -> Iterator[str]:
    if new is None:
        yield f"enum {old.name} is gone"
        return
    values = {value.number: value.name for value in new.value}
    for value in old.value:
        if values.get(value.number) != value.name:
            yield f"{old.name}.{value.name} (number {value.number}) is not what it was"


def _signature(method: MethodDescriptorProto | None) -> tuple[str, str, bool, bool] | None:
    if method is None:
        return None
    return method.input_type, method.output_type, method.client_streaming, method.server_streaming


def main() -> None:
    """Write the files, unless that would break others. With `--release`, they know these contracts from now on."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    for contract in (GATEWAY, POLICY):
        made = generate(contract)
        file = _descriptor(made[f"{contract.module}.py"].decode())
        if contract.released.exists():
            broken = breaks(FileDescriptorProto.FromString(contract.released.read_bytes()), file)
            if broken:
                raise SystemExit("this would break others:\n" + "\n".join(broken))
        for name, content in made.items():
            (contract.folder / name).write_bytes(content)
        if "--release" in sys.argv[1:]:
            contract.released.write_bytes(file.SerializeToString(deterministic=True))


if __name__ == "__main__":
    main()

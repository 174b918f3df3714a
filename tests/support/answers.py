"""Calls as any client can make them, and their answers in the same terms over every wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import grpc.aio
import orjson
from google.protobuf.json_format import MessageToDict
from google.rpc.status_pb2 import Status

from interlock.doors.grpc.v1 import gateway_pb2 as wire

Json = dict[str, Any]


@dataclass(frozen=True)
class Wish:
    """A call as any client can ask for it."""

    tool: str
    arguments: Json
    key: str | None = None
    dry_run: bool = False
    token: str = "full"
    version: str | None = None
    timeout_ms: int | None = None
    traceparent: str = ""


@dataclass(frozen=True)
class Told:
    """The answer as a client reads it: the data, a pending call, or the error's code, errorCode, class and `retryable`.

    Two of these are equal where the wires tell the same.
    """

    data: Any = None
    pending: bool = False
    error: tuple[str, str, str, bool] | None = None
    # What a caller is advised to do about the error.
    advice: str = ""
    # What each file that the call left is named, and what is in it by its hash and size.
    files: tuple[tuple[str, str, int], ...] = ()
    # Until when the version that ran can be called, and what comes after it.
    deprecation: Json | None = None
    # The whole error.
    envelope: Json = field(default_factory=dict[str, Any], compare=False)


@dataclass(frozen=True)
class Heard:
    """The answer as it came over a wire: all of it as text, its status there, and what is in it."""

    text: str
    status: int | str
    data: Any = None
    # What the wire tells about the call beside the data.
    about: Any = None
    envelope: Json | None = None
    pending: Json | None = None
    files: tuple[tuple[str, str, int], ...] = ()
    trace_id: str = ""

    @property
    def failure(self) -> Json:
        assert self.envelope is not None, self.text
        return self.envelope

    @property
    def triple(self) -> tuple[str, str, str, bool]:
        envelope = self.failure
        return envelope["error_code"], envelope["errorCode"], envelope["error_class"], envelope["retryable"]

    @property
    def told(self) -> Told:
        if self.envelope is not None:
            return Told(error=self.triple, advice=self.envelope["resolution"], envelope=dict(self.envelope))
        if self.pending is not None:
            return Told(pending=True)
        about: Json = self.about or {}
        return Told(self.data, files=self.files, deprecation=about.get("deprecation"))


def failed(envelope: Mapping[str, Any]) -> Told:
    """The answer of a call that failed with this envelope."""
    return Heard("", "", envelope=dict(envelope)).told


def left(artifacts: Iterable[Json]) -> tuple[tuple[str, str, int], ...]:
    """Files as a wire names them, without their references."""
    return tuple((one["path"], one["sha256"], one["size"]) for one in artifacts)


def typed_refusal(error: grpc.aio.AioRpcError) -> Heard:
    """A status of gRPC with its details: the typed envelope under the names that it has elsewhere."""
    trailing: dict[str, bytes] = dict(cast("Any", error.trailing_metadata()) or ())
    status = Status.FromString(trailing["grpc-status-details-bin"])
    (packed,) = [one for one in status.details if one.type_url.endswith("/interlock.v1.ErrorEnvelope")]
    read = wire.ErrorEnvelope()
    packed.Unpack(read)
    fields: Json = MessageToDict(read, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    envelope: Json = {
        **fields,
        "errorCode": fields["error_code"],
        "error_code": fields["code"],
        "humanMessage": fields["message"],
        "traceId": fields["trace_id"],
        **({"retryAfterMs": read.retry_after_ms} if read.HasField("retry_after_ms") else {}),
        "details": orjson.loads(read.details_json) if read.details_json else {},
    }
    return Heard(f"{error.details()}{status}{read}{envelope}", error.code().name, envelope=envelope)

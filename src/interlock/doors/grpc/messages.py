"""Core values as messages of the contract and back. Imported when the door opens, because protobuf takes its time.

Numbers are the reason that values travel as JSON text: whole numbers of any size arrive as they were sent. A Struct,
for those who like it better, holds doubles; a whole one becomes a whole number again where a double is exact.
"""

from __future__ import annotations

import math
from typing import Any, cast

import grpc
from google.protobuf import struct_pb2
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from interlock.api.listing import LEADS, Lead, Wanted, moment
from interlock.api.service import Ask
from interlock.api.tools import Version
from interlock.call.events import Event
from interlock.call.results import Result
from interlock.core.errors import Failure
from interlock.core.threads import INPUTS
from interlock.data.bounds import LARGE_INPUT, check_values, exactly, too_many
from interlock.data.canonical import encode
from interlock.data.schema import Json
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.window.reading import Part, asked

DOMAIN = "interlock"
# Statuses travel in metadata, of which clients accept 8 KiB: the text percent-encoded, the details in base64.
MESSAGE_BYTES = 600
STATUS_BYTES = 4000
EXACT = 2**53
LARGE_STRUCT = 1 << 13


# In


async def ask(request: wire.InvokeRequest, *, timeout_s: float | None, trace: str | None, most_values: int) -> Ask:
    """The call that a message asks for."""
    # A Struct is read value by value, in Python. A large one, and large JSON text, are read on another thread.
    large = request.ByteSize() > (LARGE_STRUCT if request.HasField("arguments") else LARGE_INPUT)
    return Ask(
        tool=request.tool_id,
        arguments=await INPUTS.run(_arguments, request, most_values) if large else _arguments(request, most_values),
        version=request.version if request.HasField("version") else None,
        key=request.idempotency_key if request.HasField("idempotency_key") else None,
        session=request.session,
        timeout_s=timeout_s,
        dry_run=request.dry_run,
        task=request.task if request.HasField("task") else None,
        trace=trace,
    )


def _arguments(request: wire.InvokeRequest, most_values: int) -> Json:
    """The arguments as they were sent. That they are an object is for the gateway to say."""
    if request.HasField("arguments"):
        return _Struct(most_values).members(request.arguments)
    if not request.HasField("arguments_json"):
        return {}
    check_values(request.arguments_json, most_values)
    try:
        return exactly(request.arguments_json)
    except (ValueError, RecursionError):
        raise Failure("E3004", "`arguments_json` must be an object as JSON text in UTF-8") from None


class _Struct:
    """Reads a Struct, and counts its values on the way: looking at one costs more than parsing it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = most

    def members(self, struct: struct_pb2.Struct) -> Json:
        self._take(len(struct.fields))
        return {name: self.value(value) for name, value in struct.fields.items()}

    def value(self, value: struct_pb2.Value) -> Any:
        match value.WhichOneof("kind"):
            case "number_value":
                number = value.number_value
                if not math.isfinite(number):  # as the JSON form of protobuf writes them
                    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
                return int(number) if number.is_integer() and abs(number) <= EXACT else number
            case "struct_value":
                return self.members(value.struct_value)
            case "list_value":
                self._take(len(value.list_value.values))
                return [self.value(item) for item in value.list_value.values]
            case "string_value":
                return value.string_value
            case "bool_value":
                return value.bool_value
            case _:
                return None

    def _take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise too_many(self._most)


# Out


def tool(version: Version, availability: str, timeout_class: str) -> wire.Tool:
    """A tool as clients read about it."""
    contract, notice = version.contract, version.row.notice
    return wire.Tool(
        tool_id=version.row.address,
        version=version.row.version,
        name=contract.manifest.title or contract.manifest.name,
        description=contract.manifest.full_description,
        input_schema_json=encode(contract.input.model_facing),
        output_schema_json=encode(contract.delivers),
        mutation_class=f"MUTATION_CLASS_{contract.mutation.mutation_class.upper()}",
        timeout_class=f"TIMEOUT_CLASS_{timeout_class.upper()}",
        key_required=contract.idempotency.key_required,
        required_scopes=contract.auth.required_scopes,
        timeout_default_s=contract.timeout.default_s,
        timeout_max_s=contract.timeout.max_s,
        tags=contract.manifest.tags,
        deprecation_json=None if notice is None else encode(notice.document()),
        availability=availability,
        known_pairs=len(contract.manifest.known_pairs),
    )


def trace(document: Json) -> wire.TraceResponse:
    """The spans of a trace."""
    spans = [
        wire.Span(
            name=one["name"], trace_id=one["trace_id"], span_id=one["span_id"],
            parent_span_id=one["parent_span_id"] or "", start=one["start"], duration_ms=one["duration_ms"],
            status=one["status"], attributes_json=encode(one["attributes"]), events_json=encode(one["events"]),
        )
        for one in document["spans"]
    ]  # fmt: skip
    return wire.TraceResponse(
        invocation_id=document["invocation_id"],
        trace_id=document["trace_id"],
        complete=document["complete"],
        spans=spans,
    )


def part(request: wire.PartRequest) -> Part:
    """The part of a result that a message asks for."""
    start, stop, tokens = (
        getattr(request, name) if request.HasField(name) else None for name in ("start", "stop", "tokens")
    )
    return asked(request.at, request.query, start, stop, tokens)


def part_read(document: Json) -> wire.PartResponse:
    """A part of a result."""
    value = encode(document["value"])
    return wire.PartResponse(
        value_json=value, of=document["of"], tokens=document["tokens"], truncated=document["truncated"]
    )


def result(outcome: Result) -> wire.CallResult:
    """The message for the outcome of a call."""
    message = wire.CallResult(
        invocation_id=outcome.invocation_id,
        tool=outcome.tool,
        state=call_state(outcome.state),
        trace_id=outcome.trace_id,
        created_ms=outcome.created_ms,
        source=outcome.source,
        redacted=outcome.redacted,
        metadata_json=encode({**outcome.metadata, **(outcome.about() if outcome.ok else {})}),
        artifacts=[wire.Artifact(**one.document()) for one in outcome.artifacts],
    )
    if outcome.pending:
        pending: Json = outcome.metadata["pending"]
        message.pending.ticket_id = pending["ticketId"]
        message.pending.status = pending["status"]
        message.pending.reason = _short(pending["reason"])
        message.pending.expires_at = pending["expiresAt"]
        message.pending.agree_in_advance = pending.get("agreeInAdvance", "")
    elif outcome.error is not None:
        message.error.CopyFrom(envelope(outcome.error, outcome.trace_id, outcome.invocation_id))
    elif outcome.persistence.ref is not None:
        persistence = outcome.persistence
        message.kept.CopyFrom(wire.Kept(ref=persistence.ref, size_chars=persistence.size, preview=outcome.text()))
    else:
        message.value_json = encode(outcome.value)
    return message


def call_state(state: str) -> str:
    """The label of a state; protobuf takes labels for the values of an enum."""
    return f"CALL_STATE_{state.upper()}"


def wanted(request: wire.CallsRequest) -> tuple[Wanted, int | None, int]:
    """Which calls a message asks for, from which place on, and how many."""
    filters = Wanted(
        state=request.state or None, error=request.error or None, tool=request.tool or None,
        caller=request.caller or None, since=moment(request.since, "since"), until=moment(request.until, "until"),
    )  # fmt: skip
    if request.before < 0:
        raise Failure("E3004", "`before` is the place that the page before ended at")
    return filters, request.before or None, page_size(request.limit, 100, 1000)


def top_asked(request: wire.TopRequest) -> tuple[Lead, str | None, str | None, int]:
    """The parameters of a summary: its order, its time span and its length."""
    lead = request.by or "failures"
    if lead not in LEADS:
        raise Failure("E3004", f"`by` is one of {', '.join(LEADS)}")
    since, until = moment(request.since, "since"), moment(request.until, "until")
    return lead, since, until, page_size(request.limit, 10, 100)


def top(document: Json) -> wire.TopResponse:
    """A summary as a message."""
    lines = [
        wire.TopLine(
            name=one.get("tool") or one.get("caller"),
            caller_name=one.get("caller_name"),
            calls=one["calls"],
            failures=one["failures"],
            cost=one["cost"],
        )
        for one in document["top"]
    ]
    return wire.TopResponse(since=document["since"], top=lines)


def page_size(asked: int, usual: int, most: int) -> int:
    """The length of a page; the default if the message has none."""
    if not 0 <= asked <= most:
        raise Failure("E3004", f"`limit` is a whole number from 1 to {most}")
    return asked or usual


def call_status(status: Json, outcome: Result | None) -> wire.StatusResponse:
    """The message for the state of a call, with its result while it is stored."""
    if outcome is not None and "tool_id" not in status:
        tool_id, _, version = outcome.tool.partition("@")
        code = "" if outcome.error is None or outcome.pending else outcome.error.code
        return wire.StatusResponse(
            invocation_id=outcome.invocation_id,
            state=call_state(outcome.state),
            tool_id=tool_id,
            version=version,
            code=code,
            trace_id=outcome.trace_id,
            latency_ms=outcome.metadata.get("latency_ms", 0.0),
            result=result(outcome),
        )
    return wire.StatusResponse(
        invocation_id=status["invocation_id"],
        state=call_state(status["status"]),
        tool_id=status.get("tool_id"),
        version=status.get("version"),
        code=status.get("error_code"),
        approval_ticket_id=status.get("approval_ticket_id"),
        trace_id=status.get("trace_id"),
        latency_ms=status.get("latency_ms"),
        outcome=status.get("outcome"),
        result=None if outcome is None else result(outcome),
    )


def selection(document: Json) -> wire.SelectResponse:
    """A selection, with what most clients need as fields."""
    gate: Json = document["gate"] or {}
    return wire.SelectResponse(
        id=document["id"],
        chosen=document["chosen"] or "",
        answer=gate.get("answer", ""),
        selection_json=encode(document),
    )


def surface(document: Json) -> wire.SurfaceResponse:
    """A surface as it is shown."""
    return wire.SurfaceResponse(
        caller=document["caller"],
        agent=document["agent"] or "",
        tenant=document["tenant"],
        revision=document["revision"],
        changed_at=document["changed_at"] or "",
        surface_json=encode(document["surface"]),
        reasons=document["reasons"],
        next_page_token=document["cursor"] or "",
    )


def cancelled(answer: str) -> wire.CancelResponse:
    """The answer to a request to cancel a call."""
    return wire.CancelResponse(outcome=f"CANCEL_OUTCOME_{answer.upper()}")


def happening(event: Event) -> wire.RunEvent | None:
    """An event of a running call; None for those that a caller is not told."""
    data = event.data
    match event.type:
        case "tool.invocation.started":
            return wire.RunEvent(started=wire.Started(invocation_id=event.invocation_id, tool=event.tool))
        case "tool.invocation.progress":
            progress = wire.Progress(
                sequence=data["sequence"],
                message=data["message"],
                percent=data["percent"],
                elapsed_ms=data["elapsed_ms"],
                facts_json=encode({name: value for name, value in data.items() if name not in _TYPED_FIELDS}),
            )
            return wire.RunEvent(progress=progress)
        case "tool.invocation.partial_result" | "tool.invocation.yielded":
            yielded = event.type == "tool.invocation.yielded"
            part = wire.Partial(index=data["index"], value_json=encode(data["value"]), yielded=yielded)
            return wire.RunEvent(partial=part)
        case _:
            return None


_TYPED_FIELDS = frozenset(
    ("schema_version", "progress_id", "invocation_id", "sequence", "message", "percent", "elapsed_ms", "status")
)


# Failures


def envelope(failure: Failure, trace_id: str, invocation_id: str = "") -> wire.ErrorEnvelope:
    """The error envelope of every door, typed."""
    fields = failure.envelope(trace_id)
    message = _short(failure.message)
    return wire.ErrorEnvelope(
        schema_version=fields["schema_version"],
        code=fields["error_code"],
        error_code=fields["errorCode"],
        error_class=fields["error_class"],
        retryable=fields["retryable"],
        retry_after_ms=fields.get("retryAfterMs"),
        message=message,
        resolution=fields["resolution"],
        trace_id=trace_id,
        invocation_id=invocation_id,
        details_json=encode(fields["details"]) if "details" in fields else None,
        native_error_ref=None if failure.native_error_ref is None else _short(failure.native_error_ref),
        policy_refs=[_short(ref) for ref in failure.policy_refs],
        evidence_refs=[_short(ref) for ref in failure.evidence_refs],
        shortened=message != failure.message,
        recoverability=fields["recoverability"],
    )


def status(failure: Failure, trace_id: str, invocation_id: str = "") -> Status:
    """A failure as gRPC tells it: the status of the table, and what clients of any language can read of the rest."""
    message = envelope(failure, trace_id, invocation_id)
    if message.ByteSize() > STATUS_BYTES - 2 * MESSAGE_BYTES:
        for field in ("details_json", "native_error_ref", "policy_refs", "evidence_refs"):
            message.ClearField(cast("Any", field))
        message.shortened = True
    facts = {"errorCode": message.error_code, "error_class": message.error_class, "trace_id": trace_id}
    details: list[Message] = [ErrorInfo(reason=message.code, domain=DOMAIN, metadata=facts)]
    if failure.retry_after_ms is not None:
        wait = Duration()
        wait.FromMilliseconds(failure.retry_after_ms)
        details.append(RetryInfo(retry_delay=wait))
    details.append(message)
    code: int = status_code(failure).value[0]
    return Status(code=code, message=message.message, details=[_packed(one) for one in details])


# Statuses of a gRPC upstream that its caller gets as they are. Others would say something about this endpoint.
_PASSED_ON = frozenset(
    ("INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "DATA_LOSS")
)


def status_code(failure: Failure) -> grpc.StatusCode:
    """The status of a failure: that of the table, or that of the gRPC service whose tool failed."""
    kind, _, name = (failure.native_error_ref or "").partition(":")
    return grpc.StatusCode[name if kind == "grpc" and name in _PASSED_ON else failure.row.grpc]


def _packed(message: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def _short(text: str) -> str:
    """Text that protobuf can hold and metadata has room for."""
    raw = text.encode(errors="replace")
    return raw.decode() if len(raw) <= MESSAGE_BYTES else raw[: MESSAGE_BYTES - 3].decode(errors="ignore") + "…"

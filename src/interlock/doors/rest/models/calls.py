"""Bodies of calls: making, listing, following, cancelling and undoing them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from interlock.doors.rest.invoke import LONGEST_MS
from interlock.doors.rest.models.common import (
    CALL,
    TICKET,
    TRACE,
    Answer,
    Body,
    Json,
    Moment,
    Name,
    Query,
    Status,
    example,
)


class InvokeBody(Body):
    """A call of one tool."""

    model_config = ConfigDict(
        json_schema_extra=example(
            tool_id="demo.balance", tool_version="1.0.0", parameters={"account": "cash"}, execution_mode="sync"
        )
    )

    tool_id: Name
    tool_version: str = Field("", description="a version or a range, such as ^1.0.0; the newest if it is not said")
    parameters: Json = Field({})
    execution_mode: Literal["sync", "async"] = Field("sync", description="async answers at once; follow the call by id")
    idempotency_key: str = Field("", description="your own name for this action: sent twice, it is done once")
    session_id: str = ""
    timeout_ms: int = Field(LONGEST_MS, ge=1, le=LONGEST_MS)
    dry_run: bool = Field(False, description="say what would happen, and do nothing")
    task: str = Field("", description="what its cost is counted under")


class Artifact(Answer):
    """A file that a call left."""

    model_config = ConfigDict(
        json_schema_extra=example(path="out/report.csv", sha256="9f" * 32, size=4096, ref=f"payload:{CALL}.1")
    )

    path: str = Field(description="where it was in the tool's output directory")
    sha256: str
    size: int
    ref: str


class Called(Answer):
    """A call that succeeded."""

    model_config = ConfigDict(
        json_schema_extra=example(
            invocation_id=CALL,
            status="success",
            state="succeeded",
            tool_id="demo.balance",
            tool_version="1.0.0",
            result=1000,
            execution_time_ms=1.4,
            trace_id=TRACE,
            source="compute",
            replayed=False,
            artifacts=[],
            content=[],
            handoffs=[],
            payload_ref=None,
        )
    )

    invocation_id: str
    status: Literal["success"]
    state: str
    tool_id: str
    tool_version: str
    result: Any = Field(description="what the tool gave back; null where it was kept, see payload_ref")
    execution_time_ms: float
    trace_id: str
    source: str = Field(description="compute, replay, preview, cache or synthetic")
    replayed: bool
    pagination: Json | None = None
    warnings: list[str] = Field([])
    hook_outputs: list[Json] = Field([], description="what hooks said of the call; no part of the result")
    redaction_state: Json = Field({}, description="whether anything was removed from the result, and from which places")
    deprecation: Json | None = None
    approval: Json | None = Field(
        None, description="by which mechanism it was approved: auto, standing or human_review, and the rule or person"
    )
    artifacts: list[Artifact] = Field([], description="files that the tool left; /v1/payloads/{ref} has each")
    content: list[Json] = Field([], description="items that the tool added: images, files, links, logs, diffs")
    handoffs: list[Json] = Field([], description="work that is handed over; a handoff grants nothing by itself")
    payload_ref: str | None = Field(None, description="where a result too large to be sent is kept")
    preview: str | None = None


class Accepted(Answer):
    """A call that goes on in the background, or waits for a person."""

    model_config = ConfigDict(
        json_schema_extra=example(
            invocation_id=CALL,
            status="pending",
            state="awaiting_approval",
            pending={"code": "APPROVAL_REQUIRED", "ticketId": TICKET, "pollEndpoint": f"/v1/approvals/{TICKET}"},
            poll=f"/v1/calls/{CALL}",
        )
    )

    invocation_id: str
    status: Literal["running", "pending"]
    state: str
    poll: str
    pending: Json | None = None
    hook_outputs: list[Json] = Field([], description="what hooks said of a call that waits for a person")


class CallStatus(Answer):
    """The state of a call, with its outcome while that is stored."""

    invocation_id: str
    status: Status
    state: str


class CallsQuery(Query):
    state: str | None = Field(
        None, max_length=40, description="running, awaiting_approval, succeeded, failed, unknown …"
    )
    error: str | None = Field(None, max_length=60, description="an E-code, or the name of an error")
    tool: str | None = Field(None, max_length=600, description="by name, or NAME@VERSION")
    caller: str | None = Field(
        None,
        max_length=600,
        description="the id or the registered name of the caller, or of the agent that acted for it",
    )
    since: Moment | None = None
    until: Moment | None = None
    before: int | None = Field(None, ge=1, le=2**62, description="the place that the page before ended at")
    limit: int = Field(100, ge=1, le=1000)


class CallLine(Answer):
    """One call, in short."""

    invocation_id: str
    at: str = Field(description="when it ended, or began where it has not")
    tool: str
    caller: str
    caller_name: str | None = Field(description="the name that the caller was registered under")
    agent: str | None = Field(description="the agent that acted for the caller; null if the caller acted itself")
    agent_name: str | None = Field(description="the name that the agent was registered under")
    tenant: str | None
    key: str | None
    state: str
    error_code: str | None
    error: str | None
    source: str | None
    latency_ms: float | None
    cost: float | None = Field(description="null where nobody counts costs")


class CallLines(Answer):
    calls: list[CallLine]
    before: int | None = Field(
        description="where to go on; null at the end. A page may be short and have more after it"
    )


class TopQuery(Query):
    by: Literal["failures", "cost", "calls"] = Field(
        "failures", description="failures and calls are counted per tool, cost per caller"
    )
    since: Moment | None = Field(None, description="a day ago unless said")
    until: Moment | None = None
    limit: int = Field(10, ge=1, le=100)


class CallsTop(Answer):
    by: str
    since: str = Field(description="from when on calls were counted")
    until: str | None
    top: list[Json] = Field(description="`tool`, or `caller` and `caller_name`, and its calls, failures and cost")


class CheckpointsQuery(Query):
    after: int = Field(0, ge=0, le=2**62, description="the sequence that the page before ended at")
    limit: int = Field(20, ge=1, le=100)


class Checkpoint(Answer):
    """A checkpoint that a tool saved."""

    schema_version: Literal["1.0"]
    checkpoint_id: str
    invocation_id: str
    sequence: int
    tool_id: str
    tool_version: str
    checkpoint_type: Literal["macro", "named"]
    label: str
    timestamp: str
    size: int = Field(description="bytes of the state as JSON")
    checksum: str = Field(description="SHA-256 of the state in canonical JSON, as it was saved")
    state: Any = Field(description="null where it is damaged, see error")
    redacted: list[str] = Field(description="JSON pointers to what was taken out of the state")
    error: Json | None = None


class Checkpoints(Answer):
    model_config = ConfigDict(
        json_schema_extra=example(
            checkpoints=[
                {
                    "schema_version": "1.0",
                    "checkpoint_id": f"{CALL}:1",
                    "invocation_id": CALL,
                    "sequence": 1,
                    "tool_id": "demo.crawl",
                    "tool_version": "1.0.0",
                    "checkpoint_type": "macro",
                    "label": "phase_complete",
                    "timestamp": "2026-11-15T12:00:00.000Z",
                    "size": 22,
                    "checksum": "d0b0aa39334869f9714aaf7c3374d312013b5a1fbb29af922c166c7f97d47603",
                    "state": {"pages": 40, "next": 41},
                    "redacted": [],
                    "error": None,
                }
            ],
            after=None,
        )
    )

    checkpoints: list[Checkpoint]
    after: int | None = Field(description="where to go on; null at the end")


class CallInputs(Answer):
    """The four inputs of a call; null where they were not kept, or not reached."""

    invocation_id: str
    input_hash: str | None
    model_input: Any = Field(description="as it was sent")
    observable_input: Any = Field(description="as hooks and transcripts see it")
    permission_input: Any = Field(description="as policy judged it")
    call_input: Any = Field(description="as the tool got it")
    input_changes: list[Json] = Field(description="every difference: before, after, source, pointer, value")
    withheld: str | None = Field(description="why they were not kept, where they should have been")


class CallTrace(Answer):
    """The spans of the trace that a call belongs to."""

    invocation_id: str
    trace_id: str
    complete: bool = Field(
        description="false: the call's own spans are not kept here, and one span tells what is on record"
    )
    spans: list[Span]


class Span(Answer):
    """A step of a call, as it ended."""

    name: str = Field(
        description="tool.invoke, or one of its steps: Validate, Authorize, Execute, External, Attempt, Verify, Return"
    )
    trace_id: str
    span_id: str
    parent_span_id: str | None
    start: str
    duration_ms: float
    status: str = Field(description="OK, or what went wrong")
    attributes: Json = Field(
        description="tool, version, status, latency and cost, where they belong to the step; "
        "of a request that left the process: host, attempt, status and latency"
    )
    events: list[Json] = Field(description="what happened meanwhile: `name`, `at` and its facts")


class CancelQuery(Query):
    reason: Literal["interruption", "discard", "fallback", "sibling"] | None = Field(
        None, description="why, for the label of the synthetic result; interruption if nothing is said"
    )


class Cancelled(Answer):
    invocation_id: str
    outcome: Literal["canceled", "unsupported", "finished"]


class UndoBody(Body):
    model_config = ConfigDict(json_schema_extra=example(idempotency_key="undo-order-17"))

    idempotency_key: Name

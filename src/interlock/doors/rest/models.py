"""What the wide API takes and gives, as its document describes it.

Bodies are strict: a field that is not listed, or a value of another type, is refused (E3004). Answers list what clients
may count on; more may stand beside it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, cast

import pydantic
from pydantic import AfterValidator, AwareDatetime, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticKnownError

from interlock.data.bounds import LONGEST_NAME
from interlock.doors.rest.invoke import LONGEST_MS
from interlock.upstreams.formats import Provider
from interlock.upstreams.kinds import KINDS

Json = dict[str, Any]
Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
# Of a list of names that is no such thing, the first fault is told: others would be counted in tens of thousands.
Names = Annotated[list[Name], Field(max_length=1000, fail_fast=True)]
Text = Annotated[str, Field(max_length=10_000)]
_DATE = re.compile(r"\d{4}-\d\d-\d\d[Tt ]")


def _with_date(value: Any) -> Any:
    """Refuse a bare number: it would be read as seconds since 1970, which the document does not offer."""
    if isinstance(value, str) and _DATE.match(value) is None:
        raise ValueError("a time has a date, a time of day and an offset, as 2026-11-16T18:00:00Z")
    return value


Moment = Annotated[AwareDatetime, BeforeValidator(_with_date)]
Status = Literal["success", "error", "timeout", "cancelled", "running", "pending"]

_CALL = "01M7ETAWZ6CA43EAB55115CDBC"
_TICKET = "apr_01M7ETAX1RAFF8FEA10B286E99"
_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
_ECHO: Json = {
    "tool_id": "echo_tool",
    "namespace": "demo",
    "version": "1.0.0",
    "name": "Echo Tool",
    "description": "Echoes its input back",
    "provider": "local",
    "protocol": "native",
    "mutation_class": "read_only",
    "parameters": {
        "type": "object",
        "properties": {"message": {"type": "string", "description": "what to send back", "examples": ["Hello World"]}},
        "required": ["message"],
    },
    "result_schema": {"type": "object", "properties": {"echoed": {"type": "string"}}, "required": ["echoed"]},
    "required_permissions": [],
    "idempotency": {},
    "observability": {},
    "timeout_class": "standard",
    "execution": {
        "kind": "program",
        "target": "jq",
        "argv": ["jq", "-c", "{echoed: .message}"],
        "stdin": "json",
        "parse": "json",
    },
}


_MOST_MEMBERS = 1000


def _few(sent: object) -> object:
    """Refuse an object of too many members before each of them is looked at."""
    if _members(sent) > _MOST_MEMBERS:
        raise ValueError(f"the object has more than {_MOST_MEMBERS} members")
    return sent


def _members(sent: object) -> int:
    return len(cast("Json", sent)) if isinstance(sent, dict) else 0


def _example(**fields: Any) -> Json:
    return {"examples": [fields]}


_MOST_FIELDS = 100


class Body(pydantic.BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, sent: object) -> object:
        """Refuse what cannot be of the documented form at once: each unknown field would be a fault of its own."""
        if _members(sent) > _MOST_FIELDS:
            raise ValueError(f"the object has more than {_MOST_FIELDS} fields; see /docs")
        return sent


class Query(pydantic.BaseModel):
    model_config = ConfigDict(extra="forbid")


class Answer(pydantic.BaseModel):
    model_config = ConfigDict(extra="allow")


# Refusals


class Envelope(Answer):
    """What went wrong, in the same form through every door."""

    error_code: str = Field(pattern="^E3[0-9]{3}$", examples=["E3204"])
    errorCode: str = Field(examples=["AUTHORIZATION_DENIED"])  # noqa: N815 - the envelope's own name
    error_class: str = Field(examples=["permission_denied"])
    message: str
    resolution: str
    retryable: bool
    traceId: str  # noqa: N815 - the envelope's own name
    retryAfterMs: int | None = None  # noqa: N815 - the envelope's own name
    details: Json | None = None


class Refusal(Answer):
    """Why a request was not met."""

    error: Envelope
    detail: str = Field(examples=["E3204: the token does not name demo.post"])
    invocation_id: str | None = None
    tool_result: Json | None = Field(None, description="the terminal result of a call, as it is on record")


# Calls


class InvokeBody(Body):
    """A call of one tool."""

    model_config = ConfigDict(
        json_schema_extra=_example(
            tool_id="demo.balance", tool_version="1.0.0", parameters={"account": "cash"}, execution_mode="sync"
        )
    )

    tool_id: Name
    tool_version: str = Field("", description="a version or a range, such as ^1.0.0; the newest if it is not said")
    parameters: Json = {}
    execution_mode: Literal["sync", "async"] = Field("sync", description="async answers at once; follow the call by id")
    idempotency_key: str = Field("", description="your own name for this action: sent twice, it is done once")
    session_id: str = ""
    timeout_ms: int = Field(LONGEST_MS, ge=1, le=LONGEST_MS)
    dry_run: bool = Field(False, description="say what would happen, and do nothing")
    task: str = Field("", description="what its cost is counted under")


class Artifact(Answer):
    """A file that a call left."""

    model_config = ConfigDict(
        json_schema_extra=_example(path="out/report.csv", sha256="9f" * 32, size=4096, ref=f"payload:{_CALL}.1")
    )

    path: str = Field(description="where it was in the tool's output directory")
    sha256: str
    size: int
    ref: str


class Called(Answer):
    """A call that succeeded."""

    model_config = ConfigDict(
        json_schema_extra=_example(
            invocation_id=_CALL,
            status="success",
            state="succeeded",
            tool_id="demo.balance",
            tool_version="1.0.0",
            result=1000,
            execution_time_ms=1.4,
            trace_id=_TRACE,
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
    warnings: list[str] = []
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
        json_schema_extra=_example(
            invocation_id=_CALL,
            status="pending",
            state="awaiting_approval",
            pending={"code": "APPROVAL_REQUIRED", "ticketId": _TICKET, "pollEndpoint": f"/v1/approvals/{_TICKET}"},
            poll=f"/v1/calls/{_CALL}",
        )
    )

    invocation_id: str
    status: Literal["running", "pending"]
    state: str
    poll: str
    pending: Json | None = None
    hook_outputs: list[Json] = Field([], description="what hooks said of a call that waits for a person")


class CallStatus(Answer):
    """Where a call stands; with its outcome, while that is kept."""

    invocation_id: str
    status: Status
    state: str


class CallsQuery(Query):
    state: str | None = Field(
        None, max_length=40, description="running, awaiting_approval, succeeded, failed, unknown …"
    )
    error: str | None = Field(None, max_length=60, description="an E-code, or the name of an error")
    tool: str | None = Field(None, max_length=600, description="by name, or NAME@VERSION")
    caller: str | None = Field(None, max_length=600)
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
    top: list[Json] = Field(description="`tool` or `caller`, and its calls, failures and cost")


class CheckpointsQuery(Query):
    after: int = Field(0, ge=0, le=2**62, description="the sequence that the page before ended at")
    limit: int = Field(20, ge=1, le=100)


class Checkpoint(Answer):
    """How far a call had come when its tool saved it."""

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
        json_schema_extra=_example(
            checkpoints=[
                {
                    "schema_version": "1.0",
                    "checkpoint_id": f"{_CALL}:1",
                    "invocation_id": _CALL,
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
    reason: Literal["interruption", "discard", "fallback"] | None = Field(
        None, description="why, for the label of the synthetic result; interruption if nothing is said"
    )


class Cancelled(Answer):
    invocation_id: str
    outcome: Literal["canceled", "unsupported", "finished"]


class UndoBody(Body):
    model_config = ConfigDict(json_schema_extra=_example(idempotency_key="undo-order-17"))

    idempotency_key: Name


# Tools


class ManifestBody(pydantic.RootModel[Json]):
    """A manifest, as schemas/manifest.json in the repository describes it."""

    model_config = ConfigDict(json_schema_extra={"examples": [_ECHO]})


class Registered(Answer):
    tool_id: str = Field(examples=["demo.echo_tool"])
    version: str = Field(examples=["1.0.0"])
    new: bool = Field(description="false where exactly this was registered before")
    warnings: list[str] = []


class ToolsQuery(Query):
    q: str | None = Field(None, max_length=1000, description="words that name, description, tags or hint must hold")
    cursor: str | None = Field(None, max_length=600, description="where the page before ended")
    limit: int = Field(100, ge=1, le=500)


class CompareQuery(Query):
    old: Name = Field(description="a version")
    new: Name = Field(description="a version")


class Comparison(Answer):
    """The changes between two versions of a tool, and the step up in version that they need."""

    tool: str
    old: str
    new: str
    level: str = Field(description="none, patch, minor or major")
    bump: str = Field(description="the step between the two versions")
    changes: list[Json]


class DeclarationsQuery(Query):
    provider: Provider = Field(description="the provider whose format to use")
    tool: Names = Field([], description="only these tools; repeat")
    strict: bool = Field(False, description="the strict form, where a tool's schema has one")
    cursor: str | None = Field(None, max_length=600, description="where the page before ended")
    limit: int = Field(100, ge=1, le=500)


class Declarations(Answer):
    """Tools as a model provider takes them: what stands in the `tools` of a request."""

    tools: list[Json]
    cursor: str | None = Field(None, description="where to go on; null at the end")


class ProviderCallBody(Body):
    """A tool call as a model made it, in its provider's form."""

    model_config = ConfigDict(
        json_schema_extra=_example(
            call={"type": "tool_use", "id": "toolu_01A09q90qw90lq9178", "name": "demo__balance",
                  "input": {"account": "cash"}},
        )
    )  # fmt: skip

    call: Json = Field(description="the tool call of OpenAI (chat or responses), Anthropic or Gemini, as it came")
    session_id: str = Field("", max_length=600)


class ProviderAnswer(Answer):
    """What became of a call, and how its model is told."""

    invocation_id: str
    state: str
    message: Json = Field(description="what goes into the conversation next")


class Tool(Answer):
    tool_id: str
    version: str
    name: str
    description: str
    state: str
    availability: Literal["AVAILABLE", "UNAVAILABLE"] = Field(
        "AVAILABLE", description="UNAVAILABLE while the upstream that serves the tool does not answer"
    )
    mutation_class: str | None
    parameters: Json
    result_schema: Json | bool | None = None
    known_pairs: int = Field(0, description="known input-output pairs that it is held to; 0: it has none")
    interface: Json | None = Field(None, description="the tool_interface of one tool that is asked for by its id")
    deprecation: Json | None = None


class Tools(Answer):
    tools: list[Tool]
    cursor: str | None = Field(None, description="where to go on; null at the end")


class NegotiateBody(Body):
    model_config = ConfigDict(
        json_schema_extra=_example(
            expected={"demo.balance": {"type": "object", "properties": {"account": {"type": "string"}}}}
        )
    )

    expected: Annotated[dict[str, Json], BeforeValidator(_few)] = Field(
        max_length=1000, description="a schema of the input you would send to each tool"
    )


class Match(Answer):
    tool_id: str
    version: str
    outcome: Literal["FULL_MATCH", "PARTIAL_MATCH", "INCOMPATIBLE"]
    missing: list[str] = Field(description="parts that you expect and the tool does not offer")


class Negotiated(Answer):
    matches: list[Match]
    tools: list[Tool] = Field(description="those that you can use, without the incompatible ones")


class Versions(Answer):
    tool_id: str
    versions: list[Json]


class ToolQuery(Query):
    version: str | None = Field(None, max_length=200, description="a version or a range")


class DeprecateBody(Body):
    model_config = ConfigDict(json_schema_extra=_example(version="1.0.0", successor="demo.echo_tool@2.0.0", days=30))

    version: Name
    successor: Name | None = None
    guide: Name | None = Field(None, description="address of a page that says how to move over")
    days: int | None = Field(None, ge=0, le=36_500, description="how long it still runs; 90 where it is not said")
    amend: bool = Field(False, description="correct what was announced before; what is not said stays")
    anyway: bool = Field(False, description="the successor is yet to be registered")


class Deprecated(Answer):
    tool_id: str
    version: str
    state: Literal["deprecated"]
    deprecation: Json


# Approvals


class TicketsQuery(Query):
    all: bool = Field(False, description="those that were decided too, the newest first")


class Ticket(Answer):
    id: str = Field(examples=[_TICKET])
    invocation_id: str
    toolId: str  # noqa: N815 - the ticket's own name
    status: str = Field(description="PENDING, APPROVED, USED, DENIED, AUTO_DENIED, LAPSED or VOID")
    params: Json
    preview: Json
    readable: list[str] = Field(description="what a person should know before deciding, a line for each thing")
    expiresAt: str  # noqa: N815 - the ticket's own name


class Tickets(Answer):
    tickets: list[Ticket]


class ApproveBody(Body):
    model_config = ConfigDict(json_schema_extra=_example(comment="us first", edit={"to": "desk@example.org"}))

    comment: Text = ""
    edit: Json | None = Field(None, description="agree with these arguments changed; null takes one out")


class DenyBody(Body):
    model_config = ConfigDict(json_schema_extra=_example(comment="not before Monday"))

    comment: Text = ""


class GrantBody(Body):
    model_config = ConfigDict(
        json_schema_extra=_example(
            tool="demo.mail_statement",
            caller="scout",
            arguments={"account": "cash", "to": "*@example.org"},
            uses=5,
            expires_in_s=604_800,
        )
    )

    tool: Name
    caller: Name
    arguments: Json = Field(
        description="a pattern for every argument; an argument that is not named is not covered. A text, in which * and"
        ' ? match; the bounds of a number, {"minimum": 1, "maximum": 100}; or a value as it must be'
    )
    uses: int = Field(ge=1, le=10_000)
    expires_in_s: int = Field(ge=1, le=90 * 86_400)
    versions: Name | None = None


class Advance(Answer):
    id: str
    tool: str
    caller: str
    uses: int
    used: int
    revoked: bool


class Advances(Answer):
    standing: list[Advance]


# Tokens


class Limits(Body):
    """What narrows a token further."""

    max_uses: int | None = Field(None, ge=1)
    max_cost: float | None = Field(None, ge=0)
    mutation_class: Literal["read_only", "write_reversible", "write_irreversible"] | None = None
    environments: Names | None = None


class Narrowing(Body):
    tools: Names | None = Field(None, description="TOOL, ns.* or *, each with @RANGE where wanted")
    resources: Names | None = None
    constraints: Limits | None = None


class IssueBody(Narrowing):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"agent": "scout", "for": "alice", "tools": ["demo.*@^1.0.0"], "ttl_s": 900}]}
    )

    agent: Name | None = Field(None, description="the agent that holds it; a new name is registered")
    person: Name | None = Field(None, description="the person that holds it, instead of an agent")
    behalf: Name | None = Field(None, alias="for", description="the person on whose behalf the agent acts")
    scopes: Names = []
    ttl_s: int = Field(3600, ge=1, le=31_536_000)


class DelegateBody(Narrowing):
    model_config = ConfigDict(json_schema_extra=_example(to="summarizer", tools=["demo.balance"], ttl_s=300))

    to: Name
    token: Name | None = Field(
        None, max_length=65_536, description="the token to pass on; by default the one of the request"
    )
    scopes: Names | None = None
    ttl_s: int | None = Field(None, ge=1, le=31_536_000)


class RevokeBody(Body):
    model_config = ConfigDict(json_schema_extra=_example(ref=_CALL, reason="the task is done"))

    ref: str = Field(
        min_length=1, max_length=65_536, description="a token, a jti or its beginning, a name, a DID or a key's id"
    )
    reason: Text = Field(min_length=1)
    foreign: bool = Field(False, description="it was never seen here, and is meant all the same")


class InspectBody(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"token": "eyJ…"}]})

    token: str = Field(min_length=1, max_length=65_536)


class TokenPicture(Answer):
    valid: bool
    code: str | None
    why: str | None
    chain: list[Json]


class Issued(TokenPicture):
    token: str
    registered: list[str] = Field(description="names that were not known, and have an identity of their own now")


class Revoked(Answer):
    revoked: str


# Quarantine


class QuarantineEntry(Answer):
    tool: str
    digest: str
    invocation_id: str = Field(description="the call that it was quarantined for, or the upstream that changed it")
    reason: str
    since: str
    lifted: bool


class QuarantineEntries(Answer):
    quarantine: list[QuarantineEntry]


class ReleaseBody(Body):
    model_config = ConfigDict(json_schema_extra=_example(tool="demo.count@1.0.0", reason="the file was its own cache"))

    tool: Name = Field(description="TOOL@VERSION, or the digest of its content")
    reason: Text = Field(min_length=1)


class Released(Answer):
    released: str
    reason: str


# Policy


class Policy(Answer):
    version: str
    digest: str
    text: str
    rules: list[Json]


class PolicyBody(Body):
    model_config = ConfigDict(
        json_schema_extra=_example(
            text='@id("reads") permit (principal, action, resource) when { resource.mutation_class == "read_only" };'
        )
    )

    text: str = Field(max_length=1_000_000)


class ApplyBody(PolicyBody):
    instead_of: str | None = Field(None, max_length=200, description="the digest of the policy that you have read")


class Checked(Answer):
    usable: bool
    faults: list[Json]


class Applied(Answer):
    applied: bool
    changed: bool
    previous_kept: bool = Field(description="whether the former policy is kept in policy.cedar.previous")
    diff: list[str]
    faults: list[Json]


Operation = Literal["invoke", "preview", "compensate"]


class ExplainBody(Body):
    model_config = ConfigDict(
        json_schema_extra=_example(principal="scout", tool="demo.post", arguments={"account": "cash", "cents": 250})
    )

    principal: Name = Field(description="the name or DID of an identity, an id of principals.toml, or `me`: yourself")
    tool: Name
    arguments: Json = {}
    operation: Operation = "invoke"


class PolicyCase(Body):
    principal: Name = Field("me", description="as in an explanation")
    tool: Name
    arguments: Json = {}
    operation: Operation = "invoke"
    expect: Literal["allow", "ask", "deny"]
    rule: Name | None = Field(None, description="a rule that must be among those that decide")


class CasesBody(Body):
    model_config = ConfigDict(json_schema_extra=_example(cases=[{"tool": "demo.balance", "expect": "allow"}]))

    cases: list[PolicyCase] = Field(min_length=1, max_length=1000, fail_fast=True)


class Cases(Answer):
    cases: list[Json] = Field(description="each case with the decision (`answer`), the reason (`why`) and `passed`")
    failed: int


class Explanation(Answer):
    behavior: str = Field(description="allow, ask or deny")
    reason: str
    rules: list[str]
    would_have_to_change: list[str]
    gate: str | None = Field(description="why a person is asked although no rule says so")


# Audit


class RecordsQuery(Query):
    call: str | None = Field(None, max_length=600)
    tool: str | None = Field(None, max_length=600, description="by name, or NAME@VERSION")
    caller: str | None = Field(None, max_length=600)
    kind: str | None = Field(None, max_length=40)
    since: Moment | None = None
    until: Moment | None = None
    after: int = Field(0, ge=0, le=2**62, description="the place that the page before ended at")
    limit: int = Field(100, ge=1, le=1000)


class Record(Answer):
    seq: int
    hash: str
    record: Json


class Records(Answer):
    records: list[Record]
    after: int | None = Field(description="where to go on; null at the end. A page may be short and have more after it")


class Verdict(Answer):
    intact: bool
    records: int
    head: Json
    faults: list[Json]


# Budgets


class BudgetsQuery(Query):
    task: Name | None = Field(None, description="a task whose budget is asked about too")
    all: bool = Field(False, description="what everybody has used; needs `audit:read`, and is on record")


class Used(Answer):
    tenant: str
    spent: float
    held: float = Field(description="set aside for calls that run")
    left: float = Field(description="below zero once more was spent than allowed")


class Budget(Answer):
    budget: str = Field(description="in words, as a refusal names it", examples=["5 per tenant and 1 d"])
    per: Literal["call", "task", "session", "tenant", "caller"]
    limit: float
    tools: str
    period_s: int | None
    ends_at: str | None = Field(description="when its period ends and the whole limit is there again")
    used: list[Used] = Field(description="by caller; those who are not listed have used nothing")


class Budgets(Answer):
    budgets: list[Budget]


# Upstreams

_KINDS = [name for name, kind in KINDS.items() if not kind.in_process]


def _known_kind(name: str) -> str:
    if name not in _KINDS:
        *others, last = (f"'{one}'" for one in _KINDS)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}"})
    return name


Kind = Annotated[str, AfterValidator(_known_kind), WithJsonSchema({"type": "string", "enum": _KINDS})]


class Upstream(Answer):
    name: str
    kind: str
    state: str | None = Field(None, description="absent for a service that tools name and that is no upstream")
    tools: list[Json] = []


class Probed(Answer):
    name: str
    state: str
    reason: str


class Upstreams(Answer):
    upstreams: list[Upstream]
    services: list[Json] = Field(description="breakers of services that tools name and that are no upstreams")


class AddUpstreamBody(Body):
    model_config = ConfigDict(
        json_schema_extra=_example(name="bank", kind="mcp", config={"url": "https://bank.example.org/mcp"})
    )

    name: str = Field(pattern="^[a-z][a-z0-9_-]{0,62}$")
    kind: Kind
    config: Json = Field(
        description="where it is and how to show who asks; programs and files only on the machine itself"
    )
    overlay: Json | None = Field(None, description="what you say of its tools, in place of what it says itself")


class RefreshBody(Body):
    overlay: Json | None = None


class AcceptBody(Body):
    model_config = ConfigDict(json_schema_extra=_example(tools=["pay"], reason="a new optional field"))

    tools: Names = Field([], description="the upstream's names of tools that changed; all of them if none is named")
    reason: Text = Field(min_length=1)
    shown: Annotated[dict[str, str], BeforeValidator(_few)] = Field(
        {}, max_length=1000, description="what was looked at: tools, and the digests that were given for them as `seen`"
    )


class Report(Answer):
    upstream: str
    tools: list[Json]
    accept_hints: bool


class Removed(Answer):
    removed: str


# Health


class Alive(Answer):
    status: Literal["healthy"]
    version: str


class Ready(Answer):
    status: Literal["healthy", "degraded", "down"]
    dependencies: dict[str, Literal["healthy", "degraded", "down"]]

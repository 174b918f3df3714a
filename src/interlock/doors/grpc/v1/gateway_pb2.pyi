# Written by interlock.doors.grpc.generate from interlock/v1/gateway.proto; not by hand.
# ruff: noqa
# fmt: off
# pyright: basic
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MutationClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MUTATION_CLASS_UNSPECIFIED: _ClassVar[MutationClass]
    MUTATION_CLASS_READ_ONLY: _ClassVar[MutationClass]
    MUTATION_CLASS_WRITE_REVERSIBLE: _ClassVar[MutationClass]
    MUTATION_CLASS_WRITE_IRREVERSIBLE: _ClassVar[MutationClass]

class TimeoutClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIMEOUT_CLASS_UNSPECIFIED: _ClassVar[TimeoutClass]
    TIMEOUT_CLASS_INTERACTIVE: _ClassVar[TimeoutClass]
    TIMEOUT_CLASS_STANDARD: _ClassVar[TimeoutClass]
    TIMEOUT_CLASS_LONG_RUNNING: _ClassVar[TimeoutClass]
    TIMEOUT_CLASS_ASYNC: _ClassVar[TimeoutClass]

class CallState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CALL_STATE_UNSPECIFIED: _ClassVar[CallState]
    CALL_STATE_PLANNED: _ClassVar[CallState]
    CALL_STATE_SELECTED: _ClassVar[CallState]
    CALL_STATE_SCHEMA_PARSE_FAILED: _ClassVar[CallState]
    CALL_STATE_ARGUMENTS_READY: _ClassVar[CallState]
    CALL_STATE_VALIDATION_FAILED: _ClassVar[CallState]
    CALL_STATE_PRE_HOOKS_RUNNING: _ClassVar[CallState]
    CALL_STATE_AWAITING_APPROVAL: _ClassVar[CallState]
    CALL_STATE_APPROVED: _ClassVar[CallState]
    CALL_STATE_DENIED: _ClassVar[CallState]
    CALL_STATE_QUEUED: _ClassVar[CallState]
    CALL_STATE_RUNNING: _ClassVar[CallState]
    CALL_STATE_NEEDS_INPUT: _ClassVar[CallState]
    CALL_STATE_PARTIAL_RESULT: _ClassVar[CallState]
    CALL_STATE_POST_HOOKS_RUNNING: _ClassVar[CallState]
    CALL_STATE_YIELDED: _ClassVar[CallState]
    CALL_STATE_SUCCEEDED: _ClassVar[CallState]
    CALL_STATE_FAILED: _ClassVar[CallState]
    CALL_STATE_CANCELED: _ClassVar[CallState]
    CALL_STATE_TIMED_OUT: _ClassVar[CallState]
    CALL_STATE_BLOCKED: _ClassVar[CallState]

class CancelOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CANCEL_OUTCOME_UNSPECIFIED: _ClassVar[CancelOutcome]
    CANCEL_OUTCOME_CANCELED: _ClassVar[CancelOutcome]
    CANCEL_OUTCOME_UNSUPPORTED: _ClassVar[CancelOutcome]
    CANCEL_OUTCOME_FINISHED: _ClassVar[CancelOutcome]
MUTATION_CLASS_UNSPECIFIED: MutationClass
MUTATION_CLASS_READ_ONLY: MutationClass
MUTATION_CLASS_WRITE_REVERSIBLE: MutationClass
MUTATION_CLASS_WRITE_IRREVERSIBLE: MutationClass
TIMEOUT_CLASS_UNSPECIFIED: TimeoutClass
TIMEOUT_CLASS_INTERACTIVE: TimeoutClass
TIMEOUT_CLASS_STANDARD: TimeoutClass
TIMEOUT_CLASS_LONG_RUNNING: TimeoutClass
TIMEOUT_CLASS_ASYNC: TimeoutClass
CALL_STATE_UNSPECIFIED: CallState
CALL_STATE_PLANNED: CallState
CALL_STATE_SELECTED: CallState
CALL_STATE_SCHEMA_PARSE_FAILED: CallState
CALL_STATE_ARGUMENTS_READY: CallState
CALL_STATE_VALIDATION_FAILED: CallState
CALL_STATE_PRE_HOOKS_RUNNING: CallState
CALL_STATE_AWAITING_APPROVAL: CallState
CALL_STATE_APPROVED: CallState
CALL_STATE_DENIED: CallState
CALL_STATE_QUEUED: CallState
CALL_STATE_RUNNING: CallState
CALL_STATE_NEEDS_INPUT: CallState
CALL_STATE_PARTIAL_RESULT: CallState
CALL_STATE_POST_HOOKS_RUNNING: CallState
CALL_STATE_YIELDED: CallState
CALL_STATE_SUCCEEDED: CallState
CALL_STATE_FAILED: CallState
CALL_STATE_CANCELED: CallState
CALL_STATE_TIMED_OUT: CallState
CALL_STATE_BLOCKED: CallState
CANCEL_OUTCOME_UNSPECIFIED: CancelOutcome
CANCEL_OUTCOME_CANCELED: CancelOutcome
CANCEL_OUTCOME_UNSUPPORTED: CancelOutcome
CANCEL_OUTCOME_FINISHED: CancelOutcome

class Tool(_message.Message):
    __slots__ = ("tool_id", "version", "name", "description", "input_schema_json", "output_schema_json", "mutation_class", "timeout_class", "key_required", "required_scopes", "timeout_default_s", "timeout_max_s", "tags", "deprecation_json", "availability", "known_pairs")
    TOOL_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    INPUT_SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    MUTATION_CLASS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_CLASS_FIELD_NUMBER: _ClassVar[int]
    KEY_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_SCOPES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_DEFAULT_S_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MAX_S_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    DEPRECATION_JSON_FIELD_NUMBER: _ClassVar[int]
    AVAILABILITY_FIELD_NUMBER: _ClassVar[int]
    KNOWN_PAIRS_FIELD_NUMBER: _ClassVar[int]
    tool_id: str
    version: str
    name: str
    description: str
    input_schema_json: bytes
    output_schema_json: bytes
    mutation_class: MutationClass
    timeout_class: TimeoutClass
    key_required: bool
    required_scopes: _containers.RepeatedScalarFieldContainer[str]
    timeout_default_s: float
    timeout_max_s: float
    tags: _containers.RepeatedScalarFieldContainer[str]
    deprecation_json: bytes
    availability: str
    known_pairs: int
    def __init__(self, tool_id: _Optional[str] = ..., version: _Optional[str] = ..., name: _Optional[str] = ..., description: _Optional[str] = ..., input_schema_json: _Optional[bytes] = ..., output_schema_json: _Optional[bytes] = ..., mutation_class: _Optional[_Union[MutationClass, str]] = ..., timeout_class: _Optional[_Union[TimeoutClass, str]] = ..., key_required: _Optional[bool] = ..., required_scopes: _Optional[_Iterable[str]] = ..., timeout_default_s: _Optional[float] = ..., timeout_max_s: _Optional[float] = ..., tags: _Optional[_Iterable[str]] = ..., deprecation_json: _Optional[bytes] = ..., availability: _Optional[str] = ..., known_pairs: _Optional[int] = ...) -> None: ...

class DiscoverRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "query", "by", "expected_json")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_JSON_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    query: str
    by: str
    expected_json: bytes
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., query: _Optional[str] = ..., by: _Optional[str] = ..., expected_json: _Optional[bytes] = ...) -> None: ...

class DiscoverResponse(_message.Message):
    __slots__ = ("tools", "next_page_token", "searched_by", "note", "deferred_json", "outcome", "pending")
    class PendingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEARCHED_BY_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_JSON_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    next_page_token: str
    searched_by: str
    note: str
    deferred_json: _containers.RepeatedScalarFieldContainer[bytes]
    outcome: str
    pending: _containers.ScalarMap[str, str]
    def __init__(self, tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., searched_by: _Optional[str] = ..., note: _Optional[str] = ..., deferred_json: _Optional[_Iterable[bytes]] = ..., outcome: _Optional[str] = ..., pending: _Optional[_Mapping[str, str]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("tool_id", "version")
    TOOL_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    tool_id: str
    version: str
    def __init__(self, tool_id: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("tools",)
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    def __init__(self, tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ...) -> None: ...

class SelectRequest(_message.Message):
    __slots__ = ("request", "allocation", "cheaper", "without_intent", "session", "faster")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_FIELD_NUMBER: _ClassVar[int]
    CHEAPER_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_INTENT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FASTER_FIELD_NUMBER: _ClassVar[int]
    request: str
    allocation: int
    cheaper: bool
    without_intent: bool
    session: str
    faster: bool
    def __init__(self, request: _Optional[str] = ..., allocation: _Optional[int] = ..., cheaper: _Optional[bool] = ..., without_intent: _Optional[bool] = ..., session: _Optional[str] = ..., faster: _Optional[bool] = ...) -> None: ...

class SelectResponse(_message.Message):
    __slots__ = ("id", "chosen", "answer", "selection_json")
    ID_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    SELECTION_JSON_FIELD_NUMBER: _ClassVar[int]
    id: str
    chosen: str
    answer: str
    selection_json: bytes
    def __init__(self, id: _Optional[str] = ..., chosen: _Optional[str] = ..., answer: _Optional[str] = ..., selection_json: _Optional[bytes] = ...) -> None: ...

class RecommendRequest(_message.Message):
    __slots__ = ("tool",)
    TOOL_FIELD_NUMBER: _ClassVar[int]
    tool: str
    def __init__(self, tool: _Optional[str] = ...) -> None: ...

class RecommendResponse(_message.Message):
    __slots__ = ("tools",)
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    tools: _containers.RepeatedCompositeFieldContainer[Recommendation]
    def __init__(self, tools: _Optional[_Iterable[_Union[Recommendation, _Mapping]]] = ...) -> None: ...

class Recommendation(_message.Message):
    __slots__ = ("tool", "reason", "callers", "why")
    TOOL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CALLERS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    tool: str
    reason: str
    callers: int
    why: str
    def __init__(self, tool: _Optional[str] = ..., reason: _Optional[str] = ..., callers: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class SurfaceRequest(_message.Message):
    __slots__ = ("caller", "page_token", "page_size")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    caller: str
    page_token: str
    page_size: int
    def __init__(self, caller: _Optional[str] = ..., page_token: _Optional[str] = ..., page_size: _Optional[int] = ...) -> None: ...

class SurfaceResponse(_message.Message):
    __slots__ = ("caller", "agent", "tenant", "revision", "changed_at", "surface_json", "reasons", "next_page_token")
    class ReasonsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CALLER_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    CHANGED_AT_FIELD_NUMBER: _ClassVar[int]
    SURFACE_JSON_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    caller: str
    agent: str
    tenant: str
    revision: int
    changed_at: str
    surface_json: bytes
    reasons: _containers.ScalarMap[str, str]
    next_page_token: str
    def __init__(self, caller: _Optional[str] = ..., agent: _Optional[str] = ..., tenant: _Optional[str] = ..., revision: _Optional[int] = ..., changed_at: _Optional[str] = ..., surface_json: _Optional[bytes] = ..., reasons: _Optional[_Mapping[str, str]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class InvokeRequest(_message.Message):
    __slots__ = ("tool_id", "version", "arguments_json", "arguments", "idempotency_key", "session", "dry_run", "task")
    TOOL_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    tool_id: str
    version: str
    arguments_json: bytes
    arguments: _struct_pb2.Struct
    idempotency_key: str
    session: str
    dry_run: bool
    task: str
    def __init__(self, tool_id: _Optional[str] = ..., version: _Optional[str] = ..., arguments_json: _Optional[bytes] = ..., arguments: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., idempotency_key: _Optional[str] = ..., session: _Optional[str] = ..., dry_run: _Optional[bool] = ..., task: _Optional[str] = ...) -> None: ...

class CallResult(_message.Message):
    __slots__ = ("invocation_id", "tool", "state", "value_json", "kept", "pending", "error", "trace_id", "created_ms", "source", "redacted", "metadata_json", "artifacts")
    INVOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VALUE_JSON_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REDACTED_FIELD_NUMBER: _ClassVar[int]
    METADATA_JSON_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    invocation_id: str
    tool: str
    state: CallState
    value_json: bytes
    kept: Kept
    pending: Pending
    error: ErrorEnvelope
    trace_id: str
    created_ms: int
    source: str
    redacted: _containers.RepeatedScalarFieldContainer[str]
    metadata_json: bytes
    artifacts: _containers.RepeatedCompositeFieldContainer[Artifact]
    def __init__(self, invocation_id: _Optional[str] = ..., tool: _Optional[str] = ..., state: _Optional[_Union[CallState, str]] = ..., value_json: _Optional[bytes] = ..., kept: _Optional[_Union[Kept, _Mapping]] = ..., pending: _Optional[_Union[Pending, _Mapping]] = ..., error: _Optional[_Union[ErrorEnvelope, _Mapping]] = ..., trace_id: _Optional[str] = ..., created_ms: _Optional[int] = ..., source: _Optional[str] = ..., redacted: _Optional[_Iterable[str]] = ..., metadata_json: _Optional[bytes] = ..., artifacts: _Optional[_Iterable[_Union[Artifact, _Mapping]]] = ...) -> None: ...

class Artifact(_message.Message):
    __slots__ = ("path", "sha256", "size", "ref")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    path: str
    sha256: str
    size: int
    ref: str
    def __init__(self, path: _Optional[str] = ..., sha256: _Optional[str] = ..., size: _Optional[int] = ..., ref: _Optional[str] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("ref", "size_chars", "preview")
    REF_FIELD_NUMBER: _ClassVar[int]
    SIZE_CHARS_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    ref: str
    size_chars: int
    preview: str
    def __init__(self, ref: _Optional[str] = ..., size_chars: _Optional[int] = ..., preview: _Optional[str] = ...) -> None: ...

class Pending(_message.Message):
    __slots__ = ("ticket_id", "status", "reason", "expires_at", "agree_in_advance")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    AGREE_IN_ADVANCE_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    status: str
    reason: str
    expires_at: str
    agree_in_advance: str
    def __init__(self, ticket_id: _Optional[str] = ..., status: _Optional[str] = ..., reason: _Optional[str] = ..., expires_at: _Optional[str] = ..., agree_in_advance: _Optional[str] = ...) -> None: ...

class ErrorEnvelope(_message.Message):
    __slots__ = ("schema_version", "code", "error_code", "error_class", "retryable", "retry_after_ms", "message", "resolution", "trace_id", "invocation_id", "details_json", "native_error_ref", "policy_refs", "evidence_refs", "shortened", "recoverability")
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_CLASS_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RESOLUTION_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INVOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    DETAILS_JSON_FIELD_NUMBER: _ClassVar[int]
    NATIVE_ERROR_REF_FIELD_NUMBER: _ClassVar[int]
    POLICY_REFS_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_REFS_FIELD_NUMBER: _ClassVar[int]
    SHORTENED_FIELD_NUMBER: _ClassVar[int]
    RECOVERABILITY_FIELD_NUMBER: _ClassVar[int]
    schema_version: str
    code: str
    error_code: str
    error_class: str
    retryable: bool
    retry_after_ms: int
    message: str
    resolution: str
    trace_id: str
    invocation_id: str
    details_json: bytes
    native_error_ref: str
    policy_refs: _containers.RepeatedScalarFieldContainer[str]
    evidence_refs: _containers.RepeatedScalarFieldContainer[str]
    shortened: bool
    recoverability: str
    def __init__(self, schema_version: _Optional[str] = ..., code: _Optional[str] = ..., error_code: _Optional[str] = ..., error_class: _Optional[str] = ..., retryable: _Optional[bool] = ..., retry_after_ms: _Optional[int] = ..., message: _Optional[str] = ..., resolution: _Optional[str] = ..., trace_id: _Optional[str] = ..., invocation_id: _Optional[str] = ..., details_json: _Optional[bytes] = ..., native_error_ref: _Optional[str] = ..., policy_refs: _Optional[_Iterable[str]] = ..., evidence_refs: _Optional[_Iterable[str]] = ..., shortened: _Optional[bool] = ..., recoverability: _Optional[str] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("start", "cancel")
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    start: InvokeRequest
    cancel: CancelCall
    def __init__(self, start: _Optional[_Union[InvokeRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelCall, _Mapping]] = ...) -> None: ...

class CancelCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunEvent(_message.Message):
    __slots__ = ("started", "progress", "partial", "cancel", "result")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    started: Started
    progress: Progress
    partial: Partial
    cancel: CancelResponse
    result: CallResult
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., partial: _Optional[_Union[Partial, _Mapping]] = ..., cancel: _Optional[_Union[CancelResponse, _Mapping]] = ..., result: _Optional[_Union[CallResult, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("invocation_id", "tool")
    INVOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    invocation_id: str
    tool: str
    def __init__(self, invocation_id: _Optional[str] = ..., tool: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("sequence", "message", "percent", "elapsed_ms", "facts_json")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_MS_FIELD_NUMBER: _ClassVar[int]
    FACTS_JSON_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    message: str
    percent: float
    elapsed_ms: float
    facts_json: bytes
    def __init__(self, sequence: _Optional[int] = ..., message: _Optional[str] = ..., percent: _Optional[float] = ..., elapsed_ms: _Optional[float] = ..., facts_json: _Optional[bytes] = ...) -> None: ...

class Partial(_message.Message):
    __slots__ = ("index", "value_json", "yielded")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VALUE_JSON_FIELD_NUMBER: _ClassVar[int]
    YIELDED_FIELD_NUMBER: _ClassVar[int]
    index: int
    value_json: bytes
    yielded: bool
    def __init__(self, index: _Optional[int] = ..., value_json: _Optional[bytes] = ..., yielded: _Optional[bool] = ...) -> None: ...

class CallsRequest(_message.Message):
    __slots__ = ("state", "error", "tool", "caller", "since", "until", "before", "limit")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    state: str
    error: str
    tool: str
    caller: str
    since: str
    until: str
    before: int
    limit: int
    def __init__(self, state: _Optional[str] = ..., error: _Optional[str] = ..., tool: _Optional[str] = ..., caller: _Optional[str] = ..., since: _Optional[str] = ..., until: _Optional[str] = ..., before: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class CallLine(_message.Message):
    __slots__ = ("invocation_id", "at", "tool", "caller", "key", "state", "error_code", "error", "source", "latency_ms", "cost", "caller_name", "tenant", "agent", "agent_name")
    INVOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    CALLER_NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    invocation_id: str
    at: str
    tool: str
    caller: str
    key: str
    state: str
    error_code: str
    error: str
    source: str
    latency_ms: float
    cost: float
    caller_name: str
    tenant: str
    agent: str
    agent_name: str
    def __init__(self, invocation_id: _Optional[str] = ..., at: _Optional[str] = ..., tool: _Optional[str] = ..., caller: _Optional[str] = ..., key: _Optional[str] = ..., state: _Optional[str] = ..., error_code: _Optional[str] = ..., error: _Optional[str] = ..., source: _Optional[str] = ..., latency_ms: _Optional[float] = ..., cost: _Optional[float] = ..., caller_name: _Optional[str] = ..., tenant: _Optional[str] = ..., agent: _Optional[str] = ..., agent_name: _Optional[str] = ...) -> None: ...

class CallsResponse(_message.Message):
    __slots__ = ("calls", "before")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[CallLine]
    before: int
    def __init__(self, calls: _Optional[_Iterable[_Union[CallLine, _Mapping]]] = ..., before: _Optional[int] = ...) -> None: ...

class TopRequest(_message.Message):
    __slots__ = ("by", "since", "until", "limit")
    BY_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    by: str
    since: str
    until: str
    limit: int
    def __init__(self, by: _Optional[str] = ..., since: _Optional[str] = ..., until: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class TopLine(_message.Message):
    __slots__ = ("name", "calls", "failures", "cost", "caller_name")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    CALLER_NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    calls: int
    failures: int
    cost: float
    caller_name: str
    def __init__(self, name: _Optional[str] = ..., calls: _Optional[int] = ..., failures: _Optional[int] = ..., cost: _Optional[float] = ..., caller_name: _Optional[str] = ...) -> None: ...

class TopResponse(_message.Message):
    __slots__ = ("since", "top")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    since: str
    top: _containers.RepeatedCompositeFieldContainer[TopLine]
    def __init__(self, since: _Optional[str] = ..., top: _Optional[_Iterable[_Union[TopLine, _Mapping]]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("invocation_id",)
    INVOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    invocation_id: str
    def __init__(self, invocation_id: _Optional[str] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("invocation_id", "state", "tool_id", "version", "code", "approval_ticket_id", "trace_id", "latency_ms", "outcome", "result")
    INVOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOOL_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    APPROVAL_TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    invocation_id: str
    state: CallState
    tool_id: str
    version: str
    code: str
    approval_ticket_id: str
    trace_id: str
    latency_ms: float
    outcome: str
    result: CallResult
    def __init__(self, invocation_id: _Optional[str] = ..., state: _Optional[_Union[CallState, str]] = ..., tool_id: _Optional[str] = ..., version: _Optional[str] = ..., code: _Optional[str] = ..., approval_ticket_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., latency_ms: _Optional[float] = ..., outcome: _Optional[str] = ..., result: _Optional[_Union[CallResult, _Mapping]] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("invocation_id",)
    INVOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    invocation_id: str
    def __init__(self, invocation_id: _Optional[str] = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("invocation_id", "trace_id", "complete", "spans")
    INVOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    invocation_id: str
    trace_id: str
    complete: bool
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, invocation_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., complete: _Optional[bool] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("name", "trace_id", "span_id", "parent_span_id", "start", "duration_ms", "status", "attributes_json", "events_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_JSON_FIELD_NUMBER: _ClassVar[int]
    EVENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    start: str
    duration_ms: float
    status: str
    attributes_json: bytes
    events_json: bytes
    def __init__(self, name: _Optional[str] = ..., trace_id: _Optional[str] = ..., span_id: _Optional[str] = ..., parent_span_id: _Optional[str] = ..., start: _Optional[str] = ..., duration_ms: _Optional[float] = ..., status: _Optional[str] = ..., attributes_json: _Optional[bytes] = ..., events_json: _Optional[bytes] = ...) -> None: ...

class PartRequest(_message.Message):
    __slots__ = ("ref", "at", "query", "start", "stop", "tokens")
    REF_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ref: str
    at: str
    query: str
    start: int
    stop: int
    tokens: int
    def __init__(self, ref: _Optional[str] = ..., at: _Optional[str] = ..., query: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class PartResponse(_message.Message):
    __slots__ = ("value_json", "of", "tokens", "truncated")
    VALUE_JSON_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    value_json: bytes
    of: str
    tokens: int
    truncated: bool
    def __init__(self, value_json: _Optional[bytes] = ..., of: _Optional[str] = ..., tokens: _Optional[int] = ..., truncated: _Optional[bool] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("invocation_id", "reason")
    INVOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    invocation_id: str
    reason: str
    def __init__(self, invocation_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: CancelOutcome
    def __init__(self, outcome: _Optional[_Union[CancelOutcome, str]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("invocation_id",)
    INVOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    invocation_id: str
    def __init__(self, invocation_id: _Optional[str] = ...) -> None: ...

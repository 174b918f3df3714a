"""The nineteen objects of the Agent Tool standard, version 0.2.0, as typed models.

Two rules hold for all of them. A reader keeps what it does not know: unknown fields, at any depth, are re-emitted with
their values untouched, so `parse(d).document() == d` for every valid document. And a reader adds nothing to what it
read: a field left unsaid stays unsaid when the document is passed on. What is made here, by a constructor, says all it
means: every field but the empty ones is written out.

An object that is embedded in another (an input contract in a declaration) may leave out `schema_version`: it has the
version of the document that holds it. Vocabularies the standard lists are closed; those it leaves open are text.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StrictBool,
    StrictInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema

from interlock.core.errors import ErrorClass, ErrorCode, Failure
from interlock.core.states import State

VERSION = "0.2.0"

ToolKind = Literal[
    "function", "mcp_tool", "openapi_operation", "native_tool", "browser_action", "shell_command", "code_execution",
    "file_operation", "web_search", "retrieval", "model_task", "skill_tool", "peer_agent_tool", "policy_check",
    "artifact_operation", "evidence_export", "custom",
]  # fmt: skip
Lifecycle = Literal["draft", "available", "disabled", "requires_setup", "deferred", "deprecated", "retired"]
RegistryState = Literal["active", "deprecated", "sunset", "removed"]
Behavior = Literal["allow", "ask", "deny", "passthrough"]
ExecutionKind = Literal["local", "remote", "browser", "shell", "mcp", "api", "native", "model", "peer_agent", "hybrid"]
PersistenceDecision = Literal["inline", "redact", "persist", "preview", "link"]
SurfaceScope = Literal["tenant", "workspace", "session", "task", "turn", "skill", "peer_agent"]
BlockReason = Literal[
    "policy_blocked", "credential_missing", "setup_required", "model_unsupported", "recursive_tool_forbidden",
    "role_not_allowed", "feature_disabled", "deferred_until_discovered",
]  # fmt: skip
ContentType = Literal[
    "text", "json", "image", "audio", "video", "file", "resource_link", "embedded_resource", "log", "diff",
    "persisted_ref", "artifact_ref",
]  # fmt: skip
HookPhase = Literal["pre_tool", "post_tool", "failure"]
HookOutput = Literal["message", "progress", "decision", "context", "updated_input", "stop"]
SyntheticCause = Literal["user_interruption", "sibling_error", "fallback", "timeout", "discarded_execution"]
EventClass = Literal[
    "tool.declared",
    "tool.surface.created",
    "tool.surface.updated",
    "tool.deferred.discovered",
    "tool.deferred.loaded",
    "tool.invocation.planned",
    "tool.invocation.selected",
    "tool.invocation.arguments_ready",
    "tool.invocation.validation_failed",
    "tool.hook.pre.started",
    "tool.hook.pre.completed",
    "tool.permission.requested",
    "tool.permission.decided",
    "tool.invocation.queued",
    "tool.invocation.started",
    "tool.invocation.progress",
    "tool.invocation.partial_result",
    "tool.hook.post.started",
    "tool.hook.post.completed",
    "tool.result.persisted",
    "tool.invocation.yielded",
    "tool.invocation.succeeded",
    "tool.invocation.failed",
    "tool.invocation.canceled",
    "tool.invocation.timed_out",
    "tool.result.created",
    "tool.result.redacted",
]

# How a version's state in the registry reads in its declaration.
LIFECYCLE_OF_REGISTRY_STATE: Mapping[RegistryState, Lifecycle] = {
    "active": "available",
    "deprecated": "deprecated",
    "sunset": "deprecated",
    "removed": "retired",
}
# `sunset` reads as deprecated too, but can no longer be selected.
SELECTABLE_REGISTRY_STATES: frozenset[RegistryState] = frozenset({"active", "deprecated"})

# Facts are read strictly: "yes" and 1 are not true. Times stay text, so that they are passed on as they were written.
Flag = StrictBool
Json = dict[str, Any]
Name = Annotated[str, Field(min_length=1)]
Refs = tuple[str, ...]
Count = Annotated[int, Field(strict=True, ge=0)]
Amount = Count | Annotated[float, Field(strict=True, ge=0)]
Percent = Annotated[int, Field(strict=True, ge=0, le=100)] | Annotated[float, Field(strict=True, ge=0, le=100)]
SearchHint = Annotated[str, Field(pattern=r"^\S+(\s+\S+){2,9}$", description="3 to 10 words")]
Timestamp = Annotated[
    str,
    Field(
        pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})$",
        json_schema_extra={"format": "date-time"},
    ),
]
SchemaVersion = Annotated[str, Field(pattern=r"^0\.2\.(0|[1-9][0-9]*)$")]

_READING = object()  # the validation context of a document being read, as opposed to one being made


class Part(BaseModel):
    """A piece of a document: frozen, and open to fields it does not know."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    def model_post_init(self, context: Any, /) -> None:
        # INVARIANT: reading says nothing that was not said. Only what is made here writes its defaults out.
        if context is not _READING:
            fields = type(self).model_fields
            self.model_fields_set.update(name for name in fields if getattr(self, name) is not None)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /) -> Json:
        # A tag has a default for those who construct it; in a document it must be said, or nobody knows the kind.
        schema = handler.resolve_ref_schema(handler(core_schema))
        tags = [name for name, field in schema.get("properties", {}).items() if "const" in field]
        if tags:
            schema["required"] = [*tags, *schema.get("required", ())]
        return schema


class Document(Part):
    """One of the nineteen objects."""

    OBJECT: ClassVar[str]
    schema_version: SchemaVersion = VERSION

    @classmethod
    def parse(cls, document: Any) -> Self:
        """Read a document; what does not fit is refused with every fault listed (E3301)."""
        if not isinstance(document, dict) or "schema_version" not in document:
            raise Failure("E3301", f"a {cls.OBJECT} must be an object with a schema_version")
        try:
            return cast("Self", _reader(cls).validate_python(document, context=_READING))
        except ValidationError as error:
            faults = [
                {"at": ".".join(map(str, fault["loc"])), "problem": fault["msg"]}
                for fault in error.errors(include_url=False, include_context=False, include_input=False)
            ]
            raise Failure("E3301", f"not a valid {cls.OBJECT}", details={"faults": faults}) from None

    def document(self) -> dict[str, Any]:
        """The JSON-ready form: all that was said, unknown fields included."""
        said = self.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return {"schema_version": self.schema_version} | said

    @classmethod
    def form(cls) -> Any:
        """What stands for this object in a schema: the model itself, or the union of its kinds."""
        return cls


@cache
def _reader(model: type[Document]) -> TypeAdapter[Document]:
    return TypeAdapter(model.form())


# ── external mappings: native ids, kept beside our own ──────────────────────────────────────────────────────────────


class ToolExternalMapping(Document):
    """The ids by which a native protocol knows the same tool or call."""

    OBJECT = "tool_external_mapping"

    @classmethod
    def form(cls) -> Any:
        return ExternalMapping if cls is ToolExternalMapping else cls


class McpMapping(ToolExternalMapping):
    kind: Literal["mcp"] = "mcp"
    server_id: str | None = None
    mcp_session_id: str | None = None
    mcp_protocol_version: str | None = None
    method: str | None = None
    tool_name: str | None = None
    jsonrpc_request_id: StrictInt | str | None = None
    structured_content: Any = Field(default=None, alias="structuredContent")
    is_error: Flag | None = Field(default=None, alias="isError")
    meta: Json | None = Field(default=None, alias="_meta")


class OpenApiMapping(ToolExternalMapping):
    kind: Literal["openapi"] = "openapi"
    operation_id: str | None = None
    method: str | None = None
    path: str | None = None
    server_url: str | None = None
    security_scheme_refs: Refs | None = None


class FunctionCallingMapping(ToolExternalMapping):
    kind: Literal["function_calling"] = "function_calling"
    tool_call_id: str | None = None
    function_name: str | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: Flag | None = None
    strict: Flag | None = None
    defer_loading: Flag | None = None


class A2aMapping(ToolExternalMapping):
    kind: Literal["a2a"] = "a2a"
    agent_card_url: str | None = None
    agent_skill_id: str | None = None
    task_id: str | None = None
    context_id: str | None = None
    message_id: str | None = None
    artifact_id: str | None = None


class CliMapping(ToolExternalMapping):
    kind: Literal["cli"] = "cli"
    command_id: str | None = None
    argv_ref: str | None = None
    cwd_ref: str | None = None
    env_policy_ref: str | None = None
    exit_code: StrictInt | None = None
    signal: StrictInt | str | None = None
    sandbox_ref: str | None = None


class BrowserMapping(ToolExternalMapping):
    kind: Literal["browser"] = "browser"
    browser_session_id: str | None = None
    page_id: str | None = None
    action_id: str | None = None
    observation_ref: str | None = None
    screenshot_ref: str | None = None


class TelemetryMapping(ToolExternalMapping):
    kind: Literal["telemetry"] = "telemetry"
    trace_id: str | None = None
    span_id: str | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    request_id: str | None = None
    duration_ms: Amount | None = None
    result_size_bytes: Count | None = None


ExternalMapping = Annotated[
    McpMapping | OpenApiMapping | FunctionCallingMapping | A2aMapping | CliMapping | BrowserMapping | TelemetryMapping,
    Field(discriminator="kind"),
]


# ── declarations and contracts ──────────────────────────────────────────────────────────────────────────────────────


class ToolInputContract(Document):
    """What a tool takes, as the model sees it and as the runtime checks it."""

    OBJECT = "tool_input_contract"
    model_input_schema: Json
    runtime_input_schema: Json | None = None
    strict: Flag = True
    argument_mode: str = "object"
    media_mode: str = "none"
    defaults: Json = {}
    examples: tuple[Any, ...] = ()
    sensitive_fields: Refs = ()
    internal_only_fields: Refs = ()
    mutation_policy: str = "none"

    @model_validator(mode="after")
    def _hide_internal_fields(self) -> Self:
        # INVARIANT: no model-facing schema shows an internal-only field.
        shown = self.model_input_schema.get("properties")
        if isinstance(shown, dict) and not set(self.internal_only_fields).isdisjoint(cast("Json", shown)):
            raise ValueError("an internal-only field appears in the model-facing schema")
        return self


class ToolOutputContract(Document):
    """What a tool returns, and how much of it."""

    OBJECT = "tool_output_contract"
    output_schema: Json | None = None
    content_types: tuple[ContentType, ...] = ()
    media_modes: Refs = ()
    max_inline_chars: Count | None = None
    result_size_policy: str | None = None
    rendering_boundary: str | None = None
    expected_artifacts: Refs = ()
    expected_resources: Refs = ()


class ToolDeclaration(Document):
    """One callable capability. Annotations are untrusted hints: nothing is decided by them."""

    OBJECT = "tool_declaration"
    tool_id: Name
    namespace: Name
    name: Name
    description: Name
    lifecycle: Lifecycle
    tool_kind: ToolKind
    aliases: Refs = ()
    search_hint: SearchHint | None = None
    title: str | None = None
    capability_refs: Refs = ()
    input_contract: ToolInputContract | None = None
    output_contract: ToolOutputContract | None = None
    interface_ref: str | None = None
    execution_profile_ref: str | None = None
    permission_profile_ref: str | None = None
    external_mappings: tuple[ExternalMapping, ...] = ()
    annotations: Json = {}


class ToolNamespace(Document):
    """A collision boundary around the tools of one domain, server, skill, provider or runtime."""

    OBJECT = "tool_namespace"
    namespace: Name
    source_kind: Literal["domain", "server", "skill", "provider", "runtime"]
    title: str | None = None
    description: str | None = None
    source_ref: str | None = None
    tool_refs: Refs = ()


# ── the interface: nine concerns, kept apart ────────────────────────────────────────────────────────────────────────


class Identity(Part):
    tool_id: Name
    namespace: Name
    name: Name
    aliases: Refs = ()
    native_ids: Json = {}
    display_name: str | None = None


class Schemas(Part):
    model_input_schema: Json | None = None
    runtime_input_schema: Json | None = None
    output_schema: Json | None = None
    strict: Flag = True
    visibility: str | None = None


class Availability(Part):
    is_enabled: Flag = True
    setup_state: str | None = None
    feature_gates: Refs = ()
    required_credentials: Refs = ()
    model_support: Refs | None = None
    deferred: Flag = False


class Validation(Part):
    parses_schema: Flag = True
    value_checks: Refs = ()
    preflight_checks: Refs = ()


class Safety(Part):
    """What a tool may do. INVARIANT: a fact left unsaid reads as the unsafe value."""

    is_concurrency_safe: Flag = False
    is_read_only: Flag = False
    is_destructive: Flag = True
    is_open_world: Flag = True
    requires_approval: Flag = True
    requires_user_interaction: Flag = True
    sandbox_profile: str | None = None
    classifier_input: Any = None


class PermissionMatching(Part):
    tool_names: Refs = ()
    paths: Refs = ()
    commands: Refs = ()
    urls: Refs = ()
    resources: Refs = ()
    native_operations: Refs = ()


class Execution(Part):
    callable_ref: str | None = None
    timeout_ms: Count | None = None
    supports_abort: Flag = False
    supports_progress: Flag = False
    result_mapper: str | None = None
    modifies_context: Flag = True  # unsaid: it may, so it cannot share a turn unseen


class Rendering(Part):
    model_result: str | None = None
    ui_result: str | None = None
    ui_progress: str | None = None
    ui_rejection: str | None = None
    ui_error: str | None = None
    ui_grouped: str | None = None
    transcript_search_text: str | None = None


class Persistence(Part):
    max_inline_chars: Count | None = None
    opt_out: Flag = False
    opt_out_reason: str | None = None
    durable_refs: Refs = ()
    preview_chars: Count | None = None
    redaction: str | None = None


class ToolInterface(Document):
    """How a tool behaves at run time."""

    OBJECT = "tool_interface"
    identity: Identity
    schemas: Schemas = Schemas()
    availability: Availability = Availability()
    validation: Validation = Validation()
    safety: Safety = Safety()
    permission_matching: PermissionMatching = PermissionMatching()
    execution: Execution = Execution()
    rendering: Rendering = Rendering()
    persistence: Persistence = Persistence()


# ── surfaces ────────────────────────────────────────────────────────────────────────────────────────────────────────


class DeferredToolRef(Document):
    """A tool that can be found, and whose schema is not loaded yet."""

    OBJECT = "deferred_tool_ref"
    tool_id: Name
    name: Name
    namespace: Name
    search_hint: SearchHint | None = None
    source: str | None = None
    schema_visibility: str | None = None
    loading_state: str | None = None
    reason: str | None = None
    pending_provider_or_server: str | None = None
    selection_ref: str | None = None


class BlockedTool(Part):
    """A tool that is kept off a surface, and why."""

    tool_id: Name
    reason: BlockReason
    detail: str | None = None


class ToolSurface(Document):
    """The tools an agent sees in one scope, and those it does not."""

    OBJECT = "tool_surface"
    surface_id: Name
    scope: SurfaceScope
    created_at: Timestamp
    producer: Name
    scope_ref: str | None = None
    tool_refs: Refs = ()
    loaded_tools: Refs = ()
    deferred_tools: tuple[DeferredToolRef, ...] = ()
    blocked_tools: tuple[BlockedTool, ...] = ()
    excluded_tools: tuple[BlockedTool, ...] = ()
    selection_policy: str | None = None
    default_tool_choice: str | Json | None = None
    capability_requirements: Refs = ()
    model_capabilities: Refs = ()
    role_constraints: Refs = ()
    policy_refs: Refs = ()
    runtime_refs: Refs = ()
    surface_reason: str | None = None


# ── permissions, hooks, execution ───────────────────────────────────────────────────────────────────────────────────


class ToolExecutionProfile(Document):
    """How a tool is executed. What a profile does not state is not supported."""

    OBJECT = "tool_execution_profile"
    profile_id: Name
    kind: ExecutionKind
    sandbox_profile: str | None = None
    timeout_ms: Count | None = None
    supports_abort: Flag = False
    supports_progress: Flag = False
    supports_cancellation: Flag = False
    supports_resume: Flag = False


class ToolPermissionProfile(Document):
    """The facts a permission check judges; the decision is another object."""

    OBJECT = "tool_permission_profile"
    profile_id: Name
    risk: str = "unknown"
    # None: nothing was said, which is not the same as nothing being touched.
    data_access: Refs | None = None
    write_effects: Refs | None = None
    network_scope: Refs | None = None
    credentials: Refs | None = None
    sandbox_profile: str | None = None
    requires_approval: Flag = True
    redaction: str | None = None
    policy_refs: Refs = ()


class ToolPermissionDecision(Document):
    """What one permission check decided, and why."""

    OBJECT = "tool_permission_decision"
    decision_id: Name
    invocation_id: Name
    behavior: Behavior
    source: str
    reason: str
    decided_at: Timestamp
    mode: str | None = None
    rule_refs: Refs = ()
    policy_refs: Refs = ()
    updated_input: Any = None
    user_modified: Flag = False
    suggested_updates: tuple[Any, ...] = ()
    pending_classifier_check: Flag = False
    blocked_path: str | None = None
    content_blocks: tuple[ContentItem, ...] = ()
    accept_feedback: str | None = None
    expires_at: Timestamp | None = None


class ToolHook(Document):
    """A point before, after or on failure of a call where others may speak."""

    OBJECT = "tool_hook"
    hook_id: Name
    phase: HookPhase
    may_emit: tuple[HookOutput, ...] = ()
    tool_refs: Refs = ()
    timeout_ms: Count | None = None
    source: str | None = None


class ToolSchedulerPolicy(Document):
    """Which calls of a set may overlap, and what an interrupt or a failing sibling does to the others."""

    OBJECT = "tool_scheduler_policy"
    policy_id: Name
    concurrency_safe: Flag = False
    parallel_read_only: Flag = False
    parallel_write: Flag = False
    parallel_destructive: Flag = False
    parallel_open_world: Flag = False
    result_order: Literal["request", "completion"] = "request"
    interrupt_behavior: Literal["cancel", "block"] = "block"
    sibling_failure_policy: Literal["ignore", "cancel_siblings", "cancel_dependent"] = "cancel_siblings"
    context_modifiers_allowed: Flag = False
    synthetic_results: tuple[SyntheticCause, ...] = ()
    yields: Flag = False


# ── calls and their results ─────────────────────────────────────────────────────────────────────────────────────────


class Transition(Part):
    """A state a call reached, and when."""

    state: State
    at: Timestamp


class InputChange(Part):
    """One difference between two of the four inputs of a call, with its source."""

    before: Literal["model_input", "observable_input", "permission_input"]
    after: Literal["observable_input", "permission_input", "call_input"]
    source: Name
    pointer: str | None = None


class ToolInvocation(Document):
    """One requested or executed call. `model_input` is kept as it was emitted."""

    OBJECT = "tool_invocation"
    invocation_id: Name
    tool_id: Name
    status: State
    native_call_id: str | None = None
    started_at: Timestamp | None = None
    ended_at: Timestamp | None = None
    transitions: tuple[Transition, ...] = ()
    model_input: Any = None
    observable_input: Any = None
    permission_input: Any = None
    call_input: Any = None
    input_changes: tuple[InputChange, ...] = ()
    external_mappings: tuple[ExternalMapping, ...] = ()
    actor_refs: Refs = ()
    runtime_refs: Refs = ()
    policy_refs: Refs = ()
    evidence_refs: Refs = ()
    telemetry_refs: Refs = ()


class ToolProgress(Document):
    """One step of a call's progress."""

    OBJECT = "tool_progress"
    progress_id: Name
    invocation_id: Name
    sequence: Count
    status: str
    message: str | None = None
    percent: Percent | None = None
    current_step: Count | str | None = None
    total_steps: Count | None = None
    elapsed_ms: Amount | None = None
    bytes_read: Count | None = None
    bytes_written: Count | None = None
    line_count: Count | None = None
    partial_result_refs: Refs = ()
    artifact_refs: Refs = ()
    timestamp: Timestamp | None = None


class TextContent(Part):
    type: Literal["text"] = "text"
    text: str


class JsonContent(Part):
    type: Literal["json"] = "json"
    value: Any


class MediaContent(Part):
    """An image, audio or video: base64 data, or a reference where it is large."""

    type: Literal["image", "audio", "video"]
    mime_type: Name
    data: str | None = None
    uri: str | None = None


class FileContent(Part):
    type: Literal["file"] = "file"
    uri: Name
    name: str | None = None
    mime_type: str | None = None
    size_bytes: Count | None = None


class ResourceLinkContent(Part):
    type: Literal["resource_link"] = "resource_link"
    uri: Name
    name: str | None = None
    mime_type: str | None = None


class EmbeddedResourceContent(Part):
    type: Literal["embedded_resource"] = "embedded_resource"
    uri: Name
    mime_type: str | None = None
    text: str | None = None
    blob: str | None = None


class LogContent(Part):
    type: Literal["log"] = "log"
    text: str
    level: str | None = None
    stream: str | None = None


class DiffContent(Part):
    type: Literal["diff"] = "diff"
    diff: str
    path: str | None = None


class RefContent(Part):
    """A persisted payload or an artifact, by reference."""

    type: Literal["persisted_ref", "artifact_ref"]
    ref: Name
    preview: str | None = None
    mime_type: str | None = None
    size_bytes: Count | None = None


ContentItem = Annotated[
    TextContent
    | JsonContent
    | MediaContent
    | FileContent
    | ResourceLinkContent
    | EmbeddedResourceContent
    | LogContent
    | DiffContent
    | RefContent,
    Field(discriminator="type"),
]


class UiRendering(Part):
    """What people see of a result, in each of its views."""

    progress: Any = None
    rejection: Any = None
    error: Any = None
    grouped: Any = None
    expanded: Any = None


class ToolResult(Document):
    """The answer to a call. What the model, the UI and the search see may differ; `content` is the original."""

    OBJECT = "tool_result"
    result_id: Name
    invocation_id: Name
    status: State
    is_error: Flag
    content: tuple[ContentItem, ...]
    created_at: Timestamp
    redaction_state: str | Json = "none"
    structured_content: Any = None
    model_facing_content: tuple[ContentItem, ...] | None = None
    ui_facing_summary: str | None = None
    ui_facing_rendering: UiRendering | None = None
    transcript_search_text: str | None = None
    persisted_payload_ref: str | None = None
    resource_refs: Refs = ()
    artifact_refs: Refs = ()
    evidence_refs: Refs = ()
    policy_refs: Refs = ()
    telemetry_refs: Refs = ()
    persistence_refs: Refs = ()
    summary: str | None = None


class ToolResultPersistence(Document):
    """What was decided about a large or sensitive output."""

    OBJECT = "tool_result_persistence"
    persistence_id: Name
    invocation_id: Name
    decision: PersistenceDecision
    result_id: str | None = None
    reason: str | None = None
    max_inline_chars: Count | None = None
    size_chars: Count | None = None
    payload_ref: str | None = None
    preview: str | None = None
    redacted_fields: Refs = ()
    opted_out: Flag = False
    decided_at: Timestamp | None = None
    expires_at: Timestamp | None = None


class ToolError(Document):
    """The envelope in which a failure leaves any door; `Failure.envelope` makes it."""

    OBJECT = "tool_error"
    category: ErrorCode = Field(alias="errorCode")
    error_code: Annotated[str, Field(pattern=r"^E[0-9]{4}$")]
    error_class: ErrorClass
    retryable: Flag
    recoverability: str
    human_message: str = Field(alias="humanMessage")
    message: str
    resolution: str
    trace_id: str = Field(alias="traceId")
    retry_after_ms: Count | None = Field(default=None, alias="retryAfterMs")
    retry_after: Count | None = None
    details: Json | None = None
    native_error_ref: str | None = None
    policy_refs: Refs = ()
    evidence_refs: Refs = ()


class ToolEvent(Document):
    """Something that happened to a declaration, a surface, a call or its result."""

    OBJECT = "tool_event"
    event_id: Name
    event_class: EventClass
    occurred_at: Timestamp
    sequence: Count | None = None
    tool_id: str | None = None
    surface_id: str | None = None
    invocation_id: str | None = None
    data: Json = {}
    actor_refs: Refs = ()
    policy_refs: Refs = ()
    evidence_refs: Refs = ()
    telemetry_refs: Refs = ()


_MODELS: tuple[type[Document], ...] = (
    ToolDeclaration,
    ToolInterface,
    ToolSurface,
    ToolNamespace,
    ToolInputContract,
    ToolOutputContract,
    ToolExecutionProfile,
    ToolPermissionProfile,
    ToolPermissionDecision,
    ToolHook,
    ToolInvocation,
    ToolSchedulerPolicy,
    DeferredToolRef,
    ToolProgress,
    ToolResult,
    ToolResultPersistence,
    ToolError,
    ToolEvent,
    ToolExternalMapping,
)
OBJECTS: Mapping[str, type[Document]] = {model.OBJECT: model for model in _MODELS}


def published_schemas() -> dict[str, dict[str, Any]]:
    """The JSON Schema (2020-12) of each object, in the order of the standard."""
    return {name: _published(name, model) for name, model in OBJECTS.items()}


def _published(name: str, model: type[Document]) -> dict[str, Any]:
    schema = _reader(model).json_schema(by_alias=True, mode="validation")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:interlock:agent-tool:{VERSION}:{name}",
        **schema,
        "required": ["schema_version", *schema.get("required", ())],
    }

"""Objects about a tool before it is called: declaration, contracts, namespace, interface, profiles and surface.

Nothing here depends on a call.
"""

from __future__ import annotations

from typing import Any, Literal, Self, cast

from pydantic import Field, model_validator

from interlock.contract.standard.document import (
    BlockReason,
    ContentType,
    Count,
    Document,
    DocumentPart,
    ExecutionKind,
    Flag,
    Json,
    Lifecycle,
    Name,
    Refs,
    SearchHint,
    SurfaceScope,
    Timestamp,
    ToolKind,
)
from interlock.contract.standard.mappings import ExternalMapping

# ── declarations and contracts ──────────────────────────────────────────────────────────────────────────────────────


class ToolInputContract(Document):
    """The input of a tool, as the model sees it and as the runtime checks it."""

    OBJECT = "tool_input_contract"
    model_input_schema: Json
    runtime_input_schema: Json | None = None
    strict: Flag = True
    argument_mode: str = "object"
    media_mode: str = "none"
    defaults: Json = Field(default={})
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
    """The output of a tool, and its limits."""

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
    annotations: Json = Field(default={})


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


class Identity(DocumentPart):
    tool_id: Name
    namespace: Name
    name: Name
    aliases: Refs = ()
    native_ids: Json = Field(default={})
    display_name: str | None = None


class Schemas(DocumentPart):
    model_input_schema: Json | None = None
    runtime_input_schema: Json | None = None
    output_schema: Json | None = None
    strict: Flag = True
    visibility: str | None = None


class Availability(DocumentPart):
    is_enabled: Flag = True
    setup_state: str | None = None
    feature_gates: Refs = ()
    required_credentials: Refs = ()
    model_support: Refs | None = None
    deferred: Flag = False


class Validation(DocumentPart):
    parses_schema: Flag = True
    value_checks: Refs = ()
    preflight_checks: Refs = ()


class Safety(DocumentPart):
    """The safety facts of a tool. INVARIANT: an omitted fact reads as the unsafe value."""

    is_concurrency_safe: Flag = False
    is_read_only: Flag = False
    is_destructive: Flag = True
    is_open_world: Flag = True
    requires_approval: Flag = True
    requires_user_interaction: Flag = True
    sandbox_profile: str | None = None
    classifier_input: Any = None


class PermissionMatching(DocumentPart):
    tool_names: Refs = ()
    paths: Refs = ()
    commands: Refs = ()
    urls: Refs = ()
    resources: Refs = ()
    native_operations: Refs = ()


class Execution(DocumentPart):
    callable_ref: str | None = None
    timeout_ms: Count | None = None
    supports_abort: Flag = False
    supports_progress: Flag = False
    result_mapper: str | None = None
    modifies_context: Flag = True  # default: it may, so it cannot share a turn with other calls


class Rendering(DocumentPart):
    model_result: str | None = None
    ui_result: str | None = None
    ui_progress: str | None = None
    ui_rejection: str | None = None
    ui_error: str | None = None
    ui_grouped: str | None = None
    transcript_search_text: str | None = None


class Persistence(DocumentPart):
    max_inline_chars: Count | None = None
    opt_out: Flag = False
    opt_out_reason: str | None = None
    durable_refs: Refs = ()
    preview_chars: Count | None = None
    redaction: str | None = None


class ToolInterface(Document):
    """The behaviour of a tool at run time."""

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


# ── profiles ────────────────────────────────────────────────────────────────────────────────────────────────────────


class ToolExecutionProfile(Document):
    """The way a tool is executed. An operation that the profile does not state is not supported."""

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
    # None: nothing was stated, which is not the same as nothing being touched.
    data_access: Refs | None = None
    write_effects: Refs | None = None
    network_scope: Refs | None = None
    credentials: Refs | None = None
    sandbox_profile: str | None = None
    requires_approval: Flag = True
    redaction: str | None = None
    policy_refs: Refs = ()


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


class BlockedTool(DocumentPart):
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

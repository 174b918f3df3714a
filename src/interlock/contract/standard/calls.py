"""Objects about a call in progress: the permission decision, hooks, scheduling, inputs, states, progress and events.

The result of a call is in `results`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from interlock.contract.standard.document import (
    Amount,
    Behavior,
    Count,
    Document,
    DocumentPart,
    EventClass,
    Flag,
    HookOutput,
    HookPhase,
    Json,
    Name,
    Percent,
    Refs,
    SyntheticCause,
    Timestamp,
)
from interlock.contract.standard.mappings import ExternalMapping
from interlock.contract.standard.results import ContentItem
from interlock.contract.standard.states import State

# ── what is decided ─────────────────────────────────────────────────────────────────────────────────────────────────


class ToolPermissionDecision(Document):
    """The decision of one permission check, and its reason."""

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


# ── what happens ────────────────────────────────────────────────────────────────────────────────────────────────────


class Transition(DocumentPart):
    """A state a call reached, and when, if that was put on record."""

    state: State
    at: Timestamp | None = None


class InputChange(DocumentPart):
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
    data: Json = Field(default={})
    actor_refs: Refs = ()
    policy_refs: Refs = ()
    evidence_refs: Refs = ()
    telemetry_refs: Refs = ()

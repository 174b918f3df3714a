"""The nineteen documents of the Agent Tool standard: what they hold, what they refuse and what they pass on."""

from __future__ import annotations

import copy
import json
from typing import Any, get_args

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from interlock.contract.standard import (
    LIFECYCLE_OF_REGISTRY_STATE,
    OBJECTS,
    SELECTABLE_REGISTRY_STATES,
    ContentType,
    Document,
    DocumentPart,
    EventClass,
    Identity,
    Lifecycle,
    RegistryState,
    Safety,
    TextContent,
    ToolDeclaration,
    ToolError,
    ToolExternalMapping,
    ToolInputContract,
    ToolInterface,
    ToolResult,
    published_schemas,
)
from interlock.contract.standard.states import STATES
from interlock.core.errors import CODES, ErrorClass, ErrorCode, Failure
from tests.support.each import each

NOW = "2026-01-02T03:04:05.000Z"
SCHEMAS = published_schemas()
VALIDATORS = {
    name: jsonschema_rs.Draft202012Validator(schema, validate_formats=True) for name, schema in SCHEMAS.items()
}
NAMES = [
    "tool_declaration",
    "tool_interface",
    "tool_surface",
    "tool_namespace",
    "tool_input_contract",
    "tool_output_contract",
    "tool_execution_profile",
    "tool_permission_profile",
    "tool_permission_decision",
    "tool_hook",
    "tool_invocation",
    "tool_scheduler_policy",
    "deferred_tool_ref",
    "tool_progress",
    "tool_result",
    "tool_result_persistence",
    "tool_error",
    "tool_event",
    "tool_external_mapping",
]

INPUT_CONTRACT: dict[str, Any] = {
    "schema_version": "0.2.0",
    "model_input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    "runtime_input_schema": {"type": "object", "properties": {"path": {"type": "string"}, "tenant": {}}},
    "strict": False,
    "argument_mode": "object",
    "media_mode": "text",
    "defaults": {"path": "a"},
    "examples": [{"path": "b"}],
    "sensitive_fields": ["path"],
    "internal_only_fields": ["tenant"],
    "mutation_policy": "hooks",
}
OUTPUT_CONTRACT: dict[str, Any] = {
    "schema_version": "0.2.0",
    "output_schema": {"type": "object"},
    "content_types": ["text", "diff"],
    "media_modes": ["text"],
    "max_inline_chars": 4000,
    "result_size_policy": "preview",
    "rendering_boundary": "summary",
    "expected_artifacts": ["report"],
    "expected_resources": ["file"],
}
DEFERRED: dict[str, Any] = {
    "schema_version": "0.2.0",
    "tool_id": "read_file",
    "name": "read_file",
    "namespace": "fs",
    "search_hint": "read a text file",
    "source": "kit",
    "schema_visibility": "hidden",
    "loading_state": "deferred",
    "reason": "large catalog",
    "pending_provider_or_server": "fs",
    "selection_ref": "sel-1",
}
MAPPINGS: dict[str, dict[str, Any]] = {
    "mcp": {
        "server_id": "s",
        "mcp_session_id": "m",
        "mcp_protocol_version": "2025-06-18",
        "method": "tools/call",
        "tool_name": "t",
        "jsonrpc_request_id": 7,
        "structuredContent": {"a": [1]},
        "isError": False,
        "_meta": {"k": None},
    },
    "openapi": {
        "operation_id": "getPet",
        "method": "GET",
        "path": "/pets/{id}",
        "server_url": "https://pets.example",
        "security_scheme_refs": ["key"],
    },
    "function_calling": {
        "tool_call_id": "c",
        "function_name": "f",
        "tool_choice": {"type": "auto"},
        "parallel_tool_calls": True,
        "strict": True,
        "defer_loading": False,
    },
    "a2a": {
        "agent_card_url": "https://peer.example/card",
        "agent_skill_id": "k",
        "task_id": "t",
        "context_id": "c",
        "message_id": "m",
        "artifact_id": "a",
    },
    "cli": {
        "command_id": "c",
        "argv_ref": "a",
        "cwd_ref": "w",
        "env_policy_ref": "e",
        "exit_code": -9,
        "signal": "SIGKILL",
        "sandbox_ref": "s",
    },
    "browser": {
        "browser_session_id": "b",
        "page_id": "p",
        "action_id": "a",
        "observation_ref": "o",
        "screenshot_ref": "s",
    },
    "telemetry": {
        "trace_id": "t",
        "span_id": "s",
        "tool_name": "n",
        "tool_call_id": "c",
        "request_id": "r",
        "duration_ms": 1.5,
        "result_size_bytes": 12,
    },
}
CONTENT: dict[str, dict[str, Any]] = {
    "text": {"text": "hello"},
    "json": {"value": {"a": [1, None]}},
    "image": {"mime_type": "image/png", "data": "aGk="},
    "audio": {"mime_type": "audio/wav", "uri": "res:1"},
    "video": {"mime_type": "video/mp4", "uri": "res:2"},
    "file": {"uri": "file:a", "name": "a", "size_bytes": 3},
    "resource_link": {"uri": "res:3", "name": "r"},
    "embedded_resource": {"uri": "res:4", "mime_type": "text/plain", "text": "t"},
    "log": {"text": "started", "level": "info", "stream": "stderr"},
    "diff": {"diff": "-a\n+b", "path": "a"},
    "persisted_ref": {"ref": "payload:1", "preview": "he", "size_bytes": 99},
    "artifact_ref": {"ref": "artifact:1", "mime_type": "application/pdf"},
}
ITEMS = [{"type": kind, **fields} for kind, fields in CONTENT.items()]

# Every field of every object, said once.
_FIELDS: dict[str, dict[str, Any]] = {
    "tool_declaration": {
        "tool_id": "read_file",
        "namespace": "fs",
        "name": "read_file",
        "description": "Read a file.",
        "lifecycle": "available",
        "tool_kind": "file_operation",
        "aliases": ["cat"],
        "search_hint": "read a text file",
        "title": "Read file",
        "capability_refs": ["fs.read"],
        "input_contract": INPUT_CONTRACT,
        "output_contract": OUTPUT_CONTRACT,
        "interface_ref": "i",
        "execution_profile_ref": "e",
        "permission_profile_ref": "p",
        "external_mappings": [{"schema_version": "0.2.0", "kind": kind, **fields} for kind, fields in MAPPINGS.items()],
        "annotations": {"readOnlyHint": True, "anything": [1, {"x": None}]},
    },
    "tool_interface": {
        "identity": {
            "tool_id": "read_file",
            "namespace": "fs",
            "name": "read_file",
            "aliases": ["cat"],
            "native_ids": {"mcp": "read"},
            "display_name": "Read file",
        },
        "schemas": {
            "model_input_schema": {"type": "object"},
            "runtime_input_schema": {"type": "object"},
            "output_schema": {},
            "strict": True,
            "visibility": "loaded",
        },
        "availability": {
            "is_enabled": True,
            "setup_state": "ready",
            "feature_gates": ["g"],
            "required_credentials": ["c"],
            "model_support": ["m"],
            "deferred": False,
        },
        "validation": {"parses_schema": True, "value_checks": ["v"], "preflight_checks": ["p"]},
        "safety": {
            "is_concurrency_safe": True,
            "is_read_only": True,
            "is_destructive": False,
            "is_open_world": False,
            "requires_approval": False,
            "requires_user_interaction": False,
            "sandbox_profile": "strict",
            "classifier_input": {"a": 1},
        },
        "permission_matching": {
            "tool_names": ["n"],
            "paths": ["/a/*"],
            "commands": ["ls"],
            "urls": ["https://a.example"],
            "resources": ["r"],
            "native_operations": ["o"],
        },
        "execution": {
            "callable_ref": "c",
            "timeout_ms": 5,
            "supports_abort": True,
            "supports_progress": True,
            "result_mapper": "m",
            "modifies_context": False,
        },
        "rendering": {
            "model_result": "m",
            "ui_result": "u",
            "ui_progress": "p",
            "ui_rejection": "r",
            "ui_error": "e",
            "ui_grouped": "g",
            "transcript_search_text": "t",
        },
        "persistence": {
            "max_inline_chars": 10,
            "opt_out": True,
            "opt_out_reason": "reads persisted payloads",
            "durable_refs": ["d"],
            "preview_chars": 5,
            "redaction": "fields",
        },
    },
    "tool_surface": {
        "surface_id": "s",
        "scope": "turn",
        "created_at": NOW,
        "producer": "gateway",
        "scope_ref": "turn-1",
        "tool_refs": ["a", "b"],
        "loaded_tools": ["a"],
        "deferred_tools": [DEFERRED],
        "blocked_tools": [{"tool_id": "c", "reason": "policy_blocked", "detail": "d"}],
        "excluded_tools": [{"tool_id": "d", "reason": "role_not_allowed"}],
        "selection_policy": "small",
        "default_tool_choice": "auto",
        "capability_requirements": ["c"],
        "model_capabilities": ["m"],
        "role_constraints": ["r"],
        "policy_refs": ["p"],
        "runtime_refs": ["rt"],
        "surface_reason": "task",
    },
    "tool_namespace": {
        "namespace": "fs",
        "source_kind": "server",
        "title": "Files",
        "description": "d",
        "source_ref": "r",
        "tool_refs": ["a"],
    },
    "tool_input_contract": INPUT_CONTRACT,
    "tool_output_contract": OUTPUT_CONTRACT,
    "tool_execution_profile": {
        "profile_id": "p",
        "kind": "shell",
        "sandbox_profile": "strict",
        "timeout_ms": 100,
        "supports_abort": True,
        "supports_progress": True,
        "supports_cancellation": True,
        "supports_resume": True,
    },
    "tool_permission_profile": {
        "profile_id": "p",
        "risk": "high",
        "data_access": ["d"],
        "write_effects": [],
        "network_scope": ["n"],
        "credentials": ["c"],
        "sandbox_profile": "s",
        "requires_approval": False,
        "redaction": "r",
        "policy_refs": ["p"],
    },
    "tool_permission_decision": {
        "decision_id": "d",
        "invocation_id": "i",
        "behavior": "ask",
        "source": "rule",
        "reason": "writes",
        "decided_at": NOW,
        "mode": "default",
        "rule_refs": ["r"],
        "policy_refs": ["p"],
        "updated_input": {"a": 1},
        "user_modified": True,
        "suggested_updates": [{"rule": "x"}],
        "pending_classifier_check": True,
        "blocked_path": "/a",
        "content_blocks": [{"type": "text", "text": "t"}],
        "accept_feedback": "ok",
        "expires_at": NOW,
    },
    "tool_hook": {
        "hook_id": "h",
        "phase": "pre_tool",
        "may_emit": ["message", "progress", "decision", "context", "updated_input", "stop"],
        "tool_refs": ["a"],
        "timeout_ms": 5,
        "source": "s",
    },
    "tool_invocation": {
        "invocation_id": "i",
        "tool_id": "t",
        "status": "running",
        "native_call_id": "n",
        "started_at": NOW,
        "ended_at": None,
        "transitions": [{"state": "planned", "at": NOW}, {"state": "selected", "at": NOW}],
        "model_input": {"a": 1},
        "observable_input": {"a": 1},
        "permission_input": {"a": 1, "b": 2},
        "call_input": {"a": 1, "b": 2},
        "input_changes": [
            {"before": "observable_input", "after": "permission_input", "source": "hook:h", "pointer": "/b"}
        ],
        "external_mappings": [{"kind": "mcp", "jsonrpc_request_id": "7"}],
        "actor_refs": ["a"],
        "runtime_refs": ["r"],
        "policy_refs": ["p"],
        "evidence_refs": ["e"],
        "telemetry_refs": ["t"],
    },
    "tool_scheduler_policy": {
        "policy_id": "p",
        "concurrency_safe": True,
        "parallel_read_only": True,
        "parallel_write": True,
        "parallel_destructive": True,
        "parallel_open_world": True,
        "result_order": "completion",
        "interrupt_behavior": "cancel",
        "sibling_failure_policy": "cancel_dependent",
        "context_modifiers_allowed": True,
        "synthetic_results": ["user_interruption", "sibling_error", "fallback", "timeout", "discarded_execution"],
        "yields": True,
    },
    "deferred_tool_ref": DEFERRED,
    "tool_progress": {
        "progress_id": "p",
        "invocation_id": "i",
        "sequence": 3,
        "status": "running",
        "message": "half",
        "percent": 50,
        "current_step": 1,
        "total_steps": 2,
        "elapsed_ms": 12.5,
        "bytes_read": 1,
        "bytes_written": 2,
        "line_count": 3,
        "partial_result_refs": ["p"],
        "artifact_refs": ["a"],
        "timestamp": NOW,
    },
    "tool_result": {
        "result_id": "r",
        "invocation_id": "i",
        "status": "succeeded",
        "is_error": False,
        "content": ITEMS,
        "created_at": NOW,
        "redaction_state": "none",
        "structured_content": {"a": [1]},
        "model_facing_content": [{"type": "text", "text": "preview"}],
        "ui_facing_summary": "done",
        "ui_facing_rendering": {"progress": "p", "rejection": None, "error": None, "grouped": ["g"], "expanded": "e"},
        "transcript_search_text": "words",
        "persisted_payload_ref": "payload:1",
        "resource_refs": ["r"],
        "artifact_refs": ["a"],
        "evidence_refs": ["e"],
        "policy_refs": ["p"],
        "telemetry_refs": ["t"],
        "persistence_refs": ["pp"],
        "handoff_refs": [
            {
                "handoff_id": "h",
                "what": {"case": 1},
                "to": {"agent": "did:key:z", "tool": None},
                "authority": {"scopes": ["a"], "resources": ["r"]},
                "from": "local:x",
                "expires_at": NOW,
            }
        ],
        "summary": "s",
    },
    "tool_result_persistence": {
        "persistence_id": "p",
        "invocation_id": "i",
        "decision": "preview",
        "result_id": "r",
        "reason": "size",
        "max_inline_chars": 10,
        "size_chars": 11,
        "payload_ref": "payload:1",
        "preview": "he",
        "redacted_fields": ["a"],
        "opted_out": False,
        "decided_at": NOW,
        "expires_at": NOW,
    },
    "tool_error": Failure(
        "UPSTREAM_FAILURE",
        "the bank does not answer",
        details={"a": 1},
        retry_after_ms=5,
        native_error_ref="n",
        policy_refs=("p",),
        evidence_refs=("e",),
    ).envelope("t"),
    "tool_event": {
        "event_id": "e",
        "event_class": "tool.declared",
        "occurred_at": NOW,
        "sequence": 1,
        "tool_id": "t",
        "surface_id": "s",
        "invocation_id": "i",
        "data": {"a": 1},
        "actor_refs": ["a"],
        "policy_refs": ["p"],
        "evidence_refs": ["e"],
        "telemetry_refs": ["t"],
    },
    "tool_external_mapping": {"kind": "mcp", **MAPPINGS["mcp"]},
}
FULL = {name: {"schema_version": "0.2.0"} | fields for name, fields in _FIELDS.items()}

# Where a document holds parts that must keep unknown fields as well.
PARTS: list[tuple[str, list[str | int]]] = [
    ("tool_declaration", ["input_contract"]),
    ("tool_declaration", ["output_contract"]),
    *(("tool_declaration", ["external_mappings", index]) for index in range(len(MAPPINGS))),
    *(("tool_interface", [part]) for part in FULL["tool_interface"] if part != "schema_version"),
    ("tool_surface", ["deferred_tools", 0]),
    ("tool_surface", ["blocked_tools", 0]),
    ("tool_invocation", ["transitions", 0]),
    ("tool_invocation", ["input_changes", 0]),
    ("tool_permission_decision", ["content_blocks", 0]),
    ("tool_result", ["ui_facing_rendering"]),
    *(("tool_result", ["content", index]) for index in range(len(ITEMS))),
]

TOOL_KINDS = (
    "function mcp_tool openapi_operation native_tool browser_action shell_command code_execution file_operation "
    "web_search retrieval model_task skill_tool peer_agent_tool policy_check artifact_operation evidence_export "
    "custom"
)
BLOCK_REASONS = (
    "policy_blocked credential_missing setup_required model_unsupported recursive_tool_forbidden "
    "role_not_allowed feature_disabled deferred_until_discovered"
)
EVENT_CLASSES = (
    "tool.declared tool.surface.created tool.surface.updated tool.deferred.discovered tool.deferred.loaded "
    "tool.invocation.planned tool.invocation.selected tool.invocation.arguments_ready "
    "tool.invocation.validation_failed tool.hook.pre.started tool.hook.pre.completed tool.permission.requested "
    "tool.permission.decided tool.invocation.queued tool.invocation.started tool.invocation.progress "
    "tool.invocation.partial_result tool.hook.post.started tool.hook.post.completed tool.result.persisted "
    "tool.invocation.yielded tool.invocation.succeeded tool.invocation.failed tool.invocation.canceled "
    "tool.invocation.timed_out tool.result.created tool.result.redacted"
)
# The standard's closed vocabularies: the object, the path to a place that holds one, and its words.
CLOSED: list[tuple[str, list[str | int], str]] = [
    (
        "tool_declaration",
        ["tool_kind"],
        TOOL_KINDS,
    ),
    ("tool_declaration", ["lifecycle"], "draft available disabled requires_setup deferred deprecated retired"),
    ("tool_permission_decision", ["behavior"], "allow ask deny passthrough"),
    (
        "tool_execution_profile",
        ["kind"],
        "local remote browser shell mcp api native model peer_agent hybrid",
    ),
    ("tool_result_persistence", ["decision"], "inline redact persist preview link"),
    ("tool_surface", ["scope"], "tenant workspace session task turn skill peer_agent"),
    *(
        (
            "tool_surface",
            [place, 0, "reason"],
            BLOCK_REASONS,
        )
        for place in ("blocked_tools", "excluded_tools")
    ),
    ("tool_hook", ["phase"], "pre_tool post_tool failure"),
    ("tool_scheduler_policy", ["interrupt_behavior"], "cancel block"),
    ("tool_scheduler_policy", ["sibling_failure_policy"], "ignore cancel_siblings cancel_dependent"),
    ("tool_invocation", ["status"], " ".join(STATES)),
    ("tool_invocation", ["transitions", 0, "state"], " ".join(STATES)),
    ("tool_result", ["status"], " ".join(STATES)),
    ("tool_output_contract", ["content_types", 0], " ".join(CONTENT)),
    ("tool_error", ["error_class"], " ".join(ErrorClass)),
    ("tool_error", ["errorCode"], " ".join(ErrorCode)),
    (
        "tool_event",
        ["event_class"],
        EVENT_CLASSES,
    ),
]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
# Names that the models use for themselves are unknown to the standard, and so must survive like any other.
field_names = st.text() | st.sampled_from(
    ["category", "trace_id", "meta", "is_error", "document", "parse", "OBJECT", "model_config", "model_fields", "self"]
)
unknown_fields = st.dictionaries(field_names, json_values, max_size=5)

# No deadline: a busy machine is no fault of a document. `brief` where many parametrized cases share one property.
thorough = settings(deadline=None, max_examples=60)
brief = settings(deadline=None, max_examples=25)


def text(value: Any) -> str:
    """JSON text, which unlike == tells 1 from 1.0 and from true."""
    return json.dumps(value, sort_keys=True)


def at(document: Any, path: list[str | int]) -> Any:
    for step in path:
        document = document[step]
    return document


def changed(name: str, path: list[str | int], value: Any) -> dict[str, Any]:
    document = copy.deepcopy(FULL[name])
    at(document, path[:-1])[path[-1]] = value
    return document


def fits(name: str, document: dict[str, Any]) -> bool:
    """What the published schema says of a document."""
    return VALIDATORS[name].is_valid(document)


def refused(name: str, document: Any) -> bool:
    try:
        OBJECTS[name].parse(document)
    except Failure as failure:
        return failure.code == "E3301"
    return False


def known_fields(part: DocumentPart) -> set[str]:
    return {field.alias or name for name, field in type(part).model_fields.items()}


def without(known: set[str], fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in known}


@pytest.mark.proves("CONTRACT-08")
def test_there_are_the_nineteen_objects_of_the_standard_each_with_a_published_schema() -> None:
    assert list(OBJECTS) == NAMES == list(SCHEMAS) == list(published_schemas())
    for name, schema in SCHEMAS.items():
        assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        assert schema["$id"] == f"urn:interlock:agent-tool:0.2.0:{name}"
        jsonschema_rs.meta.validate(schema)
    assert text(SCHEMAS) == text(published_schemas())


@pytest.mark.supports("AUTH-10", "CONTRACT-09")
@pytest.mark.parametrize("name", NAMES)
def test_a_full_document_says_every_field_there_is_and_fits_its_published_schema(name: str) -> None:
    assert set(FULL[name]) == known_fields(OBJECTS[name].parse(FULL[name]))
    assert fits(name, FULL[name])


@pytest.mark.proves("CONTRACT-08")
@pytest.mark.parametrize("name", NAMES)
@thorough
@given(data=st.data())
def test_unknown_fields_are_kept_and_re_emitted_untouched(name: str, data: DataObject) -> None:
    unknown = without(set(FULL[name]), data.draw(unknown_fields))
    document = FULL[name] | unknown
    assert text(OBJECTS[name].parse(document).document()) == text(document)
    assert fits(name, document)


@pytest.mark.proves("CONTRACT-08")
@pytest.mark.parametrize(("name", "path"), PARTS)
@brief
@given(data=st.data())
def test_unknown_fields_inside_a_part_are_kept_too(name: str, path: list[str | int], data: DataObject) -> None:
    part: Any = OBJECTS[name].parse(FULL[name])
    for step in path:
        part = part[step] if isinstance(step, int) else getattr(part, step)
    unknown = without(known_fields(part), data.draw(unknown_fields))
    document = changed(name, path, unknown | at(FULL[name], path))
    assert text(OBJECTS[name].parse(document).document()) == text(document)


@pytest.mark.proves("CONTRACT-08")
@pytest.mark.parametrize("name", NAMES)
@thorough
@given(data=st.data())
def test_a_reader_adds_nothing_to_what_was_said(name: str, data: DataObject) -> None:
    optional = sorted(set(FULL[name]) - set(SCHEMAS[name]["required"]) - {"kind"})
    dropped = data.draw(st.sets(st.sampled_from(optional)) if optional else st.just(set[str]()))
    document = {field: value for field, value in FULL[name].items() if field not in dropped}
    assert text(OBJECTS[name].parse(document).document()) == text(document)
    assert fits(name, document)


@pytest.mark.proves("CONTRACT-08")
@pytest.mark.parametrize("name", NAMES)
def test_a_document_without_schema_version_is_refused(name: str) -> None:
    document = {field: value for field, value in FULL[name].items() if field != "schema_version"}
    assert refused(name, document)
    assert not fits(name, document)


@pytest.mark.proves("CONTRACT-08")
@pytest.mark.parametrize("name", NAMES)
def test_a_later_patch_version_with_new_fields_loads_and_keeps_its_version(name: str) -> None:
    document = FULL[name] | {"schema_version": "0.2.7", "new_in_7": {"deep": [1, 2.0, None]}}
    assert OBJECTS[name].parse(document).document() == document
    assert fits(name, document)


@each("version", ["0.3.0", "1.2.0", "0.2", "0.2.", "0.2.x", "0.2.٣", "0.2.01", "v0.2.0", "", 2, None])
@pytest.mark.supports("CONTRACT-08")
@each("name", NAMES)
def test_another_version_is_refused(name: str, version: Any) -> None:
    document = FULL[name] | {"schema_version": version}
    assert refused(name, document)
    assert not fits(name, document)


@each("value", [None, [], "text", 1])
@each("name", NAMES)
def test_what_is_no_object_is_refused(name: str, value: Any) -> None:
    assert refused(name, value)


@pytest.mark.parametrize("name", NAMES)
def test_each_field_the_schema_requires_is_required_by_the_reader_and_no_other(name: str) -> None:
    for field in FULL[name]:
        document = {key: value for key, value in FULL[name].items() if key != field}
        assert refused(name, document) == (not fits(name, document)), field


def test_an_embedded_object_has_the_version_of_its_document_unless_it_says_its_own() -> None:
    embedded = {field: value for field, value in INPUT_CONTRACT.items() if field != "schema_version"}
    document = FULL["tool_declaration"] | {"input_contract": embedded}
    declaration = ToolDeclaration.parse(document)
    assert declaration.document() == document
    assert declaration.input_contract is not None
    assert declaration.input_contract.document() == INPUT_CONTRACT
    assert refused("tool_declaration", changed("tool_declaration", ["input_contract", "schema_version"], "0.3.0"))


def test_what_is_made_here_carries_its_version_and_writes_its_defaults_out() -> None:
    made = ToolInterface(identity=Identity(tool_id="a", namespace="b", name="c")).document()
    assert made["schema_version"] == "0.2.0"
    assert made["safety"]["is_destructive"] is True
    assert "sandbox_profile" not in made["safety"]
    assert ToolInterface.parse(made).document() == made


def test_a_refusal_names_the_place_and_not_the_value() -> None:
    with pytest.raises(Failure) as caught:
        ToolInterface.parse(changed("tool_interface", ["safety", "is_read_only"], "sk-secret"))
    faults = (caught.value.details or {})["faults"]
    assert [fault["at"] for fault in faults] == ["safety.is_read_only"]
    assert "sk-secret" not in text(caught.value.envelope("t"))


@pytest.mark.supports("AUTH-10")
@pytest.mark.proves("CONTRACT-10")
@pytest.mark.supports("EXEC-01")
@pytest.mark.parametrize(("name", "path", "words"), CLOSED)
def test_a_vocabulary_is_closed(name: str, path: list[str | int], words: str) -> None:
    for word in words.split():
        document = changed(name, path, word)
        assert OBJECTS[name].parse(document).document() == document
        assert fits(name, document)
    for stranger in ("stranger", "", words.split()[0].swapcase(), None, 1):
        document = changed(name, path, stranger)
        assert refused(name, document)
        assert not fits(name, document)


def test_the_vocabularies_have_the_sizes_the_standard_gives_them() -> None:
    assert len(STATES) == 20
    assert len(get_args(EventClass)) == 27
    assert len(ErrorClass) == 22
    assert tuple(CONTENT) == get_args(ContentType)


@pytest.mark.proves("CONTRACT-10")
def test_every_registry_state_reads_as_one_declaration_lifecycle() -> None:
    assert dict(LIFECYCLE_OF_REGISTRY_STATE) == {
        "active": "available",
        "deprecated": "deprecated",
        "sunset": "deprecated",
        "removed": "retired",
    }
    assert set(LIFECYCLE_OF_REGISTRY_STATE) == set(get_args(RegistryState))
    assert set(LIFECYCLE_OF_REGISTRY_STATE.values()) <= set(get_args(Lifecycle))
    # Among the selectable states the table can be read backwards: no lifecycle stands for two of them.
    backwards = {LIFECYCLE_OF_REGISTRY_STATE[state]: state for state in SELECTABLE_REGISTRY_STATES}
    assert backwards == {"available": "active", "deprecated": "deprecated"}


@pytest.mark.supports("CONTRACT-09")
@pytest.mark.parametrize(
    "field", ["schema_version", "tool_id", "namespace", "name", "description", "lifecycle", "tool_kind"]
)
def test_a_declaration_without_a_required_field_is_refused(field: str) -> None:
    document = {key: value for key, value in FULL["tool_declaration"].items() if key != field}
    assert refused("tool_declaration", document)
    assert not fits("tool_declaration", document)
    assert refused("tool_declaration", FULL["tool_declaration"] | {field: ""})


@pytest.mark.supports("CONTRACT-09")
@thorough
@given(words=st.lists(st.text("abcé-", min_size=1, max_size=5), max_size=14))
def test_a_search_hint_has_three_to_ten_words(words: list[str]) -> None:
    for name in ("tool_declaration", "deferred_tool_ref"):
        document = FULL[name] | {"search_hint": " ".join(words)}
        assert refused(name, document) == (not 3 <= len(words) <= 10)
        assert fits(name, document) == (3 <= len(words) <= 10)


@thorough
@given(annotations=st.dictionaries(st.text(), json_values))
def test_annotations_are_free_and_change_no_other_field(annotations: dict[str, Any]) -> None:
    plain = ToolDeclaration.parse(FULL["tool_declaration"]).document()
    hinted = ToolDeclaration.parse(FULL["tool_declaration"] | {"annotations": annotations}).document()
    assert text(hinted) == text(plain | {"annotations": annotations})


UNSAFE: dict[str, bool] = {
    "is_concurrency_safe": False,
    "is_read_only": False,
    "is_destructive": True,
    "is_open_world": True,
    "requires_approval": True,
    "requires_user_interaction": True,
}


def safety_of(*said: dict[str, Any]) -> dict[str, bool]:
    bare = {"schema_version": "0.2.0", "identity": FULL["tool_interface"]["identity"]}
    safety = ToolInterface.parse(bare | ({"safety": said[0]} if said else {})).safety
    return {fact: getattr(safety, fact) for fact in UNSAFE}


@pytest.mark.proves("CONTRACT-11")
def test_a_safety_fact_left_unsaid_reads_as_the_unsafe_value() -> None:
    assert safety_of() == safety_of({}) == safety_of({"unknown": True}) == UNSAFE
    flags = {name for name, field in Safety.model_fields.items() if isinstance(field.default, bool)}
    assert flags == set(UNSAFE)


@pytest.mark.proves("CONTRACT-11")
@pytest.mark.parametrize("fact", UNSAFE)
def test_a_safety_fact_said_changes_only_itself(fact: str) -> None:
    assert safety_of({fact: not UNSAFE[fact]}) == UNSAFE | {fact: not UNSAFE[fact]}


@pytest.mark.parametrize("fact", UNSAFE)
@pytest.mark.parametrize("value", ["yes", "true", "false", 0, 1, None])
def test_a_safety_fact_is_true_or_false_and_nothing_like_it(fact: str, value: Any) -> None:
    document = changed("tool_interface", ["safety", fact], value)
    assert refused("tool_interface", document)
    assert not fits("tool_interface", document)


# What a contract states of its input and of its output, in the words of CONTRACT-12.
STATED = {
    "tool_input_contract": "strict argument_mode media_mode defaults examples sensitive_fields internal_only_fields"
    " mutation_policy",
    "tool_output_contract": "expected_artifacts expected_resources media_modes content_types result_size_policy"
    " rendering_boundary",
}


@pytest.mark.proves("CONTRACT-12")
@pytest.mark.parametrize("name", STATED)
def test_a_contract_states_all_facts_of_its_side(name: str) -> None:
    facts = set(STATED[name].split())
    assert facts <= set(SCHEMAS[name]["properties"])
    assert facts <= set(FULL[name])
    assert OBJECTS[name].parse(FULL[name]).document() == FULL[name]


@pytest.mark.proves("CONTRACT-12")
def test_an_internal_only_field_in_the_model_facing_schema_is_refused() -> None:
    shown = {"type": "object", "properties": {"path": True, "tenant": True}}
    assert ToolInputContract.parse(INPUT_CONTRACT).internal_only_fields == ("tenant",)
    assert refused("tool_input_contract", INPUT_CONTRACT | {"model_input_schema": shown})


@pytest.mark.proves("CONTRACT-13")
@each("code", CODES)
def test_the_envelope_of_every_failure_is_a_tool_error(code: str) -> None:
    for failure in (
        Failure(code),
        Failure(code, "m", details={"a": 1}, retryable=True, retry_after_ms=0, native_error_ref="n"),
        Failure(code, policy_refs=("p",), evidence_refs=("e",)),
    ):
        envelope = failure.envelope("t")
        error = ToolError.parse(envelope)
        assert error.document() == envelope
        assert error.category is failure.row.error_code
        assert fits("tool_error", envelope)


@pytest.mark.parametrize("percent", [0, 100, 33.3])
def test_progress_keeps_its_percent_within_a_hundred(percent: float) -> None:
    assert fits("tool_progress", changed("tool_progress", ["percent"], percent))
    assert not refused("tool_progress", changed("tool_progress", ["percent"], percent))
    for outside in (percent + 101, percent - 101, "50", True):
        assert refused("tool_progress", changed("tool_progress", ["percent"], outside))


@pytest.mark.proves("CONTRACT-19")
@pytest.mark.parametrize("kind", CONTENT)
def test_a_result_holds_content_of_every_type(kind: str) -> None:
    item = {"type": kind, **CONTENT[kind]}
    document = FULL["tool_result"] | {"content": [item]}
    assert ToolResult.parse(document).document() == document
    assert fits("tool_result", document)
    for wrong in (item | {"type": "stranger"}, {"type": kind}, CONTENT[kind]):
        assert refused("tool_result", document | {"content": [wrong]})
        assert not fits("tool_result", document | {"content": [wrong]})


@pytest.mark.proves("CONTRACT-19")
def test_the_representations_of_a_result_differ_without_losing_the_original() -> None:
    result = ToolResult(
        result_id="r",
        invocation_id="i",
        status="succeeded",
        is_error=False,
        content=(TextContent(text="all of it"),),
        model_facing_content=(TextContent(text="some of it"),),
        ui_facing_summary="a summary",
        transcript_search_text="words",
        persisted_payload_ref="payload:1",
        created_at=NOW,
    ).document()
    assert result["content"] == [{"type": "text", "text": "all of it"}]
    assert result["model_facing_content"] == [{"type": "text", "text": "some of it"}]
    assert (result["ui_facing_summary"], result["transcript_search_text"]) == ("a summary", "words")
    assert fits("tool_result", result)


native_values = {
    "jsonrpc_request_id": st.integers() | st.text(),
    "structuredContent": json_values,
    "isError": st.booleans(),
    "_meta": st.dictionaries(st.text(), json_values, max_size=3),
    "security_scheme_refs": st.lists(st.text(), max_size=3),
    "tool_choice": st.text() | st.dictionaries(st.text(), json_values, max_size=3),
    "parallel_tool_calls": st.booleans(),
    "strict": st.booleans(),
    "defer_loading": st.booleans(),
    "exit_code": st.integers(),
    "signal": st.integers() | st.text(),
    "duration_ms": st.integers(min_value=0) | st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    "result_size_bytes": st.integers(min_value=0),
}


@pytest.mark.part_of(
    "CONTRACT-20",
    rest="A2A and browsers, which have no adapter yet",
)
@pytest.mark.parametrize("kind", MAPPINGS)
@thorough
@given(data=st.data())
def test_a_native_mapping_survives_export_and_import_unchanged(kind: str, data: DataObject) -> None:
    fields = {field: st.none() | native_values.get(field, st.text()) for field in MAPPINGS[kind]}
    native = data.draw(st.fixed_dictionaries({}, optional=fields))
    document = {"schema_version": "0.2.0", "kind": kind, **native}
    mapping = ToolExternalMapping.parse(document)
    assert text(mapping.document()) == text(document)
    assert fits("tool_external_mapping", document)
    held = FULL["tool_declaration"] | {"external_mappings": [document]}
    declaration = ToolDeclaration.parse(json.loads(json.dumps(held)))
    assert text(declaration.document()) == text(held)
    assert declaration.external_mappings[0] == mapping


@pytest.mark.parametrize("kind", MAPPINGS)
def test_a_mapping_is_read_as_its_kind_and_holds_every_native_field(kind: str) -> None:
    document = {"schema_version": "0.2.0", "kind": kind, **MAPPINGS[kind]}
    mapping: Document = ToolExternalMapping.parse(document)
    assert known_fields(mapping) == set(document)
    assert type(mapping).parse(document) == mapping
    for other in {"stranger", *MAPPINGS} - {kind}:
        with pytest.raises(Failure):
            type(mapping).parse(document | {"kind": other})
    for wrong in (document | {"kind": "stranger"}, {"schema_version": "0.2.0", **MAPPINGS[kind]}):
        assert refused("tool_external_mapping", wrong)
        assert not fits("tool_external_mapping", wrong)

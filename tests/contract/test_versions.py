"""What a document of version 0.2.0 means never changes: frozen documents and schemas are held against the reader.

The frozen file is never regenerated. A change that these tests refuse needs a new document version.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from interlock.contract.standard import OBJECTS, ToolResult, published_schemas
from interlock.core.errors import Failure
from tests.support.each import each

Json = dict[str, Any]
FROZEN: Json = orjson.loads((Path(__file__).parent / "data" / "agent_tool_0.2.0.json").read_bytes())
DOCUMENTS: dict[str, Json] = FROZEN["documents"]
SCHEMAS = published_schemas()
NEVER = pytest.mark.proves("CONTRACT-08")

# The fields by which a thing is known, its lifecycle is told, a native protocol is mapped and a result is understood.
FIELDS: Mapping[str, str] = {
    "tool_declaration": "tool_id namespace name aliases lifecycle tool_kind external_mappings",
    "tool_interface": "identity",
    "tool_surface": "surface_id",
    "tool_namespace": "namespace source_kind",
    "tool_execution_profile": "profile_id kind",
    "tool_permission_profile": "profile_id",
    "tool_permission_decision": "decision_id invocation_id behavior",
    "tool_hook": "hook_id phase",
    "tool_invocation": "invocation_id tool_id native_call_id status transitions",
    "tool_scheduler_policy": "policy_id",
    "deferred_tool_ref": "tool_id name namespace",
    "tool_progress": "progress_id invocation_id sequence status",
    "tool_result": "result_id invocation_id status is_error structured_content redaction_state persisted_payload_ref",
    "tool_result_persistence": "persistence_id invocation_id decision payload_ref",
    "tool_error": "errorCode error_code error_class retryable recoverability retryAfterMs retry_after",
    "tool_event": "event_id event_class sequence tool_id invocation_id",
}


def field_schema(schema: Json, field: str) -> Any:
    """What a published schema says of one field, with every reference written out and every description left away."""

    def spelled(part: Any) -> Any:
        if isinstance(part, list):
            return [spelled(item) for item in cast("list[Any]", part)]
        if not isinstance(part, dict):
            return part
        said = cast("Json", part)
        if "$ref" in said:
            return spelled(schema["$defs"][str(said["$ref"]).rpartition("/")[2]])
        return {name: spelled(item) for name, item in said.items() if name not in ("description", "title", "examples")}

    return spelled(schema["properties"][field])


def test_the_frozen_file_has_all_nineteen_objects() -> None:
    assert DOCUMENTS.keys() == OBJECTS.keys()
    assert len(DOCUMENTS) == 19
    assert {document["schema_version"] for document in DOCUMENTS.values()} == {"0.2.0"}
    assert FROZEN["fields"].keys() == FIELDS.keys()


@NEVER
@each("version", ["0.2.0", "0.2.9"])
@each("name", DOCUMENTS)
def test_a_frozen_document_is_read_and_written_as_ever(name: str, version: str) -> None:
    document = DOCUMENTS[name] | {"schema_version": version}
    assert OBJECTS[name].parse(document).document() == document


@NEVER
@each("name", OBJECTS)
def test_a_document_that_was_complete_stays_complete(name: str) -> None:
    needed = FROZEN["required"][name]
    assert set(SCHEMAS[name]["required"]) <= set(needed), "a newer reader requires no more"
    document = {field: value for field, value in DOCUMENTS[name].items() if field in (*needed, "kind")}
    assert OBJECTS[name].parse(document).document() == document


@NEVER
@each(("name", "field"), [(name, one) for name, listed in FIELDS.items() for one in listed.split()])
def test_identity_lifecycle_mappings_and_results_keep_their_form(name: str, field: str) -> None:
    assert field_schema(SCHEMAS[name], field) == FROZEN["fields"][name][field]


@NEVER
def test_each_native_mapping_keeps_its_fields() -> None:
    kinds = {one["kind"]: one for one in DOCUMENTS["tool_declaration"]["external_mappings"]}
    assert set(kinds) == {"mcp", "openapi", "function_calling", "a2a", "cli", "browser", "telemetry"}
    for kind, document in kinds.items():
        assert OBJECTS["tool_external_mapping"].parse(document).document() == document
        for field, value in document.items():
            if isinstance(value, str) and field not in ("kind", "schema_version"):
                with pytest.raises(Failure):  # still a field of the standard: another type of value is refused
                    OBJECTS["tool_external_mapping"].parse(document | {field: [[]]})
        with pytest.raises(Failure):
            OBJECTS["tool_external_mapping"].parse(document | {"kind": f"{kind}2"})


@NEVER
def test_a_result_is_interpreted_as_ever() -> None:
    document = DOCUMENTS["tool_result"]
    result = ToolResult.parse(document)
    assert (result.status, result.is_error, result.structured_content) == ("succeeded", False, {"a": [1]})
    for item, said in zip(result.content, document["content"], strict=True):
        assert {name: getattr(item, name) for name in said} == said
    failed = ToolResult.parse(document | {"status": "failed", "is_error": True})
    assert (failed.status, failed.is_error) == ("failed", True)


@NEVER
@each("name", OBJECTS)
def test_what_is_made_here_carries_version_0_2_0(name: str) -> None:
    """Also where it is not said: whatever Interlock makes is a document of this version."""
    said = copy.deepcopy(DOCUMENTS[name])
    del said["schema_version"]
    made = type(OBJECTS[name].parse(DOCUMENTS[name]))(**said)
    assert made.document()["schema_version"] == "0.2.0"

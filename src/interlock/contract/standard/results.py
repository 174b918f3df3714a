"""The result of a call: items of content, the result, its persistence, and the error.

They name their call by its id, and need no model of it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from interlock.contract.standard.document import (
    Count,
    Document,
    DocumentPart,
    Flag,
    Json,
    Name,
    PersistenceDecision,
    Refs,
    Timestamp,
)
from interlock.contract.standard.states import State
from interlock.core.errors import ErrorClass, ErrorCode

# ── content ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class TextContent(DocumentPart):
    type: Literal["text"] = "text"
    text: str


class JsonContent(DocumentPart):
    type: Literal["json"] = "json"
    value: Any


class MediaContent(DocumentPart):
    """An image, audio or video: base64 data, or a reference where it is large."""

    type: Literal["image", "audio", "video"]
    mime_type: Name
    data: str | None = None
    uri: str | None = None


class FileContent(DocumentPart):
    type: Literal["file"] = "file"
    uri: Name
    name: str | None = None
    mime_type: str | None = None
    size_bytes: Count | None = None


class ResourceLinkContent(DocumentPart):
    type: Literal["resource_link"] = "resource_link"
    uri: Name
    name: str | None = None
    mime_type: str | None = None


class EmbeddedResourceContent(DocumentPart):
    type: Literal["embedded_resource"] = "embedded_resource"
    uri: Name
    mime_type: str | None = None
    text: str | None = None
    blob: str | None = None


class LogContent(DocumentPart):
    type: Literal["log"] = "log"
    text: str
    level: str | None = None
    stream: str | None = None


class DiffContent(DocumentPart):
    type: Literal["diff"] = "diff"
    diff: str
    path: str | None = None


class RefContent(DocumentPart):
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


_ITEM: TypeAdapter[DocumentPart] = TypeAdapter(ContentItem)


def content_item(document: Json) -> Json | None:
    """Return an item of content as the standard writes it; None if the document is invalid."""
    try:
        return _ITEM.validate_python(document).model_dump(mode="json", exclude_none=True)
    except ValidationError:
        return None


# ── results ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class UiRendering(DocumentPart):
    """The views of a result for people."""

    progress: Any = None
    rejection: Any = None
    error: Any = None
    grouped: Any = None
    expanded: Any = None


class HandoffTarget(DocumentPart):
    """The receiver of a handoff: an agent or a tool."""

    agent: str | None = None
    tool: str | None = None


class HandoffAuthority(DocumentPart):
    """The authority that a handoff names. It is a statement: the receiver's own token decides."""

    scopes: Refs = ()
    resources: Refs = ()


class Handoff(DocumentPart):
    """A reference that hands work over. It grants nothing by itself."""

    handoff_id: Name
    what: Json
    to: HandoffTarget
    authority: HandoffAuthority
    issued_by: Name = Field(alias="from")
    expires_at: Timestamp


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
    handoff_refs: tuple[Handoff, ...] = ()
    summary: str | None = None


class ToolResultPersistence(Document):
    """The decision on storing a large or sensitive output."""

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
    """The envelope in which every endpoint returns a failure; `Failure.envelope` makes it."""

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

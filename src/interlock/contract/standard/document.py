"""The base of every object: base models, field types, and the standard's vocabularies.

This module contains what several modules use, and every vocabulary that the standard lists; none of the nineteen
objects.

Two rules hold for all of them. A reader keeps what it does not know: unknown fields, at any depth, are re-emitted with
their values unchanged, so `parse(d).document() == d` for every valid document. And a reader adds nothing: an omitted
field stays omitted when the document is passed on. An object made here, by a constructor, is complete: every field
except empty ones is written out.

An object that is embedded in another (an input contract in a declaration) may leave out `schema_version`: it has the
version of the document that holds it. Vocabularies that the standard lists are closed; those it leaves open are text.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, StrictBool, TypeAdapter, ValidationError
from pydantic_core import CoreSchema

from interlock.core.errors import Failure

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

# The lifecycle in a declaration, by the version's state in the registry.
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


class DocumentPart(BaseModel):
    """A piece of a document: frozen, and open to fields it does not know."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False, defer_build=True)

    def model_post_init(self, context: Any, /) -> None:
        # INVARIANT: reading adds no defaults. Only an object made here writes its defaults out.
        if context is not _READING:
            fields = type(self).model_fields
            self.model_fields_set.update(name for name in fields if getattr(self, name) is not None)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /) -> Json:
        # A tag has a default for those who construct it; in a document it is required, because it determines the kind.
        schema = handler.resolve_ref_schema(handler(core_schema))
        tags = [name for name, field in schema.get("properties", {}).items() if "const" in field]
        if tags:
            schema["required"] = [*tags, *schema.get("required", ())]
        return schema


class Document(DocumentPart):
    """One of the nineteen objects."""

    OBJECT: ClassVar[str]
    schema_version: SchemaVersion = VERSION

    @classmethod
    def parse(cls, document: Any) -> Self:
        """Read a document; an invalid one is refused with every fault listed (E3301)."""
        if not isinstance(document, dict) or "schema_version" not in document:
            raise Failure("E3301", f"a {cls.OBJECT} must be an object with a schema_version")
        try:
            return cast("Self", reader(cls).validate_python(document, context=_READING))
        except ValidationError as error:
            faults = [
                {"at": ".".join(map(str, fault["loc"])), "problem": fault["msg"]}
                for fault in error.errors(include_url=False, include_context=False, include_input=False)
            ]
            raise Failure("E3301", f"not a valid {cls.OBJECT}", details={"faults": faults}) from None

    def document(self) -> dict[str, Any]:
        """The JSON-ready form: all stated fields, unknown ones included."""
        stated = self.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return {"schema_version": self.schema_version} | stated

    @classmethod
    def form(cls) -> Any:
        """The type that stands for this object in a schema: the model itself, or the union of its kinds."""
        return cls


@cache
def reader(model: type[Document]) -> TypeAdapter[Document]:
    """The adapter that reads a kind of document and knows its schema."""
    return TypeAdapter(model.form())

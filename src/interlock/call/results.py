"""The result of a call: one terminal result per call, whatever happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic

from interlock.contract.attached import for_models, words_of
from interlock.contract.standard.states import HISTORY, State
from interlock.core.clock import iso
from interlock.core.errors import ErrorClass, Failure
from interlock.core.record import record, step
from interlock.data.bounds import PREVIEW_CHARS, Shortener
from interlock.data.canonical import encode

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from interlock.call.artifacts import Artifact
    from interlock.call.phases import Source
    from interlock.data.schema import Json

    # The type that the function of the tool returns, where a call names the tool by its function.
    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)  # type checkers alone ask for its default


@record
class Persistence:
    """The location of a result's payload: inline in the envelope, or stored and referred to."""

    # inline: all of it is in the answer. redact: without private values. preview: stored, and its beginning is in the
    # answer. persist: stored, and nothing of it is in the answer. link: nothing is stored, and the reason says why.
    decision: str
    ref: str | None = None
    size: int = 0
    reason: str = ""
    private: bool = False
    shown: int = PREVIEW_CHARS  # characters of its preview

    def document(self, invocation_id: str) -> Json:
        return {
            "schema_version": "0.2.0",
            "persistence_id": f"per_{invocation_id}",
            "invocation_id": invocation_id,
            "decision": self.decision,
            "payload_ref": self.ref,
            "size_chars": self.size,
            "reason": self.reason,
        }


INLINE = Persistence(decision="inline")


def without_private_fields(size: int) -> Persistence:
    """The persistence of a result that is returned without its private fields."""
    return Persistence(decision="redact", size=size, reason="private fields were removed")


# Metadata with a place of its own in the document.
_BESIDE = frozenset({"content", "views", "handoffs", "progress"})
_RESOURCES = frozenset({"resource_link", "embedded_resource"})
_REJECTIONS = frozenset(
    {ErrorClass.PERMISSION_DENIED, ErrorClass.POLICY_BLOCKED, ErrorClass.HOOK_BLOCKED, ErrorClass.APPROVAL_REJECTED}
)

_TIME: Json = {"type": "string", "format": "date-time"}
# The members of every success besides its data; endpoints place the sections where their protocols allow.
ENVELOPE_SCHEMA: Json = {
    "type": "object",
    "properties": {
        "data": True,
        "pagination": {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {
                        "cursor": {"type": ["string", "null"]},
                        "hasMore": {"type": "boolean"},
                        "totalCount": {"type": ["integer", "null"], "minimum": 0},
                    },
                    "required": ["cursor", "hasMore", "totalCount"],
                },
            ]
        },
        "provenance": {
            "type": "object",
            "properties": {
                "source": {"type": "string"},
                "version": {"type": "string"},
                "executedAt": _TIME,
                "retrievedAt": _TIME,
                "dataVersion": {"type": ["string", "null"]},
                "invocationId": {"type": "string"},
                "timestamp": _TIME,
                "freshness": {"enum": ["compute", "replay", "preview", "cache", "synthetic"]},
                "confidence": {"type": "number", "minimum": 0, "maximum": 1},
            },
            "required": [
                "source", "retrievedAt", "dataVersion", "invocationId", "timestamp", "freshness", "confidence",
            ],
        },
        "execution": {
            "type": "object",
            "properties": {
                "executionDurationMs": {"type": "number", "minimum": 0},
                "resourceCost": {"type": "number", "minimum": 0},
            },
            "required": ["executionDurationMs", "resourceCost"],
        },
    },
    "required": ["data", "pagination", "provenance", "execution"],
}  # fmt: skip


@step
# many methods: the public result of a call; most are properties that read one field
class Result(Generic[T_co]):
    """The outcome of one call. `value` is the tool's result as JSON data; `error` says why there is none."""

    invocation_id: str
    tool: str
    state: State
    created_ms: int
    trace_id: str
    metadata: Mapping[str, Any]
    value: Any = None
    error: Failure | None = None
    source: Source = "compute"
    persistence: Persistence = INLINE
    redacted: tuple[str, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    # Makes of `value` what the function declares to return, if that is more than JSON data.
    load: Callable[[Any], Any] | None = None

    @property
    def ok(self) -> bool:
        """Whether the call succeeded."""
        return self.error is None

    @property
    def pending(self) -> bool:
        """Whether the call waits for a person: it has not failed, and it has not run."""
        return self.state == "awaiting_approval"

    @property
    def replayed(self) -> bool:
        """Whether this is the result of an earlier call under the same idempotency key; nothing ran again."""
        return self.source == "replay"

    def without_modifiers(self) -> Result[T_co]:
        """The result of a call that overlapped others: changes of the context are removed, with a warning."""
        if "context_modifiers" not in self.metadata:
            return self
        metadata = {name: value for name, value in self.metadata.items() if name != "context_modifiers"}
        warnings = [*self.metadata.get("warnings", ()), "CONTEXT_MODIFIERS_REFUSED"]
        return replace(self, metadata={**metadata, "warnings": warnings})

    def unwrap(self) -> T_co:
        """Return the value, or raise the failure.

        Of a call by name it is JSON data; of a call by the declared tool it is what the function declares to return.
        """
        if self.error is not None:
            raise self.error
        value: Any = self.value
        return value if self.load is None or self.source == "preview" else self.load(value)

    def text(self) -> str:
        """The text for a model: the value, a preview of it with a reference, or the reason why there is none."""
        if self.error is not None:
            return f"{self.error.row.error_code}: {self.error.message}"
        return self._views.get("model") or self._original()

    @property
    def _views(self) -> Mapping[str, str]:
        """The views of the result that the tool provided."""
        return self.metadata.get("views") or {}

    @property
    def content(self) -> Sequence[Json]:
        """The items of content that the tool added to its result."""
        return self.metadata.get("content") or ()

    @property
    def handoffs(self) -> Sequence[Json]:
        """The references with which the call hands work over. None of them grants anything."""
        return self.metadata.get("handoffs") or ()

    def _original(self) -> str:
        """The value as text, or its beginning with a reference."""
        stored, value, shown = self.persistence.ref is not None, self.value, self.persistence.shown
        if stored and self.persistence.private:
            at = self.persistence.reason if self.persistence.decision == "link" else f"kept as {self.persistence.ref}"
            return f"(private: {self.persistence.size} characters, {at})"
        if stored:
            # Only its beginning is shown. Further characters or values cannot be among so many characters of JSON.
            value = Shortener(characters=shown, values=shown).shorten(value)
        rendered = value if isinstance(value, str) else encode(value).decode()
        if not stored:
            return rendered
        if self.persistence.decision == "link":
            return f"{rendered[:shown]}… ({self.persistence.size} characters, {self.persistence.reason})"
        return f"{rendered[:shown]}… ({self.persistence.size} characters, kept as {self.persistence.ref})"

    def summary(self) -> str:
        """One line for people."""
        if self.error is not None:
            message = self.error.message
            return message if message.startswith(f"{self.tool} ") else f"{self.tool} {self.state}: {message}"
        if self._views.get("summary"):
            return self._views["summary"]
        how = {"replay": " (replayed)", "preview": " (preview)", "synthetic": " (synthetic)"}.get(self.source, "")
        return f"{self.tool} {self.state}{how}"

    def envelope(self) -> Json:
        """The success envelope: data apart from pagination, provenance and execution metadata."""
        page: Mapping[str, Any] = self.metadata.get("pagination") or {}
        return {
            "data": self.value,
            "pagination": {key: page[key] for key in ("cursor", "hasMore", "totalCount") if key in page} or None,
            **self._origin(),
        }

    def about(self) -> Json:
        """The source of a success, its duration and cost, and what was removed from it. Every protocol carries it."""
        return {**self._origin(), "redaction_state": self.redaction_state}

    @property
    def redaction_state(self) -> Json:
        """Whether anything was removed from the value before it was returned, and where, as JSON pointers."""
        return {"redacted": bool(self.redacted), "paths": list(self.redacted)}

    def _origin(self) -> Json:
        source, _, version = self.tool.partition("@")
        metadata, at = self.metadata, iso(self.created_ms)
        took, cost = metadata.get("latency_ms", 0), metadata.get("cost", 0)
        return {
            "provenance": {
                "source": source,
                "version": version,
                "executedAt": metadata.get("executed_at", at),
                "retrievedAt": at,
                "dataVersion": metadata.get("data_version"),
                "invocationId": self.invocation_id,
                "timestamp": at,
                "freshness": self.source,
                "confidence": metadata.get("confidence", 1.0),
            },
            "execution": {"executionDurationMs": took, "latencyMs": took, "resourceCost": cost, "cost": cost},
        }

    def _rendering(self) -> Json:
        """The views for people. A refusal is not an error of the call: a person or a rule said no."""
        error = self.error
        rejected = error is not None and (self.pending or error.row.error_class in _REJECTIONS)
        words = None if error is None else error.message
        return {
            "progress": self.metadata.get("progress"),
            "rejection": words if rejected else None,
            "error": None if rejected else words,
            "grouped": self.summary(),
            "expanded": "\n".join(filter(None, (self.text() if error else self._original(), words_of(self.content)))),
        }

    def _search_text(self) -> str:
        """The text that a search of a transcript covers: the tool, the outcome, and the words that the tool gave."""
        text = self._views.get("search") or words_of(self.content)[:PREVIEW_CHARS]
        return f"{self.summary()}\n{text}".strip()

    def document(self) -> Json:
        """The tool_result of the standard, with the error envelope and metadata beside it."""
        stored = self.persistence.ref is not None
        content: list[Json]
        if stored:
            content = [{"type": "persisted_ref", "ref": self.persistence.ref, "preview": self._original()}]
        else:
            content = [{"type": "text", "text": self.text() if self.error is not None else self._original()}]
        left = [
            {"type": "artifact_ref", "ref": one.ref, "path": one.path, "size_bytes": one.size, "sha256": one.sha256}
            for one in self.artifacts
        ]
        envelope = self.envelope() if self.ok else None
        waiting = {"pending": self.metadata["pending"]} if self.pending else {}
        return {
            **waiting,
            "schema_version": "0.2.0",
            "result_id": f"res_{self.invocation_id}",
            "invocation_id": self.invocation_id,
            "status": self.state,
            "history_status": "pending" if self.pending else HISTORY.get(self.state, "error"),
            "is_error": not self.ok and not self.pending,
            "content": [*content, *self.content, *left],
            "structured_content": None if stored or not self.ok else self.value,
            "model_facing_content": [{"type": "text", "text": self.text()}, *for_models(self.content), *left],
            "ui_facing_summary": self.summary(),
            "ui_facing_rendering": self._rendering(),
            "resource_refs": [one["uri"] for one in self.content if one["type"] in _RESOURCES],
            "artifact_refs": [one.ref for one in self.artifacts],
            "evidence_refs": [f"journal:{self.invocation_id}"],
            "policy_refs": list(self.metadata.get("policy_refs", ())),
            "telemetry_refs": [f"trace:{self.trace_id}"],
            "persistence_refs": [self.persistence.ref] if stored else [],
            "persisted_payload_ref": self.persistence.ref,
            "handoff_refs": list(self.handoffs),
            "summary": self.summary(),
            "transcript_search_text": self._search_text(),
            "redaction_state": self.redaction_state,
            "created_at": iso(self.created_ms),
            "error": None if self.error is None else self.error.envelope(self.trace_id),
            "metadata": {
                **{name: one for name, one in self.metadata.items() if name not in _BESIDE},
                "replayed": self.replayed,
                "source": self.source,
                "synthetic": self.source == "synthetic",
                "tool": self.tool,
                "persistence": self.persistence.document(self.invocation_id),
                **(
                    {}
                    if envelope is None
                    else {"provenance": envelope["provenance"], "execution": envelope["execution"]}
                ),
                **({"pagination": envelope["pagination"]} if envelope and envelope["pagination"] else {}),
            },
        }

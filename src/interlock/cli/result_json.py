"""The result of a call as `--json` prints it: the tool_result of the other interfaces, with every fact in it once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlock.call.results import Result

Json = dict[str, Any]

# Fields of a tool_result that are made of its other fields.
_DERIVED = frozenset({
    "schema_version", "result_id", "history_status", "model_facing_content", "ui_facing_summary",
    "ui_facing_rendering", "resource_refs", "artifact_refs", "evidence_refs", "persistence_refs",
    "persisted_payload_ref", "transcript_search_text",
})  # fmt: skip
# The same of its metadata: facts with a field of their own.
_DERIVED_METADATA = frozenset({"pending", "policy_refs", "synthetic", "execution"})
# What the provenance of a success says under its own names.
_IN_PROVENANCE = frozenset({"executed_at", "data_version", "confidence"})
_OF_PROVENANCE = ("executedAt", "dataVersion", "confidence")
# Its reference is an item of the content.
_OF_PERSISTENCE = ("decision", "size_chars", "reason")


def result_json(result: Result) -> Json:
    """The document of a result without repetition. Scripts read one place for each fact, and people read less.

    The envelope of an error is as everywhere: its message has the two names that readers of either standard look for,
    and `details.faults` has each fault apart, with its place, where a message joins them all.
    """
    whole = result.document()
    document = {name: value for name, value in whole.items() if name not in _DERIVED}
    # The first item is the value or the error as text, unless the value is stored: then it is the reference to it.
    document["content"] = [one for one in whole["content"][:1] if one["type"] != "text"] + whole["content"][1:]
    error: Json | None = whole["error"]
    if error is not None:
        del document["summary"]  # the tool, the status and the message of the error
        if result.pending:
            document["error"] = {name: value for name, value in error.items() if name != "details"}
    views: Json = result.metadata.get("views") or {}
    if own := {name: text for name, text in views.items() if name != "summary"}:
        document["views"] = own
    document["metadata"] = _metadata(whole["metadata"], result.metadata.get("progress"))
    return document


def _metadata(whole: Json, progress: Any) -> Json:
    provenance: Json | None = whole.get("provenance")
    dropped = _DERIVED_METADATA if provenance is None else _DERIVED_METADATA | _IN_PROVENANCE
    metadata = {name: value for name, value in whole.items() if name not in dropped}
    metadata["persistence"] = {name: whole["persistence"][name] for name in _OF_PERSISTENCE}
    if provenance is not None:
        metadata["provenance"] = {name: provenance[name] for name in _OF_PROVENANCE}
    if progress is not None:
        metadata["progress"] = progress
    return metadata

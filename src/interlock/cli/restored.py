"""Results and tickets, restored from the documents in which a server tells of them, so that one page shows both."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any, cast

from interlock.call.artifacts import recalled
from interlock.call.results import INLINE, Persistence, Result
from interlock.cli.remote import failure_of
from interlock.core.errors import Failure
from interlock.data.schema import Json

# What the answer to a call has beside its metadata, by the names that the metadata has for it.
_METADATA = {
    "latency_ms": "execution_time_ms", "cost": "cost", "approval": "approval", "executed_at": "executed_at",
    "confidence": "confidence", "pagination": "pagination", "warnings": "warnings", "hook_outputs": "hook_outputs",
    "deprecation": "deprecation", "content": "content", "handoffs": "handoffs",
}  # fmt: skip
# Of those, the ones that a result has only where there is something to tell.
_OPTIONAL = frozenset({"approval", "pagination", "warnings", "hook_outputs", "deprecation", "content", "handoffs"})


def result_of(status: int, document: Json) -> Result:
    """The result that the answer to a call tells of; raises the failure of an answer that tells of no call."""
    failure = failure_of(document)
    if failure is not None and "tool_result" not in document:
        raise failure
    if failure is not None:
        return _failed(failure, document)
    if status == 202 and "pending" in document:
        return _pending(document)
    if document.get("status") != "success":
        raise Failure("E3502", f"the server answered {status} without a result")
    metadata = {name: document[key] for name, key in _METADATA.items() if name not in _OPTIONAL or document.get(key)}
    ref = document.get("payload_ref")
    persistence = INLINE if ref is None else Persistence(decision="preview", ref=ref, size=_size(document))
    return Result(
        invocation_id=document["invocation_id"],
        tool=f"{document['tool_id']}@{document['tool_version']}",
        state=document["state"],
        created_ms=_ms(document["retrieved_at"]),
        trace_id=document["trace_id"],
        metadata=metadata,
        value=document["result"],
        source=document["source"],
        persistence=persistence,
        redacted=tuple(document["redaction_state"]["paths"]),
        artifacts=recalled(document["artifacts"]),
    )


def _failed(failure: Failure, document: Json) -> Result:
    outcome = cast("Json", document["tool_result"])
    metadata = cast("Json", outcome["metadata"])
    return Result(
        invocation_id=outcome["invocation_id"],
        tool=metadata["tool"],
        state=outcome["status"],
        created_ms=_ms(outcome["created_at"]),
        trace_id=document["error"]["traceId"],
        metadata={**metadata, "policy_refs": outcome["policy_refs"]},
        error=failure,
        source=metadata["source"],
    )


def _pending(document: Json) -> Result:
    waits = cast("Json", document["pending"])
    return Result(
        invocation_id=document["invocation_id"],
        tool=f"{document['tool_id']}@{document['tool_version']}",
        state="awaiting_approval",
        created_ms=time.time_ns() // 1_000_000,
        trace_id=document["trace_id"],
        metadata={"pending": waits, "hook_outputs": document.get("hook_outputs") or ()},
        error=Failure("E3208", str(waits.get("reason"))),
        source="synthetic",
    )


def _size(document: Json) -> int:
    """The length of a stored result, from the end of its preview: … (12345 characters, kept as …)."""
    words = str(document.get("preview") or "").rpartition("(")[2].partition(" characters")[0]
    return int(words) if words.isdecimal() else 0


def _ms(stamp: Any) -> int:
    return round(datetime.fromisoformat(str(stamp)).timestamp() * 1000)

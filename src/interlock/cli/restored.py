"""Results and tickets, restored from the documents in which a server tells of them, so that one page shows both."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any, cast

from interlock.approvals.standing import Standing
from interlock.approvals.ticket import Shown, Step, Ticket
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


def ticket_of(document: Json) -> Ticket:
    """The ticket that a document tells of, as far as pages show it."""
    asked_ms = _ms(document["requestedAt"])
    steps = cast("list[Json]", document["escalationChain"])
    edit = cast("Json | None", document.get("edit"))
    changed: Json | None = None
    if edit is not None:
        names = [one["argument"] for one in edit["changes"]]
        changed = {"params": edit["params"], "preview": edit["preview"], "names": names}
    return Ticket(
        id=document["id"],
        call=document["invocation_id"],
        scope=b"",
        tool=document["toolId"],
        version=document["version"],
        operation=document["operation"],
        tenant="",
        caller=document["callerId"],
        requester=document["requestedBy"],
        digest=document["input_digest"],
        policy=document["policy"],
        reason=document["reason"],
        chain=tuple(Step(one["group"], _ms(one["at"]) - asked_ms) for one in steps),
        shown=Shown(document["params"], document["preview"], changed),
        head={"mutationClass": document.get("mutation_class")},
        sealed=None,
        expires_ms=_ms(document["expiresAt"]),
        created_ms=asked_ms,
        state=document["status"],
        step=max(sum(bool(one["notified"]) for one in steps) - 1, 0),
        resolved_ms=None if document["resolvedAt"] is None else _ms(document["resolvedAt"]),
        resolved_by=document["resolvedBy"],
        comment=document["comment"],
        edited=b"" if document["user_modified"] else None,
    )


def standing_of(document: Json) -> Standing:
    """The standing approval that a document tells of."""
    return Standing(
        id=document["id"],
        tenant=document["tenant"],
        tool=document["tool"],
        versions=document["versions"],
        arguments=document["arguments"],
        caller=document["caller"],
        uses=document["uses"],
        expires_ms=_ms(document["expiresAt"]),
        granted_by=document["grantedBy"],
        used=document["used"],
        revoked_ms=0 if document["revoked"] else None,
    )


def _ms(stamp: Any) -> int:
    return round(datetime.fromisoformat(str(stamp)).timestamp() * 1000)

"""Permission decisions, read from the ledger: the decision on a call, who made it, and why.

Each permission check is stored once, in a record that its call has anyway: a `pending` record holds a check that ended
with a question to a person, a `closed` record the last check of its call. The record's `decision` has behavior, mode,
source, reason, end and the path that was refused or asked about; rules, policy, call and time are fields of the record;
a reviewer's changes and comments are in the ticket's `approval` records. Fields that a record does not have are empty
in the document.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from interlock.core.errors import CODES, ErrorClass
from interlock.data.canonical import digest
from interlock.data.schema import Json

_BEHAVIOR = {"ALLOW": "allow", "DENY": "deny", "REQUIRES_APPROVAL": "ask"}
_DENIALS = frozenset(
    {ErrorClass.PERMISSION_DENIED, ErrorClass.POLICY_BLOCKED, ErrorClass.HOOK_BLOCKED, ErrorClass.APPROVAL_REJECTED}
)


def decisions_of(records: Sequence[Json]) -> list[Json]:
    """Build the tool_permission_decisions of one call, oldest first, from all its records."""
    approvals = [record for record in records if record.get("kind") == "approval"]
    checked = (record for record in records if record.get("kind") in ("pending", "closed"))
    return [decision for record in checked if (decision := decision_of(record, approvals)) is not None]


def decision_of(record: Json, approvals: Iterable[Json] = ()) -> Json | None:
    """Build the tool_permission_decision of a pending or closed record; None for a call that ended before the check.

    `approvals` are `approval` records, of which those of the call's own ticket are read.
    """
    behavior, source, reason = _judged(record)
    if behavior is None:
        return None
    ticket = record.get("approvalTicketId")
    agreed: Json = {}
    if ticket is not None and record["kind"] == "closed":
        for one in approvals:
            if one.get("approvalTicketId") == ticket and one["act"] in ("approved", "denied"):
                agreed = one
    decision: Json = record.get("decision") or {}
    return {
        "schema_version": "0.2.0",
        "decision_id": f"dec_{digest(record)[:32]}",
        "invocation_id": record["call"],
        "behavior": behavior,
        "mode": decision.get("mode", "dry_run" if record.get("operation") == "preview" else "enforce"),
        "source": source,
        "reason": reason,
        "rule_refs": list(record.get("rules") or ()),
        "policy_refs": [record["policy"]] if record.get("policy") else [],
        "updated_input": agreed.get("edited"),
        "user_modified": bool(agreed.get("user_modified")),
        "suggested_updates": [],
        "pending_classifier_check": False,
        "blocked_path": None if behavior == "allow" else decision.get("blocked_path"),
        "content_blocks": [],
        "accept_feedback": agreed.get("comment") or None,
        "decided_at": _decided_at(record),
        "expires_at": decision.get("expires_at"),
    }


def _decided_at(record: Json) -> str:
    """Return the time of a check: when its call began, which a closing record has in its latency."""
    latency_ms = record.get("latencyMs")
    if not isinstance(latency_ms, int | float):
        return record["timestamp"]
    began = datetime.fromisoformat(record["timestamp"]) - timedelta(milliseconds=latency_ms)
    return began.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _judged(record: Json) -> tuple[str | None, str, str]:
    """Return the result of a check, who decided it, and why."""
    decision: Json = record.get("decision") or {}
    source, reason = decision.get("source", "policy"), decision.get("reason", "")
    behavior = _BEHAVIOR.get(record.get("authDecision") or "")
    error = record.get("error_class")
    if error == ErrorClass.APPROVAL_REJECTED:
        return "deny", "approval", record.get("reason") or CODES[record["error_code"]].title
    if error in _DENIALS and "execute" not in record.get("phases", ()):
        has_decision = behavior == "deny" and bool(decision)
        return (
            "deny",
            source if has_decision else "gateway",
            reason if has_decision else CODES[record["error_code"]].title,
        )
    if behavior == "ask" and record["kind"] == "closed" and record.get("approvalTicketId") is not None:
        return "allow", "approval", reason
    return behavior, source, reason

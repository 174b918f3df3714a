"""The REST form of the outcome of a call.

200   {"invocation_id", "status": "success", "state", "result", "execution_time_ms", …}
202   the call runs in the background, or waits for a person: {"invocation_id", "status": "running" | "pending", …}
else  {"error": the envelope, "detail": "E3204: …", "invocation_id", "tool_result", …} with the error table's status
"""

from __future__ import annotations

from typing import Any, cast

from interlock.call.results import Result
from interlock.contract.standard.states import HISTORY, State
from interlock.core.clock import iso
from interlock.core.errors import Failure
from interlock.data.canonical import encode
from interlock.data.schema import Json
from interlock.http.asgi import refusal, retry_after
from interlock.http.route import Reply

_CHALLENGE = ((b"www-authenticate", b'Bearer realm="interlock"'),)


def of_result(result: Result) -> Reply:
    """The reply to a call that came to an end, or to a person."""
    failure = result.error
    if failure is None:
        return Reply(200, encode(success(result)))
    if result.pending:
        return Reply(202, encode(pending(result)), ((b"location", b"/v1/calls/" + result.invocation_id.encode()),))
    facts = {"invocation_id": result.invocation_id, "tool_result": result.document(), **_outcome(result)}
    return of_failure(failure, result.trace_id, **facts)


def of_failure(failure: Failure, trace_id: str, **facts: Any) -> Reply:
    """The reply to what was refused or failed."""
    headers = retry_after(failure)
    if failure.row.http == 401:
        headers += _CHALLENGE
    return Reply(failure.row.http, encode({**refusal(failure, trace_id), **facts}), headers)


def running(call_id: str) -> Reply:
    """The reply to a call that goes on in the background."""
    where = f"/v1/calls/{call_id}"
    body: Json = {
        "invocation_id": call_id,
        "status": "running",
        "state": "running",
        "poll": where,
        "events": f"{where}/events",
    }
    return Reply(202, encode(body), ((b"location", where.encode()),))


def success(result: Result) -> Json:
    """The data, and beside it where it comes from, what it cost and what page it is."""
    metadata = result.metadata
    name, _, version = result.tool.partition("@")
    ref = result.persistence.ref
    latency_ms = metadata.get("latency_ms", 0)
    at = iso(result.created_ms)
    return {
        "invocation_id": result.invocation_id,
        "status": "success",
        "state": result.state,
        "tool_id": name,
        "tool_version": version,
        "result": result.value if ref is None else None,
        "execution_time_ms": latency_ms,
        "cost": metadata.get("cost", 0),
        "approval": metadata.get("approval"),
        "trace_id": result.trace_id,
        "source": result.source,
        "replayed": result.replayed,
        "executed_at": metadata.get("executed_at", at),
        "retrieved_at": at,
        "confidence": metadata.get("confidence", 1.0),
        "pagination": metadata.get("pagination"),
        "warnings": metadata.get("warnings", ()),
        "hook_outputs": metadata.get("hook_outputs", ()),
        "deprecation": metadata.get("deprecation"),
        "artifacts": [one.document() for one in result.artifacts],
        "content": result.content,
        "handoffs": result.handoffs,
        "payload_ref": ref,
        "preview": None if ref is None else result.text(),
        **result.about(),
    }


def pending(result: Result) -> Json:
    """The answer while a person decides."""
    where = f"/v1/calls/{result.invocation_id}"
    return {
        "invocation_id": result.invocation_id,
        "status": "pending",
        "state": result.state,
        "tool_id": result.tool.partition("@")[0],
        "tool_version": result.tool.partition("@")[2],
        "trace_id": result.trace_id,
        "pending": result.metadata["pending"],
        "hook_outputs": result.metadata.get("hook_outputs", ()),
        "poll": where,
        "resume": f"/v1/tools/resume/{result.invocation_id}",
    }


def of_status(status: Json, result: Result | None) -> Json:
    """The state of a call, with its outcome while that is stored."""
    state = str(status["status"])
    document: Json = {
        **{name: value for name, value in status.items() if name not in ("result", "status")},
        "state": state,
        "status": "pending" if state == "awaiting_approval" else HISTORY.get(cast("State", state), "running"),
    }
    if result is None:
        return document
    if result.pending:
        return {**document, **pending(result)}
    if result.error is None:
        return {**document, **success(result)}
    told = {"tool_result": result.document(), **_outcome(result), "trace_id": result.trace_id}
    return {**document, **refusal(result.error, result.trace_id), **told}


def _outcome(result: Result) -> Json:
    return {"status": HISTORY.get(result.state, "error"), "state": result.state}

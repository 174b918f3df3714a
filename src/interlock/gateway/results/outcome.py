"""The outcomes of failed calls: the state in which a call ends, and the settlement of its idempotency key."""

from __future__ import annotations

from interlock.call.phases import Call
from interlock.contract.effects import Change
from interlock.contract.standard.states import MOVES, State
from interlock.core.errors import CODES, ErrorClass, ErrorCode, Failure
from interlock.data.schema import Json
from interlock.effects.session import SessionState
from interlock.gateway.idempotency import Settlement

_STATE_OF_CLASS: dict[ErrorClass, State] = {
    ErrorClass.TIMEOUT: "timed_out",
    ErrorClass.CANCELED: "canceled",
    ErrorClass.SIBLING_CANCELED: "canceled",
    ErrorClass.STREAMING_FALLBACK_DISCARDED: "canceled",
    ErrorClass.HOOK_BLOCKED: "blocked",
    ErrorClass.POLICY_BLOCKED: "blocked",
    ErrorClass.SCHEMA_NOT_LOADED: "blocked",
    ErrorClass.PERMISSION_DENIED: "denied",
    ErrorClass.APPROVAL_REJECTED: "denied",
}
# Details of a failure by which an upstream says that it has not run the tool.
_NOT_RUN = frozenset(("inputRequired", "requiredCapabilities", "preconditionFailed"))
# Failures of an upstream that leave open whether it made the change.
_MAYBE_DONE = frozenset(("E3001", "E3502", "E3503"))


def terminal_state(failure: Failure, current: State) -> State:
    """Return the state in which a failed call ends, as far as the state table allows it."""
    wanted = _STATE_OF_CLASS.get(failure.row.error_class, "failed")
    if failure.row.error_code is ErrorCode.INVALID_INPUT and wanted == "failed":
        wanted = "schema_parse_failed" if failure.code == "E3004" else "validation_failed"
    return wanted if wanted in MOVES[current] else "failed"


def settlement(call: Call, failure: Failure, state: State) -> Settlement | None:
    """Return how the key is settled: done with the failure, released for a retry, or blocked as unknown."""
    if call.more.scope is None or call.tool is None:
        return None
    if not call.launched:
        return "released"
    if call.tool.remote and not _NOT_RUN.isdisjoint(failure.details or {}):
        return "released"  # the upstream did not run the tool: it asks first, or something does not hold
    manifest = call.tool.contract.manifest
    reported: list[Change] = [] if call.more.context is None else call.more.context.changes
    cut_off = state in ("timed_out", "canceled")
    may_run_again = manifest.restart_safe and not _would_refuse_itself(call)
    if effect_stands(call) or (not cut_off and not failure.retryable):
        return "done"
    # INVARIANT: a retry may run again only when nothing was changed.
    if call.returned:
        # The tool did its work; only its changes of the session were not written.
        session_only = all(effect.resource.startswith("session:") for effect in manifest.effects)
        return "released" if failure.code == "E3410" and session_only and not reported else "unknown"
    if call.more.runs_on or reported or (cut_off and not may_run_again):
        return "unknown"
    if call.tool.remote and failure.code in _MAYBE_DONE and not may_run_again:
        # The upstream may have made the change before the connection was lost, unless nothing was sent at all.
        return "released" if (failure.details or {}).get("sent") is False else "unknown"
    return "released"


def _would_refuse_itself(call: Call) -> bool:
    """Whether a call is for one version of what it changes: run again, it would find the one that it has made."""
    execution = None if call.tool is None else call.tool.contract.manifest.execution
    if execution is None:
        return False
    from interlock.call.conditional import is_conditional

    undo = execution.undo if call.request.operation == "compensate" else None
    return is_conditional(execution.native if undo is None else undo.native, call.input or {})


def effect_stands(call: Call) -> bool:
    """Whether the tool of a call has returned and its effect is confirmed, and only its hooks were cut short."""
    return call.more.scope is not None and call.state == "post_hooks_running" and not call.recorded


def carried_out(call: Call, failure: Failure) -> Failure:
    """Return the failure of a write that a hook stopped, or that failed in a hook, after its effect."""
    manifest = None if call.tool is None else call.tool.contract.manifest
    undo = (
        f"; to undo it: interlock calls undo {call.id} --key YOUR-KEY"
        if manifest is not None and manifest.compensable
        else ""
    )
    return Failure(
        failure.code,
        f"{failure.message}; the call was carried out, and only its result is withheld",
        details={**(failure.details or {}), "invocation_id": call.id, "executed": True},
        policy_refs=failure.policy_refs,
        evidence_refs=(*failure.evidence_refs, f"journal:{call.id}"),
        resolution=f"do not send it again: its effect stands, and its key answers with this failure{undo}",
        unsettled=True,
    )


# The label of a synthetic result: what cut the call short.
_CAUSE = {"E3402": "timeout", "E3412": "sibling_error", "E3413": "fallback", "E3703": "user_interruption"}


def synthetic_cause(call: Call, failure: Failure, state: State) -> str | None:
    """Return what cut a call short, so that its result is synthetic; None if the result is the call's own."""
    if state not in ("timed_out", "canceled"):
        return None
    if call.more.why == "discarded":
        return "discarded_execution"
    return _CAUSE.get(failure.code, "timeout" if state == "timed_out" else "user_interruption")


def with_cause(call: Call, failure: Failure, cause: str | None) -> Failure:
    """Return a failure with the hook outputs and the cause in its details, as every protocol carries them."""
    more: Json = {} if cause is None else {"synthetic_cause": cause}
    if call.more.hook_outputs:
        more["hook_outputs"] = call.more.hook_outputs
    return failure.saying(failure.message, {**(failure.details or {}), **more}) if more else failure


def broken(call: Call) -> Settlement | None:
    """Return how the key of a call that could not be closed is settled: unknown if its tool was started."""
    if call.more.scope is None:
        return None
    return "unknown" if call.launched else "released"


def unsettled(call: Call, failure: Failure) -> Failure:
    """Return the failure of a call that may have taken effect, which says that it must not be sent again."""
    doubt = "whether it took effect is unknown; never send it under another key"
    return Failure(
        failure.code,
        f"{failure.message}: {doubt}; a person settles it with: interlock calls reconcile {call.id}",
        details={**(failure.details or {}), "invocation_id": call.id, "outcome": "unknown"},
        native_error_ref=failure.native_error_ref,
        policy_refs=failure.policy_refs,
        evidence_refs=(*failure.evidence_refs, f"journal:{call.id}"),
        resolution=CODES["E3409"].resolution,
        unsettled=True,
    )


def stored(failure: Failure) -> Json:
    """Return a failure as its key keeps it, for replays."""
    details = None if failure.details is None else dict(failure.details)
    return {"error": {"code": failure.code, "message": failure.message, "details": details}}


def left_nothing(call: Call, metadata: Json) -> bool:
    """Whether a read with a context has changed nothing and attached nothing."""
    context, more = call.more.context, call.more
    changed = context is not None and isinstance(context.session, SessionState) and context.session.changed
    return not (changed or more.changes or more.detected or more.previewed or "handoffs" in metadata)

"""The records of the journal: the content of each kind, without anything that must not be recorded.

Inputs appear as hashes, outputs as summaries, values of changes redacted or hashed. A record is canonical JSON that
names its own kind and call, so the chain covers all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, cast

import orjson

from interlock.contract.standard.states import FAST_PATH_STATES, HISTORY
from interlock.core.clock import iso
from interlock.core.errors import ErrorCode, Failure
from interlock.data.canonical import canonical

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.call.phases import Call, Decision, Verified
    from interlock.call.prepared import Prepared
    from interlock.call.results import Persistence
    from interlock.contract.effects import Change
    from interlock.contract.standard.states import State
    from interlock.data.schema import Json

Kind = Literal[
    "started", "intent", "closed", "mutation", "late", "settled", "cancel", "registry", "audit.read", "purge",
    "pending", "approval", "authority", "violation", "checkpoint", "signing", "search", "selection", "surface",
]  # fmt: skip

_DECISION = {"allow": "ALLOW", "deny": "DENY", "ask": "REQUIRES_APPROVAL"}
_STATUS = {"success": "SUCCESS", "timeout": "TIMEOUT"}
_DUMP = orjson.OPT_SORT_KEYS


def head(call: Call, at_ms: int) -> Json:
    """The fields every record of a call has, but for its kind."""
    request, contract = call.request, (None if call.tool is None else call.tool.contract)
    caller = request.caller
    record: Json = {
        "call": call.id,
        "timestamp": iso(at_ms),
        "traceId": call.trace_id,
        "callerId": None if caller is None else caller.id,
        "agentId": None if caller is None else caller.agent,
        "tenant": None if caller is None else caller.tenant,
        "toolId": request.tool if contract is None else contract.address,
        "version": None if contract is None else contract.version,
        "operation": "preview" if request.dry_run else request.operation,
        "inputHash": call.input_hash,
        "mutationClass": None if contract is None else contract.mutation.mutation_class,
        "door": request.door,
    }
    if contract is None and request.version is not None:
        record["versionSpec"] = request.version
    if request.parent is not None:
        record["parent"] = request.parent
    if request.native:
        record["native"] = dict(request.native)
    if request.key is not None:
        record["idempotencyKey"] = request.key
        if request.key == request.identity:
            record["keyFrom"] = "request"
    elif call.tool is not None and call.tool.key_from == "each" and request.operation == "invoke":
        # INVARIANT: no key is made up for a caller; the record says that a resend would have run again.
        record["resendProtection"] = "none"
    if request.session:
        record["session"] = request.session
    if request.task is not None:
        record["task"] = request.task
    if call.more.resources is not None:
        record["resources"] = list(call.more.resources)
    if caller is not None and caller.capability is not None and caller.capability.bound:
        # Its holder finds the call again by the token, even where the call named no resource.
        record["token"] = caller.capability.leaf.jti
    return record


def intent(call: Call, at_ms: int, predicted: tuple[Change, ...], window_s: int) -> bytes:
    """The record of a call's intent, durable before the tool runs."""
    call.more.head = head(call, at_ms)
    record: Json = {**call.more.head, "kind": "intent"}
    if call.decision is not None:
        record["policy"] = call.decision.policy
        record["rules"] = call.decision.rules
    if call.more.approval is not None:
        record["approvalTicketId"] = call.more.approval
    if call.more.approval_outcome is not None:
        record["approval"] = call.more.approval_outcome
    record["predicted"] = [{"resource": change.resource, "operation": change.operation} for change in predicted]
    record["authDecision"] = None if call.decision is None else _DECISION[call.decision.behavior]
    # How long the key answers with what comes of it, so that the verifier knows until when its row must be there.
    record["keyWindowS"] = window_s
    return encode(record)


def started(call: Call, at_ms: int) -> bytes:
    """The record of a call that takes long."""
    facts = {"authDecision": _decision(call), "approvalTicketId": call.more.approval}
    return encode({**head(call, at_ms), "kind": "started", **facts})


def rest_of_start(call: Call) -> str:
    """The record of a read that starts, for `started_reads`: its members besides id, trace and hash of the input.

    Most reads have nothing there that others of their caller and tool have not, so that is encoded once.
    """
    request, decision, tool = call.request, call.decision, call.tool
    caller, more = request.caller, call.more
    if (
        caller is not None and decision is not None and tool is not None and more.approval is None
        and more.resources is None and request.key is None and request.task is None and request.parent is None
        and not request.dry_run and not request.session and request.operation == "invoke"
        and (caller.capability is None or not caller.capability.bound)
    ):  # fmt: skip
        rest = rest_of_read(decision, tool, caller, request.door, request.native)
        if rest is not None:
            return rest
    record = head(call, 0)
    for name in ("call", "timestamp", "traceId", "inputHash"):
        del record[name]
    record |= {"authDecision": _decision(call), "approvalTicketId": more.approval}
    return encode(record).decode()[1:-1]


def closed(
    call: Call,
    at_ms: int,
    *,
    state: State,
    latency_ms: float,
    source: str,
    summary: Json | None,
    effects: tuple[Change, ...] = (),
    failure: Failure | None = None,
    extra: Mapping[str, Any] | None = None,
    common: Json | None = None,
) -> bytes:
    """The closing record: how a call ended. Every call has exactly one. `common` is its `head`, if that is made."""
    record: Json = {**(common or head(call, at_ms)), "kind": "closed"}
    history = HISTORY.get(state, "error")
    decision = call.decision
    record["authDecision"] = None if decision is None else _DECISION[decision.behavior]
    if decision is None and failure is not None and failure.row.error_code is ErrorCode.AUTHORIZATION_DENIED:
        record["authDecision"] = "DENY"  # refused before any rule was asked: a token that does not hold, for example
    record["approvalTicketId"] = call.more.approval
    record["latencyMs"] = latency_ms
    record["status"] = _STATUS.get(history, "ERROR")
    record["outputSummary"] = summary
    record["sideEffects"] = [{"resource": change.resource, "operation": change.operation} for change in effects]
    record["source"] = source
    record["states"] = [*call.states, state]
    record["phases"] = call.phases
    record["errorCode"] = None
    if decision is not None:
        record["policy"] = decision.policy
        record["rules"] = decision.rules
        record["decision"] = decided(decision, looking=call.request.dry_run)
    if call.more.approval_outcome is not None:
        record["approval"] = call.more.approval_outcome
    if failure is not None:
        record["errorCode"] = failure.row.error_code.value
        record["error_code"] = failure.code
        record["error_class"] = failure.row.error_class.value
    if call.more.mutations:
        record["inputMutations"] = mutated(call)
    if call.more.hook_outputs:
        record["hookOutputs"] = call.more.hook_outputs
    if call.more.warnings:
        record["warnings"] = call.more.warnings
    if call.more.mappings:
        record["externalMappings"] = call.more.mappings
    if extra:
        record.update(extra)
    return encode(record)


def mutated(call: Call) -> list[Json]:
    """The source and the place of every difference between the inputs of a call."""
    return [{"source": change.source, "pointer": change.pointer} for change in call.more.mutations]


def _judged(call: Call, decision: Decision) -> Json:
    """The part of a closing record about the decision: the policy, the rules, and the outcome."""
    shown = decided(decision, looking=call.request.dry_run)
    return {"policy": decision.policy, "rules": decision.rules, "decision": shown}


def decided(decision: Decision, *, looking: bool) -> Json:
    """A permission decision in the form of a record. The record itself has its rules, policy, call and time."""
    facts: Json = {
        "behavior": decision.behavior,
        "mode": "dry_run" if looking else "enforce",
        "source": decision.source,
        "reason": decision.reason,
    }
    if decision.expires_ms is not None:
        facts["expires_at"] = iso(decision.expires_ms)
    if decision.blocked_path is not None:
        facts["blocked_path"] = decision.blocked_path
    if decision.obligations:
        facts["obligations"] = decision.obligations
    return facts


def ended(call: Call, at_ms: int, failure: Failure, outcome: str | None, latency_ms: float) -> bytes:
    """The closing record of a call that could not be closed regularly: it contains nothing that its tool reported."""
    record = {**head(call, at_ms), "kind": "closed"}
    record |= {"authDecision": _decision(call), "status": "ERROR", "source": "synthetic"}
    record |= {
        "approvalTicketId": call.more.approval,
        "latencyMs": latency_ms,
        "outputSummary": None,
        "sideEffects": [],
    }
    record |= {"states": [*call.states, "failed"], "errorCode": failure.row.error_code.value}
    record |= {"error_code": failure.code, "error_class": failure.row.error_class.value}
    if call.decision is not None:
        record |= _judged(call, call.decision)
    if call.more.approval_outcome is not None:
        record["approval"] = call.more.approval_outcome
    if outcome is not None:
        record["outcome"] = outcome
    return encode(record)


def closed_read(call: Call, at_ms: int, latency_ms: float, source: str, verified: Verified) -> bytes:
    """The closing record of a read that succeeded, as `closed` would write it, at a third of the price.

    Nearly all calls end here. What is the same for every such call of one caller, tool and decision is encoded once.
    """
    request, decision, tool = call.request, call.decision, call.tool
    caller = request.caller
    if (
        caller is None or decision is None or tool is None or call.more.mutations or call.more.warnings
        or call.more.hook_outputs or request.key is not None
        or request.parent is not None or request.dry_run or request.session
        or request.operation != "invoke" or call.more.approval is not None or request.task is not None
        or call.more.approval_outcome is not None or verified.more.redacted
        or (call.more.context is not None and (call.more.parts or not call.more.context.unused))
        or (caller.capability is not None and caller.capability.bound)
    ):  # fmt: skip
        # Facts that only some records have.
        return _closed_at_length(call, at_ms, latency_ms, source, verified)
    key = (decision, tool.digest, caller.id, caller.agent, caller.tenant, request.door)
    always = _ALWAYS.get(key) or _always(call, key)
    states = _PLAIN if call.states == _PLAIN_STATES else _states(tuple(call.states))
    try:
        rest = _native(request.native) + always
        if call.more.mappings:
            rest = f'"externalMappings":{canonical([*call.more.mappings]).decode()},{rest}'
    except (TypeError, Failure):  # not JSON, which a Python program or an upstream may have sent
        return _closed_at_length(call, at_ms, latency_ms, source, verified)
    value, size = verified.value, len(verified.encoded)
    return read(call.id, at_ms, call.trace_id, call.input_hash, latency_ms, value, size, rest, source, states)


def rest_of_read(
    decision: Decision, tool: Prepared, caller: Caller, door: str, native: Mapping[str, Any] | None
) -> str | None:
    """The common part of the records of a read; None before `closed_read` has written one like it."""
    always = _ALWAYS.get((decision, tool.digest, caller.id, caller.agent, caller.tenant, door))
    return always if always is None or native is None else f'"native":{orjson.dumps(native).decode()},{always}'


def read(
    call_id: str, at_ms: int, trace_id: str, input_hash: str, latency_ms: float, value: Any, size: int, rest: str,
    source: str = "compute", states: str = "",
) -> bytes:  # fmt: skip
    """The closing record of a read that succeeded, from its own facts and the rest."""
    name = _SCALARS.get(value.__class__)
    output = f'{{"type":"{name}","bytes":{size}}}' if name is not None else _summary(value, size)
    return (
        f'{{"kind":"closed","call":"{call_id}","timestamp":"{iso(at_ms)}","traceId":"{trace_id}",'
        f'"inputHash":"{input_hash}","latencyMs":{latency_ms},"outputSummary":{output},'
        f'"source":"{source}","states":{states or _PLAIN},{rest}}}'
    ).encode()


def _native(native: Mapping[str, Any] | None) -> str:
    return "" if native is None else f'"native":{orjson.dumps(native).decode()},'


def _closed_at_length(call: Call, at_ms: int, latency_ms: float, source: str, verified: Verified) -> bytes:
    summary = summarize(verified.value, len(verified.encoded))
    extra: Json = {}
    if verified.more.redacted:
        from interlock.call.results import without_private_fields

        extra["persistence"] = persistence(without_private_fields(len(verified.encoded)))
    return closed(call, at_ms, state="succeeded", latency_ms=latency_ms, source=source, summary=summary, extra=extra)


def persistence(decided: Persistence) -> Json:
    """The persistence of a result that is not inline; a record without this means inline."""
    facts: Json = {"decision": decided.decision, "size": decided.size, "reason": decided.reason}
    return facts if decided.ref is None else {**facts, "ref": decided.ref}


_ALWAYS: dict[tuple[Any, ...], str] = {}
_PER_CALL = (
    "kind", "call", "timestamp", "traceId", "inputHash", "latencyMs", "outputSummary", "source", "states", "native",
    "externalMappings",
)  # fmt: skip


def _always(call: Call, key: tuple[Any, ...]) -> str:
    if len(_ALWAYS) > 10_000:
        _ALWAYS.clear()
    record: Json = orjson.loads(closed(call, 0, state="succeeded", latency_ms=0, source="", summary=None))
    rest = {name: value for name, value in record.items() if name not in _PER_CALL}
    _ALWAYS[key] = always = orjson.dumps(rest).decode()[1:-1]
    return always


@lru_cache(maxsize=256)
def _states(states: tuple[State, ...]) -> str:
    return orjson.dumps([*states, "succeeded"]).decode()


def _summary(value: Any, size: int) -> str:
    return orjson.dumps(summarize(value, size)).decode()


_PLAIN_STATES = list(FAST_PATH_STATES)
_PLAIN = _states(FAST_PATH_STATES)


Shown = Callable[["Change"], Sequence[Any]]
"""The values of a change, before and after, as a record shows them: each itself, or where its sealed form is kept."""


def mutation(call: Call, common: Json, change: Change, shown: Shown, session_version: int | None = None) -> bytes:
    """The record of one change. Private values are stored sealed beside the journal; the record refers to them.

    A change of the session's state names the version of the state it made. `common` is the `head` of its call.
    """
    record: Json = {**common, "kind": "mutation"}
    record["mutationType"] = change.operation
    record["affectedResource"] = change.resource
    record["previousValue"], record["newValue"] = shown(change)
    if session_version is not None:
        record["sessionState"] = session_version
    if call.more.approval is not None:
        record["approvalTicketId"] = call.more.approval
        record |= call.more.agreed or {}
    return encode(record)


def checkpoint(call: Call, at_ms: int, **facts: Any) -> bytes:
    """The record of a checkpoint: its label and the digest of its state, never the state."""
    return encode({**head(call, at_ms), "kind": "checkpoint", **facts})


def about(kind: Kind, call: Call, at_ms: int, **facts: Any) -> bytes:
    """A short record about a call that runs or ran here: what happened, and on whose behalf."""
    caller = call.request.caller
    actors: Json = {
        "callerId": None if caller is None else caller.id,
        "agentId": None if caller is None else caller.agent,
        "tenant": None if caller is None else caller.tenant,
    }
    return plain(kind, call.id, at_ms, **actors, **facts)


def plain(kind: Kind, call_id: str, at_ms: int, **facts: Any) -> bytes:
    """A record that is not about a running call: registration, settlement, reading the ledger."""
    return encode({"kind": kind, "call": call_id, "timestamp": iso(at_ms), **facts})


def with_budgets(body: bytes, rows: Sequence[tuple[str, int, int | None]]) -> bytes:
    """Add to a record what is spent of each budget after it, and when the budget's row may be removed.

    Both are known only inside the write, when the rest of the record is encoded already.
    """
    return body if not rows else b'%b,"budgets":%b}' % (body[:-1], orjson.dumps(rows))


def encode(record: Json) -> bytes:
    """Canonical bytes of a record; the common case needs no second look."""
    try:
        encoded = orjson.dumps(record, option=_DUMP)
        return encoded if encoded.isascii() else canonical(record)
    except (TypeError, Failure):
        # A name or an id was sent that JSON cannot represent. The record must be written nevertheless.
        return orjson.dumps(_writable(record), option=_DUMP)


def _writable(value: Any) -> Any:
    if isinstance(value, dict):
        return {_text(name): _writable(item) for name, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in cast("list[Any]", value)]
    known = value is None or isinstance(value, bool | float) or (isinstance(value, int) and -(2**63) <= value < 2**64)
    return value if known else _text(value)


def _text(value: Any) -> str:
    return str(value).encode(errors="backslashreplace").decode()


def summarize(value: Any, size: int) -> Json:
    """Summarise an output: type, size and counts, never its content."""
    if isinstance(value, dict):
        return {"type": "object", "keys": len(cast("Json", value)), "bytes": size}
    if isinstance(value, list | tuple):
        return {"type": "array", "items": len(cast("list[Any]", value)), "bytes": size}
    return {"type": _SCALARS.get(value.__class__, "string"), "bytes": size}


_SCALARS: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def _decision(call: Call) -> str | None:
    return None if call.decision is None else _DECISION[call.decision.behavior]

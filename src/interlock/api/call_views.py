"""Documents that tell of a call: its evidence, its inputs without private values, and its span."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from interlock.audit.decisions import decisions_of
from interlock.audit.invocations import invocation_of
from interlock.call.phases import INPUTS
from interlock.call.results import Result
from interlock.core.clock import iso
from interlock.core.errors import CODES, Failure
from interlock.core.threads import WALKS
from interlock.privacy.redact import REDACTED, SchemaRedactor
from interlock.store.calls import facts_in
from interlock.telemetry.w3c import trace_hex

if TYPE_CHECKING:
    from interlock.data.schema import Json
    from interlock.gateway.inputs import Inputs
    from interlock.gateway.persistence.payloads import PayloadStore


def failure_on_record(records: Sequence[Json]) -> Result | None:
    """The result of a call that failed, as its records tell it; None if it has not ended or has succeeded.

    The ledger has the code and the state of a failure, and not all of its words: the title of the code stands for them.
    """
    closed = next((one for one in reversed(records) if one.get("kind") == "closed"), None)
    if closed is None or closed.get("error_code") not in CODES:
        return None
    facts = facts_in(records)
    unknown = facts.get("outcome") == "unknown"
    cause = closed.get("syntheticCause")
    details = {"synthetic_cause": cause} if cause else {}
    call, tool, version = closed["call"], closed.get("toolId") or "", closed.get("version")
    failure = Failure(
        closed["error_code"],
        closed.get("reason"),
        details={**details, **({"invocation_id": call, "outcome": "unknown"} if unknown else {})} or None,
        policy_refs=tuple(closed.get("rules") or ()),
        evidence_refs=(f"journal:{call}",),
        resolution=CODES["E3409"].resolution if unknown else None,
        unsettled=unknown,
    )
    return Result(
        invocation_id=call,
        tool=f"{tool}@{version}" if version else tool,
        state=closed["states"][-1],
        created_ms=int(datetime.fromisoformat(closed["timestamp"]).timestamp() * 1000),
        trace_id=str(closed.get("traceId") or ""),
        metadata={"latency_ms": closed.get("latencyMs") or 0, **details},
        error=failure,
        source=closed.get("source", "compute"),
    )


def evidence(records: Sequence[Json]) -> Json:
    """The invocation and the permission decisions that the records of a call tell of."""
    return {"invocation": invocation_of(records), "permission_decisions": decisions_of(records)}


async def persistence_of(facts: Json, payloads: PayloadStore) -> Json | None:
    """The state of the payload of a call that succeeded, with the reason if it was removed."""
    if facts.get("status") != "SUCCESS":
        return None
    decided: Json = facts.get("persistence") or {"decision": "inline"}
    ref = decided.get("ref")
    if ref is None or await payloads.has(ref):
        return decided
    return {**decided, "decision": "link", "reason": await payloads.why_gone(ref)}


async def inputs_for_auditors(find: Callable[[], Inputs], redact: SchemaRedactor) -> Json:
    """The inputs of a call without private values. They may be large: opened and redacted on another thread."""
    return await WALKS.run(_redacted, find, redact)


def span_on_record(call_id: str, trace_id: str, facts: Json) -> Json:
    """A call that has ended as one span, from what its records say."""
    latency_ms = float(facts.get("latencyMs") or 0.0)
    began = datetime.fromisoformat(facts["timestamp"]) - timedelta(milliseconds=latency_ms)
    states: list[str] = facts.get("states") or [""]
    attributes: Json = {
        "tool.id": facts.get("toolId"), "tool.version": facts.get("version"), "tool.invocation_id": call_id,
        "tool.status": states[-1], "tool.latency_ms": latency_ms, "tool.source": facts.get("source"),
        "tool.door": facts.get("door"), "tool.mutation_class": facts.get("mutationClass"),
        "error.type": facts.get("errorCode"), "error.code": facts.get("error_code"),
    }  # fmt: skip
    return {
        "name": "tool.invoke", "trace_id": trace_hex(trace_id), "span_id": "", "parent_span_id": None,
        "start": iso(int(began.timestamp() * 1000)), "duration_ms": latency_ms,
        "status": facts.get("errorCode") or "OK",
        "attributes": {name: value for name, value in attributes.items() if value is not None}, "events": [],
    }  # fmt: skip


def _redacted(find: Callable[[], Inputs], redact: SchemaRedactor) -> Json:
    """The inputs of a call without what is private in any of them."""
    found = find()
    four = {name: getattr(found, name) for name in INPUTS}
    seen = {name: redact.for_people(value) for name, value in four.items() if value is not None}
    private = {path for one in seen.values() for path in one.paths}
    changes = [
        {**one, "value": REDACTED} if "value" in one and _lies_in(one["pointer"], private) else one
        for one in found.changes
    ]
    inputs: Json = {name: seen[name].value if name in seen else None for name in four}
    return {**inputs, "input_changes": changes, "withheld": found.withheld or None}


def _lies_in(pointer: str, private: Collection[str]) -> bool:
    """Whether a place holds something private, or lies in something private."""
    return any(f"{one}/".startswith(f"{pointer}/") or f"{pointer}/".startswith(f"{one}/") for one in private)

"""Invocations, read from the ledger: one call from its request to its end, as the standard describes it.

Each record of a call states what was known when it was written, so the invocation is assembled from all of them and
stored nowhere else. Inputs are not included, because the ledger has none: `inputHash` stands for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlock.call import endpoints
from interlock.call.phases import between
from interlock.core.clock import begun_ms, iso
from interlock.data.schema import Json

# The names that protocols use for the caller's own id of a call.
_NATIVE_IDS = ("jsonrpc_request_id", "tool_call_id", "request_id", "id")
# The state that a kind of record documents.
_REACHED = {"pending": "awaiting_approval", "intent": "queued", "started": "running"}


def invocation_of(records: Sequence[Json]) -> Json | None:
    """Build the tool_invocation from the records of one call, oldest first; None if there are none of a call."""
    of_call = [record for record in records if record.get("toolId") is not None]
    if not of_call:
        return None
    facts: Json = {name: value for record in of_call for name, value in record.items() if value is not None}
    closed = of_call[-1] if of_call[-1]["kind"] == "closed" else None
    began = _began(facts["call"], of_call[0]["timestamp"])
    transitions = _transitions(of_call, closed, began)
    native: Json = facts.get("native") or {}
    return {
        "schema_version": "0.2.0",
        "invocation_id": facts["call"],
        "tool_id": facts["toolId"],
        "status": transitions[-1]["state"],
        "native_call_id": next((str(native[name]) for name in _NATIVE_IDS if name in native), None),
        "started_at": began,
        "ended_at": None if closed is None else closed["timestamp"],
        "transitions": transitions,
        "input_hash": facts.get("inputHash"),
        "input_changes": [_change(one) for one in facts.get("inputMutations", ())],
        "external_mappings": [*_of_client(facts, native), *facts.get("externalMappings", ())],
        "actor_refs": [f"{kind}:{facts[name]}" for kind, name in _ACTORS if facts.get(name)],
        "runtime_refs": [f"{kind}:{facts[name]}" for kind, name in _RUNTIME if facts.get(name)],
        "policy_refs": [*([facts["policy"]] if facts.get("policy") else []), *facts.get("rules", ())],
        "evidence_refs": [f"journal:{facts['call']}"],
        "telemetry_refs": [f"trace:{facts['traceId']}"],
    }


_ACTORS = (("tenant", "tenant"), ("caller", "callerId"), ("agent", "agentId"))
_RUNTIME = (("door", "door"), ("version", "version"), ("session", "session"), ("task", "task"))


def _transitions(records: Sequence[Json], closed: Json | None, began: str) -> list[Json]:
    """Return every state that the call has been in, with the time of those that were recorded when
    they were reached.
    """
    at = {_REACHED[record["kind"]]: record["timestamp"] for record in records if record["kind"] in _REACHED}
    if closed is None:
        return [{"state": "planned", "at": began}, *({"state": state, "at": time} for state, time in at.items())]
    states: list[str] = closed["states"]
    moves = [{"state": state, "at": at.get(state)} for state in states]
    moves[0]["at"], moves[-1]["at"] = began, closed["timestamp"]
    return moves


def _change(change: Json) -> Json:
    """A difference between two inputs of a call, with its source and place; the record has no values."""
    before, after = between(change["source"])
    return {"before": before, "after": after, "source": change["source"], "pointer": change["pointer"]}


def _began(call: str, otherwise: str) -> str:
    """Return when a call began, from its id. One whose id was not made here began with its first record."""
    began = begun_ms(call)
    return otherwise if began is None else iso(began)


def _of_client(facts: Json, native: Json) -> list[Json]:
    """The ids by which a client of the protocol of an endpoint knows its call."""
    protocol = endpoints.native(str(facts.get("door")))
    if protocol is None or not native:
        return []
    kind, method = protocol
    return [{"schema_version": "0.2.0", "kind": kind, "method": method, **native}]

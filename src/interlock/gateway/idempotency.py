"""Idempotency: reserve, execute, finalize, in the same writes as the journal's records.

A key is looked up only within (tenant, caller, session, tool). Its row is `executing` from the intent on, then `done`
with the outcome to replay, or gone when nothing happened and a retry may run, or `unknown` when nobody can say: the
process died, or was cut off, between intent and outcome. An unknown row blocks its key until a person settles it, and
no passage of time lifts it: silence is not proof that nothing happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import orjson

from interlock.approvals import tickets
from interlock.call.phases import Call, Request
from interlock.contract.contract import Contract
from interlock.core.errors import Failure
from interlock.data.canonical import key_scope
from interlock.data.schema import Json
from interlock.store import facts, idempotency, ledger, records, timekeeping
from interlock.store.idempotency import Reservation
from interlock.store.port import Transaction, Unit

Settlement = Literal["done", "released", "unknown"]


def scope_for(request: Request, contract: Contract, input_hash: str) -> bytes:
    """The row of a call."""
    caller = request.caller
    assert caller is not None
    return key_scope(
        tenant=caller.tenant, caller=caller.id, session=request.session, tool=str(contract.id),
        operation=request.operation, key=request.key, parent=request.parent, given=input_hash,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A wish to run under a key."""

    scope: bytes
    tool: str
    version: str
    key: str
    caller: str
    input_hash: str
    call: str
    owner: str
    window_s: int
    intent: bytes


@dataclass(frozen=True, slots=True)
class Reserved:
    """The key is ours; the intent is on disk."""


@dataclass(frozen=True, slots=True)
class Replay:
    """It ran before, in its window; this is what came of it, as it was stored."""

    call: str
    at_ms: int
    result: bytes


@dataclass(frozen=True, slots=True)
class Busy:
    """It is running now, here or in another process."""

    call: str


def reserve(
    claim: Claim,
    alive: Callable[[str], bool],
    claims: Sequence[Callable[[Transaction], None]] = (),
    check: Callable[[Transaction], None] | None = None,
) -> Unit[Reserved | Replay | Busy]:
    """A unit that takes the key, or says who has it. E3306 on other arguments, E3409 on an unknown outcome.

    Whatever else the call uses up (an approval, a budget, a rate) is claimed with the key, all of it or nothing. A call
    that is to run is refused where `check` raises; one that ran before is not asked.
    """

    def unit(transaction: Transaction) -> Reserved | Replay | Busy:
        row = idempotency.find(transaction, claim.scope)
        if row is not None:
            found = _existing(transaction, claim, row, alive)
            if found is not None:
                return found
        if check is not None:
            check(transaction)
        claim_all(transaction, claims)
        tickets.pass_over(transaction, claim.scope, claim.call)
        now = transaction.now_ms
        idempotency.reserve(
            transaction, claim.scope, claim.tool, claim.version, claim.key, claim.caller, claim.input_hash, claim.call,
            claim.owner, now, now + claim.window_s * 1000,
        )  # fmt: skip
        transaction.append("intent", claim.call, claim.intent)
        return Reserved()

    return unit


def claim_all(transaction: Transaction, claims: Sequence[Callable[[Transaction], None]]) -> None:
    """Make several claims. If one is refused, none of them was made: the refusal undoes the whole unit."""
    for claim in claims:
        claim(transaction)


def _existing(tx: Transaction, claim: Claim, row: Reservation, alive: Callable[[str], bool]) -> Replay | Busy | None:
    version, input_hash, state, call, owner, reserved_ms, expires_ms, result = row
    passed = state == "done" and tx.now_ms >= expires_ms
    if passed and tx.now_ms >= timekeeping.in_doubt_until(timekeeping.steps(tx), reserved_ms, expires_ms):
        return None
    if input_hash != claim.input_hash or version != claim.version:
        raise Failure(
            "E3306",
            f"the key `{claim.key}` was used with other arguments or another version; a new action needs a new key",
        )
    if passed:
        raise _window_in_doubt(claim.key, call)
    if state == "done":
        return Replay(call, reserved_ms, cast("bytes", result))
    if state == "executing" and alive(owner):
        return Busy(call)
    raise unknown_outcome(claim.key, call)


def _window_in_doubt(key: str, call: str) -> Failure:
    """INVARIANT: a clock that was set makes no call run twice."""
    return Failure(
        "E3411",
        f"the key `{key}` was used by call {call}, and the machine's clock was set since then:"
        " whether the key's window has passed cannot be told, so the call does not run again",
        details={"invocation_id": call},
        evidence_refs=(f"journal:{call}",),
        resolution=f"see what came of it with: interlock calls show {call}; for a new action use a new key",
    )


def unknown_outcome(key: str, call: str) -> Failure:
    return Failure(
        "E3409",
        f"the call under key `{key}` was cut off and nobody can know whether it took effect; "
        f"a person settles it with: interlock calls reconcile {call}",
        details={"invocation_id": call},
        evidence_refs=(f"journal:{call}",),
    )


def is_open(transaction: Transaction, scope: bytes, call: str) -> bool:
    """Whether the call still holds its key with nothing decided."""
    return idempotency.state_of_call(transaction, scope, call) == "executing"


def settle(transaction: Transaction, scope: bytes, call: str, settlement: Settlement, result: bytes | None) -> None:
    """Finalize a reservation in the write that closes its call. The result is sealed: what a replay answers with."""
    if settlement == "released":
        idempotency.release(transaction, scope, call)
    else:
        idempotency.finish(transaction, scope, call, settlement, result)


def given_back(call: Call, claim: Claim, at_ms: int) -> bytes:
    """The record of a key that was taken for a call whose caller went away before the call began."""
    return records.about(
        "settled", call, at_ms, toolId=claim.tool, version=claim.version, idempotencyKey=claim.key, happened=False,
        by="interlock", resultHash=None,
    )  # fmt: skip


def find_orphans(owner_alive: Callable[[str], bool]) -> Unit[list[tuple[str, str]]]:
    """A unit that closes the calls of dead processes as failed with unknown outcome. Returns their ids and tools."""

    def unit(transaction: Transaction) -> list[tuple[str, str]]:
        orphans = [row for row in idempotency.executing(transaction) if not owner_alive(row.owner)]
        for scope, call, _owner, tool, version, key, caller, input_hash in orphans:
            idempotency.mark_unknown(transaction, scope, call)
            intent = ledger.newest_of_kind(transaction, call, "intent")
            known: Json = {} if intent is None else orjson.loads(intent)
            told = {name: known.get(name) for name in _OF_THE_INTENT if name in known or name in _OF_EVERY_CLOSING}
            body = records.plain(
                "closed", call, transaction.now_ms, **told, toolId=tool, version=version, callerId=caller,
                inputHash=input_hash, outputSummary=None, sideEffects=[], latencyMs=None,
                idempotencyKey=key, status="ERROR", errorCode="PRECONDITION_FAILED", error_code="E3409",
                error_class="execution_failed", states=["running", "failed"], source="synthetic", outcome="unknown",
            )  # fmt: skip
            transaction.append("closed", call, body)
        return [(row.call, f"{row.tool}@{row.version}") for row in orphans]

    return unit


# What the closing record of a call that was cut off takes over from its intent.
_OF_THE_INTENT = (
    "agentId", "approval", "approvalTicketId", "authDecision", "door", "mutationClass", "native", "operation", "parent",
    "policy", "resources", "rules", "session", "task", "tenant", "token", "traceId",
)  # fmt: skip
_OF_EVERY_CLOSING = ("agentId", "approvalTicketId", "authDecision", "mutationClass", "operation", "traceId")

EVICT_AT_ONCE = 1000


def evict(transaction: Transaction) -> int:
    """Remove outcomes whose window has passed for certain, a bounded number at a time."""
    now_ms, steps = transaction.now_ms, timekeeping.steps(transaction)
    # Of what was reserved before the last step, only what has passed however often the clock was set.
    last_ms = max((step.before_ms for step in steps), default=-1)
    surely_ms = now_ms - sum(step.after_ms - step.before_ms for step in steps)
    timekeeping.forget(transaction, now_ms)
    evicted = idempotency.evict(transaction, now_ms, last_ms, surely_ms, EVICT_AT_ONCE)
    if evicted:
        # The verifier must not miss what went by the store's time, which can be ahead of the machine's.
        facts.put(transaction, timekeeping.EVICTED, str(now_ms))
    return evicted

"""Idempotency: reserve, execute, finalize, in the same writes as the journal's records.

An idempotency key is looked up only within (tenant, caller, session, tool). Its row is `executing` from the intent on,
then `done` with the outcome to replay, or removed when nothing happened and a retry may run, or `unknown` when the
process died, or was cut off, between intent and outcome. An unknown row blocks its key until a person settles it, and
does not expire: the passage of time does not prove that nothing happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, cast

import orjson

from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.canonical import key_scope
from interlock.store import facts, idempotency, ledger, records, timekeeping
from interlock.store.port import EndedCall

if TYPE_CHECKING:
    from interlock.call.phases import Call, Request
    from interlock.contract.contract import Contract
    from interlock.data.schema import Json
    from interlock.store.idempotency import NewKey, Reservation
    from interlock.store.port import EarlyRow, Transaction, Unit

Settlement = Literal["done", "released", "unknown"]


def scope_for(request: Request, contract: Contract, input_hash: str, key: str | None, call: str | None = None) -> bytes:
    """Return the id of the row of an idempotency key. A call without a key has a row by its own id."""
    caller = request.caller
    assert caller is not None
    return key_scope(
        tenant=caller.tenant, caller=caller.id, session=request.session, tool=contract.address,
        operation=request.operation, key=key, parent=request.parent, given=input_hash, call=call,
    )  # fmt: skip


def ticket_scope(request: Request, contract: Contract, input_hash: str) -> bytes:
    """Return the id by which a call that is sent again finds its ticket: the caller's key, or else the input.

    The identity of a request does not do, because the call that is sent again is another request.
    """
    return scope_for(request, contract, input_hash, request.own_key)


@dataclass(frozen=True, slots=True)
class Reserved:
    """The key is reserved, and the intent is on disk."""


RESERVED = Reserved()


@dataclass(frozen=True, slots=True)
class Replay:
    """The call ran before, within its window. Contains its stored outcome."""

    call: str
    at_ms: int
    result: bytes


@dataclass(frozen=True, slots=True)
class Busy:
    """The call is running now, in this or another process."""

    call: str


def reserve(
    wanted: NewKey,
    intent: bytes,
    alive: Callable[[str], bool],
    check_key: Callable[[], object] | None = None,
    *,
    ticket_scope: bytes | None = None,
    early: EarlyRow | None = None,
    uses: Sequence[Callable[[Transaction], None]] = (),
    check: Callable[[Transaction], None] | None = None,
) -> Unit[Reserved | Replay | Busy]:
    """Return a unit that reserves the key. E3306 on other arguments, E3409 on an unknown outcome.

    Whatever else the call uses up (an approval, a budget, a rate limit) is used in the same transaction, all of it or
    nothing. `check` may refuse a call that is to run; it is not asked about one that ran before. `early` is the row of
    a call that uses nothing up: it is inserted where `check` would refuse nothing. `ticket_scope` is by what the call
    finds its ticket, if that is not the key. `check_key` refuses calls whose outcome could not be encrypted.
    """

    def unit(transaction: Transaction) -> Reserved | Replay | Busy:
        # INVARIANT: a call whose outcome could not be sealed for its key does not begin.
        if check_key is not None:
            transaction.once(check_key)
        if early is not None and transaction.inserted(early):
            transaction.append("intent", wanted.call, intent)
            return RESERVED
        row = idempotency.find(transaction, wanted.scope)
        if row is not None:
            found = _existing(transaction, wanted, row, alive)
            if found is not None:
                return found
        if check is not None:
            check(transaction)
        run_all(transaction, uses)
        from interlock.approvals import tickets  # everything else of this module is done without calls

        tickets.pass_over(transaction, ticket_scope or wanted.scope, wanted.call)
        idempotency.reserve(transaction, wanted)
        transaction.append("intent", wanted.call, intent)
        return RESERVED

    return unit


def run_all(transaction: Transaction, uses: Sequence[Callable[[Transaction], None]]) -> None:
    """Use up everything that a call consumes. If one use is refused, the refusal undoes the whole unit."""
    for use in uses:
        use(transaction)


def _existing(tx: Transaction, wanted: NewKey, row: Reservation, alive: Callable[[str], bool]) -> Replay | Busy | None:
    version, input_hash, state, call, owner, reserved_ms, expires_ms, result = row
    passed = state == "done" and tx.now_ms >= expires_ms
    if passed and tx.now_ms >= timekeeping.in_doubt_until(timekeeping.steps(tx), reserved_ms, expires_ms):
        return None
    if input_hash != wanted.input_hash or version != wanted.version:
        raise Failure(
            "E3306",
            f"the idempotency key `{wanted.key}` was used with other arguments or another version;"
            " a new action needs a new key",
        )
    if passed:
        raise _window_in_doubt(wanted.key, call)
    if state == "done":
        return Replay(call, reserved_ms, cast("bytes", result))
    if state == "executing" and alive(owner):
        return Busy(call)
    raise unknown_outcome(wanted.key, call)


def _window_in_doubt(key: str, call: str) -> Failure:
    """INVARIANT: setting the clock makes no call run twice."""
    return Failure(
        "E3411",
        f"the idempotency key `{key}` was used by call {call}, and the machine's clock was set since then:"
        " it is unknown whether the key has expired, so the call does not run again",
        details={"invocation_id": call},
        evidence_refs=(f"journal:{call}",),
        resolution=f"see what came of it with: interlock calls show {call}; for a new action use a new key",
    )


def unknown_outcome(key: str, call: str) -> Failure:
    return Failure(
        "E3409",
        f"the call under the idempotency key `{key}` was cut off and nobody can know whether it took effect; "
        f"a person settles it with: interlock calls reconcile {call}",
        details={"invocation_id": call},
        evidence_refs=(f"journal:{call}",),
    )


def is_open(transaction: Transaction, scope: bytes, call: str) -> bool:
    """Whether the call still holds its key and has no outcome."""
    return idempotency.state_of_call(transaction, scope, call) == "executing"


def settle(transaction: Transaction, scope: bytes, call: str, settlement: Settlement, result: bytes | None) -> None:
    """Finalize a key in the write that closes its call. `result` is the sealed outcome for replays."""
    if settlement == "released":
        idempotency.release(transaction, scope, call)
    else:
        idempotency.finish(transaction, scope, call, settlement, result)


def given_back(call: Call, wanted: NewKey, at_ms: int) -> bytes:
    """Return the record of a key that was reserved for a call whose caller was cancelled before it began."""
    return records.about(
        "settled", call, at_ms, toolId=wanted.tool, version=wanted.version, idempotencyKey=wanted.key or None,
        happened=False, by="interlock", resultHash=None,
    )  # fmt: skip


def find_orphans(owner_alive: Callable[[str], bool]) -> Unit[list[tuple[str, str]]]:
    """Return a unit that closes the calls of dead processes, with unknown outcome. It returns their ids and tools."""

    def unit(transaction: Transaction) -> list[tuple[str, str]]:
        orphans = [row for row in idempotency.executing(transaction) if not owner_alive(row.owner)]
        for scope, call, _owner, tool, version, key, caller, input_hash in orphans:
            idempotency.mark_unknown(transaction, scope, call)
            intent = ledger.newest_of_kind(transaction, call, "intent")
            known: Json = {} if intent is None else orjson.loads(intent)
            fields = {name: known.get(name) for name in _OF_THE_INTENT if name in known or name in _OF_EVERY_CLOSING}
            body = records.plain(
                "closed", call, transaction.now_ms, **fields, toolId=tool, version=version, callerId=caller,
                inputHash=input_hash, outputSummary=None, sideEffects=[], latencyMs=None,
                idempotencyKey=key or None, status="ERROR", errorCode="PRECONDITION_FAILED", error_code="E3409",
                error_class="execution_failed", states=["running", "failed"], source="synthetic", outcome="unknown",
            )  # fmt: skip
            transaction.close(EndedCall(call, f"{tool}@{version}", "failed", "E3409"), body)
        return [(row.call, f"{row.tool}@{row.version}") for row in orphans]

    return unit


# The fields that the closing record of an orphaned call copies from its intent.
_OF_THE_INTENT = (
    "agentId", "approval", "approvalTicketId", "authDecision", "door", "keyFrom", "mutationClass", "native",
    "operation", "parent", "policy", "resendProtection", "resources", "rules", "session", "task", "tenant", "token",
    "traceId",
)  # fmt: skip
_OF_EVERY_CLOSING = ("agentId", "approvalTicketId", "authDecision", "mutationClass", "operation", "traceId")

EVICT_AT_ONCE = 1000


def evict(transaction: Transaction) -> int:
    """Remove outcomes whose window has certainly passed, a bounded number at a time."""
    now_ms, steps = transaction.now_ms, timekeeping.steps(transaction)
    # Of keys reserved before the clock was last set, only those whose window has passed by any reckoning.
    last_ms = max((step.before_ms for step in steps), default=-1)
    surely_ms = now_ms - sum(step.after_ms - step.before_ms for step in steps)
    timekeeping.forget(transaction, now_ms)
    evicted = idempotency.evict(transaction, now_ms, last_ms, surely_ms, EVICT_AT_ONCE)
    if evicted:
        # The verifier must know keys that were removed by the store's time, which can be ahead of the machine's.
        facts.put(transaction, timekeeping.EVICTED, str(now_ms))
    return evicted

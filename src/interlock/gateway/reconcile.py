"""Calls that their process did not live to close.

A write that died between intent and outcome leaves a key that is blocked: whether it took effect cannot be told from
here. Whichever process notices first tells of it, once. Someone who can look at the world decides. That it happened:
the key answers from now on with the result they state. That it did not: the key is free, and the same call may run.
Either way the decision is on record, under a name.

A read that died left the world as it was, so nobody has to look: whichever process opens the home next closes it as
failed. Reads that take their time are noted as begun for this, and the note goes in the write that closes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from interlock.call.context import Caller
from interlock.call.phases import Call
from interlock.core.clock import iso
from interlock.core.errors import CODES, Failure
from interlock.data.canonical import digest
from interlock.data.schema import Json
from interlock.gateway import idempotency
from interlock.store import facts, ledger, records
from interlock.store import idempotency as idempotency_rows
from interlock.store.port import Store, Transaction, Unit

SCOPE = "calls:reconcile"
# The note of a read that is under way: its name here and the call, and whose it is.
BEGUN = "begun:"
_CRASHED = CODES["E3404"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownCall:
    """A call that was cut off between intent and outcome."""

    call: str
    tool: str
    version: str
    key: str
    caller: str
    at_ms: int

    def document(self) -> Json:
        told = asdict(self)
        return {"invocation_id": told.pop("call"), "at": iso(told.pop("at_ms")), **told}


def unknown_calls(journal: Store) -> list[UnknownCall]:
    """Every call that waits for a person, oldest first."""
    return [
        UnknownCall(call=call, tool=tool, version=version, key=key, caller=caller, at_ms=at_ms)
        for call, tool, version, key, caller, at_ms in idempotency_rows.unknown(journal.reader)
    ]


def advice(call_id: str) -> str:
    """What the alert says of a call whose key is blocked."""
    return f"whether it took effect is unknown; a person settles it with: interlock calls reconcile {call_id}"


async def block_orphans(journal: Store, alive: Callable[[str], bool], announce: Callable[..., None]) -> None:
    """Block the keys of writes that died with their process, and tell of each. Writes nothing while there are none."""
    if all(map(alive, idempotency_rows.executing_owners(journal.reader))):
        return
    for call_id, tool in await journal.commit(idempotency.find_orphans(alive)):
        announce("tool.alert", call_id, tool, alert="OUTCOME_UNKNOWN", reason=advice(call_id))


def require_scope(caller: Caller) -> None:
    """Refuse (E3206) a caller who may not settle."""
    if not caller.governs(SCOPE):
        raise Failure("E3206", f"settling a call needs the scope `{SCOPE}`, in the tenant `local`")


Seal = Callable[[str, Json], bytes]


async def reconcile(
    journal: Store, caller: Caller, call_id: str, *, seal: Seal, happened: bool, value: Any = None
) -> None:
    """Settle a call on a person's word, if they may give it. `seal` makes of an outcome what its key keeps."""
    require_scope(caller)
    await journal.commit(settle(call_id, happened, value, caller.id, seal))


def settle(call_id: str, happened: bool, value: Any, by: str, seal: Seal) -> Unit[None]:
    """A unit that settles one unknown call: with its result, or as never having happened. E3702 if none is open."""

    def unit(transaction: Transaction) -> None:
        row = idempotency_rows.of_call(transaction, call_id)
        # Looked at inside the write: the call may have ended after all, or someone else may have settled it.
        if row is None or row.state != "unknown":
            raise Failure("E3702", f"no call `{call_id}` waits to be settled; see interlock calls reconcile")
        scope, tool, version, key, caller, _, reserved_ms, expires_ms = row
        if happened:
            outcome: Json = {
                "value": value,
                "persistence": ["inline", None, len(orjson.dumps(value)), ""],
                "redacted": [],
                "metadata": {"settled_by": by},
            }
            # INVARIANT: a settled call is replayed for a whole window from now, however late it was settled.
            until_ms = transaction.now_ms + (expires_ms - reserved_ms)
            idempotency_rows.finish_until(transaction, scope, call_id, seal(call_id, outcome), until_ms)
        else:
            idempotency_rows.release(transaction, scope, call_id)
        actors = {**_actors(transaction, call_id), "callerId": caller}
        body = records.plain(
            "settled", call_id, transaction.now_ms, toolId=tool, version=version, **actors, idempotencyKey=key,
            happened=happened, by=by, resultHash=digest(value) if happened else None,
        )  # fmt: skip
        transaction.append("settled", call_id, body)

    return unit


# Requests to cancel


def note_cancel(call_id: str, call: Call | None, at_ms: int, answer: str, reason: str) -> Unit[None]:
    """A unit that records a request to cancel. `call` is None where no call of this id runs any more."""

    def unit(transaction: Transaction) -> None:
        if call is not None:
            body = records.about("cancel", call, at_ms, answer=answer, reason=reason)
        else:
            actors = _actors(transaction, call_id)
            body = records.plain("cancel", call_id, at_ms, **actors, answer=answer, reason=reason)
        transaction.append("cancel", call_id, body)

    return unit


def _actors(transaction: Transaction, call_id: str) -> Json:
    """The caller, agent and tenant that earlier records of the call name; empty for an id that no record has."""
    first = ledger.first_of_call(transaction, call_id)
    known: Json = {} if first is None else orjson.loads(first)
    return {name: known.get(name) for name in ("callerId", "agentId", "tenant")} if known else {}


# Reads


def begin(call_id: str, owner: str, body: bytes) -> Unit[None]:
    """A unit that puts a read on record as begun, by a process that may die before it ends."""

    def unit(transaction: Transaction) -> None:
        transaction.append("started", call_id, body)
        facts.put(transaction, BEGUN + call_id, owner)

    return unit


def end(transaction: Transaction, call_id: str) -> None:
    """Part of the write that closes a call: it is no longer merely begun."""
    facts.remove(transaction, BEGUN + call_id)


def close_abandoned(alive: Callable[[str], bool]) -> Unit[list[str]]:
    """A unit that closes the reads of dead processes as failed. Returns their ids."""

    def unit(transaction: Transaction) -> list[str]:
        rows = facts.between(transaction, BEGUN, "begun;")
        dead = [name.removeprefix(BEGUN) for name, owner in rows if not alive(owner)]
        return [call_id for call_id in dead if _close(transaction, call_id)]

    return unit


def _close(transaction: Transaction, call_id: str) -> bool:
    """Close one read; False for a call that came to its end, or to a person, after it was noted."""
    end(transaction, call_id)
    last = ledger.progress(transaction, call_id)
    if last is None or last[0] != "started":
        return False
    body: Json = {
        "approvalTicketId": None, **orjson.loads(last[1]), "kind": "closed", "timestamp": iso(transaction.now_ms),
        "status": "ERROR", "errorCode": _CRASHED.error_code.value, "error_code": _CRASHED.code,
        "error_class": _CRASHED.error_class.value, "states": ["running", "failed"], "source": "synthetic",
        "outputSummary": None, "sideEffects": [], "latencyMs": None, "reason": "the process that ran it died",
    }  # fmt: skip
    transaction.append("closed", call_id, records.encode(body))
    return True

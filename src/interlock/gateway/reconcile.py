"""Calls that were not closed because their process died.

A write that died between intent and outcome leaves a blocked idempotency key: nobody can tell from here whether it took
effect. The first process that notices alerts, once, and a person who can check decides. If it happened, the key answers
from then on with the result that they state. If it did not, the key is free, and the same call may run. Either way the
decision is recorded, with a name.

A read that died changed nothing, so no decision is needed: the first process that notices closes it as failed, or
writes the record of one that had been answered. It knows of them by the notes that every process has of its own reads
(`store/started_reads.py`). Reads that take long have a start record too, and a fact that the closing write removes: by
these, others see and cancel them. A call in the background has such a fact from before its id is given away, with what
is known of it: if its process dies before the tool starts, the call is closed as failed too, and did not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import orjson

from interlock.core.clock import iso
from interlock.core.errors import CODES, Failure
from interlock.core.record import dataclass
from interlock.data.canonical import digest
from interlock.gateway import idempotency
from interlock.store import facts, ledger, records
from interlock.store import idempotency as idempotency_rows
from interlock.store.calls import ASKED, BEGUN
from interlock.store.port import EndedCall, Reader, Store, Transaction, Unit
from interlock.store.started_reads import LeftNotes

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.call.phases import Call
    from interlock.data.schema import Json
    from interlock.store.instance import Instance

SCOPE = "calls:reconcile"
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
        document = asdict(self)
        return {"invocation_id": document.pop("call"), "at": iso(document.pop("at_ms")), **document}


async def unknown_calls(journal: Store) -> list[UnknownCall]:
    """Return every call whose outcome a person must decide, oldest first."""
    return [
        UnknownCall(call=call, tool=tool, version=version, key=key, caller=caller, at_ms=at_ms)
        for call, tool, version, key, caller, at_ms in await journal.read(idempotency_rows.unknown)
    ]


def advice(call_id: str) -> str:
    """Return the reason in the alert about a call whose key is blocked."""
    return f"whether it took effect is unknown; a person settles it with: interlock calls reconcile {call_id}"


async def block_orphans(journal: Store, alive: Callable[[str], bool], announce: Callable[..., None]) -> None:
    """Block the keys of writes that died with their process, and alert about each. Usually writes nothing."""
    if await journal.read(lambda reader: all(map(alive, idempotency_rows.executing_owners(reader)))):
        return
    for call_id, tool in await journal.commit(idempotency.find_orphans(alive)):
        announce("tool.alert", call_id, tool, alert="OUTCOME_UNKNOWN", reason=advice(call_id))


def require_scope(caller: Caller) -> None:
    """Refuse (E3206) a caller who may not settle calls."""
    if not caller.governs(SCOPE):
        raise Failure("E3206", f"settling a call needs the scope `{SCOPE}`, in the tenant `local`")


Seal = Callable[[Transaction, str, dict[str, Any]], bytes]


async def reconcile(
    journal: Store, caller: Caller, call_id: str, *, seal: Seal, happened: bool, value: Any = None
) -> None:
    """Settle a call as a person decided, if they may decide. `seal` encrypts an outcome for its key."""
    require_scope(caller)
    await journal.commit(settle(call_id, happened, value, caller.acting, seal))


def settle(call_id: str, happened: bool, value: Any, by: str, seal: Seal) -> Unit[None]:
    """Return a unit that settles one unknown call: with its result, or as not executed. E3702 if none is open."""

    def unit(transaction: Transaction) -> None:
        row = idempotency_rows.of_call(transaction, call_id)
        # Checked inside the write: the call may have ended after all, or someone else may have settled it.
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
            idempotency_rows.finish_until(transaction, scope, call_id, seal(transaction, call_id, outcome), until_ms)
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
    """Return a unit that records a request to cancel. `call` is None if no call of this id runs any more."""

    def unit(transaction: Transaction) -> None:
        if call is not None:
            body = records.about("cancel", call, at_ms, answer=answer, reason=reason)
        else:
            actors = _actors(transaction, call_id)
            body = records.plain("cancel", call_id, at_ms, **actors, answer=answer, reason=reason)
        transaction.append("cancel", call_id, body)

    return unit


def _actors(transaction: Transaction, call_id: str) -> Json:
    """Return the caller, agent and tenant in earlier records of the call; empty for an id without records."""
    first = ledger.first_of_call(transaction, call_id)
    known: Json = {} if first is None else orjson.loads(first)
    return {name: known.get(name) for name in ("callerId", "agentId", "tenant")} if known else {}


# Reads


def begin(call_id: str, owner: str, body: bytes) -> Unit[None]:
    """Return a unit that records the start of a read whose process may die before it ends."""

    def unit(transaction: Transaction) -> None:
        transaction.append("started", call_id, body)
        facts.put(transaction, BEGUN + call_id, owner)

    return unit


def ask(call_id: str, owner: str, record: bytes) -> Unit[None]:
    """Return a unit that notes a call in the background. `record` has what is known of it before it begins."""

    def unit(transaction: Transaction) -> None:
        facts.put(transaction, BEGUN + call_id, owner)
        facts.put(transaction, ASKED + call_id, record.decode())

    return unit


def end(transaction: Transaction, call_id: str) -> None:
    """Remove the note of a started read or a background call, in the write that closes it."""
    facts.remove(transaction, BEGUN + call_id)
    facts.remove(transaction, ASKED + call_id)


async def close_dead_calls(journal: Store, instance: Instance, announce: Callable[..., None]) -> None:
    """Close the calls of dead processes. Usually there are none, and nothing is written."""
    await block_orphans(journal, instance.alive, announce)
    left = await journal.read(lambda reader: _left(reader, instance))
    if left is None:
        return

    def unit(transaction: Transaction) -> None:
        _close_noted(transaction, left.notes)
        for name, owner in facts.between(transaction, BEGUN, "begun;"):
            if not instance.alive(owner):
                _close(transaction, name.removeprefix(BEGUN))

    # INVARIANT: two processes that see the same dead owner close a call once. Each looks inside its write whether the
    # call has its end.
    await journal.commit(unit)
    left.remove()


def _left(reader: Reader, instance: Instance) -> LeftNotes | None:
    """Return the notes of dead processes; None if these have left neither notes nor calls."""
    left = LeftNotes(instance.home.instances, instance.alive)
    owners = {owner for _, owner in facts.between(reader, BEGUN, "begun;")}
    return left if left.there or not all(map(instance.alive, owners)) else None


def _close(transaction: Transaction, call_id: str) -> None:
    """Close a read, or a call that did not begin, unless the call ended, or waits for an approval, since then."""
    key = idempotency_rows.of_call(transaction, call_id)
    if key is not None and key.state == "executing":
        return  # a write that has begun: `find_orphans` closes it
    asked = facts.get(transaction, ASKED + call_id)
    end(transaction, call_id)
    if transaction.has("closed", call_id):
        return
    last = ledger.progress(transaction, call_id)
    if last is not None and last[0] == "started":
        _append_failed(transaction, call_id, orjson.loads(last[1]))
    elif last is None and asked is not None:
        _append_failed(transaction, call_id, orjson.loads(asked), not_begun=True)


def _close_noted(transaction: Transaction, notes: Iterable[bytes]) -> None:
    """Close reads by their notes, unless the journal knows how far they came. An answer counts more than a start."""
    started: dict[str, Json] = {}
    answered: dict[str, bytes] = {}
    for note in notes:
        try:
            record: Any = orjson.loads(note)
            call_id, kind = record["call"], record["kind"]
        except (ValueError, TypeError, KeyError):
            continue  # nothing that this program has written
        if isinstance(call_id, str) and kind == "closed":
            answered[call_id] = note
        elif isinstance(call_id, str):
            started[call_id] = record
    for call_id in started.keys() | answered.keys():
        if ledger.progress(transaction, call_id) is not None:
            continue
        if call_id in answered:
            transaction.append("closed", call_id, answered[call_id])
        else:
            _append_failed(transaction, call_id, started[call_id])


def _append_failed(transaction: Transaction, call_id: str, started: Json, *, not_begun: bool = False) -> None:
    """Append the closing record of a read whose process died, or of any call that had not begun then."""
    reason = "the process that ran it died"
    if not_begun:
        reason += " before its tool started: it did not run"
        if started.get("mutationClass") == "read_only":  # of a short read, its own machine alone has the start
            reason = "the process that ran it died before it was on record that it started"
    body: Json = {
        "approvalTicketId": None, "authDecision": None, **started, "kind": "closed",
        "timestamp": iso(transaction.now_ms), "status": "ERROR",
        "errorCode": _CRASHED.error_code.value, "error_code": _CRASHED.code,
        "error_class": _CRASHED.error_class.value, "states": ["planned" if not_begun else "running", "failed"],
        "source": "synthetic", "outputSummary": None, "sideEffects": [], "latencyMs": None, "reason": reason,
    }  # fmt: skip
    tool, version = started.get("toolId") or "", started.get("version")
    ref = f"{tool}@{version}" if version else tool
    transaction.close(EndedCall(call_id, ref, "failed", _CRASHED.code), records.encode(body))

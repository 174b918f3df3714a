"""Selections in the store: the record of each, its request, and what the journal says about the tools of a tenant."""

from __future__ import annotations

import hashlib
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import orjson

from interlock.api.request_records import PURPOSE, seal_request
from interlock.api.rights import require, same_place
from interlock.core.errors import Failure
from interlock.data.canonical import canonical
from interlock.gateway.persistence.payloads import insert, owner_of
from interlock.gateway.persistence.pieces import Sealed
from interlock.privacy.redact import safe_log, safe_message
from interlock.selection.stages import MOST_REMAINING
from interlock.store import calls, payloads, records

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.api.selection_results import Selection
    from interlock.call.context import Caller
    from interlock.data.schema import Json
    from interlock.store.port import Reader, Transaction

_log = logging.getLogger("interlock.selection")
# What a model answered to a request.
ANSWER: Final = "answer:"
MOST_ANSWER: Final = 64 * 1024
_LONGEST_REASON: Final = 500
# Records in which it is looked up how often calls of a tool succeed and what they cost.
_LOOKED_THROUGH: Final = 5000


def store(parts: Parts, transaction: Transaction, made: Selection, caller: Caller, session: str) -> None:
    """Put a selection on record, and store its request encrypted unless that is switched off."""
    transaction.append("selection", made.id, _record(made, caller, session, transaction.now_ms))
    if parts.settings.selection_requests == "sealed":
        seal_request(parts, transaction, made.id, made.request, caller)
        if made.answer is not None:
            ref = f"{ANSWER}{made.id}"
            sealed = parts.box.seal(made.answer, purpose=PURPOSE, about=ref, within=transaction)
            insert(transaction, ref, made.id, owner_of(caller), Sealed(sealed, 0), 0, parts.settings.payload_days)


def model_answer(answer: Any, offered: Sequence[str]) -> Json:
    """The answer of a model, as the record of a selection has it.

    That is the tool, if it was offered, and the digest of the parameters, as a call with them has it in `inputHash`.
    Made-up names and parameters may hold words of the request: they are stored encrypted, as the request is.
    """
    members = cast("Mapping[str, Any]", answer if isinstance(answer, Mapping) else {})
    tool = members.get("tool")
    try:
        digest = hashlib.sha256(canonical(members["parameters"])).hexdigest() if "parameters" in members else None
    except Failure:
        digest = None  # not JSON
    return {"answered": {"tool": tool if tool in offered else None, "inputHash": digest}}


def selector_failed(parts: Parts, error: Exception) -> Failure:
    """Return the refusal (E3000) of a selection whose selector raised something unexpected, and log that."""
    _log.error("a selector failed\n%s", safe_log(parts.authority.redactor, "".join(traceback.format_exception(error))))
    words = safe_message(parts.authority.redactor, str(error))[:_LONGEST_REASON]
    return Failure("E3000", f"the selector failed: {type(error).__name__}{words and ': '}{words}")


def written(answer: Any) -> bytes | None:
    """The answer of a model as JSON; None where it is too large to store, or no JSON."""
    try:
        body = canonical(answer)
    except Failure:
        return None
    return body if len(body) <= MOST_ANSWER else None


async def answer_of(parts: Parts, selection: str, by: Caller) -> Json | None:
    """The answer of a model in a selection; None if none is stored. For operators and the same tenant.

    It may hold words of the request, so it needs `audit:read`, and reading it is on record.
    """
    require(by, "audit:read", "reading the answer of a model")
    ref = f"{ANSWER}{selection}"
    body = records.plain("audit.read", selection, parts.clock.now_ms(), by=by.acting, what=ref)
    await parts.journal.append("audit.read", selection, body)
    found = await parts.readers.read(lambda reader: payloads.owned(reader, ref))
    if found is None or found.body is None or not same_place(by, found.owner.partition("/")[0]):
        return None
    return orjson.loads(parts.box.open(found.body, purpose=PURPOSE, about=ref))


def _record(made: Selection, caller: Caller, session: str, now_ms: int) -> bytes:
    """The record of a selection. It holds names of tools, and nothing of the request."""
    intent, verdict = made.intent, made.verdict
    picked = next((one for one in made.candidates if one.tool == made.chosen), None)
    return records.plain(
        "selection",
        made.id,
        now_ms,
        callerId=caller.id,
        agentId=caller.agent,
        tenant=caller.tenant,
        session=session,
        intent=None if intent is None else {"kind": intent.kind, "confidence": round(intent.confidence, 4)},
        stages=[{"stage": one.name, "before": one.before, "after": len(one.tools), **one.facts} for one in made.stages],
        candidates=[one.tool for one in made.candidates],
        left={
            one.name: list(one.tools[:MOST_REMAINING]) for one in made.stages if one.name not in ("intent", "hierarchy")
        },
        chosen=made.chosen,
        refused=made.refused is not None,
        gate=None if verdict is None else {"answer": verdict.answer, "check": verdict.check, "reason": verdict.reason},
        tokens=made.tokens,
        # What a call of the chosen tool cost and took then, for reports that are made later.
        picked=None if picked is None else {"cost": picked.cost, "latency_ms": picked.latency_ms},
    )


def sums(tenant: str, reader: Reader) -> dict[str, calls.Sum]:
    """Calls, failures, cost and latency of the tools of a tenant, by name, in the last records."""
    first, last = calls.ends(reader)
    wanted = calls.Filter(tenant=tenant)
    least = max(first, last - _LOOKED_THROUGH + 1)
    found = calls.sums(reader, least, last, wanted, of="toolId", order="calls", most=_LOOKED_THROUGH)
    return {one.name: one for one in found}

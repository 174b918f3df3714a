"""Who may agree to what others ask for: a person, for themselves.

An approval is a person's own word. So whoever gives it is the local user, or holds a token of one link: nobody handed
it to them, and nothing below it counts as them. They speak for their own tenant; people of the tenant `local` run the
place and speak for all of it.

Nobody decides on what they asked for themselves. With four eyes, neither does anybody else on whose behalf it was asked
for: the caller, and everybody on the chain of delegation above the agent that asked. Somebody who is alone on a machine
can say so once, on record, and may then decide on their own calls. The journal's record is what counts, not a table.
"""

from __future__ import annotations

from typing import Literal

import orjson

from interlock.call.context import Caller
from interlock.data.schema import Json
from interlock.store import ledger, records
from interlock.store.port import Reader, Transaction, Unit

FourEyes = Literal["irreversible", "always", "never"]


def is_person(by: Caller) -> bool:
    """Whether a person acts, with nobody in between."""
    alone = by.capability is None or len(by.capability.links) == 1
    return by.kind == "human" and by.agent in (None, by.id) and alone


def speaks_for(by: Caller, tenant: str) -> bool:
    """Whether what belongs to a tenant is a person's to decide on."""
    return by.tenant in ("local", tenant)


def signature(by: Caller) -> Json:
    """Who said something, for the record: who acts, and by which token, if by one."""
    return {"by": by.acting} | ({} if by.capability is None else {"token": by.capability.leaf.jti})


def behind(head: Json, caller: str, four_eyes: FourEyes) -> frozenset[str]:
    """Everybody but the requester on whose behalf a call was asked for, where four eyes must decide on it."""
    on = four_eyes == "always" or (four_eyes == "irreversible" and head.get("mutationClass") == "write_irreversible")
    return frozenset((caller, *head.get("onBehalfOf", ()))) if on else frozenset()


def state_alone(by: Caller, *, alone: bool, reason: str) -> Unit[None]:
    """A unit in which a local person states that nobody else decides on this machine, or takes that back."""

    def unit(transaction: Transaction) -> None:
        ref, act = f"alone:{by.id}", "alone.stated" if alone else "alone.withdrawn"
        body = records.plain("authority", ref, transaction.now_ms, act=act, by=by.id, reason=reason)
        transaction.append("authority", ref, body)

    return unit


def is_alone(reader: Reader, by: Caller) -> bool:
    """Whether a local person has stated that they are alone on this machine, and has not taken it back."""
    if by.capability is not None or not by.id.startswith("local:"):
        return False
    last = ledger.newest_of_kind(reader, f"alone:{by.id}", "authority")
    return last is not None and orjson.loads(last).get("act") == "alone.stated"

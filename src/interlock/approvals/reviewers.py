"""Rules on who may approve: only a person, acting for themselves.

An approval must come from a person directly. The approver is therefore the local user, or holds a token with a single
link: it was not delegated to them, and tokens derived from it do not count. They decide for their own tenant; people of
the tenant `local` operate the server and decide for all tenants.

Nobody decides on their own requests. With four eyes, neither does anybody else on whose behalf the call was requested:
the caller, and everybody above the requesting agent in the delegation chain. A person who is alone on a machine can
state that once, on record, and may then decide on their own calls, one by one or in advance. The journal's record
counts, not a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import orjson

from interlock.store import ledger, records

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.data.schema import Json
    from interlock.store.port import Reader, Transaction, Unit

FourEyes = Literal["irreversible", "always", "never"]


def is_person(by: Caller) -> bool:
    """Whether a person acts directly, without an agent in between."""
    alone = by.capability is None or len(by.capability.links) == 1
    return by.kind == "human" and by.agent in (None, by.id) and alone


def speaks_for(by: Caller, tenant: str) -> bool:
    """Whether a person may decide on matters of a tenant."""
    return by.tenant in ("local", tenant)


def signature(by: Caller) -> Json:
    """Identify the acting person for the record, with their token if there is one."""
    return {"by": by.acting} | ({} if by.capability is None else {"token": by.capability.leaf.jti})


def behind(head: Json, caller: str, four_eyes: FourEyes) -> frozenset[str]:
    """Return everybody except the requester on whose behalf a call was made, if four eyes must decide on it."""
    on = four_eyes == "always" or (four_eyes == "irreversible" and head.get("mutationClass") == "write_irreversible")
    return frozenset((caller, *head.get("onBehalfOf", ()))) if on else frozenset()


def state_alone(by: Caller, *, alone: bool, reason: str) -> Unit[None]:
    """Unit in which a local person states that they are the only one on this machine, or revokes that."""

    def unit(transaction: Transaction) -> None:
        ref, act = f"alone:{by.id}", "alone.stated" if alone else "alone.withdrawn"
        body = records.plain("authority", ref, transaction.now_ms, act=act, by=by.id, reason=reason)
        transaction.append("authority", ref, body)

    return unit


def can_be_alone(by: Caller) -> bool:
    """Whether somebody is a person at the command line of this machine, who can state that they are alone there."""
    return by.capability is None and is_person(by) and by.id.startswith("local:")


def instead_of(by: Caller) -> str:
    """The advice for a person who may not decide on their own call."""
    if not can_be_alone(by):
        return "ask another approver"
    return "ask another approver; if you are the only person here, say so once: interlock approvals alone"


def is_alone(reader: Reader, by: Caller) -> bool:
    """Whether a local person has stated that they are alone on this machine, and has not revoked it."""
    if not can_be_alone(by):
        return False
    last = ledger.newest_of_kind(reader, f"alone:{by.id}", "authority")
    return last is not None and orjson.loads(last).get("act") == "alone.stated"

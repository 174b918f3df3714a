"""Who may agree to what others ask for: a person, for themselves.

An approval is a person's own word. So whoever gives it is the local user, or holds a token of one link: nobody handed
it to them, and nothing below it counts as them. They speak for their own tenant; people of the tenant `local` run the
place and speak for all of it.
"""

from __future__ import annotations

from interlock.core.context import Caller
from interlock.core.schema import Json


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

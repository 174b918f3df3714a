"""What every door offers, said once: who may ask, and what is done.

    door ──► Service ──► Interlock ──► gateway

A door translates a wire into these methods and their answers back; it decides nothing. Each method takes the caller
that `authenticate` has named, and asks no door what it thinks of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.core.context import Caller
from interlock.core.errors import Failure
from interlock.service.admin import Admin
from interlock.service.calls import Ask, Calls
from interlock.service.tools import Page, Tools

if TYPE_CHECKING:
    from interlock.app import Interlock

__all__ = ["Ask", "Page", "Service"]


class Service:
    """One Interlock, as seen from its doors."""

    def __init__(self, lock: Interlock) -> None:
        self.lock = lock
        self.calls = Calls(lock)
        self.tools = Tools(lock)
        self.admin = Admin(lock)

    def known(self, authorization: str | None) -> Caller | None:
        """The caller of an `Authorization` header that was verified before; None where `authenticate` must."""
        if authorization is None or authorization[:7].lower() != "bearer ":
            return None
        return self.lock.tokens.known(authorization[7:])

    async def authenticate(self, authorization: str | None) -> Caller:
        """Who is behind an `Authorization` header. E3212 without one; E3201, E3202, E3203 or E3207 for a bad one."""
        if authorization is None:
            raise Failure("E3212", "send a token: `Authorization: Bearer …` (interlock token issue makes one)")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Failure("E3203", "the authorization header must read `Bearer TOKEN`")
        return await self.lock.caller_of(token.strip())

    async def close(self, within_s: float = 10.0) -> None:
        """End what was started in the background."""
        await self.calls.close(within_s)

"""Reasons why a tool that exists for a caller cannot be called as things are.

One answer for everything that shows tools: the list of a surface, its record in the journal, and its document.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, Protocol

from interlock.call.connector import secret_of
from interlock.contract.permissions import permissions_of
from interlock.core.event_loop import give_way

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.api.denials import Denials
    from interlock.api.parts import Parts
    from interlock.call.context import Caller
    from interlock.contract.standard.document import BlockReason
    from interlock.registry.version import Version

# How many tools are looked at before other tasks get their turn.
_AT_ONCE: Final = 100


class VisibleTools(Protocol):
    """The catalog as callers see it."""

    denials: Denials

    def sees(self, caller: Caller, version: Version) -> bool:
        """Whether a tool exists for a caller."""
        ...

    async def visible(self, caller: Caller) -> list[Version]:
        """The newest version of every tool that is the caller's to use, in order of name."""
        ...


class Blocked:
    """Tells why a caller cannot call a tool, by the credentials that were stored when this was made."""

    def __init__(
        self, parts: Parts, tools: VisibleTools, caller: Caller, credentials: Mapping[str, int | None] | None
    ) -> None:
        self._parts = parts
        self._tools = tools
        self.caller = caller
        # The stored credentials, each with the time when it expires; None where another system has them.
        self._credentials = credentials

    @classmethod
    async def read(cls, parts: Parts, tools: VisibleTools, caller: Caller) -> Blocked:
        """Read which credentials exist. Everything else is at hand."""
        authority = parts.authority
        if authority.lent_from is not authority.secrets:
            return cls(parts, tools, caller, None)
        now_ms = parts.clock.now_ms()
        names = await authority.secrets.names()
        there = {one.name: one.expires_ms for one in names if one.expires_ms is None or one.expires_ms > now_ms}
        return cls(parts, tools, caller, there)

    @property
    def until_ms(self) -> int | None:
        """The earliest expiry of a credential: until then the answers hold. None if no credential expires."""
        return min((one for one in (self._credentials or {}).values() if one is not None), default=None)

    def reason(self, version: Version) -> tuple[BlockReason | None, str | None]:
        """The reason why a tool cannot be called, and more about it; None for one that can."""
        row, parts = version.row, self._parts
        if not self._tools.sees(self.caller, version):
            return "role_not_allowed", "the token or the scopes of the caller do not cover it"
        if parts.quarantine.holds(row.digest):
            return "feature_disabled", "it is in quarantine"
        if self._tools.denials.every_call(self.caller, version):
            return "policy_blocked", "the policy forbids every call of it"
        if missing := self.missing(version):
            return "credential_missing", f"the credential `{missing}` is not stored"
        if parts.availability(row) != "AVAILABLE":
            return "setup_required", f"the upstream `{row.origin.removeprefix('upstream:')}` does not answer"
        return None, None

    def missing(self, version: Version) -> str | None:
        """The name of a credential that calls of a tool need and that is not stored."""
        if self._credentials is None:
            return None
        names = (secret_of(name, self.caller) for name in credentials_of(version))
        return next((name for name in names if name not in self._credentials), None)


async def callable_tools(parts: Parts, tools: VisibleTools, caller: Caller) -> list[Version]:
    """The newest version of every tool that a caller can call as things are, in order of name.

    A tool that is blocked for any reason is left out, also one of an upstream that does not answer.
    """
    found: list[Version] = []
    state = await Blocked.read(parts, tools, caller)
    for place, one in enumerate(await tools.visible(caller), 1):
        if place % _AT_ONCE == 0:
            await give_way()  # other tasks get their turn
        denied = await tools.denials.remembered(caller, one)
        if not denied and state.missing(one) is None and parts.availability(one.row) == "AVAILABLE":
            found.append(one)
    return found


def credentials_of(version: Version) -> tuple[str, ...]:
    """The names of the credentials that calls of a tool need; `{caller}` in one stands for the caller."""
    needed = version.content.required_permissions
    return _credentials(needed) if needed else ()


@lru_cache(maxsize=1000)
def _credentials(permissions: tuple[str, ...]) -> tuple[str, ...]:
    return permissions_of(permissions).credentials

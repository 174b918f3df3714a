"""Principals: people, agents and services in `principals.toml` of the home.

    [[principal]]
    id = "local:*"            # a caller's id or DID; `*` and `?` match
    kind = "human"            # human, agent or service
    trust = 100               # 0 to 100
    groups = ["approvers"]
    scopes = ["audit:read"]

Groups and scopes of all matching entries add up; for kind and trust the first entry that states them decides, so put
the particular before the general. A caller without a matching entry has no trust, no groups and no scopes.
"""

from __future__ import annotations

import fnmatch
import tomllib

import pydantic

from interlock.authority.default_principals import DEFAULT
from interlock.call.context import Caller, CallerKind
from interlock.core.errors import Failure

__all__ = ["DEFAULT", "Principal", "Principals"]


class Principal(pydantic.BaseModel):
    """One entry: the statements about everybody whose id matches."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, defer_build=True)

    id: str = pydantic.Field(min_length=1)
    kind: CallerKind | None = None
    trust: int | None = pydantic.Field(None, ge=0, le=100)
    groups: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()


class _File(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, defer_build=True)

    principal: tuple[Principal, ...] = ()


class Principals:
    """The entries, and the caller for each id: always the same object, so that caches can key on it."""

    def __init__(self, text: str) -> None:
        try:
            self.entries = _File.model_validate(tomllib.loads(text)).principal
        except tomllib.TOMLDecodeError as error:
            raise _broken(str(error)) from None
        except pydantic.ValidationError as error:
            told = error.errors(include_url=False, include_input=False, include_context=False)
            faults = [f"`{'.'.join(map(str, one['loc']))}`: {one['msg'].lower()}" for one in told]
            raise _broken(faults[0], faults) from None
        self.groups = frozenset(group for entry in self.entries for group in entry.groups)
        self._callers: dict[str, Caller] = {}

    def knows(self, caller_id: str) -> bool:
        """Whether an entry matches this id."""
        return any(fnmatch.fnmatchcase(caller_id, entry.id) for entry in self.entries)

    def caller(self, caller_id: str) -> Caller:
        """The caller with this id, acting for itself."""
        known = self._callers.get(caller_id)
        if known is None:
            if len(self._callers) > 10_000:
                self._callers.clear()
            known = self._callers[caller_id] = self._caller(caller_id)
        return known

    def _caller(self, caller_id: str) -> Caller:
        matching = [entry for entry in self.entries if fnmatch.fnmatchcase(caller_id, entry.id)]
        kinds: list[CallerKind] = [entry.kind for entry in matching if entry.kind is not None]
        trusts = [entry.trust for entry in matching if entry.trust is not None]
        return Caller(
            id=caller_id,
            kind=kinds[0] if kinds else "human",
            trust=trusts[0] if trusts else 0,
            groups=frozenset(group for entry in matching for group in entry.groups),
            scopes=frozenset(scope for entry in matching for scope in entry.scopes),
        )


def _broken(why: str, faults: list[str] | None = None) -> Failure:
    return Failure("E3205", f"principals.toml cannot be used: {why}", details={"faults": faults or [why]})

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
from collections.abc import Mapping
from typing import Any, cast, get_args

from interlock.authority.default_principals import DEFAULT
from interlock.call.context import Caller, CallerKind
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple

__all__ = ["DEFAULT", "Principal", "Principals"]

_KINDS: tuple[str, ...] = get_args(CallerKind)


class Principal(NamedTuple):
    """One entry: the statements about everybody whose id matches."""

    id: str
    kind: CallerKind | None = None
    trust: int | None = None
    groups: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()


class Principals:
    """The entries, and the caller for each id: always the same object, so that caches can key on it."""

    def __init__(self, text: str) -> None:
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise _broken(str(error)) from None
        faults = _faults(document)
        if faults:
            raise _broken(faults[0], faults)
        self.entries = tuple(map(_principal, document.get("principal", ())))
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


def _principal(entry: Mapping[str, Any]) -> Principal:
    lists = {name: tuple(entry.get(name, ())) for name in ("groups", "scopes")}
    return Principal(entry["id"], entry.get("kind"), entry.get("trust"), **lists)


def _faults(document: Mapping[str, Any]) -> list[str]:
    """Return every fault of the document, with its place.

    Written by hand, without a model: every command reads this file, and a model takes long to build.
    """
    faults = [f"`{name}`: there is no such table; write [[principal]]" for name in document if name != "principal"]
    entries = document.get("principal", [])
    if not isinstance(entries, list):
        return [*faults, "`principal`: it is a list; write [[principal]]"]
    for number, entry in enumerate(cast("list[object]", entries)):
        if not isinstance(entry, dict):
            faults.append(f"`principal.{number}`: it is a table; write [[principal]]")
            continue
        stated = cast("dict[str, object]", entry)
        found = {name: _fault(name, value) for name, value in {"id": "", **stated}.items()}
        faults += [f"`principal.{number}.{name}`: {words}" for name, words in found.items() if words is not None]
    return faults


def _fault(name: str, value: object) -> str | None:
    """Why a value of an entry cannot be used; None if it can."""
    match name:
        case "id":
            return None if isinstance(value, str) and value else "a text that is not empty is needed"
        case "kind":
            return None if value in _KINDS else f"one of {', '.join(_KINDS)} is needed"
        case "trust":
            fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 100
            return None if fits else "a whole number from 0 to 100 is needed"
        case "groups" | "scopes":
            texts = cast("list[object]", value) if isinstance(value, list) else [None]
            return None if all(isinstance(one, str) for one in texts) else "a list of texts is needed"
        case _:
            return f"there is no such field; an entry has {', '.join(Principal._fields)}"


def _broken(why: str, faults: list[str] | None = None) -> Failure:
    return Failure("E3205", f"principals.toml cannot be used: {why}", details={"faults": faults or [why]})

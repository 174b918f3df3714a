"""The tools a caller can see: those their token names and whose scopes they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlock.core.context import Caller
from interlock.core.errors import Failure
from interlock.registry.catalog import Version

if TYPE_CHECKING:
    from interlock.app import Interlock

PAGE = 100


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the tools, and where to go on."""

    versions: Sequence[Version]
    cursor: str | None


class Tools:
    """The catalog as one caller sees it."""

    def __init__(self, lock: Interlock) -> None:
        self._lock = lock

    def visible(self, caller: Caller) -> list[Version]:
        """The newest callable version of every tool that is the caller's to use, in order of name."""
        catalog = self._lock.catalog
        found: list[Version] = []
        for address in catalog.addresses():
            try:
                version = catalog.resolve(address)
            except Failure:
                continue  # sunset, or not to be had
            if sees(caller, version):
                found.append(version)
        return found

    def page(self, caller: Caller, cursor: str | None = None, limit: int = PAGE) -> Page:
        """A page of them. The cursor is the last name of the page before."""
        found = self.visible(caller)
        rest = [one for one in found if cursor is None or one.row.address > cursor]
        shown = rest[:limit]
        return Page(shown, shown[-1].row.address if len(rest) > limit else None)

    def find(self, name: str, spec: str | None, caller: Caller) -> Version:
        """One tool, by name and range. To a caller who may not use it, it does not exist (E3101)."""
        version = self._lock.catalog.resolve(name, spec)
        if not sees(caller, version):
            raise Failure("E3101", f"no tool named `{name}`; list the tools to see those you may use")
        return version

    def search(self, query: str, caller: Caller, limit: int = 20) -> list[Version]:
        """Tools whose name, title, description, tags or hint hold every word, best first."""
        words = query.lower().split()
        scored: list[tuple[int, str, Version]] = []
        for version in self.visible(caller):
            manifest = version.contract.manifest
            name = version.row.address.lower()
            text = " ".join(
                (name, manifest.name, manifest.description, manifest.search_hint or "", *manifest.tags)
            ).lower()
            if all(word in text for word in words):
                scored.append((-sum(word in name for word in words), name, version))
        return [version for _, _, version in sorted(scored, key=lambda one: one[:2])[:limit]]


def sees(caller: Caller, version: Version) -> bool:
    """Whether a tool is on a caller's surface."""
    if not caller.scopes.issuperset(version.contract.auth.required_scopes):
        return False
    return caller.capability is None or caller.capability.covers(version.row.address, version.row.version)

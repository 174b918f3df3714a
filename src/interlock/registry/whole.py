"""The whole registry as of one moment. A change replaces what changed, and keeps everything else."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from interlock.contract.versions import common, resolve
from interlock.core.errors import Failure

if TYPE_CHECKING:
    from interlock.call.capability import Capability
    from interlock.registry.version import Version

# How many changes a cache may be behind and still be told which tools they were about.
_REMEMBERED: Final = 64

# Of one tool: the version that is served, and all versions by their number.
Entry = tuple["Version", Mapping[str, "Version"]]


class Whole:
    """Every version of every tool. It never changes: a change of the registry makes another one."""

    def __init__(self, tools: dict[str, dict[str, Version]], available: list[Entry], noticed: frozenset[str]) -> None:
        self.tools = tools
        # In order of name.
        self.available = available
        # The tools of which a version ends at some time.
        self.noticed = noticed

    @classmethod
    def of(cls, versions: Iterable[Version], now_ms: int) -> Whole:
        """All versions, given in order of the names of their tools."""
        tools: dict[str, dict[str, Version]] = {}
        for version in versions:
            tools.setdefault(version.row.address, {})[version.row.version] = version
        entries = (_entry(found, now_ms) for found in tools.values())
        noticed = frozenset(address for address, found in tools.items() if _ends(found))
        return cls(tools, [one for one in entries if one is not None], noticed)

    def patched(self, changed: Mapping[str, dict[str, Version]], now_ms: int) -> Whole:
        """The same with other versions of some tools. The lists are copied, not made anew."""
        tools, available = self.tools.copy(), self.available.copy()
        tools.update(changed)
        for address, versions in changed.items():
            at = bisect_left(available, address, key=address_of)
            there = at < len(available) and address_of(available[at]) == address
            entry = _entry(versions, now_ms)
            available[at : at + there] = [] if entry is None else [entry]
        noticed = self.noticed.difference(changed).union(one for one in changed if _ends(changed[one]))
        return Whole(tools, available, noticed)

    def entries(self, after: str) -> Iterator[Entry]:
        """The tools behind a name, in order."""
        for at in range(bisect_right(self.available, after, key=address_of) if after else 0, len(self.available)):
            yield self.available[at]

    def some(self, addresses: Collection[str]) -> Iterator[Entry]:
        """Those of some tools that have an available version, in order."""
        for address in sorted(addresses):
            at = bisect_left(self.available, address, key=address_of)
            if at < len(self.available) and address_of(self.available[at]) == address:
                yield self.available[at]


class Changelog:
    """The states of the registry that a process has seen, by number, and the tools that changed between them."""

    def __init__(self) -> None:
        self.number = 0
        self._recent: deque[frozenset[str]] = deque(maxlen=_REMEMBERED)

    def add(self, addresses: frozenset[str] | None) -> None:
        """Some tools have changed; None: any may have."""
        self.number += 1
        if addresses is None:
            self._recent.clear()
        else:
            self._recent.append(addresses)

    def since(self, number: int) -> frozenset[str] | None:
        """The tools that changed since a state; None if that is not known."""
        behind = self.number - number
        if not 0 <= behind <= len(self._recent):
            return None
        return frozenset[str]().union(*list(self._recent)[len(self._recent) - behind :])


def address_of(entry: Entry) -> str:
    return entry[0].row.address


def _entry(versions: Mapping[str, Version], now_ms: int) -> Entry | None:
    chosen = _chosen(versions, now_ms)
    return None if chosen is None else (chosen, versions)


def _ends(versions: Mapping[str, Version]) -> bool:
    return any(one.row.notice is not None and one.row.state in ("active", "deprecated") for one in versions.values())


def _chosen(versions: Mapping[str, Version], now_ms: int) -> Version | None:
    """Return the default version. Most tools have one version, and then there is nothing to compare."""
    if len(versions) == 1:
        (only,) = versions.values()
        if only.row.state == "active" and only.row.notice is None and "-" not in only.row.version:
            return only
    return alive(None, versions, now_ms)


def alive(spec: str | None, versions: Mapping[str, Version], now_ms: int) -> Version | None:
    """Return the version that a range selects among those whose removal date has not passed; None if an exactly named
    version is gone, or if none is left.
    """
    if spec is not None and is_exact(spec, versions):
        return None
    pool = {v for v, version in versions.items() if not version.gone(now_ms)}
    try:
        return versions[resolve(spec, pool, deprecated=deprecated(versions))]
    except Failure:
        return None


def within(
    selected: Version, spec: str | None, versions: Mapping[str, Version], capability: Capability, now_ms: int
) -> Version:
    """Return the selected version if a token covers it, else the highest that both the range and the token admit."""
    address = selected.row.address
    if capability.covers(address, selected.row.version):
        return selected
    if not capability.names(address) or (spec is not None and is_exact(spec, versions)):
        return selected  # the token is not for this tool, which authorization reports
    allowed = {v for v, one in versions.items() if not one.gone(now_ms) and capability.covers(address, v)}
    try:
        return versions[common((spec,), allowed, deprecated(versions))]
    except Failure as failure:
        words = f"the token allows no version of {address} that was asked for: {failure.message}"
        raise Failure(failure.code, words, details=failure.details) from None


def deprecated(versions: Mapping[str, Version]) -> set[str]:
    return {v for v, version in versions.items() if version.row.state != "active"}


def is_exact(spec: str, versions: Iterable[str]) -> bool:
    return spec.lstrip("=v ") in versions

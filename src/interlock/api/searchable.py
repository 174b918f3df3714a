"""The tools that each caller can find, and the index of them. Both follow the registry.

What a caller sees is remembered. After a change, the tools that it was about are looked at again, and all others are
kept: in the index, and for each caller. Where it is not known what a change was about, every tool is looked at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import orjson

from interlock.api.apps import is_for_apps
from interlock.authority.decisions import caller_facts
from interlock.call.context import Caller
from interlock.core.event_loop import Exclusive
from interlock.core.record import dataclass
from interlock.core.threads import DEFINITIONS
from interlock.registry.version import Version
from interlock.search.fields import entry_of
from interlock.store.upstreams import texts

if TYPE_CHECKING:
    from interlock.api.denials import Denials
    from interlock.api.parts import Parts
    from interlock.registry.quarantine import Quarantined
    from interlock.search.index import Index, IndexedTool, Mask

# The tools that a caller sees, in order of name; with names, those of them.
Visible = Callable[[Caller, Collection[str] | None], Awaitable[Iterable[Version]]]

# How many tools are indexed in one piece of work on a thread, and looked at before other tasks get their turn.
_AT_ONCE: Final = 100
_MOST_CALLERS: Final = 64
# How often a change is followed while others come, before the result may be that of more than one moment.
_MOST_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Surface:
    """The tools that a caller sees, as of a state of the registry and of the quarantine.

    `until_ms` is when a version reaches its removal date, so that it holds no longer; None if none does. `denied` are
    those of the tools that the policy denies the caller whatever is sent. They are not in the mask.
    """

    number: int
    held: Mapping[str, Quarantined]
    until_ms: int | None
    # By their ids in the index, in no order; and these ids in order of name.
    versions: dict[str, Version]
    order: list[str]
    mask: Mask
    upstreams: Mapping[str, int]
    denied: frozenset[str] = frozenset()
    # The order of the surface from which this one was made, and the ids that were looked at since.
    before: tuple[list[str], Collection[str]] | None = None

    def __contains__(self, tool: str) -> bool:
        return tool in self.versions and tool not in self.denied

    def __len__(self) -> int:
        return len(self.versions) - len(self.denied)

    def only(self, tools: Collection[str], index: Index) -> Surface:
        """The same with some of the tools."""
        some = {tool: self.versions[tool] for tool in tools if tool in self}
        return replace(self, versions=some, order=list(some), mask=index.mask(some), denied=frozenset())


@dataclass(frozen=True, slots=True)
class _Allowed:
    """A surface without what the policy denies, as of a state of the rules."""

    whole: Surface
    rules: object
    surface: Surface


class Searchable:
    """The tools that callers can find. The index has every tool that somebody has looked for so far."""

    def __init__(self, parts: Parts, visible: Visible, denials: Denials) -> None:
        self._parts = parts
        self._visible = visible
        self._denials = denials
        self._surfaces: OrderedDict[tuple[object, ...], Surface] = OrderedDict()
        self._allowed: OrderedDict[tuple[object, ...], _Allowed] = OrderedDict()
        self._filling = Exclusive()
        # The state of the registry up to which the index has lost what is gone.
        self._swept = -1
        # The ids in the index of each tool, and by each name of a tool, with and without namespace or version.
        self._ids: dict[str, set[str]] = {}
        self._names: dict[str, set[str]] = {}

    def named(self, name: str, surface: Surface) -> list[Version]:
        """The tools of a surface that have a name."""
        found = [surface.versions[one] for one in self._names.get(name, ()) if one in surface]
        return sorted(found, key=lambda one: one.row.address)

    async def allowed(self, caller: Caller, index: Index, *, apps: bool = False) -> Surface:
        """The tools that a caller sees, without those that the policy denies them whatever they send."""
        whole = await self.of(caller, index, apps=apps)
        rules, key = self._denials.rules(), (self._key(caller, apps=apps), caller_facts(caller))
        known = self._allowed.get(key)
        if known is not None and known.whole is whole and known.rules is rules:
            self._allowed.move_to_end(key)
            return known.surface
        judged = known if known is not None and known.rules is rules else None
        fresh = whole.versions if judged is None else {one: whole.versions[one] for one in _fresh(whole, judged.whole)}
        denied = await self._denials.among(caller, fresh)
        if judged is not None:
            denied |= {one for one in judged.surface.denied if one in whole.versions}
        surface = whole
        if denied:
            surface = replace(whole, mask=index.changed(whole.mask, less=denied, more=()), denied=denied)
        self._allowed[key] = _Allowed(whole, rules, surface)
        while len(self._allowed) > _MOST_CALLERS:
            self._allowed.popitem(last=False)
        return surface

    def _key(self, caller: Caller, *, apps: bool) -> tuple[object, ...]:
        # What is excluded depends on who calls, and not only on their token.
        who = (caller.id, caller.agent, caller.groups) if self._parts.settings.surface_excluded else None
        return None if caller.capability is None else caller.capability.digest, caller.scopes, who, apps

    async def of(self, caller: Caller, index: Index, *, apps: bool = False) -> Surface:
        """The tools that a caller sees."""
        key = self._key(caller, apps=apps)
        for _ in range(_MOST_TRIES):
            number, held = await self._parts.catalog.current(), self._parts.quarantine.held
            now_ms = self._parts.clock.now_ms()
            known = self._surfaces.get(key)
            if known is not None and known.mask.numbering != index.numbering:
                known = replace(known, mask=index.mask(known.versions))
            changed = None if known is None else await self._changed(known, held, now_ms)
            if known is not None and changed is not None:
                surface = known
                if changed or known.number != number or known.held is not held:
                    surface = await self._patched(known, changed, number, held, caller, index, apps=apps)
            else:
                surface = await self._read(number, held, caller, index, apps=apps)
            self._surfaces[key] = surface
            self._surfaces.move_to_end(key)
            while len(self._surfaces) > _MOST_CALLERS:
                self._surfaces.popitem(last=False)
            # INVARIANT: unless the registry changes all the time, a surface is of one moment.
            if await self._parts.catalog.current() == number:
                break
        return surface  # pyright: ignore[reportPossiblyUnboundVariable] - it is tried at least once

    async def _changed(self, known: Surface, held: Mapping[str, Quarantined], now_ms: int) -> frozenset[str] | None:
        """The tools that have changed since a surface was made; None if that is not known."""
        catalog = self._parts.catalog
        changed = catalog.changed_since(known.number)
        if changed is None:
            return None
        if held is not known.held:
            digests = known.held.keys() ^ held.keys()
            changed |= {one.row.address for one in await catalog.everything() if one.row.digest in digests}
        if known.until_ms is not None and now_ms >= known.until_ms:
            changed |= await catalog.ending()
        return changed

    async def _read(
        self, number: int, held: Mapping[str, Quarantined], caller: Caller, index: Index, *, apps: bool
    ) -> Surface:
        seen = await self._visible(caller, None)
        versions = {id_of(one): one for one in seen if apps or not is_for_apps(one)}
        await self._fill(index, versions, number)
        upstreams = Counter(one for one in map(_upstream, versions.values()) if one)
        until_ms = await self._until_ms()
        return Surface(number, held, until_ms, versions, list(versions), index.mask(versions), upstreams)

    async def _patched(
        self,
        known: Surface,
        changed: frozenset[str],
        number: int,
        held: Mapping[str, Quarantined],
        caller: Caller,
        index: Index,
        *,
        apps: bool,
    ) -> Surface:
        """A surface on which some tools are looked at again."""
        seen = await self._visible(caller, changed)
        fresh = {one.row.address: one for one in seen if apps or not is_for_apps(one)}
        await self._fill(index, {id_of(one): one for one in fresh.values()}, number, changed)
        # Copies, which take as long as two reads of the memory: making them anew takes a hundred times that.
        versions, order = known.versions.copy(), known.order.copy()
        upstreams, gone = Counter(known.upstreams), list[str]()
        for address in changed:
            at = bisect_left(order, address, key=_address)
            if at < len(order) and _address(order[at]) == address:
                gone.append(order.pop(at))
                upstreams[_upstream(versions.pop(gone[-1]))] -= 1
            after = fresh.get(address)
            if after is not None:
                order.insert(at, id_of(after))
                versions[order[at]] = after
                upstreams[_upstream(after)] += 1
        same = not gone and not fresh
        if known.mask.numbering != index.numbering:
            mask = index.mask(versions)
        else:
            more = [id_of(one) for one in fresh.values()]
            mask = known.mask if same else index.changed(known.mask, less=gone, more=more)
        named = {one: count for one, count in upstreams.items() if one and count > 0}
        before = known.order, [id_of(one) for one in fresh.values()]
        return Surface(number, held, await self._until_ms(), versions, order, mask, named, before=before)

    async def _until_ms(self) -> int | None:
        """When the next version reaches its removal date."""
        catalog, now_ms = self._parts.catalog, self._parts.clock.now_ms()
        ending = await catalog.everything(await catalog.ending())
        notices = [one.row.notice for one in ending if one.row.notice is not None]
        return min((one.removal_ms for one in notices if one.removal_ms > now_ms), default=None)

    async def _fill(
        self, index: Index, versions: Mapping[str, Version], number: int, changed: Collection[str] | None = None
    ) -> None:
        """Index what is not there yet, and forget what can no longer be called."""
        async with self._filling:
            missing = [(tool, one) for tool, one in versions.items() if tool not in index]
            for start in range(0, len(missing), _AT_ONCE):
                some = missing[start : start + _AT_ONCE]
                await DEFINITIONS.run(_add, index, some, await self.server_texts(some))
                for tool, one in some:
                    self._ids.setdefault(one.row.address, set()).add(tool)
                    for name in _names(one):
                        self._names.setdefault(name, set()).add(tool)
            if self._swept != number:
                await self._sweep(index, self._parts.catalog.changed_since(self._swept))
                self._swept = number

    async def server_texts(self, tools: Sequence[tuple[str, Version]]) -> Mapping[str, str]:
        """The descriptions that the upstreams of some tools give of themselves, by their names."""
        names = {one for _, version in tools if (one := _upstream(version))}
        return await self._parts.journal.read(partial(texts, names=names)) if names else {}

    async def _sweep(self, index: Index, changed: Collection[str] | None) -> None:
        looked_at = self._ids.keys() if changed is None else changed & self._ids.keys()
        if not looked_at:
            return
        there = await self._parts.catalog.everything(None if changed is None else looked_at)
        callable_ = {id_of(one): one for one in there if one.row.state in ("active", "deprecated")}
        for address in list(looked_at):
            for tool in [one for one in self._ids[address] if one not in callable_]:
                index.remove([tool])
                self._ids[address].discard(tool)
                version = tool.partition(" ")[0].partition("@")[2]
                for name in (address, f"{address}@{version}", address.partition(".")[2]):
                    self._names[name].discard(tool)
                    if not self._names[name]:
                        del self._names[name]
            if not self._ids[address]:
                del self._ids[address]


def _fresh(surface: Surface, judged: Surface) -> Collection[str]:
    """The ids on a surface that were not on another one of the same caller."""
    if surface.before is not None and surface.before[0] is judged.order:
        return surface.before[1]
    return surface.versions.keys() - judged.versions.keys()


def id_of(version: Version) -> str:
    return f"{version.row.address}@{version.row.version} {version.row.digest}"


def _names(version: Version) -> tuple[str, str, str]:
    address = version.row.address
    return address, f"{address}@{version.row.version}", address.partition(".")[2]


def _address(tool: str) -> str:
    """The address in an id."""
    return tool.partition("@")[0]


def _upstream(version: Version) -> str:
    """The upstream of a tool; empty if it has none."""
    origin = version.row.origin
    return origin.removeprefix("upstream:") if origin.startswith("upstream:") else ""


def entries_of(tools: Sequence[tuple[str, Version]], server_texts: Mapping[str, str]) -> list[IndexedTool]:
    """The entries of some tools in the index."""
    return [
        entry_of(tool, orjson.loads(one.row.manifest), one.row.origin, server_texts.get(_upstream(one), ""))
        for tool, one in tools
    ]


def _add(index: Index, tools: Sequence[tuple[str, Version]], server_texts: Mapping[str, str]) -> None:
    index.add(entries_of(tools, server_texts))

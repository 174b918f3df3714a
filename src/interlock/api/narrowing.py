"""The first stages of a selection: the kind of help that a request needs, and the categories that may hold its tool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

import orjson

from interlock.api.search import Search
from interlock.core.threads import DEFINITIONS, WALKS
from interlock.search.fields import entry_of
from interlock.selection.stages import Stage

if TYPE_CHECKING:
    from interlock.data.schema import Json
    from interlock.registry.version import Version
    from interlock.selection.hierarchy import Hierarchy
    from interlock.selection.intent import Intent
    from interlock.selection.kinds import Kind

_MOST_HIERARCHIES: Final = 8
_MOST_KINDS: Final = 100_000


class Narrowing:
    """Narrows the tools that a caller may use, by their ids in the index. What is known of a tool is kept by its id."""

    def __init__(self, index: Search) -> None:
        self._index = index
        self._kinds: dict[str, frozenset[Kind]] = {}
        self._hierarchies: OrderedDict[frozenset[str], Hierarchy] = OrderedDict()

    async def intent(self, request: str) -> Intent:
        from interlock.selection.intent import classifier

        model = await DEFINITIONS.run(classifier)
        return await WALKS.run(model.classify, request)

    async def by_intent(self, visible: Mapping[str, Version], intent: Intent | None, stages: list[Stage]) -> list[str]:
        """The tools that can give the help which a request needs. If there are none, the verdict does not count."""
        every = list(visible)
        why = "not asked for"
        if intent is not None:
            why = f"no verdict: {intent.confidence:.2f} is not clear enough"
        narrowed = await self.giving(visible, intent)
        if intent is not None and intent.kind is not None:
            why = f"{intent.kind}, {intent.confidence:.2f}"
            if not narrowed and intent.kind != "none":
                narrowed, why = every, f"{why}: no tool gives that help, so all stay"
        stages.append(Stage("intent", len(every), _addresses(visible, narrowed), why))
        return narrowed

    async def giving(self, tools: Mapping[str, Version], intent: Intent | None) -> list[str]:
        """Those of some tools that can give the help which a request needs; all where there is no verdict about it."""
        if intent is None or intent.kind is None:
            return list(tools)
        if intent.kind == "none":
            return []
        kinds = await DEFINITIONS.run(self._kinds_of, tools)
        return [tool for tool in tools if intent.allows(kinds[tool])]

    def _kinds_of(self, visible: Mapping[str, Version]) -> Mapping[str, frozenset[Kind]]:
        from interlock.selection.kinds import kinds_of

        if len(self._kinds) > _MOST_KINDS:
            self._kinds = {}
        known = self._kinds
        for tool, version in visible.items():
            if tool not in known:
                manifest: Json = orjson.loads(version.row.manifest)
                words = [str(manifest.get(name) or "") for name in ("tool_id", "description", "mutation_class")]
                known[tool] = kinds_of(*words)
        return known

    async def by_category(
        self, request: str, visible: Mapping[str, Version], narrowed: list[str], stages: list[Stage]
    ) -> tuple[list[str], Hierarchy | None]:
        """The tools of the categories that fit a request, where there are many tools."""
        from interlock.selection.hierarchy import CHOSEN, FLAT

        if len(visible) <= FLAT or not narrowed:
            why = f"{len(visible)} tools are few enough" if narrowed else "there are no candidates"
            stages.append(Stage("hierarchy", len(narrowed), _addresses(visible, narrowed), why))
            return narrowed, None
        hierarchy = await self._hierarchy(visible)
        among = None if len(narrowed) == len(visible) else frozenset(narrowed)
        chosen = await WALKS.run(hierarchy.choose, request, CHOSEN, among)
        inside = {tool for one in chosen for tool in one.tools}
        inside_tools = [tool for tool in narrowed if tool in inside]
        why = f"{len(chosen)} of {len(hierarchy.categories)} categories: {'; '.join(one.name for one in chosen)}"
        names = [one.name for one in chosen]
        stages.append(Stage("hierarchy", len(narrowed), _addresses(visible, inside_tools), why, {"categories": names}))
        return inside_tools, hierarchy

    async def _hierarchy(self, visible: Mapping[str, Version]) -> Hierarchy:
        key = frozenset(visible)
        known = self._hierarchies.get(key)
        if known is None:
            vectors = await self._index.vectors(list(visible))
            known = await DEFINITIONS.run(_hierarchy, visible, vectors)
            self._hierarchies[key] = known
            while len(self._hierarchies) > _MOST_HIERARCHIES:
                self._hierarchies.popitem(last=False)
        self._hierarchies.move_to_end(key)
        return known


def _hierarchy(visible: Mapping[str, Version], vectors: Any) -> Hierarchy:
    from interlock.search.table import shipped
    from interlock.selection.hierarchy import Hierarchy, partition

    entries = [entry_of(tool, orjson.loads(one.row.manifest), one.row.origin) for tool, one in visible.items()]
    table = shipped()
    if vectors is None:
        vectors = table.documents([one.text() for one in entries])
    return Hierarchy(partition(entries, vectors), table)


def _addresses(visible: Mapping[str, Version], tools: Collection[str]) -> tuple[str, ...]:
    return tuple(visible[tool].row.address for tool in tools)

"""Finds tools by what they do, among those that a caller can see.

The index is made with the first search and follows the registry: a change indexes what is new and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, cast

import orjson

from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.core.threads import DEFINITIONS, WALKS
from interlock.data.schema import Json, resolve_ref
from interlock.registry.catalog import Version

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.search.index import Entry, Hit, Index, Mask

Visible = Callable[[Caller], Awaitable[Iterable[Version]]]

DEFAULT_LIMIT: Final = 10
MOST_FOUND: Final = 1000
# How many tools are indexed in one piece of work on a thread, and looked at before other tasks get their turn.
_AT_ONCE: Final = 100
# For how long it is remembered which tools a caller sees. A version may reach its removal date meanwhile.
_SEEN_FOR_S: Final = 1.0
_MOST_CALLERS: Final = 64


@dataclass(frozen=True, slots=True)
class Found:
    """A tool that was found. The score is between 0 and 1 and comparable within one search."""

    version: Version
    score: float

    def document(self) -> Json:
        manifest: Json = orjson.loads(self.version.row.manifest)
        return {
            "tool": self.version.row.address,
            "version": self.version.row.version,
            "mutation_class": manifest.get("mutation_class"),
            "description": manifest.get("description", ""),
            "score": self.score,
        }


@dataclass(slots=True)
class _Surface:
    """The tools that a caller sees, as of a state of the registry and the quarantine."""

    state: tuple[object, ...]
    until: float
    versions: Mapping[str, Version]
    mask: Mask


class Search:
    """Searches of one data directory."""

    def __init__(self, parts: Parts, visible: Visible) -> None:
        self._parts = parts
        self._visible = visible
        self._surfaces: OrderedDict[tuple[object, ...], _Surface] = OrderedDict()
        self._filling = asyncio.Lock()
        self._swept: object = None

    async def find(self, query: str, caller: Caller, limit: int = DEFAULT_LIMIT) -> list[Found]:
        """The tools that fit a request best, best first. A tool whose name is the request comes first."""
        if not query.strip():
            raise Failure("E3004", "say what the tool is to do", resolution="search for words, such as: send mail")
        if not 1 <= limit <= MOST_FOUND:
            raise Failure("E3004", f"a search returns between 1 and {MOST_FOUND:,} tools")
        index = await self._ready()
        surface, hits = await self._hits(index, query, limit, caller)
        found = [Found(surface.versions[hit.id], round(hit.score, 4)) for hit in hits if hit.id in surface.versions]
        named = [one for one in surface.versions.values() if _is_named(one, query.strip())]
        if named:
            rest = [one for one in found if one.version not in named]
            found = [*(Found(one, 1.0) for one in named), *rest][:limit]
        return found

    async def _hits(self, index: Index, query: str, limit: int, caller: Caller) -> tuple[_Surface, list[Hit]]:
        from interlock.search.index import Renumbered

        while True:
            surface = await self._surface(caller, index)
            with suppress(Renumbered):
                return surface, await WALKS.run(index.search, query, limit, surface.mask)

    @cached_property
    def _index(self) -> Index:
        from interlock.search.index import Index
        from interlock.search.table import shipped

        return Index(shipped())

    async def _ready(self) -> Index:
        """The index; made on a thread, because numpy and the table take a while to load."""
        if "_index" not in vars(self):
            await DEFINITIONS.run(lambda: self._index)
        return self._index

    async def _surface(self, caller: Caller, index: Index) -> _Surface:
        """What a caller sees, as of now; remembered for a moment, because it takes a look at every tool."""
        state = (await self._parts.catalog.current(), self._parts.gateway.quarantine.held, index.numbering)
        key = (None if caller.capability is None else caller.capability.digest, caller.scopes)
        now = self._parts.clock.monotonic()
        known = self._surfaces.get(key)
        if known is not None and known.until > now and known.state == state:
            self._surfaces.move_to_end(key)
            return known
        versions = {_id(one): one for one in await self._visible(caller)}
        await self._fill(index, versions, state[0])
        surface = _Surface((*state[:2], index.numbering), now + _SEEN_FOR_S, versions, index.mask(versions))
        self._surfaces[key] = surface
        while len(self._surfaces) > _MOST_CALLERS:
            self._surfaces.popitem(last=False)
        return surface

    async def _fill(self, index: Index, versions: Mapping[str, Version], revision: object) -> None:
        """Index what is not there yet, and forget what is no longer registered."""
        async with self._filling:
            missing = [(tool, one) for tool, one in versions.items() if tool not in index]
            for start in range(0, len(missing), _AT_ONCE):
                await DEFINITIONS.run(_add, index, missing[start : start + _AT_ONCE])
            if self._swept is not revision:
                registered = {_id(one) for one in await self._parts.catalog.everything()}
                index.remove(index.ids() - registered)
                self._swept = revision


def _id(version: Version) -> str:
    return f"{version.row.address}@{version.row.version} {version.row.digest}"


def _is_named(version: Version, text: str) -> bool:
    address = version.row.address
    return text in (address, f"{address}@{version.row.version}", address.partition(".")[2])


def _add(index: Index, versions: Sequence[tuple[str, Version]]) -> None:
    index.add(entry_of(tool, orjson.loads(one.row.manifest), one.row.origin) for tool, one in versions)


def entry_of(tool: str, manifest: Json, origin: str = "") -> Entry:
    """What the index knows of a tool. Fields that are marked as internal are not among it."""
    from interlock.search.index import Entry

    schema: Any = manifest.get("parameters")
    root: Json = cast("Json", schema) if isinstance(schema, dict) else {}
    names: list[str] = []
    texts: list[str] = []
    properties: Any = root.get("properties")
    for name, part in (cast("Json", properties) if isinstance(properties, dict) else {}).items():
        plain: Json = cast("Json", part) if isinstance(part, dict) else {}
        shown: Json = {**resolve_ref(root, plain), **plain}
        if shown.get("x-internal") is True:
            continue
        names.append(name)
        texts += _texts(shown)
    name = str(manifest.get("tool_id") or "")
    titles = [one for one in (manifest.get("name"), manifest.get("title")) if one and _plain(str(one)) != _plain(name)]
    upstream = origin.removeprefix("upstream:") if origin.startswith("upstream:") else None
    return Entry(
        id=tool,
        name=name,
        description=str(manifest.get("description") or ""),
        parameters=names,
        parameter_texts=texts,
        server=upstream or str(manifest.get("namespace") or ""),
        tags=[str(one) for one in (*titles, manifest.get("search_hint"), *(manifest.get("tags") or ())) if one],
    )


def _plain(name: str) -> str:
    return "".join(one for one in name.lower() if one.isalnum())


def _texts(part: Json) -> Iterable[str]:
    if isinstance(part.get("description"), str):
        yield part["description"]
    choices: Any = part.get("enum")
    if isinstance(choices, list):
        yield " ".join(str(one) for one in cast("list[Any]", choices)[:50] if isinstance(one, str | int))

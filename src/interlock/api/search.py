"""Finds tools by what they do, among those that a caller can see.

The index is made with the first search and follows the registry: a change indexes what is new and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import orjson

from interlock.api.apps import is_for_apps
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.core.threads import DEFINITIONS, WALKS
from interlock.data.schema import Json, resolve_ref
from interlock.registry.catalog import Version

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.search.embedders import Embedder
    from interlock.search.index import By, Entry, Floats, Hit, Index, Mask
    from interlock.search.remembered import Remembered

Visible = Callable[[Caller], Awaitable[Iterable[Version]]]

DEFAULT_LIMIT: Final = 10
MOST_FOUND: Final = 1000
# How many tools are indexed in one piece of work on a thread, and looked at before other tasks get their turn.
_AT_ONCE: Final = 100
_MOST_CALLERS: Final = 64
# A search waits for the vectors of new tools if they are few, and no longer than this.
_FEW: Final = 200
_WAIT_S: Final = 5.0
# An encoder that failed is asked again after this time.
_RETRY_S: Final = 5.0
WAYS: Final = ("words", "meaning", "both")
Outcome = Literal["found", "no_match", "pending"]


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


class Answer(list[Found]):
    """The tools that were found, best first; what counted in the search, and why meaning did not if it should have.

    `pending` names upstreams of the caller's that may offer more: each is being looked at, or does not answer.
    """

    def __init__(
        self, found: Iterable[Found], by: By, note: str | None = None, pending: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(found)
        self.by: By = by
        self.note = note
        self.pending = dict(pending or {})

    @property
    def outcome(self) -> Outcome:
        """`found`, `no_match`, or `pending`: nothing was found, and an upstream that is not ready may have it."""
        return "found" if self else "pending" if self.pending else "no_match"

    def facts(self) -> Json:
        """Everything but the tools, as endpoints tell it."""
        pending = [{"server": name, "state": state} for name, state in sorted(self.pending.items())]
        return {"by": self.by, "note": self.note, "outcome": self.outcome, "pending": pending}


@dataclass(slots=True)
class _Surface:
    """The tools that a caller sees, as of a state of the registry and the quarantine.

    `until_ms` is when a version reaches its removal date, so that it holds no longer; None if none does.
    """

    state: tuple[object, ...]
    until_ms: int | None
    versions: Mapping[str, Version]
    mask: Mask
    upstreams: frozenset[str]
    # The ids by each name of a tool, with and without namespace or version.
    names: Mapping[str, list[str]]

    def only(self, tools: Collection[str], index: Index) -> _Surface:
        """The same with some of the tools."""
        some = {tool: self.versions[tool] for tool in tools if tool in self.versions}
        return _Surface(self.state, self.until_ms, some, index.mask(some), self.upstreams, self.names)


class Search:
    """Searches of one data directory."""

    def __init__(self, parts: Parts, visible: Visible) -> None:
        self._parts = parts
        self._visible = visible
        self._surfaces: OrderedDict[tuple[object, ...], _Surface] = OrderedDict()
        self._filling = asyncio.Lock()
        self._swept: object = None
        self._opening = asyncio.Lock()
        self._opened = False
        self._index: Index = cast("Index", None)
        self._embedder: Embedder | None = None
        self._remembered: Remembered | None = None
        self._embedding: asyncio.Task[None] | None = None
        # Until when the encoder is not asked, and why.
        self._away: tuple[float, str] | None = None

    async def find(
        self,
        query: str,
        caller: Caller,
        limit: int = DEFAULT_LIMIT,
        by: str = "both",
        among: Collection[str] | None = None,
        *,
        apps: bool = False,
    ) -> Answer:
        """The tools that fit a request best, best first. A tool whose name is the request comes first.

        `among` are ids of `surface`: others are not looked at. `apps` is true for clients that show interfaces. `by` is
        words, meaning or both. Without vectors, a search for both goes on by words and says so, and a search by meaning
        alone is refused (E3106).
        """
        if not query.strip():
            raise Failure("E3004", "say what the tool is to do", resolution="search for words, such as: send mail")
        if not 1 <= limit <= MOST_FOUND:
            raise Failure("E3004", f"a search returns between 1 and {MOST_FOUND:,} tools")
        if by not in WAYS:
            raise Failure("E3004", f"a search is by {', '.join(WAYS[:2])} or {WAYS[2]}")
        await self._ready()
        if by == "words":
            surface, hits = await self._hits(query, limit, caller, "words", None, among, apps)
            return self._answer(surface, hits, query, limit, "words", None, caller)
        asked, note = await self._asked(query, caller)
        if note is not None and by == "meaning":
            raise Failure("E3106", f"a search by meaning alone is not possible: {note}")
        way: By = "words" if note is not None else "meaning" if by == "meaning" else "both"
        surface, hits = await self._hits(query, limit, caller, way, asked, among, apps)
        if note is None and (missing := self._missing(surface)):
            note = (
                f"{missing:,} of {len(surface.versions):,} tools are searched by words only, until their vectors exist"
            )
        return self._answer(surface, hits, query, limit, way, note, caller)

    async def surface(self, caller: Caller) -> Mapping[str, Version]:
        """The tools that a caller sees and a model may use, by the ids that they have in the index."""
        await self._ready()
        return (await self._surface(caller, self._index)).versions

    async def vectors(self, tools: Sequence[str]) -> Floats | None:
        """The vectors of tools by their ids; None where some have none."""
        return await DEFINITIONS.run(self._index.vectors, tools)

    def _answer(
        self, surface: _Surface, hits: Iterable[Hit], query: str, limit: int, by: By, note: str | None, caller: Caller
    ) -> Answer:
        found = [Found(surface.versions[hit.id], round(hit.score, 4)) for hit in hits if hit.id in surface.versions]
        ids = surface.names.get(query.strip(), ())
        named = [surface.versions[one] for one in ids if one in surface.versions]
        if named:
            rest = [one for one in found if one.version not in named]
            found = [*(Found(one, 1.0) for one in named), *rest][:limit]
        return Answer(found, by, note, self._pending(surface, caller))

    def _pending(self, surface: _Surface, caller: Caller) -> dict[str, str]:
        """Upstreams that may have more tools for a caller later, each with its state.

        INVARIANT: an upstream is named to those who see a tool of it, or whose token covers all that it may offer.
        """
        if not surface.upstreams and "upstreams" not in vars(self._parts):
            return {}
        pending = self._parts.upstreams.connections.pending()
        token = caller.capability
        return {
            name: state
            for name, state in pending.items()
            if name in surface.upstreams or token is None or token.names(f"{name}.*")
        }

    async def _hits(
        self,
        query: str,
        limit: int,
        caller: Caller,
        by: By,
        asked: Floats | None,
        among: Collection[str] | None,
        apps: bool,
    ) -> tuple[_Surface, list[Hit]]:
        from interlock.search.index import Renumbered

        while True:
            surface = await self._surface(caller, self._index, apps=apps)
            with suppress(Renumbered):
                if among is not None:
                    surface = surface.only(among, self._index)
                search = partial(self._index.search, query, limit, surface.mask, by=by, asked=asked)
                return surface, await WALKS.run(search)

    async def _ready(self) -> None:
        """Make the index, on a thread where that takes long: numpy and the table take a while to load."""
        async with self._opening:
            if not self._opened:
                await self._open()
                self._opened = True

    async def _open(self) -> None:
        from interlock.search.embedders import opened
        from interlock.search.remembered import Remembered

        settings, home = self._parts.settings, self._parts.home.path

        async def key() -> str | None:
            name = settings.search_encoder_secret
            return (await self._parts.authority.secret_texts(name))[0] if name else None

        self._embedder = await opened(settings.search_encoder, home, key)
        self._index = await DEFINITIONS.run(_index, settings.search_encoder, self._embedder)
        if self._embedder is not None:
            self._remembered = Remembered(home / "search", self._embedder.model)

    async def _asked(self, query: str, caller: Caller) -> tuple[Floats | None, str | None]:
        """The vectors of a request where the index does not make them itself, or why there are none."""
        from interlock.search.embedders import Away
        from interlock.search.index import texts_of

        if self._embedder is None:
            return None, None if self._parts.settings.search_encoder != "none" else "the setting search_encoder is none"
        now = self._parts.clock.monotonic()
        if self._away is not None and now < self._away[0]:
            return None, self._away[1]
        try:
            asked = await self._embedder.queries(texts_of(query))
        except Away as away:
            self._away = (now + _RETRY_S, str(away))
            return None, str(away)
        self._away = None
        await self._vectors_for(await self._surface(caller, self._index))
        return asked, None

    def _missing(self, surface: _Surface) -> int:
        return 0 if self._embedder is None else len(self._index.without_vector(surface.versions))

    async def _vectors_for(self, surface: _Surface) -> None:
        """See that tools get their vectors; wait for them if they are few."""
        missing = self._index.without_vector(surface.versions)
        if not missing:
            return
        if self._embedding is None or self._embedding.done():
            tools = [(tool, surface.versions[tool]) for tool in missing]
            self._embedding = self._parts.supervisor.spawn("vectors of tools", self._embed(tools))
        if len(missing) <= _FEW:
            await asyncio.wait({self._embedding}, timeout=_WAIT_S)

    async def _embed(self, tools: Sequence[tuple[str, Version]]) -> None:
        """Place the vectors of tools, remembered or new. Stops where the encoder is away; a later search goes on."""
        from interlock.search.embedders import BATCH, Away

        assert self._embedder is not None
        assert self._remembered is not None
        remembered = self._remembered
        for start in range(0, len(tools), BATCH):
            some = tools[start : start + BATCH]
            texts = await DEFINITIONS.run(_texts_of_tools, some)
            known = await DEFINITIONS.run(remembered.get, texts)
            new = [text for text, vector in zip(texts, known, strict=True) if vector is None]
            if new:
                try:
                    vectors = await self._embedder.documents(new)
                except Away as away:
                    self._away = (self._parts.clock.monotonic() + _RETRY_S, str(away))
                    return
                await DEFINITIONS.run(remembered.put, new, vectors)
            await DEFINITIONS.run(_place, self._index, [tool for tool, _ in some], remembered.get(texts))

    async def _surface(self, caller: Caller, index: Index, *, apps: bool = False) -> _Surface:
        """The tools that a caller sees, remembered until something changes, because every tool is looked at."""
        state = (await self._parts.catalog.current(), self._parts.gateway.quarantine.held, index.numbering)
        # What is excluded depends on who calls, and not only on their token.
        who = (caller.id, caller.agent, caller.groups) if self._parts.settings.surface_excluded else None
        key = (None if caller.capability is None else caller.capability.digest, caller.scopes, who, apps)
        now_ms = self._parts.clock.now_ms()
        known = self._surfaces.get(key)
        if known is not None and known.state == state and (known.until_ms is None or now_ms < known.until_ms):
            self._surfaces.move_to_end(key)
            return known
        versions = {_id(one): one for one in await self._visible(caller) if apps or not is_for_apps(one)}
        await self._fill(index, versions, state[0])
        origins = {one.row.origin for one in versions.values()}
        upstreams = frozenset(one.removeprefix("upstream:") for one in origins if one.startswith("upstream:"))
        made_of = (*state[:2], index.numbering)
        surface = _Surface(
            made_of,
            _next_removal(await self._parts.catalog.everything(), now_ms),
            versions,
            index.mask(versions),
            upstreams,
            _names(versions),
        )
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


def _next_removal(versions: Iterable[Version], now_ms: int) -> int | None:
    """When the next version reaches its removal date."""
    notices = [one.row.notice for one in versions if one.row.notice is not None]
    return min((one.removal_ms for one in notices if one.removal_ms > now_ms), default=None)


def _names(versions: Mapping[str, Version]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for tool, version in versions.items():
        address = version.row.address
        for name in (address, f"{address}@{version.row.version}", address.partition(".")[2]):
            names.setdefault(name, []).append(tool)
    return names


def _index(setting: str, embedder: Embedder | None) -> Index:
    from interlock.search.index import Index
    from interlock.search.table import shipped

    if embedder is not None:
        return Index(counts=embedder)
    return Index() if setting == "none" else Index(shipped())


def _texts_of_tools(tools: Sequence[tuple[str, Version]]) -> list[str]:
    return [entry_of(tool, orjson.loads(one.row.manifest), one.row.origin).text() for tool, one in tools]


def _place(index: Index, tools: Sequence[str], vectors: Sequence[Floats | None]) -> None:
    import numpy as np

    found = [(tool, vector) for tool, vector in zip(tools, vectors, strict=True) if vector is not None]
    if found:
        index.place([tool for tool, _ in found], np.stack([vector for _, vector in found]))


def _add(index: Index, versions: Sequence[tuple[str, Version]]) -> None:
    index.add(entry_of(tool, orjson.loads(one.row.manifest), one.row.origin) for tool, one in versions)


def entry_of(tool: str, manifest: Json, origin: str = "") -> Entry:
    """The entry of a tool in the index, without the fields that are marked as internal."""
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
        server=" ".join(dict.fromkeys(one for one in (upstream, str(manifest.get("namespace") or "")) if one)),
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

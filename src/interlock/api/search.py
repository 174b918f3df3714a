"""Finds tools by what they do, among those that a caller can see (`searchable`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, cast

import orjson

from interlock.api.requests import DEFAULT_LIMIT
from interlock.api.searchable import Searchable, Surface, Visible, entries_of
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.core.event_loop import Exclusive
from interlock.core.record import dataclass
from interlock.core.threads import DEFINITIONS, WALKS
from interlock.data.schema import Json
from interlock.registry.version import Version

if TYPE_CHECKING:
    import asyncio

    from interlock.api.denials import Denials
    from interlock.api.parts import Parts
    from interlock.api.tool_vectors import VectorPlace
    from interlock.search.embedders import Embedder
    from interlock.search.index import By, Floats, Hit, Index

MOST_FOUND: Final = 1000
# A search waits for the vectors of new tools if they are few, and no longer than this.
_FEW: Final = 200
_WAIT_S: Final = 5.0
# An encoder that failed is asked again after this time.
_RETRY_S: Final = 5.0
SEARCH_MODES: Final = ("words", "meaning", "both")
Outcome = Literal["found", "no_match", "pending"]


@dataclass(frozen=True, slots=True)
class FoundTool:
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


class SearchAnswer(list[FoundTool]):
    """The tools that were found, best first; what counted in the search, and why meaning did not if it should have.

    `pending` names upstreams of the caller's that may offer more: each is being looked at, or does not answer.
    """

    def __init__(
        self, hits: Iterable[FoundTool], by: By, note: str | None = None, pending: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(hits)
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


class Search:
    """Searches of one data directory."""

    def __init__(self, parts: Parts, visible: Visible, denials: Denials) -> None:
        self._parts = parts
        self._tools = Searchable(parts, visible, denials)
        self._opening = Exclusive()
        self._opened = False
        self._index: Index = cast("Index", None)
        self._embedder: Embedder | None = None
        self._place: VectorPlace | None = None
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
        allowed: bool = False,
    ) -> SearchAnswer:
        """The tools that fit a request best, best first. A tool whose name is the request comes first.

        `among` are ids of `surface`: others are not looked at. `apps` is true for clients that show interfaces. With
        `allowed`, tools that the policy denies the caller, whatever is sent, do not exist either. `by` is words,
        meaning or both. Without vectors, a search for both goes on by words and says so, and a search by meaning
        alone is refused (E3106).
        """
        if not query.strip():
            raise Failure("E3004", "say what the tool is to do", resolution="search for words, such as: send mail")
        if not 1 <= limit <= MOST_FOUND:
            raise Failure("E3004", f"a search returns between 1 and {MOST_FOUND:,} tools")
        if by not in SEARCH_MODES:
            raise Failure("E3004", f"a search is by {', '.join(SEARCH_MODES[:2])} or {SEARCH_MODES[2]}")
        await self._ready()
        if by == "words":
            surface, hits = await self._hits(query, limit, caller, "words", None, among, apps, allowed)
            return self._answer(surface, hits, query, limit, "words", None, caller)
        asked, note = await self._asked(query, caller, apps)
        if note is not None and by == "meaning":
            raise Failure("E3106", f"a search by meaning alone is not possible: {note}")
        by_which: By = "words" if note is not None else "meaning" if by == "meaning" else "both"
        surface, hits = await self._hits(query, limit, caller, by_which, asked, among, apps, allowed)
        if note is None and (missing := self._missing(surface)):
            note = f"{missing:,} of {len(surface):,} tools are searched by words only, until their vectors exist"
        return self._answer(surface, hits, query, limit, by_which, note, caller)

    async def surface(self, caller: Caller, *, allowed: bool = True) -> Mapping[str, Version]:
        """The tools that a caller sees and a model may use, by their ids in the index, in order of name.

        Without `allowed`, also those that the policy denies the caller, whatever is sent.
        """
        await self._ready()
        read = self._tools.allowed if allowed else self._tools.of
        surface = await read(caller, self._index)
        return {tool: surface.versions[tool] for tool in surface.order if tool in surface}

    async def vectors(self, tools: Sequence[str]) -> Floats | None:
        """The vectors of tools by their ids; None where some have none."""
        return await DEFINITIONS.run(self._index.vectors, tools)

    def _answer(
        self, surface: Surface, hits: Iterable[Hit], query: str, limit: int, by: By, note: str | None, caller: Caller
    ) -> SearchAnswer:
        found = [FoundTool(surface.versions[hit.id], round(hit.score, 4)) for hit in hits if hit.id in surface]
        named = self._tools.named(query.strip(), surface)
        if named:
            rest = [one for one in found if one.version not in named]
            found = [*(FoundTool(one, 1.0) for one in named), *rest][:limit]
        return SearchAnswer(found, by, note, self._pending(surface, caller))

    def _pending(self, surface: Surface, caller: Caller) -> dict[str, str]:
        """Upstreams that may have more tools for a caller later, each with its state.

        INVARIANT: an upstream is named to those who see a tool of it, or whose token covers all that it may offer.
        """
        connected = "upstreams" in vars(self._parts)
        if not surface.upstreams and not connected:
            return {}
        pending = dict.fromkeys(self._parts.upstream_states.unanswered(), "unavailable")
        if connected:
            pending |= dict.fromkeys(self._parts.upstreams.connections.discovering(), "discovering")
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
        allowed: bool,
    ) -> tuple[Surface, list[Hit]]:
        from interlock.search.index import Renumbered

        while True:
            with suppress(Renumbered):
                read = self._tools.allowed if allowed else self._tools.of
                surface = await read(caller, self._index, apps=apps)
                if among is not None:
                    surface = surface.only(among, self._index)
                similar = None
                if self._place is not None and asked is not None:
                    most = limit if by == "meaning" else None
                    similar = await self._place.similar(surface.mask, asked, most)
                search = partial(self._index.search, query, limit, surface.mask, by=by, asked=asked, similar=similar)
                return surface, await WALKS.run(search)

    async def _ready(self) -> None:
        """Make the index, on a thread where that takes long: numpy and the table take a while to load."""
        async with self._opening:
            if not self._opened:
                await self._open()
                self._opened = True

    async def _open(self) -> None:
        from interlock.api.tool_vectors import place_of, table_of

        settings, home = self._parts.settings, self._parts.home.path

        async def key() -> str | None:
            name = settings.search_encoder_secret
            return (await self._parts.authority.secret_texts(name))[0] if name else None

        table = await table_of(self._parts)
        if table is not None or await DEFINITIONS.run(needs_encoder, settings.search_encoder):
            from interlock.search.embedders import opened

            self._embedder = await opened(settings.search_encoder, home, key, apart=table is not None)
        self._index = await DEFINITIONS.run(_index, settings.search_encoder, self._embedder)
        if self._embedder is not None:
            self._place = place_of(self._parts, self._index, self._embedder, table)

    async def _asked(self, query: str, caller: Caller, apps: bool) -> tuple[Floats | None, str | None]:
        """The vectors of a request where the index does not make them itself, or why there are none."""
        if self._embedder is None:
            return None, None if self._parts.settings.search_encoder != "none" else "the setting search_encoder is none"
        from interlock.search.embedders import Away
        from interlock.search.index import texts_of

        now = self._parts.clock.monotonic()
        if self._away is not None and now < self._away[0]:
            return None, self._away[1]
        try:
            asked = await self._embedder.queries(texts_of(query))
        except Away as away:
            self._away = (now + _RETRY_S, str(away))
            return None, str(away)
        self._away = None
        await self._vectors_for(await self._tools.of(caller, self._index, apps=apps), asked.shape[1])
        return asked, None

    def _missing(self, surface: Surface) -> int:
        return 0 if self._embedder is None else len(self._index.without_vector(surface.mask))

    async def _vectors_for(self, surface: Surface, width: int) -> None:
        """See that tools get their vectors, of `width` numbers; wait for them if they are few."""
        missing = self._index.without_vector(surface.mask)
        if not missing:
            return
        if self._embedding is None or self._embedding.done():
            tools = [(tool, surface.versions[tool]) for tool in missing if tool in surface]
            self._embedding = self._parts.supervisor.spawn("vectors of tools", self._embed(tools, width))
        if len(missing) <= _FEW:
            import asyncio

            await asyncio.wait({self._embedding}, timeout=_WAIT_S)

    async def _embed(self, tools: Sequence[tuple[str, Version]], width: int) -> None:
        """See to the vectors of tools, stored or new ones. Stops where the encoder is away; a later search goes on."""
        from interlock.search.embedders import BATCH, Away

        assert self._embedder is not None
        assert self._place is not None
        for start in range(0, len(tools), BATCH):
            some = tools[start : start + BATCH]
            texts = await DEFINITIONS.run(_texts_of_tools, some, await self._tools.server_texts(some))
            missing = await self._place.missing([tool for tool, _ in some], texts, width)
            if missing:
                new = [texts[place] for place in missing]
                try:
                    vectors = await self._embedder.documents(new)
                except Away as away:
                    self._away = (self._parts.clock.monotonic() + _RETRY_S, str(away))
                    return
                await self._place.put([some[place][0] for place in missing], new, vectors)


def needs_encoder(setting: str) -> bool:
    """Whether vectors come from elsewhere than the table of this package: only then are encoders and clients loaded."""
    from interlock.search.packaged import installed

    return setting not in ("table", "none") and (setting != "auto" or installed() is not None)


def _index(setting: str, embedder: Embedder | None) -> Index:
    from interlock.search.index import Index
    from interlock.search.table import shipped

    if embedder is not None:
        return Index(counts=embedder)
    return Index() if setting == "none" else Index(shipped())


def _texts_of_tools(tools: Sequence[tuple[str, Version]], server_texts: Mapping[str, str]) -> list[str]:
    return [entry.text() for entry in entries_of(tools, server_texts)]

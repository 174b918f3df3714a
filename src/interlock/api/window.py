"""The size of a caller's tools in the context window of a model, and which of them to load.

Only tools that the caller can call are counted, listed or loaded, by the same check as everywhere (`api.tools`): none
that does not exist for them, and none that is blocked.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

import orjson

from interlock.api.apps import is_for_apps
from interlock.api.blocked import callable_tools
from interlock.api.tools import Tools
from interlock.core.errors import Failure
from interlock.core.threads import DEFINITIONS, WALKS
from interlock.data.canonical import encode
from interlock.store import calls
from interlock.window import tokens
from interlock.window.affordances import Affordances, Offer, compile_affordances, detail, offer, sizes
from interlock.window.reading import MOST_TOKENS, Part, asked, read_part, value_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from interlock.api.model_window import ModelWindow, Summariser, WindowSource
    from interlock.api.parts import Parts
    from interlock.call.context import Caller
    from interlock.data.schema import Json
    from interlock.registry.version import Version
    from interlock.store.port import Reader
    from interlock.window.budget import Summarise
    from interlock.window.levels import Criticality
    from interlock.window.tokens import Counter

# How many tools are measured in one piece of work on a thread. One takes about 0.3 ms, once.
_AT_ONCE = 50
# Tools whose schemas are considered for a window, and records in which it is looked up what a caller used.
MOST_CANDIDATES: Final = 500
_LOOKED_THROUGH: Final = 5000


class WindowOptions(TypedDict, total=False):
    """The tokens that a window contains from the start, and how results are shown in it.

    `reserve` is for the answer of the model, 2048 to 4096. `summarise` is a second model, which summarises a result;
    `summarise_history` gets the tokens that the history should have, and returns how many it has then. Windows of one
    `session` share the layers `working` and `session` of the memory.
    """

    session: str
    system: int
    history: int
    memory: int
    reserve: int
    criticality: Criticality | float
    summarise: Summariser | None
    summarise_history: Summarise | None


class Windows:
    """Token counts of one data directory. A tool is measured once and remembered by the digest of its content."""

    def __init__(self, parts: Parts, tools: Tools) -> None:
        self._parts = parts
        self._tools = tools
        self._counter: Counter | None = None
        self._measured: dict[tuple[str, str], Offer] = {}

    async def counter(self) -> Counter:
        """The counter that the settings name; E3108 if it cannot be loaded."""
        if self._counter is None:
            self._counter = await DEFINITIONS.run(self._load)
        return self._counter

    def _load(self) -> Counter:
        name = self._parts.settings.counter
        if name == "estimate":
            return tokens.estimate
        if name in tokens.EXACT:
            return tokens.exact(name)
        from interlock.registry.source import function  # it loads what declares tools

        return tokens.checked(name, function(name, self._parts.home.path))

    async def count(self, text: str) -> int:
        """The tokens of a text."""
        return await DEFINITIONS.run(await self.counter(), text)

    async def cost(self, caller: Caller) -> Json:
        """The tokens of every tool the caller can call: of its line in the index, and of its full schema."""
        offers = await self.offers(caller)
        lines: list[Json] = [
            {
                "tool": one.id,
                "version": one.version,
                "mutation_class": one.mutation_class,
                "index_line": one.line.rstrip("\n"),
                "index_tokens": one.line_tokens,
                "full_tokens": one.schema_tokens,
            }
            for one in offers
        ]
        return {"counter": self._parts.settings.counter, **sizes(offers), "of": lines}

    async def affordances(
        self, caller: Caller, budget: int, *, query: str = "", ranking: Mapping[str, float] | None = None
    ) -> Affordances:
        """Tools of the caller within a budget of tokens: an index of all, and the most useful schemas.

        Useful is what `ranking` says, tools by name with a number above 0; else what a search for `query` finds; else
        what the caller called most of late, and then tools in order of name.
        """
        if not 0 <= budget <= MOST_TOKENS:
            raise Failure("E3004", f"a budget has between 0 and {MOST_TOKENS:,} tokens")
        # One look at the registry for the index, the ranking and the schemas: they are of one set of tools.
        versions = [one for one in await callable_tools(self._parts, self._tools, caller) if not is_for_apps(one)]
        visible = {one.row.address: one for one in versions}
        offers = list((await self.measured(versions)).values())
        if ranking is None:
            ranking = await self._ranked(query, visible, caller) if query.strip() else await self._used(visible, caller)
        best = dict(sorted(ranking.items(), key=lambda one: -one[1])[:MOST_CANDIDATES])

        def manifest_of(tool: str) -> Json:
            return orjson.loads(visible[tool].row.manifest)

        return await DEFINITIONS.run(compile_affordances, offers, best, budget, manifest_of, await self.counter())

    async def _ranked(self, query: str, visible: Collection[str], caller: Caller) -> dict[str, float]:
        found = await self._tools.search(query, caller, MOST_CANDIDATES)
        return {one.version.row.address: one.score for one in found if one.version.row.address in visible}

    async def _used(self, visible: Iterable[str], caller: Caller) -> dict[str, float]:
        """The tools that the caller called most among the last records, and behind them all others in order."""
        used = await self._parts.readers.read(partial(_most_called, caller))
        return {tool: 1 / (2 + place) for place, tool in enumerate(sorted(visible))} | used

    async def detail(self, tool: str, pointer: str, caller: Caller) -> Json:
        """A part of the input schema of a tool that the caller can see, for the call that is being written."""
        version = await self._tools.find(tool, None, caller)
        schema = await DEFINITIONS.run(detail, orjson.loads(version.row.manifest), pointer)
        size = await self.count(encode(schema).decode())
        row = version.row
        return {"tool": row.address, "version": row.version, "at": pointer, "schema": schema, "tokens": size}

    async def open(self, app: WindowSource, size: int, caller: Caller, **options: Unpack[WindowOptions]) -> ModelWindow:
        """The window of a conversation of a caller."""
        from interlock.api.memory import Memory
        from interlock.api.model_window import ModelWindow
        from interlock.window.budget import LEAST_RESERVE, Window

        window = Window(
            size,
            system=options.get("system", 0),
            history=options.get("history", 0),
            memory=options.get("memory", 0),
            reserve=options.get("reserve", LEAST_RESERVE),
            summarise_history=options.get("summarise_history"),
        )
        return ModelWindow(
            app,
            window,
            await self.counter(),
            caller,
            Memory(self._parts, caller, options.get("session", "")),
            criticality=options.get("criticality", "normal"),
            summarise=options.get("summarise"),
        )

    async def read_part(self, body: bytes, part: Part | Mapping[str, Any]) -> Json:
        """A part of a stored payload."""
        if not isinstance(part, Part):
            part = asked(**part)
        return await WALKS.run(_read_part, body, part, await self.counter())

    async def offers(self, caller: Caller) -> list[Offer]:
        """The sizes of every tool the caller can call, in order of name."""
        visible = await callable_tools(self._parts, self._tools, caller)
        known = await self.measured(visible)
        if len(self._measured) > 2 * len(known) + 1000:
            self._measured = known  # versions that were replaced are forgotten
        return list(known.values())

    async def measured(self, visible: Sequence[Version]) -> dict[tuple[str, str], Offer]:
        """The sizes of some tools, by name and digest."""
        missing = [one for one in visible if _key(one) not in self._measured]
        count = await self.counter()
        for start in range(0, len(missing), _AT_ONCE):
            measured = await DEFINITIONS.run(_measure, missing[start : start + _AT_ONCE], count)
            self._measured.update(measured)
        return {_key(one): self._measured[_key(one)] for one in visible}


def _read_part(body: bytes, part: Part, count: Counter) -> Json:
    return read_part(value_of(body), part, count)


def _most_called(caller: Caller, reader: Reader) -> dict[str, float]:
    first, last = calls.ends(reader)
    wanted = calls.Filter(tenant=caller.tenant, owner=caller.id)
    least = max(first, last - _LOOKED_THROUGH + 1)
    found = calls.sums(reader, least, last, wanted, of="toolId", order="calls", most=MOST_CANDIDATES)
    return {one.name: float(one.calls) for one in found}


def _key(version: Version) -> tuple[str, str]:
    return version.row.address, version.row.digest


def _measure(versions: Sequence[Version], count: Counter) -> Iterable[tuple[tuple[str, str], Offer]]:
    return [
        (_key(one), offer(one.row.address, one.row.version, orjson.loads(one.row.manifest), count)) for one in versions
    ]

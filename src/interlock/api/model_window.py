"""The context window of one conversation: tools and results are put into it, and never more than it holds.

    window = await app.window(32_000, system=900)
    result = await app.call("demo.balance", account="cash")
    routed = await window.admit(result)
    messages.append(routed.context)

A result that is too large is shown smaller, or a pointer takes its place; `read` reads parts of it. The window belongs
to one caller, whose rights decide what can be read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import orjson

from interlock.core.clock import iso
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.core.threads import WALKS
from interlock.window.blocks import Block
from interlock.window.budget import Window
from interlock.window.levels import WEIGHTS, Criticality, Level, View, outline, plain, texts, views
from interlock.window.reading import Part, read_part
from interlock.window.routing import LIFETIMES_S, Destination, Layer, MemoryRecord, destinations

if TYPE_CHECKING:
    from interlock.api.memory import Memory
    from interlock.call.context import Caller
    from interlock.call.results import Result
    from interlock.core.clock import Clock
    from interlock.data.schema import Json
    from interlock.registry.catalog import Catalog
    from interlock.window.affordances import Affordances
    from interlock.window.tokens import Counter

# A summary takes a second model some seconds, so small results are not summarised.
SUMMARISED_ABOVE: Final = 500
_MOST_RETAINED: Final = 1000

Summariser = Callable[[str], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Routed:
    """The destination of a result. `context` is the block for the model; None if it is for elsewhere or has no room."""

    destinations: tuple[Destination, ...]
    context: str | None
    level: Level | str | None
    tokens: int
    tool_input: Any = None
    memory: MemoryRecord | None = None


class WindowSource(Protocol):
    """The parts of an open data directory that a window shows to a model."""

    catalog: Catalog
    clock: Clock

    async def affordances(self, *, budget: int, query: str = "", caller: Caller | None = None) -> Affordances:
        """Tools for a model within a budget of tokens."""
        ...

    async def read_part(self, ref: str, part: Part | Mapping[str, Any], *, caller: Caller | None = None) -> Json:
        """A part of a result that was stored instead of sent."""
        ...


class ModelWindow:
    """A window of one caller."""

    def __init__(
        self,
        app: WindowSource,
        window: Window,
        count: Counter,
        caller: Caller,
        memory: Memory,
        *,
        criticality: Criticality | float = "normal",
        summarise: Summariser | None = None,
    ) -> None:
        self._app = app
        self._count = count
        self._caller = caller
        self._criticality: Criticality | float = criticality
        self._summarise = summarise
        self._retained: dict[str, Any] = {}
        self.account = window
        self.memory = memory
        self.observations: list[Json] = []

    @property
    def room(self) -> int:
        """The tokens that are left for tools and their results."""
        return self.account.room

    @property
    def text(self) -> str:
        """The results that are in the window now, oldest first. Older ones may have become smaller or have gone."""
        return self.account.text

    async def load(self, query: str = "", *, budget: int | None = None) -> Affordances:
        """Offer tools within a budget, or a quarter of the room; in place of those that were offered before."""
        self.account.load({})
        most = self.room // 4 if budget is None else min(budget, self.room)
        found = await self._app.affordances(budget=most, query=query, caller=self._caller)
        self.account.load({"": (found.tokens, 1.0)})
        return found

    async def admit(
        self,
        result: Result,
        *,
        criticality: Criticality | float | None = None,
        fields: Sequence[str] = (),
        reasoning: bool = True,
        then: Callable[[Any], Any] | None = None,
        remember: Layer | None = None,
        expires_s: float | None = None,
    ) -> Routed:
        """Route a result: into the context, through `then` to the next tool, into a layer of the memory.

        `fields` are the members that the task needs; `criticality` says how much a loss of detail would cost, from 0 to
        1 or as a word. A failed or waiting call is for the context alone.
        """
        usable = result.ok and not result.persistence.private
        # INVARIANT: every result is observed, also one that cannot be remembered or placed.
        observed: Json = {
            "invocation_id": result.invocation_id,
            "tool": result.tool,
            "state": result.state,
            "at": iso(result.created_ms),
            "record": f"journal:{result.invocation_id}",
            "destinations": list(destinations(successor=False, reasoning=False, memory=False)),
            "level": None,
            "tokens": 0,
        }
        self.observations.append(observed)
        record = self._record(result, remember, expires_s) if usable and remember is not None else None
        wrote = record is not None and await self.memory.write(record)
        view = await self._place(result, criticality, fields) if reasoning else None
        routes = destinations(successor=usable and then is not None, reasoning=view is not None, memory=wrote)
        observed["destinations"] = list(routes)
        if view is not None:
            observed["level"], observed["tokens"] = view.level, view.tokens
        return Routed(
            destinations=routes,
            context=None if view is None else view.text,
            level=None if view is None else view.level,
            tokens=0 if view is None else view.tokens,
            tool_input=then(result.value) if then is not None and usable else None,
            memory=record if wrote else None,
        )

    async def read(self, handle: str, part: Part) -> Json:
        """A part of a result that a pointer stands for; E3702 if the caller has none by that handle."""
        if handle.startswith("call:"):
            if handle not in self._retained:
                raise Failure("E3702", f"no result `{handle}`", resolution="make the call again")
            return await WALKS.run(read_part, self._retained[handle], part, self._count)
        return await self._app.read_part(handle, part, caller=self._caller)

    async def _place(
        self, result: Result, criticality: Criticality | float | None, fields: Sequence[str]
    ) -> View | None:
        chosen = self._criticality if criticality is None else criticality
        weight = WEIGHTS[chosen] if isinstance(chosen, str) else min(max(float(chosen), 0.0), 1.0)
        schema = await self._schema(result.tool)
        summary = await self._summary(result) if _has_value(result) else None
        shown = await WALKS.run(views_of, result, self._count, schema, fields, summary)
        pointer = await self._pointer(result) if _has_value(result) else None
        return self.account.admit(result.invocation_id, shown, pointer, weight)

    async def _pointer(self, result: Result) -> View:
        """The block shown for a result that has no room: its structure, its size, and a handle to read parts of it."""
        handle = result.persistence.ref or f"call:{result.invocation_id}"
        if result.persistence.ref is None:
            self._retained[handle] = result.value
            while len(self._retained) > _MOST_RETAINED:
                del self._retained[next(iter(self._retained))]
        return await WALKS.run(pointer_to, result, handle, self._count)

    async def _summary(self, result: Result) -> str | None:
        """The summary of a second model, if there is one and the result is worth it; None also where it fails."""
        if self._summarise is None:
            return None
        text = await WALKS.run(plain, result.value)
        if await WALKS.run(self._count, text) <= SUMMARISED_ABOVE:
            return None
        try:
            made: Any = await self._summarise(text)
        except Exception:  # noqa: BLE001 - a program's own function; without it the other levels remain
            return None
        return made if isinstance(made, str) else None

    async def _schema(self, tool: str) -> Json | None:
        name, _, version = tool.partition("@")
        try:
            manifest: Json = orjson.loads((await self._app.catalog.exact(name, version)).row.manifest)
        except Failure:
            return None
        stated: Any = manifest.get("result_schema")
        return cast("Json", stated) if isinstance(stated, dict) else None

    def _record(self, result: Result, layer: Layer, expires_s: float | None) -> MemoryRecord:
        now = self._app.clock.now_ms()
        lasts = LIFETIMES_S[layer] if expires_s is None else expires_s
        return MemoryRecord(
            result.value, result.tool, result.invocation_id, result.created_ms, now + round(lasts * 1000), layer
        )


def views_of(
    result: Result, count: Counter, schema: Json | None = None, fields: Sequence[str] = (), summary: str | None = None
) -> list[View]:
    """A result as blocks of a context, one for each level. A failure has its words alone."""
    if _has_value(result):
        made = texts(result.value, schema, fields, summary)
    else:
        words = result.text()
        made: dict[Level, str] = {0: words, 4: words[:200]}
    return views(made, count, partial(block_of, result))


def pointer_to(result: Result, handle: str, count: Counter) -> View:
    """The block in place of a result that has no room: its structure, its size, and the handle to read parts of it."""
    document = {"handle": handle, "holds": outline(result.value), "tokens": count(plain(result.value))}
    block = block_of(result, plain(document))
    return View("pointer", block, count(block))


def _has_value(result: Result) -> bool:
    """Whether the value of a result is for models, and not only words about it."""
    return result.ok and not result.persistence.private and "views" not in result.metadata


def block_of(result: Result, content: str) -> str:
    """A text of a result in its delimiters."""
    source = result.envelope()["provenance"]
    return Block(
        tool_id=result.tool,
        invocation_id=result.invocation_id,
        timestamp=str(source["timestamp"]),
        source=str(source["source"]),
        freshness=str(source["freshness"]),
        confidence=f"{source['confidence']:g}",
        content=content,
    ).text()

"""What a caller's tools take in the context window of a model, and which of them to load.

Only tools that the caller can see are counted, listed or loaded, by the same check as everywhere (`api.tools`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from interlock.api.tools import Tools
from interlock.core.threads import DEFINITIONS
from interlock.registry.source import function
from interlock.window import tokens
from interlock.window.affordances import Offer, offer, sizes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from interlock.api.parts import Parts
    from interlock.call.context import Caller
    from interlock.data.schema import Json
    from interlock.registry.catalog import Version
    from interlock.window.tokens import Counter

# How many tools are measured in one piece of work on a thread. One takes about 0.3 ms, once.
_AT_ONCE = 50


class Windows:
    """Token counts of one data directory. A tool is measured once and remembered by the digest of its content."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._tools = Tools(parts)
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
        return tokens.checked(name, function(name, self._parts.home.path))

    async def count(self, text: str) -> int:
        """The tokens of a text."""
        return await DEFINITIONS.run(await self.counter(), text)

    async def cost(self, caller: Caller) -> Json:
        """The tokens of every tool the caller can see: of its line in the index, and of its full schema."""
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

    async def offers(self, caller: Caller) -> list[Offer]:
        """The sizes of every tool the caller can see, in order of name."""
        visible = await self._tools.visible(caller)
        missing = [one for one in visible if _key(one) not in self._measured]
        count = await self.counter()
        for start in range(0, len(missing), _AT_ONCE):
            measured = await DEFINITIONS.run(_measure, missing[start : start + _AT_ONCE], count)
            self._measured.update(measured)
        known = {_key(one): self._measured[_key(one)] for one in visible}
        if len(self._measured) > 2 * len(known) + 1000:
            self._measured = known  # versions that were replaced are forgotten
        return list(known.values())


def _key(version: Version) -> tuple[str, str]:
    return version.row.address, version.row.digest


def _measure(versions: Sequence[Version], count: Counter) -> Iterable[tuple[tuple[str, str], Offer]]:
    return [
        (_key(one), offer(one.row.address, one.row.version, orjson.loads(one.row.manifest), count)) for one in versions
    ]

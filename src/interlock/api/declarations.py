"""Tools declared for model providers: what a loop offers a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from interlock.api.tools import PAGE, Tools
from interlock.call.context import Caller
from interlock.data.schema import Json
from interlock.registry.version import Version
from interlock.upstreams import formats, own_names
from interlock.upstreams.formats import Provider

if TYPE_CHECKING:
    from interlock.api.parts import Parts


class Declarations:
    """The tools that a caller can see, as model providers take them."""

    def __init__(self, parts: Parts, tools: Tools) -> None:
        self._parts = parts
        self._tools = tools

    async def declarations(
        self,
        provider: Provider,
        caller: Caller,
        *,
        strict: bool = False,
        names: Sequence[str] = (),
        cursor: str | None = None,
        limit: int = PAGE,
    ) -> tuple[list[Json], str | None]:
        """A page of the tools that the caller may use, or of those named, declared for a provider; and its cursor."""
        if not names:
            page = await self._tools.page(caller, cursor, limit)
            return await self._declared(page.versions, provider, strict=strict), page.cursor
        named = [await self._tools.find(name, None, caller) for name in names]
        found = {one.row.address: one for one in named}
        after = sorted(address for address in found if address > (cursor or ""))
        shown = [found[address] for address in after[:limit]]
        declared = await self._declared(shown, provider, strict=strict)
        return declared, after[limit - 1] if len(after) > limit else None

    async def names(self) -> Mapping[str, str]:
        """The names of tools that are offered under their upstreams' own, by address."""
        return await self._parts.journal.read(own_names.for_providers)

    async def _declared(self, versions: Sequence[Version], provider: Provider, *, strict: bool) -> list[Json]:
        """Tools declared for a provider, in the strict form where it is asked for and their schema has one."""
        own = await self.names()
        return [
            formats.declare(one.contract, provider, name=own.get(one.row.address), strict=strict) for one in versions
        ]

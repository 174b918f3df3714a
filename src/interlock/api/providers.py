"""Tools in the words of the model providers: what to offer a model, and what to do with what it asks for.

A loop that talks to OpenAI, Anthropic or Gemini needs no adapter of its own: it offers the declarations, hands each
tool call of the model on as it came, and puts the message it gets back into the conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from interlock.api.calls import Ask, Calls, native_id
from interlock.api.tools import PAGE, Tools
from interlock.call.context import Caller
from interlock.call.results import Result
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.registry.catalog import Version
from interlock.upstreams import formats
from interlock.upstreams.formats import Provider

if TYPE_CHECKING:
    from interlock.api.parts import Parts


class Providers:
    """The tools a caller can see, as a model provider takes them."""

    def __init__(self, parts: Parts, tools: Tools, calls: Calls) -> None:
        self._parts = parts
        self._tools = tools
        self._calls = calls

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
            return self.declared(page.versions, provider, strict=strict), page.cursor
        named = [await self._tools.find(name, None, caller) for name in names]
        found = {one.row.address: one for one in named}
        after = sorted(address for address in found if address > (cursor or ""))
        shown = [found[address] for address in after[:limit]]
        return self.declared(shown, provider, strict=strict), after[limit - 1] if len(after) > limit else None

    def declared(self, versions: Sequence[Version], provider: Provider, *, strict: bool = False) -> list[Json]:
        """Tools declared for a provider, in the strict form where it is asked for and their schema has one."""
        return [formats.declare(one.contract, provider, strict=strict) for one in versions]

    async def call(
        self, sent: Any, caller: Caller, *, door: str, session: str = "", trace: str | None = None
    ) -> tuple[Result, Json]:
        """Make the call that a model asked for. Its result, and the message that tells the model.

        The id that the provider gave to the tool call is its key: handed on twice, the call is made once.
        """
        asked = formats.read_call(sent)
        version = await self._named(asked.name, caller)
        address, contract = version.row.address, version.contract
        # A strict form writes what is left out as null.
        arguments = formats.restored(contract.input.model_facing, asked.arguments)
        ids = {"function_name": asked.name} | ({} if asked.id is None else {"tool_call_id": native_id(asked.id)})
        key = asked.id if contract.mutation.writes else None
        ask = Ask(address, arguments, key=key, session=session, trace=trace, native=ids)
        result = await self._calls.invoke(ask, caller, door=door)
        return result, formats.answer(asked, result)

    async def _named(self, name: str, caller: Caller) -> Version:
        """The tool that a provider's name stands for. Most names spell it, so that no other tool is looked at."""
        spelled = name.replace("__", ".")
        if formats.provider_name(spelled) == name:
            try:
                return await self._tools.find(spelled, None, caller)
            except Failure as failure:
                if failure.code != "E3101":
                    raise
        visible = {one.row.address: one for one in await self._tools.visible(caller)}
        return visible[formats.address_of(name, visible)]

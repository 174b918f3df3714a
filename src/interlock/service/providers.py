"""Tools in the words of the model providers: what to offer a model, and what to do with what it asks for.

A loop that talks to OpenAI, Anthropic or Gemini needs no adapter of its own: it offers the declarations, hands each
tool call of the model on as it came, and puts the message it gets back into the conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from interlock.core.context import Caller
from interlock.core.results import Result
from interlock.core.schema import Json
from interlock.registry.catalog import Version
from interlock.service.calls import Ask, Calls, native_id
from interlock.service.tools import Tools
from interlock.upstreams import formats
from interlock.upstreams.formats import Provider

if TYPE_CHECKING:
    from interlock.app import Interlock


class Providers:
    """The tools a caller can see, as a model provider takes them."""

    def __init__(self, lock: Interlock, tools: Tools, calls: Calls) -> None:
        self._lock = lock
        self._tools = tools
        self._calls = calls

    def declarations(self, provider: Provider, caller: Caller, *, strict: bool = False) -> list[Json]:
        """Every tool that is the caller's to use, declared for a provider."""
        return self.declared(self._tools.visible(caller), provider, strict=strict)

    def declared(self, versions: Sequence[Version], provider: Provider, *, strict: bool = False) -> list[Json]:
        """Tools declared for a provider, in the strict form where their schema has one and it is asked for."""
        return [formats.declare(one.contract, provider, strict=strict) for one in versions]

    async def call(
        self, sent: Any, caller: Caller, *, door: str, session: str = "", trace: str | None = None
    ) -> tuple[Result, Json]:
        """Make the call that a model asked for. Its result, and the message that tells the model.

        The id that the provider gave to the tool call is its key: handed on twice, the call is made once.
        """
        asked = formats.read_call(sent)
        visible = {one.row.address: one for one in self._tools.visible(caller)}
        address = formats.address_of(asked.name, visible)
        contract = visible[address].contract
        # A strict form writes what is left out as null.
        arguments = formats.restored(contract.input.model_facing, asked.arguments)
        ids = {"function_name": asked.name} | ({} if asked.id is None else {"tool_call_id": native_id(asked.id)})
        key = asked.id if contract.mutation.writes else None
        ask = Ask(address, arguments, key=key, session=session, trace=trace, native=ids)
        result = await self._calls.invoke(ask, caller, door=door)
        return result, formats.answer(asked, result)

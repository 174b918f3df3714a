"""Tools in the words of the model providers: what to offer a model, and what to do with what it asks for.

A loop that talks to OpenAI, Anthropic or Gemini needs no adapter of its own: it offers the declarations, hands each
tool call of the model on as it came, and puts the message it gets back into the conversation.
"""

from __future__ import annotations

import mimetypes
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from interlock.api.call_records import CallRecords
from interlock.api.calls import Ask, Calls, native_id
from interlock.api.declarations import Declarations
from interlock.api.tools import Tools
from interlock.call.context import Caller
from interlock.call.media import LARGEST, parts_of, text_for_model
from interlock.call.phases import Request
from interlock.call.results import Result
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.data.bounds import LONGEST_NAME
from interlock.data.schema import Json
from interlock.registry.version import Version
from interlock.upstreams import formats
from interlock.upstreams.formats import Provider
from interlock.upstreams.provider_answers import NATIVE, answer

if TYPE_CHECKING:
    from interlock.api.parts import Parts


class ProviderOutcome(NamedTuple):
    """The result of a model's tool call, the message that tells the model, and the messages that come after the answers
    to all tool calls of the same turn.
    """

    result: Result
    message: Json
    follow_up: list[Json]


class Providers:
    """The tools a caller can see, as a model provider takes them."""

    def __init__(self, parts: Parts, tools: Tools, calls: Calls) -> None:
        self._parts = parts
        self._tools = tools
        self._calls = calls
        self._records = CallRecords(parts)
        declared = Declarations(parts, tools)
        self.declarations, self.names = declared.declarations, declared.names

    async def call(
        self,
        sent: Any,
        caller: Caller,
        *,
        door: str,
        key: str | None = None,
        session: str = "",
        trace: str | None = None,
    ) -> ProviderOutcome:
        """Make the call that a model asked for.

        The id that the provider gave to the tool call is its key: handed on twice, the call is made once. `key` is for
        calls without an id, and goes before it. A tool that does not exist and arguments that are not JSON are mistakes
        of the model, so they are results that tell it, on record like any other.
        """
        asked = formats.read_call(sent)
        ids = {"function_name": asked.name} | ({} if asked.id is None else {"tool_call_id": native_id(asked.id)})
        try:
            version = await self._named(asked.name, caller)
            contract = version.contract
            # A strict form writes what is left out as null.
            arguments = formats.restored(contract.input.model_facing, asked.arguments)
        except Failure as failure:
            request = Request(asked.name[:LONGEST_NAME], {}, caller, session=session, native=ids, door=door)
            result = await self._parts.gateway.decline(request, failure)
            return ProviderOutcome(result, *answer(asked, [text_for_model(result)], failed=True))
        own = (key or asked.id) if contract.mutation.writes else None
        ask = Ask(version.row.address, arguments, key=own, session=session, trace=trace, native=ids)
        result = await self._calls.invoke(ask, caller, door=door)
        blocks = contract.mcp_form
        parts = parts_of(result, await self._files(asked.provider, result, caller), blocks=blocks)
        failed = not result.ok and not result.pending
        return ProviderOutcome(result, *answer(asked, parts, failed=failed, value=_as_data(result, blocks=blocks)))

    async def _files(self, provider: Provider, result: Result, caller: Caller) -> dict[str, bytes]:
        """The files of a result that this provider's models can be shown."""
        files: dict[str, bytes] = {}
        for one in result.artifacts:
            kind = mimetypes.guess_type(one.path)[0] or ""
            if one.size <= LARGEST * 3 // 4 and (kind in NATIVE[provider] or kind.startswith("text/")):
                with suppress(Failure):  # one that is gone is only named
                    files[one.ref] = await self._records.payload(one.ref, by=caller)
        return files

    async def _named(self, name: str, caller: Caller) -> Version:
        """The tool that a provider's name stands for. Most names spell it, so that no other tool is looked at."""
        spelled = name.replace("__", ".")
        if formats.provider_name(spelled) == name:
            try:
                return await self._tools.find(spelled, None, caller)
            except Failure as failure:
                if failure.code != "E3101":
                    raise
        own = await self.names()
        address = next((address for address, stored in own.items() if stored == name), None)
        if address is not None:
            return await self._tools.find(address, None, caller)
        visible = {one.row.address: one for one in await self._tools.visible(caller)}
        return visible[formats.address_of(name, visible, own)]


def _as_data(result: Result, *, blocks: bool) -> Any:
    """The result as data, where all of it is at hand and it is more than texts."""
    if not result.ok or result.persistence.ref is not None:
        return None
    return cast("Json", result.value).get("structuredContent") if blocks else result.value

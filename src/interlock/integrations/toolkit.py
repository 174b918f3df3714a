"""The tools that one caller may use, in the form that an agent framework or a model provider takes.

A toolkit belongs to one caller: the holder of a token, a `Caller`, or the local user. It lists the tools that this
caller may see, and every tool call of a model becomes a governed call of this caller. Failures, refusals and approvals
come back in the form that each framework has for them.

The id that the provider gave to a tool call is its idempotency key, within `session`: a call that is sent twice runs
once. A call that waits for a person is told to the model, with the advice to make the same call again. Models give
every call a new id, so the toolkit remembers which calls wait, and makes an equal one under the id of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from interlock.api.calls import Calls
from interlock.api.providers import ProviderOutcome, Providers
from interlock.call.media import text_for_model
from interlock.call.phases import Request
from interlock.core.errors import Failure
from interlock.data.bounds import LONGEST_NAME
from interlock.data.canonical import encode
from interlock.upstreams import formats
from interlock.upstreams.formats import Provider, ToolCall
from interlock.upstreams.provider_answers import answer

if TYPE_CHECKING:
    from langchain_core.tools import BaseTool
    from pydantic_ai.toolsets import AbstractToolset

    from interlock.api.interlock import Interlock
    from interlock.call.context import Caller
    from interlock.call.results import Result
    from interlock.contract.contract import Contract
    from interlock.data.schema import Json

_DOOR = "library"
_MOST_WAITING = 1000
_AGAIN = "not done yet: tell your user, and make the same call again once a person has agreed"
# How tool calls are marked, and the members of a reply in which they are.
_CALLS, _GEMINI = ("function", "function_call", "tool_use"), frozenset(("functionCall", "function_call"))
_INSIDE = ("choices", "message", "tool_calls", "output", "candidates", "content", "parts")


class Toolkit:
    """The governed tools of one caller.

    `tools` names those to offer, instead of all that the caller may see. `session` tells conversations apart: calls
    of different sessions never share an idempotency key. With `wait_s`, a call that needs a person waits this long for
    the decision before the model is told.
    """

    def __init__(
        self,
        app: Interlock,
        *,
        caller: Caller | None = None,
        token: str | None = None,
        tools: Sequence[str] = (),
        session: str = "",
        wait_s: float = 0.0,
    ) -> None:
        if caller is not None and token is not None:
            raise TypeError("a toolkit has a caller or a token, not both")
        self._app = app
        self._named = tools
        self._caller, self._token = caller, token
        self._session = session
        self._wait_s = wait_s
        self._tools = app.tools
        self._providers = Providers(app, self._tools, Calls(app))
        self._waiting: dict[tuple[str, bytes], str] = {}

    # Frameworks

    async def langchain(self) -> list[BaseTool]:
        """The tools for LangChain and LangGraph. A failure is a ToolMessage with the status `error`."""
        from interlock.integrations.langchain import governed

        return [governed(self, name, contract) for name, contract in await self.named()]

    def pydantic_ai(self, *, defer: bool = False) -> AbstractToolset[Any]:
        """The tools as a pydantic-ai toolset, listed again for every step of a run.

        With `defer`, a call that waits for a person ends the run with DeferredToolRequests, which the agent must have
        among its output types; otherwise the model is told.
        """
        from interlock.integrations.pydantic_ai import GovernedToolset

        return GovernedToolset(self, defer=defer)

    async def openai_agents(self) -> list[Any]:
        """The tools as `FunctionTool`s of the OpenAI Agents SDK."""
        from interlock.integrations.openai_agents import governed

        return [governed(self, name, contract) for name, contract in await self.named()]

    # Loops that talk to a provider themselves

    async def declarations(self, provider: Provider, *, strict: bool = False) -> list[Any]:
        """The `tools` of a request to a provider."""
        tools = await self.named()
        return [formats.declare(contract, provider, name=name, strict=strict) for name, contract in tools]

    async def answers(self, reply: Any) -> list[Any]:
        """Make the tool calls of a model's reply, one after the other; the messages that answer them.

        Takes the reply as the provider's library returns it, or its JSON: a chat completion or its message, a response,
        an Anthropic message, a Gemini answer. The answers to OpenAI are messages, those to Anthropic and Gemini parts
        of one. There are none if the model called no tool.
        """
        outcomes = [await self._made(sent) for sent in _calls_in(_plain(reply))]
        return [one.message for one in outcomes] + [message for one in outcomes for message in one.follow_up]

    # For the adapters

    async def named(self) -> list[tuple[str, Contract]]:
        """The tools that the caller may see, in order, each with the name under which models know it."""
        caller, own = await self._who(), await self._providers.names()
        if self._named:
            found = [(await self._tools.find(name, None, caller)).contract for name in self._named]
        else:
            usable = await self._tools.callable(caller, await self._tools.visible(caller))
            found = [one.contract for one in usable]
        return [(own.get(one.address) or formats.provider_name(one.address), one) for one in found]

    async def call(self, name: str, arguments: Any, call_id: str | None) -> tuple[Result, list[Json]]:
        """Make a tool call of a model, by the name that the model knows; its result, and the parts for the model.

        A part has the type `input_text`, `input_image` or `input_file`, in the form of OpenAI's responses.
        """
        # A call without an id has no key, which calls that change something need.
        sent = {"type": "function_call", "call_id": call_id or "", "name": name, "arguments": arguments}
        made = await self._made(sent)
        output: str | list[Json] = made.message["output"]
        return made.result, [{"type": "input_text", "text": output}] if isinstance(output, str) else output

    async def _made(self, sent: Json) -> ProviderOutcome:
        """Make one call; its result, and the message for the model."""
        asked = formats.read_call(sent)
        try:
            caller = await self._who()
        except Failure as failure:
            result = await self._app.gateway.decline(Request(asked.name[:LONGEST_NAME], {}, None, door=_DOOR), failure)
            return ProviderOutcome(result, *answer(asked, [text_for_model(result)], failed=True))
        action = _action(asked)
        key = self._waiting.pop(action, asked.id)
        made = await self._providers.call(sent, caller, door=_DOOR, session=self._session, key=key)
        if made.result.pending and self._wait_s > 0:
            await self._app.wait(made.result, within_s=self._wait_s)
            # Under the same key, this is the same call: it returns how the first one ended.
            made = await self._providers.call(sent, caller, door=_DOOR, session=self._session, key=key)
        if not made.result.pending:
            return made
        if key is not None and len(self._waiting) < _MOST_WAITING:
            self._waiting[action] = key
        message, _ = answer(asked, [f"{made.result.text()}; {_AGAIN}"], failed=False)
        return made._replace(message=message)

    async def _who(self) -> Caller:
        if self._token is not None:
            return await self._app.caller_of(self._token)
        return self._caller or self._app.caller


def _action(asked: ToolCall) -> tuple[str, bytes]:
    """The identity of a call: calls with an equal one do the same."""
    try:
        return asked.name, encode(asked.arguments)
    except Failure:  # it is not going to wait for anybody
        return asked.name, b""


def _plain(reply: Any) -> Any:
    """A provider's objects as data. Their libraries make them with pydantic."""
    if isinstance(reply, list | tuple):
        return [_plain(one) for one in cast("Sequence[Any]", reply)]
    dump = getattr(reply, "model_dump", None)
    return reply if dump is None else dump(mode="json", exclude_none=True)


def _calls_in(reply: Any) -> Iterator[Json]:
    """The tool calls in a reply of any provider, in their order."""
    if isinstance(reply, list):
        for one in cast("list[Any]", reply):
            yield from _calls_in(one)
    elif isinstance(reply, dict):
        found = cast("Json", reply)
        if found.get("type") in _CALLS or _GEMINI & found.keys():
            yield found
        else:
            for inside in _INSIDE:
                yield from _calls_in(found.get(inside))

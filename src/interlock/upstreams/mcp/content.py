"""The resources and prompts of one MCP server: listed, read, completed and watched for clients of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from interlock.call.connector import ALONE, Interaction
from interlock.call.mcp import METHOD_NOT_FOUND
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.upstreams.mcp.answers import plain, refusal, rounds
from interlock.upstreams.mcp.config import McpConfig
from interlock.upstreams.mcp.opening import Conversation
from interlock.upstreams.mcp.protocol import LIST_S, RpcError
from interlock.upstreams.mcp.questions import Questions, answerable, refuse_answers
from interlock.upstreams.mcp.session import Session
from interlock.upstreams.mcp.sessions import Sessions
from interlock.upstreams.supervisor import Supervisor

if TYPE_CHECKING:
    from interlock.call.context import Caller

# How long a prompt or a resource that asks questions waits for the answers.
ANSWER_S = 600.0
_LISTS = {"resources": "resources/list", "resourceTemplates": "resources/templates/list", "prompts": "prompts/list"}


class Content:
    """The prompts, resources and templates of a server."""

    def __init__(self, name: str, config: McpConfig, sessions: Sessions) -> None:
        self._name = name
        self._config = config
        self._sessions = sessions

    async def list_resources(self, credentials: Mapping[str, str] | None = None) -> list[Json]:
        async with session_for(self._sessions, self._config, credentials) as session:
            return await list_of(session, "resources", "resources")

    async def list_resource_templates(self, credentials: Mapping[str, str] | None = None) -> list[Json]:
        async with session_for(self._sessions, self._config, credentials) as session:
            return await list_of(session, "resources", "resourceTemplates")

    async def list_prompts(self, credentials: Mapping[str, str] | None = None) -> list[Json]:
        async with session_for(self._sessions, self._config, credentials) as session:
            return await list_of(session, "prompts", "prompts")

    async def read_resource(self, uri: str, interaction: Interaction = ALONE, caller: Caller | None = None) -> Json:
        """Return the server's answer unchanged: `contents`. Raises E3411 if it asks for more first, as tools do."""
        return await self._read("resources/read", {"uri": uri}, interaction, caller)

    async def get_prompt(
        self,
        name: str,
        arguments: Mapping[str, str] | None = None,
        interaction: Interaction = ALONE,
        caller: Caller | None = None,
    ) -> Json:
        """Return the server's answer unchanged: `description`, `messages`. Raises E3411 if it asks for more first."""
        params: Json = {"name": name, "arguments": dict(arguments or {})}
        return await self._read("prompts/get", params, interaction, caller)

    async def _read(self, method: str, params: Json, interaction: Interaction, caller: Caller | None) -> Json:
        """Read something that the server may ask questions about first, in a conversation of the caller's own."""
        questions, shared = Questions(interaction, passed_on=self._config.questions), Conversation({})
        session = await self._sessions.slot(shared).get(LIST_S)
        wanted, within_s = shared, LIST_S
        if able := answerable(interaction, passed_on=self._config.questions):
            within_s = ANSWER_S
            client = self._config.own_client(interaction.client)
            own = Conversation({}, able, None, caller, handshake=session.server.modern, client=client)
            in_the_middle = session.server.modern and not interaction.calls_again
            if (
                in_the_middle and await self._sessions.speaks_both(own, LIST_S) is not None
            ) or not session.server.modern:
                wanted = own
        try:
            async with self._sessions.lease(wanted, within_s) as slot:
                session = await slot.get(LIST_S)
                refuse_answers(session.server, interaction)

                async def ask(sent: Json) -> Json:
                    declared = interaction.capabilities
                    return await session.request(
                        method, sent, within_s=within_s, questions=questions, capabilities=declared
                    )

                answer = await ask({**params, **interaction.answers})
                return plain(await rounds(answer, ask, params, interaction, questions))
        except RpcError as error:
            raise questions.explain(refusal(error, None)) from None
        except Failure as failure:
            raise questions.explain(failure) from None

    async def complete(self, ref: Json, argument: Json, context: Json | None = None) -> Json:
        """Return the server's proposals for an argument of a prompt or a template: `completion`, maybe
        without values.
        """
        async with session_for(self._sessions, self._config) as session:
            if not session.server.offers("completions"):
                return {"completion": {"values": []}}
            params = {"ref": ref, "argument": argument, **({} if context is None else {"context": context})}
            return plain(await session.request("completion/complete", params, within_s=LIST_S))

    async def watch(self, uri: str, on_change: Callable[[], None]) -> None:
        """Call `on_change` once the server agreed to report changes of a resource, and then at every change.

        Continues until it is cancelled or the conversation ends. Raises E3109 if the server does not report any.
        """
        async with session_for(self._sessions, self._config) as session:
            if not session.server.offers("resources") or not session.server.capabilities["resources"].get("subscribe"):
                raise Failure("E3109", f"`{self._name}` does not tell of changes of its resources")
            await session.watch(uri, on_change, LIST_S)


async def list_of(session: Session, capability: str, what: str) -> list[Json]:
    """Return one list of the server; empty if it does not offer the capability."""
    if not session.server.offers(capability):
        return []
    try:
        entries = await session.pages(_LISTS[what], what, within_s=LIST_S)
    except RpcError as error:
        if error.code == METHOD_NOT_FOUND:
            return []
        raise
    return [cast("Json", one) for one in entries if isinstance(one, dict)]


def session_for(sessions: Sessions, config: McpConfig, credentials: Mapping[str, str] | None = None) -> _RequestSession:
    """A session for a request of ours: without credentials, or with those of the requester."""
    lent = {} if credentials is None else config.lent(credentials)
    return _RequestSession(sessions.slot(Conversation(lent)))


class _RequestSession:
    """A session for the duration of a request, whose errors become failures."""

    def __init__(self, slot: Supervisor[Session], within_s: float = LIST_S) -> None:
        self._slot = slot
        self._within_s = within_s

    async def __aenter__(self) -> Session:
        return await self._slot.get(self._within_s)

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RpcError):
            raise refusal(error, None) from None

"""One MCP server as an upstream: its tools are found and called, its resources and prompts are passed on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from interlock.call.connector import ALONE, Discovered, Interaction, RemoteCall
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.upstreams import wire
from interlock.upstreams.children import Restarts, Supervisor
from interlock.upstreams.manifests import definition_digest
from interlock.upstreams.mcp.answers import pass_on_log, plain, refusal, rounds, stated_of_data, understood, value
from interlock.upstreams.mcp.config import McpConfig
from interlock.upstreams.mcp.protocol import (
    INVALID_PARAMS,
    LOG_LEVEL,
    LOG_LEVELS,
    METHOD_NOT_FOUND,
    QUESTIONS,
    TASK,
    TASKS,
    Listening,
    RpcError,
    members,
)
from interlock.upstreams.mcp.questions import Questions
from interlock.upstreams.mcp.session import LIST_S, Session
from interlock.upstreams.mcp.sessions import Conversation, Sessions
from interlock.upstreams.mcp.tasks import follow

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.resilience.services import Services

# How long a prompt or a resource that asks questions waits for the answers.
ANSWER_S = 600.0
_LISTS = {"resources": "resources/list", "resourceTemplates": "resources/templates/list", "prompts": "prompts/list"}


class McpUpstream:
    """One MCP server, connected when first needed. `alert` is called when it cannot be kept running."""

    def __init__(
        self,
        name: str,
        config: McpConfig,
        *,
        clock: Clock,
        on_change: Callable[[], None],
        logs: Path | None = None,
        alert: Callable[[str], None] | None = None,
        restarts: Restarts | None = None,
        services: Services | None = None,
    ) -> None:
        self._name = name
        self._config = config
        self._on_change = on_change
        self._sessions = Sessions(
            name, config, clock=clock, on_change=self._changed, logs=logs, alert=alert, restarts=restarts
        )
        place = config.url or name
        self._sender = wire.Sender(
            name, (place,), wire.RemoteConfig.model_validate({}), clock=clock, sleep=asyncio.sleep, services=services
        )

    def _changed(self) -> None:
        """Drop cached answers, because the server's tools have changed."""
        self._sender.forget()
        self._on_change()

    # Calling

    async def call(self, call: RemoteCall) -> Any:
        """Return the tool's value: always `content`, with `structuredContent` and `_meta` if the server gave them."""
        lent = self._sessions.lent(call.credentials)
        return await self._sender.send(call, lambda one, _: self._attempt(one, lent))

    async def _attempt(self, call: RemoteCall, lent: Mapping[str, str]) -> Json:
        if self._config.url is not None:
            wire.check_egress(call, self._config.url)
        interaction = call.interaction
        session = await self._sessions.slot(Conversation(lent)).get(call.left_s)
        able = self._able(interaction)
        listens = self._listens(interaction, session)
        level = None if listens is None else listens.level
        wanted = Conversation(lent)
        if session.server.modern:
            pushed = Conversation(lent, able, level, call.caller, handshake=True)
            if able and not interaction.calls_again and await self._takes_pushed(pushed, call):
                wanted = pushed
            elif listens is not None:
                wanted = Conversation(lent, {}, level, call.caller)
        elif able or listens is not None:
            wanted = Conversation(lent, able, level, call.caller)
        async with self._sessions.lease(wanted, call.left_s) as slot:
            return await self._ask(slot, call, listens, Questions(interaction, passed_on=self._config.questions))

    async def _ask(
        self, slot: Supervisor[Session], call: RemoteCall, listens: Listening | None, questions: Questions
    ) -> Json:
        session = await slot.get(call.left_s)
        _refuse_answers(session, call.interaction)
        params: Json = {"name": call.native["name"], "arguments": call.arguments}

        async def request(sent: Json) -> Json:
            return await self._request(session, call, sent, listens, questions)

        try:
            if session.seen.get(call.native["name"]) != call.definition:
                await self._check(session, call)
            answer = await rounds(request, params, call.interaction, questions)
            if answer.get("resultType") == TASK:
                answer = await self._follow(slot, answer, call, questions)
        except RpcError as error:
            raise questions.explain(refusal(error, call)) from None
        except Failure as failure:
            if (failure.details or {}).get("reason") == "session_gone":
                slot.discard(session)
            raise
        finally:
            call.reported["mcp_session_id"] = getattr(session.wire, "session_id", None)
        call.reported["isError"] = answer.get("isError", False) is True
        call.provenance.update(stated_of_data(answer))
        try:
            return value(answer, call)
        except Failure as failure:
            raise questions.explain(failure) from None

    async def _follow(self, slot: Supervisor[Session], created: Json, call: RemoteCall, questions: Questions) -> Json:
        """Return the result of a task that the server made of a call."""
        able = self._declared(call, tasks=True)
        session = await slot.get(call.left_s)

        async def send(method: str, params: Json) -> Json:
            nonlocal session
            if session.ended.done():
                session = await slot.get(call.left_s)
            return await session.request(method, params, within_s=min(call.left_s, LIST_S), capabilities=able)

        return await follow(created, send, lambda name: session.cancel_task(name, able), call, questions)

    @staticmethod
    def _declared(call: RemoteCall, *, tasks: bool) -> Json:
        """Return the abilities that a server of the modern era is told of: the client's, and our own."""
        able = call.interaction.capabilities
        return {**able, "extensions": {TASKS: {}}} if tasks else able

    async def _check(self, session: Session, call: RemoteCall) -> None:
        """INVARIANT: a server is asked only for what was admitted, as it was described then.

        A conversation therefore begins with listing its tools. A difference is refused, and the whole upstream is
        looked at again.
        """
        name = str(call.native["name"])
        if call.definition is None:
            return  # a manifest that was written by hand is the operator's own statement
        known = name in session.seen
        if await self._offered(session, name, call.left_s) == call.definition:
            return
        if not known:
            self._changed()
        is_now = "describes it otherwise now" if session.seen[name] else "offers it no longer"
        raise Failure(
            "E3210", f"`{name}` is not what was admitted: `{self._name}` {is_now}",
            details={"sent": False, "upstream": self._name}, resolution=wire.look_at(self._name),
        )  # fmt: skip

    async def _offered(self, session: Session, name: str, within_s: float) -> str:
        """Return the digest of a tool as a conversation lists it now; empty if it does not."""
        listed = await session.tools(within_s)
        if name not in session.seen:
            same = [one for one in listed if members(one).get("name") == name]
            definitions, _ = understood(same, headers=self._config.url is not None)
            session.seen[name] = definition_digest(definitions[0]) if definitions else ""
        return session.seen[name]

    async def _request(
        self, session: Session, call: RemoteCall, params: Json, listens: Listening | None, questions: Questions
    ) -> Json:
        context = call.trace | call.identity if self._config.sends_caller else call.trace
        wants_log = {} if listens is None or not session.server.modern else {LOG_LEVEL: listens.level}
        return await session.request(
            "tools/call",
            params,
            within_s=call.left_s,
            meta={**context, **wants_log},
            headers=self._headers(call, context),
            progress=call.progress,
            questions=questions,
            on_log=None if listens is None else lambda message: pass_on_log(listens, message, call),
            capabilities=self._declared(call, tasks=session.server.extends(TASKS)),
            noted=call.reported,
        )

    async def _takes_pushed(self, wanted: Conversation, call: RemoteCall) -> bool:
        """Whether the server also speaks the era of a client that is asked in the middle of its request, and offers the
        tool there as it was admitted.

        In that era a tool asks as it would without Interlock; many tools of servers of both eras ask in no other way.
        """
        session = await self._sessions.speaks_both(wanted, call.left_s)
        if session is None or call.definition is None:
            return session is not None
        return await self._offered(session, str(call.native["name"]), call.left_s) == call.definition

    def _able(self, interaction: Interaction) -> Json:
        """Return the questions that a client can answer, with which a conversation of the handshake
        era must be opened.
        """
        if interaction.ask is None or not self._config.questions:
            return {}
        return {name: options for name, options in interaction.capabilities.items() if name in QUESTIONS.values()}

    def _listens(self, interaction: Interaction, session: Session) -> Listening | None:
        """Return the client of a call, if it wants the server's log messages and the server has a log."""
        wanted = self._config.url is not None if self._config.logs is None else self._config.logs
        if not wanted or not isinstance(interaction, Listening) or not session.server.offers("logging"):
            return None
        return interaction if interaction.level in LOG_LEVELS else None

    def _headers(self, call: RemoteCall, context: dict[str, str]) -> dict[str, str]:
        if self._config.url is None:
            return {}
        if "headers" not in call.native:
            return context
        from interlock.upstreams.mcp.headers import parameter_headers

        return parameter_headers(call.native["headers"], call.arguments) | context

    # Looking

    def mapping(self, native: Json, reported: Json) -> Json | None:
        pinned = {"kind": "mcp", "server_id": self._name, "method": "tools/call", "tool_name": native["name"]}
        return {**pinned, **reported}

    async def discover(self, credentials: Mapping[str, str] | None = None) -> Discovered:
        """Return everything the server offers now. Raises E3502 if no version of the protocol is common to both."""
        async with self._asking(credentials) as session:
            server = session.server
            listed = await session.tools(LIST_S, anew=True)
            tools, refused = understood(listed, headers=self._config.url is not None)
            about: Json = {
                "name": server.name,
                "version": server.version,
                "protocol": server.protocol,
                "capabilities": server.capabilities,
                "instructions": server.instructions,
                "resources": await self._list(session, "resources", "resources"),
                "resourceTemplates": await self._list(session, "resources", "resourceTemplates"),
                "prompts": await self._list(session, "prompts", "prompts"),
            }
        return Discovered(tools, refused, about)

    @staticmethod
    async def _list(session: Session, capability: str, what: str) -> list[Json]:
        if not session.server.offers(capability):
            return []
        try:
            entries = await session.pages(_LISTS[what], what, within_s=LIST_S)
        except RpcError as error:
            if error.code == METHOD_NOT_FOUND:
                return []
            raise
        return [cast("Json", one) for one in entries if isinstance(one, dict)]

    async def list_resources(self, credentials: Mapping[str, str] | None = None) -> list[Json]:
        async with self._asking(credentials) as session:
            return await self._list(session, "resources", "resources")

    async def list_resource_templates(self, credentials: Mapping[str, str] | None = None) -> list[Json]:
        async with self._asking(credentials) as session:
            return await self._list(session, "resources", "resourceTemplates")

    async def list_prompts(self, credentials: Mapping[str, str] | None = None) -> list[Json]:
        async with self._asking(credentials) as session:
            return await self._list(session, "prompts", "prompts")

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
        if able := self._able(interaction):
            within_s = ANSWER_S
            own = Conversation({}, able, None, caller, handshake=session.server.modern)
            in_the_middle = session.server.modern and not interaction.calls_again
            if (
                in_the_middle and await self._sessions.speaks_both(own, LIST_S) is not None
            ) or not session.server.modern:
                wanted = own
        try:
            async with self._sessions.lease(wanted, within_s) as slot:
                session = await slot.get(LIST_S)
                _refuse_answers(session, interaction)

                async def ask(sent: Json) -> Json:
                    declared = interaction.capabilities
                    return await session.request(
                        method, sent, within_s=within_s, questions=questions, capabilities=declared
                    )

                return plain(await rounds(ask, params, interaction, questions))
        except RpcError as error:
            raise questions.explain(refusal(error, None)) from None
        except Failure as failure:
            raise questions.explain(failure) from None

    async def complete(self, ref: Json, argument: Json, context: Json | None = None) -> Json:
        """Return the server's proposals for an argument of a prompt or a template: `completion`, maybe
        without values.
        """
        async with self._asking(None) as session:
            if not session.server.offers("completions"):
                return {"completion": {"values": []}}
            params = {"ref": ref, "argument": argument, **({} if context is None else {"context": context})}
            return plain(await session.request("completion/complete", params, within_s=LIST_S))

    async def watch(self, uri: str, on_change: Callable[[], None]) -> None:
        """Call `on_change` once the server agreed to report changes of a resource, and then at every change.

        Continues until it is cancelled or the conversation ends. Raises E3109 if the server does not report any.
        """
        async with self._asking(None) as session:
            if not session.server.offers("resources") or not session.server.capabilities["resources"].get("subscribe"):
                raise Failure("E3109", f"`{self._name}` does not tell of changes of its resources")
            await session.watch(uri, on_change, LIST_S)

    def _asking(self, credentials: Mapping[str, str] | None) -> _Asking:
        """A session for a request of ours: without credentials, or with those of the requester."""
        lent = {} if credentials is None else self._sessions.lent(credentials)
        return _Asking(self._sessions.slot(Conversation(lent)))

    def attend(self, hear: Callable[[str], None]) -> None:
        """Call `hear` with the server's list that changed: tools, resources or prompts."""
        self._sessions.attend(hear)

    # Supervision

    async def probe(self, credentials: Mapping[str, str] | None = None) -> None:
        """Check that it answers within five seconds. A program that does not is ended, and so restarted."""
        await self._sessions.probe(credentials)

    async def replace(self) -> None:
        """Restart everything without losing a call: the new one is up before the old one is asked to finish."""
        await self._sessions.replace()

    async def close(self) -> None:
        """End every conversation and every program."""
        await self._sessions.close()

    def health(self) -> Json:
        """The state of the shared conversation, and the number of conversations, for monitoring."""
        return self._sessions.health()


def _refuse_answers(session: Session, interaction: Interaction) -> None:
    """INVARIANT: a server of the handshake era, which takes no answers, does not run a tool again because of them."""
    if interaction.answers and not session.server.modern:
        raise Failure(
            "E3411",
            "Invalid or expired requestState: the call that asked is over, or belongs to another",
            details={"sent": False, "code": INVALID_PARAMS},
            resolution="make the call again without inputResponses and requestState",
        )


class _Asking:
    """A session for the duration of a request, whose errors become failures."""

    def __init__(self, slot: Supervisor[Session], within_s: float = LIST_S) -> None:
        self._slot = slot
        self._within_s = within_s

    async def __aenter__(self) -> Session:
        return await self._slot.get(self._within_s)

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RpcError):
            raise refusal(error, None) from None

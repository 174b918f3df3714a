"""Calls of the tools of one MCP server: which conversation one needs, what is sent, and how its answer is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from interlock.call.connector import Interaction, RemoteCall
from interlock.call.mcp import INPUT_REQUIRED, LOG_LEVEL, LOG_LEVELS, TASK, TASKS, Listening
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.upstreams import wire
from interlock.upstreams.mcp.answers import pass_on_log, refusal, rounds, stated_of_data, value
from interlock.upstreams.mcp.config import McpConfig
from interlock.upstreams.mcp.definitions import listed_digest
from interlock.upstreams.mcp.opening import SHARED, Conversation
from interlock.upstreams.mcp.protocol import LIST_S, RpcError
from interlock.upstreams.mcp.questions import Questions, answerable, refuse_answers
from interlock.upstreams.mcp.sessions import Sessions
from interlock.upstreams.mcp.tasks import follow
from interlock.upstreams.sender import Sender

if TYPE_CHECKING:
    from interlock.core.clock import Clock
    from interlock.resilience.services import Services
    from interlock.upstreams.mcp.session import Session
    from interlock.upstreams.supervisor import Supervisor


class ToolCalls:
    """Makes calls in the conversations of one server. `on_change` is called when a tool is not what was admitted."""

    def __init__(
        self,
        name: str,
        config: McpConfig,
        sessions: Sessions,
        *,
        clock: Clock,
        on_change: Callable[[], None],
        services: Services | None,
    ) -> None:
        self._name = name
        self._config = config
        self._sessions = sessions
        self._on_change = on_change
        self._sender = Sender(
            name, (config.url or name,), idempotent=False, clock=clock, sleep=asyncio.sleep, services=services
        )

    def forget(self) -> None:
        """Drop cached answers, because the server's tools have changed."""
        self._sender.forget()

    def make(self, call: RemoteCall) -> Coroutine[Any, Any, Any]:
        """Return the tool's value: always `content`, with `structuredContent` and `_meta` if the server gave them."""
        lent = self._config.lent(call.credentials)
        return self._sender.send(call, lambda one, _: self._attempt(one, lent))

    async def _attempt(self, call: RemoteCall, lent: Mapping[str, str]) -> Json:
        if self._config.url is not None:
            wire.check_egress(call, self._config.url)
        interaction = call.interaction
        shared = Conversation(lent) if lent else SHARED
        slot = self._sessions.slot(shared)
        session = await slot.get(call.left_s)
        able = answerable(interaction, passed_on=self._config.questions)
        listens = self._listens(interaction, session)
        wanted = shared
        if able or listens is not None:
            wanted = await self._own(call, lent, able, listens, session)
        questions = Questions(interaction, passed_on=self._config.questions)
        if wanted is shared:  # as nearly always; it carries any number of calls
            return await self._ask(slot, session, call, listens, questions)
        async with self._sessions.lease(wanted, call.left_s) as slot:
            return await self._ask(slot, await slot.get(call.left_s), call, listens, questions)

    async def _own(
        self, call: RemoteCall, lent: Mapping[str, str], able: Json, listens: Listening | None, session: Session
    ) -> Conversation:
        """Return the conversation for a client that can be asked or wants the log; the shared one if that will do."""
        level = None if listens is None else listens.level
        client = self._config.own_client(call.interaction.client) if able else ""
        if not session.server.modern:
            return Conversation(lent, able, level, call.caller, client=client)
        pushed = Conversation(lent, able, level, call.caller, handshake=True, client=client)
        if able and not call.interaction.calls_again and await self._takes_pushed(pushed, call):
            return pushed
        return Conversation(lent) if listens is None else Conversation(lent, {}, level, call.caller)

    async def _ask(
        self,
        slot: Supervisor[Session],
        session: Session,
        call: RemoteCall,
        listens: Listening | None,
        questions: Questions,
    ) -> Json:
        interaction, name = call.interaction, call.native["name"]
        refuse_answers(session.server, interaction)
        params: Json = {"name": name, "arguments": call.arguments}

        def request(sent: Json) -> Awaitable[Json]:
            return self._request(session, call, sent, listens, questions)

        try:
            if session.seen.get(name) != call.definition:
                await self._check(session, call)
            answer = await request({**params, **interaction.answers} if interaction.answers else params)
            kind = answer.get("resultType")
            if kind == INPUT_REQUIRED:
                answer = await rounds(answer, request, params, interaction, questions)
                kind = answer.get("resultType")
            if kind == TASK:
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

    def _takes_tasks(self, interaction: Interaction) -> bool:
        """Whether the server may make a task of a call: because its client takes tasks, or because we follow them."""
        return self._config.tasks == "follow" or interaction.on_task is not None

    @staticmethod
    def _declared(call: RemoteCall, *, tasks: bool) -> Json:
        """Return the capabilities to announce to a server of the modern era: the client's, and our own."""
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
            self._on_change()
        is_now = "describes it otherwise now" if session.seen[name] else "offers it no longer"
        raise Failure(
            "E3210", f"`{name}` is not what was admitted: `{self._name}` {is_now}",
            details={"sent": False, "upstream": self._name}, resolution=wire.look_at(self._name),
        )  # fmt: skip

    async def _offered(self, session: Session, name: str, within_s: float) -> str:
        return await listed_digest(session, name, within_s, headers=self._config.url is not None)

    def _request(
        self, session: Session, call: RemoteCall, params: Json, listens: Listening | None, questions: Questions
    ) -> Coroutine[Any, Any, Json]:
        context = call.trace | call.identity if self._config.sends_caller else call.trace
        server, on_log, meta = session.server, None, context
        if listens is not None:
            on_log = partial(pass_on_log, listens, call=call)
            meta = {**context, LOG_LEVEL: listens.level} if server.modern else context
        return session.request(
            "tools/call",
            params,
            within_s=call.left_s,
            meta=meta,
            headers=self._headers(call, context),
            progress=call.progress,
            questions=questions,
            on_log=on_log,
            capabilities=self._declared(call, tasks=server.extends(TASKS) and self._takes_tasks(call.interaction)),
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

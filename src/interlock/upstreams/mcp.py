"""MCP servers as upstreams, reached through the pipes of a program we run or by their address.

A `Session` is one conversation. Calls of all callers share one, unless the upstream is lent credentials: then there is
one for each set of them, since a conversation is opened with them and must never serve anybody else. In the handshake's
era it is also opened with what the client can be asked, so clients that can be asked have another; and since nothing
says whose call a server logs about, a caller who listens has one that is theirs alone. Those are bounded in number and
closed when nobody used them for a while. Each is kept by a supervisor.

What a server says of its tools is taken down and not believed. A descriptor that cannot be understood is refused by
itself; the others go on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import orjson
import pydantic

from interlock.core.clock import Clock
from interlock.core.connector import ALONE, Definition, Discovered, Interaction, RemoteCall
from interlock.core.context import Caller
from interlock.core.errors import Failure
from interlock.core.schema import Json, compile_validator
from interlock.upstreams import wire
from interlock.upstreams.children import Crashed, Program, Restarts, Supervisor
from interlock.upstreams.mcp_session import (
    INVALID_PARAMS,
    LOG_LEVEL,
    METHOD_NOT_FOUND,
    QUESTIONS,
    Era,
    Listening,
    Pipes,
    RpcError,
    Session,
    Wire,
    put,
)

if TYPE_CHECKING:
    from interlock.resilience.services import Services

_log = logging.getLogger("interlock.upstreams.mcp")

MAX_SESSIONS = 32
IDLE_S = 300.0
LIST_S = 30.0
DRAIN_S = 30.0
# The limit of a health request is five seconds; who measures them from outside must hear of it from here first.
PROBE_S = 4.5
MAX_NAME = 256
MAX_ROUNDS = 10
LOG_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
INPUT_REQUIRED = "input_required"


class McpConfig(wire.Part):
    """Where a server is: `command` for a program to run, `url` for one that runs elsewhere.

    `credentials` says which secret is lent as which environment variable, or header; a secret that is lent as
    Authorization and names no scheme is shown as a bearer token. `questions`: whether the questions of a server of the
    handshake's era are passed on; clients that can be asked then have a process apart from those that cannot. `logs`:
    whether what it logs during a call is told to clients that want to hear it; each such caller then has a conversation
    of their own, so unless told this is done only by `url`, where that costs no process.
    """

    command: tuple[str, ...] = ()
    env: dict[str, str] = pydantic.Field(default_factory=dict[str, str])
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = pydantic.Field(default_factory=dict[str, str])
    credentials: dict[str, str] = pydantic.Field(default_factory=dict[str, str])
    protocol: Era = "auto"
    questions: bool = True
    logs: bool | None = None
    allow_private: bool = False
    tls: wire.Tls = wire.Tls()

    @pydantic.field_validator("url")
    @classmethod
    def _plain(cls, url: str | None) -> str | None:
        if url is not None:
            wire.checked_url(url, ("http", "https"))
        return url

    @pydantic.model_validator(mode="after")
    def _one_place(self) -> McpConfig:
        if bool(self.command) == (self.url is not None):
            raise ValueError("say either command or url")
        if self.url is None and self.headers:
            raise ValueError("headers go with url; a command has env")
        if self.url is not None and (self.env or self.cwd):
            raise ValueError("env and cwd go with command; a url has headers")
        for name, value in self.headers.items():
            wire.header_safe(name, value)
            if name.lower() in ("authorization", "proxy-authorization", "cookie"):
                raise ValueError(f"`{name}` would keep a credential in clear; name the secret in `credentials`")
        return self


class McpUpstream:
    """One MCP server, connected when first needed. `alert` is told when it cannot be kept running."""

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
        self._clock = clock
        self._on_change = on_change
        self._logs = logs
        self._alert = alert or self._complain
        self._restarts = (restarts or Restarts()) if config.command else None
        self._era: Era = config.protocol
        self._met = False
        self._attending: set[Callable[[str], None]] = set()
        self._slots: OrderedDict[str, Supervisor[Session]] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        place = config.url or name
        self._sender = wire.Sender(
            name, (place,), wire.RemoteConfig.model_validate({}), clock=clock, sleep=asyncio.sleep, services=services
        )

    def _complain(self, reason: str) -> None:
        _log.error("%s: %s", self._name, reason)

    # Calling

    async def call(self, call: RemoteCall) -> Any:
        """The tool's value: always `content`, with `structuredContent` and `_meta` where the server gave them."""
        lent = self._lent(call.credentials)
        return await self._sender.send(call, lambda _: self._attempt(call, lent))

    async def _attempt(self, call: RemoteCall, lent: Mapping[str, str]) -> Json:
        slot = self._slot(lent, {})
        session = await slot.get(call.left_s)
        interaction = call.interaction
        able = self._able(interaction, session)
        listens = self._listens(interaction, session)
        if able or listens is not None:
            slot = self._slot(lent, able, listens, call.caller)
            session = await slot.get(call.left_s)
        params: Json = {"name": call.native["name"], "arguments": call.arguments}
        try:
            answer = await _rounds(lambda sent: self._request(session, call, sent, listens), params, interaction)
        except RpcError as error:
            raise _refusal(error, call) from None
        except Failure as failure:
            if (failure.details or {}).get("reason") == "session_gone":
                slot.discard(session)
            raise
        return _value(answer, call)

    async def _request(self, session: Session, call: RemoteCall, params: Json, listens: Listening | None) -> Json:
        wants_log = {} if listens is None or not session.server.modern else {LOG_LEVEL: listens.level}
        return await session.request(
            "tools/call",
            params,
            within_s=call.left_s,
            meta={**call.trace, **wants_log},
            headers=self._headers(call),
            progress=call.progress,
            ask=call.interaction.ask,
            tell=None if listens is None else lambda said: _tell(listens, said, call),
            capabilities=call.interaction.capabilities,
        )

    def _able(self, interaction: Interaction, session: Session) -> Json:
        """What a client can be asked that a conversation of the handshake's era must be opened with."""
        if interaction.ask is None or not self._config.questions or session.server.modern:
            return {}
        return {name: said for name, said in interaction.capabilities.items() if name in QUESTIONS.values()}

    def _listens(self, interaction: Interaction, session: Session) -> Listening | None:
        """The client of a call, if it wants to hear what the server logs, and the server has a log."""
        told = self._config.url is not None if self._config.logs is None else self._config.logs
        if not told or not isinstance(interaction, Listening) or not session.server.offers("logging"):
            return None
        return interaction if interaction.level in LOG_LEVELS else None

    def _headers(self, call: RemoteCall) -> dict[str, str]:
        if self._config.url is None:
            return {}
        headers = call.trace
        if "headers" in call.native:
            from interlock.upstreams.mcp_http import parameter_headers

            headers |= parameter_headers(call.native["headers"], call.arguments)
        return headers

    # Looking

    async def discover(self, credentials: Mapping[str, str] | None = None) -> Discovered:
        """Everything the server offers now. Raises E3502 when no version of the protocol is common to both."""
        async with self._asking(credentials) as session:
            server = session.server
            told = await session.pages("tools/list", "tools", within_s=LIST_S) if server.offers("tools") else []
            tools, refused = self._understood(told)
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

    def _understood(self, told: list[Any]) -> tuple[list[Definition], list[tuple[str, str]]]:
        tools: dict[str, Definition] = {}
        refused: list[tuple[str, str]] = []
        for number, descriptor in enumerate(told):
            try:
                tool = _definition(descriptor, taken=tools, headers=self._config.url is not None)
            except Failure as failure:
                said = cast("Json", descriptor).get("name") if isinstance(descriptor, dict) else None
                name = said[:MAX_NAME] if isinstance(said, str) and said else f"#{number + 1}"
                refused.append((name, f"INVALID_TOOL_SCHEMA: {failure.message}"))
            else:
                tools[tool.name] = tool
        return list(tools.values()), refused

    @staticmethod
    async def _list(session: Session, capability: str, what: str) -> list[Json]:
        if not session.server.offers(capability):
            return []
        try:
            found = await session.pages(_LISTS[what], what, within_s=LIST_S)
        except RpcError as error:
            if error.code == METHOD_NOT_FOUND:
                return []
            raise
        return [cast("Json", one) for one in found if isinstance(one, dict)]

    async def list_resources(self, credentials: Mapping[str, str] | None = None) -> list[Json]:
        async with self._asking(credentials) as session:
            return await self._list(session, "resources", "resources")

    async def list_resource_templates(self, credentials: Mapping[str, str] | None = None) -> list[Json]:
        async with self._asking(credentials) as session:
            return await self._list(session, "resources", "resourceTemplates")

    async def list_prompts(self, credentials: Mapping[str, str] | None = None) -> list[Json]:
        async with self._asking(credentials) as session:
            return await self._list(session, "prompts", "prompts")

    async def read_resource(
        self, uri: str, credentials: Mapping[str, str] | None = None, interaction: Interaction = ALONE
    ) -> Json:
        """The server's answer as it is: `contents`. Raises E3411 when it asks for more first, as tools do."""
        return await self._read("resources/read", {"uri": uri}, credentials, interaction)

    async def get_prompt(
        self,
        name: str,
        arguments: Mapping[str, str] | None = None,
        credentials: Mapping[str, str] | None = None,
        interaction: Interaction = ALONE,
    ) -> Json:
        """The server's answer as it is: `description`, `messages`. Raises E3411 when it asks for more first."""
        params: Json = {"name": name, "arguments": dict(arguments or {})}
        return await self._read("prompts/get", params, credentials, interaction)

    async def _read(
        self, method: str, params: Json, credentials: Mapping[str, str] | None, interaction: Interaction
    ) -> Json:
        async with self._asking(credentials) as session:

            async def ask(sent: Json) -> Json:
                return await session.request(method, sent, within_s=LIST_S, capabilities=interaction.capabilities)

            return _plain(await _rounds(ask, params, interaction))

    async def complete(self, ref: Json, argument: Json, context: Json | None = None) -> Json:
        """What the server proposes for an argument of a prompt or a template: `completion`, maybe of no values."""
        async with self._asking(None) as session:
            if not session.server.offers("completions"):
                return {"completion": {"values": []}}
            params = {"ref": ref, "argument": argument, **({} if context is None else {"context": context})}
            return _plain(await session.request("completion/complete", params, within_s=LIST_S))

    async def watch(self, uri: str, heard: Callable[[], None]) -> None:
        """Call `heard` once the server agreed to tell of changes of a resource, and then at every change.

        Goes on until it is cancelled or the conversation ends. Raises E3109 if the server does not tell of any.
        """
        async with self._asking(None) as session:
            if not session.server.offers("resources") or not session.server.capabilities["resources"].get("subscribe"):
                raise Failure("E3109", f"`{self._name}` does not tell of changes of its resources")
            await session.watch(uri, heard, LIST_S)

    def attend(self, hear: Callable[[str], None]) -> None:
        """Have `hear` told which of the server's lists change: tools, resources or prompts."""
        self._attending.add(hear)

    def _list_changed(self, kind: str) -> None:
        for hear in self._attending:
            hear(kind)

    def _asking(self, credentials: Mapping[str, str] | None) -> _Asking:
        """A session for a question of ours: without credentials, or with those of the one who asks."""
        lent = {} if credentials is None else self._lent(credentials)
        return _Asking(self._slot(lent, {}))

    # Keeping it there

    async def probe(self, credentials: Mapping[str, str] | None = None) -> None:
        """Whether it answers within five seconds. A program that does not is ended, and so started again."""
        self._close_idle()
        slots = [slot for slot in self._slots.values() if slot.current is not None]
        slots = slots or [self._slot({} if credentials is None else self._lent(credentials), {})]
        failures = [failure for failure in await asyncio.gather(*map(self._ping, slots)) if failure is not None]
        if len(failures) == len(slots):
            raise failures[0]

    async def _ping(self, slot: Supervisor[Session]) -> Failure | None:
        session: Session | None = None
        try:
            session = await slot.get(PROBE_S)
            await session.ping(PROBE_S)
        except RpcError:
            return None  # it answers
        except Failure as failure:
            if session is not None and failure.code == "E3503":
                session.wire.abort()
            return Failure("E3502", f"`{self._name}` does not answer a health request: {failure.message}")
        return None

    async def replace(self) -> None:
        """Start everything anew without losing a call: the new one is up before the old one is asked to finish."""
        await asyncio.gather(*(slot.replace(DRAIN_S) for slot in self._slots.values()))

    async def close(self) -> None:
        """End every conversation and every program."""
        slots, self._slots = list(self._slots.values()), OrderedDict()
        await asyncio.gather(*(slot.close() for slot in slots), *self._closing)

    def health(self) -> Json:
        """How it fares, for those who watch: the state of the shared conversation, and how many there are."""
        slot = self._slots.get("")
        return {
            "state": "idle" if slot is None else slot.state,
            "reason": "" if slot is None else slot.reason,
            "restarts": sum(one.restarted for one in self._slots.values()),
            "sessions": sum(one.current is not None for one in self._slots.values()),
            "busy": sum(one.busy for one in self._slots.values()),
        }

    # Conversations

    def _lent(self, credentials: Mapping[str, str]) -> dict[str, str]:
        """What the upstream is shown of the caller's secrets, under the names it knows; E3602 when one is missing."""
        lent: dict[str, str] = {}
        for shown, secret in self._config.credentials.items():
            value = credentials.get(secret)
            if not value:
                raise Failure("E3602", f"the call needs the credential `{secret}`: interlock secrets set {secret}")
            if shown.lower() == "authorization" and " " not in value:
                value = f"Bearer {value}"
            lent[shown] = value
        return lent

    def _slot(
        self,
        lent: Mapping[str, str],
        capabilities: Json,
        listens: Listening | None = None,
        caller: Caller | None = None,
    ) -> Supervisor[Session]:
        level = None if listens is None else listens.level
        ear = None if level is None or caller is None else [level, caller.tenant, caller.id, caller.acting]
        key = _key(lent, capabilities, ear)
        slot = self._slots.get(key)
        if slot is None:
            self._close_idle()
            self._make_room()

            async def start() -> Session:
                session = await self._open(key, lent, capabilities)
                if level is not None:
                    await session.log_from(level, LIST_S)
                return session

            slot = Supervisor(start, clock=self._clock, restarts=self._restarts, alert=self._alert)
            self._slots[key] = slot
        self._slots.move_to_end(key)
        return slot

    async def _open(self, key: str, lent: Mapping[str, str], capabilities: Json) -> Session:
        async def connect(session: Session) -> Wire:
            return await self._connect(session, key, lent)

        async def greet(era: Era) -> Session:
            return await Session.open(
                connect, era=era, capabilities=capabilities, on_change=self._on_change, on_list=self._list_changed
            )

        session = await self._greeted(greet)
        if key == "":
            if self._met:
                self._on_change()  # what it offers may have changed while it was away
                for kind in ("resources", "prompts"):
                    self._list_changed(kind)
            self._met = True
        return session

    async def _greeted(self, greet: Callable[[Era], Awaitable[Session]]) -> Session:
        """Greet the server in the way that worked last time, or find out which does."""
        try:
            session = await greet(self._era)
        except Crashed:
            if self._era != "auto":
                raise
            # Some servers of the handshake's era end when the first word is not the handshake.
            self._era = "handshake"
            session = await greet(self._era)
        except Failure:
            self._era = self._config.protocol
            raise
        if self._config.protocol == "auto":
            self._era = "auto" if session.server.modern else "handshake"
        return session

    async def _connect(self, session: Session, key: str, lent: Mapping[str, str]) -> Wire:
        config = self._config
        if config.url is None:
            log = None if self._logs is None else self._logs / f"{self._name}{key and '-'}{key[:8]}.log"
            return await Pipes.open(Program(config.command, config.env, lent, config.cwd, log), session)
        from interlock.upstreams.mcp_http import Http

        headers = {**config.headers, **lent}
        try:
            return await Http.open(
                config.url, headers, session, clock=self._clock, allow_private=config.allow_private, tls=config.tls
            )
        except OSError:
            raise wire.unreached(self._name, "has an address that cannot be found") from None

    def _close_idle(self) -> None:
        """Close what nobody used for a while. The shared one stays."""
        now = self._clock.monotonic()
        for key, slot in list(self._slots.items()):
            if key and not slot.busy and now - slot.used > IDLE_S:
                self._let_go(key)

    def _make_room(self) -> None:
        while len(self._slots) >= MAX_SESSIONS:
            key = next((key for key, slot in self._slots.items() if key and not slot.busy), None)
            if key is None:
                raise wire.unreached(self._name, f"is in use by {MAX_SESSIONS} identities at once", retry_after_ms=1000)
            self._let_go(key)

    def _let_go(self, key: str) -> None:
        self._spawn(self._slots.pop(key).close(DRAIN_S))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class _Asking:
    """A session for as long as a question takes, whose refusals become failures."""

    def __init__(self, slot: Supervisor[Session], within_s: float = LIST_S) -> None:
        self._slot = slot
        self._within_s = within_s

    async def __aenter__(self) -> Session:
        return await self._slot.get(self._within_s)

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RpcError):
            raise _refusal(error, None) from None


_LONGEST_DATA = 4096
_LISTS = {"resources": "resources/list", "resourceTemplates": "resources/templates/list", "prompts": "prompts/list"}


def _key(lent: Mapping[str, str], capabilities: Mapping[str, Any], ear: list[str] | None) -> str:
    """Names a conversation without naming what opened it; empty for the shared one."""
    if not lent and not capabilities and ear is None:
        return ""
    return hashlib.sha256(orjson.dumps([lent, capabilities, ear], option=orjson.OPT_SORT_KEYS)).hexdigest()


def _definition(descriptor: Any, *, taken: Container[str], headers: bool) -> Definition:
    """A tool as its server describes it, if it can be understood (E3105)."""
    if not isinstance(descriptor, dict):
        raise Failure("E3105", "it is not an object")
    told = cast("Json", descriptor)
    name, description, title = told.get("name"), told.get("description"), told.get("title")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise Failure("E3105", f"its name is not a text of 1 to {MAX_NAME} characters")
    if name in taken:
        raise Failure("E3105", "another tool of this server has the same name")
    if description is not None and not isinstance(description, str):
        raise Failure("E3105", "its description is not a text")
    takes, gives = told.get("inputSchema"), told.get("outputSchema")
    if not isinstance(takes, dict) or cast("Json", takes).get("type") != "object":
        raise Failure("E3105", "its inputSchema is not the schema of an object")
    if gives is not None and not isinstance(gives, dict):
        raise Failure("E3105", "its outputSchema is not a schema")
    compile_validator(cast("Json", takes))
    if gives is not None:
        compile_validator(cast("Json", gives))
    native: Json = {"protocol": "mcp", "name": name}
    if headers:
        from interlock.upstreams.mcp_http import header_parameters

        if wanted := header_parameters(cast("Json", takes)):
            native["headers"] = wanted
    annotations = told.get("annotations")
    hints = cast("Json", annotations) if isinstance(annotations, dict) else {}
    shown = title if isinstance(title, str) else hints.get("title")
    return Definition(
        name,
        description or "",
        cast("Json", takes),
        cast("Json | None", gives),
        native,
        hints,
        shown if isinstance(shown, str) else None,
    )


async def _rounds(ask: Callable[[Json], Awaitable[Json]], params: Json, interaction: Interaction) -> Json:
    """Ask a server, and again with the client's answers for as long as it wants to know more that can be had now."""
    answer = await ask({**params, **interaction.answers})
    for _ in range(MAX_ROUNDS):
        answers = await _answers(answer, interaction)
        if answers is None:
            break
        answer = await ask({**params, **answers})
    return answer


async def _answers(answer: Json, interaction: Interaction) -> Json | None:
    """What to send back to a server that wants to be told more, when the client can be asked all of it right away."""
    if answer.get("resultType") != INPUT_REQUIRED or interaction.ask is None:
        return None
    wanted = answer.get("inputRequests")
    responses: Json = {}
    for name, question in (cast("Json", wanted) if isinstance(wanted, dict) else {}).items():
        told = cast("Json", question) if isinstance(question, dict) else {}
        method, params = told.get("method"), told.get("params", {})
        if QUESTIONS.get(str(method)) not in interaction.capabilities or not isinstance(params, dict):
            return None
        responses[name] = await put(interaction.ask, str(method), cast("Json", params))
    if not responses:
        return None
    state = {"requestState": answer["requestState"]} if "requestState" in answer else {}
    return {"inputResponses": responses, **state}


def _value(answer: Json, call: RemoteCall) -> Json:
    """What a call gave; E3401 when the tool itself says that it failed, E3411 when it wants to be told more."""
    if answer.get("resultType") == INPUT_REQUIRED:
        raise _wants_more(answer)
    content = answer.get("content", [])
    if not isinstance(content, list):
        raise Failure("E3502", "the upstream's answer is not the result of a tool", details={"sent": True})
    value: Json = {"content": content}
    if "structuredContent" in answer:
        value["structuredContent"] = answer["structuredContent"]
    if answer.get("isError") is True:
        words = " ".join(_texts(cast("list[Any]", content)))
        raise Failure("E3401", wire.excerpt(words, call) or "the tool says that it failed", details=value)
    if isinstance(answer.get("_meta"), dict):
        value["_meta"] = answer["_meta"]
    return value


def _tell(listens: Listening, said: Json, call: RemoteCall) -> None:
    """Pass on what a server logs, if it is worth as much as the client said, as anybody may read it."""
    level, logger, data = said.get("level"), said.get("logger"), said.get("data")
    if level not in LOG_LEVELS or LOG_LEVELS.index(level) < LOG_LEVELS.index(listens.level):
        return
    words = data if isinstance(data, str) else json.dumps(data)  # which takes numbers of any length
    named = {"logger": wire.excerpt(logger, call)} if isinstance(logger, str) else {}
    listens.tell({"level": level, "data": wire.excerpt(words, call), **named})


def _texts(content: list[Any]) -> Iterator[str]:
    for block in content:
        text = cast("Json", block).get("text") if isinstance(block, dict) else None
        if isinstance(text, str):
            yield text


def _wants_more(answer: Json) -> Failure:
    wanted = {name: answer[name] for name in ("inputRequests", "requestState") if name in answer}
    return Failure("E3411", "the server asks for more before it goes on", details={"inputRequired": wanted})


def _plain(answer: Json) -> Json:
    """An answer without what only concerns the conversation."""
    if answer.get("resultType") == INPUT_REQUIRED:
        raise _wants_more(answer)
    return {name: value for name, value in answer.items() if name not in ("resultType", "ttlMs", "cacheScope")}


def _refusal(error: RpcError, call: RemoteCall | None) -> Failure:
    """The server's own no. What it calls a mistake in the question is the tool's answer; the rest is the upstream's."""
    message = wire.excerpt(error.message, call) or "no reason given"
    if error.code == INVALID_PARAMS:
        return Failure("E3401", f"the upstream refused the arguments: {message}", details=_told(error))
    return Failure("E3502", f"the upstream answered with an error: {message}", details={**_told(error), "sent": True})


def _told(error: RpcError) -> Json:
    """What a server says of its own error, if it is brief."""
    brief = error.data is not None and len(orjson.dumps(error.data)) <= _LONGEST_DATA
    return {"code": error.code, **({"data": error.data} if brief else {})}

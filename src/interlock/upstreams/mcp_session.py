"""One conversation with an MCP server: requests out and answers in, matched by id, in either era of the protocol.

The session does not know how messages travel; a `Wire` does (pipes of a child here, HTTP next door). It negotiates the
version first. In the modern era every request says who asks and which version it speaks, and changes are heard through
a subscription; before it, a handshake said so once and the server just speaks up.

Everything that arrives is somebody else's: an answer nobody waits for, a line that is not a message or a question that
cannot be attributed to exactly one call changes nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import orjson

from interlock._version import __version__
from interlock.core.connector import Interaction
from interlock.core.errors import Failure
from interlock.core.schema import Json
from interlock.upstreams.children import Child, Crashed, Program

_log = logging.getLogger("interlock.upstreams.mcp")

MODERN = ("2026-07-28",)
HANDSHAKE = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
ABOUT_US: Json = {"name": "interlock", "version": __version__}
START_S = 30.0
# A server that says nothing for so long is greeted in the way of the handshake's era as well.
DISCOVER_S = 5.0
MAX_PAGES = 1000
MAX_LISTED = 10_000
LISTEN_PAUSE_S = (1.0, 60.0)

INVALID_PARAMS = -32602
METHOD_NOT_FOUND = -32601
UNSUPPORTED_VERSION = -32022
_META = "io.modelcontextprotocol/"
LOG_LEVEL = f"{_META}logLevel"
_NEGOTIATION = frozenset({"initialize", "server/discover"})
_CHANGES = {f"notifications/{kind}/list_changed": kind for kind in ("tools", "resources", "prompts")}
# Where the protocol wants the name of what is asked for repeated in a header.
_NAMED = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}

# What a server may ask a client in the middle of a call, and the ability a client declares for it.
QUESTIONS = {"elicitation/create": "elicitation", "sampling/createMessage": "sampling"}

Era = Literal["auto", "modern", "handshake"]
# Answers a question that a server puts to the client in the middle of a call: its method and parameters. A Failure
# declines.
Ask = Callable[[str, Json], Awaitable[Json]]
Progress = Callable[[Json], None]
# Is told what a server logs in the middle of a call: level, data and, where there is one, logger.
Tell = Callable[[Json], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening(Interaction):
    """A client that also wants to hear what a server logs during its call, from this level on."""

    level: str
    tell: Tell


class RpcError(Exception):
    """The server's own error answer."""

    def __init__(self, code: int, message: str, data: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class Wire(Protocol):
    """How messages travel. `ended` tells why no more will come."""

    @property
    def ended(self) -> asyncio.Future[str]: ...

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        """Hand a message over; raises Failure with details {"sent": False} when it certainly went nowhere."""
        ...

    def abort(self) -> None:
        """End now, without manners."""
        ...

    async def close(self) -> None: ...


Connect = Callable[["Session"], Awaitable[Wire]]


class Pipes:
    """The pipes of a child: a message is a line."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.pid = child.pid

    @classmethod
    async def open(cls, program: Program, session: Session) -> Pipes:
        def hear(line: bytes) -> None:
            try:
                message = orjson.loads(line)
            except orjson.JSONDecodeError:
                _log.debug("an upstream wrote a line to its output that is not a message")
            else:
                session.hear(message)

        return cls(await Child.start(program, hear))

    @property
    def ended(self) -> asyncio.Future[str]:
        return self._child.ended

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        self._child.send(orjson.dumps(message))

    def abort(self) -> None:
        self._child.kill()

    async def close(self) -> None:
        await self._child.stop()


@dataclass(slots=True)
class _Pending:
    """A request under way."""

    answer: asyncio.Future[Json]
    method: str
    progress: Progress | None = None
    ask: Ask | None = None
    tell: Tell | None = None


@dataclass(slots=True)
class Server:
    """What a server said of itself when the version was agreed on."""

    protocol: str
    name: str = ""
    version: str = ""
    capabilities: Json = field(default_factory=dict[str, Any])
    instructions: str | None = None

    @property
    def modern(self) -> bool:
        return self.protocol in MODERN

    def offers(self, what: str) -> bool:
        return isinstance(self.capabilities.get(what), dict)

    def announces(self, what: str) -> bool:
        return self.offers(what) and self.capabilities[what].get("listChanged") is True


class Session:
    """One conversation. Its methods may be called concurrently."""

    def __init__(
        self,
        *,
        capabilities: Mapping[str, Any],
        on_change: Callable[[], None],
        on_list: Callable[[str], None] | None = None,
    ) -> None:
        self.server = Server("")
        self._capabilities = dict(capabilities)
        self._on_change = on_change
        self._on_list = on_list
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._watched: dict[str, Callable[[], None]] = {}
        self._subscribing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._wire: Wire | None = None

    @classmethod
    async def open(
        cls,
        connect: Connect,
        *,
        era: Era = "auto",
        capabilities: Mapping[str, Any],
        on_change: Callable[[], None],
        on_list: Callable[[str], None] | None = None,
    ) -> Session:
        """Connect and agree on a version. `on_list` is told which list changed: tools, resources or prompts.

        Raises E3502 when there is none; Crashed when the server ended meanwhile."""
        session = cls(capabilities=capabilities, on_change=on_change, on_list=on_list)
        wire = session._wire = await connect(session)
        wire.ended.add_done_callback(session._break_off)
        try:
            async with asyncio.timeout(START_S):
                await session._negotiate(era)
        except BaseException as error:
            ended = wire.ended.result() if wire.ended.done() else None
            wire.abort()
            await session.close()
            if ended is not None and isinstance(error, Failure):
                raise Crashed("E3502", ended, details=_UNSENT) from None
            if isinstance(error, TimeoutError):
                raise Failure("E3502", "the upstream did not agree on a version in time", details=_UNSENT) from None
            raise
        if session.server.modern:
            session._spawn(session._listen())
        return session

    @property
    def wire(self) -> Wire:
        assert self._wire is not None
        return self._wire

    @property
    def ended(self) -> asyncio.Future[str]:
        return self.wire.ended

    @property
    def busy(self) -> int:
        return sum(one.method != "subscriptions/listen" for one in self._pending.values())

    async def close(self, drain_s: float = 0.0) -> None:
        """End the conversation; calls in flight may finish first, for so long."""
        if drain_s > 0 and self.busy:
            self._idle.clear()
            try:
                async with asyncio.timeout(drain_s):
                    await self._idle.wait()
            except TimeoutError:
                pass  # they were given their time
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self.wire.close()

    # Asking

    async def request(
        self,
        method: str,
        params: Json | None = None,
        *,
        within_s: float | None,
        meta: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        progress: Progress | None = None,
        ask: Ask | None = None,
        tell: Tell | None = None,
        capabilities: Json | None = None,
    ) -> Json:
        """Ask, and wait for the answer to this very question.

        Raises RpcError for the server's own no, E3502 when the conversation breaks off, E3503 when time is up, in which
        case the server is told that nobody waits any more.
        """
        if self.ended.done():
            raise Failure("E3502", self.ended.result(), details=_UNSENT)
        number = next(self._numbers)
        said = {**(meta or {}), **({"progressToken": number} if progress is not None else {})}
        message, stamped = self._stamp(number, method, params, said, capabilities or self._capabilities)
        waiting = _Pending(asyncio.get_running_loop().create_future(), method, progress, ask, tell)
        self._pending[number] = waiting
        sent = False
        try:
            async with asyncio.timeout(within_s):
                await self.wire.send(message, {**stamped, **(headers or {})})
                sent = True
                return await waiting.answer
        except TimeoutError:
            self._withdraw(number, method, "no answer in time")
            raise Failure("E3503", "the upstream did not answer in time", details={"sent": sent}) from None
        except asyncio.CancelledError:
            self._withdraw(number, method, "cancelled")
            raise
        finally:
            waiting.answer.cancel()
            del self._pending[number]
            if not self.busy:
                self._idle.set()

    async def pages(self, method: str, key: str, *, within_s: float) -> list[Any]:
        """Everything a list has, page after page to the end. Raises E3502 for a list that has none."""
        found: list[Any] = []
        cursor: str | None = None
        seen: set[str] = set()
        for _ in range(MAX_PAGES):
            page = await self.request(method, {} if cursor is None else {"cursor": cursor}, within_s=within_s)
            part = page.get(key)
            if not isinstance(part, list):
                raise Failure("E3502", f"the upstream's answer to {method} has no list of {key}")
            found += cast("list[Any]", part)
            if len(found) > MAX_LISTED:
                raise Failure("E3502", f"the upstream's list of {key} has more than {MAX_LISTED} entries")
            following = page.get("nextCursor")
            if not isinstance(following, str) or not following:
                return found
            if following in seen:
                break
            seen.add(following)
            cursor = following
        raise Failure("E3502", f"the upstream's answers to {method} have no end")

    async def ping(self, within_s: float) -> None:
        """Whether it answers."""
        await self.request("server/discover" if self.server.modern else "ping", within_s=within_s)

    async def log_from(self, level: str, within_s: float) -> None:
        """Ask a server of the handshake's era to log from this level on. One that will not logs what it likes."""
        if not self.server.modern:
            try:
                await self.request("logging/setLevel", {"level": level}, within_s=within_s)
            except RpcError:
                _log.debug("an upstream does not take a level for its log")

    async def watch(self, uri: str, heard: Callable[[], None], within_s: float) -> None:
        """Call `heard` once the server agreed to tell of changes of a resource, and then at every change.

        Goes on until it is cancelled or the server tells no more. Raises what `request` does.
        """
        self._watched[uri] = heard
        try:
            if self.server.modern:
                wanted = {"notifications": {"resourceSubscriptions": [uri]}}
                await self.request("subscriptions/listen", wanted, within_s=None)
                return
            async with self._subscribing:
                await self.request("resources/subscribe", {"uri": uri}, within_s=within_s)
            heard()
            await asyncio.wait((self.ended,))
        finally:
            if self._watched.get(uri) is heard:  # and nobody began to watch it anew
                del self._watched[uri]
                if not self.server.modern and not self.ended.done():
                    self._spawn(self._unsubscribe(uri, within_s))

    async def _unsubscribe(self, uri: str, within_s: float) -> None:
        async with self._subscribing:
            if uri in self._watched:
                return
            try:
                await self.request("resources/unsubscribe", {"uri": uri}, within_s=within_s)
            except (RpcError, Failure):
                pass  # what it says from now on is not heard

    def _stamp(
        self, number: int, method: str, params: Json | None, meta: Json, capabilities: Json
    ) -> tuple[Json, dict[str, str]]:
        """The message, and the headers that go with it where the wire has any."""
        params, headers = dict(params or {}), dict[str, str]()
        protocol = self.server.protocol
        if protocol and method != "initialize":
            headers["mcp-protocol-version"] = protocol
        if self.server.modern:
            meta |= {
                f"{_META}protocolVersion": protocol,
                f"{_META}clientInfo": ABOUT_US,
                f"{_META}clientCapabilities": capabilities,
            }
            headers["mcp-method"] = method
            if method in _NAMED:
                headers["mcp-name"] = str(params[_NAMED[method]])
        if meta:
            params["_meta"] = meta
        message: Json = {"jsonrpc": "2.0", "id": number, "method": method}
        if params:
            message["params"] = params
        return message, headers

    def _withdraw(self, number: int, method: str, reason: str) -> None:
        if method in _NEGOTIATION or self.ended.done():
            return
        self._spawn(self._notify("notifications/cancelled", {"requestId": number, "reason": reason}))

    async def _notify(self, method: str, params: Json | None = None) -> None:
        message: Json = {"jsonrpc": "2.0", "method": method}
        if params is not None:
            message["params"] = params
        protocol = self.server.protocol
        try:
            await self.wire.send(message, {"mcp-protocol-version": protocol} if protocol else {})
        except Failure:
            pass  # who has gone needs no telling

    # Agreeing on a version

    async def _negotiate(self, era: Era) -> None:
        if era == "handshake":
            await self._initialize()
            return
        self.server = Server(MODERN[0])
        asking = asyncio.ensure_future(self.request("server/discover", within_s=None))
        try:
            await asyncio.wait({asking}, timeout=DISCOVER_S if era == "auto" else START_S)
            if not asking.done() and era == "auto" and await self._greeted_before(asking):
                return
            supported = self._modern(asking)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        if supported is None:
            return
        if era == "modern":
            raise _mismatch(supported)
        self.server = Server("")
        await self._initialize()

    async def _greeted_before(self, asking: asyncio.Future[Json]) -> bool:
        """Greet a silent server the old way too, for it may be old, or slow to start: what it answers decides."""
        self.server = Server("")
        greeting = asyncio.ensure_future(self._initialize())
        try:
            await asyncio.wait({asking, greeting}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                self.server = Server(MODERN[0])
                return False
            await greeting
            return True
        finally:
            greeting.cancel()
            await asyncio.gather(greeting, return_exceptions=True)

    def _modern(self, asking: asyncio.Future[Json]) -> list[Any] | None:
        """None if the server speaks the modern era; else what it speaks instead, as far as it says so."""
        if not asking.done():
            return []
        try:
            answer = asking.result()
        except RpcError as error:
            if error.code == UNSUPPORTED_VERSION and not set(_supported(error.data)) & {*HANDSHAKE}:
                raise _mismatch(_supported(error.data)) from None
            return []
        supported = _strings(answer.get("supportedVersions"))
        if MODERN[0] not in supported:
            return supported
        self._adopt(MODERN[0], answer, _dict(answer.get("_meta")).get(f"{_META}serverInfo"))
        return None

    async def _initialize(self) -> None:
        offer: Json = {"protocolVersion": HANDSHAKE[0], "capabilities": self._capabilities, "clientInfo": ABOUT_US}
        try:
            answer = await self.request("initialize", offer, within_s=None)
        except RpcError as error:
            if error.code == UNSUPPORTED_VERSION or _supported(error.data):
                raise _mismatch(_supported(error.data)) from None
            raise Failure(
                "E3502", f"the upstream refused the handshake: {error.message[:200]}", details=_UNSENT
            ) from None
        chosen = answer.get("protocolVersion")
        if chosen not in HANDSHAKE:
            raise _mismatch([str(chosen)])
        self._adopt(chosen, answer, answer.get("serverInfo"))
        await self._notify("notifications/initialized")

    def _adopt(self, protocol: str, answer: Json, info: Any) -> None:
        instructions = answer.get("instructions")
        self.server = Server(
            protocol,
            str(_dict(info).get("name") or ""),
            str(_dict(info).get("version") or ""),
            _dict(answer.get("capabilities")),
            instructions if isinstance(instructions, str) else None,
        )

    async def _listen(self) -> None:
        """Hear of changes in the modern era: one request that is answered when it is over, and then made again."""
        wanted = {
            f"{kind}ListChanged": True for kind in ("tools", "resources", "prompts") if self.server.announces(kind)
        }
        pause, longest = LISTEN_PAUSE_S
        while wanted:
            try:
                await self.request("subscriptions/listen", {"notifications": wanted}, within_s=None)
            except RpcError as error:
                if error.code in (METHOD_NOT_FOUND, INVALID_PARAMS):
                    return  # it announces what it does not offer
            except Failure:
                return  # the conversation is over
            await asyncio.sleep(pause)
            pause = min(longest, pause * 2)
            self._on_change()  # what changed meanwhile was not heard

    # Hearing

    def hear(self, message: Any) -> None:
        """Take what arrived: an answer, a notification, a question, or several."""
        if isinstance(message, list):
            for one in cast("list[Any]", message):
                self.hear(one)
        elif not isinstance(message, dict):
            _log.debug("an upstream sent something that is not a message")
        else:
            self._take(cast("Json", message))

    def fail(self, number: int, failure: Failure) -> None:
        """Take the news that a request met trouble on its way."""
        waiting = self._pending.get(number)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_exception(failure)

    def _take(self, message: Json) -> None:
        method, number = message.get("method"), message.get("id")
        if isinstance(method, str):
            if number is None:
                self._notified(method, _dict(message.get("params")))
            else:
                self._spawn(self._answer(number, method, _dict(message.get("params"))))
            return
        # INVARIANT: an answer reaches the request that has its id, or nobody.
        waiting = self._pending.get(number) if type(number) is int else None
        if waiting is None or waiting.answer.done():
            return
        error, result = message.get("error"), message.get("result")
        if isinstance(error, dict):
            told = cast("Json", error)
            code = told.get("code")
            waiting.answer.set_exception(
                RpcError(code if isinstance(code, int) else 0, str(told.get("message") or ""), told.get("data"))
            )
        elif isinstance(result, dict):
            waiting.answer.set_result(cast("Json", result))
        else:
            waiting.answer.set_exception(
                Failure("E3502", "the upstream's answer is neither a result nor an error", details={"sent": True})
            )

    def _notified(self, method: str, params: Json) -> None:
        if method in _CHANGES:
            self._on_change()
            if self._on_list is not None:
                self._on_list(_CHANGES[method])
        elif method == "notifications/progress":
            token = params.get("progressToken")
            waiting = self._pending.get(token) if type(token) is int else None
            if waiting is not None and waiting.progress is not None:
                waiting.progress({"message": str(params.get("message") or ""), "percent": _percent(params)})
        elif method == "notifications/message":
            # INVARIANT: a conversation that anybody listens to is one caller's alone. Of that caller's calls, the one
            # that a message belongs to is not said either, so it is passed on only where there can be no doubt.
            calls = [one.tell for one in self._pending.values() if one.method == "tools/call"]
            if len(calls) == 1 and calls[0] is not None:
                calls[0](params)
        elif method == "notifications/resources/updated":
            self._changed(params.get("uri"))
        elif method == "notifications/subscriptions/acknowledged":
            for uri in _strings(_dict(params.get("notifications")).get("resourceSubscriptions")):
                self._changed(uri)

    def _changed(self, uri: Any) -> None:
        heard = self._watched.get(uri) if isinstance(uri, str) else None
        if heard is not None:
            heard()

    async def _answer(self, number: Any, method: str, params: Json) -> None:
        answer: Json = {"jsonrpc": "2.0", "id": number}
        try:
            answer["result"] = await self._reply(method, params)
        except RpcError as error:
            answer["error"] = {"code": error.code, "message": error.message}
        try:
            await self.wire.send(answer, {"mcp-protocol-version": self.server.protocol})
        except Failure:
            pass  # the one who asked has gone

    async def _reply(self, method: str, params: Json) -> Json:
        if method == "ping":
            return {}
        if method not in QUESTIONS:
            raise RpcError(METHOD_NOT_FOUND, "this client does not offer that", None)
        # INVARIANT: a question reaches the caller whose call raised it, if its client declared that it can be asked so,
        # or nobody. The wire does not say which call it belongs to, so it is put only where there can be no doubt.
        asked = [one.ask for one in self._pending.values() if one.method == "tools/call"]
        clear = len(asked) == 1 and QUESTIONS[method] in self._capabilities
        return await put(asked[0] if clear else None, method, params)

    def _break_off(self, ended: asyncio.Future[str]) -> None:
        for waiting in self._pending.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(Failure("E3502", ended.result(), details={"sent": True}))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def put(ask: Ask | None, method: str, params: Json) -> Json:
    """The answer to a question, which is a refusal where nobody can be asked or the one who is says no."""
    if ask is not None:
        try:
            return await ask(method, params)
        except Failure:
            pass  # declined
    if method == "elicitation/create":
        return {"action": "decline"}
    raise RpcError(-1, "declined", None)


_UNSENT: Json = {"sent": False}


def _mismatch(offered: list[str]) -> Failure:
    theirs = ", ".join(offered[:10])[:200] or "nothing it would name"
    return Failure(
        "E3502",
        f"no protocol version in common: the upstream speaks {theirs}; this program {', '.join((*MODERN, *HANDSHAKE))}",
        details={"sent": False, "reason": "protocol_version_mismatch"},
    )


def _supported(data: Any) -> list[str]:
    return _strings(_dict(data).get("supported"))


def _strings(value: Any) -> list[str]:
    return [one for one in cast("list[Any]", value) if isinstance(one, str)] if isinstance(value, list) else []


def _dict(value: Any) -> Json:
    return cast("Json", value) if isinstance(value, dict) else {}


def _percent(params: Json) -> float | None:
    done, total = params.get("progress"), params.get("total")
    if not isinstance(done, int | float) or not isinstance(total, int | float) or total <= 0:
        return None
    return min(100.0, max(0.0, 100.0 * done / total))

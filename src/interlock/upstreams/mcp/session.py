"""One conversation with an MCP server: requests and answers, matched by id, in either era of the protocol.

The session does not know how messages travel; a `Wire` does (`pipes`, `http`). It first negotiates a version, see
`negotiation`. In the modern era every request identifies the client and its version, and changes come through a
subscription; before it, a handshake did so once and the server sends changes unasked.

Nothing that arrives is trusted: an answer without a request or a line that is not a message changes nothing. A question
belongs to the request on whose stream it came. One that came outside of these streams, or on a wire without streams,
belongs to one of those under way; if they may have several clients, nobody is asked, see `questions`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, cast

from interlock.call.mcp import INVALID_PARAMS, META, METHOD_NOT_FOUND, MODERN, QUESTIONS, OnLog
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.core.supervise import start_in
from interlock.data.schema import Json
from interlock.data.untrusted import members, strings, text_in
from interlock.upstreams.children import Crashed
from interlock.upstreams.mcp.negotiation import agree
from interlock.upstreams.mcp.protocol import ABOUT_US, LIST_S, UNSENT, Era, Progress, RpcError, ServerInfo, Wire
from interlock.upstreams.mcp.questions import Questions, put_for_one_of, unclear
from interlock.upstreams.response_limits import addressee

_log = logging.getLogger("interlock.upstreams.mcp")

MAX_PAGES = 1000
MAX_LISTED = 10_000
MAX_QUESTIONS = 1000
WITHDRAW_S = 2.0
LISTEN_PAUSE_S = (1.0, 60.0)
_NEGOTIATION = frozenset({"initialize", "server/discover"})
_CHANGES = {f"notifications/{kind}/list_changed": kind for kind in ("tools", "resources", "prompts")}
# Requests during which a server may ask or log something, and their names.
_INTERACTIVE = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
# Requests whose name, URI or task the protocol wants repeated in a header.
_NAMED = {**_INTERACTIVE, "tasks/get": "taskId", "tasks/update": "taskId", "tasks/cancel": "taskId"}

_PROTOCOL_VERSION, _CLIENT_INFO = f"{META}protocolVersion", f"{META}clientInfo"
_CLIENT_CAPABILITIES = f"{META}clientCapabilities"

Connect = Callable[["Session"], Awaitable[Wire]]


@dataclass(slots=True)
class _Pending:
    """A request under way."""

    answer: asyncio.Future[Json]
    method: str
    progress: Progress | None = None
    questions: Questions | None = None
    on_log: OnLog | None = None


# many methods: one conversation: one method per message of the protocol, over the same fields
class Session:
    """One conversation. Its methods may be called concurrently."""

    def __init__(
        self,
        *,
        capabilities: Mapping[str, Any],
        extensions: Json | None = None,
        on_change: Callable[[], None],
        on_list: Callable[[str], None] | None = None,
        on_doubt: Callable[[], None] | None = None,
        mixed: bool = False,
    ) -> None:
        self.server = ServerInfo("")
        self.capabilities = dict(capabilities)
        self._extensions = extensions
        self._on_change = on_change
        self._on_list = on_list
        self._on_doubt = on_doubt
        self._mixed = mixed
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._watched: dict[str, Callable[[], None]] = {}
        # Digests of the definitions that were checked, of those it listed last.
        self.seen: dict[str, str] = {}
        self._listing: asyncio.Task[list[Any]] | None = None
        self._subscribing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._withdrawals: set[asyncio.Task[Any]] = set()
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
        extensions: Json | None = None,
        on_change: Callable[[], None],
        on_list: Callable[[str], None] | None = None,
        on_doubt: Callable[[], None] | None = None,
        mixed: bool = False,
    ) -> Session:
        """Connect and negotiate a version. `extensions` are declared whatever a request needs. `on_list` is called with
        the list that changed: tools, resources or prompts; `on_doubt` when a question could belong to several clients.
        `mixed`: whether the calls in it may have several clients that can be asked.

        Raises E3502 if there is no common version; Crashed if the server ended meanwhile.
        """
        session = cls(
            capabilities=capabilities,
            extensions=extensions,
            on_change=on_change,
            on_list=on_list,
            on_doubt=on_doubt,
            mixed=mixed,
        )
        wire = session._wire = await connect(session)
        wire.ended.add_done_callback(session._break_off)
        try:
            await agree(session, era)
        except BaseException as error:
            ended = wire.ended.result() if wire.ended.done() else None
            wire.abort()
            await session.close()
            if ended is not None and isinstance(error, Failure):
                raise Crashed("E3502", ended, details=UNSENT) from None
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
        """End the conversation; calls in flight may finish first, for this long."""
        if drain_s > 0 and self.busy:
            self._idle.clear()
            try:
                async with asyncio.timeout(drain_s):
                    await self._idle.wait()
            except TimeoutError:
                pass  # they were given their time
        if self._withdrawals and not self.ended.done():
            # A server that is not told goes on with calls that nobody waits for.
            await asyncio.wait(self._withdrawals, timeout=WITHDRAW_S)
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self.wire.close()

    # Requests

    async def request(
        self,
        method: str,
        params: Json | None = None,
        *,
        within_s: float | None,
        meta: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        progress: Progress | None = None,
        questions: Questions | None = None,
        on_log: OnLog | None = None,
        capabilities: Json | None = None,
        noted: Json | None = None,
    ) -> Json:
        """Send a request and wait for its answer; `noted` receives the ids of the request.

        Raises RpcError for the server's own error, E3502 if the conversation breaks off, E3503 if time is up, in which
        case the server is told that the request is cancelled.
        """
        wire = self.wire
        if wire.ended.done():
            raise Failure("E3502", wire.ended.result(), details=UNSENT)
        number = next(self._numbers)
        if noted is not None:
            noted["jsonrpc_request_id"], noted["mcp_protocol_version"] = number, self.server.protocol
        own = dict(meta) if meta else {}
        if progress is not None:
            own["progressToken"] = number
        message, stamped = self._stamp(number, method, params, own, capabilities or self.capabilities)
        if headers:
            stamped.update(headers)
        loop = asyncio.get_running_loop()
        waiting = _Pending(loop.create_future(), method, progress, questions, on_log)
        self._pending[number] = waiting
        until = None if within_s is None else loop.time() + within_s
        timer: asyncio.TimerHandle | None = None
        sent = False
        try:
            sending = wire.send(message, stamped)
            if sending is not None:
                async with asyncio.timeout_at(until):
                    await sending
            sent = True
            # No `asyncio.timeout` here: nothing but the answer is awaited, and a timer costs a fifth of it.
            if until is not None:
                timer = loop.call_at(until, _expire, waiting.answer)
            return await waiting.answer
        except TimeoutError:
            self._withdraw(number, method, "no answer in time")
            raise Failure("E3503", "the upstream did not answer in time", details={"sent": sent}) from None
        except asyncio.CancelledError:
            self._withdraw(number, method, "cancelled")
            raise
        finally:
            if timer is not None:
                timer.cancel()
            waiting.answer.cancel()
            del self._pending[number]
            if not self._idle.is_set() and not self.busy:
                self._idle.set()

    async def pages(self, method: str, key: str, *, within_s: float) -> list[Any]:
        """Read a whole list, page after page. Raises E3502 if the answer has none."""
        entries: list[Any] = []
        cursor: str | None = None
        seen: set[str] = set()
        for _ in range(MAX_PAGES):
            page = await self.request(method, {} if cursor is None else {"cursor": cursor}, within_s=within_s)
            part = page.get(key)
            if not isinstance(part, list):
                raise Failure("E3502", f"the upstream's answer to {method} has no list of {key}")
            entries += cast("list[Any]", part)
            if len(entries) > MAX_LISTED:
                raise Failure("E3502", f"the upstream's list of {key} has more than {MAX_LISTED} entries")
            following = page.get("nextCursor")
            if not isinstance(following, str) or not following:
                return entries
            if following in seen:
                break
            seen.add(following)
            cursor = following
        raise Failure("E3502", f"the upstream's answers to {method} have no end")

    async def tools(self, within_s: float, *, anew: bool = False) -> list[Any]:
        """List its tools; concurrent callers share one request, which is repeated after an announced change."""
        if not self.server.offers("tools"):
            return []
        listing = self._listing
        if anew or listing is None or (listing.done() and (listing.cancelled() or listing.exception() is not None)):
            self._forget()
            listing = self._listing = asyncio.create_task(self.pages("tools/list", "tools", within_s=LIST_S))
            self._tasks.add(listing)
            listing.add_done_callback(self._listed)
        await asyncio.wait((listing,), timeout=within_s)
        if not listing.done():
            raise Failure("E3503", "the upstream did not say in time what it offers", details=UNSENT)
        if listing.cancelled():
            raise Failure("E3502", "the conversation was closed", details=UNSENT)
        return listing.result()

    @property
    def listed(self) -> list[Any] | None:
        """The last list of its tools, if no change was announced since."""
        listing = self._listing
        known = listing is not None and listing.done() and not listing.cancelled() and listing.exception() is None
        return listing.result() if listing is not None and known else None

    def _forget(self) -> None:
        self._listing, self.seen = None, {}

    def _listed(self, listing: asyncio.Task[list[Any]]) -> None:
        self._tasks.discard(listing)
        if not listing.cancelled():
            listing.exception()  # retrieved, because no waiter may be left

    async def ping(self, within_s: float) -> None:
        """Check whether it answers."""
        await self.request("server/discover" if self.server.modern else "ping", within_s=within_s)

    async def log_from(self, level: str, within_s: float) -> None:
        """Ask a server of the handshake era to log from this level on. A server that refuses logs what it likes."""
        if not self.server.modern:
            try:
                await self.request("logging/setLevel", {"level": level}, within_s=within_s)
            except RpcError:
                _log.debug("an upstream does not take a level for its log")

    def cancel_task(self, name: str, capabilities: Json) -> None:
        """Tell the server that nobody waits for a task any more. It may go on with it."""

        async def tell() -> None:
            try:
                await self.request("tasks/cancel", {"taskId": name}, within_s=LIST_S, capabilities=capabilities)
            except (RpcError, Failure):
                _log.debug("an upstream could not be told that a task is cancelled")

        if not self.ended.done():
            self._spawn(tell())

    async def watch(self, uri: str, on_change: Callable[[], None], within_s: float) -> None:
        """Call `on_change` once the server agreed to report changes of a resource, and then at every change.

        Continues until it is cancelled or the server stops reporting. Raises what `request` does.
        """
        self._watched[uri] = on_change
        try:
            if self.server.modern:
                wanted = {"notifications": {"resourceSubscriptions": [uri]}}
                await self.request("subscriptions/listen", wanted, within_s=None)
                return
            async with self._subscribing:
                await self.request("resources/subscribe", {"uri": uri}, within_s=within_s)
            on_change()
            await asyncio.wait((self.ended,))
        finally:
            if self._watched.get(uri) is on_change:  # and nobody began to watch it again
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
                pass  # later messages are ignored

    def declared(self, capabilities: Json) -> Json:
        """Return the client capabilities to send: those given, with the extensions of this conversation."""
        if self._extensions is None:
            return capabilities
        return {**capabilities, "extensions": {**self._extensions, **members(capabilities.get("extensions"))}}

    def _stamp(
        self, number: int, method: str, params: Json | None, meta: Json, capabilities: Json
    ) -> tuple[Json, dict[str, str]]:
        """Make the message, and the headers that go with it if the wire has any. Adds to `meta`."""
        headers: dict[str, str] = {}
        protocol = self.server.protocol
        if protocol and method != "initialize":
            headers["mcp-protocol-version"] = protocol
        if protocol in MODERN:
            meta[_PROTOCOL_VERSION] = protocol
            meta[_CLIENT_INFO] = ABOUT_US
            meta[_CLIENT_CAPABILITIES] = self.declared(capabilities)
            headers["mcp-method"] = method
            if params is not None and method in _NAMED:
                headers["mcp-name"] = str(params[_NAMED[method]])
        message: Json = {"jsonrpc": "2.0", "id": number, "method": method}
        if meta:
            message["params"] = {**params, "_meta": meta} if params else {"_meta": meta}
        elif params:
            message["params"] = params
        return message, headers

    def _withdraw(self, number: int, method: str, reason: str) -> None:
        if method in _NEGOTIATION or self.ended.done():
            return
        telling = self._spawn(self.notify("notifications/cancelled", {"requestId": number, "reason": reason}))
        self._withdrawals.add(telling)
        telling.add_done_callback(self._withdrawals.discard)

    async def _send(self, message: Json, headers: dict[str, str]) -> None:
        sending = self.wire.send(message, headers)
        if sending is not None:
            await sending

    async def notify(self, method: str, params: Json | None = None) -> None:
        """Send a notification; a server that has gone is ignored."""
        message: Json = {"jsonrpc": "2.0", "method": method}
        if params is not None:
            message["params"] = params
        protocol = self.server.protocol
        try:
            await self._send(message, {"mcp-protocol-version": protocol} if protocol else {})
        except Failure:
            pass

    async def _listen(self) -> None:
        """Subscribe to changes in the modern era: one request that is answered when it ends, and is then repeated."""
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
            self._forget()
            self._on_change()  # changes in between were missed

    # Receiving

    def hear(self, message: Any, status: int = 0, *, of: int | None = None) -> bool:
        """Process a message: an answer, a notification, a question, or several. Returns whether something waited for
        it. `status` is the HTTP status with which it came, if any; `of` the request on whose stream it came.
        """
        if isinstance(message, list):
            parts = [cast("Json", one) for one in cast("list[Any]", message) if isinstance(one, dict)]
            taken = [self._take(one, 0, of) for one in parts]
            return any(taken)
        if isinstance(message, dict):
            return self._take(cast("Json", message), status, of)
        _log.debug("an upstream sent something that is not a message")
        return False

    def fail(self, number: int, failure: Failure) -> None:
        """Fail a request that could not be sent."""
        waiting = self._pending.get(number)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_exception(failure)

    def refuse(self, message: bytes, failure: Failure) -> None:
        """Process the beginning and end of a message over the limits: the request that it answers fails.

        If that cannot be determined, every request under way fails.
        """
        waiting = {str(number): number for number, one in self._pending.items() if one.method != "subscriptions/listen"}
        owner = addressee(message, "id", waiting)
        if owner is not None:
            self.fail(waiting[owner], failure)
            return
        for number in waiting.values():
            words = f"the upstream sent a message over the limits: {failure.message}"
            self.fail(number, Failure("E3502", words, details={"sent": True}))

    def _take(self, message: Json, status: int, of: int | None) -> bool:
        method, number = message.get("method"), message.get("id")
        if isinstance(method, str):
            if number is None:
                self._notified(method, members(message.get("params")), of)
            elif type(number) in (int, str) and len(self._tasks) < MAX_QUESTIONS:
                self._spawn(self._answer(number, method, members(message.get("params")), of))
            return False
        # INVARIANT: an answer reaches the request that has its id, or none.
        waiting = self._pending.get(number) if type(number) is int else None
        if waiting is None or waiting.answer.done():
            return False
        error, result = message.get("error"), message.get("result")
        if isinstance(error, dict):
            fields = cast("Json", error)
            code = fields.get("code")
            known, words = code if isinstance(code, int) else 0, text_in(fields.get("message"))
            waiting.answer.set_exception(RpcError(known, words, fields.get("data"), status))
        elif isinstance(result, dict):
            waiting.answer.set_result(cast("Json", result))
        else:
            waiting.answer.set_exception(
                Failure("E3502", "the upstream's answer is neither a result nor an error", details={"sent": True})
            )
        return True

    def _notified(self, method: str, params: Json, of: int | None) -> None:
        if method in _CHANGES:
            if _CHANGES[method] == "tools":
                self._forget()
            self._on_change()
            if self._on_list is not None:
                self._on_list(_CHANGES[method])
        elif method == "notifications/progress":
            token = params.get("progressToken")
            waiting = self._pending.get(token) if type(token) is int else None
            if waiting is not None and waiting.progress is not None:
                waiting.progress({"message": text_in(params.get("message")), "percent": _percent(params)})
        elif method == "notifications/message":
            # INVARIANT: a conversation with a listener belongs to one caller, and a message of the log is passed on if
            # there is no doubt to which of that caller's calls it belongs.
            owners = self._owners(of)
            if len(owners) == 1 and owners[0].on_log is not None:
                owners[0].on_log(params)
        elif method == "notifications/resources/updated":
            self._changed(params.get("uri"))
        elif method == "notifications/subscriptions/acknowledged":
            for uri in strings(members(params.get("notifications")).get("resourceSubscriptions")):
                self._changed(uri)

    def _changed(self, uri: Any) -> None:
        on_change = self._watched.get(uri) if isinstance(uri, str) else None
        if on_change is not None:
            on_change()

    def _owners(self, of: int | None) -> list[_Pending]:
        """Return the requests that a question or a message of the log may belong to: the one on whose stream it came
        (none if that is over), or every one under way.
        """
        if of is not None:
            owner = self._pending.get(of)
            return [] if owner is None or owner.method not in _INTERACTIVE else [owner]
        return [one for one in self._pending.values() if one.method in _INTERACTIVE]

    async def _answer(self, number: Any, method: str, params: Json, of: int | None) -> None:
        answer: Json = {"jsonrpc": "2.0", "id": number}
        try:
            answer["result"] = await self._reply(method, params, of)
        except RpcError as error:
            answer["error"] = {"code": error.code, "message": error.message}
        try:
            await self._send(answer, {"mcp-protocol-version": self.server.protocol})
        except Failure:
            pass  # the caller has gone

    async def _reply(self, method: str, params: Json, of: int | None) -> Json:
        if method == "ping":
            return {}
        if method not in QUESTIONS:
            raise RpcError(METHOD_NOT_FOUND, "this client does not offer that", None)
        # INVARIANT: a question reaches the client whose call raised it, if that declared that it can be asked, or it
        # fails. It is never answered in the place of a person who was not asked.
        possible = [one.questions for one in self._owners(of) if one.questions is not None]
        if of is None and self._mixed:
            if self._on_doubt is not None:
                self._on_doubt()
            raise unclear(method, possible)
        # All callers share this conversation, and it declared no questions: the call that raised it may have ended.
        if of is None and not self.capabilities and any(one.reaches(method) for one in possible):
            raise unclear(method, possible)
        return await put_for_one_of(possible, method, params)

    def _break_off(self, ended: asyncio.Future[str]) -> None:
        for waiting in self._pending.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(Failure("E3502", ended.result(), details={"sent": True}))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return start_in(self._tasks, work)


def _expire(answer: asyncio.Future[Json]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())


def _percent(params: Json) -> float | None:
    done, total = params.get("progress"), params.get("total")
    if not isinstance(done, int | float) or not isinstance(total, int | float) or total <= 0:
        return None
    return min(100.0, max(0.0, 100.0 * done / total))

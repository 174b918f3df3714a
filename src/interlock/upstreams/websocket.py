"""WebSocket services: many concurrent calls over a few connections, each answer matched to its call by an id.

Theory of operation. A connection is opened with a credential and serves only calls with that credential. A call is one
message out and one message in. The message is JSON-RPC, or a template that the operator wrote; the id in it is ours,
new for every call on a connection, and the answer that carries it in `id_field` belongs to the call. Messages that
answer no waiting call are dropped: events, and late answers.

    no connection, or all have their share of calls    open one, while there may be another
    as many as there may be                            an unused one is closed; else the least busy is shared

A connection that breaks fails every call on it: each may have been carried out. One that cannot be opened is tried
again with growing pauses, whichever call comes; until then calls fail at once with the time to wait. A connection on
which the service floods us is cut (`response_limits`), and the same pauses follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import orjson
import pydantic

from interlock.call.connector import Definition, Discovered, RemoteCall
from interlock.contract.manifest import RetryPolicy
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.net import addresses
from interlock.resilience.retry import delay_s
from interlock.upstreams import wire
from interlock.upstreams.configuration import read_config
from interlock.upstreams.kinds import Site
from interlock.upstreams.response_limits import Allowance, Intake, addressee
from interlock.upstreams.wire import Part, RemoteConfig

if TYPE_CHECKING:
    import ssl

    from interlock.resilience.services import Services
    from interlock.upstreams.frames import MeteredConnection

CLOSE_S = 2.0
# Services split large answers into frames; fragments of this size and more are not charged.
_FRAGMENT = 256
_TOO_BIG = 1009  # the close code of a message that is too large
# The library writes headers, and so credentials, at the debug level.
_log = logging.getLogger("interlock.upstreams.websocket.wire")
_log.setLevel(logging.WARNING)


class WebSocketTool(Part):
    """An operation: a JSON-RPC `method`, or the message to `send` with `{id}` in the place of the id.

    In a template, `{name}` stands for the argument `name` and `{*}` for all others. `result` and `error` are their
    paths in the answer, as names with dots; an empty `result` is the whole answer.
    """

    name: str = pydantic.Field(min_length=1, max_length=128)
    description: str = pydantic.Field(min_length=1)
    input_schema: dict[str, Any]
    output_schema: dict[str, Any] | None = None
    method: str | None = None
    send: dict[str, Any] | None = None
    result: str = "result"
    error: str = "error"

    @pydantic.model_validator(mode="after")
    def _of_one_kind(self) -> WebSocketTool:
        if (self.method is None) == (self.send is None):
            raise ValueError("a tool has a JSON-RPC `method` or a message to `send`")
        if self.send is not None and "id" not in wire.placeholders(self.send):
            raise ValueError("the message to send says `{id}` somewhere, by which its answer is known")
        return self

    def definition(self) -> Definition:
        message: Json = {"method": self.method} if self.send is None else {"send": self.send}
        return Definition(
            name=self.name,
            description=self.description,
            input_schema=self.input_schema,
            output_schema=self.output_schema,
            native={"protocol": "websocket", **message, "result": self.result, "error": self.error},
        )


class WebSocketConfig(RemoteConfig):
    """A WebSocket service. `context` names the member of each message for trace, deadline and idempotency key; empty
    for a service that does not accept an unknown member.
    """

    urls: tuple[str, ...] = pydantic.Field(min_length=1, max_length=3)
    tools: tuple[WebSocketTool, ...] = ()
    id_field: str = pydantic.Field("id", min_length=1)
    context: str = "meta"
    subprotocols: tuple[str, ...] = ()
    max_connections: int = pydantic.Field(8, ge=1, le=1000)
    calls_per_connection: int = pydantic.Field(64, ge=1, le=10_000)
    ping_s: float = pydantic.Field(20.0, gt=0, le=600)

    @pydantic.field_validator("urls")
    @classmethod
    def _endpoints(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(wire.checked_url(url, ("ws", "wss")) for url in urls)

    @pydantic.model_validator(mode="after")
    def _hidden(self) -> WebSocketConfig:
        wire.keep_hidden(self, plain=any(url.startswith("ws:") for url in self.urls))
        return self


class _Whose(NamedTuple):
    """The owner of a connection: an endpoint, and the holder of a credential."""

    url: str
    credential: str


class _Link:
    """One open connection and the calls on it."""

    def __init__(
        self,
        intake: Intake,
        whose: _Whose,
        socket: MeteredConnection,
        id_field: str,
        on_flood: Callable[[], None],
    ) -> None:
        self.whose = whose
        self.socket = socket
        self.waiting: dict[str, asyncio.Future[Json]] = {}
        self.open = True
        self._intake = intake
        self._id_field = id_field
        self._on_flood = on_flood
        self._ids = itertools.count(1)
        self._closing = False
        self._reading = asyncio.create_task(self._read())

    def next_id(self) -> int:
        return next(self._ids)

    async def ask(self, ident: int, message: bytes) -> Json:
        """Send a message and wait for the answer that carries its id."""
        from websockets.exceptions import ConnectionClosed

        answer = self.waiting[str(ident)] = asyncio.get_running_loop().create_future()
        try:
            await self.socket.send(message, text=True)
            return await answer
        except ConnectionClosed:
            raise self._broken() from None
        finally:
            self.waiting.pop(str(ident), None)
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # retrieved, because nobody else will if sending failed as well

    async def close(self) -> None:
        self.open = False
        self._closing = True
        self._reading.cancel()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.socket.close()
        except TimeoutError:
            self.socket.transport.abort()

    async def _read(self) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            while True:
                await self._receive(await self.socket.recv(decode=False))
        except ConnectionClosed:
            pass
        finally:
            # INVARIANT: no call waits on a connection that has ended, and no connection is left that nobody reads.
            self.open = False
            waiting, self.waiting = self.waiting, {}
            failure = self._broken(alone=len(waiting) == 1)
            for answer in waiting.values():
                if not answer.done():
                    answer.set_exception(failure)
            if not self._closing:
                self.socket.transport.abort()
            if self.socket.flooded:
                self._on_flood()

    def _broken(self, *, alone: bool = False) -> Failure:
        """The failure of the waiting calls. A message that is too large belongs to the call if there is exactly one."""
        if self.socket.flooded:
            return self._intake.flooded()
        protocol = self.socket.protocol
        if alone and protocol.close_sent is not None and protocol.close_sent.code == _TOO_BIG:
            if not protocol.close_rcvd_then_sent:
                return self._intake.too_large()  # the limit was ours
            name = self._intake.name
            return Failure("E3401", f"the request is larger than `{name}` takes (close code 1009); send less")
        return wire.broken(self._intake.name)

    async def _receive(self, text: bytes) -> None:
        try:
            parsed = await self._intake.json(text)
        except orjson.JSONDecodeError:
            return
        except Failure as refused:
            self._refuse(text, refused)
            return
        for message in cast("list[Any]", parsed) if isinstance(parsed, list) else [parsed]:
            ident = _within(message, self._id_field)
            # INVARIANT: an id is a number or a text. No other value is converted to text, however deep it is nested.
            answer = self.waiting.pop(str(ident), None) if type(ident) in (int, str) else None
            if answer is not None and not answer.done():
                self.socket.allowance.give(1 + len(text) // _FRAGMENT, len(text))
                answer.set_result(message)

    def _refuse(self, text: bytes, refused: Failure) -> None:
        """Fail the call whose answer exceeds the limits; all of them if it cannot be determined."""
        ident = addressee(text, self._id_field.rpartition(".")[2], self.waiting.keys())
        for one in [ident] if ident is not None else list(self.waiting):
            answer = self.waiting.pop(one)
            if not answer.done():
                answer.set_exception(refused if ident is not None else wire.broken(self._intake.name))


class WebSocketUpstream:
    """Calls one WebSocket service."""

    def __init__(
        self,
        name: str,
        config: WebSocketConfig,
        *,
        clock: Clock,
        resolve: addresses.Resolve = addresses.resolve_by_system,
        sleep: wire.Sleep = asyncio.sleep,
        services: Services | None = None,
    ) -> None:
        self._name = name
        self._config = config
        self._clock = clock
        self._resolve = resolve
        self._intake = Intake(name, config.max_response_bytes, config.max_response_values)
        self._sender = wire.Sender(name, config.urls, config, clock=clock, sleep=sleep, services=services)
        self._links: list[_Link] = []
        self._opening: WeakValueDictionary[_Whose, asyncio.Lock] = WeakValueDictionary()
        self._reserved = 0
        # by url: failures in a row, and until when no connection is opened
        self._failed: dict[str, tuple[int, float]] = {}

    async def call(self, call: RemoteCall) -> Any:
        return await self._sender.send(call, lambda one, url: wire.within(one, self._name, self._ask(one, url)))

    def mapping(self, native: Json, reported: Json) -> Json | None:
        return None

    async def discover(self, credentials: Mapping[str, str] | None = None) -> Discovered:
        return Discovered(tools=[tool.definition() for tool in self._config.tools])

    async def probe(self, credentials: Mapping[str, str] | None = None) -> None:
        from websockets.exceptions import ConnectionClosed

        url = self._config.urls[0]
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                for link in self._links:
                    if link.open and link.whose.url == url:
                        await (await link.socket.ping())
                        return
                socket = await self._connect(url, {}, "")
                try:
                    # A service that only accepts connections has not answered yet. One that closes this one has.
                    with contextlib.suppress(ConnectionClosed):
                        await (await socket.ping())
                    await socket.close()
                finally:
                    socket.transport.abort()
                if socket.flooded:
                    raise wire.unreached(self._name, "sends far more than it is asked for")
        except TimeoutError:
            raise wire.unreached(self._name, "does not answer") from None
        except Failure as failure:
            if "status" not in (failure.details or {}):
                raise  # a service that asks for a credential which a probe lacks has answered

    async def close(self) -> None:
        self._sender.close()
        links, self._links = self._links, []
        await asyncio.gather(*(link.close() for link in links))

    async def _ask(self, call: RemoteCall, url: str) -> Any:
        """Make one attempt at one endpoint."""
        link = await self._link(call, url)
        ident = link.next_id()
        native = call.native
        answer = await link.ask(ident, wire.to_json(self._message(call, ident)))
        error = _within(answer, str(native["error"]))
        if error is not None:
            message = wire.excerpt(error if isinstance(error, str) else wire.text_of(error), call)
            raise Failure("E3401", f"`{self._name}` answered: {message}", details={"sent": True, "body": message})
        return _within(answer, str(native["result"]))

    def _message(self, call: RemoteCall, ident: int) -> Json:
        native, arguments = call.native, call.arguments
        if "send" in native:
            named = wire.placeholders(native["send"])
            rest = {name: value for name, value in arguments.items() if name not in named}
            message: Json = wire.fill(native["send"], {**arguments, "id": ident}, rest)
        else:
            message = {"jsonrpc": "2.0", "id": ident, "method": native["method"], "params": arguments}
        if self._config.context:
            context: Json = {**call.trace, "deadlineMs": int(call.left_s * 1000)}
            if self._config.sends_caller:
                context |= call.identity
            if (key := wire.sent_key(call)) is not None:
                context["idempotencyKey"] = key
            message[self._config.context] = context
        return message

    # Connections

    async def _link(self, call: RemoteCall, url: str) -> _Link:
        """Return a connection for a call: of its own credential, and no busier than necessary."""
        wire.check_egress(call, url)
        auth = self._config.auth
        credential = "" if auth is None else auth.value(call)
        whose = _Whose(url, hashlib.sha256(credential.encode()).hexdigest())
        link = self._free(whose)
        if link is not None:
            return link
        lock = self._opening.setdefault(whose, asyncio.Lock())
        async with lock:
            link = self._free(whose)
            if link is not None:
                return link
            if not await self._reserve():
                return self._shared(whose)
            try:
                headers, query = dict(self._config.headers), ""
                if auth is not None:
                    query, shown = auth.query(call), auth.header(call)
                    if shown is not None:
                        headers[shown[0]] = shown[1]
                socket = await self._guarded_connect(url, headers, query, call.retry)
            finally:
                self._reserved -= 1
            link = _Link(self._intake, whose, socket, self._config.id_field, partial(self._flooded, url, call.retry))
            self._links.append(link)
            return link

    def _free(self, whose: _Whose) -> _Link | None:
        """Return the least busy connection of its own, if it has less than its share of calls."""
        link = self._least_busy(whose)
        return link if link is not None and len(link.waiting) < self._config.calls_per_connection else None

    def _shared(self, whose: _Whose) -> _Link:
        link = self._least_busy(whose)
        if link is None:
            raise wire.unreached(self._name, "has all its connections taken by other callers")
        return link

    def _least_busy(self, whose: _Whose) -> _Link | None:
        self._links = [link for link in self._links if link.open]
        own = [link for link in self._links if link.whose == whose]
        return min(own, key=lambda link: len(link.waiting), default=None)

    async def _reserve(self) -> bool:
        """Reserve another connection, for which an unused one may be closed. False if there is none."""
        idle = None
        # INVARIANT: there are never more connections, open and being opened, than the operator allowed.
        if len(self._links) + self._reserved >= self._config.max_connections:
            idle = next((link for link in self._links if not link.waiting), None)
            if idle is None:
                return False
            self._links.remove(idle)
        self._reserved += 1
        if idle is not None:
            try:
                await idle.close()
            except BaseException:
                self._reserved -= 1
                raise
        return True

    async def _guarded_connect(
        self, url: str, headers: dict[str, str], query: str, policy: RetryPolicy
    ) -> MeteredConnection:
        """Open a connection, unless the last attempt failed too recently."""
        until = self._failed.get(url, (0, 0.0))[1]
        left_s = until - self._clock.monotonic()
        if left_s > 0:
            raise wire.unreached(self._name, "could not be reached just now", retry_after_ms=_ms(left_s))
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                socket = await self._connect(url, headers, query)
        except TimeoutError:
            failure = wire.unreached(self._name)
        except Failure as refused:
            if refused.code != "E3502":
                raise
            failure = refused
        else:
            self._failed.pop(url, None)
            return socket
        pause_s = self._leave_alone(url, policy)
        raise Failure(failure.code, failure.message, details=failure.details, retry_after_ms=_ms(pause_s))

    def _leave_alone(self, url: str, policy: RetryPolicy) -> float:
        """Open no connection to an endpoint for a while, longer each time; returns how long."""
        times = self._failed.get(url, (0, 0.0))[0] + 1
        pause_s = delay_s(policy, self._sender.pacing, times)
        self._failed[url] = (times, self._clock.monotonic() + pause_s)
        return pause_s

    def _flooded(self, url: str, policy: RetryPolicy) -> None:
        pause_s = self._leave_alone(url, policy)
        _log.warning("%s: a flood of messages; the connection was cut for %.1f s", self._name, pause_s)

    async def _connect(self, url: str, headers: dict[str, str], query: str) -> MeteredConnection:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake, InvalidStatus
        from websockets.typing import Subprotocol

        from interlock.upstreams.frames import MeteredConnection

        parts = urlsplit(url)
        secure = parts.scheme == "wss"
        host = parts.hostname or ""
        try:
            sock = await wire.dial(
                host,
                parts.port or (443 if secure else 80),
                allow_private=self._config.allow_private,
                resolve=self._resolve,
            )
        except OSError:
            raise wire.unreached(self._name) from None
        config = self._config
        tls: dict[str, Any] = {"ssl": self._tls, "server_hostname": host} if secure else {}
        try:
            allowance = Allowance(self._clock.monotonic, config.max_response_bytes)
            opened = await connect(
                url + (("&" if parts.query else "?") + query if query else ""),
                sock=sock,
                additional_headers=headers,
                user_agent_header="interlock",
                subprotocols=[Subprotocol(one) for one in config.subprotocols] or None,
                compression=None,
                proxy=None,
                open_timeout=None,
                ping_interval=config.ping_s,
                ping_timeout=config.ping_s,
                close_timeout=CLOSE_S,
                max_size=config.max_response_bytes,
                logger=_log,
                create_connection=cast("type[MeteredConnection]", partial(MeteredConnection, allowance=allowance)),
                **tls,
            )
            return cast("MeteredConnection", opened)
        except InvalidStatus as refused:
            raise self._refusal(refused.response.status_code, refused.response.headers.get("retry-after")) from None
        except (OSError, InvalidHandshake, EOFError):
            raise wire.unreached(self._name) from None
        except ValueError:
            raise Failure("E3406", f"`{self._name}` redirects, which is not followed") from None

    def _refusal(self, status: int, retry_after: str | None) -> Failure:
        """Convert a status in place of a connection to a failure. Nothing was sent yet."""
        pause_ms = wire.retry_after_ms(retry_after, self._clock.now_ms())
        details: Json = {"status": status, "sent": False}
        if status == 429 or (status == 503 and pause_ms is not None):
            words = f"`{self._name}` is asked too often"
            return Failure("E3504", words, details=details, retry_after_ms=pause_ms, native_error_ref=f"http:{status}")
        code = "E3502" if status >= 500 else "E3401"
        return Failure(code, f"`{self._name}` answered {status}", details=details, native_error_ref=f"http:{status}")

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return self._config.tls.context()


def _ms(seconds: float) -> int:
    """Convert seconds to milliseconds, rounded up."""
    return int(seconds * 1000) + 1


def _within(message: Any, path: str) -> Any:
    """Return the value at a path of names; the message itself for the empty path, None if there is none."""
    for name in path.split(".") if path else ():
        if not isinstance(message, dict):
            return None
        message = cast("Json", message).get(name)
    return message


def make(name: str, config: Json, site: Site) -> WebSocketUpstream:
    """Make the connector of one upstream, not connected yet."""
    return WebSocketUpstream(name, read_config(WebSocketConfig, config), clock=site.clock, services=site.services)

"""The connections to a WebSocket service: opened when needed, shared by calls of one credential, bounded in number.

    no connection, or all have their share of calls    open one, while there may be another
    as many as there may be                            an unused one is closed; else the least busy is shared

A connection that breaks fails every call on it: each may have been carried out. One that cannot be opened is tried
again with growing pauses, whichever call comes; until then calls fail at once with the time to wait. A connection on
which the service floods us is cut (`response_limits`), and the same pauses follow.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import orjson

from interlock.call.connector import RemoteCall
from interlock.contract.manifest import RetryPolicy
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.data.schema import Json
from interlock.net import addresses
from interlock.resilience.retry import Pacing, delay_s
from interlock.upstreams import wire
from interlock.upstreams.response_limits import Allowance, Intake, addressee

if TYPE_CHECKING:
    import ssl

    from interlock.upstreams.frames import MeteredConnection
    from interlock.upstreams.websocket_config import WebSocketConfig

CLOSE_S = 2.0
# Services split large answers into frames; fragments of this size and more are not charged.
_FRAGMENT = 256
_TOO_BIG = 1009  # the close code of a message that is too large
# The library writes headers, and so credentials, at the debug level.
_log = logging.getLogger("interlock.upstreams.websocket.wire")
_log.setLevel(logging.WARNING)


class _Whose(NamedTuple):
    """The owner of a connection: an endpoint, and the holder of a credential."""

    url: str
    credential: str


class Link:
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
            ident = value_at(message, self._id_field)
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


class Links:
    """The connections of one upstream."""

    def __init__(
        self,
        name: str,
        config: WebSocketConfig,
        intake: Intake,
        *,
        clock: Clock,
        resolve: addresses.Resolve,
        pacing: Pacing,
    ) -> None:
        self._name = name
        self._config = config
        self._intake = intake
        self._clock = clock
        self._resolve = resolve
        self._pacing = pacing
        self._links: list[Link] = []
        self._opening: WeakValueDictionary[_Whose, asyncio.Lock] = WeakValueDictionary()
        self._reserved = 0
        # by url: failures in a row, and until when no connection is opened
        self._failed: dict[str, tuple[int, float]] = {}

    def open_to(self, url: str) -> Link | None:
        """Return any open connection to an endpoint."""
        return next((link for link in self._links if link.open and link.whose.url == url), None)

    async def close(self) -> None:
        links, self._links = self._links, []
        await asyncio.gather(*(link.close() for link in links))

    async def get(self, call: RemoteCall, url: str) -> Link:
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
            link = Link(self._intake, whose, socket, self._config.id_field, partial(self._flooded, url, call.retry))
            self._links.append(link)
            return link

    def _free(self, whose: _Whose) -> Link | None:
        """Return the least busy connection of its own, if it has less than its share of calls."""
        link = self._least_busy(whose)
        return link if link is not None and len(link.waiting) < self._config.calls_per_connection else None

    def _shared(self, whose: _Whose) -> Link:
        link = self._least_busy(whose)
        if link is None:
            raise wire.unreached(self._name, "has all its connections taken by other callers")
        return link

    def _least_busy(self, whose: _Whose) -> Link | None:
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
                socket = await self.connect(url, headers, query)
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
        pause_s = delay_s(policy, self._pacing, times)
        self._failed[url] = (times, self._clock.monotonic() + pause_s)
        return pause_s

    def _flooded(self, url: str, policy: RetryPolicy) -> None:
        pause_s = self._leave_alone(url, policy)
        _log.warning("%s: a flood of messages; the connection was cut for %.1f s", self._name, pause_s)

    async def connect(self, url: str, headers: dict[str, str], query: str) -> MeteredConnection:
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


def value_at(message: Any, path: str) -> Any:
    """Return the value at a path of names; the message itself for the empty path, None if there is none."""
    for name in path.split(".") if path else ():
        if not isinstance(message, dict):
            return None
        message = cast("Json", message).get(name)
    return message

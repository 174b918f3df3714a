"""The HTTP client of everything that asks over HTTP: one request, one answer of bounded size.

    names        are resolved and judged by `find`, and connections go to addresses that it returned
    once         a request is sent at most once; no redirect is followed
    room         so many requests are under way at once, the others wait; connections are kept for later requests
    bodies       are read up to a limit that the caller chooses by the head of the answer; nothing is decompressed
    environment  neither its proxies nor its credentials are used, and no cookie is kept

`net.connection` bounds what an answer costs besides its body. A caller bounds the time with `asyncio.timeout`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial

from interlock.core.record import NamedTuple
from interlock.net.connection import CONNECT_S, MAX_IDLE, HttpConnection, Pool, Trouble, Unreachable
from interlock.net.heads import Origin, split

# Returns the addresses of a host, all of them allowed.
Find = Callable[[str], Awaitable[Sequence[str]]]
# Says how much of the body is read, from the status and the headers. None: the head is all that is wanted.
Limit = Callable[[int, Mapping[str, str]], int | None]

NAMES_S = 10.0
_EMPTY = ("GET", "HEAD", "OPTIONS", "TRACE")
_FILLED = ("POST", "PUT", "PATCH")
# A body that is not wanted may be this long, if the connection is to be used again.
_MOST_IGNORED = 65_536
_MOST_ORIGINS = 64


class Response(NamedTuple):
    """An answer. Names of headers are in lower case. `whole`: the body was not longer than the limit."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    whole: bool


class Broken(Exception):  # noqa: N818 - a finding about the other side
    """The request was sent, and no answer came that could be read. Holds nothing of the request."""

    def __init__(self, why: Trouble) -> None:
        super().__init__(why)
        self.why: Trouble = why


class Client:
    """Sends requests to any number of origins. Belongs to one event loop.

    `tls` makes the TLS context when it is first needed; without it, the system's authorities are trusted. With
    `keep_names` the addresses of a name are remembered for some seconds.
    """

    def __init__(
        self,
        find: Find,
        *,
        connections: int,
        tls: Callable[[], ssl.SSLContext] | None = None,
        connect_s: float = CONNECT_S,
        keep_alive: bool = True,
        keep_names: bool = True,
    ) -> None:
        self._find = find
        self._room = asyncio.Semaphore(connections)
        self._tls = tls or _default_tls
        self._context: ssl.SSLContext | None = None
        self._connect_s = connect_s
        self._fixed = {"user-agent": "interlock"}
        self._keep_alive = keep_alive
        self._keep_names = keep_names
        self._places: dict[str, tuple[Origin, Pool]] = {}
        self._under_way: set[_Exchange] = set()

    async def ask(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, limit: Limit
    ) -> Response:
        """Send a request once and return its answer. `headers` have lower-case names.

        Raises Unreachable if nothing was sent, Broken if there is no readable answer, and what `find` raises.
        """
        try:
            at, target = split(url)
            origin, pool = self._place(at)
            if "content-type" not in headers and (body is not None or method in _FILLED):
                headers = {**headers, "content-type": "application/octet-stream"}
            length = len(body or b"") if body is not None or method not in _EMPTY else None
            request = origin.head(method, target, headers, length) + (body or b"")
        except ValueError:
            raise Unreachable from None
        exchange, bodiless = _Exchange(limit), method == "HEAD"
        async with self._room:
            connection = pool.send_now(request, exchange, bodiless=bodiless)
            if connection is None:
                connection = await pool.send(request, exchange, bodiless=bodiless)
            self._under_way.add(exchange)
            try:
                return await exchange.answer
            except BaseException:
                connection.cut_for(exchange)
                raise
            finally:
                self._under_way.discard(exchange)

    def close(self) -> None:
        """Cut every connection. Requests that are under way are broken."""
        places, self._places = self._places, {}
        for _, pool in places.values():
            pool.close()
        for exchange in list(self._under_way):
            exchange.broke("broke off")

    def _place(self, at: str) -> tuple[Origin, Pool]:
        place = self._places.get(at)
        if place is None:
            if len(self._places) >= _MOST_ORIGINS:
                self._places = {at: one for at, one in self._places.items() if not one[1].unused}
            origin = Origin(at, self._fixed, keep_alive=self._keep_alive)
            if origin.secure and self._context is None:
                self._context = self._tls()
            pool = Pool(
                _Remembered(self._find, origin.host) if self._keep_names else partial(self._find, origin.host),
                origin.port,
                tls=self._context if origin.secure else None,
                name=origin.name,
                connect_s=self._connect_s,
                lenient=True,
                most_idle=MAX_IDLE if self._keep_alive else 0,
            )
            place = self._places[at] = origin, pool
        return place


class _Remembered:
    """Finds the addresses of one name, and remembers them for some seconds. At most one lookup is under way."""

    def __init__(self, find: Find, host: str) -> None:
        self._find = find
        self._host = host
        self._lock = asyncio.Lock()
        self._known: Sequence[str] = ()
        self._until = 0.0

    async def __call__(self) -> Sequence[str]:
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now >= self._until:
                self._known = await self._find(self._host)
                self._until = now + NAMES_S
            return self._known


class _Exchange:
    """Receives the answer to one request."""

    __slots__ = ("_body", "_connection", "_headers", "_ignored", "_limit", "_most", "_status", "answer")

    def __init__(self, limit: Limit) -> None:
        self.answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._limit = limit
        self._most = self._status = self._ignored = 0
        self._headers: Mapping[str, str] = {}
        self._body = bytearray()
        self._connection: HttpConnection | None = None

    def head(self, connection: HttpConnection, status: int, headers: Mapping[str, str]) -> None:
        self._connection, self._status, self._headers = connection, status, headers
        most = self._limit(status, headers)
        if most is None:
            self._end(whole=False)
            connection.linger()
        else:
            self._most = most

    def body(self, data: bytes) -> bool:
        if self.answer.done():
            self._ignored += len(data)
            if self._ignored > _MOST_IGNORED:
                self._cut()
            return False
        self._body += data
        if len(self._body) > self._most:
            self._end(whole=False)
            self._cut()
        return False

    def done(self) -> None:
        self._end(whole=True)

    def broke(self, why: Trouble) -> None:
        if why == "followed":
            self._end(whole=True)  # the connection is cut, so what follows answers no other request
        if not self.answer.done():
            self.answer.set_exception(Broken(why))

    def _end(self, *, whole: bool) -> None:
        if not self.answer.done():
            self.answer.set_result(Response(self._status, self._headers, bytes(self._body), whole))

    def _cut(self) -> None:
        if self._connection is not None:
            self._connection.cut_for(self)


@cache
def _default_tls() -> ssl.SSLContext:
    """Make the context for everybody without TLS settings. It is costly: once for the whole process."""
    return ssl.create_default_context()

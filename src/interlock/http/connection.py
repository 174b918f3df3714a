"""One HTTP connection: requests in, each handed to a route, answers out, and a bound on every wait.

    head ──► body ──► answer ──► idle
      │        │         │         └─ no next request comes: KEEP_ALIVE_S
      │        │         └─ not read by the client: STALLED_S, then the connection is cut
      │        └─ does not come: BODY_S; still coming when the answer is out: LINGER_S
      └─ does not come: HEAD_S; too long: MAX_HEAD

A client that sends nothing, sends its request byte by byte or without end, or asks and never reads would otherwise hold
a connection, and what waits to be sent on it, for ever.

uvicorn listens, accepts and drains; httptools parses; between the two this class replaces uvicorn's own, which is made
for any application: ours answer a small request with a small document, so an answer's head waits for its body and both
leave in one piece, and nothing is set up for a wait that does not happen. One clock serves all waits of a connection.
It is not wound for each: it looks, when it rings, whether something is due by now.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

import httptools
import orjson

from interlock.core.errors import Failure
from interlock.http.asgi import App, Scope, refusal
from interlock.http.connection_limits import MOST_PER_PEER, crowd_of
from interlock.http.exchange import Exchange
from interlock.http.request_cache import CachedHead, cached_head
from interlock.http.route import Application, Handler, Route

if TYPE_CHECKING:
    from uvicorn import Config
    from uvicorn.server import ServerState

MAX_HEAD = 64 << 10
MAX_CACHED_HEADS = 4
HEAD_S = 15.0
BODY_S = 30.0
LINGER_S = 5.0
STALLED_S = 60.0
KEEP_ALIVE_S = 75.0
MAX_CONNECTIONS = 4096
# Data that arrives together is parsed in slices. Between slices that hold many messages or chunks, others have a turn.
SLICE = 32 << 10
BUSY_SLICE = 64
# Of a body in chunks, the sizes, extensions and trailers may take so many bytes for each byte of the body.
MAX_FRAMING = 16
_NEVER = math.inf
_BAD, _TOO_LONG = b"400 Bad Request", b"431 Request Header Fields Too Large"
_VERSIONS = frozenset(("1.0", "1.1"))
_CODING = b"transfer-encoding"


# many methods: one state machine per connection: the calls of the transport and of the parser, over the same fields
class Connection(asyncio.Protocol):
    """Reads requests, and answers them one after another."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        app = cast("App", config.loaded_app)  # pyright: ignore[reportUnknownMemberType] - uvicorn leaves it open
        self._route = app if isinstance(app, Route) else Application(app)
        self._loop = _loop or asyncio.get_running_loop()
        self.server = server_state
        self._parser = httptools.HttpRequestParser(self)
        self._common: Scope = {}
        self.transport: asyncio.Transport = _UNBORN
        # The request that is being read, the one that is being answered, and those that wait for their turn.
        self._reading: Exchange | None = None
        self._answering: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._in_head = True
        self._head = 0
        self._chunk = 0
        self._wrong = _BAD
        # The heads of the last requests, newest first.
        self._cached: list[CachedHead] = []
        # Whether the parser takes the rest for another protocol; and whether its successor is being told of this one.
        self._upgraded = False
        self._told_again = False
        self._deaf = False
        # What arrived and is not parsed yet. Whether an exchange asked for a pause, and whether the transport has one.
        self._rest = b""
        self._paused = False
        self._stopped = False
        self._feeding = False
        # Messages and pieces of bodies in the present slice; bytes that came of the present body, and bytes in it.
        self._busy = 0
        self._came = 0
        self._size = 0
        # When the present wait has lasted too long, what is done then, and when the clock rings next.
        self._due = _NEVER
        self._when_due: Callable[[], None] = self._late_head
        self._clock: asyncio.TimerHandle | None = None
        self._rings = _NEVER
        self.writable: asyncio.Event | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._peer = ""
        self._idle_since = 0.0
        self._crowd = crowd_of(server_state, MAX_CONNECTIONS, getattr(app, "most_per_peer", MOST_PER_PEER))

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.server.connections.add(self)  # pyright: ignore[reportArgumentType] - what uvicorn asks of it, it has
        self._common = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "server": _address(transport, "sockname"),
            "client": _address(transport, "peername"),
            "scheme": "http" if transport.get_extra_info("sslcontext") is None else "https",
            "root_path": "",
        }
        self._peer = (self._common["client"] or ("",))[0]
        self._idle_since = self._loop.time()
        if not self._crowd.enter(self, self._peer):
            self._end(b"503 Service Unavailable")
        else:
            self._expect(HEAD_S, self._late_head)

    @property
    def idle_since(self) -> float | None:
        """When the last answer ended, or the connection began; None while a request is being answered."""
        return None if self._answering is not None else self._idle_since

    def make_room(self) -> None:
        """Close at once: another connection takes the place of this idle one."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.leave(self, self._peer)
        self.server.connections.discard(self)  # pyright: ignore[reportArgumentType] - as above
        if self._clock is not None:
            self._clock.cancel()
        self.resume_writing()
        for exchange in (self._answering, self._reading, *self._waiting):
            if exchange is not None:
                exchange.lose()
        self._waiting.clear()

    def eof_received(self) -> bool:
        """Nothing more comes. Whether the client has gone or only has no more to ask, nobody can tell.

        Whoever watches for its going is told that it has, and the answers it waits for are sent in case it has not.
        """
        last = self._waiting[-1] if self._waiting else self._answering
        if (
            last is None
            or not last.whole
            or last.done
            or self._route.is_endless(last.scope)
            or self._common["scheme"] == "https"
        ):
            return False  # (a client of TLS says goodbye to both directions at once)
        self._deaf = True
        last.keep_alive = False
        for exchange in (self._answering, *self._waiting):
            if exchange is not None:
                exchange.hang_up()
        return True

    def shutdown(self) -> None:
        """Begin to end: at once where nobody waits for an answer, or for one that is not about to come."""
        exchange = self._answering
        if exchange is None or exchange.done or not exchange.whole or self._route.is_endless(exchange.scope):
            self.transport.close()
        else:
            exchange.keep_alive = False

    # Reading

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._rest:
            self._rest += data
            return
        idle = self._answering is None and self._in_head and not self._head
        if idle:
            for head in self._cached:
                body = head.body(data)
                if body is not None:
                    self._answer_cached(head, body)
                    return
        if len(data) > SLICE:
            self._rest = data
            self._feed()
            return
        self._parse(data)
        if idle and self._in_head and not self._head:
            self._cache_head(data)

    def _feed(self) -> None:
        """Parse what arrived, slice by slice, until a pause is asked for or others should have a turn."""
        self._feeding = False
        while self._rest and not self._paused:
            if self._deaf or self.transport.is_closing():
                self._rest = b""
                break
            piece, self._rest = self._rest[:SLICE], self._rest[SLICE:]
            self._busy = 0
            self._parse(piece)
            if self._busy > BUSY_SLICE:
                self._feed_later()
                break
        self._regulate()

    def _feed_later(self) -> None:
        if self._rest and not self._feeding:
            self._feeding = True
            self._loop.call_soon(self._feed)

    def _parse(self, data: bytes) -> None:
        while True:
            self._chunk = len(data)
            self._came += self._chunk
            if self._in_head:
                self._head += self._chunk
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as stopped:
                self._read_on()
                data = data[stopped.args[0] :]
                if not data:
                    return
            except httptools.HttpParserError:
                self._refuse(self._wrong)
                return
        if not self._in_head:
            # Sizes, extensions and trailers of chunks are bytes that nobody else counts.
            if self._came > MAX_HEAD + SLICE + MAX_FRAMING * self._size:
                self._refuse(_BAD)
        elif self._head > MAX_HEAD:
            self._refuse(_TOO_LONG)
        elif self._head and self._when_due != self._late_head:
            self._expect(HEAD_S, self._late_head)

    def _cache_head(self, data: bytes) -> None:
        """Cache the head of a request that came as one piece of data."""
        exchange = self._answering
        if exchange is not None and exchange.keep_alive:
            # The exchange's task has not run yet, so no application has changed the scope.
            head = exchange.cached = cached_head(data, {**exchange.scope, "headers": self._headers})
            if head is not None:
                self._cached = [head, *self._cached[: MAX_CACHED_HEADS - 1]]

    def _answer_cached(self, head: CachedHead, body: bytes) -> None:
        """Answer a request whose head is that of an earlier one."""
        self._due, self._when_due = _NEVER, self._end_idle
        handler = head.handler
        if handler is not None:
            exchange = Exchange(self, head.scope, True, True)
        else:
            exchange = Exchange(self, head.scope_for(len(body)), True, True)
            exchange.feed(body)
        exchange.cached = head
        self._answer(exchange, handler, body)

    def _read_on(self) -> None:
        """A client may offer to speak another protocol; we speak HTTP, and read on as if it had not.

        The parser would not: to it, what follows the head is that protocol. So another takes its place, and is told of
        the request's body, whose length it has to know.
        """
        self._upgraded, self._told_again = False, True
        framing = [b"%b: %b\r\n" % one for one in self._headers if one[0] in (b"content-length", _CODING)]
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + (b"".join(framing) or b"content-length: 0\r\n") + b"\r\n")

    def _refuse(self, status: bytes) -> None:
        """Handle bytes that are not a request: send the answers before them, then a refusal, and close."""
        self._deaf = True
        answering, reading = self._answering, self._reading
        if answering is not None and answering.whole:
            answering.keep_alive = False
            self._waiting.clear()
        elif reading is not None and reading.begun:
            self.transport.close()
        else:
            if reading is not None:
                reading.lose()
            self._end(status)

    def _not_ours(self, status: bytes) -> Exception:
        self._wrong = status
        return ValueError(status)

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._head = self._head or 1
        self._busy += 1

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # What follows a body is no header: it would come after everybody has looked, and without a bound.
        if self._in_head:
            self._headers.append((name.lower(), value))
            if len(name) == len(_CODING) and name.lower() == _CODING and value.lower() != b"chunked":
                raise self._not_ours(b"501 Not Implemented")

    def on_headers_complete(self) -> None:
        if self._told_again:
            self._told_again, self._head = False, 0
            return
        if self._head > MAX_HEAD - SLICE:  # its first bytes may have come with the request before it
            size = len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if size > MAX_HEAD:
                raise self._not_ours(_TOO_LONG)
        self._in_head, self._head, parser = False, 0, self._parser
        self._came = self._size = 0
        url = httptools.parse_url(self._url)
        raw: bytes = url.path
        path = raw.decode("ascii")
        version = parser.get_http_version()
        if version not in _VERSIONS:
            raise self._not_ours(b"505 HTTP Version Not Supported")
        if url.host:
            # INVARIANT: whom a request is for is said once. A target that names a host goes before the header.
            self._headers = [one for one in self._headers if one[0] != b"host"] + [(b"host", _authority(url))]
        scope: Scope = {
            **self._common,
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw,
            "query_string": url.query or b"",
            "headers": self._headers,
            "state": {},
        }
        self._upgraded = parser.should_upgrade()
        keep_alive = version == "1.1" and parser.should_keep_alive()
        exchange = self._reading = Exchange(self, scope, keep_alive=keep_alive)
        answering = self._answering
        if answering is None:
            self._answer(exchange)
        elif self._route.is_endless(answering.scope):
            # Behind a stream without end nothing would be answered, nor would anybody see that the client has gone.
            self.transport.close()
        else:
            self._waiting.append(exchange)
            self.pause_reading()
        self._expect(BODY_S, self._late_body)

    def on_body(self, body: bytes) -> None:
        self._busy += 1
        self._size += len(body)
        exchange = self._reading
        if exchange is not None and not exchange.done:
            exchange.feed(body)

    def on_message_complete(self) -> None:
        if self._upgraded:
            return
        exchange, self._reading = self._reading, None
        self._in_head = True
        if exchange is not None:
            exchange.end()
        # What one waits for now is the answer; or, if that is out already, the next request.
        self._due = _NEVER if self._answering is not None else self._loop.time() + KEEP_ALIVE_S
        self._when_due = self._end_idle

    def pause_reading(self) -> None:
        self._paused = True
        self._regulate()

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._feed_later()
            self._regulate()

    def _regulate(self) -> None:
        """Read from the network while nobody asked for a pause and everything that arrived is parsed."""
        stop = self._paused or bool(self._rest)
        if stop == self._stopped or self.transport.is_closing():
            return
        self._stopped = stop
        if stop:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    # Answering

    def _answer(self, exchange: Exchange, handler: Handler | None = None, body: bytes = b"") -> None:
        self._answering = exchange
        # (To make up a name for each would take a tenth of the time that a task takes.)
        exchange.task = task = asyncio.Task(exchange.run(self._route, handler, body), loop=self._loop, name="request")
        self.server.tasks.add(task)

    def answered(self, exchange: Exchange) -> None:
        """An answer is out: on to the next request, if it may be made on this connection."""
        self.server.total_requests += 1
        now = self._idle_since = self._loop.time()
        self._answering = None
        if not exchange.keep_alive:
            self._close(still_sends=not exchange.whole)
            return
        if self._waiting:
            self._answer(self._waiting.popleft())
        elif self._reading is not None:
            self._expect(LINGER_S, self.transport.abort)
        elif not self._head:
            self._due, self._when_due = now + KEEP_ALIVE_S, self._end_idle
            if self._rings > self._due:
                self._wind(self._due)
        if self._paused and not self._waiting:
            self.resume_reading()

    def pause_writing(self) -> None:
        self.writable = asyncio.Event()
        self._stalled = self._loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self.writable is not None:
            self.writable.set()
            self.writable = None
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    # Waiting

    def _expect(self, within_s: float, otherwise: Callable[[], None]) -> None:
        due = self._loop.time() + within_s
        self._due, self._when_due = due, otherwise
        if self._rings > due:
            self._wind(due)

    def _wind(self, at: float) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._clock, self._rings = self._loop.call_at(at, self._ring), at

    def _ring(self) -> None:
        self._clock, self._rings = None, _NEVER
        if self.transport.is_closing():
            return
        if self._loop.time() >= self._due:
            self._due, otherwise = _NEVER, self._when_due
            otherwise()
        elif self._due < _NEVER:
            self._wind(self._due)

    def _late_head(self) -> None:
        if self._answering is None:
            self._end(b"408 Request Timeout")
        else:
            self._expect(HEAD_S, self._late_head)  # it may wait while another is answered, and we may not be reading it

    def _late_body(self) -> None:
        if self._paused:
            self._expect(BODY_S, self._late_body)  # it is we who do not read
        elif self._reading is not None:
            self._reading.give_up()

    def _end_idle(self) -> None:
        if self._answering is None:
            self.transport.close()

    def _end(self, status: bytes) -> None:
        if self.transport.is_closing():
            return
        body = _refusal(status)
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self._close(still_sends=self._deaf)

    def _close(self, *, still_sends: bool) -> None:
        if still_sends and self.transport.can_write_eof():
            # To close on a client that still sends would take the answer from it.
            self._deaf = True
            self.transport.write_eof()
            self._expect(LINGER_S, self.transport.abort)
        else:
            self.transport.close()


# By their status: the code and the words of what is refused before there is a request.
_REFUSALS = {
    b"408": ("E3002", "the request did not come in time; send it whole"),
    b"431": ("E3004", "the headers of the request are too long; send fewer or shorter ones"),
    b"503": ("E3001", "too many connections are open; wait, then connect again"),
}


def _refusal(status: bytes) -> bytes:
    """The body of an answer to what is no request: the envelope that every failure has."""
    code, words = _REFUSALS.get(status[:3], ("E3004", "what came is not a request of HTTP/1.1"))
    return orjson.dumps(refusal(Failure(code, words), os.urandom(16).hex()))


_UNBORN: Any = None


def _authority(url: Any) -> bytes:
    host: bytes = b"[%b]" % url.host if b":" in url.host else url.host
    return host if url.port is None else b"%b:%d" % (host, url.port)


def _address(transport: asyncio.BaseTransport, which: str) -> tuple[str, int] | None:
    address: Any = transport.get_extra_info(which)
    return (address[0], address[1]) if address else None

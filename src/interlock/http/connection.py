"""One HTTP connection: requests in, each handed to a route, answers out, and a bound on every wait.

    head ──► body ──► answer ──► idle
      │        │         │         └─ no next request comes: KEEP_ALIVE_S
      │        │         └─ not read by the client: STALLED_S, then the connection is cut
      │        └─ does not come: BODY_S; still coming when the answer is out: LINGER_S
      └─ does not come: HEAD_S; too long: MAX_HEAD

A client that sends nothing, sends its request byte by byte or without end, or asks and never reads would otherwise hold
a connection, and what waits to be sent on it, for ever.

uvicorn listens, accepts and drains; httptools parses. This class replaces uvicorn's own protocol class, which is made
for any application. Ours answer a small request with a small document, so the head of an answer is held until its body
is there and both are written at once. One timer serves all waits of a connection. It is not set anew for each wait:
when it fires, it checks whether a deadline has passed, and is set again if one is left.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

import httptools
import orjson

from interlock.core.errors import Failure
from interlock.http.asgi import App, Scope, refusal
from interlock.http.connection_limits import MOST_PER_PEER, limits_of
from interlock.http.exchange import Exchange
from interlock.http.request_cache import CachedHead, cached_head
from interlock.http.route import Application, Handler, PerRequest, Route

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
_NONE: PerRequest = {}
_BAD, _TOO_LONG = b"400 Bad Request", b"431 Request Header Fields Too Large"
_VERSIONS = frozenset(("1.0", "1.1"))
_CODING = b"transfer-encoding"


# many methods: one state machine per connection: the calls of the transport and of the parser, over the same fields
class ServerConnection(asyncio.Protocol):
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
        self.transport: asyncio.Transport = _NOT_CONNECTED
        # The request that is being read, the one that is being answered, and those that wait for their turn.
        self._reading: Exchange | None = None
        self._answering: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._in_head = True
        self._head = 0
        self._chunk = 0
        self._refusal_status = _BAD
        # The heads of the last requests, newest first.
        self._cached_heads: list[CachedHead] = []
        # Whether the parser takes the rest for another protocol, and whether a new parser is given the head again.
        self._upgraded = False
        self._replaying_head = False
        self._ignores_input = False
        # Data that is not parsed yet. Whether an exchange asked for a pause, and whether the transport is paused.
        self._unparsed = b""
        self._paused = False
        self._transport_paused = False
        self._parsing_scheduled = False
        # Messages and pieces of bodies in the present slice; bytes received for the present body, and bytes in it.
        self._parsed_events = 0
        self._body_received = 0
        self._size = 0
        # When the present wait has lasted too long, what is done then, and when the timer fires next.
        self._deadline = _NEVER
        self._on_deadline: Callable[[], None] = self._head_timed_out
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = _NEVER
        self.writable: asyncio.Event | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._peer = ""
        self._idle_since = 0.0
        self._limits = limits_of(server_state, MAX_CONNECTIONS, getattr(app, "most_per_peer", MOST_PER_PEER))

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.server.connections.add(self)  # pyright: ignore[reportArgumentType] - it has what uvicorn uses of it
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
        if not self._limits.enter(self, self._peer):
            self._end(b"503 Service Unavailable")
        else:
            self._wait(HEAD_S, self._head_timed_out)

    @property
    def idle_since(self) -> float | None:
        """When the last answer ended, or the connection began; None while a request is being answered."""
        return None if self._answering is not None else self._idle_since

    def close_idle(self) -> None:
        """Close at once: another connection takes the place of this idle one."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.leave(self, self._peer)
        self.server.connections.discard(self)  # pyright: ignore[reportArgumentType] - as above
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        for exchange in (self._answering, self._reading, *self._waiting):
            if exchange is not None:
                exchange.disconnect()
        self._waiting.clear()

    def eof_received(self) -> bool:
        """Handle the end of input. The client has either disconnected or only has no more requests.

        Applications that watch for a disconnect are notified, and answers are still sent in case it has not.
        """
        last = self._waiting[-1] if self._waiting else self._answering
        if (
            last is None
            or not last.complete
            or last.done
            or self._route.is_endless(last.scope)
            or self._common["scheme"] == "https"
        ):
            return False  # a TLS client closes both directions at once
        self._ignores_input = True
        last.keep_alive = False
        for exchange in (self._answering, *self._waiting):
            if exchange is not None:
                exchange.half_close()
        return True

    def shutdown(self) -> None:
        """Close the connection: now if no answer is due, or only one without end; otherwise after the answer."""
        exchange = self._answering
        if exchange is None or exchange.done or not exchange.complete or self._route.is_endless(exchange.scope):
            self.transport.close()
        else:
            exchange.keep_alive = False

    # Reading

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        if self._unparsed:
            self._unparsed += data
            return
        idle = self._answering is None and self._in_head and not self._head and not self._limits.ending
        if idle:
            for head in self._cached_heads:
                read = head.read(data)
                if read is not None:
                    self._answer_cached(head, *read)
                    return
        if len(data) > SLICE:
            self._unparsed = data
            self._parse_pending()
            return
        self._parse(data)
        if idle and self._in_head and not self._head:
            self._cache_head(data)

    def _parse_pending(self) -> None:
        """Parse received data slice by slice, until a pause is requested or other connections should have a turn."""
        self._parsing_scheduled = False
        while self._unparsed and not self._paused:
            if self._ignores_input or self.transport.is_closing():
                self._unparsed = b""
                break
            piece, self._unparsed = self._unparsed[:SLICE], self._unparsed[SLICE:]
            self._parsed_events = 0
            self._parse(piece)
            if self._parsed_events > BUSY_SLICE:
                self._schedule_parsing()
                break
        self._update_reading()

    def _schedule_parsing(self) -> None:
        if self._unparsed and not self._parsing_scheduled:
            self._parsing_scheduled = True
            self._loop.call_soon(self._parse_pending)

    def _parse(self, data: bytes) -> None:
        while True:
            self._chunk = len(data)
            self._body_received += self._chunk
            if self._in_head:
                self._head += self._chunk
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as stopped:
                self._ignore_upgrade()
                data = data[stopped.args[0] :]
                if not data:
                    return
            except httptools.HttpParserError:
                self._refuse(self._refusal_status)
                return
        if not self._in_head:
            # Sizes, extensions and trailers of chunks are counted nowhere else.
            if self._body_received > MAX_HEAD + SLICE + MAX_FRAMING * self._size:
                self._refuse(_BAD)
        elif self._head > MAX_HEAD:
            self._refuse(_TOO_LONG)
        elif self._head and self._on_deadline != self._head_timed_out:
            self._wait(HEAD_S, self._head_timed_out)

    def _cache_head(self, data: bytes) -> None:
        """Cache the head of a request that came as one piece of data."""
        exchange = self._answering
        if exchange is not None and exchange.keep_alive:
            # The exchange's task has not run yet, so no application has changed the scope.
            head = exchange.cached = cached_head(data, {**exchange.scope, "headers": self._headers})
            if head is not None:
                self._cached_heads = [head, *self._cached_heads[: MAX_CACHED_HEADS - 1]]

    def _answer_cached(self, head: CachedHead, body: bytes, sent: PerRequest, values: Sequence[bytes]) -> None:
        """Answer a request whose head is that of an earlier one."""
        self._deadline, self._on_deadline = _NEVER, self._end_idle
        handler = head.handler
        if handler is not None:
            exchange = Exchange(self, head.scope, True, True)
        else:
            exchange = Exchange(self, head.scope_for(values), True, True)
            exchange.feed(body)
        exchange.cached, exchange.values = head, values
        self._answer(exchange, handler, body, sent)

    def _ignore_upgrade(self) -> None:
        """Continue with HTTP although the client offers to switch to another protocol.

        The parser would take what follows the head for that protocol. So it is replaced by a new one, which is given
        the headers that say how long the body is.
        """
        self._upgraded, self._replaying_head = False, True
        framing = [b"%b: %b\r\n" % one for one in self._headers if one[0] in (b"content-length", _CODING)]
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + (b"".join(framing) or b"content-length: 0\r\n") + b"\r\n")

    def _refuse(self, status: bytes) -> None:
        """Handle bytes that are not a request: send the answers before them, then a refusal, and close."""
        self._ignores_input = True
        answering, reading = self._answering, self._reading
        if answering is not None and answering.complete:
            answering.keep_alive = False
            self._waiting.clear()
        elif reading is not None and reading.started:
            self.transport.close()
        else:
            if reading is not None:
                reading.disconnect()
            self._end(status)

    def _invalid(self, status: bytes) -> Exception:
        self._refusal_status = status
        return ValueError(status)

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._head = self._head or 1
        self._parsed_events += 1

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are ignored: they come after the headers were used, and without a bound.
        if self._in_head:
            self._headers.append((name.lower(), value))
            if len(name) == len(_CODING) and name.lower() == _CODING and value.lower() != b"chunked":
                raise self._invalid(b"501 Not Implemented")

    def on_headers_complete(self) -> None:
        if self._replaying_head:
            self._replaying_head, self._head = False, 0
            return
        if self._head > MAX_HEAD - SLICE:  # the first bytes may belong to the request before it
            size = len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if size > MAX_HEAD:
                raise self._invalid(_TOO_LONG)
        self._in_head, self._head, parser = False, 0, self._parser
        self._body_received = self._size = 0
        url = httptools.parse_url(self._url)
        raw: bytes = url.path
        path = raw.decode("ascii")
        version = parser.get_http_version()
        if version not in _VERSIONS:
            raise self._invalid(b"505 HTTP Version Not Supported")
        if url.host:
            # INVARIANT: a request has one host. A host in the target has precedence over the header.
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
        keep_alive = version == "1.1" and parser.should_keep_alive() and not self._limits.ending
        exchange = self._reading = Exchange(self, scope, keep_alive=keep_alive)
        answering = self._answering
        if answering is None:
            self._answer(exchange)
        elif self._route.is_endless(answering.scope):
            # A request behind an endless stream would never be answered, and a disconnect would not be noticed.
            self.transport.close()
        else:
            self._waiting.append(exchange)
            self.pause_reading()
        self._wait(BODY_S, self._body_timed_out)

    def on_body(self, body: bytes) -> None:
        self._parsed_events += 1
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
        # The next wait is for the answer, or for the next request if the answer has been sent.
        self._deadline = _NEVER if self._answering is not None else self._loop.time() + KEEP_ALIVE_S
        self._on_deadline = self._end_idle

    def pause_reading(self) -> None:
        self._paused = True
        self._update_reading()

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._schedule_parsing()
            self._update_reading()

    def _update_reading(self) -> None:
        """Read from the network while no pause is requested and all received data is parsed."""
        stop = self._paused or bool(self._unparsed)
        if stop == self._transport_paused or self.transport.is_closing():
            return
        self._transport_paused = stop
        if stop:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    # Answering

    def _answer(
        self, exchange: Exchange, handler: Handler | None = None, body: bytes = b"", sent: PerRequest = _NONE
    ) -> None:
        self._answering = exchange
        answering = exchange.run(self._route, handler, body, sent)
        # A fixed name: generating one takes a tenth of the time that creating the task takes.
        exchange.task = task = asyncio.Task(answering, loop=self._loop, name="request")
        self.server.tasks.add(task)

    def answered(self, exchange: Exchange) -> None:
        """Continue with the next request after an answer has been sent, if the connection stays open."""
        self.server.total_requests += 1
        now = self._idle_since = self._loop.time()
        self._answering = None
        if not exchange.keep_alive:
            self._close(still_sends=not exchange.complete)
            return
        if self._waiting:
            self._answer(self._waiting.popleft())
        elif self._reading is not None:
            self._wait(LINGER_S, self.transport.abort)
        elif not self._head:
            self._deadline, self._on_deadline = now + KEEP_ALIVE_S, self._end_idle
            if self._timer_at > self._deadline:
                self._set_timer(self._deadline)
        if self._paused and not self._waiting:
            self.resume_reading()

    def pause_writing(self) -> None:
        self.writable = asyncio.Event()
        self._stall_timer = self._loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self.writable is not None:
            self.writable.set()
            self.writable = None
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # Waiting

    def _wait(self, within_s: float, otherwise: Callable[[], None]) -> None:
        due = self._loop.time() + within_s
        self._deadline, self._on_deadline = due, otherwise
        if self._timer_at > due:
            self._set_timer(due)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(at, self._on_timer), at

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, _NEVER
        if self.transport.is_closing():
            return
        if self._loop.time() >= self._deadline:
            self._deadline, otherwise = _NEVER, self._on_deadline
            otherwise()
        elif self._deadline < _NEVER:
            self._set_timer(self._deadline)

    def _head_timed_out(self) -> None:
        if self._answering is None:
            self._end(b"408 Request Timeout")
        else:
            # The request waits while another is answered, and reading may be paused.
            self._wait(HEAD_S, self._head_timed_out)

    def _body_timed_out(self) -> None:
        if self._paused:
            self._wait(BODY_S, self._body_timed_out)  # reading is paused by this side
        elif self._reading is not None:
            self._reading.time_out()

    def _end_idle(self) -> None:
        if self._answering is None:
            self.transport.close()

    def _end(self, status: bytes) -> None:
        if self.transport.is_closing():
            return
        body = _refusal(status)
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self._close(still_sends=self._ignores_input)

    def _close(self, *, still_sends: bool) -> None:
        if still_sends and self.transport.can_write_eof():
            # If the connection were closed while the client still sends, it would lose the answer.
            self._ignores_input = True
            self.transport.write_eof()
            self._wait(LINGER_S, self.transport.abort)
        else:
            self.transport.close()


# The error code and message by status, for refusals before there is a request.
_REFUSALS = {
    b"408": ("E3002", "the request did not come in time; send it whole"),
    b"431": ("E3004", "the headers of the request are too long; send fewer or shorter ones"),
    b"503": ("E3001", "too many connections are open; wait, then connect again"),
}


def _refusal(status: bytes) -> bytes:
    """The body of an answer to data that is not a request: the envelope that every failure has."""
    code, words = _REFUSALS.get(status[:3], ("E3004", "what came is not a request of HTTP/1.1"))
    return orjson.dumps(refusal(Failure(code, words), os.urandom(16).hex()))


_NOT_CONNECTED: Any = None


def _authority(url: Any) -> bytes:
    host: bytes = b"[%b]" % url.host if b":" in url.host else url.host
    return host if url.port is None else b"%b:%d" % (host, url.port)


def _address(transport: asyncio.BaseTransport, which: str) -> tuple[str, int] | None:
    address: Any = transport.get_extra_info(which)
    return (address[0], address[1]) if address else None

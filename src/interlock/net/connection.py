"""HTTP/1.1 connections to one origin, at addresses that were judged before, without a task for a request.

A request is written at once to a connection of the pool, and the pieces of its answer go straight to a `Receiver`.
What holds for every connection:

    address     the pool connects to the addresses that it is given and to no other; TLS checks the certificate for
                the name
    once        a request is written to one connection and never written again
    heads       the head of an answer, with all informational answers before it, has at most `MAX_HEAD` bytes
    framing     sizes of chunks and trailers take at most `MAX_FRAMING` bytes more than the body; a connection that
                sends more is cut
    pacing      an answer is parsed in parts of `PART` bytes; after a part that took long, other work has its turn
    silence     a connection that sends anything while no request waits for an answer is cut
    ends        an answer that breaks off before its stated end is broken, and a body in an unknown coding is refused
    room        a pool may bound its connections; at most `MAX_IDLE` stay open without a request, for `IDLE_S`

Nothing is decompressed and no redirect is followed: a receiver sees the answer as it came.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, Protocol, cast

import httptools

_log = logging.getLogger("interlock.net.connection")

CONNECT_S = 10.0
IDLE_S = 30.0
MAX_IDLE = 128
MAX_HEAD = 1 << 16
MAX_FRAMING = 1 << 18
PART = 4096
# A connection that was idle for this long may have been closed meanwhile; the loop looks before it is used again.
_DOUBTFUL_S = 0.5
# Pieces of a body and messages in one part, after which other work has its turn.
_BUSY = 64
# An answer that was understood has this long to end, so that its connection can be used again.
_LINGER_S = 1.0
# An address that has not accepted a connection after this time is not waited for alone: the next one is tried as well.
_NEXT_S = 0.25

Find = Callable[[], Awaitable[Sequence[str]]]
# followed: the answer was whole, and more came behind it.
Trouble = Literal["broke off", "flooded", "unreadable", "followed"]


class Unreachable(Exception):  # noqa: N818 - a finding about the other side
    """Nothing was sent: no connection could be made."""


class Untrusted(Unreachable):
    """Nothing was sent: the other side's certificate is not trusted."""


class Receiver(Protocol):
    """Takes the answer to one request. Its methods must not raise."""

    def head(self, connection: HttpConnection, status: int, headers: Mapping[str, str]) -> None:
        """Take the status and the headers, whose names are in lower case."""
        ...

    def body(self, data: bytes) -> bool:
        """Take a piece of the body; returns whether that took long."""
        ...

    def done(self) -> None:
        """The answer is whole."""
        ...

    def broke(self, why: Trouble) -> None:
        """No more will come, and the answer is not whole."""
        ...


class Pool:
    """The connections to one origin.

    `find` returns the addresses to connect to, all of them allowed. It is asked whenever a connection is opened.
    `name` is the one that TLS checks. Beyond `most` connections nothing is sent. With `lenient`, answers of old servers
    are read too: lines of the head that end with LF alone, folded headers, control characters in values, spaces after
    the size of a chunk.
    """

    def __init__(
        self,
        find: Find,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        name: str = "",
        connect_s: float = CONNECT_S,
        most: int | None = None,
        lenient: bool = False,
        most_idle: int = MAX_IDLE,
    ) -> None:
        self._find = find
        self._port = port
        self._tls = tls
        self._name = name.removesuffix(".") if tls is not None else None
        self._connect_s = connect_s
        self._most = most
        self._lenient = lenient
        self._most_idle = most_idle
        self._idle: list[HttpConnection] = []
        self._open: set[HttpConnection] = set()
        self._dialled = 0
        self._closed = False
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def unused(self) -> bool:
        return not self._open and not self._dialled

    def send_now(self, request: bytes, receiver: Receiver, *, bodiless: bool = False) -> HttpConnection | None:
        """Write a request to a connection that has just been used; None if there is none, and nothing was sent.

        The answer to a `bodiless` request has no body, whatever its head says.
        """
        if not self._idle:
            return None
        connection = self._idle[-1]
        if not connection.usable or asyncio.get_running_loop().time() - connection.idle_since > _DOUBTFUL_S:
            return None
        self._idle.pop()
        connection.ask(request, receiver, bodiless=bodiless)
        return connection

    async def send(self, request: bytes, receiver: Receiver, *, bodiless: bool = False) -> HttpConnection:
        """Write a request and return. Raises Unreachable if nothing was sent."""
        connection = await self._take()
        connection.ask(request, receiver, bodiless=bodiless)
        return connection

    async def _take(self) -> HttpConnection:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if now - connection.idle_since > _DOUBTFUL_S:
                try:
                    for _ in range(2):  # in which the loop reads that it was closed: asyncio's own needs two turns
                        await asyncio.sleep(0)
                except asyncio.CancelledError:
                    connection.cut()
                    raise
            if connection.usable:
                return connection
        if self._closed or (self._most is not None and len(self._open) + self._dialled >= self._most):
            raise Unreachable
        return await self._dial()

    async def _dial(self) -> HttpConnection:
        self._dialled += 1
        try:
            where = await self._find()
            async with asyncio.timeout(self._connect_s):
                connection = await (self._connect(where[0]) if len(where) == 1 else self._connect_to_first(where))
        except ssl.SSLCertVerificationError as error:
            raise Untrusted(str(error)) from None
        except (OSError, TimeoutError) as error:  # the errors of TLS are among them
            raise Unreachable(str(error)) from None
        finally:
            self._dialled -= 1
        if self._closed:
            connection.cut()
            raise Unreachable
        return connection

    async def _connect(self, address: str) -> HttpConnection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: HttpConnection(self, lenient=self._lenient),
            address,
            self._port,
            ssl=self._tls,
            server_hostname=self._name,
        )
        return connection

    async def _connect_to_first(self, where: Sequence[str]) -> HttpConnection:
        """Connect to the first address that accepts. Another is tried when one has failed, or takes long."""
        left = list(where)
        attempts: set[asyncio.Task[HttpConnection]] = set()
        failed: BaseException = OSError("no address")
        try:
            while left or attempts:
                if left:
                    attempts.add(asyncio.create_task(self._connect(left.pop(0))))
                done, _ = await asyncio.wait(
                    attempts, timeout=_NEXT_S if left else None, return_when=asyncio.FIRST_COMPLETED
                )
                for attempt in done:
                    attempts.remove(attempt)
                    error = attempt.exception()
                    if error is None:
                        return attempt.result()
                    failed = error
        finally:
            for attempt in attempts:
                attempt.add_done_callback(_cut_late)
                attempt.cancel()
        raise failed

    def opened(self, connection: HttpConnection) -> None:
        self._open.add(connection)

    def lost(self, connection: HttpConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def give_back(self, connection: HttpConnection) -> None:
        """Keep a connection for another request, if there is room."""
        if self._closed or len(self._idle) >= self._most_idle:
            connection.cut()
            return
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(IDLE_S, self._close_idle)

    def _close_idle(self) -> None:
        self._sweep = None
        loop = asyncio.get_running_loop()
        retained = [one for one in self._idle if loop.time() - one.idle_since < IDLE_S]
        for connection in set(self._idle).difference(retained):
            connection.cut()
        self._idle = retained
        if retained:
            left_s = IDLE_S - (loop.time() - min(one.idle_since for one in retained))
            self._sweep = loop.call_later(max(left_s, 0.1), self._close_idle)

    def close(self) -> None:
        """Cut every connection. Receivers are not told."""
        self._closed = True
        self._idle.clear()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._open):
            connection.cut()


def _cut_late(attempt: asyncio.Task[HttpConnection]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().cut()


# many methods: one state machine per connection: the calls of the transport and of the parser, over the same fields
class HttpConnection(asyncio.Protocol):
    """One connection: a request, its answer, the next request."""

    def __init__(self, pool: Pool, *, lenient: bool = False) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        if lenient:
            self._parser.set_dangerous_leniencies(
                lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
            )
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._headers: dict[str, str] = {}
        # Progress of this answer: bytes parsed, bytes and pieces of the body. Then: the head was read, the answer is
        # complete, the connection can be used again, and the answer has no body.
        self._came = self._size = self._pieces = 0
        self._in_body = self._whole = self._keeps = self._bodiless = False
        # Whether length or framing shows where the body ends. Otherwise the end of the connection does.
        self._ends = True
        self._wrong: Trouble | None = None
        self._unread = bytearray()
        self._paused = self._scheduled = False
        self._lingers: asyncio.TimerHandle | None = None
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and self._receiver is None

    @property
    def _unwritten(self) -> bool:
        """Whether a part of the request is still to be written, though its answer is there."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def ask(self, request: bytes, receiver: Receiver, *, bodiless: bool = False) -> None:
        """Write a request, whose answer goes to `receiver`. With `bodiless`, the answer ends with its head."""
        assert self._transport is not None
        self._receiver = receiver
        self._came = self._size = 0
        self._in_body = self._whole = self._keeps = False
        self._bodiless = bodiless
        self._transport.write(request)

    def cut(self) -> None:
        """End now. The receiver is not told."""
        self._receiver = None
        self._unread.clear()
        if self._lingers is not None:
            self._lingers.cancel()
            self._lingers = None
        if self._transport is not None:
            self._transport.abort()

    def cut_for(self, receiver: Receiver) -> None:
        """End now, if the answer to `receiver` is still under way."""
        if self._receiver is receiver:
            self.cut()

    def linger(self) -> None:
        """Wait a moment for the end of an answer of which nothing more is needed, then cut the connection."""
        if self._lingers is None and not self._whole:
            self._lingers = asyncio.get_running_loop().call_later(_LINGER_S, self.cut)

    def pause(self) -> None:
        """Parse nothing more until `resume`."""
        self._paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        self._paused = False
        self._later()

    # The transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            self.cut()  # it would be taken for the answer to the next request
        elif len(data) <= PART and not self._unread and not self._paused:
            self._parse(data)
            self._settle()
        else:
            self._unread += data
            if not self._scheduled and not self._paused:
                self._turn()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._pool.lost(self)
        if not self._unread and not self._paused:
            self._finish()

    # Parsing

    def _later(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            if self._transport is not None and not self._transport.is_closing():
                self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Parse the parts of one turn of the event loop."""
        self._scheduled = False
        parts = 0
        while self._unread and self._receiver is not None and not self._paused:
            part = bytes(self._unread[:PART])
            del self._unread[:PART]
            parts += 1
            if (self._parse(part) or parts == 16) and self._unread:
                self._later()
                break
        self._settle()
        if self._unread and self._receiver is None:
            self.cut()
        if self._paused or self._scheduled:
            return
        if self._transport is None:
            self._finish()
        elif not self._transport.is_closing():
            self._transport.resume_reading()

    def _parse(self, part: bytes) -> bool:
        """Parse a part; returns whether that took long."""
        self._pieces = 0
        self._came += len(part)
        try:
            self._parser.feed_data(part)
        except httptools.HttpParserCallbackError:
            _log.exception("a receiver of an answer failed")
            self._wrong = "unreadable"
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._wrong = self._wrong or "unreadable"
        if (not self._in_body and self._came > MAX_HEAD) or self._came - self._size > MAX_FRAMING + self._size:
            self._wrong = "flooded"
        return self._pieces > _BUSY

    def _settle(self) -> None:
        """Act on what was parsed: the end of an answer, or something that is none."""
        receiver = self._receiver
        if self._wrong is not None:
            self.cut()
            if receiver is not None:
                receiver.broke(self._wrong)
        elif self._whole and receiver is not None and not self._paused:
            self._receiver = None
            if self._lingers is not None:
                self._lingers.cancel()
                self._lingers = None
            if self._unread or not self._keeps or not self.usable or self._unwritten:
                self.cut()
            else:
                self.idle_since = asyncio.get_running_loop().time()
                self._pool.give_back(self)
            receiver.done()

    def _finish(self) -> None:
        """The connection is gone, and all that came is parsed."""
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if self._in_body and not self._ends:
            receiver.done()
        else:
            receiver.broke("broke off")

    # The parser's calls

    def on_message_begin(self) -> None:
        self._headers = {}
        if self._whole:
            self._wrong = "followed"  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        before = self._headers.get(key)
        self._headers[key] = text if before is None else f"{before}, {text}"

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._receiver is None or self._wrong is not None:
            return
        self._in_body = True
        coding = self._headers.get("transfer-encoding")
        self._ends = coding is not None or "content-length" in self._headers or status in (204, 304)
        if coding is not None and coding.strip().lower() != "chunked":
            self._wrong = "unreadable"
            return
        self._receiver.head(self, status, self._headers)
        # The parser would wait for the body that the head announces, so the connection is not used again.
        self._whole = self._bodiless

    def on_chunk_header(self) -> None:
        self._pieces += 1

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        self._pieces += 1
        if self._receiver is not None and self._wrong is None and not self._whole and self._receiver.body(data):
            self._pieces += _BUSY

    def on_message_complete(self) -> None:
        self._pieces += 1
        self._whole = self._in_body
        self._keeps = self._parser.should_keep_alive()  # the parser forgets it right after

"""One connection from the tool, from its first byte to its last.

A turn is one request and its answer. It ends in one of four ways: the answer was passed on and another request may
follow; the client is refused (403, 400 or 429, and recorded); the upstream failed (502 or 504); or an answer was
already under way, and the connection is cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

import h11

from interlock.core.errors import Failure
from interlock.executors.egress.hello import DENIED, NotTlsError, read_hello
from interlock.executors.egress.policy import EgressRefusal, Seen
from interlock.executors.egress.target import Target, read_target, shown
from interlock.executors.egress.wire import Peer, RefusedError, TunnelStream, pump, until
from interlock.net import addresses

if TYPE_CHECKING:
    from interlock.executors.egress.streams import Record, Streams

Headers = list[tuple[bytes, bytes]]

# Hop-by-hop headers. A Connection header must not remove the headers that delimit a body.
_BETWEEN = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authentication-info", b"proxy-authorization",
        b"proxy-connection", b"te", b"trailer", b"upgrade", b"host",
    }
)  # fmt: skip
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


# many methods: one state machine per connection; one method per step of the protocol, over the same fields
class Conversation:
    """Serves one client connection of an `Egress`."""

    def __init__(self, egress: Record, streams: Streams) -> None:
        self._egress = egress
        self._limits = egress.limits
        self._stream = TunnelStream(streams, self._touch, self._touch)
        self._client = Peer(h11.SERVER, self._stream, self._limits.head_bytes)
        self._idle = self._total = asyncio.timeout(None)
        self._last_words = b""
        self._method, self._host = "", ""
        self._port: int | None = None
        self._begun = False

    async def hold(self) -> None:
        """Serve requests until either side closes the connection."""
        try:
            async with asyncio.timeout(self._limits.total_s) as self._total:
                while await self._turn():
                    pass
                await self._stream.farewell(self._last_words, self._limits.farewell_s)
        finally:
            self._stream.abort()

    async def _turn(self) -> bool:
        """Serve one request and its answer; returns whether another may follow."""
        self._method, self._host, self._port, self._begun = "", "", None, False
        try:
            async with asyncio.timeout(self._limits.idle_s) as self._idle:
                return await self._request()
        except RefusedError as refused:
            self._remember(refused)
            self._fail(refused.status, refused.reason)
        except TimeoutError:
            if self._client.http.our_state is not h11.IDLE:
                self._fail(504, "the upstream took too long")
        except OSError:
            self._fail(502, "the upstream could not be reached or broke off")
        return False

    async def _request(self) -> bool:
        async with asyncio.timeout(self._limits.head_s):
            request = await self._client.hear()
        if not isinstance(request, h11.Request):
            return False
        target = self._judge(request)
        places = await self._places(target)
        if len(self._egress.requests) >= self._limits.requests:
            raise RefusedError("the call has made as many requests as it may", status=429, limit=True)
        seen = Seen(method=self._method, host=target.host, port=target.port)
        self._begun = True
        self._egress.begin(seen)
        try:
            upstream = TunnelStream(
                await self._dial(places, target.port),
                lambda size: self._received(seen, size),
                lambda size: self._sending(seen, size),
            )
            try:
                if target.path is None:
                    await self._tunnel(target, upstream, seen)
                    return False
                return await self._exchange(request, target, upstream, seen)
            finally:
                upstream.abort()
        except BaseException as error:
            seen.error = self._broken_off(seen, error)
            raise
        finally:
            self._egress.end(seen)

    def _broken_off(self, seen: Seen, error: BaseException) -> str | None:
        """Why a request was not completed, as the status of a span; None if it was."""
        if isinstance(error, RefusedError):
            return "RESOURCE_EXHAUSTED" if error.limit else "AUTHORIZATION_DENIED"
        if isinstance(error, TimeoutError) or self._idle.expired() or self._total.expired():
            return "DEADLINE_EXCEEDED"
        if isinstance(error, asyncio.CancelledError):
            return None if seen.whole else "CANCELED"  # the tool has ended, and its tunnels with it
        return "UPSTREAM_FAILURE" if isinstance(error, OSError) else "EXECUTION_FAILED"

    def _judge(self, request: h11.Request) -> Target:
        """Return the target of a request, if it is unambiguous and allowed."""
        self._method, text = request.method.decode("ascii"), request.target.decode("ascii")
        self._host = shown(text)
        try:
            target = read_target(self._method, text)
        except ValueError as error:
            raise RefusedError(str(error)) from None
        self._host, self._port = target.host, target.port
        headers = dict(request.headers)  # h11 lets none of the three below through twice
        if b"host" in headers and not target.is_named_by(headers[b"host"].decode("latin-1")):
            raise RefusedError("the Host header names another place than the request line")
        chunked, length = b"transfer-encoding" in headers, headers.get(b"content-length")
        if (chunked and length is not None) or (target.path is None and (chunked or int(length or 0) > 0)):
            raise RefusedError("where the request ends can be read in two ways", status=400)
        objection = self._egress.policy.objection(target.host, target.port)
        if objection is not None:
            raise RefusedError(objection)
        return target

    async def _places(self, target: Target) -> Sequence[str]:
        """Return the addresses of a target, every one of them checked."""
        egress = self._egress
        try:
            async with asyncio.timeout(self._limits.resolve_s):
                return await addresses.checked(
                    target.host, allow_private=egress.policy.allow_private, resolve=egress.resolve
                )
        except Failure:
            raise RefusedError(f"`{target.host}` leads to an address that is not public") from None

    async def _dial(self, places: Sequence[str], port: int) -> Streams:
        """Connect to the first address that answers, with an equal share of the time for each."""
        # INVARIANT: only an address is dialled, and one of those just checked; no name is resolved again.
        each_s = self._limits.connect_s / len(places)
        for place in places[:-1]:
            try:
                async with asyncio.timeout(each_s):
                    return await self._egress.dial(place, port)
            except OSError:
                pass  # the next one may answer
        async with asyncio.timeout(each_s):
            return await self._egress.dial(places[-1], port)

    async def _exchange(self, request: h11.Request, target: Target, upstream: TunnelStream, seen: Seen) -> bool:
        assert target.path is not None
        far = Peer(h11.CLIENT, upstream, self._limits.head_bytes)
        headers = [(b"host", target.host_header.encode()), *_passed_on(request.headers), (b"connection", b"close")]
        await far.send(h11.Request(method=request.method, target=target.path, headers=headers))
        await until(self._download(far, seen), self._upload(far))
        http = self._client.http
        if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
            return False
        http.start_next_cycle()
        return True

    async def _upload(self, far: Peer) -> None:
        more = True
        while more:
            event = await self._client.hear()
            more = isinstance(event, h11.Data)
            try:
                await far.send(h11.Data(data=event.data) if isinstance(event, h11.Data) else h11.EndOfMessage())
            except (OSError, h11.LocalProtocolError):
                return  # an upstream may answer before it has read everything

    async def _download(self, far: Peer, seen: Seen) -> None:
        while True:
            event = await far.hear()
            if isinstance(event, h11.Response):
                seen.status = event.status_code
                answer = h11.Response(
                    status_code=event.status_code, headers=_passed_on(event.headers), reason=event.reason
                )
                await self._client.send(answer)
            elif isinstance(event, h11.Data):
                await self._client.send(h11.Data(data=event.data))
            elif isinstance(event, h11.EndOfMessage):
                seen.whole = True
                return await self._client.send(h11.EndOfMessage())
            elif isinstance(event, h11.InformationalResponse):
                if event.status_code == 100 and self._client.http.they_are_waiting_for_100_continue:
                    await self._client.send(h11.InformationalResponse(status_code=100, headers=[]))
            else:
                raise ConnectionError("the upstream broke off")

    async def _tunnel(self, target: Target, upstream: TunnelStream, seen: Seen) -> None:
        await self._client.hear()  # the end of a request without a body
        await self._client.send(h11.Response(status_code=200, headers=[], reason=b"connection established"))
        seen.status = 200
        try:
            async with asyncio.timeout(self._limits.head_s):
                hello = await self._hello(target)
        except NotTlsError as error:
            self._last_words = DENIED
            raise RefusedError(f"a tunnel to `{target.host}` was not used for it: {error}") from None
        seen.whole = True
        if hello:
            await upstream.write(hello)
            await until(pump(upstream, self._stream), pump(self._stream, upstream))

    async def _hello(self, target: Target) -> bytes:
        """Return the bytes of the client up to its TLS hello, which names the target; empty if it sent nothing."""
        data = self._client.http.trailing_data[0]
        while (hello := read_hello(data)) is None:
            more = await self._stream.read()
            if not more and not data:
                return b""
            if not more:
                raise NotTlsError("its TLS hello breaks off")
            data += more
        # A client that connects to an address names no server, so there is no name to check.
        hello.must_name(target.host if addresses.parse(target.host) is None else None)
        return data

    def _fail(self, status: int, text: str) -> None:
        """Answer with a status if no answer has begun; else cut the connection, so that the answer is not taken for
        complete.
        """
        http = self._client.http
        if http.our_state is h11.SEND_BODY:
            self._stream.reset()
        if http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = b"" if self._method == "HEAD" else f"{text}\n".encode()
        headers: Headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        answer = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
        parts = [http.send(event) for event in (answer, h11.Data(data=body), h11.EndOfMessage())]
        self._last_words = b"".join(part for part in parts if part)

    def _remember(self, refused: RefusedError) -> None:
        self._egress.refuse(
            EgressRefusal(
                host=self._host,
                port=self._port,
                method=self._method,
                reason=refused.reason,
                at=self._egress.clock.now_ms(),
                code="E3407" if refused.limit else "E3406",
                begun=self._begun,
            )
        )

    def _received(self, seen: Seen, size: int) -> None:
        seen.bytes_in += size
        self._spend(size)

    def _sending(self, seen: Seen, size: int) -> None:
        self._spend(size)
        seen.bytes_out += size

    def _spend(self, size: int) -> None:
        self._touch(size)
        self._egress.wire_bytes += size
        if self._egress.wire_bytes > self._limits.wire_bytes:
            raise RefusedError("the call has moved as many bytes as it may", status=429, limit=True)

    def _touch(self, _size: int) -> None:
        """Reset the idle timer after some bytes moved."""
        if not self._idle.expired():
            self._idle.reschedule(asyncio.get_running_loop().time() + self._limits.idle_s)


def _passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the end-to-end headers. The Host header is written by us."""
    pairs = list(headers)
    named = {name.strip().lower() for key, value in pairs if key == b"connection" for name in value.split(b",")}
    return [(key, value) for key, value in pairs if key in _FRAMING or key not in _BETWEEN | named]

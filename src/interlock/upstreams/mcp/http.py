"""MCP over HTTP: the SDK's client transport, run by one task of ours, with network failures mapped to requests.

The SDK's transport ends the whole conversation when one request cannot be sent, and says little about why a server
refused one. It is therefore given an HTTP client whose transport converts such failures into error answers to the
request concerned. Each carries a ticket under which the real Failure is stored here; a server cannot forge one.

Imported only when an upstream is reached by its address, because these libraries are slow to load.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

import httpx2
import mcp_types
import orjson
from mcp.client._transport import ReadStream, WriteStream
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.inbound import encode_header_value, find_invalid_x_mcp_header, mcp_param_headers, x_mcp_header_map
from mcp.shared.message import ClientMessageMetadata, SessionMessage

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.store import addresses
from interlock.upstreams.mcp.pacing import PacedNetwork
from interlock.upstreams.mcp.session import Session
from interlock.upstreams.response_limits import PER_TURN, SMALL, Allowance, Intake, in_thread
from interlock.upstreams.wire import Tls, retry_after_ms

CONNECT_S = 10.0
CLOSE_S = 5.0
_TICKET = "interlock.ticket"
# The field names and line ends around the data of an event.
_FRAMING = 4096
_PIECE = 4096
_EVENT_END = re.compile(rb"(?>\r\n|\n|\r){2}")
_EVENT = 4  # lines of an event
_REQUEST = 100  # reopening a stream costs as much as this many messages
_FLOODED = "the upstream sent far more messages than it was asked for, so the conversation was ended"


class Http:
    """A conversation over HTTP."""

    def __init__(self, session: Session, allowance: Allowance) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._session = session
        self._allowance = allowance
        self._flooded = False
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[WriteStream[SessionMessage]] = asyncio.get_running_loop().create_future()
        self._troubles: dict[str, Failure] = {}
        self._transport: _Sorting | None = None
        self._write: WriteStream[SessionMessage] | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        url: str,
        headers: Mapping[str, str],
        session: Session,
        *,
        clock: Clock,
        intake: Intake,
        allowance: Allowance,
        allow_private: bool = False,
        tls: Tls | None = None,
    ) -> Http:
        """Prepare a conversation; nothing is sent yet. Raises E3406 for an address that is not allowed."""
        place = httpx2.URL(url)
        address = (await addresses.checked(place.host, allow_private=allow_private))[0]
        http = cls(session, allowance)
        secured = (tls or Tls()).context() if place.scheme == "https" else False
        transport = _Sorting(address, http._troubles, clock, secured, _Meter(intake, allowance, http._flood))
        http._transport = transport
        http._task = asyncio.create_task(http._run(url, headers, transport, intake.max_bytes))
        try:
            http._write = await http._ready
        except BaseException:
            http._task.cancel()
            raise
        return http

    @property
    def session_id(self) -> str | None:
        """The server's id of this conversation, if its era has such ids."""
        return None if self._transport is None else self._transport.session_id

    async def _run(self, url: str, headers: Mapping[str, str], transport: _Sorting, max_bytes: int) -> None:
        # INVARIANT: the SDK's cancel scopes are entered and left by this task alone, whoever calls.
        reason = "the connection to the upstream was closed"
        timeout = httpx2.Timeout(CONNECT_S, read=None)
        try:
            async with (
                httpx2.AsyncClient(
                    headers={**headers, "accept-encoding": "identity"},
                    transport=transport,
                    timeout=timeout,
                    trust_env=False,
                ) as client,
                streamable_http_client(url, http_client=client, max_sse_event_size=max_bytes + _FRAMING) as (
                    read,
                    write,
                ),
            ):
                self._ready.set_result(write)
                reader, stop = asyncio.create_task(self._read(read)), asyncio.create_task(self._stop.wait())
                try:
                    await asyncio.wait({reader, stop}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in (reader, stop):
                        task.cancel()
        except Exception as error:  # noqa: BLE001 - whatever broke in there, the conversation is over
            reason = f"the connection to the upstream broke: {type(error).__name__}"
        finally:
            if not self._ready.done():
                self._ready.set_exception(Failure("E3502", reason, details={"sent": False}))
            self.ended.set_result(_FLOODED if self._flooded else reason)

    def _flood(self) -> None:
        self._flooded = True
        self.abort()

    async def _read(self, read: ReadStream[SessionMessage | Exception]) -> None:
        async for item in read:
            if isinstance(item, SessionMessage):
                self._hear(item.message.model_dump(by_alias=True, exclude_unset=True))

    def _hear(self, message: Json) -> None:
        error = cast("Json", message.get("error") or {})
        data = error.get("data")
        ticket = cast("Json", data).get(_TICKET) if isinstance(data, dict) else None
        failure = self._troubles.pop(ticket, None) if isinstance(ticket, str) else None
        if failure is None:
            if self._session.hear(message):
                self._allowance.give(_EVENT)
        else:
            self._session.fail(message["id"], failure)

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        import anyio

        assert self._write is not None
        coded = {name: encode_header_value(value) if name == "mcp-name" else value for name, value in headers.items()}
        parsed = mcp_types.jsonrpc_message_adapter.validate_python(message, by_name=False)
        try:
            await self._write.send(SessionMessage(parsed, ClientMessageMetadata(headers=coded)))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            raise Failure("E3502", "the connection to the upstream is closed", details={"sent": False}) from None

    def abort(self) -> None:
        self._stop.set()

    async def close(self) -> None:
        assert self._task is not None
        self._stop.set()
        await asyncio.wait({self._task}, timeout=CLOSE_S)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})


class _Sorting(httpx2.AsyncBaseTransport):
    """Sends requests to the one address that was checked, and converts network failures into answers."""

    def __init__(
        self, address: str, troubles: dict[str, Failure], clock: Clock, tls: ssl.SSLContext | bool, meter: _Meter
    ) -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=30.0)
        self._inner = httpx2.AsyncHTTPTransport(verify=tls, trust_env=False, limits=limits)
        # The library has no public way to choose the network of a transport.
        pool: Any = self._inner._pool  # pyright: ignore[reportPrivateUsage]
        pool._network_backend = PacedNetwork(meter.charge)
        self._address = address
        self._troubles = troubles
        self._clock = clock
        self._meter = meter
        self.session_id: str | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        # INVARIANT: a name is resolved and checked once; connections go to that address whatever it resolves to later.
        pinned = httpx2.Request(
            request.method,
            request.url.copy_with(host=self._address),
            headers=request.headers,
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": request.url.host},
        )
        if request.method != "POST":
            self._meter.charge(_REQUEST if request.method == "GET" else 0)
            return self._counted(_plain(await self._inner.handle_async_request(pinned)), answers=False)
        try:
            response = _plain(await self._inner.handle_async_request(pinned))
            failure = self._judged(request, response)
            if failure is not None:
                await response.aclose()
                return self._instead(failure)
            if not response.headers.get("content-type", "").lower().startswith("application/json"):
                return self._counted(response, answers=True)
            return await self._meter.whole(response)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout):
            failure = Failure("E3502", "the upstream cannot be reached", details={"sent": False})
        except httpx2.TransportError as error:
            failure = Failure("E3502", f"the connection broke: {type(error).__name__}", details={"sent": True})
        except Failure as refused:
            failure = refused
        return self._instead(failure)

    def _counted(self, response: httpx2.Response, *, answers: bool) -> httpx2.Response:
        """Wrap a response so that its events are counted before the SDK sees them."""

        def instead(failure: Failure) -> bytes:
            # The SDK gives an error the id of the request that the stream answers.
            error = {"code": -32000, "message": failure.message, "data": {_TICKET: self._ticket(failure)}}
            return b"event: message\ndata: " + orjson.dumps({"jsonrpc": "2.0", "id": 0, "error": error}) + b"\n\n"

        stream = cast("httpx2.AsyncByteStream", response.stream)
        counted = _Events(stream, self._meter, instead if answers else None)
        return httpx2.Response(
            response.status_code, headers=response.headers, stream=counted, extensions=response.extensions
        )

    def _judged(self, request: httpx2.Request, response: httpx2.Response) -> Failure | None:
        """Convert a status outside the protocol to a failure."""
        status = response.status_code
        self.session_id = request.headers.get("mcp-session-id")
        if status == 429:
            pause = retry_after_ms(response.headers.get("retry-after"), self._clock.now_ms())
            return Failure("E3504", "the upstream asks for a pause", retry_after_ms=pause, details={"sent": False})
        if status in (401, 403):
            return Failure(
                "E3502",
                f"the upstream does not accept our credentials ({status})",
                details={"sent": False},
                resolution="store what it wants to be shown (interlock secrets set NAME), and add it with"
                " --secret Authorization=NAME, or the header that it asks for",
            )
        if status == 404 and "mcp-session-id" in request.headers:
            return Failure(
                "E3502",
                "the upstream has forgotten the session",
                details={"sent": False, "reason": "session_gone"},
            )
        if status >= 500 and not response.headers.get("content-type", "").lower().startswith("application/json"):
            return Failure("E3502", f"the upstream answered with status {status}", details={"sent": True})
        return None

    def _instead(self, failure: Failure) -> httpx2.Response:
        error = {"code": -32000, "message": failure.message, "data": {_TICKET: self._ticket(failure)}}
        return httpx2.Response(502, json={"jsonrpc": "2.0", "id": None, "error": error})

    def _ticket(self, failure: Failure) -> str:
        """Store a failure and return the ticket under which the answer finds it."""
        ticket = secrets.token_hex(8)
        self._troubles[ticket] = failure
        while len(self._troubles) > 1000:  # notifications have no answer that would fetch theirs
            del self._troubles[next(iter(self._troubles))]
        return ticket

    async def aclose(self) -> None:
        await self._inner.aclose()


def _plain(response: httpx2.Response) -> httpx2.Response:
    """Refuse a compressed response: a few bytes could expand to any number, and we asked for none."""
    if response.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
        raise Failure("E3401", "the upstream answered in a compressed form, which it was asked not to do")
    return response


class _Meter:
    """The limits of one conversation."""

    def __init__(self, intake: Intake, allowance: Allowance, flood: Callable[[], None]) -> None:
        self.intake = intake
        self.allowance = allowance
        self._flood = flood

    def charge(self, messages: int, size: int = 0) -> None:
        """Charge what arrived; ends the conversation and raises if it is a flood."""
        if not self.allowance.take(messages, size):
            self._flood()
            raise self.intake.flooded()

    async def whole(self, response: httpx2.Response) -> httpx2.Response:
        """Read the whole body of a response: one that breaks off does so here, where it can be handled."""
        body = bytearray()
        chunks = 0
        try:
            async for chunk in cast("httpx2.AsyncByteStream", response.stream):
                body += chunk
                chunks += 1
                await self.chunk(chunks)
                if len(body) > self.intake.max_bytes:
                    raise self.intake.too_large()
        finally:
            await response.aclose()
        self.allowance.give(chunks)  # it was the answer to a request
        await self.check(bytes(body))
        headers = {**response.headers, "content-type": "application/json"}  # in UTF-8, whatever charset it names
        return httpx2.Response(response.status_code, headers=headers, stream=httpx2.ByteStream(bytes(body)))

    async def chunk(self, number: int) -> None:
        """Charge a chunk of a response; after some chunks, yield to others."""
        self.charge(1)
        if number % PER_TURN == 0:
            await asyncio.sleep(0)

    async def check(self, data: bytes) -> None:
        if len(data) > SMALL:
            await in_thread(self.intake.check, data)
        else:
            self.intake.check(data)


class _Events(httpx2.AsyncByteStream):
    """A stream of server-sent events, each counted as a whole before it is passed on."""

    def __init__(
        self, stream: httpx2.AsyncByteStream, meter: _Meter, instead: Callable[[Failure], bytes] | None
    ) -> None:
        self._stream = stream
        self._meter = meter
        self._instead = instead

    async def __aiter__(self) -> AsyncIterator[bytes]:
        held = bytearray()
        charged, chunks, good = 0, 0, True
        try:
            async for chunk in self._stream:
                chunks += 1
                charged += 1
                await self._meter.chunk(chunks)
                for at in range(0, len(chunk), _PIECE):
                    piece = chunk[at : at + _PIECE]
                    lines = piece.count(b"\n") + piece.count(b"\r")
                    self._meter.charge(lines, len(piece))
                    charged += lines + len(piece) // 4096
                    held += piece
                    if (whole := await self._whole(held, len(piece))) is not None:
                        yield whole
                    if lines > PER_TURN:
                        await asyncio.sleep(0)
            if held:
                yield bytes(held)
        except Failure as failure:
            good = False
            if self._instead is not None:
                yield self._instead(failure)
        finally:
            if good and self._instead is not None:
                self._meter.allowance.give(charged)  # it was the answer to a request

    async def _whole(self, held: bytearray, new: int) -> bytes | None:
        """Return the events that have arrived whole, checked; the rest stays in `held`.

        Its last `new` bytes are new.
        """
        end = 0
        for match in _EVENT_END.finditer(held, max(0, len(held) - new - 4)):
            end = match.end()
        if not end:
            if len(held) > self._meter.intake.max_bytes + _FRAMING:
                raise self._meter.intake.too_large()
            return None
        whole = bytes(held[:end])
        del held[:end]
        await self._meter.check(whole)
        return whole

    async def aclose(self) -> None:
        await self._stream.aclose()


def header_parameters(schema: Json) -> list[list[str]]:
    """Return the arguments that a server wants repeated in headers: the path to each, then its header; E3105 if
    invalid.
    """
    if (fault := find_invalid_x_mcp_header(schema)) is not None:
        raise Failure("E3105", fault)
    return [[*path, header] for path, header in x_mcp_header_map(schema).items()]


def parameter_headers(wanted: list[list[str]], arguments: Json) -> dict[str, str]:
    """Make those headers for one call."""
    return mcp_param_headers({tuple(path): header for *path, header in wanted}, arguments)

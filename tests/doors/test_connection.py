"""HTTP as it is spoken on the wire: in order, within bounds, and answered once, whatever else the client sends."""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from interlock.core.errors import Failure
from interlock.http import connection
from interlock.http.asgi import App, Receive, Scope, Send, answer, read_body
from interlock.http.connection import ServerConnection
from interlock.http.route import PER_REQUEST, Handler, PerRequest, Reply, ResponseStream, Route
from tests.support.connections import Place
from tests.support.connections import place as place
from tests.thorough import examples


def request(what: str, body: bytes = b"", *lines: str) -> bytes:
    head = [f"{what} HTTP/1.1", "host: here", *lines, *([f"content-length: {len(body)}"] if body else [])]
    return "\r\n".join([*head, "", ""]).encode() + body


async def test_requests_that_come_together_are_answered_in_turn(place: Place) -> None:
    wire = await place.wire()
    wire.send(*(request("POST /echo", str(number).encode()) for number in range(50)))
    assert [(await wire.answer())[1] for _ in range(50)] == [str(number).encode() for number in range(50)]


async def test_a_request_behind_a_slow_one_waits(place: Place) -> None:
    wire = await place.wire()
    wire.send(request("GET /wait"), request("POST /echo", b"after"))
    other = await place.wire()
    other.send(request("POST /echo", b"other"))
    assert (await other.answer())[1] == b"other"
    place.gate.set()
    assert (await wire.answer())[1] == b"waited"
    assert (await wire.answer())[1] == b"after"


async def test_what_is_no_request_takes_nothing_from_the_one_before_it(place: Place) -> None:
    wire = await place.wire()
    wire.send(request("GET /wait"), b"\0\0 what is this\r\n\r\n")
    other = await place.wire()
    other.send(request("POST /echo", b"other"))
    await other.answer()
    place.gate.set()
    head, body = await wire.answer()
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in head
    assert body == b"waited"
    assert await wire.rest() == b""


async def test_what_is_no_request_is_told_so(place: Place) -> None:
    wire = await place.wire()
    wire.send(b"\0\0 what is this\r\n\r\n")
    assert (await wire.answer())[0].startswith(b"HTTP/1.1 400 ")
    assert await wire.rest() == b""


BROKEN = b"POST %b HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"


async def test_a_head_that_is_too_long_takes_nothing_from_the_request_before_it(place: Place) -> None:
    wire, other = await place.wire(), await place.wire()
    wire.send(request("GET /wait"))
    await place.waiting.wait()
    wire.send(b"GET /echo HTTP/1.1\r\n", *(b"x-long: %b\r\n" % (b"x" * 1000) for _ in range(80)))
    other.send(request("POST /echo", b"other"))
    await other.answer()
    place.gate.set()
    assert (await wire.answer())[1] == b"waited"
    # Whether the next one was refused by then is for the network to say.
    assert (await wire.rest()).partition(b"\r\n")[0] in (b"", b"HTTP/1.1 431 Request Header Fields Too Large")


async def test_a_body_that_breaks_off_is_refused_once_and_its_application_is_told(place: Place) -> None:
    wire = await place.wire()
    wire.send(BROKEN % b"/watch", b"what is this\r\n")
    assert (await wire.answer())[0].startswith(b"HTTP/1.1 400 ")
    async with asyncio.timeout(60):
        await place.gone.wait()
    assert await wire.rest() == b""


async def test_a_body_that_breaks_off_after_its_answer_is_not_answered_again(place: Place) -> None:
    wire = await place.wire()
    wire.send(BROKEN % b"/early")
    assert (await wire.answer())[1] == b"early"
    wire.send(b"what is this\r\n")
    assert await wire.rest() == b""


async def test_a_body_that_breaks_off_cuts_an_answer_that_has_begun(place: Place) -> None:
    wire = await place.wire()
    wire.send(BROKEN % b"/stream")
    async with asyncio.timeout(60):
        await wire.reader.readuntil(b"3\r\ntwo\r\n")
    wire.send(b"what is this\r\n")
    assert await wire.rest() == b""


async def test_a_body_is_asked_for_when_it_is_wanted_and_only_then(place: Place) -> None:
    wire = await place.wire()
    wire.send(request("POST /echo", b"", "content-length: 4", "expect: 100-Continue"))
    assert (await wire.answer())[0] == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.send(b"body")
    assert (await wire.answer())[1] == b"body"
    wire.send(request("POST /early", b"", "content-length: 4", "expect: 100-continue"))
    assert (await wire.answer())[1] == b"early"


async def test_answers_without_a_length_are_sent_as_they_come(place: Place) -> None:
    wire = await place.wire()
    wire.send(request("GET /stream"))
    async with asyncio.timeout(60):
        begun = await wire.reader.readuntil(b"3\r\ntwo\r\n")
    assert b"transfer-encoding: chunked" in begun
    assert begun.endswith(b"\r\n\r\n4\r\none \r\n3\r\ntwo\r\n")
    place.gate.set()
    async with asyncio.timeout(60):
        assert await wire.reader.readuntil(b"0\r\n\r\n") == b"0\r\n\r\n"
    wire.send(request("HEAD /echo"), request("GET /nothing"), request("POST /echo", b"x"))
    async with asyncio.timeout(60):
        assert b"content-length: 0" in await wire.reader.readuntil(b"\r\n\r\n")
        assert (await wire.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204 No Content\r\n")
    assert (await wire.answer())[1] == b"x"


@pytest.mark.parametrize("path", ["/split", "/split/stream", "/raise", "/nowhere"])
async def test_an_application_that_breaks_is_an_error_and_nothing_of_it_is_sent(place: Place, path: str) -> None:
    wire = await place.wire()
    wire.send(request(f"GET {path}"))
    head, _ = await wire.answer()
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"cookie" not in head
    assert await wire.rest() == b""


async def test_an_answer_of_another_length_than_it_said_is_cut_off(place: Place) -> None:
    wire = await place.wire()
    wire.send(request("GET /short"))
    assert (await wire.rest()).startswith(b"HTTP/1.1 500 ")


async def test_a_client_that_goes_is_noticed(place: Place) -> None:
    wire = await place.wire()
    wire.send(request("GET /watch"))
    wire.writer.close()
    async with asyncio.timeout(60):
        await place.gone.wait()


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\nUpgrade: h2c\r\n"


async def test_an_offer_to_speak_another_protocol_is_passed_over_and_the_body_is_read(place: Place) -> None:
    lengths = (b"Content-Length: 3\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")
    for framed in lengths:
        wire = await place.wire()
        request = b"POST /echo HTTP/1.1\r\nHost: x\r\n" + OFFER + framed
        wire.send(request, request)
        for _ in range(2):
            assert (await wire.answer())[1] == b"abc"
        for byte in request:
            wire.send(bytes((byte,)))
            await wire.writer.drain()
        assert (await wire.answer())[1] == b"abc"
        wire.send(b"GET /early HTTP/1.1\r\nHost: x\r\n", OFFER, b"\r\n")
        assert (await wire.answer())[1] == b"early"
        wire.send(b"POST /echo HTTP/1.1\r\nHost: x\r\n", OFFER.replace(b"Upgrade,", b"close, Upgrade,"), framed)
        assert (await wire.answer())[1] == b"abc"
        assert await wire.rest() == b""


async def test_a_client_that_has_no_more_to_ask_hears_the_answers_it_waits_for(place: Place) -> None:
    wire = await place.wire()
    wire.send(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\nGET /early HTTP/1.1\r\nHost: x\r\n\r\n")
    await place.waiting.wait()
    wire.writer.write_eof()
    place.gate.set()
    assert (await wire.answer())[1] == b"waited"
    assert (await wire.answer())[1] == b"early"
    assert await wire.rest() == b""


async def test_whoever_watches_is_told_of_a_client_that_has_no_more_to_ask(place: Place) -> None:
    wire = await place.wire()
    wire.send(b"POST /watch HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\na")
    wire.writer.write_eof()
    assert await wire.rest() == b""
    assert place.gone.is_set()


@pytest.mark.parametrize("before", [b"", b"GET /early HTTP/1.1\r\nHost: x\r\n\r\n"])
@pytest.mark.parametrize("long", [b"A: " + b"a" * 66_000 + b"\r\n", b"A: b\r\n" * 12_000])
async def test_a_head_that_is_too_long_is_refused_although_it_comes_at_once(
    place: Place, before: bytes, long: bytes
) -> None:
    wire = await place.wire()
    wire.send(before, b"GET /early HTTP/1.1\r\nHost: x\r\n", long, b"\r\n")
    said = await wire.rest()
    assert said.count(b"HTTP/1.1 200") == bool(before)
    assert bool(before) or said.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /echo HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n", b"501"),
        (b"POST /echo HTTP/1.1\r\ntransfer-encodinG: gzip\r\nTransfer-Encoding: chunked\r\n", b"501"),
        (b"GET /early HTTP/2.0\r\n", b"505"),
        (b"CONNECT evil.example:80 HTTP/1.1\r\n", b"400"),
    ],
)
async def test_what_we_do_not_speak_is_refused(place: Place, head: bytes, status: bytes) -> None:
    wire = await place.wire()
    wire.send(head, b"Host: x\r\n\r\n0\r\n\r\n")
    assert (await wire.rest()).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize(
    ("target", "host"),
    [(b"http://evil.example/host", b"evil.example"), (b"http://[::1]:81/host", b"[::1]:81"), (b"/host", b"x")],
)
async def test_whom_a_request_is_for_is_said_by_its_target_first(place: Place, target: bytes, host: bytes) -> None:
    wire = await place.wire()
    wire.send(b"GET ", target, b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await wire.answer())[1] == host


async def test_an_old_client_is_answered_and_left(place: Place) -> None:
    wire = await place.wire()
    wire.send(b"POST /echo HTTP/1.0\r\ncontent-length: 2\r\n\r\nhi")
    head, body = await wire.answer()
    assert b"connection: close" in head
    assert body == b"hi"
    assert await wire.rest() == b""


async def test_a_connection_that_is_not_used_is_closed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "KEEP_ALIVE_S", 0.05)
    wire = await place.wire()
    wire.send(request("POST /echo", b"x"))
    await wire.answer()
    assert await wire.rest() == b""


async def test_however_requests_are_cut_into_pieces_they_are_the_same(place: Place) -> None:
    whole = b"".join((
        request("POST /echo", b"first"),
        b"POST /echo HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n3\r\nsec\r\n3\r\nond\r\n0\r\n\r\n",
        request("GET /early"),
        request("POST /echo", b"last", "connection: close"),
    ))  # fmt: skip
    loop = asyncio.get_running_loop()

    async def spoken(cuts: list[int]) -> None:
        wire = await place.wire()
        for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            wire.send(whole[start:end])
            await wire.writer.drain()
            await asyncio.sleep(0)
        answers = [(await wire.answer())[1] for _ in range(4)]
        assert answers == [b"first", b"second", b"early", b"last"]
        assert await wire.rest() == b""

    @settings(max_examples=examples(40))
    @given(st.lists(st.integers(1, len(whole) - 1), max_size=6, unique=True).map(sorted))
    def check(cuts: list[int]) -> None:
        asyncio.run_coroutine_threadsafe(spoken(cuts), loop).result(30)

    await asyncio.to_thread(check)


async def test_a_client_of_http_1_0_reads_a_stream_to_the_end_of_the_connection(place: Place) -> None:
    wire = await place.wire()
    place.gate.set()
    wire.send(b"GET /stream HTTP/1.0\r\n\r\n")
    head, _, body = (await wire.rest()).partition(b"\r\n\r\n")
    assert (b"transfer-encoding" in head, b"connection: close" in head, body) == (False, True, b"one two")


# A head that comes again


class Sink(asyncio.Transport):
    """The other end of a connection that is not there: keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else None


class Forgetful(ServerConnection):
    """A connection that parses every head anew."""

    def _cache_head(self, data: bytes) -> None:
        pass


# More turns of the loop than it takes to answer all that comes at once; nothing here waits for anything else.
TURNS = 50


class Echo:
    """Says what it was sent, and keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        told = {name: scope[name] for name in ("method", "path", "raw_path", "query_string", "http_version")}
        self.seen.append((told, list(scope["headers"]), dict(scope["state"]), "mine" in scope, body))
        # What an application does to its scope is its own affair.
        scope["mine"], scope["path"] = True, "/elsewhere"
        scope["headers"].clear()
        scope["state"]["left"] = "behind"
        await answer(send, 200, body)


class Prepares(Route):
    """A route that prepares a handler for some heads. Others it refuses, or leaves to an application."""

    def __init__(self) -> None:
        self.echo = Echo()
        self.prepared: int = 0
        self.handled: list[tuple[bytes, PerRequest]] = []
        self.heads: list[Scope] = []

    async def prepare(self, head: Scope) -> Handler | Reply | ResponseStream:
        self.prepared += 1
        self.heads.append(head)
        if head["path"] == "/":
            return ResponseStream(self.echo)
        if (b"x-a", b"2") in head["headers"]:
            return Reply(403, b"refused", ((b"x-why", b"a"),))
        return Handles(self)


class Handles:
    """Says what it was sent, or has the application say it."""

    max_body = 99

    def __init__(self, route: Prepares) -> None:
        self._route = route

    async def __call__(self, body: bytes, sent: PerRequest) -> Reply | ResponseStream:
        await asyncio.sleep(0)
        self._route.handled.append((body, sent))
        if body != b"b":
            return Reply(200, body)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            headers = repr(scope["headers"]).encode()
            scope["path"], scope["headers"] = "/elsewhere", []  # its own, whatever comes next
            await answer(send, 200, body + headers)

        return ResponseStream(app)

    def refuse(self, error: Exception, sent: PerRequest) -> Reply:
        status = error.row.http if isinstance(error, Failure) else 503
        return Reply(status, str(error).encode(), ((b"retry-after", b"1"), *sorted(sent.items())))


async def _spoken(kind: type[ServerConnection], app: App, pieces: list[bytes]) -> tuple[bytes, bool]:
    """What a connection wrote when it was sent some pieces, and whether it closed."""
    config = uvicorn.Config(app, http=kind, lifespan="off", proxy_headers=False, log_level="critical")
    config.load()
    state = ServerState()
    one, sink = kind(config, state, {}), Sink()
    one.connection_made(sink)
    for piece in pieces:
        if sink.closed:
            break
        one.data_received(piece)
        for _ in range(TURNS):
            await asyncio.sleep(0)
    one.connection_lost(None)
    await asyncio.gather(*state.tasks, return_exceptions=True)
    assert not state.tasks, "whoever ends the server waits for what is still being done, and for nothing else"
    # Each refusal has a trace of its own.
    return re.sub(rb'"traceId":"[0-9a-f]{32}"', b'"traceId":""', sink.written), sink.closed


LINES = st.sampled_from(
    [[], ["x-a: 1"], ["X-A:  1 "], ["x-a: 1", "x-a: 2"], ["x-b: a\tb"], ["connection: close"], ["expect: 100-continue"],
     ["x-content-length: 1"], ["content-length : 1"], ["traceparent: <>"], ["TraceParent:<> ", "x-a: 1"],
     ["traceparent: <>", "tracestate:\t<>\t"], ["traceparent: <>", "x-a: 1", "Traceparent: <>"],
     ["idempotency-key: <>", "baggage: <>", "x-request-id: <>"], ["x-traceparent: 1", "traceparent : <>"],
     ["traceparent: a", " <>"]]
)  # fmt: skip
VALUES = st.sampled_from([
    b"a", b"b", b"a, b", b"traceparent: a", b"00-%b-00f067aa0ba902b7-01" % (b"4b" * 16), b"c" * 511, b"c" * 512, b"",
    b" a", b"a ", b"a\tb", b"\xe9", b"\x00", b"\x7f", b"a\r\nx-a: 2", b"a\nb", b"a\r\n b", b"a\r", b"a\r\n\r\n",
])  # fmt: skip
BODIES = st.sampled_from([b"", b"a", b"b", b"\r\n\r\n", b"a\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"c" * 100])
TARGETS = st.sampled_from(["POST /echo", "GET /", "POST /a%20b?c=d", "POST http://there/echo"])
LENGTHS = st.sampled_from(
    [
        b"content-length: %d",
        b"Content-Length:%d",
        b"content-length:\t%d",
        b"content-length: %d ",
        b"content-length: 0%d",
    ]
)


class Kind(NamedTuple):
    """Requests that differ in nothing but their bodies, and in values of headers that belong to one request."""

    head: bytes
    length: bytes  # how that of the body is said; b"": in chunks, or not at all
    last: bool  # whether it is said behind the other headers
    bare: bool  # whether a line ends as none should

    def request(self, body: bytes, *values: bytes) -> bytes:
        whole = self._request(body)
        for value in values:
            whole = whole.replace(b"<>", value, 1)
        return whole

    def _request(self, body: bytes) -> bytes:
        if not self.length and body:
            coded = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            return self.head[:-2] + b"transfer-encoding: chunked\r\n\r\n" + coded
        said = self.length % len(body) + b"\r\n" if self.length else b""
        first, _, rest = self.head.partition(b"\r\n")
        whole = self.head[:-2] + said + b"\r\n" if self.last else first + b"\r\n" + said + rest
        return (whole.replace(b"\r\n", b"\n", 1) if self.bare else whole) + body


def _head(target: str, lines: list[str]) -> bytes:
    return request(target, b"", *lines)


KINDS = st.builds(
    Kind,
    st.builds(_head, TARGETS, LINES),
    LENGTHS | st.just(b""),
    st.booleans(),
    st.integers(0, 9).map(lambda number: number == 0),
)


@st.composite
def _conversations(draw: st.DrawFn) -> list[bytes]:
    """Requests of a few kinds, mostly in one piece each."""
    kinds = draw(st.lists(KINDS, min_size=1, max_size=3))
    pieces: list[bytes] = []
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=8)):
        one = kind.request(draw(BODIES), *draw(st.lists(VALUES, min_size=3, max_size=3)))
        how = draw(st.sampled_from(["whole", "whole", "whole", "split", "joined", "spaced"]))
        if how == "joined" and pieces:
            pieces[-1] += one
        elif how == "spaced":
            pieces += draw(st.sampled_from([[one + b"\r\n"], [b"\r\n" + one]]))
        elif how == "split":
            at = draw(st.integers(0, len(one)))
            pieces += [part for part in (one[:at], one[at:]) if part]
        else:
            pieces.append(one)
    return pieces


@settings(max_examples=300)
@given(_conversations())
def test_a_head_that_comes_again_is_understood_as_the_first_time(pieces: list[bytes]) -> None:
    async def both() -> None:
        known, forgotten = Echo(), Echo()
        assert await _spoken(ServerConnection, known, pieces) == await _spoken(Forgetful, forgotten, pieces)
        assert known.seen == forgotten.seen

    asyncio.run(both())


@settings(max_examples=300)
@given(_conversations())
def test_a_handler_answers_the_next_body_as_it_would_the_first(pieces: list[bytes]) -> None:
    async def both() -> None:
        cached, anew = Prepares(), Prepares()
        assert await _spoken(ServerConnection, cached, pieces) == await _spoken(Forgetful, anew, pieces)
        assert cached.handled == anew.handled
        assert cached.prepared <= anew.prepared

    asyncio.run(both())


async def test_a_head_is_prepared_once_and_its_handler_is_called_with_each_body() -> None:
    route, bodies = Prepares(), [b"first", b"a", b"b", b"c"]
    written, _ = await _spoken(ServerConnection, route, [request("POST /echo", body) for body in bodies])
    assert written.count(b"HTTP/1.1 200 OK") == 4
    assert (route.prepared, route.handled) == (1, [(body, {}) for body in bodies])


TRACED = ("traceparent: {0}", "x-other: 1", "TRACESTATE: s={0}", "Idempotency-Key: key {0}", "traceparent: z{0}")


async def test_headers_of_one_request_reach_its_handler_and_no_other() -> None:
    route, numbers = Prepares(), range(1, 8)
    asked = [request("POST /echo", b"%d" % one, *(line.format(one) for line in TRACED)) for one in numbers]
    await _spoken(ServerConnection, route, asked)
    told = [(b"traceparent", b"%d"), (b"tracestate", b"s=%d"), (b"idempotency-key", b"key %d")]
    assert route.handled == [(b"%d" % one, {name: value % one for name, value in told}) for one in numbers]
    assert route.prepared == 1
    # What a handler is made from has no value of any request.
    (head,) = route.heads
    assert [value for name, value in head["headers"] if name in PER_REQUEST] == [b""] * 4


async def test_a_refusal_and_an_application_get_the_headers_of_their_own_request() -> None:
    route, sizes = Prepares(), (1, 100, 101)
    asked = [request("POST /echo", b"a" * size, f"x-request-id: {size}") for size in sizes]
    asked += [request("POST /echo", b"b", f"x-request-id: {one}") for one in ("one", "two")]
    written, _ = await _spoken(ServerConnection, route, asked)
    assert route.prepared == 1
    refused = written.split(b"HTTP/1.1 ")[2:4]
    assert [one[:3] for one in refused] == [b"413", b"413"]
    assert [re.findall(rb"x-request-id: (\d+)", one) for one in refused] == [[b"100"], [b"101"]]
    assert re.findall(rb"\(b'x-request-id', b'(.*?)'\)", written) == [b"one", b"two"]
    assert b"(b'content-length', b'1')" in written


async def test_heads_that_all_differ_are_not_kept() -> None:
    """Whatever a client sends, a connection keeps four heads, each of them short, and none that is written oddly."""
    config = uvicorn.Config(
        Prepares(), http=ServerConnection, lifespan="off", proxy_headers=False, log_level="critical"
    )
    config.load()
    state = ServerState()
    one, sink = ServerConnection(config, state, {}), Sink()
    one.connection_made(sink)
    odd = [f"x-{number}: 1" for number in range(20)] + [f"traceparent: {'x' * number}" for number in range(500, 530)]
    odd += [f"tracestate: é{number}" for number in range(5)] + [f"x-long: {'x' * (5000 + n)}" for n in range(3)]
    odd += [f"idempotency-key: {number}\r\n" * number for number in range(1, 20)]
    for line in odd:
        one.data_received(request("POST /echo", b"a", *line.split("\r\n")).replace(b"\r\n\r\n\r\n", b"\r\n\r\n"))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        kept = one._cached_heads  # pyright: ignore[reportPrivateUsage]
        assert len(kept) <= connection.MAX_CACHED_HEADS
        assert all(sum(map(len, part)) < 8192 for head in kept for part in head.scope["headers"])
    one.connection_lost(None)
    await asyncio.gather(*state.tasks, return_exceptions=True)


@pytest.mark.parametrize("times", [1, 2])
async def test_a_body_that_is_too_large_for_its_handler_is_refused_by_it(times: int) -> None:
    route = Prepares()
    written, closed = await _spoken(
        ServerConnection, route, [request("POST /echo", b"a" * size) for size in (1, *[100] * times)]
    )
    assert written.count(b"HTTP/1.1 200 OK") == 1
    assert written.count(b"HTTP/1.1 413") == written.count(b"retry-after: 1\r\n") == times
    assert (route.prepared, route.handled, closed) == (1, [(b"a", {})], False)


class Fails(Prepares):
    """A route whose handler fails."""

    async def prepare(self, head: Scope) -> Handler | Reply | ResponseStream:
        self.prepared += 1
        return FailsToHandle(self)


class FailsToHandle(Handles):
    async def __call__(self, body: bytes, sent: PerRequest) -> Reply | ResponseStream:
        raise RuntimeError("not today")


async def test_a_handler_that_fails_says_so_itself_and_the_connection_stays() -> None:
    route = Fails()
    written, closed = await _spoken(ServerConnection, route, [request("POST /echo", b"a")] * 3)
    assert written.count(b"HTTP/1.1 503") == written.count(b"retry-after: 1\r\n\r\nnot today") == 3
    assert (route.prepared, closed) == (1, False)


@pytest.mark.parametrize("good", [0, 1])
async def test_a_handler_that_cannot_even_refuse_ends_in_an_error_and_the_connection(
    caplog: pytest.LogCaptureFixture, good: int
) -> None:
    class Broken(Handles):
        async def __call__(self, body: bytes, sent: PerRequest) -> Reply | ResponseStream:
            if body == b"b":
                raise RuntimeError("not today")
            return await super().__call__(body, sent)

        def refuse(self, error: Exception, sent: PerRequest) -> Reply:
            raise error

    class Breaks(Prepares):
        async def prepare(self, head: Scope) -> Handler | Reply | ResponseStream:
            return Broken(self)

    bodies = [b"a"] * good + [b"b", b"b"]
    written, closed = await _spoken(ServerConnection, Breaks(), [request("POST /echo", body) for body in bodies])
    assert (written.count(b"HTTP/1.1 200 OK"), written.count(b"HTTP/1.1 500")) == (good, 1)
    assert b"connection: close" in written
    assert closed
    assert "a request failed" in caplog.text


async def test_a_reply_with_a_line_break_in_a_header_is_an_error_and_nothing_of_it_is_sent() -> None:
    class Splits(Prepares):
        async def prepare(self, head: Scope) -> Handler | Reply | ResponseStream:
            return Reply(200, b"{}", ((b"x-name", b"a\r\nset-cookie: b"),))

    written, closed = await _spoken(ServerConnection, Splits(), [request("POST /echo", b"a")])
    assert written.startswith(b"HTTP/1.1 500 ")
    assert b"cookie" not in written
    assert closed


async def test_a_refusal_of_a_head_has_no_body_where_none_is_asked_for() -> None:
    written, _ = await _spoken(ServerConnection, Prepares(), [request("HEAD /echo", b"", "x-a: 2")])
    assert written.startswith(b"HTTP/1.1 403 ")
    assert b"content-length: 7\r\n" in written
    assert written.endswith(b"x-why: a\r\n\r\n")


@settings(max_examples=100)
@given(KINDS, BODIES)
def test_a_route_answers_through_asgi_as_on_a_connection(kind: Kind, body: bytes) -> None:
    async def both() -> None:
        direct, mounted = Prepares(), Prepares()
        spoken = await _spoken(ServerConnection, direct, [kind.request(body)])

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await mounted(scope, receive, send)

        assert await _spoken(ServerConnection, app, [kind.request(body)]) == spoken
        assert direct.handled == mounted.handled

    asyncio.run(both())


async def test_a_head_is_parsed_once_for_all_requests_that_have_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    real = ServerConnection.on_url

    def on_url(self: ServerConnection, url: bytes) -> None:
        parsed.append(url)
        real(self, url)

    monkeypatch.setattr(ServerConnection, "on_url", on_url)
    wire = await place.wire()
    for word in (b"one", b"two", b"six"):
        wire.send(request("POST /echo", word))
        assert (await wire.answer())[1] == word
    assert parsed == [b"/echo"]
    # The length of what follows is all that may differ.
    wire.send(request("POST /echo", b"a thousand"))
    assert (await wire.answer())[1] == b"a thousand"
    assert parsed == [b"/echo"]
    wire.send(request("POST /echo", b"one", "x-other: 1"))
    assert (await wire.answer())[1] == b"one"
    assert parsed == [b"/echo", b"/echo"]


async def test_a_head_that_comes_again_too_soon_waits_for_its_turn(place: Place) -> None:
    wire, other = await place.wire(), await place.wire()
    wire.send(request("GET /wait"))
    await place.waiting.wait()
    place.waiting.clear()
    wire.send(request("GET /wait"))
    other.send(request("POST /echo", b"other"))
    await other.answer()
    assert not place.waiting.is_set()
    place.gate.set()
    assert [(await wire.answer())[1] for _ in range(2)] == [b"waited", b"waited"]

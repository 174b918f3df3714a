"""MCP over HTTP, byte by byte: a server that answers as a test tells it, and what becomes of the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.contract.manifest import RetryPolicy
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.net import connection
from interlock.upstreams.mcp import http as mcp_http
from interlock.upstreams.mcp.events import Events, Meter
from interlock.upstreams.mcp.upstream import McpUpstream
from interlock.upstreams.response_limits import Allowance, Intake
from tests.support.calls import until
from tests.support.mcp_upstreams import ask, by_address, failure_of, text
from tests.support.upstream_servers import Got

Reply = Callable[[Got, Json], bytes]
VERSION = "2025-06-18"


def message(number: Any, said: str = "good") -> bytes:
    return orjson.dumps({"jsonrpc": "2.0", "id": number, "result": {"content": [{"type": "text", "text": said}]}})


def plain(body: bytes, status: str = "200 OK", media: str = "application/json", **headers: str) -> bytes:
    named = {"content-type": media, "content-length": str(len(body)), **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in named.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


def stream(body: bytes) -> bytes:
    """A stream of events that ends with its connection."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + body


class Raw:
    """A server of the handshake's era. `reply` gives the bytes that answer a call, `get` those that answer a GET.

    Bytes that do not say how long their body is end with the connection.
    """

    def __init__(self) -> None:
        self.got: list[Got] = []
        self.reply: Reply = lambda _, request: plain(message(request["id"]))
        self.get: Callable[[Got], bytes] = lambda _: plain(b"", "405 Not Allowed")
        self.accepted = plain(b"", "202 Accepted")
        self.session = "one"
        self.greeting = b""
        self.connections = 0
        self.port = 0
        self.writers: set[asyncio.StreamWriter] = set()

    @property
    def calls(self) -> list[Json]:
        bodies = (orjson.loads(got.body) for got in self.got if got.body)
        return [body for body in bodies if body["method"] == "tools/call"]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.add(writer)
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {line.split(":", 1)[0].lower(): line.split(":", 1)[1].strip() for line in lines[1:] if line}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = lines[0].split()
                answer = self._answer(Got(method, path, headers, body))
                writer.write(answer)
                await writer.drain()
                if b"cut: yes" in answer or (b"content-length" not in answer and b"chunked" not in answer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    def _answer(self, got: Got) -> bytes:
        self.got.append(got)
        if got.method == "GET":
            return self.get(got)
        if got.method == "DELETE":
            return plain(b"")
        request: Json = orjson.loads(got.body)
        match request.get("method"):
            case "initialize":
                if self.greeting:
                    return self.greeting
                result: Json = {"protocolVersion": VERSION, "capabilities": {"tools": {"listChanged": True}}}
                body = orjson.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result})
                return plain(body, **({"mcp_session_id": self.session} if self.session else {}))
            case "tools/call":
                return self.reply(got, request)
            case _:
                return self.accepted


@asynccontextmanager
async def raw(**facts: Any) -> AsyncGenerator[tuple[Raw, McpUpstream]]:
    one = Raw()
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.port = server.sockets[0].getsockname()[1]
    said = {"protocol": "handshake", **facts.pop("said", {})}
    try:
        async with by_address(f"http://127.0.0.1:{one.port}/mcp?a=b", said=said, **facts) as upstream:
            yield one, upstream
    finally:
        server.close()
        for writer in list(one.writers):
            writer.close()
        await server.wait_closed()


async def test_calls_share_a_connection_and_the_session_is_ended_with_the_conversation() -> None:
    async with raw() as (server, one):
        for _ in range(10):
            assert text(await ask(one, "echo")) == "good"
        assert server.connections == 2, "the other one is for messages outside of answers"
    last = server.got[-1]
    assert (last.method, last.path, last.headers["mcp-session-id"]) == ("DELETE", "/mcp?a=b", "one")
    assert last.headers["mcp-protocol-version"] == VERSION
    first, second = server.got[0].headers, server.got[1].headers
    assert "mcp-protocol-version" not in first
    assert "mcp-session-id" not in first
    assert (second["mcp-protocol-version"], second["mcp-session-id"]) == (VERSION, "one")
    assert all(got.headers["accept-encoding"] == "identity" for got in server.got)


GOOD: Sequence[Callable[[bytes], bytes]] = (
    lambda body: b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + plain(body),
    lambda body: (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"".join(b"1;a=b\r\n%c\r\n" % one for one in body)
        + b"0\r\ntrailer: x\r\n\r\n"
    ),
    lambda body: b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + body,
    lambda body: stream(b"id: 1\ndata:\n\n: comment\r\n\r\nevent: other\ndata: {}\n\ndata: " + body + b"\n\n"),
    lambda body: stream(b"\xef\xbb\xbfdata: " + body.replace(b',"result', b',\rdata:"result') + b"\r\r"),
    lambda body: stream(b"data: " + body),
)


@pytest.mark.shows("MCP over HTTP", "call")
@pytest.mark.parametrize(
    "answer", GOOD, ids=["hints", "chunks", "until the end", "events", "two lines", "no last line"]
)
async def test_an_answer_is_read_in_every_form(answer: Callable[[bytes], bytes]) -> None:
    async with raw() as (server, one):
        server.reply = lambda _, request: answer(message(request["id"]))
        assert text(await ask(one, "echo")) == "good"


@pytest.mark.shows("MCP over HTTP", "errors")
async def test_an_error_in_the_body_is_the_answer_whatever_the_status() -> None:
    async with raw() as (server, one):
        body = b'{"jsonrpc":"2.0","id":null,"error":{"code":-32602,"message":"no such thing"}}'
        server.reply = lambda _, __: plain(body, "400 Bad Request")
        failure = await failure_of(one, "echo", attempts=1)
        assert (failure.code, "no such thing" in failure.message) == ("E3401", True)


BAD: Sequence[Callable[[bytes], bytes]] = (
    lambda body: plain(body).replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n", 1),
    lambda body: b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: gzip\r\n\r\n" + body,
    lambda body: b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n" + body,
    lambda body: b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000 + b"\r\ncontent-length: 0\r\n\r\n",
    lambda body: b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000 + b"content-length: 0\r\n\r\n",
    lambda body: b"no HTTP at all\r\n\r\n",
    lambda body: plain(body, cut="yes")[:-5],
    lambda body: stream(b"data: {\n\n"),
    lambda body: stream(b"event: ping\n\n"),
    lambda body: plain(b"[" + body + b"]"),
    lambda body: plain(b'{"jsonrpc": "2.0", "method": "notifications/message"}'),
    lambda body: plain(body, media="text/html"),
    lambda body: plain(b"", "202 Accepted"),
    lambda body: plain(b"", "400 Bad Request", "text/plain"),
)


@pytest.mark.parametrize(
    "answer",
    BAD,
    ids=[
        "two lengths",
        "unknown coding",
        "upgrade",
        "long header",
        "many headers",
        "no HTTP",
        "cut",
        "no JSON",
        "no answer",
        "batch",
        "notification",
        "html",
        "202",
        "400",
    ],
)
async def test_what_is_no_answer_fails_its_call_alone(answer: Callable[[bytes], bytes]) -> None:
    async with raw() as (server, one):
        server.reply = lambda _, request: (
            plain(message(request["id"])).replace(b"good", str(request["params"]["arguments"]["text"]).encode())
            if request["params"]["arguments"]
            else answer(message(request["id"]))
        )
        await ask(one, "echo", {"text": "good"})
        failure = await failure_of(one, "echo", attempts=1)
        assert failure.code == "E3502", failure.message
        assert failure.details is not None
        assert failure.details["sent"] is True
        assert len(server.calls) == 2, "nothing is sent twice"
        assert text(await ask(one, "echo", {"text": "next"})) == "next"


ERROR = b'{"jsonrpc":"2.0","id":null,"error":{"code":-32603,"message":"not now"}}'


@pytest.mark.shows("MCP over HTTP", "results bounded")
async def test_an_oversized_answer_is_not_held() -> None:
    async with raw(said={"max_response_bytes": 20_000}) as (server, one):
        server.reply = lambda _, request: plain(message(request["id"], "x" * 50_000))
        failure = await failure_of(one, "echo", attempts=1)
        assert (failure.code, "max_response_bytes" in failure.message) == ("E3416", True)
        assert len(server.calls) == 1


@pytest.mark.shows("MCP over HTTP", "retries of reads")
@pytest.mark.proves("IDEM-11")
@pytest.mark.parametrize("body", [b"", b"{}", ERROR], ids=["text", "json", "error"])
@pytest.mark.parametrize(
    ("status", "named", "sent"),
    [
        (501, None, 1),
        (401, None, 1),
        (403, None, 1),
        (404, None, 1),
        (503, None, 3),
        (501, [501], 3),
        (503, [501], 1),
        (302, None, 1),
        (308, None, 1),
        (202, None, 1),
        (200, None, 1),
    ],
)
async def test_a_read_is_sent_again_only_after_a_status_that_its_policy_names(
    status: int, named: list[int] | None, sent: int, body: bytes
) -> None:
    said: Json = {} if named is None else {"retry_on_status_codes": named}
    policy = RetryPolicy.model_validate({"max_attempts": 3, "backoff_max_seconds": 1, **said})
    async with raw() as (server, one):
        server.reply = lambda _, __: plain(body, f"{status} Refused", "application/json" if body else "text/plain")
        server.session = "" if status == 404 else "one"
        failure = await failure_of(one, "echo", retry=policy)
        assert (failure.code, failure.native_error_ref) == ("E3502", f"http:{status}")
        assert len(server.calls) == sent
    async with raw() as (server, one):
        server.greeting = plain(body, f"{status} Refused", "application/json" if body else "text/plain")
        failure = await failure_of(one, "echo", retry=policy)
        assert (failure.code, failure.native_error_ref) == ("E3502", f"http:{status}")
        assert len(server.got) == sent


@pytest.mark.supports("IDEM-11")
async def test_a_call_in_a_session_that_the_server_forgot_is_sent_in_a_new_one() -> None:
    async with raw() as (server, one):
        gone = iter([plain(b"", "404 Not Found", "text/plain")])
        server.reply = lambda _, request: next(gone, plain(message(request["id"])))
        assert text(await ask(one, "echo")) == "good"
        assert len(server.calls) == 2


async def test_an_answer_with_the_id_of_another_request_answers_neither() -> None:
    async with raw() as (server, one):
        server.reply = lambda _, request: plain(
            message(request["id"] + (1 if request["params"]["arguments"]["text"] == "first" else 0), "answer")
        )
        other, failure = await asyncio.gather(
            ask(one, "echo", {"text": "other"}), failure_of(one, "echo", {"text": "first"}, attempts=1)
        )
        assert text(other) == "answer"
        assert (failure.code, (failure.details or {})["sent"]) == ("E3502", True)


@pytest.mark.parametrize("when", ["at once", "later"])
async def test_what_nobody_asked_for_is_not_taken_for_the_next_answer(when: str) -> None:
    async with raw() as (server, one):
        forged = plain(message(3, "forged"))
        server.reply = lambda _, request: plain(message(request["id"])) + (forged if when == "at once" else b"")
        if when == "at once":
            assert (await failure_of(one, "echo", attempts=1)).code == "E3502"
        else:
            await ask(one, "echo")
            for writer in server.writers:
                writer.write(forged)
            await until(lambda: not server.writers)
        server.reply = lambda _, request: plain(message(request["id"], "true"))
        assert text(await ask(one, "echo")) == "true"


async def test_a_connection_that_the_server_closed_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_DOUBTFUL_S", 0.0)
    async with raw() as (server, one):
        await ask(one, "echo", writes=True)
        for _ in range(3):
            for writer in list(server.writers):
                writer.close()
                await writer.wait_closed()
            assert text(await ask(one, "echo", writes=True)) == "good"
        assert len(server.calls) == 4


async def test_idle_connections_are_closed_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "IDLE_S", 0.05)
    async with raw() as (server, one):
        await asyncio.gather(*(ask(one, "echo") for _ in range(5)))
        async with asyncio.timeout(60):
            while server.writers:  # noqa: ASYNC110 - there is nothing to be told by
                await asyncio.sleep(0.001)
        assert text(await ask(one, "echo")) == "good"


async def test_more_requests_than_there_is_room_for_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_http, "MAX_CONNECTIONS", 3)
    async with raw() as (server, one):
        await ask(one, "echo")
        outcomes = await asyncio.gather(
            *(ask(one, "echo", attempts=1, writes=True) for _ in range(10)), return_exceptions=True
        )
        refused = [one for one in outcomes if isinstance(one, Failure)]
        assert len(outcomes) - len(refused) == 3
        assert {(one.code, (one.details or {})["sent"]) for one in refused} == {("E3502", False)}
        assert len(server.calls) == 4


@pytest.mark.shows("MCP over HTTP", "no resent writes")
async def test_a_stream_that_broke_off_is_resumed_and_nothing_is_posted_twice() -> None:
    async with raw() as (server, one):
        waiting: list[int] = []

        def reply(_: Got, request: Json) -> bytes:
            waiting.append(request["id"])
            return stream(b"id: 7\nretry: 1\ndata:\n\n")

        def get(got: Got) -> bytes:
            match got.headers.get("last-event-id"):
                case "7":
                    return stream(b"retry: 1\nid: 8\ndata:\n\n")
                case "8":
                    return stream(b"id: 9\ndata: " + message(waiting[0], "resumed") + b"\n\n")
                case _:
                    return plain(b"", "405 Not Allowed")

        server.reply, server.get = reply, get
        assert text(await ask(one, "echo", writes=True)) == "resumed"
        assert len(server.calls) == 1


async def test_a_stream_that_cannot_be_resumed_fails_its_call() -> None:
    async with raw() as (server, one):
        server.reply = lambda _, __: stream(b"id: 7\nretry: 1\ndata:\n\n")
        server.get = lambda got: plain(b"", "503 Away" if "last-event-id" in got.headers else "405 Not Allowed")
        failure = await failure_of(one, "echo", attempts=1)
        assert (failure.code, (failure.details or {})["sent"]) == ("E3502", True)
        assert len([got for got in server.got if "last-event-id" in got.headers]) == 2


async def test_a_stream_beside_the_answers_tells_of_changes() -> None:
    changed = asyncio.Event()
    note = b'{"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}'
    async with raw(on_change=changed.set) as (server, one):
        server.get = lambda got: (
            stream(b"id: 1\ndata: " + note + b"\n\n") if "last-event-id" not in got.headers else b""
        )
        await ask(one, "echo")
        async with asyncio.timeout(60):
            await changed.wait()


@pytest.mark.parametrize(("status", "place", "followed"), [
    ("307 Moved", "/other?x=1", True),
    ("308 Moved", "http://127.0.0.1:{port}/other?x=1", True),
    ("302 Found", "/other?x=1", False),
    ("307 Moved", "http://localhost:{port}/other", False),
    ("307 Moved", "https://127.0.0.1:{port}/other", False),
    ("307 Moved", "http://user:secret@127.0.0.1:1/other", False),
    ("307 Moved", "//127.0.0.2:{port}/other", False),
    ("307 Moved", "http://[", False),
])  # fmt: skip
async def test_a_redirect_is_followed_on_the_same_origin_only(status: str, place: str, followed: bool) -> None:
    async with raw() as (server, one):
        server.reply = lambda got, request: (
            plain(message(request["id"], "there"))
            if got.path.startswith("/other")
            else plain(b"", status, location=place.format(port=server.port))
        )
        if followed:
            assert text(await ask(one, "echo", {"text": "x"})) == "there"
            assert server.got[-1].path == "/other?x=1"
            return
        failure = await failure_of(one, "echo", attempts=1)
        assert failure.code == "E3502"
        assert "secret" not in failure.message
        assert len(server.calls) == 1


async def test_a_body_that_nobody_asked_for_is_not_read_to_its_end() -> None:
    async with raw() as (server, one):
        server.accepted = plain(b"x" * 1_000_000, media="text/plain")[:-1]  # its end does not come
        async with asyncio.timeout(60):
            assert text(await ask(one, "echo")) == "good"


async def test_a_redirect_without_an_end_fails_its_call() -> None:
    async with raw() as (server, one):
        server.reply = lambda _, __: plain(b"", "307 Moved", location="/mcp")
        assert (await failure_of(one, "echo", attempts=1)).code == "E3502"
        assert len(server.calls) == 6


async def test_whole_numbers_stay_exact_in_both_directions() -> None:
    large = 2**70 + 1
    async with raw() as (server, one):
        server.reply = lambda _, request: plain(
            b'{"id": %d, "result": {"content": [], "structuredContent": {"n": %d}}}' % (request["id"], large)
        )
        server_saw: list[bytes] = []
        value = await ask(one, "echo", {"n": large})
        server_saw += [got.body for got in server.got if b"tools/call" in got.body]
        assert value["structuredContent"] == {"n": large}
        assert b'"n":%d' % large in server_saw[0]


async def test_a_credential_that_would_be_two_headers_is_not_sent() -> None:
    said = {"credentials": {"Authorization": "token"}}
    async with raw(said=said) as (server, one):
        failure = await failure_of(one, "echo", attempts=1, credentials={"token": "a\r\nx-evil: 1"})
        assert (failure.code, server.got) == ("E3502", [])
        assert "evil" not in failure.message


@given(
    st.lists(
        st.sampled_from([b"data: 1", b"data:2", b"id: a", b"retry: 5", b": c", b"event: x", b"", b""]), max_size=12
    ),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.integers(1, 9),
)
def test_events_are_the_same_however_they_are_cut(lines: list[bytes], end: bytes, size: int) -> None:
    def read(size: int) -> tuple[list[Any], str, int | None]:
        events = Events(Meter(Intake("x"), Allowance(lambda: 0.0), lambda: None))
        data, messages = b"".join(line + end for line in lines), list[Any]()
        for at in range(0, len(data), size):
            whole, _ = events.feed(data[at : at + size])
            messages += [str(one) for one in events.read(whole)]
        messages += [str(one) for one in events.read(events.rest())]
        return messages, events.last_id, events.retry_ms

    assert read(size) == read(1000)

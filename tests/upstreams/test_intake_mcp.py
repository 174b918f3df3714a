"""Limits on what MCP servers send, over pipes and over HTTP: real programs and servers that mean harm."""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
import textwrap
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson
import pytest

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.upstreams.mcp.config import McpConfig
from interlock.upstreams.mcp.upstream import McpUpstream
from interlock.upstreams.supervisor import Restarts
from tests.support.children import no_process_is_left as no_process_is_left
from tests.support.hostile import loop_is_free, raw_server
from tests.support.upstream_servers import remote_call

STILL = Clock(monotonic=lambda: 0.0)

SERVER = """
import json, os, sys

def write(data):
    view = memoryview(data)
    while view:
        view = view[os.write(1, view):]

def answer(number, result):
    write(json.dumps({"jsonrpc": "2.0", "id": number, "result": result}).encode() + b"\\n")

def noted(method, params):
    return b'{"jsonrpc": "2.0", "method": "%s", "params": %s}\\n' % (method, params)

for line in sys.stdin:
    message = json.loads(line)
    number, method = message.get("id"), message.get("method")
    if number is None or method is None:
        continue
    if method == "initialize":
        version = message["params"]["protocolVersion"]
        about = {"name": "evil", "version": "1"}
        answer(number, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about})
        continue
    if method != "tools/call":
        answer(number, {})
        continue
    kind = message["params"]["name"]
    head = b'{"jsonrpc": "2.0", "id": %d, "result": {"content": [' % number
    part = b'{"type": "text", "text": ""},'
    last = b'{"type": "text", "text": "good"}]}}\\n'
    if kind == "good":
        write(head + last)
    elif kind == "line":
        write(head + b'{"type": "text", "text": "' + b"x" * 60_000_000 + b'"}]}}\\n')
    elif kind == "parts":
        write(head + part * 300_000 + last)
    elif kind == "tiny":
        while True:
            write(b"{}\\n" * 20_000)
    elif kind == "notes":
        while True:
            write(noted(b"notifications/progress", b'{"progressToken": %d, "progress": 1}' % number) * 1000)
    elif kind == "pings":
        while True:
            write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\\n' * 1000)
    elif kind == "nested":
        deep = b"[" * 900 + b"]" * 900
        write(deep + b"\\n")
        write(noted(b"notifications/progress", b'{"progressToken": %d, "message": %s}' % (number, deep)))
        write(b'{"jsonrpc": "2.0", "id": %s, "method": "ping"}\\n' % deep)
        write(b'{"jsonrpc": "2.0", "id": %d, "error": {"code": %s, "message": %s}}\\n' % (number, deep, deep))
    elif kind == "error":
        words = b"mail me: a.b@example.com 4111 1111 1111 1111 /etc/x " * 100_000
        write(b'{"jsonrpc": "2.0", "id": %d, "error": {"code": 1, "message": "%s"}}\\n' % (number, words))
    elif kind == "isError":
        words = b"mail me: a.b@example.com 4111 1111 1111 1111 /etc/x " * 100_000
        start = b'{"jsonrpc": "2.0", "id": %d, "result": {"isError": true, "content": [' % number
        write(start + b'{"type": "text", "text": "%s"}]}}\\n' % words)
"""


@asynccontextmanager
async def server(**said: Any) -> AsyncGenerator[McpUpstream]:
    given = {"protocol": "handshake", "allow_private": True, **said}
    if "url" not in given:
        given["command"] = [sys.executable, "-I", "-S", "-c", textwrap.dedent(SERVER)]
    one = McpUpstream(
        "evil",
        McpConfig.model_validate(given),
        clock=STILL,
        on_change=lambda: None,
        restarts=Restarts(pause_s=0.0),
        alert=lambda _: None,
    )
    try:
        yield one
    finally:
        await one.close()


def tool(name: str) -> Json:
    return {"protocol": "mcp", "name": name}


async def failure_of(one: McpUpstream, name: str) -> Failure:
    with pytest.raises(Failure) as caught:
        await one.call(remote_call(tool(name), attempts=1, left_s=60.0))
    return caught.value


def _memory_mb() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def test_a_line_of_sixty_megabytes_fails_its_call_and_is_not_kept() -> None:
    async with server() as one, loop_is_free():
        good = await one.call(remote_call(tool("good")))
        before = _memory_mb()
        failure = await failure_of(one, "line")
        assert (failure.code, "max_response_bytes" in failure.message) == ("E3416", True)
        assert _memory_mb() - before < 100
        assert await one.call(remote_call(tool("good"))) == good
        assert one.health()["restarts"] == 0, "others' calls are not broken off by it"


async def test_a_million_values_fail_their_call_before_they_are_parsed() -> None:
    async with server() as one, loop_is_free():
        failure = await failure_of(one, "parts")
        assert (failure.code, "max_response_values" in failure.message) == ("E3416", True)
        assert (await one.call(remote_call(tool("good"))))["content"]
        assert one.health()["restarts"] == 0


@pytest.mark.parametrize("kind", ["tiny", "notes", "pings"])
async def test_a_flood_of_lines_ends_the_program_and_the_call_says_so(kind: str) -> None:
    async with server() as one, loop_is_free():
        failure = await failure_of(one, kind)
        assert failure.code == "E3502"
        assert "far more than it was asked for" in failure.message
        assert (await one.call(remote_call(tool("good"))))["content"], "it is started again"


async def test_what_is_nested_deep_ends_nothing_but_its_call() -> None:
    async with server() as one:
        failure = await failure_of(one, "nested")
        assert failure.code == "E3502"
        assert (await one.call(remote_call(tool("good"))))["content"]
        assert one.health()["restarts"] == 0


@pytest.mark.parametrize("kind", ["error", "isError"])
async def test_an_error_of_megabytes_is_cut_before_it_is_searched(kind: str) -> None:
    async with server() as one, loop_is_free():
        failure = await failure_of(one, kind)
        assert failure.code in ("E3401", "E3502")
        assert len(failure.message) < 600
        assert len(orjson.dumps(failure.details)) < 100_000


# Over HTTP


PIECES = {
    "chunks": (
        b"HTTP/1.1 200 OK\r\ncontent-type: MEDIA\r\ntransfer-encoding: chunked\r\n\r\n",
        b"1\r\nx\r\n",
    ),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "hints": (b"", b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"),
}


class _Hostile(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the standard library
        pass

    def _start(self, media: str, **headers: str) -> None:
        self.send_response(200)
        for name, value in {"content-type": media, "connection": "close", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.close_connection = True

    def do_GET(self) -> None:
        self.send_response(405)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_DELETE(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        message = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
        number, method = message.get("id"), message.get("method")
        try:
            if number is None or method is None:
                self.send_response(202)
                self.send_header("content-length", "0")
                self.end_headers()
            elif method == "tools/call":
                self._call(number, message["params"]["name"])
            else:
                version = message["params"].get("protocolVersion", "")
                about = {"name": "evil", "version": "1"}
                result: Json = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
                self._start("application/json")
                self.wfile.write(orjson.dumps({"jsonrpc": "2.0", "id": number, "result": result}))
        except OSError:
            self.close_connection = True

    def _call(self, number: int, kind: str) -> None:
        head = b'{"jsonrpc": "2.0", "id": %d, "result": {"content": [' % number
        last = b'{"type": "text", "text": "good"}]}}'
        parts = b'{"type": "text", "text": ""},' * 300_000
        how, _, what = kind.partition("-")
        if how == "odd":
            self._answer_oddly(number, what, head + last)
            return
        if what in PIECES:
            media = b"application/json" if how == "json" else b"text/event-stream"
            begun, many = PIECES[what]
            self.wfile.write(begun.replace(b"MEDIA", media))
            while True:
                self.wfile.write(many * 1000)
        self._start(
            "application/json; charset=punycode" if how == "json" else "text/event-stream",
            **({"content_encoding": "gzip"} if what == "gzip" else {}),
        )
        before, after = (b"", b"") if how == "json" else (b"event: message\ndata: ", b"\n\n")
        if what == "good":
            self.wfile.write(before + head + last + after)
        elif what == "large":
            self.wfile.write(before + head + b'"' + b"x" * 60_000_000 + b'",' + last + after)
        elif what == "parts":
            self.wfile.write(before + head + parts + last + after)
        elif what == "gzip":
            import gzip

            self.wfile.write(gzip.compress(before + head + b'"' + b"x" * 60_000_000 + b'",' + last + after))
        else:
            note = b'{"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": 1}}'
            asked = {
                "elicitation": b'"elicitation/create", "params": {"message": "?", "requestedSchema": {}}',
                "sampling": b'"sampling/createMessage", "params": {"messages": [], "maxTokens": 1}',
                "roots": b'"roots/list"',
                "pings": b'"ping"',
            }.get(what, b"")
            many = {"notes": b"data: " + note + b"\n\n", "comments": b":\n", "blank": b"\n", "ids": b"id: 1\n\n"}.get(
                what, b'data: {"jsonrpc": "2.0", "id": 7, "method": ' + asked + b"}\n\n"
            )
            while True:
                self.wfile.write(many * 1000)

    def _answer_oddly(self, number: int, what: str, good: bytes) -> None:
        other = good.replace(b'"id": %d' % number, {"wrong id": b'"id": %d' % (number + 1000)}.get(what, b'"id": null'))
        if what == "redirect":
            self.send_response(307)
            self.send_header("location", f"http://127.0.0.1:{ELSEWHERE[0]}/mcp")
            self.send_header("content-length", "0")
            self.end_headers()
        elif what in ("wrong id", "no id"):
            self._start("application/json")
            self.wfile.write(other)
        elif what == "page":
            self._start("text/html")
            self.wfile.write(b"<html>" + b"<p>Please sign in.</p>" * 100_000)
        elif what == "long header":
            self._start("application/json", x_long="x" * 5_000_000)
            self.wfile.write(good)
        elif what == "many headers":
            self._start("application/json", **{f"x_{n}": "x" for n in range(100_000)})
            self.wfile.write(good)
        elif what == "new sessions":
            self._start("application/json", mcp_session_id=f"session-{number}")
            self.wfile.write(good)
        else:
            assert what == "silence"
            self._start("text/event-stream")
            self.rfile.read(1)  # until the client hangs up


ELSEWHERE = [0]


class _Listening(ThreadingHTTPServer):
    """Ends its connections when it is closed, whoever waits for what on them, and then waits for their threads."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Hostile)
        self._accepted: list[socket.socket] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self._accepted.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the client hung up

    def server_close(self) -> None:
        for one in self._accepted:
            with suppress(OSError):  # it has ended by itself
                one.shutdown(socket.SHUT_RDWR)
        super().server_close()


@contextmanager
def hostile_http() -> Generator[str]:
    listening = _Listening()
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}/mcp"
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


@pytest.mark.parametrize("how", ["json", "sse"])
@pytest.mark.parametrize("what", ["large", "parts", "gzip"])
async def test_an_answer_over_http_that_is_too_large_fails_its_call(how: str, what: str) -> None:
    with hostile_http() as url:
        async with server(url=url) as one, loop_is_free():
            good = await one.call(remote_call(tool("json-good")))
            before = _memory_mb()
            failure = await failure_of(one, f"{how}-{what}")
            assert failure.code == ("E3401" if what == "gzip" else "E3416"), failure.message
            assert _memory_mb() - before < 200
            assert await one.call(remote_call(tool("sse-good"))) == good


@pytest.mark.parametrize("what", ["notes", "comments", "blank", "ids", "elicitation", "sampling", "roots", "pings"])
async def test_a_flood_of_events_ends_the_conversation(what: str) -> None:
    with hostile_http() as url:
        async with server(url=url) as one, loop_is_free():
            failure = await failure_of(one, f"sse-{what}")
            assert failure.code == "E3502", failure.message
            async with asyncio.timeout(60):
                assert (await one.call(remote_call(tool("sse-good"))))["content"]


async def _code_of(one: McpUpstream, name: str) -> str:
    try:
        await one.call(remote_call(tool(name), attempts=1, left_s=3.0))
    except Failure as failure:
        return failure.code
    return ""


ODD = {
    "redirect": "E3502", "wrong id": "E3502", "no id": "E3502", "page": "E3502", "long header": "E3502",
    "many headers": "E3502", "silence": "E3503", "new sessions": "",
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
async def test_an_odd_answer_over_http_ends_its_call_and_the_next_one_is_made(what: str) -> None:
    with raw_server(lambda _: None) as elsewhere, hostile_http() as url:
        ELSEWHERE[0] = elsewhere.port
        async with server(url=url) as one, loop_is_free(held_s=0.3):
            async with asyncio.timeout(60):
                assert await _code_of(one, f"odd-{what}") == ODD[what]
                assert await _code_of(one, "sse-good") == ""
        assert elsewhere.accepted == 0, "nobody is sent elsewhere with what is for this server"


@pytest.mark.parametrize("kind", ["json-chunks", "sse-chunks", "json-continue", "json-hints"])
async def test_a_flood_of_tiny_http_pieces_ends_the_conversation(kind: str) -> None:
    with hostile_http() as url:
        async with server(url=url) as one, loop_is_free():
            failure = await failure_of(one, kind)
            assert failure.code == "E3502", failure.message
            async with asyncio.timeout(60):
                assert (await one.call(remote_call(tool("sse-good"))))["content"]

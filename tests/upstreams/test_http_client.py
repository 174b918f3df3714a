"""The HTTP client under an upstream: connections, addresses, forms of answers, and the bytes of requests."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Sequence

import pytest

from interlock.data.schema import Json
from tests.support.http_upstreams import READ, WRITE, failure_of, upstream
from tests.support.upstream_servers import Answer, Got, HttpServer, remote_call

TEXT = b'{"said": "' + b"hello " * 50_000 + b'"}'
LOOK: Json = {"protocol": "http", "method": "HEAD", "path": "/things/{id}"}


def _raw_deflate(body: bytes) -> bytes:
    one = zlib.compressobj(wbits=-15)
    return one.compress(body) + one.flush()


PACKED = {
    "gzip": ("gzip", gzip.compress(TEXT)),
    "gzip in two parts": ("GZIP", gzip.compress(TEXT[:1000]) + gzip.compress(TEXT[1000:])),
    "gzip with zeros behind it": ("x-gzip", gzip.compress(TEXT) + bytes(100)),
    "deflate": ("deflate", zlib.compress(TEXT)),
    "deflate without its head": ("deflate", _raw_deflate(TEXT)),
    "small": ("gzip", gzip.compress(b'{"said": "hello"}')),
    "not at all": ("identity", TEXT),
    "a coding that changes nothing": ("utf-8", TEXT),
}


@pytest.mark.parametrize("form", PACKED)
async def test_a_compressed_answer_is_expanded(form: str) -> None:
    coding, body = PACKED[form]
    async with HttpServer.open() as server, upstream(server.url) as one:
        server.otherwise = lambda _: Answer(body=body, headers={"content-encoding": coding})
        value = await one.call(remote_call(READ, {"id": 7}))
    assert value["said"].split()[0] == "hello"
    assert server.got[0].headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize(
    ("coding", "body", "code"),
    [
        ("gzip", gzip.compress(TEXT)[:-20], "E3502"),
        ("deflate", zlib.compress(TEXT)[:-20], "E3502"),
        ("gzip", gzip.compress(TEXT)[:20] + b"\xff" * 100, "E3502"),
        ("br", b"\x0b\x02\x80{}\x03", "E3502"),
        ("gzip", gzip.compress(b"0" * 1_000_001), "E3416"),
        ("gzip", gzip.compress(b"0" * 999_999) + gzip.compress(b"00"), "E3416"),
        ("gzip", gzip.compress(b"") * 40_000, "E3502"),
    ],
)
async def test_a_compressed_answer_that_breaks_off_or_holds_too_much_is_refused(
    coding: str, body: bytes, code: str
) -> None:
    async with HttpServer.open() as server, upstream(server.url, max_response_bytes=1_000_000) as one:
        server.otherwise = lambda _: Answer(body=body, headers={"content-encoding": coding})
        assert (await failure_of(one, attempts=1)).code == code


@pytest.mark.parametrize("size", [10, 20_000_000])
async def test_the_beginning_of_a_compressed_answer_explains_an_error(size: int) -> None:
    body = gzip.compress(b"no such thing " + b"x" * size)
    async with HttpServer.open() as server, upstream(server.url) as one:
        server.otherwise = lambda _: Answer(status=404, body=body, headers={"content-encoding": "gzip"})
        failure = await failure_of(one, attempts=1)
    assert (failure.code, "no such thing" in failure.message) == ("E3401", True)


async def test_an_answer_without_a_body_ends_with_its_head_whatever_length_it_states() -> None:
    async with HttpServer.open() as server, upstream(server.url) as one:
        server.otherwise = lambda _: Answer(body=b'{"a": 1}')
        assert await one.call(remote_call(LOOK, {"id": 7})) is None
        await one.probe()
        assert await one.call(remote_call(READ, {"id": 7})) == {"a": 1}
    assert [got.method for got in server.got] == ["HEAD", "HEAD", "GET"]


async def test_every_address_of_a_name_is_tried_and_looked_up_once() -> None:
    asked: list[str] = []

    async def resolve(host: str) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.2", "::1", "127.0.0.1"]

    async with (
        HttpServer.open() as server,
        upstream(f"http://service.example:{server.port}", resolve=resolve) as one,
    ):
        await asyncio.gather(*(one.call(remote_call(READ, {"id": n})) for n in range(20)))
    assert asked == ["service.example"]
    assert len(server.got) == 20


async def test_where_no_address_accepts_nothing_was_sent() -> None:
    async def resolve(_: str) -> Sequence[str]:
        return ["127.0.0.2", "127.0.0.3"]

    async with (
        HttpServer.open() as server,
        upstream(f"http://service.example:{server.port}", resolve=resolve) as one,
    ):
        failure = await failure_of(one, attempts=1)
    assert (failure.code, failure.details) == ("E3502", {"sent": False})


async def test_a_request_without_a_body_states_so_where_one_is_expected() -> None:
    async with HttpServer.open() as server, upstream(server.url) as one:
        await one.call(remote_call(WRITE, writes=True))
        await one.call(remote_call({**READ, "method": "DELETE"}, {"id": 7}, writes=True))
        await one.call(remote_call(READ, {"id": 7}))
    assert [got.headers.get("content-length") for got in server.got] == ["0", "0", None]
    assert {got.headers["user-agent"] for got in server.got} == {"interlock"}


@pytest.mark.parametrize("name", ["connection", "content-length", "transfer-encoding", "expect"])
async def test_no_configured_header_changes_where_a_request_ends(name: str) -> None:
    async with HttpServer.open() as server, upstream(server.url, headers={name: "5", "x-other": "yes"}) as one:
        for n in range(2):
            await one.call(remote_call(READ, {"id": n}))
    assert [(name in got.headers, got.headers["x-other"]) for got in server.got] == [(False, "yes")] * 2
    assert server.connections == 1


@pytest.mark.parametrize(
    ("place", "path"),
    [
        ("/b c", "/b%20c"),
        ("/grüße?a=€", "/gr%C3%BC%C3%9Fe?a=%E2%82%AC"),
        ("/x#part", "/x"),
        ("?q", "/a?q"),
    ],
)
async def test_a_redirect_may_lead_to_an_address_that_has_to_be_encoded(place: str, path: str) -> None:
    def answer(got: Got) -> Answer:
        return Answer(status=302, body=b"", headers={"location": place}) if got.path == "/a" else Answer()

    native: Json = {"protocol": "http", "method": "GET", "path": "/a"}
    async with HttpServer.open() as server, upstream(server.url) as one:
        server.otherwise = answer
        assert await one.call(remote_call(native)) == {}
    assert [got.path for got in server.got] == ["/a", path]
    assert server.connections == 1


async def test_a_redirect_to_what_is_no_address_is_not_followed() -> None:
    async with HttpServer.open() as server, upstream(server.url) as one:
        server.otherwise = lambda _: Answer(status=302, headers={"location": "http://[::"})
        assert (await failure_of(one, attempts=1)).code == "E3406"


async def test_a_call_that_is_given_up_leaves_its_connection_to_nobody() -> None:
    async with HttpServer.open() as server, upstream(server.url, max_connections=1) as one:
        server.answers = [Answer(hang=True)]
        assert (await failure_of(one, attempts=1, left_s=0.2)).code == "E3503"
        assert await one.call(remote_call(READ, {"id": 8})) == {}
    assert (server.connections, len(server.got)) == (2, 2)


async def test_closing_ends_calls_that_wait_for_room() -> None:
    async with HttpServer.open() as server, upstream(server.url, max_connections=1) as one:
        arrived = asyncio.Event()

        def hang(_: Got) -> Answer:
            arrived.set()
            return Answer(hang=True)

        server.otherwise = hang
        waiting = [asyncio.create_task(failure_of(one, attempts=1)) for _ in range(3)]
        await arrived.wait()
        await one.close()
        failures = [await task for task in waiting]
    assert {failure.code for failure in failures} == {"E3502"}
    assert len(server.got) == 1


ODD = {
    "LF alone": b"HTTP/1.1 200 OK\ncontent-type: application/json\ncontent-length: 2\n\n{}",
    "a folded header": b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\ncontent-type: text/json\r\ncontent-length: 2\r\n\r\n{}",
    "a control character": b"HTTP/1.1 200 OK\r\nx: a\x01b\r\ncontent-type: text/json\r\ncontent-length: 2\r\n\r\n{}",
    "spaces after a size": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2  \r\n{}\r\n0\r\n\r\n",
    "no reason": b"HTTP/1.1 200\r\ncontent-length: 2\r\n\r\n{}",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\n\r\n{}",
}
UNREADABLE = {
    "a space before the colon": b"HTTP/1.1 200 OK\r\nx : a\r\ncontent-length: 2\r\n\r\n{}",
    "chunks that end with LF": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\n{}\n0\n\n",
    "more after the last answer": b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}xx",
}


@pytest.mark.parametrize("form", [*ODD, *UNREADABLE])
async def test_odd_heads_are_read_and_odd_framing_is_not(form: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write({**ODD, **UNREADABLE}[form])
        await writer.drain()
        writer.close()

    native: Json = {**READ, "protocol": "openapi", "parameters": [], "path": "/", "responses": {"200": "json"}}
    async with (
        await asyncio.start_server(serve, "127.0.0.1", 0) as server,
        upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as one,
    ):
        if form in ODD:
            assert await one.call(remote_call(native)) == {}
        else:
            assert (await failure_of(one, native, attempts=1, arguments={})).code == "E3502"

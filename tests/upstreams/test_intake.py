"""Limits on what upstreams send: every kind of upstream, held against servers that mean harm."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.bounds import long_number
from interlock.data.schema import Json
from interlock.upstreams import wire
from interlock.upstreams.remote_config import Look
from interlock.upstreams.response_limits import BURST, Allowance, Intake, addressee, decoded, more_values
from interlock.upstreams.websocket import WebSocketUpstream
from interlock.upstreams.websocket_config import WebSocketConfig
from tests.support import grpc_upstreams, http_upstreams
from tests.support.hostile import HELD_S, flood, loop_is_free, raw_server, read_head, text_frame, websocket_accept
from tests.support.upstream_servers import Answer, HttpServer, Pauses, ShopServer, SocketServer, remote_call
from tests.thorough import examples

ECHO: Json = {"protocol": "websocket", "method": "echo", "result": "result", "error": "error"}
READ: Json = {"protocol": "http", "method": "GET", "path": "/thing"}
PING = b"\x89\x00"
FRAGMENT = b"\x00\x01x"
STILL = Clock(monotonic=lambda: 0.0)


# Counting


def _values(data: Any) -> int:
    if isinstance(data, dict):
        return 1 + sum(map(_values, cast("Json", data).values()))
    return 1 + sum(map(_values, cast("list[Any]", data))) if isinstance(data, list) else 1


_TEXT = st.text(st.sampled_from('a,[{"\\\n]}'), max_size=12)
_JSON = st.recursive(
    st.none() | st.integers(-9, 9) | _TEXT,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(_TEXT, inner, max_size=6),
    max_leaves=40,
)


@given(_JSON, st.booleans(), st.sampled_from([3, 7, 65_536]))
@settings(max_examples=200, deadline=None)
def test_values_are_counted_in_the_bytes_as_a_parser_would(data: Any, spaced: bool, window: int) -> None:
    text = (json.dumps(data) if spaced else orjson.dumps(data).decode()).encode()
    values = _values(data)
    with patch("interlock.data.bounds._WINDOW", window):
        assert not more_values(text, values + text.count(b"[]") + text.count(b"{}")), "what fits is not refused"
        assert more_values(text, values - 1) or len(text) // 2 < values - 1 or values == 1


def test_commas_in_a_text_are_no_values() -> None:
    assert not more_values(orjson.dumps({"text": '",[{' * 100_000}), 1000)
    assert more_values(b"[" + b'"",' * 400_000 + b"1]", 200_000)


@given(
    st.lists(st.integers(0, 400).map(lambda digits: "9" * (digits + 1)), max_size=4),
    st.sampled_from(["[%s]", '["%s"]', "[0.%s]", "[1e-%s]", "[-%s]", '{"a\\\\": %s}', '{"a\\"": "%s"}']),
)
@settings(max_examples=100, deadline=None)
def test_whole_numbers_of_too_many_digits_are_found_in_the_bytes(numbers: list[str], form: str) -> None:
    text = ("[" + ",".join(form % number for number in numbers) + "]").encode()
    longest = 0

    def seen(number: str) -> int:
        nonlocal longest
        longest = max(longest, len(number.removeprefix("-")))
        return 0

    json.loads(text, parse_int=seen)
    assert long_number(text) == (longest > 308)


def test_the_largest_double_is_no_number_that_is_too_long() -> None:
    largest = int(sys.float_info.max)
    for number, refused in ((largest, False), (10**308, False), (largest + 1, True), (10**309, True)):
        assert long_number(b"[%d]" % number) == refused
        assert long_number(b"[-%d]" % number) == refused


def test_digits_in_a_text_full_of_escapes_are_passed_over_quickly() -> None:
    text = b'["' + b'\\\\\\"' * 900_000 + b'","' + b"9" * 400 + b'"]'
    began = time.thread_time()
    assert not long_number(text)
    assert long_number(text[:-1] + b"," + b"9" * 309 + b"]")
    assert time.thread_time() - began < HELD_S


def test_a_long_number_from_an_upstream_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(Failure, match="308 digits") as caught:
        Intake("shop").loads(b"[" + b",".join([b"9" * 4300] * 2000) + b"]")
    assert caught.value.code == "E3401"


def test_an_answer_that_is_not_parsed_is_attributed_by_the_id_at_its_ends() -> None:
    waiting = {"1": 0, "2": 0}
    assert addressee(b'{"jsonrpc":"2.0","id":2,"result":[' + b"1," * 900, "id", waiting) == "2"
    assert addressee(b'{"result":[' + b"1," * 900 + b'1], "id" : "1" }', "id", waiting) == "1"
    assert addressee(b'{"id":3,"result":[' + b"1," * 900, "id", waiting) is None
    assert addressee(b"[" * 900, "id", {"7": 0}) == "7"


def test_an_allowance_is_refilled_by_time_and_by_answers() -> None:
    now = [0.0]
    allowance = Allowance(lambda: now[0], max_bytes=0)
    assert allowance.take(BURST)
    assert not allowance.take(1)
    now[0] = 1.0
    assert allowance.take(1)
    allowance.give(BURST)
    assert allowance.take(BURST)
    assert not allowance.take(BURST)


@pytest.mark.parametrize("secret_at", [0, 3990, 3999, 4000, 4001])
def test_a_long_text_is_cut_before_it_is_searched_and_shows_no_half_of_a_credential(secret_at: int) -> None:
    secret = "s3cret-" + "x" * 90
    text = ("." * secret_at + secret + "." * 10_000_000)[:10_000_000]
    shown = wire.excerpt(text, Look({"T": secret}))
    assert len(shown) <= wire.EXCERPT
    assert "s3cret" not in shown
    # A text of nothing but credentials is redacted to little, so that its cut end comes into view.
    assert "s3cret" not in wire.excerpt(secret * 1000, Look({"T": secret}))


def test_an_excerpt_is_one_line_without_characters_that_steer_a_terminal() -> None:
    assert wire.excerpt("no\nsuch\r\n\x1b[2Jthing\u202e!", None) == "no such [2Jthing!"


# HTTP


async def test_an_answer_in_an_unusual_charset_is_refused_without_being_decoded() -> None:
    body = b"a" * 120_000 + b"-" + b"z9" * 60_000
    async with HttpServer.open() as server, http_upstreams.upstream(server.url) as one:
        for charset in ("punycode", "idna", "unicode_escape", "rot13", "utf-7", "hex", "x" * 5000):
            headers = {"content-type": f"text/plain; charset={charset}"}
            server.otherwise = lambda _, headers=headers: Answer(body=body, headers=headers)
            async with loop_is_free():
                with pytest.raises(Failure) as caught:
                    await one.call(remote_call(READ, attempts=1))
            assert caught.value.code in ("E3401", "E3502"), caught.value.message
            assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("charset", "codec"),
    [(None, "utf-8"), ("UTF-8", "utf-8"), ("ISO-8859-1", "latin-1"), ("windows-1252", "cp1252"), ("utf-16", "utf-16"),
     ("Shift_JIS", "shift_jis"), ("EUC-KR", "euc_kr"), ("gb2312", "gb18030"), ("Big5", "big5")],
)  # fmt: skip
def test_the_usual_charsets_are_read(charset: str | None, codec: str) -> None:
    text = "Zeichen 字" if codec not in ("latin-1", "cp1252", "shift_jis", "euc_kr", "big5") else "Zeichen"
    assert decoded(text.encode(codec), charset) == text


async def test_an_answer_of_too_many_values_is_refused_before_it_is_parsed() -> None:
    async with HttpServer.open() as server, http_upstreams.upstream(server.url) as one:
        server.otherwise = lambda _: Answer(body=b"[" + b"[]," * 3_000_000 + b"1]")
        async with loop_is_free():
            with pytest.raises(Failure) as caught:
                await one.call(remote_call(READ, attempts=1))
        assert caught.value.code == "E3416"
        assert "max_response_values" in caught.value.message
        server.otherwise = lambda _: Answer(body=orjson.dumps({"text": "a, b, " * 1_000_000}))
        assert len((await one.call(remote_call(READ)))["text"]) == 6_000_000


# gRPC


@pytest.mark.parametrize("method", ["Get", "List"])
async def test_a_message_of_empty_messages_is_counted_before_it_is_expanded(tmp_path: Path, method: str) -> None:
    async with ShopServer.open(tmp_path) as server, grpc_upstreams.upstream(server.port) as one:
        thing = server.message("shop.common.Thing")
        found = await grpc_upstreams.found_in(one)

        async def hostile(_: Any, __: Any) -> Any:
            return thing.FromString(b"\x1a\x00" * 500_000)

        server.answer = hostile
        async with loop_is_free():
            with pytest.raises(Failure) as caught:
                await one.call(remote_call(found[method].native, {"thing_id": "3"}, attempts=1))
        assert caught.value.code == "E3416"

        async def honest(_: Any, __: Any) -> Any:
            return thing(id=7, parts=[thing(id=n) for n in range(5000)])

        server.answer = honest
        value = await one.call(remote_call(found["Get"].native, {"thing_id": "1"}))
        assert [part["id"] for part in value["parts"]] == [str(n) for n in range(5000)]


def _message_type(text: str, tmp_path: Path) -> Any:
    import importlib

    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    protoc: Any = importlib.import_module("grpc_tools.protoc")
    (tmp_path / "m.proto").write_text(text)
    well_known = Path(protoc.__file__).parent / "_proto"
    out = tmp_path / "m.bin"
    said = ["protoc", f"-I{tmp_path}", f"-I{well_known}", "--include_imports", f"--descriptor_set_out={out}"]
    assert protoc.main([*said, "m.proto"]) == 0
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("p.M")), pool


PROTO2 = """
syntax = "proto2";
package p;
import "google/protobuf/any.proto";
message M {
  repeated group G = 1 { repeated M inner = 2; repeated int32 numbers = 3 [packed = true]; }
  optional google.protobuf.Any any = 4;
  map<string, M> named = 5;
  repeated double doubles = 6 [packed = true];
  repeated bool flags = 7;
  optional string text = 8;
}
"""


def test_no_form_of_the_wire_hides_values_from_the_count(tmp_path: Path) -> None:
    from google.protobuf import json_format

    from interlock.upstreams.protobuf import count_values

    kind, pool = _message_type(PROTO2, tmp_path)

    @given(st.data())
    @settings(max_examples=examples(100), deadline=None)
    def held(data: st.DataObject) -> None:
        def made(depth: int) -> Any:
            one = kind()
            for _ in range(data.draw(st.integers(0, 3))):
                group = one.g.add()
                group.numbers.extend(data.draw(st.lists(st.integers(0, 300), max_size=5)))
                if depth:
                    group.inner.append(made(depth - 1))
            one.doubles.extend([1.5] * data.draw(st.integers(0, 4)))
            one.flags.extend([True] * data.draw(st.integers(0, 4)))
            if depth and data.draw(st.booleans()):
                one.named["a"].CopyFrom(made(depth - 1))
            if depth and data.draw(st.booleans()):
                one.any.Pack(made(depth - 1))
            return one

        wire_bytes = made(3).SerializeToString()
        message = kind.FromString(wire_bytes)
        value = json_format.MessageToDict(message, always_print_fields_with_no_presence=True, descriptor_pool=pool)
        assert count_values(wire_bytes, kind.DESCRIPTOR, pool, 10**9) >= _values(value)

    held()
    # The type of an Any may follow the message that it is the type of.
    inner = kind(flags=[True] * 50).SerializeToString()
    url = b"type.googleapis.com/p.M"
    swapped = b"\x12" + bytes([len(inner)]) + inner + b"\x0a" + bytes([len(url)]) + url
    packed = b"\x22" + bytes([len(swapped)]) + swapped
    assert count_values(packed, kind.DESCRIPTOR, pool, 10**9) >= 50


# WebSocket


@asynccontextmanager
async def feed(port: int, **said: Any) -> AsyncGenerator[WebSocketUpstream]:
    url = f"ws://127.0.0.1:{port}"
    config = WebSocketConfig.model_validate({"urls": [url], "allow_private": True, **said})
    one = WebSocketUpstream("feed", config, clock=STILL, sleep=Pauses())
    try:
        yield one
    finally:
        await one.close()


def _before_any_call(data: bytes) -> Callable[[socket.socket], None]:
    """Floods together with the answer to the handshake."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(websocket_accept(read_head(connection)) + data)
        flood(connection, data)

    return serve


def _after_the_answer(data: bytes) -> Callable[[socket.socket], None]:
    """Answers the first call, then floods."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(websocket_accept(read_head(connection)))
        connection.recv(65536)
        connection.sendall(text_frame(b'{"id": 1, "result": "good"}'))
        flood(connection, data)

    return serve


FLOODS = {
    "pings": PING * 50_000,
    "pongs": b"\x8a\x00" * 50_000,
    "one-byte fragments": b"\x01\x00" + FRAGMENT * 50_000,
    "one-byte messages": b"\x81\x011" * 50_000,
    "events": text_frame(b'{"event": "tick"}') * 20_000,
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_of_frames_ends_the_link_and_the_call_says_so(kind: str) -> None:
    with raw_server(_before_any_call(FLOODS[kind])) as server:
        async with feed(server.port) as one, loop_is_free():
            with pytest.raises(Failure) as caught:
                await one.call(remote_call(ECHO, attempts=1))
            # Of fragments the library itself takes only some thousands, and calls the message too large.
            assert caught.value.code == ("E3416" if kind == "one-byte fragments" else "E3502")
            if kind != "one-byte fragments":
                assert (caught.value.details or {}).get("reason") == "flood"
                with pytest.raises(Failure) as again:
                    await one.call(remote_call(ECHO, attempts=1))
                assert again.value.code == "E3502"
                assert again.value.retry_after_ms, "it is left alone for a while"
            assert await server.all_closed()
        assert server.accepted == 1


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_after_the_call_has_ended_ends_the_link(kind: str) -> None:
    with raw_server(_after_the_answer(FLOODS[kind])) as server:
        async with feed(server.port) as one, loop_is_free():
            assert await one.call(remote_call(ECHO, attempts=1)) == "good"
            assert await server.all_closed()


async def test_a_probe_meets_a_flood_and_ends() -> None:
    with raw_server(_before_any_call(FLOODS["pings"])) as server:
        async with feed(server.port) as one, loop_is_free():
            with pytest.raises(Failure) as caught:
                await one.probe()
            assert caught.value.code == "E3502"
            assert await server.all_closed()


async def test_large_answers_in_small_pieces_are_no_flood() -> None:
    answer = orjson.dumps({"id": 1, "result": "x" * 2_000_000})

    def serve(connection: socket.socket) -> None:
        connection.sendall(websocket_accept(read_head(connection)))
        for number in range(1, 21):
            connection.recv(65536)
            data = answer.replace(b'"id":1', b'"id":%d' % number)
            pieces = [data[at : at + 1000] for at in range(0, len(data), 1000)]
            last = len(pieces) - 1
            for at, piece in enumerate(pieces):
                head = bytes([(1 if at == 0 else 0) | (0x80 if at == last else 0)])
                connection.sendall(head + b"\x7e" + len(piece).to_bytes(2) + piece)
        connection.recv(65536)

    with raw_server(serve) as server:
        async with feed(server.port) as one:
            for _ in range(20):
                assert len(await one.call(remote_call(ECHO, attempts=1))) == 2_000_000
        assert server.accepted == 1


CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
HTTP_FLOODS = {
    "chunks of one byte": (CHUNKED, b"1\r\nx\r\n" * 20_000),
    "chunks with long extensions": (CHUNKED, b"1;" + b"y" * 60 + b"\r\nx\r\n"),
    "answers before the answer": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000),
    "hints": (b"", b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" * 5_000),
}


def _http_flood(kind: str) -> Callable[[socket.socket], None]:
    head, body = HTTP_FLOODS[kind]

    def serve(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(head)
        flood(connection, body * max(1, 100_000 // len(body)))

    return serve


@pytest.mark.parametrize("kind", HTTP_FLOODS)
async def test_a_flood_of_tiny_http_pieces_ends_the_link_and_the_call_says_so(kind: str) -> None:
    with raw_server(_http_flood(kind)) as server:
        async with http_upstreams.upstream(f"http://127.0.0.1:{server.port}") as one, loop_is_free():
            with pytest.raises(Failure) as caught:
                await one.call(remote_call(READ, attempts=1))
            assert caught.value.code == "E3502"
            assert (caught.value.details or {}).get("reason") == "flood"
            assert await server.all_closed()


@pytest.mark.parametrize("size", [8, 100, 5000, 100_000])
async def test_an_http_answer_in_chunks_is_no_flood(size: int) -> None:
    text = orjson.dumps(["word"] * (90_000 if size > 8 else 60_000))
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in _cut(text, size)) + b"0\r\n\r\n"
    early = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" * 20

    def serve(connection: socket.socket) -> None:
        for _ in range(20):
            read_head(connection)
            connection.sendall(early + CHUNKED + pieces)

    with raw_server(serve) as server:
        async with http_upstreams.upstream(f"http://127.0.0.1:{server.port}") as one:
            for _ in range(20 if size > 8 else 3):
                assert await one.call(remote_call(READ, attempts=1)) == orjson.loads(text)
        assert server.accepted == 1


async def test_an_http_answer_that_ends_with_its_connection_is_whole() -> None:
    text = orjson.dumps(["word"] * 90_000)

    def serve(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + text)
        connection.shutdown(socket.SHUT_RDWR)

    with raw_server(serve) as server:
        async with http_upstreams.upstream(f"http://127.0.0.1:{server.port}") as one:
            assert await one.call(remote_call(READ, attempts=1)) == orjson.loads(text)


def _cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


async def test_an_id_nested_a_thousand_deep_answers_nobody_and_leaves_no_socket() -> None:
    deep = b'{"id": ' + b"[" * 1000 + b"]" * 1000 + b', "result": 1}'

    async def nested(message: Json, _: Any) -> list[Any]:
        return [deep, b'{"id": {"a": [1]}}', {"id": message["id"], "result": "good"}]

    async with SocketServer.open() as server, feed(server.port) as one:
        server.answer = nested
        for _ in range(3):
            assert await one.call(remote_call(ECHO, attempts=1)) == "good"
        assert (server.open_now, server.most_open) == (1, 1)


async def test_too_many_values_fail_the_call_they_answer_and_no_other() -> None:
    async def answer(message: Json, _: Any) -> list[Any]:
        if message["params"].get("many"):
            return [b'{"id": %d, "result": [' % message["id"] + b"[]," * 400_000 + b"1]}"]
        return [{"id": message["id"], "result": "good"}]

    async with SocketServer.open() as server, feed(server.port) as one:
        server.answer = answer
        calls = [one.call(remote_call(ECHO, {"many": n == 1}, attempts=1)) for n in range(4)]
        many = await asyncio.gather(*calls, return_exceptions=True)
        assert [value for value in many if not isinstance(value, Failure)] == ["good"] * 3
        assert isinstance(many[1], Failure)
        assert many[1].code == "E3416"


async def test_an_error_text_of_megabytes_is_cut_before_it_is_searched() -> None:
    async def answer(message: Json, _: Any) -> list[Any]:
        return [{"id": message["id"], "error": "mail me: a.b@example.com 4111 1111 1111 1111 /etc/x " * 100_000}]

    async with SocketServer.open() as server, feed(server.port) as one:
        server.answer = answer
        async with loop_is_free():
            with pytest.raises(Failure) as caught:
                await one.call(remote_call(ECHO, attempts=1))
        assert caught.value.code == "E3401"
        assert len(caught.value.message) < 600


def test_limits_say_which_setting_raises_them() -> None:
    intake = Intake("shop", 10, 5)
    with pytest.raises(Failure, match="max_response_bytes"):
        intake.check(b"x" * 11)
    with pytest.raises(Failure, match="max_response_values"):
        Intake("shop", 1000, 5).check(b"[1,2,3,4,5,6,7,8,9]")

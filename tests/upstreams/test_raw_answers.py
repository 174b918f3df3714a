"""Answers of a hostile HTTP upstream, byte by byte: each ends its call with a clear code, and its connection."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from itertools import chain, repeat

import pytest

from interlock import Failure
from tests.support.http_upstreams import ONE_THING
from tests.support.http_upstreams import upstream as http
from tests.support.upstream_servers import remote_call

MOST_BYTES = 1_000_000
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


def _compressed(encoding: bytes, body: bytes) -> Iterator[bytes]:
    yield OK + b"content-encoding: %b\r\ncontent-length: %d\r\n\r\n%b" % (encoding, len(body), body)


ZEROS = b"0" * 20_000_000
BOMB = zlib.compress(ZEROS)
ANSWERS = {
    "a bomb of deflate": lambda: _compressed(b"deflate", BOMB),
    "a bomb within a bomb": lambda: _compressed(b"gzip, gzip", gzip.compress(gzip.compress(ZEROS))),
    "an encoding that nobody asked for": lambda: _compressed(b"zstd", b"\x28\xb5\x2f\xfd" + b"\0" * 100),
    "interim answers without end": lambda: repeat(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" * 1000),
    "headers without end": lambda: chain((OK,), repeat(b"x-a: b\r\n" * 1000)),
    "one header without end": lambda: chain((OK + b"x-a: ",), repeat(b"y" * 65_536)),
    "a status line without end": lambda: chain((b"HTTP/1.1 200 ",), repeat(b"y" * 65_536)),
    "trailers without end": lambda: chain((CHUNKED + b"2\r\n{}\r\n0\r\n",), repeat(b"x-a: b\r\n" * 1000)),
    "a chunk extension without end": lambda: chain((CHUNKED + b"2;",), repeat(b"y" * 65_536)),
    "a body without end": lambda: chain((OK + b"\r\n[",), repeat(b"1," * 32_768)),
    "chunks without end": lambda: chain((CHUNKED,), repeat(b"10000\r\n" + b" " * 65_536 + b"\r\n")),
    "a chunk of negative length": lambda: iter((CHUNKED + b"-5\r\n{}\r\n0\r\n\r\n",)),
    "a chunk of endless length": lambda: iter((CHUNKED + b"f" * 100 + b"\r\n{}\r\n0\r\n\r\n",)),
    "another protocol": lambda: repeat(b"220 mail.example.org ESMTP\r\n"),
}


class Upstream:
    """Sends the same answer on every connection, until its client goes."""

    def __init__(self, answer: str) -> None:
        self._answer = answer
        self.sent = 0
        self.open = 0
        self.closed = asyncio.Condition()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            await reader.readuntil(b"\r\n\r\n")
            for piece in ANSWERS[self._answer]():
                writer.write(piece)
                await writer.drain()
                self.sent += len(piece)
            await reader.read()  # until it goes
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            async with self.closed:
                self.open -= 1
                self.closed.notify_all()

    @classmethod
    @asynccontextmanager
    async def opened(cls, answer: str) -> AsyncGenerator[Upstream]:
        upstream = cls(answer)
        async with await asyncio.start_server(upstream.serve, "127.0.0.1", 0) as server:
            upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield upstream


@pytest.mark.parametrize("answer", ANSWERS)
async def test_an_answer_without_sense_or_end_fails_its_call_and_ends_its_connection(answer: str) -> None:
    async with Upstream.opened(answer) as upstream:
        async with http(upstream.url, max_response_bytes=MOST_BYTES) as one:
            with pytest.raises(Failure) as caught:
                await one.call(remote_call(ONE_THING, attempts=1, left_s=30.0))
            assert caught.value.code in ("E3401", "E3416", "E3502")
            assert len(caught.value.message) < 1000
        async with asyncio.timeout(30), upstream.closed:
            await upstream.closed.wait_for(lambda: not upstream.open)
        assert upstream.sent < 20 * MOST_BYTES, "what lies in buffers of the system included"

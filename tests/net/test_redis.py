"""Whatever a Redis server answers, a connection reads no more than it may, and one that cannot be read is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.net import redis
from interlock.net.redis import MOST_BYTES, Lost, Message, RedisConnection
from tests.support.redis import Server

SUBSCRIBED = b"*3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n"


@asynccontextmanager
async def answering(answer: bytes, *, hang_up: bool = True) -> AsyncGenerator[str]:
    """A fake server that says one thing, whatever it is asked, and then hangs up or says no more."""
    release = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n")
            writer.write(answer)
            await writer.drain()
            if not hang_up:
                await release.wait()
        except (OSError, EOFError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        release.set()
        server.close()


async def asked(answer: bytes) -> redis.Reply:
    async with answering(answer) as url:
        connection = await RedisConnection.open(url)
        try:
            return await connection.ask("PING")
        finally:
            connection.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"$5\r\nhel",
        b"$%d\r\n" % (MOST_BYTES + 1),
        b"$999999999999999999999\r\n",
        b"$-2\r\n",
        b"$1_0\r\n0123456789\r\n",
        b"*9\r\n",
        b"*1\r\n*1\r\n*1\r\n",
        b"+" + b"x" * (2 * MOST_BYTES),
        b"?what\r\n",
        b"\r\n",
        b"-NOAUTH Authentication required.\r\n",
    ],
)
async def test_what_is_too_large_cut_off_or_not_an_answer_is_lost(answer: bytes) -> None:
    with pytest.raises(Lost):
        await asked(answer)


async def test_answers_are_read() -> None:
    assert await asked(b"+PONG\r\n") == "PONG"
    assert await asked(b":3\r\n") == 3
    assert await asked(b"$-1\r\n") is None
    assert await asked(b"$2\r\n\r\n\r\n") == b"\r\n"
    assert await asked(b"*2\r\n$1\r\na\r\n:1\r\n") == [b"a", 1]


@given(st.binary(max_size=60))
def test_no_bytes_do_more_than_lose_the_connection(answer: bytes) -> None:
    async def ask() -> None:
        try:
            await asked(answer)
        except Lost:
            pass

    asyncio.run(ask())


async def test_words_of_a_server_are_short_and_printable() -> None:
    with pytest.raises(Lost) as lost:
        await asked(b"-\x1b[31m" + b"x" * 1000 + b"\r\n")
    assert str(lost.value).isprintable()
    assert len(str(lost.value)) < 300


@pytest.mark.parametrize("answer", [b"+OK\r\n", b"-NOPERM no\r\n", b"*1\r\n$1\r\nx\r\n"])
async def test_a_subscription_that_is_not_confirmed_is_none(answer: bytes) -> None:
    async with answering(answer) as url:
        connection = await RedisConnection.open(url)
        with pytest.raises(Lost):
            await connection.subscribe("a")
        connection.close()


async def test_a_server_that_says_no_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis, "SILENCE_S", 0.01)
    monkeypatch.setattr(redis, "ANSWER_S", 0.05)
    async with answering(b"", hang_up=False) as url:
        connection = await RedisConnection.open(url)
        with pytest.raises(Lost, match="no answer in time"):
            await connection.ask("PING")
        connection.close()
    monkeypatch.setattr(redis, "ANSWER_S", 30.0)
    async with answering(SUBSCRIBED, hang_up=False) as url:
        connection = await RedisConnection.open(url)
        await connection.subscribe("a")
        monkeypatch.setattr(redis, "ANSWER_S", 0.05)  # from the first question on
        with pytest.raises(Lost, match="no answer in time"):
            await connection.message()
        connection.close()


async def test_nobody_listens_there(tmp_path: Path) -> None:
    for url in (f"unix://{tmp_path}/none.sock", "redis://127.0.0.1:1", "rediss://127.0.0.1:1"):
        with pytest.raises(Lost, match="no connection"):
            await RedisConnection.open(url)


async def test_messages_arrive_in_order_also_after_a_silence(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis, "SILENCE_S", 0.01)
    monkeypatch.setattr(redis, "ANSWER_S", 60.0)
    monkeypatch.setattr(redis, "OPEN_S", 60.0)
    receiving, sending = await RedisConnection.open(redis_server.url), await RedisConnection.open(redis_server.url)
    try:
        await receiving.subscribe("a", "b")
        waiting = asyncio.create_task(receiving.message())
        await asyncio.sleep(0.05)  # it asks meanwhile whether the server is there
        assert await sending.ask("PUBLISH", "a", "one") == 1
        assert await waiting == Message("a", b"one")
        for number in range(50):
            await sending.ask("PUBLISH", "b", str(number))
        assert [(await receiving.message()).content for _ in range(50)] == [b"%d" % number for number in range(50)]
        await sending.ask("PUBLISH", "b", "x" * MOST_BYTES)
        assert len((await receiving.message()).content) == MOST_BYTES
        await sending.ask("PUBLISH", "b", "x" * (MOST_BYTES + 1))
        with pytest.raises(Lost, match="too large"):
            await receiving.message()
    finally:
        receiving.close()
        sending.close()


async def pinged(url: str, password: str) -> redis.Reply:
    connection = await RedisConnection.open(url, password)
    try:
        return await connection.ask("PING")
    finally:
        connection.close()


@pytest.mark.parametrize("user", ["", "worker@"])
async def test_a_password_is_needed_where_the_server_wants_one(
    user: str, monkeypatch: pytest.MonkeyPatch, make_redis: Callable[..., Server]
) -> None:
    monkeypatch.setattr(redis, "ANSWER_S", 60.0)
    monkeypatch.setattr(redis, "OPEN_S", 60.0)
    server = make_redis("--requirepass", "secret", *["--user", "worker", "on", ">secret", "~*", "&*", "+@all"])
    url = f"unix://{user}{'localhost' if user else ''}{server.socket}"
    for password in ("", "wrong"):
        with pytest.raises(Lost, match="refused"):
            await pinged(url, password)
    assert await pinged(url, "secret") == "PONG"

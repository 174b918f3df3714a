"""A client of Redis for messages: publish and subscribe, with a bound on everything that is read.

It speaks the few commands of RESP2 that messages need. A connection that breaks stays broken: it is never opened again
behind the back of a subscriber, who has to know that messages may have been missed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from interlock.core.expressions import expression
from interlock.core.record import NamedTuple

# How many bytes a message may have. A longer one breaks the connection.
MOST_BYTES = 65_536
# How long a connection may take to open, and a server to answer.
OPEN_S = 1.0
ANSWER_S = 2.0
# A subscriber that hears nothing for so long asks whether the server is still there.
SILENCE_S = 1.0
_MOST_ITEMS = 8
_MOST_WORDS = 200
_COUNT = expression(rb"-1|[0-9]{1,18}")

Item: TypeAlias = str | int | bytes | None
Reply: TypeAlias = Item | list[Item]


class Lost(Exception):  # noqa: N818 - a finding about the other side
    """The connection cannot be used, or not any more. Says why, and nothing of what was sent."""


class Message(NamedTuple):
    """A message of a channel. Anybody who can reach the server may have written it."""

    channel: str
    content: bytes


class RedisConnection:
    """A connection to a server. Ask it, or subscribe and read messages; not both."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._timer: asyncio.TimerHandle | None = None
        self._heard = 0
        self._silent = False

    @classmethod
    async def open(cls, url: str, password: str = "") -> RedisConnection:
        """Connect to redis://[USER@]HOST[:PORT], rediss://… (TLS) or unix:///PATH."""
        parts = urlsplit(url)
        try:
            async with asyncio.timeout(OPEN_S):
                if parts.scheme == "unix":
                    opened = await asyncio.open_unix_connection(unquote(parts.path), limit=MOST_BYTES)
                else:
                    tls = ssl.create_default_context() if parts.scheme == "rediss" else None
                    host, port = parts.hostname or "", parts.port or 6379
                    opened = await asyncio.open_connection(host, port, limit=MOST_BYTES, ssl=tls)
        except (OSError, TimeoutError) as error:
            raise Lost(f"no connection: {type(error).__name__}") from None
        connection = cls(*opened)
        try:
            if password:
                await connection.ask("AUTH", *([unquote(parts.username)] if parts.username else []), password)
        except BaseException:
            connection.close()
            raise
        return connection

    async def ask(self, *words: str) -> Reply:
        """Send a command and return its answer. After `Lost` the connection is of no more use."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._send(words)
                return await self._reply()
        except TimeoutError:
            raise Lost("no answer in time") from None

    async def subscribe(self, *channels: str) -> None:
        """Subscribe to channels. From when this returns, no message of them is missed until `Lost` is raised."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._send(("SUBSCRIBE", *channels))
                for _ in channels:
                    reply = await self._reply()
                    if not isinstance(reply, list) or reply[:1] != [b"subscribe"]:
                        raise Lost("an answer that was not asked for")
        except TimeoutError:
            raise Lost("no answer in time") from None
        self._watch()

    async def message(self) -> Message:
        """Wait for the next message. Raises `Lost` if the server does not answer while there is none."""
        while True:
            reply = await self._reply()
            self._heard += 1
            match reply:
                case [b"message", bytes(channel), bytes(content)]:
                    return Message(channel.decode(errors="replace"), content)
                case [b"pong", *_]:
                    pass
                case _:
                    raise Lost("an answer that was not asked for")

    def close(self) -> None:
        """End the connection at once."""
        if self._timer is not None:
            self._timer.cancel()
        self._writer.transport.abort()

    def _watch(self, heard: int = -1, asked: bool = False) -> None:
        """Ask a server that has said nothing for a while whether it is there, and give it up if it does not answer."""
        if asked and heard == self._heard:
            self._silent = True
            self._writer.transport.abort()
            return
        ask = heard == self._heard
        if ask:
            self._writer.write(_encoded(("PING",)))
        later = asyncio.get_running_loop().call_later
        self._timer = later(ANSWER_S if ask else SILENCE_S, self._watch, self._heard, ask)

    async def _send(self, words: Sequence[str]) -> None:
        try:
            self._writer.write(_encoded(words))
            await self._writer.drain()
        except OSError as error:
            raise Lost(f"the connection broke: {type(error).__name__}") from None

    async def _reply(self) -> Reply:
        try:
            kind, rest = await self._line()
            if kind != b"*":
                return await self._item(kind, rest)
            return [await self._item(*await self._line()) for _ in range(_count(rest, _MOST_ITEMS))]
        except asyncio.LimitOverrunError:
            raise Lost("a line that is too long") from None
        except (OSError, EOFError) as error:
            words = "no answer in time" if self._silent else f"the connection broke: {type(error).__name__}"
            raise Lost(words) from None

    async def _line(self) -> tuple[bytes, bytes]:
        line = await self._reader.readuntil(b"\r\n")
        return line[:1], line[1:-2]

    async def _item(self, kind: bytes, rest: bytes) -> Item:
        match kind:
            case b"+":
                return rest.decode(errors="replace")
            case b":":
                return _count(rest, 10**18)
            case b"$" if rest == b"-1":
                return None
            case b"$":
                return (await self._reader.readexactly(_count(rest, MOST_BYTES) + 2))[:-2]
            case b"-":
                raise Lost(f"refused: {_printable(rest)}")
            case _:
                raise Lost("an answer that cannot be read")


def _encoded(words: Sequence[str]) -> bytes:
    encoded = [word.encode() for word in words]
    return b"".join((b"*%d\r\n" % len(encoded), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)))


def _count(text: bytes, most: int) -> int:
    if not _COUNT.fullmatch(text) or not 0 <= int(text) <= most:
        raise Lost("an answer that is too large or cannot be read")
    return int(text)


def _printable(text: bytes) -> str:
    words = text[:_MOST_WORDS].decode(errors="replace")
    return "".join(one if one.isprintable() else "?" for one in words)

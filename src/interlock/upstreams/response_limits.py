"""Limits on everything that an upstream sends. All kinds of upstream use this module.

Theory of operation. An upstream may be hostile or broken. The cost of reading its answer must not depend on its good
will, so four things are checked in this order:

    bytes     counted while they arrive; an answer over `max_response_bytes` is refused (E3416)
    values    counted in the bytes, before a parser makes objects of them; over `max_response_values` is refused (E3416)
    numbers   a whole number of more than 308 digits is refused (E3401)
    parsing   small answers are parsed at once, larger ones in a thread of this module, never in the loop's default pool
    floods    messages and frames that answer no call are charged to the link; a link that exceeds its allowance is cut

Texts for people are cut before they are redacted or cleaned, because both cost time for each character.

A link hands a bounded number of messages to its reader in one turn of the event loop (`PER_TURN`). Counting is exact
enough to refuse only what is too large: the first, cheap count is an upper bound, and only where that bound exceeds the
limit are the values outside of texts counted.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import orjson

from interlock.core.errors import Failure
from interlock.core.threads import Threads
from interlock.data.bounds import LONGEST_NUMBER, MOST_VALUES, long_number, more_values

T = TypeVar("T")

MAX_BYTES = 10_485_760
# Parsing holds the interpreter's lock, in whichever thread it runs: about 50 ms for this many values.
MAX_VALUES = MOST_VALUES
# Answers up to this size are parsed on the event loop, which takes well under a millisecond.
SMALL = 65_536
# The number of frames, lines or events handled in one turn of the event loop.
PER_TURN = 200
# Messages that answer no call: this many at once, and this many per second from then on. Every 4 KiB count as one more.
BURST = 10_000
PER_SECOND = 2_000
_UNIT = 4096
_THREADS = 2
_PEEK = 256
# A line this many times longer than the limit on answers counts as endless.
_ENDLESS = 8


class Intake:
    """The limits of one upstream, and the reading of its answers under them."""

    __slots__ = ("max_bytes", "max_values", "name")

    def __init__(self, name: str, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES) -> None:
        self.name = name
        self.max_bytes = max_bytes
        self.max_values = max_values

    def too_large(self) -> Failure:
        return Failure(
            "E3416",
            f"`{self.name}` answered with more than {self.max_bytes} bytes; ask for less or raise max_response_bytes",
        )

    def too_many(self) -> Failure:
        return Failure(
            "E3416",
            f"`{self.name}` answered with more than {self.max_values} values; ask for less or raise"
            " max_response_values",
        )

    def flooded(self) -> Failure:
        """The failure of the calls that were waiting on a connection that was cut because of a flood."""
        return Failure(
            "E3502",
            f"`{self.name}` sent far more messages than it was asked for, so the connection was closed",
            details={"sent": True, "reason": "flood"},
        )

    def check(self, data: bytes) -> None:
        """Raise E3416 for a JSON text that is too long or holds too many values. Parses nothing."""
        if len(data) > self.max_bytes:
            raise self.too_large()
        if more_values(data, self.max_values):
            raise self.too_many()
        if long_number(data):
            raise Failure("E3401", f"`{self.name}` answered with a number of more than {LONGEST_NUMBER} digits")

    def loads(self, data: bytes) -> Any:
        """Parse a JSON text under the limits; orjson.JSONDecodeError for anything else."""
        self.check(data)
        return orjson.loads(data)

    async def expanded(self, data: bytes, coding: str, limit: int, *, cut: bool = False) -> bytes:
        """Expand a compressed body, to one byte more than `limit` if it holds more. In a thread if it is large.

        ValueError for a coding that is not read, and for a body that is not of its coding or breaks off. With `cut` its
        beginning is enough.
        """
        first = min(limit, SMALL)
        if len(data) <= SMALL:
            body = _expanded(data, coding, first, cut)
            if len(body) <= first or first == limit:
                return body
        return await in_thread(_expanded, data, coding, limit, cut)

    async def json(self, data: bytes) -> Any:
        """Parse a JSON text under the limits, in a thread if it is large."""
        if len(data) <= SMALL:
            return self.loads(data)
        return await in_thread(self.loads, data)


def addressee(data: bytes, key: str, waiting: Collection[str]) -> str | None:
    """Find the call that a message which is too large to be parsed belongs to, as far as it shows.

    Its id stands near the beginning or the end of the message, or there is only one call that it can belong to.
    """
    name = re.escape(orjson.dumps(key))
    for part in (data[:_PEEK], data[-_PEEK:]):
        for match in re.finditer(name + rb'\s*:\s*"?([0-9]{1,18})"?\s*[,}]', part):
            ident = match[1].decode()
            if ident in waiting:
                return ident
    return next(iter(waiting)) if len(waiting) == 1 else None


class Allowance:
    """The number of messages without a call that a connection may send. Refilled by time, and by answers."""

    __slots__ = ("_left", "_monotonic", "_most", "_since")

    def __init__(self, monotonic: Callable[[], float], max_bytes: int = MAX_BYTES) -> None:
        self._monotonic = monotonic
        self._most = BURST + 4 * (max_bytes // _UNIT)
        self._left = float(self._most)
        self._since = monotonic()

    def take(self, messages: int, size: int = 0) -> bool:
        """Charge messages of some bytes; False if the allowance is spent, which makes it a flood."""
        self._left -= messages + size // _UNIT
        if self._left >= 0:
            return True
        now = self._monotonic()
        self._left = min(self._most, self._left + (now - self._since) * PER_SECOND)
        self._since = now
        return self._left >= 0

    def give(self, messages: int, size: int = 0) -> None:
        """Return the charge for an answer that a call was waiting for."""
        self._left = min(self._most, self._left + messages + size // _UNIT)


class Lines:
    """Splits input into lines, and passes on a bounded number of them in one turn of the event loop.

    `hear` receives each line and may return a future, for which the next line waits. A line over the limit is not
    stored: `oversize` receives its beginning and its end. `flood` is called once, when the allowance is spent or a line
    has no end; nothing is passed on after it. `flow` is called to pause and resume reading.
    """

    __slots__ = (
        "_allowance", "_buffer", "_ended", "_flood", "_flow", "_head", "_hear", "_intake", "_oversize", "_paused",
        "_scheduled", "_searched", "_skipped", "_waits", "when_idle",
    )  # fmt: skip

    def __init__(
        self,
        intake: Intake,
        allowance: Allowance,
        *,
        hear: Callable[[bytes], asyncio.Future[Any] | None],
        oversize: Callable[[bytes], None],
        flood: Callable[[], None],
        flow: Callable[[bool], None],
    ) -> None:
        self._intake = intake
        self._allowance = allowance
        self._hear = hear
        self._oversize = oversize
        self._flood = flood
        self._flow = flow
        self.when_idle: Callable[[], None] | None = None
        self._buffer = bytearray()
        self._searched = 0  # this part of the buffer has no end of a line
        self._head = b""  # of a line that is skipped
        self._skipped = 0
        self._scheduled = self._waits = self._paused = self._ended = False

    @property
    def idle(self) -> bool:
        """Whether every whole line was passed on."""
        return not self._scheduled and not self._waits

    def feed(self, data: bytes) -> None:
        if self._ended:
            return
        self._buffer += data
        if self.idle:
            self._turn()

    def _turn(self) -> None:
        """Pass on the lines of one turn, and schedule the rest."""
        self._scheduled = False
        count = start = end = 0
        while count < PER_TURN and not self._waits and not self._ended:
            end = self._buffer.find(b"\n", self._searched)
            if end < 0:
                break
            line, start = bytes(self._buffer[start:end]), end + 1
            self._searched = start
            count += 1
            self._take(line)
        del self._buffer[:start]
        self._searched = len(self._buffer) if end < 0 else 0
        if end < 0:
            self._skip()
        if not self._ended and not self._allowance.take(count, start):
            self._end()
        elif end >= 0 and self._buffer and not self._waits and not self._ended:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)
        self._settle()

    def _take(self, line: bytes) -> None:
        if self._skipped or len(line) > self._intake.max_bytes:
            self._oversize((self._head or line[:_PEEK]) + b" " + line[-_PEEK:])
            self._head, self._skipped = b"", 0
            return
        if line.isspace() or not line:
            return
        try:
            waits_for = self._hear(line)
        except Exception:  # noqa: BLE001 - a message that cannot be handled must not end the event loop's reading
            self._end()
            return
        if waits_for is not None:
            self._waits = True
            waits_for.add_done_callback(self._after_future)

    def _after_future(self, _: asyncio.Future[Any]) -> None:
        self._waits = False
        if not self._ended:
            self._turn()

    def _skip(self) -> None:
        """Keep only the beginning and the end of a line that is too long already."""
        if len(self._buffer) + self._skipped <= self._intake.max_bytes:
            return
        self._head = self._head or bytes(self._buffer[:_PEEK])
        dropped = max(0, len(self._buffer) - _PEEK)
        self._skipped += dropped
        del self._buffer[:dropped]
        self._searched = len(self._buffer)
        if self._skipped > _ENDLESS * self._intake.max_bytes:
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._buffer.clear()
        self._flood()

    def _settle(self) -> None:
        paused = not self.idle and not self._ended
        if paused != self._paused:
            self._paused = paused
            self._flow(paused)
        if self.idle and self.when_idle is not None:
            idle, self.when_idle = self.when_idle, None
            idle()


# For bounded work on answers. Never use it for code that can hang.
_threads = Threads("intake", _THREADS)
in_thread = _threads.run


# Codings of bodies: the window of their decompressor, or None for one that is not read.
CODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15, "br": None, "zstd": None}
# A gzip file may consist of several. Each costs some time, however little it holds.
_MOST_MEMBERS = 1000
_GZIP = 0x1F


def _expanded(data: bytes, coding: str, limit: int, cut: bool) -> bytes:
    window = CODINGS[coding]
    if window is None:
        raise ValueError("a coding that is not read")
    if coding == "deflate" and data[0] & 15 != 8:
        window = -15  # without the head that belongs to it, as some servers send it
    view, body, at, members, ended = memoryview(data), bytearray(), 0, 0, False
    stream = zlib.decompressobj(window)
    try:
        while at < len(view) and len(body) <= limit and members < _MOST_MEMBERS:
            part = view[at : at + _UNIT]
            body += stream.decompress(part, limit + 1 - len(body))
            at += len(part) - len(stream.unused_data)
            ended = stream.eof
            if ended:
                if coding == "deflate" or at == len(view) or view[at] != _GZIP:
                    break
                members += 1
                stream = zlib.decompressobj(window)
    except zlib.error:
        raise ValueError("not of its coding") from None
    if not (ended or cut or len(body) > limit) or members == _MOST_MEMBERS:
        raise ValueError("it breaks off, or has too many parts")
    return bytes(body)


# Charsets that decode in linear time. Others are not looked up: Python has codecs that are quadratic or no charsets.
_CHARSETS = {
    "utf-8": "utf-8", "utf8": "utf-8", "utf-8-sig": "utf-8-sig",
    "ascii": "ascii", "us-ascii": "ascii",
    "latin-1": "latin-1", "latin1": "latin-1", "iso-8859-1": "latin-1", "iso8859-1": "latin-1",
    "cp1252": "cp1252", "windows-1252": "cp1252",
    "utf-16": "utf-16", "utf-16le": "utf-16-le", "utf-16be": "utf-16-be", "utf-16-le": "utf-16-le",
    "utf-16-be": "utf-16-be", "utf-32": "utf-32", "utf-32le": "utf-32-le", "utf-32be": "utf-32-be",
    "shift-jis": "shift_jis", "sjis": "shift_jis", "x-sjis": "shift_jis", "windows-31j": "cp932", "cp932": "cp932",
    "euc-jp": "euc_jp", "iso-2022-jp": "iso2022_jp",
    "gb2312": "gb18030", "gbk": "gb18030", "gb18030": "gb18030", "big5": "big5", "big5-hkscs": "big5hkscs",
    "euc-kr": "euc_kr", "ks-c-5601-1987": "cp949", "cp949": "cp949",
    "koi8-r": "koi8_r", "koi8-u": "koi8_u",
    **{f"iso-8859-{n}": f"iso8859_{n}" for n in (2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 14, 15, 16)},
    **{f"windows-125{n}": f"cp125{n}" for n in (0, 1, 3, 4, 5, 6, 7, 8)},
}  # fmt: skip


def decoded(body: bytes, charset: str | None) -> str | None:
    """Decode a body in the charset that its sender names; None for an unsupported one."""
    codec = _CHARSETS.get((charset or "utf-8").strip().lower().replace("_", "-"))
    return None if codec is None else body.decode(codec, errors="replace")

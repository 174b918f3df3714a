"""Parses the TLS client hello as far as it names the server.

A pure reader: it takes the bytes so far and returns the hello, or None while it is incomplete, which is limited to four
full records. It is stricter than servers are: bytes that a server might read differently are refused.
"""

from __future__ import annotations

from interlock.core.record import dataclass

_HANDSHAKE, _VERSION_3 = b"\x16", b"\x03"  # the first two bytes of every record before keys are agreed on
_CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 1, 0, 0
_ENCRYPTED = frozenset({0xFE0D, 0xFFCE})  # the encrypted client hello, and the encrypted name that came before it
_LARGEST_RECORD = 2**14
_MOST_RECORDS = 4  # what a hello may be spread over; clients send one

# The alert that a client receives before it is cut off: fatal, access denied.
DENIED = bytes((21, 3, 1, 0, 2, 2, 49))


class NotTlsError(Exception):
    """These bytes are not the beginning of TLS, or are ambiguous."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The server name that a client requests, if any, and whether another is hidden behind it."""

    server_name: str | None
    encrypted: bool

    def must_name(self, host: str | None) -> None:
        """Raise NotTlsError unless the client visibly requests this server."""
        if self.encrypted:
            raise NotTlsError("its TLS hello hides the server's name; switch encrypted client hello off")
        if (None if self.server_name is None else self.server_name.lower()) != host:
            raise NotTlsError(
                f"its TLS hello names {f'`{self.server_name[:253]}`' if self.server_name else 'no server'}"
            )


def read_hello(data: bytes) -> Hello | None:
    """Parse the hello at the start of a connection; None if more bytes are needed."""
    message = b""
    for _ in range(_MOST_RECORDS):
        if data[:1] not in (b"", _HANDSHAKE) or data[1:2] not in (b"", _VERSION_3):
            raise NotTlsError("it does not speak TLS")
        if len(data) < 5:
            return None
        length = int.from_bytes(data[3:5])
        if not 1 <= length <= _LARGEST_RECORD:
            raise NotTlsError("its first record is of no possible size")
        if len(data) < 5 + length:
            return None
        message, data = message + data[5 : 5 + length], data[5 + length :]
        if message[0] != _CLIENT_HELLO:
            raise NotTlsError("it does not begin with a client's hello")
        end = 4 + int.from_bytes(message[1:4])
        if len(message) > end:
            raise NotTlsError("something follows the hello in its record")
        if len(message) == end:
            return _body(_Bytes(message[4:]))
    raise NotTlsError("its hello is spread over too many records")


def _body(body: _Bytes) -> Hello:
    body.take(2 + 32)  # version, random
    body.vector(1)  # session
    body.vector(2)  # ciphers
    body.vector(1)  # compression
    name: str | None = None
    kinds: set[int] = set()
    extensions = body.vector(2) if body else _Bytes(b"")
    if body:
        raise NotTlsError("something follows the extensions of its hello")
    while extensions:
        kind, content = extensions.number(2), extensions.vector(2)
        if kind in kinds:
            raise NotTlsError("its hello says something twice")
        kinds.add(kind)
        if kind == _SERVER_NAME:
            name = _server_name(content)
    return Hello(name, not kinds.isdisjoint(_ENCRYPTED))


def _server_name(content: _Bytes) -> str:
    names = content.vector(2)
    kind, name = names.number(1), names.vector(2)
    if kind != _HOST_NAME or names or content:
        raise NotTlsError("its hello names more than one server")
    text = name.rest.decode("latin-1")
    if not text.isascii() or not text.isprintable():
        raise NotTlsError("its hello names a server in no possible form")
    return text


class _Bytes:
    """Bytes that are consumed from the front."""

    def __init__(self, rest: bytes) -> None:
        self.rest = rest

    def __bool__(self) -> bool:
        return bool(self.rest)

    def take(self, size: int) -> bytes:
        if len(self.rest) < size:
            raise NotTlsError("its hello breaks off")
        taken, self.rest = self.rest[:size], self.rest[size:]
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, size: int) -> _Bytes:
        """Consume a vector whose length is a number of this size in front of it."""
        return _Bytes(self.take(self.number(size)))

"""What crosses the boundary: one request in, then frames out, each a kind, a length and a body.

The reader believes nothing. A frame of unknown kind, or longer than what is left of the allowance, ends the call.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

REQUEST, PROGRESS, PARTIAL, FILE, RESULT = b"Q", b"P", b"V", b"F", b"R"
_HEAD = struct.Struct("<cI")
_KINDS = frozenset((PROGRESS, PARTIAL, FILE, RESULT))


class Malformed(Exception):  # noqa: N818 - a finding about the other side, not an error of ours
    """What was received is no frame."""


class TooMuch(Exception):  # noqa: N818 - likewise
    """More was received than is allowed."""


def frame(kind: bytes, body: bytes) -> bytes:
    return _HEAD.pack(kind, len(body)) + body


def head(data: bytes) -> tuple[bytes, int]:
    """Kind and length of what follows."""
    kind, length = _HEAD.unpack(data)
    return kind, length


HEAD_SIZE = _HEAD.size


@dataclass(slots=True)
class Reader:
    """Cuts a stream of bytes into frames, within an allowance for all of them together."""

    allowance: int
    _held: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._held += data
        while len(self._held) >= HEAD_SIZE:
            kind, length = head(bytes(self._held[:HEAD_SIZE]))
            if kind not in _KINDS:
                raise Malformed
            if length > self.allowance:
                raise TooMuch
            if len(self._held) < HEAD_SIZE + length:
                return
            body = bytes(self._held[HEAD_SIZE : HEAD_SIZE + length])
            del self._held[: HEAD_SIZE + length]
            self.allowance -= length + HEAD_SIZE
            yield kind, body

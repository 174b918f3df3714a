"""What crosses the boundary: one request in, then frames out, each a kind, a length and a body.

Only a checkpoint is answered, by a frame of a kind that nothing else has in either direction, with the checkpoint's own
number: the code inside waits until it knows that what it saved is on disk.

The reader believes nothing. A frame of unknown kind, or longer than what is left of the allowance, ends the call.
Checkpoints are kept one by one as they come, so each has the whole of an allowance of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

REQUEST, PROGRESS, PARTIAL, FILE, RESULT = b"Q", b"P", b"V", b"F", b"R"
CHECKPOINT, ANSWER = b"C", b"A"
_HEAD = struct.Struct("<cI")
# What the path of a file may be: nobody should need to cut one off to keep it.
LONGEST_PATH, DEEPEST_PATH = 1024, 16
# How much a checkpoint says besides its state.
CHECKPOINT_HEAD = 1024
_KINDS = frozenset((PROGRESS, PARTIAL, FILE, RESULT, CHECKPOINT))


class Malformed(Exception):  # noqa: N818 - a finding about the other side, not an error of ours
    """What was received is no frame."""


class TooMuch(Exception):  # noqa: N818 - likewise
    """More was received than is allowed; of what, is its text."""


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
    checkpoint: int = 0
    _held: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._held += data
        while len(self._held) >= HEAD_SIZE:
            kind, length = head(bytes(self._held[:HEAD_SIZE]))
            if kind not in _KINDS:
                raise Malformed
            if kind == CHECKPOINT and length > self.checkpoint:
                raise TooMuch("the size of a checkpoint")
            if kind != CHECKPOINT and length > self.allowance:
                raise TooMuch("result size")
            if len(self._held) < HEAD_SIZE + length:
                return
            body = bytes(self._held[HEAD_SIZE : HEAD_SIZE + length])
            del self._held[: HEAD_SIZE + length]
            if kind != CHECKPOINT:
                self.allowance -= length + HEAD_SIZE
            yield kind, body

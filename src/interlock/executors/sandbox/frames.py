"""The frames that cross the sandbox boundary: one request in, then frames out, each a kind, a length and a body.

Only a checkpoint is answered, by a frame of a kind that nothing else has in either direction, with the checkpoint's own
number: the code inside waits until what it saved is on disk. The last frame in, if there is one, says that the call is
over; nothing that comes out after it is read.

The reader trusts nothing. A frame of unknown kind, or longer than its kind may be, or longer than what is left of the
allowance, ends the call. Every frame is charged at least `LEAST_CHARGE`, so that many small ones cost as much as a few
large ones. Checkpoints are saved one by one as they come, so each has an allowance of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import field

from interlock.core.record import dataclass

REQUEST, PROGRESS, PARTIAL, FILE, RESULT = b"Q", b"P", b"V", b"F", b"R"
CHECKPOINT, ANSWER, ABORT = b"C", b"A", b"X"
_HEAD = struct.Struct("<cI")
# Limits on the path of a file, so that it never has to be cut.
LONGEST_PATH, DEEPEST_PATH = 1024, 16
# The sizes of a checkpoint without its state, and of a file without its content (a path in JSON, escaped).
CHECKPOINT_HEAD, FILE_HEAD = 1024, 16 << 10
LEAST_CHARGE = 256


class Malformed(Exception):  # noqa: N818 - a finding about the other side, not an error of ours
    """Received bytes that are not a frame; the text says what is wrong."""


class TooMuch(Exception):  # noqa: N818 - likewise
    """More was received than is allowed; the text says of what."""


def frame(kind: bytes, body: bytes) -> bytes:
    return _HEAD.pack(kind, len(body)) + body


def head(data: bytes) -> tuple[bytes, int]:
    """Return kind and length of what follows."""
    kind, length = _HEAD.unpack(data)
    return kind, length


HEAD_SIZE = _HEAD.size


@dataclass(slots=True)
class Reader:
    """Splits a stream of bytes into frames, within an allowance for all of them together.

    `most` lists the allowed kinds, and the longest body of each.
    """

    allowance: int
    most: Mapping[bytes, int]
    _held: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> None:
        self._held += data

    def next(self) -> tuple[bytes, bytes] | None:
        """Return the next whole frame; None if there is none yet."""
        if len(self._held) < HEAD_SIZE:
            return None
        kind, length = head(bytes(self._held[:HEAD_SIZE]))
        most = self.most.get(kind)
        if most is None:
            raise Malformed
        if length > most:
            raise TooMuch(_SIZES.get(kind, "result size"))
        charge = 0 if kind == CHECKPOINT else max(LEAST_CHARGE, length + HEAD_SIZE)
        if charge > self.allowance:
            raise TooMuch("result size")
        if len(self._held) < HEAD_SIZE + length:
            return None
        body = bytes(self._held[HEAD_SIZE : HEAD_SIZE + length])
        del self._held[: HEAD_SIZE + length]
        self.allowance -= charge
        return kind, body


_SIZES = {
    CHECKPOINT: "the size of a checkpoint",
    PROGRESS: "the size of a progress report",
    PARTIAL: "the size of a partial result",
    FILE: "the size of its files",
}

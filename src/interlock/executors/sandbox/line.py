"""The line between the code inside and the supervisor, as the code's own process holds it.

Frames go out; in come the answers to checkpoints, and one that says that the call is over (`ABORT`). From then on
nothing is sent, because nobody reads it. No thread waits for that frame: a tool asks (`aborted`), or its event loop
watches the descriptor.
"""

from __future__ import annotations

import json
import select
import threading
from typing import Any, Protocol

from interlock.executors.sandbox import frames


class Control(Protocol):
    """The channel to the supervisor: a socket, or a replacement for one."""

    def recv(self, bufsize: int, /) -> bytes: ...

    def sendall(self, data: bytes, /) -> None: ...


# The descriptor of the channel, in every process of the sandbox.
DESCRIPTOR = 3


class Line:
    """Frames from the code, and requests with answers, one at a time whichever thread sends them."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._aborted = False

    def emit(self, kind: bytes, body: bytes) -> None:
        with self._lock:
            if not self._aborted:
                self._control.sendall(frames.frame(kind, body))

    def ask(self, kind: bytes, body: bytes) -> dict[str, Any]:
        """Send a frame and wait for the answer; nothing else is sent meanwhile. Empty if there will be none."""
        with self._lock:
            if not self._aborted:
                self._control.sendall(frames.frame(kind, body))
            while not self._aborted:
                kind, answer = self._read()
                if kind == frames.ANSWER:
                    return json.loads(answer)
        return {}

    def aborted(self) -> bool:
        """Whether the call is over. Never waits."""
        if self._aborted or not self._lock.acquire(blocking=False):
            return self._aborted  # another thread waits for an answer, and reads what comes
        try:
            while not self._aborted and select.select([DESCRIPTOR], [], [], 0)[0]:
                self._read()
        finally:
            self._lock.release()
        return self._aborted

    def _read(self) -> tuple[bytes, bytes]:
        """The next frame. The end of the line, like the frame for it, means that the call is over."""
        head = exactly(self._control, frames.HEAD_SIZE)
        kind, length = (frames.ABORT, 0) if head is None else frames.head(head)
        body = exactly(self._control, length)
        self._aborted = kind == frames.ABORT or body is None
        return kind, body or b""


def exactly(control: Control, size: int) -> bytes | None:
    """Receive so many bytes; None if the line ends before."""
    received = bytearray()
    while len(received) < size:
        data = control.recv(min(size - len(received), 1 << 20))
        if not data:
            return None
        received += data
    return bytes(received)

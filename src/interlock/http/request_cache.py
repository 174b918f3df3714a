"""The head of a request, known again.

A client that stays sends the same head with every request, but for the length of what follows. What such a head says is
understood once: the request is told by its bytes, and nothing of it is parsed anew. Behind some heads there is a short
way (`Way`) to the answer, for which nothing but the body is left to look at.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from interlock.http.asgi import Scope

LONGEST = 4 << 10
_DIGITS = 10

# A status, a JSON body, and further headers as they are sent.
Reply = tuple[int, bytes, bytes]
# From a body to its answer. None: nothing has happened, and the application is to be asked.
Way = Callable[[bytes], Awaitable[Reply | None]]


class Knows(Protocol):
    """An application that knows short ways."""

    def way(self, scope: Scope) -> Way | None:
        """The way behind a head, if there is one."""
        ...

    def excuse(self, error: Exception) -> Reply:
        """What is said when a way has failed."""
        ...


class Head:
    """A head that was parsed once, and what it says."""

    __slots__ = ("_after", "_before", "_length_at", "looked", "said", "way")

    def __init__(self, before: bytes, after: bytes | None, said: Scope, length_at: int) -> None:
        # The text up to the number of bytes that follow, and from there; one piece where no body follows.
        self._before = before
        self._after = after
        self._length_at = length_at
        self.said = said
        # Behind it, if somebody has looked.
        self.way: Way | None = None
        self.looked = False

    def body(self, data: bytes) -> bytes | None:
        """What follows the head, where data is this head and all that follows it; else None."""
        if not data.startswith(self._before):
            return None
        start, after = len(self._before), self._after
        if after is None:
            return b"" if len(data) == start else None
        end = data.find(b"\r", start, start + _DIGITS)
        if not data.startswith(after, end):
            return None
        body = data[end + len(after) :]
        return body if data[start:end] == b"%d" % len(body) else None

    def scope(self, length: int) -> Scope:
        """What the head says of a request with a body of this length. An application may do to it what it likes."""
        headers: list[tuple[bytes, bytes]] = self.said["headers"].copy()
        if self._after is not None:
            headers[self._length_at] = (b"content-length", b"%d" % length)
        return {**self.said, "headers": headers, "state": {}}


def known(data: bytes, scope: Scope) -> Head | None:
    """The head of a request that was one piece of data from its first byte to its last; None if that is not sure.

    The head ends where it seems to if it has one line for every header that the parser found; and all that follows is
    the body, as it is, if it has the length that the head says. (Of several requests, the last is shorter.)
    """
    text, end, body = data.partition(b"\r\n\r\n")
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    lengths = [at for at, (name, _) in enumerate(headers) if name == b"content-length"]
    if not end or len(text) >= LONGEST or not text.count(b"\n") == text.count(b"\r\n") == len(headers):
        return None
    said: Scope = {**scope, "headers": headers.copy()}
    if not lengths:
        return None if body else Head(data, None, said, -1)
    length = b"%d" % len(body)
    if len(lengths) > 1 or headers[lengths[0]][1] != length:
        return None
    # The line is there once, as the parser found one header of that name; how it is written is the client's affair.
    line = text.lower().find(b"\r\ncontent-length:")
    after = text.find(b"\r\n", line + 2) if line >= 0 else -1
    after = len(text) if after < 0 else after
    before = text[: after - len(length)]
    if line < 0 or text[after - len(length) : after] != length or before[-1:] not in b": ":
        return None
    return Head(before, text[after:] + end, said, lengths[0])

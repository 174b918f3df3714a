"""Cache of parsed request heads.

Keep-alive clients resend identical heads; only Content-Length differs. Such a head is recognised by its bytes, so it is
not parsed again, and the handler that its route prepared for it (`route`) is called with the body at once.
"""

from __future__ import annotations

from interlock.http.asgi import Scope
from interlock.http.route import Handler

LONGEST = 4 << 10
_DIGITS = 10


class CachedHead:
    """A head that was parsed once, its scope, and its route's handler."""

    __slots__ = ("_after", "_before", "_length_at", "handler", "scope")

    def __init__(self, before: bytes, after: bytes | None, scope: Scope, length_at: int) -> None:
        # The text before the value of Content-Length and the text after it; all of it where no body follows.
        self._before = before
        self._after = after
        self._length_at = length_at
        # Shared by all requests with this head: handlers read it, applications get a copy (`scope_for`).
        self.scope = scope
        # None until a route has prepared one.
        self.handler: Handler | None = None

    def body(self, data: bytes) -> bytes | None:
        """The body, where data is this head and one whole body; else None."""
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

    def scope_for(self, length: int) -> Scope:
        """The scope of a request with a body of this length, for an application, which may change it."""
        headers: list[tuple[bytes, bytes]] = self.scope["headers"].copy()
        if self._after is not None:
            headers[self._length_at] = (b"content-length", b"%d" % length)
        return {**self.scope, "headers": headers, "state": {}}


def cached_head(data: bytes, scope: Scope) -> CachedHead | None:
    """The head of a request that came as one piece of data, ready to be recognised; None if that is not certain.

    The head ends at the first empty line if it has one line for every header that the parser found. All that follows is
    the body if it has the length that the head says. (Of several requests, the last is shorter.)
    """
    text, end, body = data.partition(b"\r\n\r\n")
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    lengths = [at for at, (name, _) in enumerate(headers) if name == b"content-length"]
    if not end or len(text) >= LONGEST or not text.count(b"\n") == text.count(b"\r\n") == len(headers):
        return None
    own: Scope = {**scope, "headers": headers.copy()}
    if not lengths:
        return None if body else CachedHead(data, None, own, -1)
    length = b"%d" % len(body)
    if len(lengths) > 1 or headers[lengths[0]][1] != length:
        return None
    # The line is there once, as the parser found one header of that name. Clients differ in how they write it.
    line = text.lower().find(b"\r\ncontent-length:")
    after = text.find(b"\r\n", line + 2) if line >= 0 else -1
    after = len(text) if after < 0 else after
    before = text[: after - len(length)]
    if line < 0 or text[after - len(length) : after] != length or before[-1:] not in b": ":
        return None
    return CachedHead(before, text[after:] + end, own, lengths[0])

"""Cache of parsed request heads.

Keep-alive clients resend the same head; only the length of the body differs, and the values of the headers that belong
to one request (`PER_REQUEST` in `route`: its trace, its idempotency key, its id). Such a head is recognised by its
bytes, so it is not parsed again, and the handler that its route prepared is called with the body and those values.

    POST /mcp HTTP/1.1 … traceparent: ░░░░░ … content-length: ░░ …        ░: values, between text that stays the same

INVARIANT: a recognised head is one that the parser would accept, with the same names and values. So a value is
recognised only if it is short and has only plain characters; a head with any other is left to the parser.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlock.core.expressions import expression
from interlock.http.asgi import Scope
from interlock.http.route import PER_REQUEST, Handler, PerRequest

LONGEST = 4 << 10
_LENGTH = b"content-length"
_VALUES = PER_REQUEST | {_LENGTH}
_LONGEST_VALUE = 512
# A value as the parser returns it: without space around it, and without characters that the parser might refuse.
_is_plain = expression(rb"[!-~]([ -~]*[!-~])?").fullmatch
_NONE: PerRequest = {}


class CachedHead:
    """A head that was parsed once, its scope, and its route's handler."""

    __slots__ = ("_after", "_before", "_length_at", "_places", "_sent", "handler", "scope")

    def __init__(self, before: bytes, after: Sequence[bytes], scope: Scope, places: Sequence[int]) -> None:
        # The text before the first value, and the text after each value.
        self._before = before
        self._after = after
        # The places of the values among the headers, and the value that is the length of the body (-1: there is none).
        self._places = places
        names: list[bytes] = [scope["headers"][place][0] for place in places]
        self._length_at = names.index(_LENGTH) if _LENGTH in names else -1
        # Reversed: of a header that is sent twice, routes see the first value.
        self._sent = [(name, at) for at, name in enumerate(names) if name != _LENGTH][::-1]
        # Shared by all requests with this head: handlers read it, applications get a copy (`scope_for`).
        self.scope = scope
        # None until a route has prepared one.
        self.handler: Handler | None = None

    def read(self, data: bytes) -> tuple[bytes, PerRequest, list[bytes]] | None:
        """The body, the headers of this one request, and all values. None if data is not this head and a whole body."""
        if not data.startswith(self._before):
            return None
        at = len(self._before)
        values: list[bytes] = []
        for after in self._after:
            end = data.find(b"\r", at, at + _LONGEST_VALUE)
            if not data.startswith(after, end):
                return None
            values.append(data[at:end])
            at = end + len(after)
        body = data[at:]
        if values[self._length_at] != b"%d" % len(body) if self._length_at >= 0 else body:
            return None
        if not self._sent:
            return body, _NONE, values
        return (body, {name: values[at] for name, at in self._sent}, values) if all(map(_is_plain, values)) else None

    def scope_for(self, values: Sequence[bytes]) -> Scope:
        """The scope of a request with these values, for an application, which may change it."""
        headers: list[tuple[bytes, bytes]] = self.scope["headers"].copy()
        for place, value in zip(self._places, values, strict=True):
            headers[place] = headers[place][0], value
        return {**self.scope, "headers": headers, "state": {}}


def cached_head(data: bytes, scope: Scope) -> CachedHead | None:
    """The head of a request that came as one piece of data, ready to be recognised; None if that is not certain.

    The head ends at the first empty line if it has one line for every header that the parser found. All that follows is
    the body if it has the length that the head says. (Of several requests, the last is shorter.)
    """
    text, end, body = data.partition(b"\r\n\r\n")
    headers: list[tuple[bytes, bytes]] = scope["headers"].copy()
    if not end or len(text) >= LONGEST or not text.count(b"\n") == text.count(b"\r\n") == len(headers):
        return None
    parts: list[bytes] = []
    places: list[int] = []
    length: bytes | None = None
    done = line = 0
    for place, (name, value) in enumerate(headers):
        line = text.find(b"\r\n", line) + 2
        if name not in _VALUES:
            continue
        at = _place_of(name, value, text, line)
        if at is None or (name == _LENGTH and length is not None):
            return None
        length = value if name == _LENGTH else length
        parts.append(text[done:at])
        places.append(place)
        headers[place] = name, b""
        done = at + len(value)
    if (b"" if length is None else length) != (b"%d" % len(body) if body or length is not None else b""):
        return None
    before, *after = (*parts, text[done:] + end)
    return CachedHead(before, after, {**scope, "headers": headers}, places)


def _place_of(name: bytes, value: bytes, text: bytes, line: int) -> int | None:
    """The place of a header's value in the head, whose line begins there; None unless it is written plainly."""
    colon = line + len(name)
    end = text.find(b"\r\n", colon)
    raw = text[colon : len(text) if end < 0 else end]
    if text[line:colon].lower() != name or raw[:1] != b":" or raw[1:].lstrip(b" \t") != value:
        return None
    return colon + len(raw) - len(value) if len(value) < _LONGEST_VALUE and _is_plain(value) else None

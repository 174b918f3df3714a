"""The headers that carry a trace across processes: W3C `traceparent` and `tracestate`.

    traceparent   00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01     version, trace, span, flags
    tracestate    vendor=value,other=value

An unreadable header is not an error: its call starts a trace of its own. Between an endpoint and the gateway both
headers travel as one text, the state after a space.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from interlock.core.expressions import expression
from interlock.core.record import NamedTuple

if TYPE_CHECKING:
    from interlock.call.phases import Traced

_TRACEPARENT = expression(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z")
_CLAIM = expression(r"[0-9A-Fa-f]{2}-[^-]*-[^-]*-")
_TRACE_ID = expression(r"(?!0{32})[0-9a-f]{32}\Z")
_KEY = r"[a-z0-9][a-z0-9_*/@-]{0,255}"
_MEMBER = expression(rf"{_KEY}=[\x21-\x2b\x2d-\x3c\x3e-\x7e\x20]{{0,255}}[\x21-\x2b\x2d-\x3c\x3e-\x7e]\Z")
_MOST_MEMBERS = 32
# The longest traceparent that is parsed (later versions may be longer than ours), and the longest state passed on.
_LONGEST = 256
_LONGEST_STATE = 512


class Position(NamedTuple):
    """A position in a trace: whatever is done next is a child of this span."""

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


def joined(traceparent: str | None, tracestate: str | None = None) -> str | None:
    """Join both headers into the one text that a request carries; None if the first cannot be read."""
    if traceparent is None or read(traceparent) is None:
        return None
    state = None if tracestate is None else _state(tracestate)
    return f"{traceparent} {state}" if state else traceparent


def sent(headers: Mapping[bytes, bytes]) -> str | None:
    """Join both headers of a request over HTTP."""
    if b"traceparent" not in headers:
        return None
    state = headers.get(b"tracestate")
    return joined(headers[b"traceparent"].decode("latin-1"), None if state is None else state.decode("latin-1"))


def claims(text: str) -> bool:
    """Whether a text has the form of a traceparent, rather than an id of the caller's own."""
    return text[2:3] == "-" and _CLAIM.match(text) is not None


@lru_cache(maxsize=32)
def read(text: str) -> Position | None:
    """Parse a traceparent and the state after it; None if it cannot be read.

    The endpoint reads it to see whether it can be read, and the gateway a moment later for the position.
    """
    traceparent, _, state = text.partition(" ")
    match = _TRACEPARENT.match(traceparent) if len(traceparent) <= _LONGEST else None
    if match is None or (match[4] is not None and traceparent.startswith("00")):
        return None  # version 00 ends with the flags; additions of later versions are ignored
    return Position(match[1], match[2], bool(int(match[3], 16) & 1), _state(state))


def _state(text: str) -> str:
    """Return a tracestate unchanged if it may be passed on, otherwise an empty text."""
    if not text or len(text) > _LONGEST_STATE:
        return ""
    members = [member.strip(" \t") for member in text.split(",")]
    members = [member for member in members if member]
    names = {member.partition("=")[0] for member in members}
    if len(members) > _MOST_MEMBERS or len(names) < len(members) or not all(map(_MEMBER.match, members)):
        return ""
    return ",".join(members)


def unrecorded(trace_id: str, span: bytes) -> str:
    """The traceparent of a call that is not recorded here: others may still follow it."""
    return f"00-{trace_hex(trace_id)}-{span.hex()}-00"


def headers(trace_id: str, span: Traced | None, random_bytes: Callable[[int], bytes]) -> dict[str, str]:
    """The W3C headers with the position of a call in its trace, for the next request."""
    if span is None:
        return {"traceparent": unrecorded(trace_id, random_bytes(8))}
    headers_ = {"traceparent": span.traceparent}
    return {**headers_, "tracestate": span.state} if span.state else headers_


def trace_hex(trace_id: str) -> str:
    """A trace id in the form of the W3C; an id of another form is hashed into it."""
    return trace_id if _TRACE_ID.match(trace_id) else hashlib.sha256(trace_id.encode()).hexdigest()[:32]

"""Frames as hostile code in a sandbox could write them: near the right form, far from it, and near every bound."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from interlock.executors.sandbox import frames
from tests.thorough import THOROUGH

# The largest body of each kind, for a job with a `result_bytes` of 4 MiB, 4 KiB of files and checkpoints of 4 KiB.
RESULT_BYTES = 4 << 20


def said(kind: bytes, document: Any) -> bytes:
    return frames.frame(kind, document if isinstance(document, bytes) else json.dumps(document).encode())


DONE = said(frames.RESULT, {"ok": True, "value": 1})


def _checkpoint(head: Any, state: Any) -> bytes:
    return frames.frame(frames.CHECKPOINT, json.dumps(head).encode() + b"\n" + json.dumps(state).encode())


def _file(path: Any, content: bytes) -> bytes:
    return frames.frame(frames.FILE, json.dumps(path).encode() + b"\n" + content)


# Anything at all, near what is right and far from it.
Any_ = st.SearchStrategy[Any]
_odd: Any_ = st.sampled_from([
    -50, 1e999, -1e999, 10**30, -(10**30), 2**63, float("nan"), "\ud800", "\x1b[2J", "\u202e", "x" * 300, "", True,
    None,
])  # fmt: skip
_names = st.text(max_size=10) | st.just("self")
JSON: Any_ = st.recursive(
    _odd | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_names, inner, max_size=4),
    max_leaves=12,
)
_cost: Any_ = st.dictionaries(st.sampled_from(["network", "compute", "llm_inference", "total"]), JSON, max_size=3)
_change: Any_ = st.dictionaries(st.sampled_from(["resource", "operation", "before", "after", "more"]), JSON)
_fact: Any_ = st.fixed_dictionaries({"what": JSON, "claimed": JSON, "observed": JSON})
_reports: Any_ = st.fixed_dictionaries(
    {},
    optional={
        "changes": st.lists(_change | JSON, max_size=3) | JSON,
        "attestations": st.lists(_fact, max_size=3) | JSON,
        "compensation": JSON,
        "modifiers": JSON,
        "cost": _cost | JSON,
        "session": JSON,
        "unknown": JSON,
    },
)
_error: Any_ = st.dictionaries(st.sampled_from(["type", "message", "errno", "code", "retryable"]), JSON)
_result: Any_ = st.fixed_dictionaries(
    {"ok": st.booleans() | JSON},
    optional={"value": JSON, "reports": _reports | JSON, "error": _error | JSON, "exit": JSON},
)
_progress: Any_ = st.dictionaries(st.sampled_from(["self", "message", "percent", "steps", "\u202e"]), JSON) | JSON
_head: Any_ = st.fixed_dictionaries({"number": st.integers(0, 3) | JSON, "label": st.just("a") | JSON}) | JSON
_path: Any_ = st.sampled_from(["a", "a/b", "../a", "/a", "", "a\n", "\ud800", "a" * 2000, "\u202ea"]) | JSON
_kinds = st.sampled_from([b"P", b"V", b"F", b"C", b"R", b"Q", b"A", b"x", b"\0"])
_frame: st.SearchStrategy[bytes] = (
    st.builds(said, st.just(frames.PROGRESS), _progress)
    | st.builds(said, st.just(frames.PARTIAL), JSON)
    | st.builds(said, st.just(frames.RESULT), _result)
    | st.builds(_checkpoint, _head, JSON)
    | st.builds(_file, _path, st.binary(max_size=50))
    | st.builds(frames.frame, _kinds, st.binary(max_size=60))
    | st.binary(max_size=12)
)
# Frames near the largest size that their kind may have: many values, deep ones, long texts and long numbers.
_PIECES = (
    b"[],", b"{},", b'"",', b"1,", b"-1e9,", b"0.1234567890123456,", b"12345678901234567890123,", b"null,",
    b'"\\u202e",', b'"\\u0000\\u001b[2J",', b'{"a":1},', b'{"resource":"a","operation":"UPDATE"},',
    b'{"what":"a","claimed":1,"observed":2},', b'"' + b"x" * 1000 + b'",',
)  # fmt: skip


def _rows_of(piece: bytes, size: int) -> bytes:
    return b"[" + (piece * (size // len(piece)))[:-1] + b"]"


def _members_of(piece: bytes, size: int) -> bytes:
    member = b'"%d":' + piece
    return b"{" + b"".join(member % number for number in range(size // (len(member) + 6)))[:-1] + b"}"


def _nested(piece: bytes, size: int) -> bytes:
    return b"[" * (size // 2) + piece[:-1] + b"]" * (size // 2)


def _text_of(piece: bytes, size: int) -> bytes:
    return json.dumps(piece.decode() * (size // len(piece))).encode()[:size]


_WRAPPED = (
    (frames.PROGRESS, b"%s"), (frames.PROGRESS, b'{"message":%s}'), (frames.PROGRESS, b'{"steps":%s}'),
    (frames.PARTIAL, b"%s"),
    (frames.RESULT, b'{"ok":true,"value":%s}'), (frames.RESULT, b'{"ok":true,"value":1,"reports":{"changes":%s}}'),
    (frames.RESULT, b'{"ok":true,"value":1,"reports":{"attestations":%s}}'),
    (frames.RESULT, b'{"ok":true,"value":1,"reports":{"session":%s}}'),
    (frames.RESULT, b'{"ok":true,"value":1,"reports":{"modifiers":%s}}'),
    (frames.RESULT, b'{"ok":true,"value":1,"reports":{"cost":%s}}'),
    (frames.RESULT, b'{"ok":false,"error":{"type":"A","message":%s}}'),
    (frames.RESULT, b'{"ok":false,"error":%s}'),
    (frames.CHECKPOINT, b'{"number":1,"label":"a"}\n%s'), (frames.CHECKPOINT, b'{"number":1,"label":%s}\n1'),
    (frames.FILE, b'%s\nx'),
)  # fmt: skip
_MOST = {frames.PROGRESS: 64 << 10, frames.PARTIAL: 256 << 10, frames.CHECKPOINT: 4096, frames.FILE: 4096}


@st.composite
def _large(draw: st.DrawFn) -> bytes:
    kind, wrapped = draw(st.sampled_from(_WRAPPED))
    build = draw(st.sampled_from([_rows_of, _members_of, _nested, _text_of]))
    most = _MOST.get(kind, RESULT_BYTES) - len(wrapped)
    return frames.frame(kind, wrapped % build(draw(st.sampled_from(_PIECES)), draw(st.integers(100, most))))


# The first bad frame ends a call, so most are good ones with something odd after them.
_good = st.sampled_from(
    [
        said(frames.PROGRESS, {"message": "on", "percent": 3}),
        said(frames.PROGRESS, {"message": "", "self": 1}),
        said(frames.PARTIAL, [1, "a"]),
        frames.frame(frames.FILE, b'"f"\nx'),
    ]
)
ROWS = st.tuples(
    st.lists(_good, min_size=10 if THOROUGH else 0, max_size=40),
    st.lists(_frame, min_size=1, max_size=4) | st.lists(_large(), min_size=1, max_size=1),
    st.booleans(),
)
# Bytes that end within a frame, or a byte that was changed.
CUT = st.none() | st.tuples(st.integers(0, 1 << 20), st.none() | st.integers(0, 255))


def spoilt(stream: bytes, cut: tuple[int, int | None] | None) -> bytes:
    if cut is None or not stream:
        return stream
    place, byte = cut[0] % len(stream), cut[1]
    return stream[:place] + (b"" if byte is None else bytes([byte]) + stream[place + 1 :])

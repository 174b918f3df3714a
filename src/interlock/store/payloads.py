"""Payloads: the tables `payload`, `payload_piece` and `payload_use`. Payloads are what calls leave, by reference.

A payload is a large result, a file, a private value of a change (`value:`), the inputs of a call (`inputs:`), what
undoing it needs (`undo:`), what a caller's conversations remember of it (`memory:`), or a background call with its
result (`background:`). `body` is encrypted, and `size` is that of the content; a row of an older version holds the
content itself. A row whose body is NULL says in `reason` why: it expired, was discarded, or was never stored.

A large payload is written in pieces, each in a transaction of its own, so that no writer waits long. `body` is then
the head of the encrypted bytes, `pieces` is the number of pieces, and `payload_piece` holds the rest in that order.
Pieces exist before the row that names them and may outlive its body. At these times a fact names them:
- `pieces:REF` while they are written. Its value is the id of the process that writes them. The transaction that inserts
  the row removes the fact.
- `pieces-released:REF` when nothing needs them any more. They are removed, a few at a time, then the fact.
INVARIANT: every piece belongs to a row with a body or to such a fact.

`payload_use` holds how many bytes are kept for the home, for each tenant and for each caller. Triggers of the database
keep it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from interlock.core.record import NamedTuple
from interlock.store import facts
from interlock.store.port import Reader, Transaction

# The bytes of a piece. Other writers wait a millisecond or two while one is written.
PIECE_BYTES = 256 * 1024
# The bytes of a payload that is written in pieces which stay in its row. They tell by which key it was encrypted.
_HEAD_BYTES = 64
_WRITTEN, _WRITTEN_END = "pieces:", "pieces;"
_RELEASED, _RELEASED_END = "pieces-released:", "pieces-released;"


class Payload(NamedTuple):
    ref: str
    call: str
    owner: str
    body: bytes | None
    size: int
    created_ms: int
    expires_ms: int
    reason: str
    pieces: int = 0


class Content(NamedTuple):
    """The body of a payload, the size of its content and the number of pieces that follow the body."""

    body: bytes | None
    size: int
    pieces: int


class Owned(NamedTuple):
    """The body of a payload and its owner."""

    body: bytes | None
    owner: str


def insert(transaction: Transaction, payload: Payload) -> None:
    transaction.later(
        "INSERT INTO payload (ref, call, owner, body, size, created_ms, expires_ms, reason, pieces) VALUES {rows}",
        payload,
    )


class PayloadRow(NamedTuple):
    """A payload, for somebody who asks for its content."""

    owner: str
    reason: str
    call: str


def find(reader: Reader, ref: str) -> PayloadRow | None:
    row = reader.one("SELECT owner, reason, call FROM payload WHERE ref = ?", (ref,))
    return None if row is None else PayloadRow._make(row)


def exists(reader: Reader, ref: str) -> bool:
    """Whether there is such a payload, with a body or without."""
    return reader.one("SELECT 1 FROM payload WHERE ref = ?", (ref,)) is not None


def content(reader: Reader, ref: str) -> Content | None:
    row = reader.one("SELECT body, size, pieces FROM payload WHERE ref = ?", (ref,))
    return None if row is None else Content._make(row)


def owned(reader: Reader, ref: str) -> Owned | None:
    row = reader.one("SELECT body, owner FROM payload WHERE ref = ?", (ref,))
    return None if row is None else Owned._make(row)


def owned_until(reader: Reader, ref: str, now_ms: int) -> Owned | None:
    """The body of a payload whose time is not over, and its owner."""
    row = reader.one("SELECT body, owner FROM payload WHERE ref = ? AND expires_ms > ?", (ref, now_ms))
    return None if row is None else Owned._make(row)


def body(reader: Reader, ref: str) -> bytes | None:
    """The body of a payload; None where there is no such payload or its body is gone."""
    row = reader.one("SELECT body FROM payload WHERE ref = ?", (ref,))
    return None if row is None else row[0]


def has_body(reader: Reader, ref: str) -> bool:
    return reader.one("SELECT 1 FROM payload WHERE ref = ? AND body IS NOT NULL", (ref,)) is not None


def reason(reader: Reader, ref: str) -> str | None:
    """The reason why a payload has no body; empty where it has one, None where there is no such payload."""
    row = reader.one("SELECT reason FROM payload WHERE ref = ?", (ref,))
    return None if row is None else row[0]


def discard(transaction: Transaction, call: str) -> None:
    """Remove the bodies of a call's results and files. Inputs, private values and what undoing needs stay."""
    result = f"payload:{call}"
    statement = "SELECT ref FROM payload WHERE body IS NOT NULL AND (ref = ? OR (ref > ? AND ref < ?))"
    for (ref,) in transaction.all(statement, (result, f"{result}.", f"{result}/")):
        _empty(transaction, ref, "discarded by its caller")


def inputs_of(reader: Reader, call: str) -> str | None:
    """The reference of the newest inputs of a call that are kept."""
    stem = f"inputs:{call}"
    row = reader.one(
        "SELECT ref FROM payload WHERE body IS NOT NULL AND (ref = ? OR (ref > ? AND ref < ?))"
        " ORDER BY created_ms DESC, ref DESC LIMIT 1",
        (stem, f"{stem}.", f"{stem}/"),
    )
    return None if row is None else row[0]


def replace_inputs(transaction: Transaction, call: str) -> None:
    """Remove the inputs of a call that were stored while it waited: others are stored now."""
    stem = f"inputs:{call}"
    statement = "SELECT ref FROM payload WHERE body IS NOT NULL AND ref > ? AND ref < ?"
    for (ref,) in transaction.all(statement, (f"{stem}.", f"{stem}/")):
        _empty(transaction, ref, "replaced by those of a later time")


class Expiring(NamedTuple):
    ref: str
    size: int
    expires_ms: int


def expiring(reader: Reader, now_ms: int, after: tuple[int, str], most: int) -> list[Expiring]:
    """Payloads with a body whose time is over, in order of expiry and reference, behind a place in that order."""
    # Over the index on expiry, and the table only for its small columns: bodies are not read.
    rows = reader.all(
        "SELECT ref, size, expires_ms FROM payload WHERE expires_ms <= ? AND (expires_ms, ref) > (?, ?)"
        " AND body IS NOT NULL ORDER BY expires_ms, ref LIMIT ?",
        (now_ms, *after, most),
    )
    return list(map(Expiring._make, rows))


def expire(transaction: Transaction, ref: str) -> None:
    """Remove the body of a payload whose time is over. The row stays, unless no record names it."""
    if ref.startswith(("memory:", "background:")):
        remove(transaction, ref)
    else:
        _empty(transaction, ref, "expired")


def _empty(transaction: Transaction, ref: str, reason: str) -> None:
    """Remove the body of a payload and say why. Its pieces are left to `remove_pieces`."""
    transaction.execute("UPDATE payload SET body = NULL, reason = ? WHERE ref = ?", (reason, ref))
    if transaction.one("SELECT 1 FROM payload WHERE ref = ? AND pieces > 0", (ref,)) is not None:
        release_pieces(transaction, ref)


def lasts(reader: Reader, ref: str, now_ms: int) -> bool:
    """Whether a payload has a body and its time is not over."""
    statement = "SELECT 1 FROM payload WHERE ref = ? AND body IS NOT NULL AND expires_ms > ?"
    return reader.one(statement, (ref, now_ms)) is not None


def lasting(reader: Reader, prefix: str, now_ms: int, most: int) -> list[tuple[str, bytes, int]]:
    """The newest payloads whose references begin so and whose time is not over: reference, body and when stored."""
    rows = reader.all(
        "SELECT ref, body, created_ms FROM payload WHERE ref > ? AND ref < ? AND body IS NOT NULL AND expires_ms > ?"
        " ORDER BY created_ms DESC, ref LIMIT ?",
        (prefix, f"{prefix}g", now_ms, most),
    )
    return [(ref, body, created_ms) for ref, body, created_ms in rows]


def remove(transaction: Transaction, ref: str) -> None:
    """Remove a payload that no record names."""
    transaction.execute("DELETE FROM payload WHERE ref = ?", (ref,))


# Pieces


def head(sealed: bytes) -> bytes:
    """The part of an encrypted payload in pieces that its row holds."""
    return sealed[:_HEAD_BYTES]


def pieces(sealed: bytes) -> list[memoryview]:
    """The pieces of an encrypted payload; none of one that is small enough for its row."""
    if len(sealed) <= PIECE_BYTES:
        return []
    view = memoryview(sealed)
    return [view[start : start + PIECE_BYTES] for start in range(_HEAD_BYTES, len(sealed), PIECE_BYTES)]


def add_piece(transaction: Transaction, ref: str, number: int, piece: memoryview, writer: str) -> None:
    """Write a piece of a payload that has no row yet. `number` counts from 1; `writer` is the process that writes."""
    if number == 1:
        facts.put(transaction, _WRITTEN + ref, writer)
    transaction.execute("INSERT INTO payload_piece (ref, number, body) VALUES (?, ?, ?)", (ref, number, piece))


def take_pieces(transaction: Transaction, ref: str, writer: str) -> bool:
    """Give the pieces of a payload to its row, which this transaction inserts. False where they were released."""
    return facts.remove_with(transaction, _WRITTEN + ref, (writer,))


def release_pieces(transaction: Transaction, ref: str) -> None:
    """Leave the pieces of a payload to `remove_pieces`."""
    facts.remove(transaction, _WRITTEN + ref)
    facts.put(transaction, _RELEASED + ref, "")


def unfinished(reader: Reader) -> list[tuple[str, str]]:
    """The payloads whose pieces are written and named by no row yet: the reference and the process that writes."""
    return [(name.removeprefix(_WRITTEN), writer) for name, writer in facts.between(reader, _WRITTEN, _WRITTEN_END)]


def has_released(reader: Reader) -> bool:
    """Whether there are pieces to be removed."""
    return bool(facts.first_between(reader, _RELEASED, _RELEASED_END, 1))


def remove_pieces(transaction: Transaction, most: int) -> int:
    """Remove up to `most` pieces that were released. Returns how many were."""
    removed = 0
    for name in facts.first_between(transaction, _RELEASED, _RELEASED_END, most):
        ref = name.removeprefix(_RELEASED)
        statement = (
            "DELETE FROM payload_piece WHERE ref = ? AND number IN"
            " (SELECT number FROM payload_piece WHERE ref = ? ORDER BY number LIMIT ?)"
        )
        removed += transaction.execute(statement, (ref, ref, most - removed)).rowcount
        if removed >= most:
            break
        facts.remove(transaction, name)
    return removed


def piece(reader: Reader, ref: str, number: int) -> bytes | None:
    row = reader.one("SELECT body FROM payload_piece WHERE ref = ? AND number = ?", (ref, number))
    return None if row is None else row[0]


def whole(reader: Reader, ref: str) -> bytes | None:
    """The body of a payload with its pieces, read at once; None where there is none or its body is gone."""
    stored = content(reader, ref)
    if stored is None or stored.body is None:
        return None
    rest = (piece(reader, ref, number) for number in range(1, stored.pieces + 1))
    return stored.body if not stored.pieces else b"".join((stored.body, *(one or b"" for one in rest)))


def incomplete(reader: Reader) -> Iterator[str]:
    """Payloads in pieces that lack some of them."""
    for (ref,) in reader.each(
        "SELECT ref FROM payload WHERE pieces > 0 AND body IS NOT NULL AND pieces != "
        "(SELECT COUNT(*) FROM payload_piece AS one WHERE one.ref = payload.ref AND number <= payload.pieces)"
    ):
        yield ref


# Use


def bytes_used(reader: Reader, scopes: Collection[str]) -> dict[str, int]:
    """Return the stored bytes of scopes (`home`, `tenant:…`, `caller:…`). Those without any are left out."""
    marks = ", ".join("?" * len(scopes))
    return dict(reader.all(f"SELECT scope, bytes FROM payload_use WHERE scope IN ({marks})", tuple(scopes)))  # noqa: S608 - marks

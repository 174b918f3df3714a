"""Payloads: the table `payload`, which holds by reference what calls leave behind, and the table `payload_use`.

A payload is a large result, a file, a private value of a change (`value:`), the inputs of a call (`inputs:`) or what
undoing it needs (`undo:`). `body` is encrypted, and `size` is that of the content; a row of an older version holds the
content itself. A row whose body is NULL says in `reason` why: it expired, was discarded, or was never stored.

`payload_use` holds how many bytes are kept for the home, for each tenant and for each caller. Triggers of the database
keep it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from interlock.store.port import Reader, Transaction


class Payload(NamedTuple):
    ref: str
    call: str
    owner: str
    body: bytes | None
    size: int
    created_ms: int
    expires_ms: int
    reason: str


class Content(NamedTuple):
    """The body of a payload and the size of its content."""

    body: bytes | None
    size: int


class Owned(NamedTuple):
    """The body of a payload and its owner."""

    body: bytes | None
    owner: str


def insert(transaction: Transaction, payload: Payload) -> None:
    transaction.execute(
        "INSERT INTO payload (ref, call, owner, body, size, created_ms, expires_ms, reason)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        payload,
    )


class Found(NamedTuple):
    """A payload, for somebody who asks for its content."""

    body: bytes | None
    owner: str
    reason: str
    call: str
    size: int


def find(reader: Reader, ref: str) -> Found | None:
    row = reader.one("SELECT body, owner, reason, call, size FROM payload WHERE ref = ?", (ref,))
    return None if row is None else Found._make(row)


def exists(reader: Reader, ref: str) -> bool:
    """Whether there is such a payload, with a body or without."""
    return reader.one("SELECT 1 FROM payload WHERE ref = ?", (ref,)) is not None


def content(reader: Reader, ref: str) -> Content | None:
    row = reader.one("SELECT body, size FROM payload WHERE ref = ?", (ref,))
    return None if row is None else Content._make(row)


def owned(reader: Reader, ref: str) -> Owned | None:
    row = reader.one("SELECT body, owner FROM payload WHERE ref = ?", (ref,))
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
    transaction.execute(
        "UPDATE payload SET body = NULL, reason = 'discarded by its caller'"
        " WHERE call = ? AND body IS NOT NULL AND ref NOT LIKE 'undo:%' AND ref NOT LIKE 'inputs:%'"
        " AND ref NOT LIKE 'value:%'",
        (call,),
    )


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
    """Remove the body of a payload whose time is over. The row stays."""
    transaction.execute("UPDATE payload SET body = NULL, reason = 'expired' WHERE ref = ?", (ref,))


def bytes_used(reader: Reader, scopes: Collection[str]) -> dict[str, int]:
    """How many bytes are kept for scopes (`home`, `tenant:…`, `caller:…`). Those without any are left out."""
    marks = ", ".join("?" * len(scopes))
    return dict(reader.all(f"SELECT scope, bytes FROM payload_use WHERE scope IN ({marks})", tuple(scopes)))  # noqa: S608 - marks

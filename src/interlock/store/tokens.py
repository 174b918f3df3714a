"""Table `revocation`, and the records of the journal about tokens.

A row of `revocation` is a link of a delegation chain, a signing key or an identity that is void. Rows are only added.
Tokens themselves are not stored: the journal has a record of kind `authority` for each that was given out.
"""

from __future__ import annotations

from interlock.core.record import NamedTuple
from interlock.store.expressions import contains
from interlock.store.port import Reader, Transaction


class Revocation(NamedTuple):
    """Something void. `kind` is jti, did or key."""

    seq: int
    kind: str
    ref: str


def revoke(transaction: Transaction, kind: str, ref: str, *, at_ms: int, by: str, reason: str) -> None:
    """Add a revocation. Where there is one of the same thing, that one stays as it is."""
    transaction.execute(
        'INSERT INTO revocation (kind, ref, at_ms, "by", reason) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING',
        (kind, ref, at_ms, by, reason),
    )
    transaction.notifies = True


def revocations_after(reader: Reader, seq: int) -> list[Revocation]:
    """The revocations with a higher number, in order."""
    rows = reader.all("SELECT seq, kind, ref FROM revocation WHERE seq > ? ORDER BY seq", (seq,))
    return [Revocation._make(row) for row in rows]


def given_out(reader: Reader, prefix: str, one: bytes, other: bytes) -> set[str]:
    """The ids that begin with a prefix, of links with an `authority` record that contains one of two texts."""
    rows = reader.all(
        "SELECT DISTINCT call FROM journal WHERE call >= ? AND call < ? AND kind = 'authority'"  # noqa: S608 - constant
        f" AND ({contains('body')} OR {contains('body')})",
        (prefix, f"{prefix}\U0010ffff", one, other),
    )
    return {call for (call,) in rows}


def authority_bodies_with(reader: Reader, text: bytes) -> list[bytes]:
    """The `authority` records that contain a text."""
    statement = f"SELECT body FROM journal WHERE kind = 'authority' AND {contains('body')}"  # noqa: S608 - constant
    rows = reader.all(statement, (text,))
    return [body for (body,) in rows]

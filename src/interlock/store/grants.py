"""Uses of grants: the table `grant_use`.

A row says how often a link of a token was used, for links that may be used a bounded number of times.
"""

from __future__ import annotations

from interlock.store.port import Reader, Transaction


def used(reader: Reader, jti: str) -> int:
    """Return how often a link was used."""
    row = reader.one("SELECT used FROM grant_use WHERE jti = ?", (jti,))
    return 0 if row is None else row[0]


def add_uses(transaction: Transaction, jti: str, count: int) -> None:
    transaction.execute(
        "INSERT INTO grant_use (jti, used) VALUES (?, ?)"
        " ON CONFLICT (jti) DO UPDATE SET used = grant_use.used + excluded.used",
        (jti, count),
    )

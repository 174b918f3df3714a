"""Table `rate`: the calls that were admitted under each rate limit.

A row is one admitted call: the bucket in which it counts, its number there and its time. Numbers within a bucket grow
by one, and rows are removed from the lowest number on. So the n-th last call of a bucket is found by its number.
"""

from __future__ import annotations

from interlock.store.port import Reader, Transaction


def nth_last_ms(reader: Reader, bucket: str, n: int) -> int | None:
    """The time of the n-th last call of a bucket; None where it has fewer."""
    row = reader.one(
        "SELECT at_ms FROM rate WHERE bucket = ?1"
        " AND number = (SELECT max(number) FROM rate WHERE bucket = ?1) - ?2 + 1",
        (bucket, n),
    )
    return None if row is None else row[0]


def insert(transaction: Transaction, bucket: str, at_ms: int) -> None:
    """Add a call to a bucket under the next number."""
    transaction.execute(
        "INSERT INTO rate (bucket, number, at_ms)"
        " SELECT ?1, coalesce(max(number), 0) + 1, ?2 FROM rate WHERE bucket = ?1",
        (bucket, at_ms),
    )


def keep_last(transaction: Transaction, bucket: str, n: int) -> None:
    """Remove all but the last n calls of a bucket."""
    transaction.execute(
        "DELETE FROM rate WHERE bucket = ?1 AND number <= (SELECT max(number) FROM rate WHERE bucket = ?1) - ?2",
        (bucket, n),
    )


def delete_until(transaction: Transaction, at_ms: int, most: int) -> int:
    """Remove calls that are not younger than a time, at most so many; returns how many went."""
    return transaction.execute(
        "DELETE FROM rate WHERE (bucket, number) IN (SELECT bucket, number FROM rate WHERE at_ms <= ? LIMIT ?)",
        (at_ms, most),
    ).rowcount

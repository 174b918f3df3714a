"""Surfaces: the table `surface_tool`, with the tools that each holder of a surface has loaded.

A holder is a token, by its digest, or a local caller. What was loaded is known to every process on the store.
"""

from __future__ import annotations

from collections.abc import Iterable

from interlock.store import epochs
from interlock.store.port import Reader, Transaction


def loaded(reader: Reader, holder: str) -> list[str]:
    """The addresses of the tools that a holder has loaded, the last one first."""
    rows = reader.all("SELECT address FROM surface_tool WHERE holder = ? ORDER BY loaded_ms DESC, address", (holder,))
    return [address for (address,) in rows]


def load(transaction: Transaction, holder: str, addresses: Iterable[str], most: int) -> None:
    """Add tools to those of a holder. Of more than `most`, those that were loaded first are forgotten."""
    now_ms = transaction.now_ms
    for address in addresses:
        transaction.execute(
            "INSERT INTO surface_tool (holder, address, loaded_ms) VALUES (?, ?, ?)"
            " ON CONFLICT (holder, address) DO UPDATE SET loaded_ms = excluded.loaded_ms",
            (holder, address, now_ms),
        )
    transaction.execute(
        "DELETE FROM surface_tool WHERE holder = ? AND address NOT IN (SELECT address FROM surface_tool"
        " WHERE holder = ? ORDER BY loaded_ms DESC, address LIMIT ?)",
        (holder, holder, most),
    )
    epochs.advance(transaction, epochs.SURFACES)


def forget_before(transaction: Transaction, at_ms: int) -> None:
    """Forget what nobody has loaded again since a moment."""
    transaction.execute("DELETE FROM surface_tool WHERE loaded_ms < ?", (at_ms,))

"""Sessions: the table `session`, which holds the state that tools keep between calls of one session.

`id` is a digest of tenant, caller and session. `version` counts the changes of a session. `state` is encrypted; rows of
an older version hold it as text.
"""

from __future__ import annotations

from interlock.core.record import NamedTuple
from interlock.store.port import Reader, Transaction


class SessionRow(NamedTuple):
    version: int
    state: bytes | str


def find(reader: Reader, session: bytes) -> SessionRow | None:
    row = reader.one("SELECT version, state FROM session WHERE id = ?", (session,))
    return None if row is None else SessionRow._make(row)


def version(reader: Reader, session: bytes) -> int:
    """The version of a session; 0 where nothing is stored of it."""
    row = reader.one("SELECT version FROM session WHERE id = ?", (session,))
    return 0 if row is None else row[0]


def put(transaction: Transaction, session: bytes, version: int, state: bytes) -> None:
    """Store a session, whether it is there already or not."""
    transaction.execute(
        "INSERT INTO session (id, version, state) VALUES (?, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET version = excluded.version, state = excluded.state",
        (session, version, state),
    )

"""Finds a connection pooler between a process and the server, and whether it gives each client a session of its own.

A process needs one: prepared statements, `LISTEN` and the time that a statement waits for a lock belong to the session.
In transaction mode, a pooler such as PgBouncer runs each transaction in whichever session is free, so statements fail
that were prepared in another, and notices get lost without a word.
"""

from __future__ import annotations

from typing import Any, Literal

import psycopg

from interlock.core.errors import Failure
from interlock.store.postgres.connection import PostgresConnection, connected, translated

Mode = Literal["session", "transaction"]
_PID = b"SELECT pg_backend_pid()"
# How often two clients are compared once more. It costs some milliseconds, where there is a pooler.
_MORE = 10


def pooler_mode(connection: PostgresConnection, address: str) -> Mode | None:
    """The mode of the pooler between; None if there is none."""
    if connection.direct:
        return None
    with connected(address) as one, connected(address) as other:
        try:
            # In transaction mode, a pooler uses the session that was used last, or all sessions in turn. Within four
            # statements, either both clients get the same session, or the first client gets another one. Other
            # clients may hide this by chance, so it is repeated.
            first, second = _session(one), _session(other)
            shared = first == second or any(
                _session(client) != session
                for client, session in ((one, first), (one, first), *((other, second), (one, first)) * _MORE)
            )
        except psycopg.Error as error:
            raise translated(error) from None
    return "transaction" if shared else "session"


def refuse_shared_sessions(connection: PostgresConnection, address: str) -> None:
    """Refuse (E3108) a pooler that gives each transaction any session."""
    if pooler_mode(connection, address) == "transaction":
        raise Failure("E3108", WORDS, resolution=ADVICE)


WORDS = "the connection pooler of the store is not in session mode"
ADVICE = "set pool_mode = session for this database and user, or name the server itself in the setting store"


def _session(client: psycopg.Connection[Any]) -> int:
    row = client.execute(_PID, prepare=False).fetchone()
    return 0 if row is None else row[0]

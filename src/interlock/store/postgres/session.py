"""Settings of a session that the store does not leave to the server, the role or the database.

They bound what a node can do to others that stops in the middle of a transaction, or whose network drops every packet:

- All writers of a store share one lock, which a transaction holds to its end. The server ends a session that has an
  open transaction and says nothing for `IDLE_MS`, which is less than others wait for the lock (`PATIENCE_MS`). Nothing
  of that transaction stays. The node finds its connection lost, connects again and writes again. If it was stopped for
  longer than its lease, it is refused (E3801).
- Keepalives and `tcp_user_timeout` let both ends notice a way that is cut without a word. While a statement runs or
  waits for a lock, the server looks whether its client is still there.

And they hold what the code relies on:

- A commit that was answered is on disk (`synchronous_commit`), and on that of the synchronous replicas, if there are
  any. `remote_apply` is stronger and stays.
- A transaction is READ COMMITTED. A unit reads after it has waited for the lock, and has to see what was committed
  meanwhile. Under a stricter level, it would read as of the moment before it waited.
"""

from __future__ import annotations

from typing import Any, Final

import psycopg

# How long a statement waits for a lock, which is mostly the one that all writers of a store share.
PATIENCE_MS: Final = 10_000
# How long a transaction that writes may be open while the server waits for the next statement.
IDLE_MS: Final = 8_000
# The same for one that reads, which holds no lock but keeps the server from removing dead rows. Exports wait for the
# one who receives them.
READING_IDLE_MS: Final = 3_600_000
# How long the server or the client waits for an answer to keepalives, and to what it has sent.
UNANSWERED_MS: Final = 10_000
KEEPALIVE_IDLE_S: Final = 5
KEEPALIVE_INTERVAL_S: Final = 2
KEEPALIVE_COUNT: Final = 3
_LOOK_MS: Final = 2_000

_NEVER_BELOW_ON = "CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END"
_ALWAYS = {"default_transaction_isolation": "'read committed'", "synchronous_commit": _NEVER_BELOW_ON}
_WRITING = {**_ALWAYS, "idle_in_transaction_session_timeout": f"'{IDLE_MS}'", "lock_timeout": f"'{PATIENCE_MS}'"}
_READING = {**_ALWAYS, "idle_in_transaction_session_timeout": f"'{READING_IDLE_MS}'"}
# A server on some systems refuses these.
_NETWORK = {
    "tcp_keepalives_idle": f"'{KEEPALIVE_IDLE_S}'",
    "tcp_keepalives_interval": f"'{KEEPALIVE_INTERVAL_S}'",
    "tcp_keepalives_count": f"'{KEEPALIVE_COUNT}'",
    "tcp_user_timeout": f"'{UNANSWERED_MS}'",
    "client_connection_check_interval": f"'{_LOOK_MS}'",
}


def _statement(settings: dict[str, str]) -> bytes:
    return ("SELECT " + ", ".join(f"set_config('{name}', {value}, false)" for name, value in settings.items())).encode()


def configure(connection: psycopg.Connection[Any], *, reading: bool) -> None:
    """Make the settings for a connection that only reads, or for one that writes. It has to be in autocommit mode."""
    needed = _READING if reading else _WRITING
    try:
        connection.execute(_statement({**needed, **_NETWORK}), prepare=False)
    except (psycopg.errors.InvalidParameterValue, psycopg.errors.FeatureNotSupported):
        connection.execute(_statement(needed), prepare=False)


def keepalives() -> dict[str, Any]:
    """The same for this end of the connection, as parameters of the driver."""
    return {
        "keepalives_idle": KEEPALIVE_IDLE_S,
        "keepalives_interval": KEEPALIVE_INTERVAL_S,
        "keepalives_count": KEEPALIVE_COUNT,
        "tcp_user_timeout": UNANSWERED_MS,
    }

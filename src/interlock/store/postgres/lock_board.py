"""The lock board of a store on PostgreSQL: one row, which a process locks while it changes the text.

The row is not the lock of the ledger, so nobody who writes records waits for it. A process is on the board as long as
its lease is in the store. One whose lease has run out loses it here, with all its locks, and may not write from then
on. So a process that was stopped for longer than its lease cannot settle the call that it had locks for. The tool of
that call must have ended as well. No other machine can stop it, so its own process does, or the kernel of its machine
(`Lease.guard`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import orjson

from interlock.store.failures import store_failure
from interlock.store.lock_board import Board, Document
from interlock.store.port import StoreError
from interlock.store.postgres.connection import PostgresConnection

if TYPE_CHECKING:
    from interlock.store.postgres.leases import Lease

_READ = "SELECT version, document, living FROM interlock_board(?)"


class PostgresBoard(Board):
    """The board in the database. It waits for the server, so it is used on a thread, by one at a time."""

    near = False

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease.id)
        self._lease = lease
        self._connection: PostgresConnection | None = None
        self._seen = 0

    def sure(self) -> bool:
        return self._lease.sure()

    def expiring(self) -> bool:
        return self._lease.expiring()

    def guard(self, working: bool) -> None:
        self._lease.guard(working)

    def rung(self) -> bool:
        """Whether another process has written. False where the server does not answer: a lease decides then."""
        try:
            return self._connected().one("SELECT version FROM lock_board")[0] != self._seen
        except StoreError:
            return False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exchange(self, change: Callable[[Document], Document]) -> None:
        try:
            connection = self._connected()
            connection.execute("BEGIN")
            try:
                version, text, ids = connection.one(_READ, (self._me,))
                board: Document = orjson.loads(text)
                living = set(ids.split())
                others = {
                    owner: one for owner, one in board["members"].items() if owner != self._me and owner in living
                }
                now = change({"next": board["next"], "members": others})
                if now != board:
                    version += 1
                    connection.execute("UPDATE lock_board SET version = ?, document = ?", (version, orjson.dumps(now)))
                connection.execute("COMMIT")
            except BaseException:
                if connection.lost or connection.in_transaction:
                    connection.hang_up()  # rolls back
                raise
        except StoreError as error:
            # INVARIANT: where it is not known whether the text was replaced, nothing that it grants is used. The next
            # exchange writes all locks of this process anew.
            raise store_failure(error) from None
        self._seen = version

    def _connected(self) -> PostgresConnection:
        if self._connection is None:
            self._connection = PostgresConnection(self._lease.address)
        elif self._connection.lost:
            self._connection.reopen()
        return self._connection

"""Administrative acts on PostgreSQL (`store.administration`): by the owner of the tables, under the lock of writers.

The role of processes that serve may not delete from the ledger. Where the settings name no other role, only triggers
keep it from that; see the how-to page on PostgreSQL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from interlock.core.errors import Failure
from interlock.store.port import StoreError
from interlock.store.postgres.connection import PostgresConnection

if TYPE_CHECKING:
    from interlock.store.home import Home
    from interlock.store.postgres.home import PostgresHome

_MAY_REMOVE = "SELECT has_table_privilege('journal', 'DELETE') AND has_table_privilege('segment', 'INSERT')"


class Administrator(PostgresConnection):
    """A connection of the owner of the tables, in place of an `Administration`."""

    def begin(self) -> bool:
        self.execute("BEGIN")
        try:
            _, self.xid = self.one("SELECT now_ms, xid FROM interlock_enter(?)", ("",))
        except StoreError as error:
            if not self.lost:
                self.execute("ROLLBACK")
            if "locked" in str(error):
                return False
            raise
        return True


def connect(home: Home) -> Administrator:
    """A connection of the owner of the tables. Refuses (E3411) a role that may not remove records."""
    connection = Administrator(cast("PostgresHome", home).admin_address)
    if not connection.one(_MAY_REMOVE)[0]:
        connection.close()
        words = "the role of this process may not remove records or accept them"
        raise Failure("E3411", words, resolution="name the role that owns the tables in the setting store_admin")
    return connection

"""A data directory as an earlier version left it."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from tests.support import stores
from tests.support.chains import EARLIER
from tests.support.cli import Cli

OLDER = "0006"
RUNNING = "01JCXK2M4Q8Z7T5V9W3Y6B1D0F"


def set_back(cli: Cli) -> None:
    """Make the home one of an earlier version: what the last migrations added is gone, what they removed is back."""
    with closing(sqlite3.connect(cli.home / "interlock.db")) as database:
        for trigger in ("payload_stored", "payload_expired", "payload_deleted"):
            database.execute(f"DROP TRIGGER {trigger}")
        database.execute("DROP TABLE tool_source")
        database.execute("DROP TABLE shared_config")
        database.execute("DROP TABLE surface_tool")
        database.execute("DROP TABLE surface")
        database.execute("DROP TABLE payload_use")
        database.execute("DROP TABLE payload_piece")
        database.execute("DROP INDEX payload_in_pieces")
        database.execute("ALTER TABLE payload DROP COLUMN pieces")
        database.execute("ALTER TABLE ticket DROP COLUMN changed")
        database.execute(EARLIER)
        database.execute("UPDATE alembic_version SET version_num = ?", (OLDER,))
        database.commit()


def schema(cli: Cli) -> str:
    with stores.opened(cli.store) as database:
        return database.one("SELECT version_num FROM alembic_version")[0]

"""A process that makes the store of a data directory, or brings it to another schema, and counts what it does for it.

Every statement of the transaction is a point, and so are its commit and the moment after it. At a point of choice the
process dies by kill -9, or says `READY` and waits for a line.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event

from interlock import Interlock
from interlock.store import migration, migration_list
from interlock.store.homes import home_at
from interlock.store.postgres import schema, session
from interlock.store.postgres.connection import PostgresConnection

READY = "ready"


class Points:
    """Counts what a process does for the schema, and stops or ends the process at one point."""

    def __init__(self, at: int, *, dies: bool) -> None:
        self._at = at
        self._dies = dies
        self.passed = 0

    def reached(self, *_: object) -> None:
        self.passed += 1
        if self.passed != self._at:
            return
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        print(READY, flush=True)
        sys.stdin.readline()

    def watch(self) -> None:
        """Count the statements of migrations, of the tables of a new store, and a new file that takes its place."""
        for what in ("before_cursor_execute", "commit", "engine_disposed"):
            event.listen(Engine, what, self.reached)
        if not self._dies:  # it may wait for longer than the server lets it
            session._WRITING["idle_in_transaction_session_timeout"] = "'0'"  # pyright: ignore[reportPrivateUsage]
        migration._empty.clear()  # pyright: ignore[reportPrivateUsage] - a fresh process has none at hand
        create, make, replace = schema.create, schema.make, Path.replace

        def created(connection: PostgresConnection, role: str | None = None) -> None:
            execute = connection.execute

            def executed(statement: str, parameters: Any = (), /) -> Any:
                self.reached()
                return execute(statement, parameters)

            connection.execute = executed
            create(connection, role)

        def made(connection: PostgresConnection, role: str | None) -> None:
            make(connection, role)
            self.reached()

        def replaced(path: Path, target: str | os.PathLike[str]) -> Path:
            self.reached()
            found = replace(path, target)
            self.reached()
            return found

        schema.create = created
        schema.make = made
        Path.replace = replaced  # pyright: ignore[reportAttributeAccessIssue]


async def _open(path: Path, store: str) -> None:
    async with Interlock.open(path, store=store, housekeeping=False):
        pass


def main() -> None:
    action, path, store, at, how = sys.argv[-5:]
    points = Points(int(at), dies=how == "die")
    points.watch()
    home, steps = home_at(path, store), list[migration_list.Migration]()
    if action == "open":
        asyncio.run(_open(home.path, store))
    elif action == "up":
        steps = migration.up(home)
    else:
        steps = [migration.down(home)]
    print(points.passed, *(one.revision for one in steps), flush=True)


if __name__ == "__main__":
    main()

"""The schema of a store: shown, brought to that of this version, or one step back. For a person at the files."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.core.record import NamedTuple
from interlock.store import migration_list
from interlock.store.homes import home_at
from interlock.store.schema_status import status

if TYPE_CHECKING:
    from interlock.api.backups import Progress
    from interlock.data.schema import Json
    from interlock.store.migration_list import Migration

# Shows some words while work is done.
Working = Callable[[str], AbstractContextManager[None]]


def schema_at(path: Path) -> Json:
    """The schema of a store, and every migration with whether it is applied."""
    home = home_at(path)
    found = status(home)
    return {
        "schema": found.schema,
        "compatible_since": found.compatible_since,
        "head": migration_list.head(),
        "running": home.alive(),
        "loses": found.at_stake,
        "migrations": [
            {**_document(one), "applied": one.revision <= found.schema} for one in migration_list.migrations()
        ],
    }


class Changed(NamedTuple):
    """The migrations that were applied or undone, or would be; the schema then; the backup; rows that are lost."""

    steps: list[Json]
    schema: str
    backup: Path | None
    loses: dict[str, int]


def bring_up(path: Path, *, dry_run: bool, directory: Path | None, progress: Progress, working: Working) -> Changed:
    """Bring a store to the schema of this version. A store in a file is backed up first.

    In an empty database on a server the tables are made: the role that owns them may be that of this command alone.
    """
    home = home_at(path)
    if not home.near and home.new and not dry_run:
        import asyncio

        with working("making the tables …"):
            asyncio.run(_make(path))
    found, backup = status(home), None
    steps = found.pending
    if steps:
        target = steps[-1].revision
        home.refuse_in_use(found.schema, target, migration_list.compatible_since(target))
    if steps and not dry_run:
        from interlock.api.backups import back_up_before
        from interlock.store import migration

        backup = back_up_before(home, steps[-1].revision, directory, progress)
        with working("migrating …"):
            steps = migration.up(home)
    schema = steps[-1].revision if steps and not dry_run else found.schema
    return Changed([_document(one) for one in steps], schema, backup, {})


async def _make(path: Path) -> None:
    """Make the tables of a store, by opening it."""
    from interlock.api.interlock import Interlock

    async with Interlock.open(path, housekeeping=False, hooks=(), otlp_endpoint=""):
        pass


def take_down(
    path: Path,
    *,
    lose: Collection[str],
    dry_run: bool,
    directory: Path | None,
    progress: Progress,
    working: Working,
) -> Changed:
    """Undo the last migration. Refused where rows would be lost that `lose` does not name."""
    home = home_at(path)
    found, backup = status(home), None
    last, before = migration_list.last_applied(found.schema)
    loses = found.at_stake or {}
    if not dry_run:
        migration_list.refuse_loss({what: rows for what, rows in loses.items() if what not in lose})
        home.refuse_in_use(found.schema, before, migration_list.compatible_since(before))
        from interlock.api.backups import back_up_before
        from interlock.store import migration

        backup = back_up_before(home, before, directory, progress)
        with working(f"undoing {last.revision} …"):
            last = migration.down(home, lose)
    return Changed([_document(last)], found.schema if dry_run else before, backup, loses)


def _document(one: Migration) -> Json:
    return {
        "revision": one.revision,
        "title": one.title,
        "compatible_since": one.compatible_since,
        "can_be_undone": one.can_be_undone,
    }

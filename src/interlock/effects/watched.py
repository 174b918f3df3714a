"""The watchers that the settings ask for. Most data directories watch nothing, so watchers are imported when needed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from interlock.effects.databases import PostgresWatcher, SqliteWatcher
    from interlock.effects.watch import Watcher
    from interlock.settings import Settings

    DatabaseWatcher = SqliteWatcher | PostgresWatcher


def file_watchers(settings: Settings) -> list[Watcher]:
    """Return the watcher of files."""
    if not settings.watched_files:
        return []
    from interlock.effects.files import FileWatcher

    return [FileWatcher(settings.watched_files, keep=True)]


def database_watchers(settings: Settings) -> list[DatabaseWatcher]:
    """Return one watcher for each watched database."""
    if not settings.watched_databases and not settings.watched_postgres:
        return []
    from interlock.effects.databases import PostgresWatcher, SqliteWatcher, connect_postgres

    def postgres(address: str) -> PostgresWatcher:
        """Return a watcher of one database. Its name in locks and findings omits the credentials."""
        parts = urlsplit(address)
        place = f"postgres:{parts.hostname or 'local'}{parts.path or '/'}"
        return PostgresWatcher(partial(connect_postgres, address), resource=place)

    sqlite = (SqliteWatcher(path, keep=True) for path in settings.watched_databases)
    return [*sqlite, *map(postgres, settings.watched_postgres)]

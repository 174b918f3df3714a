"""Copies of whole data directories, verified: to a directory, to an archive or to another database, and back.

For a person at the files. Servers may run on while a backup is made.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.api.archive_credential import archive_credential
from interlock.audit import backups
from interlock.audit.archive import archive_at
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.net.s3 import is_address
from interlock.store.home import Home
from interlock.store.homes import address_of, home_at, restored_home
from interlock.store.inspection import open_calls, opened, tool_count
from interlock.store.shared_config import settings_of

if TYPE_CHECKING:
    from interlock.audit.archive import Tier
    from interlock.audit.chain_verdict import ChainVerdict
    from interlock.data.schema import Json
    from interlock.settings import Settings
    from interlock.store.backup import Copy

Done = Callable[[int, int], None]
Checked = Callable[[int], None]


class Progress(NamedTuple):
    """Callbacks for the progress of a copy and of its verification."""

    copied: Done
    verified: Checked


class Copied(NamedTuple):
    """A copy of a data directory that has verified."""

    place: str
    files: int
    size: int
    verdict: Json

    def document(self) -> Json:
        return {"files": self.files, "bytes": self.size, "verdict": self.verdict}


def _copied(place: str, copy: Copy, verdict: ChainVerdict) -> Copied:
    return Copied(place, copy.files, copy.size, verdict.document())


def back_up(path: Path, place: str | None, tier: Tier | None, progress: Progress) -> Copied:
    """Copy a data directory to a directory or an address of an archive; by default to where the scheduled ones are."""
    home = home_at(path)
    now = backups.store_time(home)
    if place is None:
        settings = _scheduled(home)
        credential = _credential(path, settings.backup_to or "")
        made = backups.make(home, settings, now, *progress, credential=credential)
        return _copied(made.place, made.copy, made.verdict)
    if is_address(place):
        credential = _credential(path, place)
        return _copied(*backups.make_archived(home, place, tier or "warm", now, *progress, credential=credential))
    return _copied(place, *backups.copy_verified(home, Path(place), *progress))


def _credential(path: Path, place: str) -> str:
    return asyncio.run(archive_credential(path)) if is_address(place) else ""


def back_up_before(home: Home, change: str, directory: Path | None, progress: Progress) -> Path | None:
    """Copy a data directory before its store changes. A store on a server is not copied: its backups are its own."""
    if not home.near:
        return None
    if directory is None:
        return backups.make_before(home, change, settings_of(home).settings, backups.store_time(home), *progress)
    backups.copy_verified(home, directory, *progress)
    return directory


class Restored(NamedTuple):
    """A data directory that was restored, and its calls that had not ended when the backup was made."""

    copy: Copied
    running: int
    approved: int


def restore(path: Path, backup: Path, progress: Progress) -> Restored:
    """Restore a data directory, and its store where the settings of the backup name it. Both must be empty."""
    target = restored_home(path, backup)
    if target.near:
        copy, verdict = backups.copy_verified(Home(backup), path, *progress)
    else:
        copy, verdict = backups.restore_store(Home(backup), target, *progress)
    return Restored(_copied(str(path), copy, verdict), *open_calls(target))


class Drilled(NamedTuple):
    """A backup that was restored, compared and opened: its rows by table, and its tools."""

    copy: Copied
    rows: dict[str, int]
    tools: int


def drill(backup: Path, progress: Progress, begin: Callable[[str], None], server: str = "") -> Drilled:
    """Restore a backup in a temporary directory, compare it row by row, and open it. `begin` hears of each step.

    With `server`, the address of a PostgreSQL database, the rows are restored there, in a schema that is removed again.
    """
    with backups.drill(backup, *progress, server=server) as (restored, found):
        begin("opening the restored copy")
        asyncio.run(_open(restored))
        with opened(restored) as reader:
            tools = tool_count(reader)
    return Drilled(_copied(str(backup), found.copy, found.verdict), found.rows, tools)


async def _open(restored: Home) -> None:
    """Open a restored data directory as a server does, without background work. It raises what a server would."""
    from interlock.api.interlock import Interlock

    store = address_of(restored)
    async with Interlock.open(
        restored.path, housekeeping=False, hooks=(), otlp_endpoint="", store=store, store_admin=store
    ):
        pass


@contextmanager
def fetched(path: Path, place: str, progress: Done) -> Generator[Path]:
    """The directory with a backup: the one that is named, or a temporary one with the backup of an archive.

    `path` is the data directory whose settings name the credential for the archive. Which backup is the newest there is
    told by the time of its store, if it has one.
    """
    if not is_address(place):
        yield Path(place)
        return

    async def fetch(target: Path) -> None:
        async with archive_at(place, await archive_credential(path)) as archive:
            await archive.fetch(target, now, progress)

    now = backups.store_time(home_at(path))
    with tempfile.TemporaryDirectory(prefix="interlock-restore-") as directory:
        asyncio.run(fetch(Path(directory)))
        yield Path(directory)


def newest(path: Path) -> str:
    """The newest scheduled backup of a data directory; for an archive, its address.

    E3411 where there is none, or where it is not known which one is the newest.
    """
    place = _scheduled(home_at(path)).backup_to or ""
    if is_address(place):
        return place
    if (made := backups.newest_in(Path(place), backups.store_time(home_at(path)))) is None:
        words = f"there is no backup in `{place}`"
        raise Failure("E3411", words, resolution="make one with interlock backup, or name a directory")
    return str(made.path)


def _scheduled(home: Home) -> Settings:
    """The settings of scheduled backups; E3411 where they name no place for them."""
    settings = settings_of(home).settings
    if settings.backup_to is None:
        advice = "name a directory, or set backup_to in settings.toml"
        raise Failure("E3411", "there is no folder for scheduled backups", resolution=advice)
    return settings


class CopiedStore(NamedTuple):
    """A store that was copied: rows and digest of each table, and the verdict on the copy."""

    tables: dict[str, Json]
    rows: int
    verdict: Json


def copy_store(path: Path, address: str, admin: str, progress: Progress) -> CopiedStore:
    """Copy the store of a data directory to an address ("" for a file there), compare both and verify the copy."""
    source, target = home_at(path), home_at(path, address, admin)
    contents, verdict = backups.copy_store(source, target, *progress)
    tables: dict[str, Json] = {name: {"rows": rows, "digest": digest} for name, (rows, digest) in contents.items()}
    return CopiedStore(tables, sum(rows for rows, _ in contents.values()), verdict.document())

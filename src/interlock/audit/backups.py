"""Backups of a data directory: verified copies, made by schedule, removed after their term, and tried out.

Scheduled backups lie in one folder, each in a directory that is named for the time it was made, or in an archive. Of
all processes on a data directory one makes the next backup: the turn is taken in the store. A backup that fails, or
whose process ends, is tried again within the hour. The newest backup is never removed, whatever its age.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.audit.archive import archive_at, dated_in_future, is_in_future
from interlock.audit.chain import verify
from interlock.audit.chain_verdict import ChainVerdict
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import NamedTuple
from interlock.net.s3 import is_address
from interlock.store import facts
from interlock.store.backup import Copy, Progress, contents, copied
from interlock.store.copying import Contents, filled
from interlock.store.copying import contents as read_contents
from interlock.store.home import Home
from interlock.store.homes import scratch_home
from interlock.store.inspection import opened
from interlock.store.last_head import ends
from interlock.store.port import StoreError

if TYPE_CHECKING:
    from interlock.audit.archive import Tier
    from interlock.settings import Settings
    from interlock.store.port import Reader, Transaction

_log = logging.getLogger("interlock.background")

# A backup that failed, or of which nobody knows the end, is tried again after this time.
RETRY_MS = 3_600_000
_BEGUN, _MADE, _FAILED = "backup_begun_ms", "backup_made_ms", "backup_failed_ms"
# Why backups past their term are not removed.
_BLOCKED = "backup_blocked"
_NAME = expression(r"^interlock-(\d{8}T\d{6}Z)$")
_TIME = "%Y%m%dT%H%M%SZ"


class Backup(NamedTuple):
    """A scheduled backup and when it was made."""

    path: Path
    made: datetime


class Scheduled(NamedTuple):
    """A scheduled backup that was made. `blocked` says why those past their term could not be removed."""

    place: str
    copy: Copy
    verdict: ChainVerdict
    blocked: str


def store_time(home: Home) -> datetime:
    """The present time of the store, by which backups are named and removed.

    Where there is no store that can be read, as on a machine that is to be restored, it is that of the machine.
    """
    try:
        if home.made:
            with opened(home) as reader:
                return datetime.fromtimestamp(home.store_ms(reader) / 1000, UTC)
    except (Failure, StoreError):
        pass
    return datetime.now(UTC)


def copy_verified(
    source: Home, target: Path, pages: Progress | None = None, records: Callable[[int], None] | None = None
) -> tuple[Copy, ChainVerdict]:
    """Copy a data directory. A copy that does not verify is removed again, and refused (E3804).

    `pages` and `records` are called with the progress of the copy and of the verification.
    """
    with copied(source, target, pages) as copy:
        verdict = verify(copy.home, progress=records)
        if not verdict.intact:
            words = f"it does not verify, so nothing was kept of the copy: {_first_fault(verdict)}"
            advice = "see more with interlock audit verify; keep what is there as evidence, with cp -a"
            raise Failure("E3804", words, resolution=advice)
    return copy, verdict


def _first_fault(verdict: ChainVerdict) -> str:
    fault = verdict.faults[0]
    return f"at record {fault.seq}, {fault.what}" if fault.seq else fault.what


def copy_store(
    source: Home, target: Home, rows: Progress | None = None, records: Callable[[int], None] | None = None
) -> tuple[Contents, ChainVerdict]:
    """Copy a store into an empty database, compare both and verify the copy, which cannot be opened before that.

    Refuses (E3804) where processes use the store, before or meanwhile.
    """
    _refuse_used(source)
    before = _head(source)
    with filled(source, target, rows) as (unfinished, contents_):
        verdict = verify(unfinished, progress=records)
        if not verdict.intact:
            words = f"the copy does not verify, and is not used: {_first_fault(verdict)}"
            raise Failure("E3804", words, resolution="see whether the store itself does: interlock audit verify")
        _refuse_used(source)
        if _head(source) != before:
            words = "the store was written to while it was copied; the copy is not used"
            raise Failure("E3804", words, resolution="stop what uses it, then run this again")
    return contents_, verdict


def _refuse_used(home: Home) -> None:
    if (count := home.in_use()) > 0:
        words = "1 process uses this store" if count == 1 else f"{count} processes use this store"
        raise Failure("E3804", words, resolution="stop them, so that nothing is written meanwhile, then run this again")


def _head(home: Home) -> tuple[int, bytes]:
    with opened(home) as reader:
        return ends(reader, None).head


def restore_store(
    backup: Home,
    target: Home,
    rows: Progress | None = None,
    records: Callable[[int], None] | None = None,
) -> tuple[Copy, ChainVerdict]:
    """Restore a backup to a data directory whose store is on a server: the files there, the rows in the database.

    Both must be empty (E3411). The store can be opened when the files are in place and everything has verified.
    """
    with filled(backup, target, rows), copied(backup, target.path) as copy:
        copy.size -= copy.home.database.stat().st_size
        copy.files -= 1
        for path in copy.home.path.glob(f"{copy.home.database.name}*"):
            path.unlink()
        verdict = verify(target.beside(copy.home.path), progress=records)
        if not verdict.intact:
            raise Failure("E3804", f"the restored store does not verify: {_first_fault(verdict)}")
    return copy, verdict


def due(transaction: Transaction, every_ms: int) -> bool:
    """Whether the next scheduled backup is due; if so, it is the turn of this process to make it."""
    now_ms = transaction.now_ms
    made, begun = facts.get(transaction, _MADE), facts.get(transaction, _BEGUN)
    if made is not None and now_ms - int(made) < every_ms:
        return False
    if begun is not None and now_ms - int(begun) < RETRY_MS and int(begun) > int(made or 0):
        return False
    facts.put(transaction, _BEGUN, str(now_ms))
    return True


def note_made(transaction: Transaction, blocked: str = "") -> None:
    """Note that the backup whose turn was taken is there, and why others could not be removed."""
    if blocked:
        facts.put(transaction, _BLOCKED, blocked)
    else:
        facts.remove(transaction, _BLOCKED)
    facts.put(transaction, _MADE, facts.get(transaction, _BEGUN) or str(transaction.now_ms))
    facts.remove(transaction, _FAILED)


def note_failed(transaction: Transaction) -> None:
    """Note that the backup whose turn was taken could not be made."""
    facts.put(transaction, _FAILED, str(transaction.now_ms))


def last_made(reader: Reader) -> datetime | None:
    """When the turn of the last scheduled backup that was finished was taken; None where none was."""
    made = facts.get(reader, _MADE)
    return None if made is None else datetime.fromtimestamp(int(made) / 1000, UTC)


def blocked(reader: Reader) -> str:
    """Why the last scheduled backup removed none that is past its term; empty if nothing prevented it."""
    return facts.get(reader, _BLOCKED) or ""


def failing(reader: Reader, now_ms: int, every_ms: int) -> bool:
    """Whether scheduled backups fail: the last attempt did, or the last backup that was finished is too old."""
    made, begun = facts.get(reader, _MADE), facts.get(reader, _BEGUN)
    if facts.get(reader, _FAILED) is not None:
        return True
    return begun is not None and now_ms - int(made or begun) > every_ms + RETRY_MS


def make(
    home: Home,
    settings: Settings,
    now: datetime,
    pages: Progress | None = None,
    records: Callable[[int], None] | None = None,
    *,
    credential: str = "",
) -> Scheduled:
    """Make a scheduled backup and remove those past their term. Blocks: run it in a thread.

    `now` is the store's time. `credential` is that of an object store; without it, that of the environment.
    """
    place = settings.backup_to or ""
    if is_address(place):
        made = make_archived(home, place, settings.backup_tier, now, pages, records, credential=credential)
        return Scheduled(*made, asyncio.run(_expire(place, now, credential)))
    path = Path(place) / f"interlock-{now.astimezone(UTC).strftime(_TIME)}"
    copy, verdict = copy_verified(home, path, pages, records)
    try:
        remove_expired(Path(place), settings.backup_days, now)
    except Failure as failure:
        return Scheduled(str(path), copy, verdict, _warned(place, failure))
    return Scheduled(str(path), copy, verdict, "")


def _warned(place: str, failure: Failure) -> str:
    """Log why backups past their term are not removed. The new backup counts all the same."""
    _log.warning("backups past their term are not removed from %s: %s", place, failure.message)
    return failure.message


def make_archived(
    home: Home,
    address: str,
    tier: Tier,
    now: datetime,
    pages: Progress | None = None,
    records: Callable[[int], None] | None = None,
    *,
    credential: str = "",
) -> tuple[str, Copy, ChainVerdict]:
    """Copy a data directory to a temporary directory, verify it, and write it to an archive; its address there."""

    async def store(source: Path) -> str:
        async with archive_at(address, credential) as archive:
            return (await archive.store(source, tier, now, pages)).name

    with tempfile.TemporaryDirectory(prefix="interlock-backup-") as place:
        copy, verdict = copy_verified(home, Path(place) / "home", pages, records)
        name = asyncio.run(store(Path(place) / "home"))
    return f"{address.rstrip('/')}/{name}", copy, verdict


async def _expire(address: str, now: datetime, credential: str) -> str:
    """Remove what is past its term from an archive; why that is not possible."""
    try:
        async with archive_at(address, credential) as archive:
            await archive.expire(now)
    except Failure as failure:
        return _warned(address, failure)
    return ""


def make_before(
    home: Home,
    change: str,
    settings: Settings,
    now: datetime,
    pages: Progress | None = None,
    records: Callable[[int], None] | None = None,
) -> Path:
    """Make a backup before something is changed: with the scheduled ones in a folder, or beside the data directory."""
    if settings.backup_to is not None and not is_address(settings.backup_to):
        return Path(make(home, settings, now, pages, records).place)
    path = home.path.absolute()
    path = path.with_name(f"{path.name}-before-{change}-{now.astimezone(UTC).strftime(_TIME)}")
    copy_verified(home, path, pages, records)
    return path


def made_in(folder: Path) -> list[Backup]:
    """The backups in a folder, the oldest first. What was not finished does not count."""
    return [one for one in _named(folder) if Home(one.path).database.exists()]


def dated_ahead(folder: Path, now: datetime) -> list[Backup]:
    """The backups in a folder that are dated in the future, finished or not."""
    return [one for one in _named(folder) if is_in_future(one.made, now)]


def newest_in(folder: Path, now: datetime) -> Backup | None:
    """The newest finished backup in a folder. E3411 if it is dated in the future."""
    made = made_in(folder)
    if made and is_in_future(made[-1].made, now):
        raise dated_in_future(made[-1].path.name, now, "so it is not known which one is the newest")
    return made[-1] if made else None


def remove_expired(folder: Path, days: int, now: datetime) -> list[Path]:
    """Remove the backups that are older than so many days, finished or not, but never the newest finished one.

    E3411, and nothing is removed, while one of them is dated in the future.
    """
    if dated := dated_ahead(folder, now):
        raise dated_in_future(dated[-1].path.name, now, "so nothing is removed")
    newest = made_in(folder)[-1:]
    expired = [one for one in _named(folder) if now - one.made >= timedelta(days=days) and one not in newest]
    removed: list[Path] = []
    for one in expired:
        try:
            shutil.rmtree(one.path)
            removed.append(one.path)
        except OSError as error:  # the new backup counts all the same
            _log.warning("the backup %s is past its term and cannot be removed: %s", one.path, error.strerror)
    return removed


def _named(folder: Path) -> list[Backup]:
    """The directories that have the name of a backup; links and everything else in the folder are left alone."""
    if not folder.is_dir():
        return []
    found = [
        Backup(path, datetime.strptime(name[1], _TIME).replace(tzinfo=UTC))
        for path in folder.iterdir()
        if (name := _NAME.match(path.name)) and path.is_dir() and not path.is_symlink()
    ]
    return sorted(found, key=lambda one: one.made)


class Drill(NamedTuple):
    """The findings of a backup drill."""

    copy: Copy
    verdict: ChainVerdict
    # The number of rows of each table. Backup and restored copy have the same rows.
    rows: dict[str, int]


@contextmanager
def drill(
    backup: Path, pages: Progress | None = None, records: Callable[[int], None] | None = None, *, server: str = ""
) -> Generator[tuple[Home, Drill]]:
    """Restore a backup in a temporary directory and compare it, row by row, with the backup; E3804 where they differ.

    With `server`, the address of a PostgreSQL database, its rows are restored in a schema that is made there. The
    restored data directory, and that schema, are there until the block ends.
    """
    if server:
        with (
            tempfile.TemporaryDirectory(prefix="interlock-drill-") as place,
            scratch_home(Path(place) / "restored", server) as restored,
        ):
            # It compares every row while it copies.
            copy, verdict = restore_store(Home(backup), restored, pages, records)
            with closing(restored.reading()) as reader:
                reader.execute("BEGIN")
                rows = {name: rows for name, (rows, _) in read_contents(reader).items()}
            yield restored, Drill(copy, verdict, rows)
        return
    with tempfile.TemporaryDirectory(prefix="interlock-drill-") as place:
        restored = Home(Path(place) / "restored")
        copy, verdict = copy_verified(Home(backup), restored.path, pages, records)
        expected, found = contents(Home(backup)), contents(restored)
        if different := sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name)):
            words = f"the restored copy differs from the backup in: {', '.join(different)}"
            raise Failure("E3804", words, resolution="keep the backup as evidence, and make another one")
        yield restored, Drill(copy, verdict, {name: rows for name, (rows, _) in found.items()})

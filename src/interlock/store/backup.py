"""A copy of a whole home, made while processes run on it. A backup is such a copy, and so is what is restored from it.

The order of copying is what makes the copy whole. INVARIANT: the anchors file and the last signed head are never ahead
of the database beside them, for an anchor is in the database before it is in a file; and every key that the database
needs is there, for a key is there before something is signed or sealed with it. So these two come first, then the
database as it is at one moment, then everything else. Only a key that was dropped meanwhile could be missed: one that
something is sealed under is looked for, and its lack refused.

A copy is gathered below its target and put in place when the caller has looked at it, the database last: half a
copy is no home, and is refused as one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.store.connection import SqliteConnection, store_error
from interlock.store.copying import filled
from interlock.store.failures import store_failure
from interlock.store.home import MARK, Home
from interlock.store.last_head import path_of
from interlock.store.port import Reader, StoreError
from interlock.store.schema_version import APPLICATION_ID, is_known
from interlock.store.sealing import Box, keys_in_use

# In a copy of a store on a server, whose settings name that server.
_MARKED = "The store of this copy is the file interlock.db, whatever settings.toml names.\n"
# Who is alive now, and what upstreams have printed.
_LEFT_OUT = frozenset(
    {
        MARK,
        "instances",
        "migrate.lock",
        "locks.board",
        "logs",
        "sandbox.lock",
        "secrets.lock",
        "turns.lock",
        ".incomplete",
    }
)
_PAGES_AT_A_TIME = 1024

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Copy:
    """A copy in the making: where it is until it is put in place, and how much it is."""

    home: Home
    files: int = 0
    size: int = 0


@contextmanager
def copied(source: Home, target: Path, progress: Progress | None = None) -> Generator[Copy]:
    """A copy of a home, to be looked at. When the block ends it is at the target; when it raises, nothing is left.

    E3411 when the target is there and not empty, lies in the home or cannot be written; E3804 when there is no readable
    database to copy, E3805 when it is of a newer version. `progress` hears how many pages of how many were copied.
    """
    if not source.made:
        raise Failure("E3804", f"there is no database in `{source.path}`", resolution="name a data directory")
    try:
        with _staged(source, target) as staged:
            copy = Copy(Home(staged))
            _copy(copy, source, progress)
            _refuse_lost_keys(copy.home)
            yield copy
            _put_in_place(staged, target)
    except StoreError as error:
        failure = store_failure(error)
        raise failure if failure.code != "E3801" else _unwritable(target, str(error)) from None
    except OSError as error:
        raise _unwritable(target, error.strerror or type(error).__name__) from None


def contents(home: Home) -> dict[str, tuple[int, str]]:
    """The number of rows of every table of a copy, and a digest of them that does not depend on their order."""
    with closing(_open(home.database)) as connection:
        connection.execute("BEGIN")
        names = connection.all("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        return {name: _digest(connection, name) for (name,) in names if not name.startswith("sqlite_")}


def _digest(connection: Reader, table: str) -> tuple[int, str]:
    count, total = 0, 0
    for row in connection.each(f'SELECT * FROM "{table}"'):  # noqa: S608 - a name of the schema
        count += 1
        total += int.from_bytes(hashlib.sha256(repr(row).encode()).digest()[:16], "big")
    return count, f"{total % (1 << 128):032x}"


def _unwritable(target: Path, why: str) -> Failure:
    return Failure(
        "E3411", f"the copy at `{target}` cannot be made: {why}", resolution="correct that, or choose another directory"
    )


@contextmanager
def _staged(source: Home, target: Path) -> Generator[Path]:
    """A directory for a copy in the making. Below its target: that may be a file system of its own."""
    if target.resolve().is_relative_to(source.path.resolve()):
        words = f"`{target}` is in the data directory itself; nothing was written"
        raise Failure("E3411", words, resolution="choose a directory elsewhere, best on another disk")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        words = f"`{target}` is there already; nothing was written"
        raise Failure("E3411", words, resolution="choose a directory that does not exist or is empty")
    made = not target.exists()
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    staged = Home(target).incomplete
    staged.mkdir(mode=0o700)  # a second copy to the same place fails here
    try:
        yield staged
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        if made:
            with suppress(OSError):
                target.rmdir()
        raise


def _copy(copy: Copy, source: Home, progress: Progress | None) -> None:
    if source.anchors.exists():
        _copy_file(copy, source.anchors, copy.home.anchors)
    if path_of(source).exists():
        copy.home.keys.mkdir(mode=0o700)
        _copy_file(copy, path_of(source), path_of(copy.home))
    if source.near:
        with closing(_open(source.database)) as live:
            _copy_database(live, copy.home.database, progress)
    else:
        with filled(source, copy.home, progress):
            pass
        mark = copy.home.path / MARK
        mark.touch(0o600)
        mark.write_text(_MARKED)
    _count(copy, copy.home.database)
    for path in _others(source):
        _copy_entry(copy, path, copy.home.path / path.name)


def _others(source: Home) -> Iterator[Path]:
    for path in sorted(source.path.iterdir()):
        ours = path.name == source.anchors.name or path.name.startswith(source.database.name)
        if not ours and path.name not in _LEFT_OUT:
            yield path


def _open(database: Path) -> SqliteConnection:
    """The database of a home. It rests where nothing can be written beside it and nothing is: on read-only media."""
    log = database.with_name(f"{database.name}-wal")
    how = "mode=ro" if log.exists() else "mode=ro&immutable=1"
    if os.access(database.parent, os.W_OK):
        how = "mode=rw"
    return sqlite3.connect(
        f"{database.absolute().as_uri()}?{how}", uri=True, timeout=10, isolation_level=None, factory=SqliteConnection
    )


def _copy_database(live: SqliteConnection, target: Path, progress: Progress | None) -> None:
    # One read transaction for all of it: others write on, and what they write is not in the copy.
    live.execute("BEGIN")
    if live.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise Failure(
            "E3804", "the database to copy was not made by Interlock", resolution="name a data directory or a backup"
        )
    is_known(live)  # refuses one that is newer
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))

    def report(_: int, remaining: int, total: int) -> None:
        if progress is not None:
            progress(total - remaining, total)

    try:
        with closing(sqlite3.connect(target, isolation_level=None)) as copy:
            live.backup(copy, pages=_PAGES_AT_A_TIME, progress=report)
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:  # that of the copy, and not of the store
            raise OSError(errno.ENOSPC, "its disk is full") from None
        raise store_error(error) from None


def _copy_entry(copy: Copy, source: Path, target: Path) -> None:
    if source.is_dir():
        _refuse_round(copy, source)
        target.mkdir(mode=0o700, exist_ok=True)
        for path in sorted(source.iterdir()):
            # The last signed head is there already.
            if path.name not in _LEFT_OUT and not (target / path.name).exists():
                _copy_entry(copy, path, target / path.name)
        _sync(target)
    elif source.is_file():
        # What is staged under a name of its own may be gone before it is read.
        with suppress(FileNotFoundError):
            _copy_file(copy, source, target)


def _refuse_round(copy: Copy, source: Path) -> None:
    """Refuse (E3411) a link to a directory that the link, or the copy, lies in: there would be no end of it."""
    there = source.resolve()
    if any(one.resolve().is_relative_to(there) for one in (source.parent, copy.home.path)):
        raise Failure("E3411", f"`{source}` is a link that leads back", resolution="remove it from the data directory")


def _copy_file(copy: Copy, source: Path, target: Path) -> None:
    """A file, its owner's alone, on disk."""
    with open(source, "rb") as read:
        mode = os.fstat(read.fileno()).st_mode & 0o700
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as written:
            shutil.copyfileobj(read, written)
            written.flush()
            os.fsync(written.fileno())
    _count(copy, target)


def _count(copy: Copy, path: Path) -> None:
    copy.files += 1
    copy.size += path.stat().st_size


def _refuse_lost_keys(home: Home) -> None:
    """Refuse (E3410) a copy without a key that something in it is sealed under: it was dropped while copying."""
    if not (home.keys / "secrets.key").exists():
        return  # in the operating system's keyring, or not made yet
    with closing(_open(home.database)) as connection:
        if not is_known(connection):
            return
        needed = keys_in_use(connection)
    if needed - Box(home.keys).ids():
        words = "a sealing key in use is missing; the copy was removed"
        raise Failure("E3410", words, resolution="try again: it was changed just now, or see interlock doctor")


def _put_in_place(staged: Path, target: Path) -> None:
    database = staged / "interlock.db"
    if taken := [path.name for path in staged.iterdir() if os.path.lexists(target / path.name)]:
        words = f"`{target / taken[0]}` came there meanwhile; nothing was written over"
        raise Failure("E3411", words, resolution="choose a directory that nobody else uses")
    moved: list[Path] = []
    try:
        others = [path for path in sorted(staged.iterdir()) if path != database]
        for path in (*others, database) if database.exists() else others:
            path.rename(target / path.name)
            moved.append(target / path.name)
        staged.rmdir()
    except BaseException:
        for path in moved:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise
    _sync(target)
    _sync(target.absolute().parent)


def _sync(directory: Path) -> None:
    """Let the names in a directory be on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Watches files: compares every entry below some directories before and after a call.

Entries are compared by attributes that every write changes. A file's ctime is set by the kernel: writing, appending,
truncating, linking, or changing mode, owner or times changes it, and nobody can set it back. Opening, reading and
listing do not change it. Two cases need a hash of the content:

* a file changed just before the first snapshot may change again within the same tick of the kernel's clock;
* a file that a process keeps mapped may change without its time moving. `contents=True` hashes every file.

A directory's own times only show that its entries changed, which the entries show too; of a directory itself, mode,
owner and extended attributes, which hold its access control lists, are compared. Symbolic links are entries and are
never followed.

`keep=True` holds copies of files, within bounds, and `restore` uses them. It works from directory to directory without
following links, so a link that a tool leaves behind does not lead it outside the roots.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from interlock.contract.effects import Change
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.core.threads import DISK

MOST_ENTRIES = 200_000
KEEP_FILE_BYTES = 1 << 20
KEEP_BYTES = 64 << 20
# A change within this time before the first snapshot may share its timestamp with a later one.
TICK_NS = 50_000_000
_BLOCK = 1 << 20

_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


Attributes = tuple[tuple[str, bytes], ...]


class DirectoryEntry(NamedTuple):
    """One directory entry with its attributes."""

    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int
    links: int
    target: str | None = None
    digest: bytes | None = None
    content: bytes | None = None
    # Extended attributes, where the ctime does not reflect them or where they may have to be restored.
    attributes: Attributes | None = None

    def summary(self) -> dict[str, Any]:
        """The entry as it appears in a record."""
        facts: dict[str, Any] = {"kind": self.kind, "mode": f"{self.mode:04o}", "owner": f"{self.uid}:{self.gid}"}
        if self.kind == "file":
            facts["size"] = self.size
        if self.digest is not None:
            facts["sha256"] = self.digest.hex()
        if self.target is not None:
            facts["target"] = _text(self.target)
        return facts


Place = tuple[str, ...]  # the name of a root and the path below it
Snapshot = dict[Place, DirectoryEntry]


class FileWatcher:
    """Watches everything below some directories.

    `roots` maps the resource name of each directory to its path: `{"file:/srv/data": Path("/srv/data")}`. In a plain
    list of directories, each is named `file:` and its path.
    """

    def __init__(
        self, roots: Mapping[str, Path] | Sequence[Path], *, keep: bool = False, contents: bool = False
    ) -> None:
        if not isinstance(roots, Mapping):
            roots = {f"file:{os.path.abspath(root)}": root for root in roots}
        self._roots = {name.rstrip("/"): os.path.abspath(root) for name, root in roots.items()}
        self._keep = keep
        self._contents = contents or keep

    @property
    def resources(self) -> tuple[str, ...]:
        return tuple(self._roots)

    async def before(self) -> Snapshot:
        """Take a snapshot. E3407 if there are too many entries, E3405 if a directory cannot be read."""
        return await DISK.run(self._look)

    async def after(self, before: Snapshot) -> list[Change]:
        """Return what was created, changed and deleted since; a rename is a deletion and a creation."""
        return await DISK.run(self._changes, before, lambda _, then, now, path: _differs(then, now, path))

    async def restore(self, before: Snapshot) -> list[Change]:
        """Restore the snapshot as far as copies were kept; returns the differences that remain."""
        return await DISK.run(self._restore, before)

    # Snapshots

    def _look(self) -> Snapshot:
        entries: Snapshot = {}
        kept_bytes = 0
        fresh_ns = time.time_ns() - TICK_NS  # files are stamped by the kernel's clock, not by one that is passed in
        for place, path, status in self._walk(strict=True):
            entry = _entry(path, status)
            if entry.kind == "file" and (self._contents or entry.ctime_ns >= fresh_ns):
                content = None
                if self._keep and entry.size <= KEEP_FILE_BYTES and kept_bytes + entry.size <= KEEP_BYTES:
                    content = _read(path)
                    kept_bytes += len(content or b"")
                digest = _hash(path) if content is None else hashlib.sha256(content).digest()
                entry = entry._replace(digest=digest, content=content)
            if entry.kind == "file" and self._keep:
                entry = entry._replace(attributes=_attributes(path))
            entries[place] = entry
            if len(entries) > MOST_ENTRIES:
                raise Failure("E3407", f"more than {MOST_ENTRIES} files are to be watched; watch fewer directories")
        return entries

    def _walk(self, *, strict: bool = False) -> Iterator[tuple[Place, str, os.stat_result]]:
        """Iterate over all entries, a directory before its content. If strict, unreadable directories are refused
        (E3405).
        """
        for name, root in self._roots.items():
            try:
                status = os.lstat(root)
            except OSError as error:
                if strict and not isinstance(error, FileNotFoundError):
                    raise Failure("E3405", f"`{name}` cannot be watched: {error.strerror}") from None
                continue
            yield (name,), root, status
            folders: list[tuple[Place, str]] = [((name,), root)] if stat.S_ISDIR(status.st_mode) else []
            while folders:
                place, path = folders.pop()
                try:
                    entries = os.scandir(path)
                except OSError as error:
                    if strict:
                        raise Failure("E3405", f"`{_name(place)}` cannot be watched: {error.strerror}") from None
                    # removed or made unreadable: that is a change of the directory itself and is detected there
                    continue
                with entries:
                    for entry in entries:
                        try:
                            status = entry.stat(follow_symlinks=False)
                        except OSError:
                            continue
                        here = (*place, entry.name)
                        yield here, entry.path, status
                        if stat.S_ISDIR(status.st_mode):
                            folders.append((here, entry.path))

    def _changes(
        self, before: Snapshot, differs: Callable[[Place, DirectoryEntry, DirectoryEntry, str], bool]
    ) -> list[Change]:
        changes: list[Change] = []
        gone = dict(before)
        for place, path, status in self._walk():
            now, then = _entry(path, status), gone.pop(place, None)
            if then is None:
                changes.append(Change(resource=_name(place), operation="CREATE", after=now.summary()))
            elif differs(place, then, now, path):
                values = {"before": then.summary(), "after": now.summary()}
                changes.append(Change(resource=_name(place), operation="UPDATE", **values))
        changes += [
            Change(resource=_name(place), operation="DELETE", before=then.summary()) for place, then in gone.items()
        ]
        return sorted(changes, key=lambda change: change.resource)

    # Restoring

    def _restore(self, before: Snapshot) -> list[Change]:
        now = self._now()
        # Entries that were not there, or are of another kind now, are removed first, deepest first.
        for place in sorted(now, key=len, reverse=True):
            if place not in before or before[place].kind != now[place][0].kind:
                self._act(place, _remove)
        touched: set[Place] = set()
        for directories in (True, False):
            now = self._now()  # a directory that is readable again shows its content
            for place in sorted(before, key=len):
                then, (entry, path) = before[place], now.get(place, (None, ""))
                if (then.kind == "directory") == directories and (entry is None or _differs(then, entry, path)):
                    touched.add(place)
                    same_file = entry is not None and entry.inode == then.inode
                    self._act(place, partial(_put_back, then=then, same_file=same_file))
        # INVARIANT: a file whose content was not kept is never reported as restored.
        return self._changes(before, lambda place, then, now, path: place in touched and not _restored(then, now, path))

    def _now(self) -> dict[Place, tuple[DirectoryEntry, str]]:
        return {place: (_entry(path, status), path) for place, path, status in self._walk()}

    def _act(self, place: Place, act: Callable[[int | None, str], None]) -> None:
        """Act on an entry through its directory. A failure shows afterwards in the remaining differences."""
        root, path = self._roots[place[0]], place[1:]
        folder: int | None = None
        try:
            if path:
                folder = _open_path(root, path[:-1])
            act(folder, path[-1] if path else root)
        except OSError:
            pass
        finally:
            if folder is not None:
                os.close(folder)


# Entries


def _entry(path: str, status: os.stat_result) -> DirectoryEntry:
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "special")
    target = None
    if kind == "symlink":
        try:
            target = os.readlink(path)
        except OSError:
            target = ""
    return DirectoryEntry(
        kind,
        stat.S_IMODE(status.st_mode),
        status.st_uid,
        status.st_gid,
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
        status.st_ctime_ns,
        status.st_nlink,
        target,
        attributes=_attributes(path) if kind == "directory" else None,
    )


def _attributes(path: str) -> Attributes:
    try:
        names = sorted(os.listxattr(path, follow_symlinks=False))
        return tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in names)
    except OSError:
        return ()  # removed, or on a file system without attributes


def _differs(then: DirectoryEntry, now: DirectoryEntry, path: str) -> bool:
    if then.kind == now.kind == "directory":
        then_facts = (then.mode, then.uid, then.gid, then.inode, then.attributes)
        return then_facts != (now.mode, now.uid, now.gid, now.inode, now.attributes)
    # First all metadata of the file system; then the content, where that may not be enough.
    if then[:10] != now[:10]:
        return True
    return then.digest is not None and _hash(path) != then.digest


def _restored(then: DirectoryEntry, now: DirectoryEntry, path: str) -> bool:
    same = (then.kind, then.mode, then.uid, then.gid, then.target) == (now.kind, now.mode, now.uid, now.gid, now.target)
    same = same and (then.attributes is None or then.attributes == _attributes(path))
    if not same or then.kind != "file":
        return same and then.kind != "special"
    return then.digest is not None and _hash(path) == then.digest


def _hash(path: str) -> bytes | None:
    digest = hashlib.sha256()
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError:
        return None
    return digest.digest()


def _read(path: str) -> bytes | None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return file.read(KEEP_FILE_BYTES + 1)
    except OSError:
        return None


def _name(place: Place) -> str:
    return "/".join((place[0], *map(_text, place[1:])))


def _text(name: str) -> str:
    """Convert a file name to text; bytes that are not UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


# Actions on one entry, through its directory


def _open_path(root: str, path: Sequence[str]) -> int:
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    for name in path:
        try:
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        finally:
            os.close(folder)
        folder = below
    return folder


def _remove(folder: int | None, name: str) -> None:
    if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        os.rmdir(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)


def _put_back(folder: int | None, name: str, then: DirectoryEntry, same_file: bool) -> None:
    """Restore an entry. A file that still exists is written in place, so that its hard links stay."""
    if then.kind == "symlink":
        _unlink(folder, name)
        os.symlink(then.target or "", name, dir_fd=folder)
        os.chown(name, then.uid, then.gid, dir_fd=folder, follow_symlinks=False)
        return
    if then.kind == "directory":
        _make_directory(folder, name)
    elif then.content is not None and not same_file:
        _unlink(folder, name)
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder))
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder)
    try:
        _set(f"/proc/self/fd/{handle}", then, os.fstat(handle))
    finally:
        os.close(handle)


def _set(path: str, then: DirectoryEntry, now: os.stat_result) -> None:
    """Restore content, owner, mode and time of an open entry."""
    if _KINDS.get(stat.S_IFMT(now.st_mode)) != then.kind:
        return
    if then.content is not None:
        os.chmod(path, 0o600)
        with open(path, "wb") as file:
            file.write(then.content)
    if (now.st_uid, now.st_gid) != (then.uid, then.gid):
        os.chown(path, then.uid, then.gid)
    if then.attributes is not None:
        _set_attributes(path, dict(then.attributes))
    os.chmod(path, then.mode)
    os.utime(path, ns=(then.mtime_ns, then.mtime_ns))


def _set_attributes(path: str, then: Mapping[str, bytes]) -> None:
    """Restore the extended attributes of an open entry. The path leads through its descriptor."""
    for name in os.listxattr(path):
        if name not in then:
            os.removexattr(path, name)
    for name, value in then.items():
        if name not in os.listxattr(path) or os.getxattr(path, name) != value:
            os.setxattr(path, name, value)


def _make_directory(folder: int | None, name: str) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=folder)
    except FileExistsError:
        pass


def _unlink(folder: int | None, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass

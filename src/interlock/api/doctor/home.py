"""The checks of `interlock doctor` that concern the data directory itself: its place, its disk, its settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.api.doctor.findings import Finding, Status

if TYPE_CHECKING:
    from interlock.store.home import Home

LITTLE_DISK = 100 * 2**20
NO_DISK = 10 * 2**20


def check_home(home: Home) -> Iterator[Finding]:
    path = home.path
    if path.exists() and not path.is_dir():
        yield Finding("home", "broken", f"{path} is not a directory", "choose another data directory with --home")
        return
    nearest = next((parent for parent in (path, *path.absolute().parents) if parent.exists()), Path("/"))
    writable = os.access(nearest, os.W_OK | os.X_OK)
    made = "" if path.exists() else ", made at first use"
    if not writable:
        yield Finding("home", "broken", f"{path} cannot be written", "make it writable, or choose another with --home")
        return
    yield Finding("home", "good", f"{path}{made}")
    if path.exists() and path.stat().st_mode & 0o077:
        yield Finding("home", "attention", "others on this machine may enter it", f"chmod 700 {path}")


def check_disk(home: Home) -> Iterator[Finding]:
    import shutil

    nearest = next((parent for parent in (home.path, *home.path.absolute().parents) if parent.exists()), Path("/"))
    free = shutil.disk_usage(nearest).free
    status: Status = "good" if free >= LITTLE_DISK else "attention" if free >= NO_DISK else "broken"
    advice = "" if status == "good" else "free some space: without it no call can be recorded, and none will run"
    yield Finding("disk", status, f"{free / 2**30:.1f} GiB free", advice)


def check_background(home: Home) -> Iterator[Finding]:
    """Background tasks that fail in running processes of this data directory, as each process reports them."""
    for process, report in home.signs_of_life():
        for task, failures, error in report.get("failing", ()):
            what = f"{task} failed {failures} times in a row in process {process}: {error}"
            advice = "read the log of that process; the task is tried again by itself, at least once a minute"
            yield Finding("background", "attention", what, advice)


def check_nodes(home: Home) -> Iterator[Finding]:
    """Files that have to be the same on all machines of a store and are not."""
    from interlock.store.node_files import differences
    from interlock.store.shared_config import text_of

    for path in (home.policy, home.principals):
        shared = text_of(home, path.name)
        if shared is not None and path.exists() and path.read_text(errors="replace") != shared:
            what = f"{path.name} of this data directory does not count: the store has another, which all machines share"
            yield Finding("nodes", "attention", what, "remove the file; interlock config diff shows the difference")
    if home.near or home.new:
        return
    for one in differences(home):
        what = f"{one.file} is not the same here and in {one.directory} on {one.machine}, which uses the same store"
        yield Finding("nodes", "attention", what, "copy it from the machine where it is right to the other")


def check_redis(home: Home) -> Iterator[Finding]:
    """Whether the Redis server of the settings answers. Its password is not tried: it may be sealed."""
    import asyncio

    from interlock.store.shared_config import settings_of

    url = settings_of(home).settings.redis
    if not url:
        return
    from interlock.net.redis import Lost, RedisConnection

    async def ask() -> None:
        connection = await RedisConnection.open(url)
        try:
            await connection.ask("PING")
        finally:
            connection.close()

    try:
        asyncio.run(ask())
    except Lost as lost:
        if "NOAUTH" not in str(lost):
            advice = "start it, or correct the setting `redis`; until then changes are found by reading the store"
            yield Finding("redis", "attention", f"{url} cannot be used: {lost}", advice)
            return
    yield Finding("redis", "good", f"{url} answers")


def check_backups(home: Home) -> Iterator[Finding]:
    """Check that the newest scheduled backup is as recent as the settings demand.

    A folder is read. For an object store, the time of the last backup is read from the database.
    """
    from datetime import timedelta

    from interlock.audit.backups import RETRY_MS, blocked, dated_ahead, last_made, made_in, store_time
    from interlock.net.s3 import is_address
    from interlock.store.inspection import opened
    from interlock.store.shared_config import settings_of

    settings = settings_of(home).settings
    if settings.backup_to is None:
        return
    now, held = store_time(home), ""
    if is_address(settings.backup_to):
        if home.new:
            return
        with opened(home) as reader:
            newest, held = last_made(reader), blocked(reader)
        count = ""
    else:
        made = made_in(Path(settings.backup_to))
        for one in dated_ahead(Path(settings.backup_to), now):
            held = f"{one.path} is dated after the present time of the store"
        newest, count = made[-1].made if made else None, f"{len(made):,} in "
    if newest is None:
        advice = "a running server makes one; interlock backup makes one now"
        yield Finding("backups", "attention", f"none in {settings.backup_to} yet", advice)
        return
    if held:
        advice = "correct the clock of the machine that made it, or of this one; then remove the backup or move it away"
        yield Finding("backups", "attention", f"backups past their term are not removed: {held}", advice)
    age = now - newest
    late = age > timedelta(milliseconds=settings.backup_every_ms + RETRY_MS)
    advice = "read the log of the server, or make one now: interlock backup" if late else ""
    what = f"{count}{settings.backup_to}, the newest {age.total_seconds() / 3600:,.1f} hours old"
    yield Finding("backups", "attention" if late else "good", what, advice)


def check_settings(home: Home) -> Iterator[Finding]:
    from interlock.api.config_check import mistyped_variables
    from interlock.store.shared_config import settings_of

    settings = settings_of(home).settings
    yield Finding("settings", "good", f"audit {settings.audit}; interlock config show tells all of them")
    for name, meant in mistyped_variables():
        yield Finding("settings", "attention", f"the variable {name} sets nothing", f"did you mean {meant}?")

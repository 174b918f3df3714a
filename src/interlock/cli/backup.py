"""`interlock backup` and `restore`: a whole data directory copied and verified, to a safe place and back."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import Output, refuse_token, without_home

if TYPE_CHECKING:
    from interlock.audit.archive import Tier
    from interlock.audit.chain import ChainVerdict
    from interlock.cli.render import Page
    from interlock.settings import Settings
    from interlock.store.backup import Copy
    from interlock.store.home import Home


@click.command(short_help="Copy the data directory, and verify the copy.")
@click.argument("directory", type=click.Path(), required=False)
@click.option("--tier", type=click.Choice(["hot", "warm", "cold"]), help="Of s3://: its term [default: warm].")
@without_home
def backup(out: Output, /, directory: str | None, *, tier: Tier | None) -> int:
    """Copy the whole data directory to DIRECTORY, which must not exist or be empty, and verify the copy.

    Servers may run on. The copy is the data directory as it was at one moment: journal, keys, anchors, policy,
    principals, settings, manifests. It holds the keys: protect it like the original. A data directory that does not
    verify is not copied.

    Without DIRECTORY it goes to the place of the scheduled backups (the setting backup_to), under the present time;
    those that are past their term are removed.

    DIRECTORY may be an address s3://BUCKET/PREFIX. What is written there is read back and compared. Credentials are
    those of the environment (AWS_ACCESS_KEY_ID and so on; AWS_ENDPOINT_URL for a store that is not Amazon's).
    interlock archive expire removes it after the term of its tier: hot 1 hour, warm 90 days, cold 7 years.

    \b
    interlock backup /srv/backups/monday
    interlock backup s3://backups/interlock --tier cold
    interlock --home /srv/backups/monday audit verify
    interlock restore /srv/backups/monday --drill
    """
    from interlock.api.homes import home_at
    from interlock.audit.archive import is_archive
    from interlock.audit.backups import copy_verified, make, make_archived

    refuse_token("a backup of the data directory")
    home = home_at(out.session.path)
    if tier is not None and (directory is None or not is_archive(directory)):
        raise click.UsageError("--tier is for an address s3://BUCKET/PREFIX")
    with copy_progress(out) as progress:
        if directory is None:
            directory, copy, verdict = make(home, _scheduled(home), datetime.now(UTC), *progress)
        elif is_archive(directory):
            directory, copy, verdict = make_archived(home, directory, tier or "warm", datetime.now(UTC), *progress)
        else:
            copy, verdict = copy_verified(home, Path(directory), *progress)

    def show(page: Page) -> None:
        _show(page, copy, verdict, f"copied to {directory}")
        page.facts([("next", "keep it off this machine, and protect it like the original: it holds the keys")])

    out.answer({"home": str(out.session.path), "backup": directory, **_document(copy, verdict)}, show)
    return 0


@click.command(short_help="Make the data directory anew from a backup.")
@click.argument("place", metavar="[DIRECTORY]", type=click.Path(), required=False)
@click.option("--drill", is_flag=True, help="Try it in a temporary directory and leave everything as it is.")
@without_home
def restore(out: Output, /, place: str | None, *, drill: bool) -> int:
    """Restore the data directory from the backup in DIRECTORY, and verify it. It must not exist, or be empty.

    Everything that happened after the backup was made is lost: a call made since then runs again if it is sent again,
    and tokens that were revoked since are valid again. Calls that were running then have an unknown outcome.

    Where the settings of the backup, or INTERLOCK_STORE, name a PostgreSQL database, the store is restored there. It
    must be empty.

    With --drill the backup is restored in a temporary directory, verified, compared row by row, opened, and removed
    again. Without DIRECTORY it is the newest scheduled backup (the setting backup_to).

    DIRECTORY may be an address s3://BUCKET/PREFIX, for the newest backup there, or s3://BUCKET/PREFIX/TIER/NAME.

    \b
    interlock --home /srv/interlock restore /srv/backups/monday
    interlock --home /srv/interlock restore s3://backups/interlock
    interlock restore --drill
    """
    from interlock.store.home import Home

    refuse_token("restoring a data directory")
    if place is None and not drill:
        raise click.UsageError("name the backup to restore; without one, only --drill is possible")
    with _fetched(out, place or _newest(Home(out.session.path))) as directory:
        return _drill(out, directory) if drill else _restore(out, directory, place or "")


def _restore(out: Output, directory: Path, place: str) -> int:
    from interlock.audit.backups import copy_verified, restore_store
    from interlock.store.home import Home
    from interlock.store.homes import restored_home

    target = restored_home(out.session.path, directory)
    with copy_progress(out) as progress:
        if target.near:
            copy, verdict = copy_verified(Home(directory), out.session.path, *progress)
        else:
            copy, verdict = restore_store(Home(directory), target, *progress)
    running, approved = _open_calls(target)

    def show(page: Page) -> None:
        _show(page, copy, verdict, f"restored to {out.session.path}")
        if running:
            page.line(f"  calls that were running when it was made: {running:,}; their outcome is unknown")
        if approved:
            note = "a server makes them as soon as it starts"
            page.line(f"  calls that were approved and had not run: {approved:,}; {note}")
        page.facts([("next", "interlock doctor, then interlock calls reconcile, before agents are let in again")])

    document = {"home": str(out.session.path), "backup": place, **_document(copy, verdict)}
    out.answer({**document, "calls_running": running, "calls_approved": approved}, show)
    return 0


def _drill(out: Output, backup: Path) -> int:
    """Restore a backup in a temporary directory, open it, and say what is in it."""
    import asyncio

    from interlock.audit.backups import drill
    from interlock.store.inspection import opened, tool_count

    with copy_progress(out) as progress, drill(backup, *progress) as (restored, found):
        out.progress("opening the restored copy")
        asyncio.run(_open(restored))
        with opened(restored) as reader:
            tools = tool_count(reader)
    tickets, keys = found.rows.get("ticket", 0), found.rows.get("reservation", 0)

    def show(page: Page) -> None:
        _show(page, found.copy, found.verdict, "restored and compared")
        page.facts(
            [
                ("backup", str(backup)),
                ("tools", f"{tools:,}"),
                ("tickets", f"{tickets:,}"),
                ("keys", f"{keys:,} idempotency keys"),
                ("next", "nothing was changed; the restored copy is removed"),
            ]
        )

    document = {"backup": str(backup), "tools": tools, "rows": found.rows, **_document(found.copy, found.verdict)}
    out.answer(document, show)
    return 0


async def _open(restored: Home) -> None:
    """Open a restored data directory as a server does, without background work. It raises what a server would."""
    from interlock.api.interlock import Interlock

    async with Interlock.open(restored.path, housekeeping=False, hooks=(), otlp_endpoint="", store=""):
        pass


@contextmanager
def _fetched(out: Output, place: str) -> Generator[Path]:
    """The directory with a backup: the one that is named, or a temporary one with the backup of an archive."""
    import asyncio
    import tempfile

    from interlock.audit.archive import archive_at, is_archive

    if not is_archive(place):
        if not Path(place).is_dir():
            raise click.UsageError(f"there is no directory `{place}`")
        yield Path(place)
        return

    async def fetch(target: Path) -> None:
        async with archive_at(place) as archive:
            await archive.fetch(target, lambda done, total: out.progress("reading", 100 * done / max(total, 1)))

    with tempfile.TemporaryDirectory(prefix="interlock-restore-") as directory:
        asyncio.run(fetch(Path(directory)))
        yield Path(directory)


def _scheduled(home: Home) -> Settings:
    """The settings of scheduled backups; E3411 where they name no place for them."""
    from interlock.api.homes import settings_of
    from interlock.core.errors import Failure

    settings = settings_of(home).settings
    if settings.backup_to is None:
        advice = "name a directory, or set backup_to in settings.toml"
        raise Failure("E3411", "there is no folder for scheduled backups", resolution=advice)
    return settings


def _newest(home: Home) -> str:
    """The newest scheduled backup; for an archive, its address."""
    from interlock.audit.archive import is_archive
    from interlock.audit.backups import made_in
    from interlock.core.errors import Failure

    place = _scheduled(home).backup_to or ""
    if is_archive(place):
        return place
    if not (made := made_in(Path(place))):
        words = f"there is no backup in `{place}`"
        raise Failure("E3411", words, resolution="make one with interlock backup, or name a directory")
    return str(made[-1].path)


@contextmanager
def copy_progress(out: Output) -> Generator[tuple[Callable[[int, int], None], Callable[[int], None]]]:
    """Show on a terminal how far a copy is, and then its verification."""

    def pages(done: int, total: int) -> None:
        out.progress("copying", 100 * done / max(total, 1))

    try:
        yield pages, lambda done: out.progress(f"verifying: {done:,} records")
    finally:
        out.progress("")


def _open_calls(home: Home) -> tuple[int, int]:
    """The number of calls that were running when a data directory was copied, and of calls that it had scheduled."""
    from interlock.store.inspection import open_calls

    return open_calls(home)


def _document(copy: Copy, verdict: ChainVerdict) -> dict[str, Any]:
    return {"files": copy.files, "bytes": copy.size, "verdict": verdict.document()}


def _show(page: Page, copy: Copy, verdict: ChainVerdict, what: str) -> None:
    from interlock.cli.render import GOOD, Text

    text = f" {verdict.records:,} records, {copy.files:,} files, {copy.size / 2**20:,.1f} MiB {what} · "
    page.line(GOOD, text, Text("intact", "bold green"))

"""`interlock backup` and `restore`: a whole data directory copied and verified, to a safe place and back."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from interlock.cli.command import refuse_token, without_home
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.api.backups import Copied, Progress
    from interlock.api.types import Tier
    from interlock.cli.render import Page


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

    DIRECTORY may be an address s3://BUCKET/PREFIX. What is written there is read back and compared. The credential is
    the one that the setting archive_secret names, or else that of the environment (AWS_ACCESS_KEY_ID and so on).
    AWS_ENDPOINT_URL names a store that is not Amazon's.
    interlock archive expire removes it after the term of its tier: hot 1 hour, warm 90 days, cold 7 years.

    \b
    interlock backup /srv/backups/monday
    interlock backup s3://backups/interlock --tier cold
    interlock --home /srv/backups/monday audit verify
    interlock restore /srv/backups/monday --drill
    """
    from interlock.api.backups import back_up
    from interlock.net.s3 import is_address

    refuse_token("a backup of the data directory")
    if tier is not None and (directory is None or not is_address(directory)):
        raise click.UsageError("--tier is for an address s3://BUCKET/PREFIX")
    with copy_progress(out) as progress:
        made = back_up(out.session.path, directory, tier, progress)

    def show(page: Page) -> None:
        _show(page, made, f"copied to {made.place}")
        page.facts([("next", "keep it off this machine, and protect it like the original: it holds the keys")])

    out.answer({"home": str(out.session.path), "backup": made.place, **made.document()}, show)
    return 0


@click.command(short_help="Make the data directory anew from a backup.")
@click.argument("place", metavar="[DIRECTORY]", type=click.Path(), required=False)
@click.option("--drill", is_flag=True, help="Try it in a temporary directory and leave everything as it is.")
@click.option("--store", metavar="ADDRESS", help="With --drill: a PostgreSQL database to try it in, postgresql://…")
@without_home
def restore(out: Output, /, place: str | None, *, drill: bool, store: str | None) -> int:
    """Restore the data directory from the backup in DIRECTORY, and verify it. It must not exist, or be empty.

    Everything that happened after the backup was made is lost: a call made since then runs again if it is sent again,
    and tokens that were revoked since are valid again. Calls that were running then have an unknown outcome.

    Where the settings of the backup, or INTERLOCK_STORE, name a PostgreSQL database, the store is restored there. It
    must be empty.

    With --drill the backup is restored in a temporary directory, verified, compared row by row, opened, and removed
    again. Without DIRECTORY it is the newest scheduled backup (the setting backup_to). With --store its rows are
    restored in that PostgreSQL database, in a schema that is made for it and removed again; the role needs the right
    CREATE on the database.

    DIRECTORY may be an address s3://BUCKET/PREFIX, for the newest backup there, or s3://BUCKET/PREFIX/TIER/NAME.

    \b
    interlock --home /srv/interlock restore /srv/backups/monday
    interlock --home /srv/interlock restore s3://backups/interlock
    interlock restore --drill
    interlock restore --drill --store postgresql://interlock_owner@db.example.com/interlock
    """
    from interlock.api.backups import fetched, newest
    from interlock.net.s3 import is_address

    refuse_token("restoring a data directory")
    if place is None and not drill:
        raise click.UsageError("name the backup to restore; without one, only --drill is possible")
    if store is not None and (not drill or not store.startswith(("postgresql://", "postgres://"))):
        raise click.UsageError("--store is an address that begins with postgresql://, for --drill")
    where = place or newest(out.session.path)
    if not is_address(where) and not Path(where).is_dir():
        raise click.UsageError(f"there is no directory `{where}`")
    with fetched(
        out.session.path, where, lambda done, total: out.progress("reading", 100 * done / max(total, 1))
    ) as directory:
        return _drill(out, directory, store or "") if drill else _restore(out, directory, place or "")


def _restore(out: Output, directory: Path, place: str) -> int:
    from interlock.api.backups import restore as restore_from

    with copy_progress(out) as progress:
        copy, running, approved = restore_from(out.session.path, directory, progress)

    def show(page: Page) -> None:
        _show(page, copy, f"restored to {out.session.path}")
        if running:
            page.line(f"  calls that were running when it was made: {running:,}; their outcome is unknown")
        if approved:
            note = "a server makes them as soon as it starts"
            page.line(f"  calls that were approved and had not run: {approved:,}; {note}")
        page.facts([("next", "interlock doctor, then interlock calls reconcile, before agents are let in again")])

    document = {"home": str(out.session.path), "backup": place, **copy.document()}
    out.answer({**document, "calls_running": running, "calls_approved": approved}, show)
    return 0


def _drill(out: Output, backup: Path, server: str) -> int:
    """Restore a backup in a temporary directory, or a schema of a server, open it, and say what is in it."""
    from interlock.api.backups import drill

    with copy_progress(out) as progress:
        copy, counts, tools = drill(backup, progress, out.progress, server)
    tickets, keys = counts.get("ticket", 0), counts.get("reservation", 0)

    def show(page: Page) -> None:
        _show(page, copy, "restored and compared")
        page.facts(
            [
                ("backup", str(backup)),
                ("tools", f"{tools:,}"),
                ("tickets", f"{tickets:,}"),
                ("keys", f"{keys:,} idempotency keys"),
                ("next", "nothing was changed; the restored copy is removed"),
            ]
        )

    out.answer({"backup": str(backup), "tools": tools, "rows": counts, **copy.document()}, show)
    return 0


@contextmanager
def copy_progress(out: Output) -> Generator[Progress]:
    """Show on a terminal how far a copy is, and then its verification."""
    from interlock.api.backups import Progress

    def pages(done: int, total: int) -> None:
        out.progress("copying", 100 * done / max(total, 1))

    def records(done: int) -> None:
        out.progress(f"verifying: {done:,} records")

    try:
        yield Progress(pages, records)
    finally:
        out.progress("")


def _show(page: Page, copy: Copied, what: str) -> None:
    from interlock.cli.render import GOOD, Text

    text = f" {copy.verdict['records']:,} records, {copy.files:,} files, {copy.size / 2**20:,.1f} MiB {what} · "
    page.line(GOOD, text, Text("intact", "bold green"))

"""`interlock migrate`: brings the schema of the store to that of this version, or one step back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from interlock.cli.backup import copy_progress
from interlock.cli.command import refuse_token, without_home
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.api.migrations import Changed
    from interlock.cli.render import Page

_dry_run = click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing.")
_backup_to = click.option(
    "--backup",
    "directory",
    type=click.Path(path_type=Path),
    help="The place of the backup of a file [default: with the scheduled ones, or beside the data directory].",
)


@click.group(short_help="The schema of the store, and its migrations.")
def migrate() -> None:
    """Show and change the schema of the store.

    A command or server that opens a store of an older version migrates it by itself. These commands show beforehand
    what would happen, migrate at a time of your choice, and go one step back.

    \b
    interlock migrate status
    interlock migrate up --dry-run
    interlock migrate down
    """


@migrate.command(short_help="List the migrations, and which are applied.")
@without_home
def status(out: Output, /) -> int:
    """List the migrations of this version, and which of them are applied.

    \b
    interlock migrate status
    """
    from interlock.api.migrations import schema_at

    found = schema_at(out.session.path)
    schema, last, known = found["schema"], found["head"], found["migrations"]
    pending = sum(not one["applied"] for one in known)

    def show(page: Page) -> None:
        page.table(
            [
                (
                    one["revision"], "applied" if one["applied"] else "pending",
                    "yes" if one["can_be_undone"] else "no", one["title"],
                )
                for one in known
            ],
            ("migration", "state", "undo", "what it does"),
        )  # fmt: skip
        page.facts(
            [
                ("schema", f"{schema}, which versions from schema {found['compatible_since']} on can use"),
                ("version", f"{last}, {pending} to apply" if pending else last),
                ("running", f"{found['running']:,} processes"),
            ]
        )
        if schema > last:
            page.facts([("next", "it was migrated by a newer version; only that one can undo it")])

    out.answer(found, show)
    return 0


@migrate.command()
@_dry_run
@_backup_to
@without_home
def up(out: Output, /, *, dry_run: bool, directory: Path | None) -> int:
    """Bring the store to the schema of this version.

    The migrations run in one transaction: if one fails, nothing has changed. A store in a file is backed up first, and
    no process may run on it. Of a store on PostgreSQL no backup is made: use your server's, or run interlock backup
    before. Processes that can work on the new schema may go on running. In an empty database on PostgreSQL the tables
    are made.

    \b
    interlock migrate up
    """
    from interlock.api.migrations import bring_up

    refuse_token("migrating the store")
    with copy_progress(out) as progress:
        done = bring_up(out.session.path, dry_run=dry_run, directory=directory, progress=progress, working=out.working)
    return _answer(out, "applied", done, dry_run=dry_run)


@migrate.command()
@_dry_run
@_backup_to
@click.option(
    "--lose", multiple=True, metavar="NAME", help="A table or column that may be lost, as --dry-run names it."
)
@without_home
def down(out: Output, /, *, dry_run: bool, directory: Path | None, lose: tuple[str, ...]) -> int:
    """Undo the last migration, to go back to the version before.

    A store in a file is backed up first. Of a store on PostgreSQL no backup is made: run interlock backup before. The
    command is refused where rows would be lost, unless --lose names their table or column. Run it with the version that
    has the migration, and do not start that version afterwards: it would migrate the store again.

    \b
    interlock migrate down --dry-run
    interlock migrate down --lose surface
    """
    from interlock.api.migrations import take_down

    refuse_token("migrating the store")
    with copy_progress(out) as progress:
        done = take_down(
            out.session.path, lose=lose, dry_run=dry_run, directory=directory, progress=progress, working=out.working
        )
    return _answer(out, "undone", done, dry_run=dry_run)


def _answer(out: Output, word: str, done: Changed, *, dry_run: bool) -> int:
    def show(page: Page) -> None:
        from interlock.cli.render import GOOD

        if not done.steps:
            page.line(GOOD, f" nothing to do: the store is at schema {done.schema}")
            return
        words = "would be " + word if dry_run else word
        for one in done.steps:
            page.line(GOOD, f" {one['revision']} {words}: {one['title']}")
        lost = [("would lose" if dry_run else "lost", f"{rows:,} rows of {what}") for what, rows in done.loses.items()]
        copy = str(done.backup) if done.backup is not None else "none: the backups of a PostgreSQL server are its own"
        page.facts([*lost, *([] if dry_run else [("backup", copy)]), ("schema", done.schema)])

    names = [one["revision"] for one in done.steps]
    place = None if done.backup is None else str(done.backup)
    document = {"schema": done.schema, word: names, "dry_run": dry_run, "backup": place, "loses": done.loses}
    out.answer(document, show)
    return 0

"""`interlock migrate`: brings the schema of the store to that of this version, or one step back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import Output, refuse_token, without_home

if TYPE_CHECKING:
    from interlock.cli.render import Page
    from interlock.store.home import Home
    from interlock.store.migration import Migration

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
    from interlock.api.homes import home_at
    from interlock.api.homes import schema_status as status
    from interlock.store.migration import head, migrations

    home = home_at(out.session.path)
    found, known, last = status(home), migrations(), head()
    running = home.alive()
    rows = [
        (one, "applied" if one.revision <= found.schema else "pending", "yes" if one.can_be_undone else "no")
        for one in known
    ]

    def show(page: Page) -> None:
        page.table(
            [(one.revision, state, undo, one.title) for one, state, undo in rows],
            ("migration", "state", "undo", "what it does"),
        )
        page.facts(
            [
                ("schema", f"{found.schema}, which versions from schema {found.compatible_since} on can use"),
                ("version", f"{last}, {len(found.pending)} to apply" if found.pending else last),
                ("running", f"{running:,} processes"),
            ]
        )
        if found.schema > last:
            page.facts([("next", "it was migrated by a newer version; only that one can undo it")])

    document = {
        "schema": found.schema,
        "compatible_since": found.compatible_since,
        "head": last,
        "running": running,
        "loses": found.at_stake,
        "migrations": [{**_document(one), "applied": state == "applied"} for one, state, _ in rows],
    }
    out.answer(document, show)
    return 0


@migrate.command()
@_dry_run
@_backup_to
@without_home
def up(out: Output, /, *, dry_run: bool, directory: Path | None) -> int:
    """Bring the store to the schema of this version.

    The migrations run in one transaction: if one fails, nothing has changed. A store in a file is backed up first, and
    no process may run on it. Of a store on PostgreSQL no backup is made: use your server's, or run interlock backup
    before. Processes that can work on the new schema may go on running.

    \b
    interlock migrate up
    """
    from interlock.api.homes import home_at
    from interlock.api.homes import schema_status as status
    from interlock.store.migration import compatible_since, up

    refuse_token("migrating the store")
    home = home_at(out.session.path)
    found, backup = status(home), None
    steps = found.pending
    if steps:
        target = steps[-1].revision
        home.refuse_in_use(found.schema, target, compatible_since(target))
    if steps and not dry_run:
        backup = _backup(out, home, target=steps[-1].revision, directory=directory)
        with out.working("migrating …"):
            steps = up(home)
    schema = steps[-1].revision if steps and not dry_run else found.schema
    return _answer(out, "applied", steps, schema, dry_run=dry_run, backup=backup, loses={})


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
    from interlock.api.homes import home_at
    from interlock.api.homes import schema_status as status
    from interlock.store.migration import compatible_since, down, last_applied, refuse_loss

    refuse_token("migrating the store")
    home = home_at(out.session.path)
    found, backup = status(home), None
    last, before = last_applied(found.schema)
    loses = found.at_stake or {}
    if not dry_run:
        refuse_loss({what: rows for what, rows in loses.items() if what not in lose})
        home.refuse_in_use(found.schema, before, compatible_since(before))
        backup = _backup(out, home, target=before, directory=directory)
        with out.working(f"undoing {last.revision} …"):
            last = down(home, lose)
    schema = found.schema if dry_run else before
    return _answer(out, "undone", [last], schema, dry_run=dry_run, backup=backup, loses=loses)


def _backup(out: Output, home: Home, *, target: str, directory: Path | None) -> Path | None:
    """Back up a store in a file before its schema changes. Of a store on PostgreSQL none is made: returns None."""
    from datetime import UTC, datetime

    from interlock.api.homes import settings_of
    from interlock.audit.backups import copy_verified, make_before
    from interlock.cli.backup import copy_progress

    if not home.near:
        return None
    with copy_progress(out) as progress:
        if directory is not None:
            copy_verified(home, directory, *progress)
            return directory
        return make_before(home, target, settings_of(home).settings, datetime.now(UTC), *progress)


def _answer(
    out: Output,
    done: str,
    steps: list[Migration],
    schema: str,
    *,
    dry_run: bool,
    backup: Path | None,
    loses: dict[str, int],
) -> int:
    def show(page: Page) -> None:
        from interlock.cli.render import GOOD

        if not steps:
            page.line(GOOD, f" nothing to do: the store is at schema {schema}")
            return
        words = "would be " + done if dry_run else done
        for one in steps:
            page.line(GOOD, f" {one.revision} {words}: {one.title}")
        lost = [("would lose" if dry_run else "lost", f"{rows:,} rows of {what}") for what, rows in loses.items()]
        copy = str(backup) if backup is not None else "none: the backups of a PostgreSQL server are its own"
        page.facts([*lost, *([] if dry_run else [("backup", copy)]), ("schema", schema)])

    names = [one.revision for one in steps]
    place = None if backup is None else str(backup)
    out.answer({"schema": schema, done: names, "dry_run": dry_run, "backup": place, "loses": loses}, show)
    return 0


def _document(one: Migration) -> dict[str, Any]:
    return {
        "revision": one.revision,
        "title": one.title,
        "compatible_since": one.compatible_since,
        "can_be_undone": one.can_be_undone,
    }

"""`interlock store`: moves the database from a file to PostgreSQL and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from interlock.cli.command import refuse_token, without_home
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.cli.render import Page

_FILE = "file"


@click.group(short_help="The database: a file, or a schema on PostgreSQL.")
def store() -> None:
    """The database of a data directory: a file, or a schema on a PostgreSQL server.

    \b
    interlock store copy --to postgresql://interlock@db.example.com/interlock
    """


@store.command(short_help="Copy the store to another database, and verify it.")
@click.option(
    "--to", "address", required=True, metavar="ADDRESS", help="postgresql://…, or `file` for one in the data directory."
)
@click.option("--admin", metavar="ADDRESS", help="The same store for the owner of its tables, as in store_admin.")
@without_home
def copy(out: Output, /, *, address: str, admin: str | None) -> int:
    """Copy the store to ADDRESS, compare both row by row, and verify the copy. Stop all processes on it first.

    Keys, anchors, policy and settings stay in the data directory and serve both stores. The old store is not changed.
    To use the copy, change the setting `store` and start the servers again. If something is written to the old store
    before that, the copy is refused.

    A copy that was not finished is not opened. Run the command again: it starts from the beginning.

    \b
    interlock store copy --to postgresql://interlock@db.example.com/interlock
    interlock store copy --to file
    """
    from interlock.api.backups import copy_store
    from interlock.cli.backup import copy_progress

    refuse_token("copying the store")
    to_file = address == _FILE
    if not to_file and not address.startswith(("postgresql://", "postgres://")):
        raise click.UsageError("--to is an address that begins with postgresql://, or `file`")
    with copy_progress(out) as progress:
        copied = copy_store(out.session.path, "" if to_file else address, admin or "", progress)

    def show(page: Page) -> None:
        from interlock.cli.render import GOOD, Text

        text = f" {copied.rows:,} rows of {len(copied.tables)} tables copied and compared · "
        page.line(GOOD, text, f"{copied.verdict['records']:,} records · ", Text("intact", "bold green"))
        change = "remove the setting store" if to_file else "set store to that address"
        page.facts([("next", f"{change}, in settings.toml or INTERLOCK_STORE, then interlock doctor")])

    out.answer({"home": str(out.session.path), "tables": copied.tables, "verdict": copied.verdict}, show)
    return 0

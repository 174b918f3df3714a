"""`interlock archive`: backups, removed records and old checkpoints in an S3-compatible store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import over_home, without_home
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.cli.render import Page

Json = dict[str, Any]


@click.group(short_help="Backups in an S3-compatible store.")
def archive() -> None:
    """Backups in an S3-compatible store, and what the settings archive_to and backup_to send there.

    \b
    interlock archive list s3://backups/interlock
    interlock archive restore s3://backups/interlock/cold/records-20261118T031500Z --to records
    interlock archive expire s3://backups/interlock
    """


@archive.command("list", short_help="List what is at an address, the oldest first.")
@click.argument("address", metavar="s3://BUCKET/PREFIX")
@without_home
def list_(out: Output, /, address: str) -> int:
    """List what is at an address, the oldest first, and until when each is kept.

    interlock-TIME is a backup, records-TIME are records that were past their term, checkpoints-TIME old checkpoints.

    \b
    interlock archive list s3://backups/interlock
    """
    import asyncio

    from interlock.api.archives import list_archived

    _check(address)
    with out.working(f"looking at {address} …"):
        found = asyncio.run(list_archived(out.session.path, address))

    def show(page: Page) -> None:
        if not found:
            page.line("nothing yet; make a backup: interlock backup s3://BUCKET/PREFIX")
            return
        state = {True: "whole", False: "not finished"}
        page.table(
            [(one["name"], f"until {_minute(one['until'])}", state[one["whole"]]) for one in found], ("", "", "")
        )

    out.answer({"backups": found}, show)
    return 0


def _minute(stamp: str) -> str:
    return stamp[:16].replace("T", " ")


@archive.command(short_help="Get archived records or checkpoints back.")
@click.argument("address", metavar="s3://BUCKET/PREFIX/TIER/NAME")
@click.option("--to", type=click.Path(path_type=Path), help="Of records: the directory to write them to.")
@over_home
async def restore(app: Interlock, out: Output, /, address: str, to: Path | None) -> int:
    """Get archived records or checkpoints back. interlock restore does it for a backup.

    Records are written to a directory, as an export of the journal, and verified. Checkpoints are put back into the
    store, where their calls show them again.

    \b
    interlock archive restore s3://backups/interlock/cold/checkpoints-20261118T031500Z
    interlock archive restore s3://backups/interlock/cold/records-20261118T031500Z --to records
    """
    from interlock.api.archives import check_restorable, get_checkpoints, get_records

    if (fault := check_restorable(address, to)) is not None:
        raise click.UsageError(fault)

    def tell(done: int, total: int) -> None:
        out.progress("reading", 100 * done / max(total, 1))

    with out.working("reading …"):
        if to is None:
            document = await get_checkpoints(app, address, by=app.caller, progress=tell)
        else:
            document = await get_records(app, address, to, by=app.caller, progress=tell)
    if to is not None:
        return _answer_records(out, document)
    out.answer(document, lambda page: page.line(f"{document['checkpoints']:,} checkpoints put back"))
    return 0


def _answer_records(out: Output, document: Json) -> int:
    """Say where records were written, and whether they verify."""
    verdict, path = document["verdict"], document["out"]

    def show(page: Page) -> None:
        from interlock.cli.render import BAD, GOOD

        state = "intact" if verdict["intact"] else f"broken: {verdict['faults'][0]['what']}"
        page.line(GOOD if verdict["intact"] else BAD, f" {verdict['records']:,} records written to {path} · {state}")
        page.facts([("next", f"interlock audit verify --export {path} --public-key HEX")])

    out.answer(document, show)
    return 0 if verdict["intact"] else 1


@archive.command(short_help="Remove what is past the term of its tier.")
@click.argument("address", metavar="s3://BUCKET/PREFIX")
@without_home
def expire(out: Output, /, address: str) -> int:
    """Remove what is past the term of its tier: hot 1 hour, warm 90 days, cold 7 years.

    The newest finished backup is never removed. Run it by schedule, with a credential that may remove objects. If that
    of the setting archive_secret may not, name another one in INTERLOCK_ARCHIVE_SECRET, or none for the environment's.
    The time is that of the store, if the data directory has one. Nothing is removed while something is dated in the
    future.

    \b
    interlock archive expire s3://backups/interlock
    """
    import asyncio

    from interlock.api.archives import expire as remove

    _check(address)
    with out.working(f"removing what is past its term at {address} …"):
        removed = asyncio.run(remove(out.session.path, address))

    def show(page: Page) -> None:
        from interlock.cli.render import GOOD

        page.line(GOOD, f" {len(removed):,} removed")
        for one in removed:
            page.line(f"  {one['name']}")

    out.answer({"removed": removed}, show)
    return 0


def _check(address: str) -> None:
    from interlock.net.s3 import is_address

    if not is_address(address):
        raise click.UsageError("an archive is written s3://BUCKET/PREFIX")

"""`interlock archive`: backups, removed records and old checkpoints in an S3-compatible store."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import Output, over_home, require, without_home

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from interlock.api.interlock import Interlock
    from interlock.audit.archive import Archive, Archived
    from interlock.cli.render import Page


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

    async def ask() -> list[Archived]:
        async with _at(address) as found:
            with out.working(f"looking at {address} …"):
                return await found.list()

    backups = asyncio.run(ask())

    def show(page: Page) -> None:
        if not backups:
            page.line("nothing yet; make a backup: interlock backup s3://BUCKET/PREFIX")
            return
        state = {True: "whole", False: "not finished"}
        rows = [(one.name, f"until {_until(one):%Y-%m-%d %H:%M}", state[one.whole]) for one in backups]
        page.table(rows, ("", "", ""))

    out.answer({"backups": [_document(one) for one in backups]}, show)
    return 0


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
    import tempfile

    from interlock.audit.archive import archive_at, is_archive
    from interlock.audit.archiving import CHECKPOINTS, put_checkpoints_back

    require(app.caller, "policy:admin", "reading an archive")
    kind = address.rstrip("/").rpartition("/")[2].partition("-")[0]
    if not is_archive(address) or kind not in ("records", "checkpoints"):
        raise click.UsageError("name archived records or checkpoints as interlock archive list does, after the address")
    if (kind == "records") != (to is not None):
        raise click.UsageError("records need --to DIRECTORY" if kind == "records" else "--to is for records")
    credential = await app.background.archive_credential()
    with tempfile.TemporaryDirectory(prefix="interlock-archive-") as place:
        async with archive_at(address, credential) as found:
            if not found.chosen:
                raise click.UsageError("the address names nothing that interlock archive list shows")
            with out.working("reading …"):
                name = await found.fetch(
                    Path(place), lambda done, all_: out.progress("reading", 100 * done / max(all_, 1))
                )
        if to is not None:
            return _show_records(out, Path(place), to, name)
        count = await put_checkpoints_back(app.journal, Path(place) / CHECKPOINTS, by=app.caller.id, name=name)
    out.answer({"archived": name, "checkpoints": count}, lambda page: page.line(f"{count:,} checkpoints put back"))
    return 0


def _show_records(out: Output, fetched: Path, to: Path, name: str) -> int:
    """Put fetched records in their place, and say whether they verify."""
    import shutil

    from interlock.audit.archiving import RECORDS, verify_records
    from interlock.core.errors import Failure

    if to.exists():
        words = f"`{to}` is there already; nothing was written"
        raise Failure("E3411", words, resolution="choose a directory that does not exist")
    verdict = verify_records(fetched / RECORDS)
    to.mkdir(parents=True, mode=0o700)
    path = Path(shutil.copy(fetched / RECORDS, to / RECORDS))

    def show(page: Page) -> None:
        from interlock.cli.render import BAD, GOOD

        state = "intact" if verdict.intact else f"broken: {verdict.faults[0].what}"
        page.line(GOOD if verdict.intact else BAD, f" {verdict.records:,} records written to {path} · {state}")
        page.facts([("next", f"interlock audit verify --export {path} --public-key HEX")])

    out.answer({"archived": name, "out": str(path), "verdict": verdict.document()}, show)
    return 0 if verdict.intact else 1


@archive.command(short_help="Remove what is past the term of its tier.")
@click.argument("address", metavar="s3://BUCKET/PREFIX")
@without_home
def expire(out: Output, /, address: str) -> int:
    """Remove what is past the term of its tier: hot 1 hour, warm 90 days, cold 7 years.

    The newest finished backup is never removed. Run it by schedule, with credentials that may remove objects.

    \b
    interlock archive expire s3://backups/interlock
    """
    import asyncio

    async def remove() -> list[Archived]:
        async with _at(address) as found:
            with out.working(f"removing what is past its term at {address} …"):
                return await found.expire(datetime.now(UTC))

    removed = asyncio.run(remove())

    def show(page: Page) -> None:
        from interlock.cli.render import GOOD

        page.line(GOOD, f" {len(removed):,} removed")
        for one in removed:
            page.line(f"  {one.name}")

    out.answer({"removed": [_document(one) for one in removed]}, show)
    return 0


def _at(address: str) -> AbstractAsyncContextManager[Archive]:
    from interlock.audit.archive import archive_at, is_archive

    if not is_archive(address):
        raise click.UsageError("an archive is written s3://BUCKET/PREFIX")
    return archive_at(address)


def _until(one: Archived) -> datetime:
    from interlock.audit.archive import TERMS

    return one.made + TERMS[one.tier]


def _document(one: Archived) -> dict[str, Any]:
    made = one.made.isoformat().replace("+00:00", "Z")
    until = _until(one).isoformat().replace("+00:00", "Z")
    return {"name": one.name, "kind": one.kind, "tier": one.tier, "made": made, "until": until, "whole": one.whole}

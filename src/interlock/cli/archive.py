"""`interlock archive`: backups in an S3-compatible store."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import Output, without_home

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from interlock.audit.archive import Archive, Archived
    from interlock.cli.render import Page


@click.group()
def archive() -> None:
    """Backups in an S3-compatible store, which interlock backup s3://BUCKET/PREFIX makes.

    \b
    interlock archive list s3://backups/interlock
    interlock archive expire s3://backups/interlock
    """


@archive.command("list")
@click.argument("address", metavar="s3://BUCKET/PREFIX")
@without_home
def list_(out: Output, /, address: str) -> int:
    """List the backups at an address, the oldest first, and until when each is kept.

    \b
    interlock archive list s3://backups/interlock
    """
    import asyncio

    async def ask() -> list[Archived]:
        async with _at(address) as found:
            return await found.list()

    backups = asyncio.run(ask())

    def show(page: Page) -> None:
        if not backups:
            page.line("no backups yet; make one: interlock backup s3://BUCKET/PREFIX")
            return
        state = {True: "whole", False: "not finished"}
        rows = [(one.name, f"until {_until(one):%Y-%m-%d %H:%M}", state[one.whole]) for one in backups]
        page.table(rows, ("", "", ""))

    out.answer({"backups": [_document(one) for one in backups]}, show)
    return 0


@archive.command()
@click.argument("address", metavar="s3://BUCKET/PREFIX")
@without_home
def expire(out: Output, /, address: str) -> int:
    """Remove the backups that are past the term of their tier: hot 1 hour, warm 90 days, cold 7 years.

    The newest finished backup is never removed. Run it by schedule, with credentials that may remove objects.

    \b
    interlock archive expire s3://backups/interlock
    """
    import asyncio

    async def remove() -> list[Archived]:
        async with _at(address) as found:
            return await found.expire(datetime.now(UTC))

    removed = asyncio.run(remove())

    def show(page: Page) -> None:
        from interlock.cli.render import GOOD

        page.line(GOOD, f" {len(removed):,} backups removed")
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
    return {"name": one.name, "tier": one.tier, "made": made, "until": until, "whole": one.whole}

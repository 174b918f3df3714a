"""`interlock backup` and `restore`: a whole home copied and proven, to a safe place and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import Output, refuse_token, without_home

if TYPE_CHECKING:
    from interlock.audit.chain import Verdict
    from interlock.cli.render import Page
    from interlock.store.backup import Copy
    from interlock.store.home import Home


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@without_home
def backup(out: Output, /, directory: Path) -> int:
    """Copy the whole home to DIRECTORY, which must not exist or be empty, and verify the copy. Servers may run on.

    The copy is the home as it was at one moment: journal, keys, anchors, policy, principals, settings, manifests. As it
    holds the keys, keep it as safely as the home itself. A home that does not verify is not copied.

    \b
    interlock backup /srv/backups/monday
    interlock --home /srv/backups/monday audit verify
    """
    from interlock.store.home import Home

    refuse_token("a backup of the home")
    copy, verdict = _copy(out, Home(out.session.path), directory)

    def show(page: Page) -> None:
        _show(page, copy, verdict, f"copied to {directory}")
        page.facts([("next", "keep it off this machine, and as safe as the home: it holds the keys")])

    out.answer({"home": str(out.session.path), "backup": str(directory), **_document(copy, verdict)}, show)
    return 0


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@without_home
def restore(out: Output, /, directory: Path) -> int:
    """Make the home anew from the backup in DIRECTORY, and verify it. There must be no home, or an empty directory.

    The home knows nothing of what happened after the backup was made: a call made since then runs again if it is sent
    again, and what was revoked since is good again. Calls that were running then have an unknown outcome.

    \b
    interlock --home /srv/interlock restore /srv/backups/monday
    """
    from interlock.store.home import Home

    refuse_token("restoring a home")
    copy, verdict = _copy(out, Home(directory), out.session.path)
    running, approved = _open_calls(Home(out.session.path))

    def show(page: Page) -> None:
        _show(page, copy, verdict, f"restored to {out.session.path}")
        if running:
            page.line(f"  calls that were running when it was made: {running:,}; their outcome is unknown")
        if approved:
            told = "a server makes them as soon as it starts"
            page.line(f"  calls that were approved and had not run: {approved:,}; {told}")
        page.facts([("next", "interlock doctor, then interlock calls reconcile, before agents are let in again")])

    document = {"home": str(out.session.path), "backup": str(directory), **_document(copy, verdict)}
    out.answer({**document, "calls_running": running, "calls_approved": approved}, show)
    return 0


def _copy(out: Output, source: Home, target: Path) -> tuple[Copy, Verdict]:
    """Copy a home, and let the copy count only if it verifies (E3804)."""
    from interlock.audit.chain import verify
    from interlock.core.errors import Failure
    from interlock.store.backup import copied

    def pages(done: int, total: int) -> None:
        out.progress(f"copying: {100 * done // total} %")

    try:
        with copied(source, target, pages) as copy:
            verdict = verify(copy.home, progress=lambda done: out.progress(f"verifying: {done:,} records"))
            if not verdict.intact:
                fault = verdict.faults[0]
                where = f"at record {fault.seq}, " if fault.seq else ""
                words = f"it does not verify, so nothing was kept of the copy: {where}{fault.what}"
                advice = "see more with interlock audit verify; keep what is there as evidence, with cp -a"
                raise Failure("E3804", words, resolution=advice)
    finally:
        out.progress("")
    return copy, verdict


def _open_calls(home: Home) -> tuple[int, int]:
    """The number of calls that were running when a data directory was copied, and of calls that it had scheduled."""
    from interlock.core.clock import Clock
    from interlock.store.inspection import open_calls

    return open_calls(home, Clock().now_ms())


def _document(copy: Copy, verdict: Verdict) -> dict[str, Any]:
    return {"files": copy.files, "bytes": copy.size, "verdict": verdict.document()}


def _show(page: Page, copy: Copy, verdict: Verdict, what: str) -> None:
    from interlock.cli.render import GOOD, Text

    told = f" {verdict.records:,} records, {copy.files:,} files, {copy.size / 2**20:,.1f} MiB {what} · "
    page.line(GOOD, told, Text("intact", "bold green"))

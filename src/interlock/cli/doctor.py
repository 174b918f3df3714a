"""`interlock doctor`: checks machine, data directory and journal, and says what to do about faults."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from interlock.cli.command import without_home, without_plugins
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.cli.render import Page


@click.command(short_help="Look for faults of this machine and data directory.")
@without_home
def doctor(out: Output, /) -> int:
    """Check Python, SQLite, data directory, journal, waiting calls, policy, tools and keys. Changes nothing.

    Tools are loaded as for a call, which runs their modules, and are not called. Every line says what was found and,
    where something is wrong, what to do. Exits 1 if something is broken.

    \b
    interlock doctor
    interlock --home /srv/interlock doctor --json
    """
    without_plugins()  # as for a call, which loads the same modules
    from interlock._version import __version__
    from interlock.api.doctor import examine_at

    try:
        findings = examine_at(out.session.path, begin=out.progress)
    finally:
        out.progress("")
    healthy = all(finding.status != "broken" for finding in findings)
    document = {
        "healthy": healthy,
        "version": __version__,
        "home": str(out.session.path),
        "findings": [asdict(finding) for finding in findings],
    }

    def show(page: Page) -> None:
        from interlock.cli.render import BAD, GOOD, MAYBE

        marks = {"good": GOOD, "attention": MAYBE, "broken": BAD}
        for finding in findings:
            page.table([(marks[finding.status], finding.name.ljust(11), finding.what)])
            if finding.advice:
                page.table([(" ", " " * 11, f"→ {finding.advice}")])

    out.answer(document, show)
    return 0 if healthy else 1

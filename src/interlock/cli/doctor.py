"""`interlock doctor`: is this machine, this home and this journal in order, and what to do where they are not.

A check is a function in one of the modules `doctor_…`, and a row in one of the tables here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import click

from interlock.cli import doctor_home, doctor_journal, doctor_keys, doctor_machine, doctor_policy, doctor_tools
from interlock.cli.command import Output, without_home
from interlock.cli.doctor_findings import Check, Finding

if TYPE_CHECKING:
    from interlock.cli.render import Page
    from interlock.store.home import Home

MACHINE: Final[Mapping[str, Check]] = {
    "python": doctor_machine.check_python,
    "packages": doctor_machine.check_packages,
    "sqlite": doctor_machine.check_sqlite,
}
CHECKS: Final[Mapping[str, Check]] = {
    "home": doctor_home.check_home,
    "disk": doctor_home.check_disk,
    "journal": doctor_journal.check_journal,
    "background": doctor_home.check_background,
    "nodes": doctor_home.check_nodes,
    "redis": doctor_home.check_redis,
    "backups": doctor_home.check_backups,
    "policy": doctor_policy.check_policy,
    "settings": doctor_home.check_settings,
    "tools": doctor_tools.check_tools,
    "latency": doctor_tools.check_latency,
    "key": doctor_keys.check_key,
    "issuer": doctor_keys.check_issuer,
    "secrets": doctor_keys.check_secrets,
}
# Comes last, because it takes longest.
ISOLATION: Final[Mapping[str, Check]] = {"sandbox": doctor_machine.check_sandbox}


@click.command(short_help="Look for faults of this machine and data directory.")
@without_home
def doctor(out: Output, /) -> int:
    """Look at Python, SQLite, the home, the journal, what waits, the policy, the tools and the keys; change nothing.

    Tools are loaded as for a call, which runs their modules, and are not called. Every line says what was found and,
    where something is wrong, what to do. Exits 1 if something is broken.

    \b
    interlock doctor
    interlock --home /srv/interlock doctor --json
    """
    from interlock._version import __version__
    from interlock.store.homes import home_at

    home = home_at(out.session.path)
    try:
        findings = examine(home, begin=out.progress)
    finally:
        out.progress("")
    healthy = all(finding.status != "broken" for finding in findings)
    document = {
        "healthy": healthy,
        "version": __version__,
        "home": str(home.path),
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


def examine(
    home: Home, *, machine: bool = True, begin: Callable[[str, float], None] = lambda words, percent: None
) -> list[Finding]:
    """Everything that was found, in order; without `machine`, of the home alone. `begin` is told of each check."""
    _follow(home)
    checks = {**MACHINE, **CHECKS, **ISOLATION} if machine else CHECKS
    found: list[Finding] = []
    for number, (name, check) in enumerate(checks.items()):
        begin(f"looking at: {name}", 100 * number / len(checks))
        found += _run(name, check, home)
    return found


def _follow(home: Home) -> None:
    """Find out whether policy, principals and settings of a home are in the store. What is wrong, a check reports."""
    from interlock.core.errors import Failure
    from interlock.store.connection import StoreError
    from interlock.store.shared_config import settings_of

    try:
        settings_of(home)
    except (Failure, OSError, StoreError):
        return


def _run(name: str, check: Check, home: Home) -> Iterator[Finding]:
    from interlock.core.errors import Failure
    from interlock.store.connection import StoreError
    from interlock.store.home import no_room

    try:
        yield from check(home)
    except Failure as failure:
        yield Finding(name, "broken", f"{failure.code} {failure.in_full}", failure.resolution)
    except (OSError, StoreError) as error:
        if (full := no_room(error)) is not None:
            yield Finding(name, "broken", f"{full.code} {full.in_full}", full.resolution)
            return
        yield Finding(
            name, "broken", f"cannot be read: {error}", "make the data directory readable, or choose another one"
        )

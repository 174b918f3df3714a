"""Examines a machine and a data directory: is it in order, and what to do where it is not. Nothing is changed.

A check is a function in one of the modules of this package, and a row in one of the tables here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from interlock.api.doctor import home as of_home
from interlock.api.doctor import journal, keys, policy, tools
from interlock.api.doctor import machine as of_machine
from interlock.api.doctor.findings import Check, Finding

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.store.home import Home

__all__ = ["Finding", "examine", "examine_at"]

MACHINE: Final[Mapping[str, Check]] = {
    "python": of_machine.check_python,
    "packages": of_machine.check_packages,
    "sqlite": of_machine.check_sqlite,
}
CHECKS: Final[Mapping[str, Check]] = {
    "home": of_home.check_home,
    "disk": of_home.check_disk,
    "journal": journal.check_journal,
    "background": of_home.check_background,
    "nodes": of_home.check_nodes,
    "redis": of_home.check_redis,
    "backups": of_home.check_backups,
    "policy": policy.check_policy,
    "settings": of_home.check_settings,
    "tools": tools.check_tools,
    "latency": tools.check_latency,
    "key": keys.check_key,
    "issuer": keys.check_issuer,
    "secrets": keys.check_secrets,
}
# Comes last, because it takes longest.
ISOLATION: Final[Mapping[str, Check]] = {"sandbox": of_machine.check_sandbox}


def examine_at(path: Path, *, begin: Callable[[str, float], None]) -> list[Finding]:
    """Everything that was found at the data directory of a path, whose store may be on a server."""
    from interlock.store.homes import home_at

    return examine(home_at(path), begin=begin)


def examine(
    home: Home, *, machine: bool = True, begin: Callable[[str, float], None] = lambda words, percent: None
) -> list[Finding]:
    """All findings, in order; without `machine`, those of the data directory alone. `begin` precedes each check."""
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
    from interlock.store.port import StoreError
    from interlock.store.shared_config import settings_of

    try:
        settings_of(home)
    except (Failure, OSError, StoreError):
        return


def _run(name: str, check: Check, home: Home) -> Iterator[Finding]:
    from interlock.core.errors import Failure
    from interlock.store.failures import no_room
    from interlock.store.port import StoreError

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

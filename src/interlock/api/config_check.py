"""The checks of `interlock config check`: the files of a configuration, each read as a start would read it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.core.record import NamedTuple
from interlock.core.variables import PREFIX, nearest, variable
from interlock.default_settings import names

if TYPE_CHECKING:
    from interlock.core.errors import Failure
    from interlock.store.home import Home


class Checked(NamedTuple):
    """A file that was checked. With faults it stops a start, or denies every call; warnings do neither."""

    file: str
    faults: list[str]
    warnings: list[str]


def check_files(home: Home, overlays: Iterable[Path] = ()) -> list[Checked]:
    """Check settings, principals, policy, and the overlays that are given."""
    return [_settings(home), _principals(home), _policy(home), *map(_overlay, overlays)]


def mistyped_variables() -> list[tuple[str, str]]:
    """Variables that set nothing and have nearly the name of one that would, with that name."""
    known = names()
    found: list[tuple[str, str]] = []
    for name in sorted(name for name in os.environ if name.startswith(PREFIX)):
        stated = name.removeprefix(PREFIX).lower()
        # Other variables are called so as well; what is as near as this is a slip of the pen.
        meant = None if stated in known else nearest(stated, known, alike=0.8)
        if meant is not None:
            found.append((name, variable(meant)))
    return found


def _settings(home: Home) -> Checked:
    from interlock.authority.trusted_issuers import TrustedIssuer
    from interlock.core.errors import Failure
    from interlock.store.shared_config import settings_of

    warnings = [f"the variable {name} sets nothing; did you mean {meant}?" for name, meant in mistyped_variables()]
    faults: list[str] = []
    try:
        settings = settings_of(home).settings
    except Failure as failure:
        return Checked(home.settings.name, _fault_lines(failure), warnings)
    for at, entry in enumerate(settings.trusted_issuers):
        try:
            TrustedIssuer.read(entry)
        except Failure as failure:
            faults.append(f"`trusted_issuers.{at}`: {failure.message}")
    return Checked(home.settings.name, faults, warnings)


def _principals(home: Home) -> Checked:
    from interlock.authority.principals import Principals
    from interlock.core.errors import Failure

    try:
        if home.shared or home.principals.exists() or _made(home):  # a new data directory is made with a file
            Principals(_text(home, home.principals))
    except Failure as failure:
        return Checked(home.principals.name, _fault_lines(failure), [])
    return Checked(home.principals.name, [], [])


def _policy(home: Home) -> Checked:
    from interlock.api.doctor.policy import rules_speak_of
    from interlock.authority.policy_check import check
    from interlock.authority.principals import Principals
    from interlock.core.errors import Failure

    if not home.shared and home.policy.with_name("policy.toml").exists():
        words = "there is a policy.toml: move its rules to policy.cedar and remove it; until then nothing is allowed"
        return Checked(home.policy.name, [words], [])
    if not home.shared and not home.policy.exists() and not _made(home):
        return Checked(home.policy.name, [], [])
    try:
        text = _text(home, home.policy)
    except Failure as failure:
        return Checked(home.policy.name, _fault_lines(failure), [])
    try:
        people = Principals(_text(home, home.principals)).groups
    except Failure:
        people = frozenset[str]()  # told already
    warnings: list[str] = []
    try:
        contracts, known, groups = rules_speak_of(home, text)
    except Failure as failure:
        warnings.append(f"not checked against the tools of the store: {failure.message}")
        contracts, known, groups = [], set[str](), frozenset[str]()
    found = check(text, contracts, people | groups, known)
    words = [
        (fault.grave, f"line {fault.line}: {f'`{fault.rule}` ' if fault.rule else ''}{fault.message}")
        for fault in found
    ]
    warnings += [one for grave, one in words if not grave]
    return Checked(home.policy.name, [one for grave, one in words if grave], warnings)


def _text(home: Home, path: Path) -> str:
    """The text in force: of the file, or of the store where that counts."""
    from interlock.authority.policy import read_file
    from interlock.store.shared_config import text_of

    shared = text_of(home, path.name)
    return read_file(path) if shared is None else shared


def _made(home: Home) -> bool:
    from interlock.core.errors import Failure

    try:
        return home.made
    except Failure:
        return False  # a server that does not answer


def _overlay(path: Path) -> Checked:
    from interlock.core.errors import Failure
    from interlock.upstreams.overlay import parse_overlay

    try:
        parse_overlay(path.read_text())
    except Failure as failure:
        return Checked(str(path), _fault_lines(failure), [])
    except (OSError, UnicodeDecodeError):
        return Checked(str(path), ["it cannot be read as text"], [])
    return Checked(str(path), [], [])


def _fault_lines(failure: Failure) -> list[str]:
    """The faults of a file, each as one sentence with its place."""
    faults = (failure.details or {}).get("faults") or [failure.message]
    return [
        one.removeprefix("settings.toml, ") if isinstance(one, str) else f"{one['pointer'] or '/'}: {one['message']}"
        for one in faults
    ]

"""The comparison of `interlock config diff`: the machines on a store, and the files here beside the shared ones."""

from __future__ import annotations

import difflib
import json
import tomllib
from typing import TYPE_CHECKING

from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.privacy.configured import masked
from interlock.store.node_files import Node, compare, nodes
from interlock.store.shared_config import FILES, SETTINGS, in_store, settings_of
from interlock.store.shared_settings import common_of
from interlock.store.shared_version import SharedConfig

if TYPE_CHECKING:
    from interlock.store.home import Home


class Comparison(NamedTuple):
    """The machines, and what differs. `lines` are those in which files here differ from the shared configuration."""

    machines: list[Node]
    differences: dict[str, dict[str, list[str]]]
    shared: SharedConfig | None
    followed: bool
    lines: dict[str, list[str]]

    @property
    def stale(self) -> list[str]:
        """The processes that run with settings which were changed since they started."""
        return [f"{one.machine}:{one.directory}" for one in self.machines if one.restart]

    @property
    def agree(self) -> bool:
        return not self.differences and not self.lines and not self.stale


def compare_machines(home: Home) -> Comparison:
    """Compare all machines on the store of a data directory, and its files with the configuration in the store."""
    try:
        settings_of(home)
    except Failure:
        home.shared = None  # the settings disagree with it, as the lines tell
    shared = in_store(home)
    lines = {} if shared is None else {name: _lines(shared.files[name], home, name) for name in FILES}
    machines = nodes(home)
    changed = {name: changes for name, changes in lines.items() if changes}
    return Comparison(machines, compare(machines), shared, home.shared is not None, changed)


def _lines(shared: str, home: Home, name: str) -> list[str]:
    """The lines in which a file differs from a shared text. Where that is followed, no file is needed."""
    path = home.path / name
    here = path.read_text(errors="replace") if path.exists() else ""
    if name == SETTINGS:
        shared, here = _settings_lines(shared), _settings_lines(here)
    if home.shared is not None and not here:
        return []
    return list(difflib.unified_diff(shared.splitlines(), here.splitlines(), "shared", "here", lineterm="", n=1))


def _settings_lines(text: str) -> str:
    """The settings that all machines share, a line for each, without credentials."""
    try:
        common = common_of(text)
    except tomllib.TOMLDecodeError:
        return text
    return "\n".join(f"{name} = {json.dumps(masked(one), default=str)}" for name, one in sorted(common.items()))

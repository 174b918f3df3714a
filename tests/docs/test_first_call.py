"""The page of the first call: what it lists is all that is typed, and it leads to a governed call."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from tests.support import surroundings
from tests.support.pages import Player, Typed, blocks_of, typed
from tests.support.source import ROOT
from tests.thorough import THOROUGH

PAGE = ROOT / "docs" / "how-to" / "first-call.md"
# The whole page, on a quiet machine.
MOST_S = 120
NOT_LOCKED = {"interlock", "pip", "setuptools"}  # in every environment of `./dev`


def commands() -> list[Typed]:
    (block,) = [one for one in blocks_of(PAGE) if "git clone" in one.text]
    return typed(block.text)


def said_packages() -> int:
    (number,) = re.findall(r"\((\d+) packages", PAGE.read_text())
    return int(number)


def test_the_page_lists_at_most_four_commands_each_of_which_is_one() -> None:
    assert 0 < len(commands()) <= 4
    for one in commands():
        assert not re.search(r"[;&|\n]", one.command), one.command


def test_the_page_says_how_many_packages_are_installed() -> None:
    text = (ROOT / "requirements" / "run.txt").read_text()
    locked = [Requirement(line.rstrip(" \\")) for line in text.splitlines() if re.match(r"[A-Za-z0-9]", line)]
    linux = {"python_full_version": "3.11.7", "python_version": "3.11", "sys_platform": "linux"}
    others = {"platform_python_implementation": "CPython", "implementation_name": "cpython"}
    needed = [one for one in locked if one.marker is None or one.marker.evaluate(linux | others)]
    assert len(needed) == said_packages()


@pytest.mark.skipif(not THOROUGH, reason="installs what running needs, from nothing")
def test_what_the_page_lists_leads_to_a_governed_call_on_a_fresh_machine(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    given = surroundings.outside()
    kept = {name: value for name, value in given.items() if name == "PATH" or name.startswith(("PIP_", "SSL_"))}
    # Git clones no directory of another user unless it is told to.
    git = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    player = Player("first-call.md", tmp_path, ModuleType("first_call"))
    took_s: dict[str, float] = {}
    for one in commands():
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", one.command.replace("URL", str(ROOT))],
            cwd=tmp_path,
            env={**kept, **git, "HOME": str(home), "COLUMNS": "80"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        took_s[one.command] = round(time.monotonic() - began, 1)
        player.compare(one.command, one.printed, done.stdout)
    assert sum(took_s.values()) < MOST_S, took_s
    installed = (tmp_path / "interlock" / ".venv").glob("lib/python3.11/site-packages/*.dist-info")
    packages = {path.name.partition("-")[0] for path in installed} - NOT_LOCKED
    assert len(packages) in (0, said_packages())  # none where python3 is of another version

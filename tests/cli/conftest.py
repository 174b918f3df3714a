"""The command line as people and scripts meet it, over a home of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cli import Cli


@pytest.fixture
def fresh(tmp_path: Path) -> Cli:
    """A home that does not exist yet."""
    return Cli(tmp_path)


@pytest.fixture(scope="session")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Cli]:
    """Make a home with the demo tools in a directory, as a copy of one in which they were admitted once.

    Tests get copies only: a call in the original would be on record in the home of every later test.
    """
    original = Cli(tmp_path_factory.mktemp("admitted"))
    assert original("tools", "add", "interlock.demo_tools").code == 0

    def copy(directory: Path) -> Cli:
        cli = Cli(directory)
        shutil.copytree(original.home, cli.home)
        return cli

    return copy


@pytest.fixture
def cli(tmp_path: Path, copied: Callable[[Path], Cli]) -> Cli:
    """A home with the demo tools in it."""
    return copied(tmp_path)

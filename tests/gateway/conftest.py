"""An Interlock with the sample tools admitted."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from interlock import Interlock
from tests import sample

TOOLS = (sample.add, sample.shout, sample.echo, sample.increment, sample.send, sample.unsteady)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def prepared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the sample tools are admitted; tests work on copies."""
    home = tmp_path_factory.mktemp("prepared")
    async with Interlock.open(home) as lock:
        await lock.add(*TOOLS)
    return home


@pytest.fixture
def home(prepared_home: Path, tmp_path: Path) -> Path:
    sample.reset()
    return Path(shutil.copytree(prepared_home, tmp_path / "home"))


@pytest_asyncio.fixture
async def lock(home: Path) -> AsyncGenerator[Interlock]:
    async with Interlock.open(home) as opened:
        for one in TOOLS:
            opened.catalog.attach(one)
        yield opened

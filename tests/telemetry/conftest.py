"""An Interlock whose every call is traced into the SDK's own in-memory exporter."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from interlock import Interlock
from tests import sample
from tests.support import traced_tools as tools
from tests.support.traced import attach


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def watched_home(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared home with our tools admitted as well; tests work on copies."""
    home = Path(shutil.copytree(prepared_home, tmp_path_factory.mktemp("watched") / "home"))
    async with Interlock.open(home) as app:
        await app.add(*tools.TOOLS)
    return home


@pytest.fixture
def home(watched_home: Path, tmp_path: Path) -> Path:
    sample.reset()
    tools.reset()
    return Path(shutil.copytree(watched_home, tmp_path / "home"))


@pytest_asyncio.fixture
async def app(home: Path) -> AsyncGenerator[Interlock]:
    async with Interlock.open(home) as opened:
        attach(opened)
        yield opened

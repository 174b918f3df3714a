"""A server over a data directory, for the tests of the endpoints."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest_asyncio

from tests.support.servers import Place, place


@pytest_asyncio.fixture
async def here(home: Path) -> AsyncGenerator[Place]:
    async with place(home) as made:
        yield made

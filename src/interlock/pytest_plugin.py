"""The pytest plugin: fixtures for tests of your own tools. pytest loads it where Interlock is installed.

    async def test_adding(interlock_app, interlock_client):
        await interlock_app.add(add)
        assert await interlock_client.call(add, a=1, b=2) == 3

The fixtures need pytest-asyncio. Nothing of Interlock is imported before a test asks for one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from interlock.api.client import Client
    from interlock.api.interlock import Interlock

try:
    import pytest_asyncio
except ImportError:
    pass  # there is no such fixture then, and pytest says so
else:

    @pytest_asyncio.fixture
    async def interlock_app(tmp_path: Path) -> AsyncGenerator[Interlock]:
        """An Interlock over a data directory of this test's own."""
        from interlock.api.interlock import Interlock

        async with Interlock.open(tmp_path / "interlock", store="") as app:
            yield app


@pytest.fixture
def interlock_client(interlock_app: Interlock) -> Client:
    """A client whose calls have the types of the tools' functions."""
    from interlock.api.client import Client

    return Client(interlock_app)

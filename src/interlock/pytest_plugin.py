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


def pytest_configure(config: pytest.Config) -> None:
    """Have the modules of Interlock loaded as usual, from their bytecode.

    pytest parses all modules of a package with a plugin, to rewrite their asserts. That takes seconds, and where two
    threads import at once, Python 3.11 up to 3.11.8 may fail with `AST constructor recursion depth mismatch`.
    """
    marked: set[str] = getattr(config.pluginmanager.rewrite_hook, "_must_rewrite", set[str]())
    marked -= {one for one in marked if one.partition(".")[0] == "interlock"}


try:
    import pytest_asyncio
except ImportError:
    pass  # there is no such fixture then, and pytest says so
else:

    @pytest_asyncio.fixture
    async def interlock_app(tmp_path: Path) -> AsyncGenerator[Interlock]:
        """An Interlock over a data directory of this test's own."""
        from interlock.api.interlock import Interlock

        async with Interlock.open(tmp_path / "interlock", store="", shared_config=False) as app:
            yield app


@pytest.fixture
def interlock_client(interlock_app: Interlock) -> Client:
    """A client whose calls have the types of the tools' functions."""
    from interlock.api.client import Client

    return Client(interlock_app)

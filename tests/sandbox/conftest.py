"""Sandboxes for tests, and proof after every test that nothing of a call is left on the host."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
import pytest_asyncio

from interlock.executors.sandbox import pool
from interlock.executors.sandbox.supervisor import Sandbox
from tests import leaks
from tests.support.sandboxes import ROOMY, bundles_left, strays
from tests.support.zygotes import Zygote


@pytest_asyncio.fixture(scope="package", loop_scope="session", autouse=True)
async def sandboxes_leave_nothing_behind(own_places: tuple[Path, ...]) -> AsyncGenerator[None]:
    """The tests here are checked together, when the sandbox that they share is closed (see tests/leaks.py).

    Their zygotes are their own: tests look at when those start and end.
    """
    left = leaks.watch(own_places)  # on the loop of the session, which outlives the sandbox
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "Zygote", Zygote)
        yield
    leaks.fail(left())


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def sandbox() -> AsyncGenerator[Sandbox]:
    """One for all tests here: what one test's calls leave behind, another would find."""
    os.environ["SECRET_TOKEN"] = "hunter2"
    async with await Sandbox.open(backends=("zygote",), spares=2, allowance=ROOMY) as opened:
        yield opened
    del os.environ["SECRET_TOKEN"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Generator[None]:
    """No process of a call, no mount and no temporary file stays behind."""
    mounts = _mounts()
    yield
    deadline = time.monotonic() + 10
    while (left := strays()) and time.monotonic() < deadline:
        time.sleep(0.01)  # a killed process takes the kernel a moment
    assert left == []
    assert _mounts() == mounts
    assert bundles_left() == []


def _mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()

"""The sandbox is opened before a call needs it, so that no call pays for that out of its own time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from interlock import Interlock
from interlock.api.health import Health
from interlock.executors.isolated import IsolatedExecutor
from interlock.executors.sandbox.supervisor import Sandbox
from interlock.registry.source import load
from tests import sample
from tests.support.calls import admit
from tests.support.executors import site
from tests.support.tool_modules import SOURCE


async def _home_with_a_sandboxed_tool(home: Path, directory: Path) -> None:
    file = directory / "warm_tool.py"
    file.write_text(SOURCE)
    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app, *load(str(file))[1])


async def test_where_the_home_has_sandboxed_tools_the_sandbox_opens_by_itself(home: Path, tmp_path: Path) -> None:
    await _home_with_a_sandboxed_tool(home, tmp_path)
    async with Interlock.open(home, housekeeping=False) as app:
        assert "sandbox" not in (await Health(app).ready())[1]
        warming = app.warm_up()
        while not app.gateway.runner.health():  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0)
        status, parts = await Health(app).ready()
        if app.gateway.runner.health() == {"sandbox": "degraded"}:
            assert (status, parts["sandbox"]) == ("degraded", "degraded")
        # A call that comes meanwhile waits for the same opening.
        (say,) = load(str(tmp_path / "warm_tool.py"))[1]
        app.catalog.attach(say)
        assert (await app.call("pinned.say")).unwrap() == "as admitted"
        await warming
        assert (await Health(app).ready())[1]["sandbox"] == "healthy"


async def test_where_the_home_has_none_nothing_is_opened(home: Path) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app, sample.increment)
        await app.warm_up()
        assert not app.gateway.runner.health()
        assert "sandbox" not in (await Health(app).ready())[1]


async def test_a_process_that_stays_opens_it_and_ends_well_whenever_it_ends(home: Path, tmp_path: Path) -> None:
    await _home_with_a_sandboxed_tool(home, tmp_path)
    async with Interlock.open(home) as app, asyncio.timeout(60):
        while not app.gateway.runner.health():  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0.01)
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_it_is_opened_once_for_all_who_need_it_and_again_after_a_failure() -> None:
    opened: list[str] = []

    async def opener() -> Sandbox:
        opened.append("")
        if len(opened) == 1:
            raise OSError(24, "Too many open files")
        return await Sandbox.open(backends=())

    executor = IsolatedExecutor(site(), opener)
    with pytest.raises(OSError, match="Too many"):
        await executor.warm_up()
    assert executor.state == "refusing"
    both = asyncio.gather(executor.warm_up(), executor.warm_up())
    await asyncio.sleep(0)
    assert executor.state == "opening"
    await both
    assert (len(opened), executor.state) == (2, "refusing")
    await executor.close()

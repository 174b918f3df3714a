"""Work of ours has threads of its own."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import pytest

from interlock import Field, Interlock, tool
from interlock.api.service import Service
from interlock.core.threads import INPUTS, SOON_S, WALKS, Soon
from interlock.net import addresses

NAME: ContextVar[str] = ContextVar("NAME", default="")


@tool(version="1.0.0", mutation_class="read_only", namespace="large", timeout_s=120)
async def total(numbers: Annotated[list[int], Field(description="numbers to add", examples=[[1]])]) -> int:
    """Add some numbers."""
    return sum(numbers)


@asynccontextmanager
async def starving() -> AsyncGenerator[None]:
    """The event loop's own threads are all taken by functions that do not return."""
    loop, ended = asyncio.get_running_loop(), threading.Event()
    with ThreadPoolExecutor(2, thread_name_prefix="asyncio_starved") as pool:
        loop.set_default_executor(pool)
        hung = [loop.run_in_executor(None, ended.wait) for _ in range(4)]
        try:
            yield
        finally:
            ended.set()
            await asyncio.gather(*hung)


async def test_work_runs_elsewhere_and_in_the_context_of_its_caller() -> None:
    NAME.set("ann")
    here = threading.get_ident()
    assert await WALKS.run(lambda: (NAME.get(), threading.get_ident() == here)) == ("ann", False)


async def test_names_are_looked_up_while_tools_hold_all_default_threads() -> None:
    async with starving():
        assert await asyncio.wait_for(addresses.checked("localhost", allow_private=True), 60)


async def test_the_server_is_ready_while_tools_hold_all_default_threads(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        app.issuer_keys.init("EdDSA")
        async with starving():
            _, parts = await Service(app).health.ready()
    assert parts["signer"] == "healthy"


async def test_large_inputs_are_read_while_tools_hold_all_default_threads(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        await app.add(total)
        async with starving():
            result = await asyncio.wait_for(app.call("large.total", numbers=["7"] * 20_000), 60)
    assert result.value == 140_000


def test_threads_change_places_sooner_while_anyone_asks_for_it_and_as_usual_afterwards() -> None:
    usual, soon = sys.getswitchinterval(), Soon()
    assert usual > SOON_S
    with soon:
        with soon:
            assert sys.getswitchinterval() == pytest.approx(SOON_S)
        assert sys.getswitchinterval() == pytest.approx(SOON_S)
    assert sys.getswitchinterval() == usual


async def test_large_inputs_are_walked_over_one_after_the_other_and_the_loop_gets_the_interpreter_soon() -> None:
    usual = sys.getswitchinterval()
    inside: list[int] = []
    most = 0

    def walk(number: int) -> tuple[int, float]:
        nonlocal most
        inside.append(number)
        most = max(most, len(inside))
        found = sum(range(20_000)), sys.getswitchinterval()
        inside.remove(number)
        return found

    walked = await asyncio.gather(*(INPUTS.run(walk, number) for number in range(20)))
    assert most == 1
    assert all(found == (199_990_000, pytest.approx(SOON_S)) for found in walked)
    with pytest.raises(ZeroDivisionError):
        await INPUTS.run(lambda: 1 // 0)
    assert sys.getswitchinterval() == usual


async def test_work_that_is_cancelled_while_it_waits_makes_no_later_work_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr("interlock.core.threads.time.sleep", rests.append)
    begun, ended = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        ended.wait(60)

    running = asyncio.ensure_future(INPUTS.run(first))
    await asyncio.to_thread(begun.wait, 60)
    waiting = asyncio.ensure_future(INPUTS.run(int))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    ended.set()
    await running
    rests.clear()
    assert await INPUTS.run(int) == 0
    assert rests == []

"""Sync functions that never return: each keeps a thread, none takes another call's place."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Annotated

import pytest
import pytest_asyncio

from interlock import Field, Interlock, tool
from interlock.executors import function
from tests.support.calls import admit, turn

Number = Annotated[int, Field(description="a number", examples=[1])]
release = threading.Event()


@tool(version="1.0.0", mutation_class="read_only", namespace="threads")
def hang(number: Number) -> int:
    """Wait for something that does not come."""
    release.wait()
    return number


@tool(version="1.0.0", mutation_class="read_only", namespace="threads")
def double(number: Number) -> int:
    """Return at once."""
    return 2 * number


@tool(version="1.0.0", mutation_class="read_only", namespace="threads")
def divide(number: Number) -> int:
    """Return at once, or raise."""
    if number == 13:
        raise StopIteration
    return 60 // number


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(function, "THREADS", 4)
    monkeypatch.setattr(function, "MOST_HUNG", 6)
    release.clear()
    yield
    release.set()


@pytest_asyncio.fixture
async def app(tmp_path: Path, few_threads: None) -> AsyncGenerator[Interlock]:
    async with Interlock.open(tmp_path, housekeeping=False) as opened:
        await admit(opened, hang, double, divide)
        yield opened
        release.set()


async def hung(app: Interlock, count: int) -> list[str | None]:
    """Make calls that are cut off while their functions hang. The code of each."""
    results = await asyncio.gather(*(app.call("threads.hang", number=one, timeout_s=0.5) for one in range(count)))
    return [None if result.error is None else result.error.code for result in results]


async def test_more_functions_hang_than_there_are_threads_and_others_still_run(app: Interlock) -> None:
    assert set(await hung(app, 4)) == {"E3402"}
    assert (await app.call("threads.double", number=2, timeout_s=20)).unwrap() == 4
    assert app.gateway.observer.metrics["TOOL_THREAD_HUNG"] == 4


async def test_at_the_bound_calls_are_refused_with_what_to_do_and_run_again_when_threads_return(
    app: Interlock,
) -> None:
    for _ in range(3):
        await hung(app, 4)
    refused = await app.call("threads.double", number=2)
    assert refused.error is not None
    assert (refused.error.code, refused.error.retryable) == ("E3001", True)
    assert "sandbox" in refused.error.resolution
    release.set()
    async with asyncio.timeout(60):
        while not (await app.call("threads.double", number=2)).ok:
            await turn()
        # One thread that returned is enough for a call; the others return when they get the processor.
        while app.gateway.runner.loads()["hung tool threads"]() > 0:
            await turn()


async def test_of_many_functions_that_end_at_once_each_call_gets_its_own_outcome(app: Interlock) -> None:
    results = await asyncio.gather(*(app.call("threads.divide", number=one) for one in range(40)))
    for number, result in enumerate(results):
        if number in (0, 13):
            assert result.error is not None
            assert result.error.code == "E3401"
        else:
            assert result.unwrap() == 60 // number

"""Results have a limit of size, from the settings and from the tool; large ones are not handled on the event loop."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

from interlock import Context, Effect, Field, Interlock, Preview, tool
from interlock.call.context import Caller
from interlock.data import bounds
from interlock.data.bounds import LARGE
from tests.support.calls import admit

Count = Annotated[int, Field(description="how many", examples=[1])]
undone: list[int] = []
written_on: list[threading.Thread] = []


class Row(BaseModel):
    """One row."""

    text: str

    @model_serializer(mode="wrap")
    def write(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written_on.append(threading.current_thread())
        return handler(self)


@tool(version="1.0.0", mutation_class="read_only", namespace="big", redact_results=False)
async def plain(count: Count) -> list[str]:
    """So many texts of ten characters."""
    return ["x" * 10] * count


@tool(version="1.0.0", mutation_class="read_only", namespace="big", max_result_bytes=1000)
async def modest(count: Count) -> list[str]:
    """The same of a tool with a lower limit."""
    return ["x" * 10] * count


@tool(version="1.0.0", mutation_class="read_only", namespace="big", max_result_bytes=100_000_000)
async def greedy(count: Count) -> list[str]:
    """The same of a tool that asks for more than the settings allow."""
    return ["x" * 10] * count


@tool(version="1.0.0", mutation_class="read_only", namespace="big")
async def escaped(count: Count) -> str:
    """A text that takes six times as many bytes as JSON as it has characters."""
    return "\x01" * count


@tool(version="1.0.0", mutation_class="read_only", namespace="big")
async def rows(count: Count) -> list[Row]:
    """So many rows."""
    return [Row(text="x" * 10)] * count


@tool(version="1.0.0", mutation_class="write_reversible", namespace="big", effects=[Effect("shelf", "UPDATE")])
async def fill(ctx: Context, count: Count) -> list[str]:
    """Fill the shelf and list what stands there."""
    ctx.effect("shelf", "UPDATE", after=count)
    ctx.compensate_with(count=count)
    return ["x" * 10] * count


@fill.preview
def _(count: int) -> Preview:
    return Preview(impact=f"{count} more on the shelf")


@fill.compensate
async def _(count: int) -> None:
    undone.append(count)


@pytest.mark.shows("Python function", "results bounded")
@pytest.mark.parametrize("name", ["plain", "greedy", "rows", "modest", "escaped"])
async def test_a_result_over_the_limit_is_refused_and_one_below_it_is_not(tmp_path: Path, name: str) -> None:
    async with Interlock.open(tmp_path, housekeeping=False, max_result_bytes=10_000) as app:
        await admit(app, plain, modest, greedy, escaped, rows)
        few, many = {"modest": (70, 80), "escaped": (1600, 1700), "rows": (400, 500)}.get(name, (700, 800))
        assert (await app.call(f"big.{name}", count=few)).ok
        refused = (await app.call(f"big.{name}", count=many)).error
        assert refused is not None
        assert (refused.code, refused.retryable) == ("E3416", False)
        assert refused.details == {"mostBytes": 1000 if name == "modest" else 10_000, "executed": False}
        assert "max_result_bytes" in refused.resolution


async def test_a_write_whose_result_is_too_large_has_taken_effect_on_record_and_can_be_undone(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path, housekeeping=False, max_result_bytes=1000) as app:
        await admit(app, fill)
        first = await app.call("big.fill", count=500, key="once")
        again = await app.call("big.fill", count=500, key="once")
        for result in (first, again):
            assert result.error is not None
            assert (result.error.code, result.state) == ("E3416", "failed")
            assert result.error.details is not None
            assert result.error.details["executed"] is True
            assert "was carried out" in result.error.message
        assert again.replayed
        mutations = app.journal.reader.all("SELECT call FROM journal WHERE kind = 'mutation'")
        assert mutations == [(first.invocation_id,)], "it ran once, and what it changed is on record"
        assert app.journal.reader.all("SELECT state FROM reservation") == [("done",)]
        undone.clear()
        assert (await app.undo(first.invocation_id, key="undo")).ok
        assert undone == [500]


async def test_a_large_result_is_written_on_another_thread_and_a_small_one_is_not(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        await admit(app, rows)
        for count, here in ((10, True), (LARGE // 15, False)):
            written_on.clear()
            assert (await app.call("big.rows", count=count)).ok
            assert {thread is threading.main_thread() for thread in written_on} == {here}


async def test_a_result_far_over_the_limit_is_neither_copied_nor_encoded(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path, housekeeping=False, max_result_bytes=1_000_000) as app:
        await admit(app, rows)
        written_on.clear()
        refused = (await app.call("big.rows", count=200_000)).error
        assert refused is not None
        assert refused.code == "E3416"
        assert written_on == []


async def test_without_the_compiled_walk_the_limits_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "compiled", None)
    async with Interlock.open(tmp_path, housekeeping=False, max_result_bytes=10_000) as app:
        await admit(app, plain)
        assert (await app.call("big.plain", count=700)).ok
        refused = (await app.call("big.plain", count=800)).error
        assert refused is not None
        assert refused.code == "E3416"


async def test_others_are_served_while_a_large_result_is_handled(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        await admit(app, rows, plain)
        ann = Caller(id="user:ann")
        large = asyncio.create_task(app.call("big.rows", count=100_000, caller=ann))
        served = 0
        while not large.done():
            assert (await app.call("big.plain", count=1)).ok
            served += 1
            await asyncio.sleep(0)
        assert large.result().ok
        assert served > 3

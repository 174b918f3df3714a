"""Reads with a context: they cost little more than reads without one, unless they leave something behind."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import pytest

from interlock import Context, Effect, Field, Interlock, Result, tool
from tests.support.calls import admit, records

Whole = Annotated[int, Field(description="a whole number", examples=[1])]
quick: dict[str, Any] = {
    "version": "1.0.0", "mutation_class": "read_only", "namespace": "aware", "timeout_class": "interactive",
    "external_io": False,
}  # fmt: skip


@tool(**quick)
async def double(ctx: Context, number: Whole) -> int:
    """Double a number, without a use for the context."""
    return 2 * number


@tool(**quick)
async def hand_over(ctx: Context, number: Whole) -> int:
    """Double a number, and hand work over to another."""
    ctx.handoff({"check": number}, agent="checker")
    return 2 * number


@tool(version="1.0.0", mutation_class="write_reversible", namespace="aware")
async def keep(ctx: Context, number: Whole) -> int:
    """Keep a number in the session."""
    ctx.session["number"] = number
    return number


@keep.compensate
async def forget(ctx: Context, number: Whole) -> None:
    """Forget the number that is kept."""
    ctx.session.pop("number", None)


def at_once(call: Coroutine[Any, Any, Result]) -> Result | None:
    """The answer to a call that waits for nothing. None where it waits; it is left there."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    call.close()
    return None


async def test_where_records_are_batched_a_read_that_left_nothing_waits_for_nothing(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path, audit="batched", housekeeping=False) as app:
        await admit(app, double)
        assert (await app.call("aware.double", number=1)).ok
        answer = at_once(app.gateway.invoke(app.request("aware.double", {"number": 2})))
        assert answer is not None
        assert answer.unwrap() == 4
        await app.journal.drain()
        (record,) = records(app, answer.invocation_id)
        assert (record["status"], record["sideEffects"]) == ("SUCCESS", [])


@pytest.mark.parametrize("audit", ["durable", "batched"])
async def test_work_that_a_read_hands_over_is_on_record_before_it_is_told(tmp_path: Path, audit: Any) -> None:
    async with Interlock.open(tmp_path, audit=audit, housekeeping=False) as app:
        await admit(app, hand_over)
        result = await app.call("aware.hand_over", number=1)
        (record,) = records(app, result.invocation_id)
        assert record["handoffs"] == list(result.handoffs)
        assert len(result.handoffs) == 1


async def test_a_read_sees_its_session_as_it_is_when_it_first_looks(app: Interlock) -> None:
    looks = asyncio.Event()

    @tool(version="1.0.0", mutation_class="read_only", namespace="aware")
    async def look(ctx: Context) -> int:
        """Look at what the session keeps, when told to."""
        await looks.wait()
        return ctx.session["number"]

    await admit(app, look, keep)
    assert (await app.call("aware.keep", number=1, key="k1")).ok
    looking = asyncio.create_task(app.call("aware.look"))
    await asyncio.sleep(0)
    assert (await app.call("aware.keep", number=2, key="k2")).ok
    looks.set()
    assert (await looking).unwrap() == 2


seen: list[weakref.ref[Context]] = []


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="aware", effects=[Effect("number:{number}", "UPDATE")]
)
async def note(ctx: Context, number: Whole) -> int:
    """Report a change, and remember the context as long as somebody else does."""
    seen.append(weakref.ref(ctx))
    ctx.effect(f"number:{number}", "UPDATE", before=0, after=number)
    ctx.compensate_with(number=number)
    return number


@note.compensate
async def unnote(number: Whole) -> None:
    """Change nothing."""


async def test_the_context_of_a_call_that_has_ended_does_not_wait_for_the_garbage_collector(tmp_path: Path) -> None:
    seen.clear()
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        await admit(app, note)
        gc.disable()
        try:
            assert (await app.call("aware.note", {"number": 1}, key="one")).ok
            await asyncio.sleep(0)
            assert [ref() for ref in seen] == [None]
        finally:
            gc.enable()

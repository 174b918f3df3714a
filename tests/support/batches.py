"""Tools of which some may run at the same time, and the order in which they begin and end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

from interlock import Context, Effect, Failure, Field, Interlock, Preview, tool
from interlock.gateway.hooks import Hook, HookResult, Seen
from tests.sample import Number, Text
from tests.support.calls import publish

running: set[int] = set()
overlaps: list[tuple[frozenset[int], int]] = []
gates: dict[int, asyncio.Event] = {}
checked: list[int] = []
judged: list[int] = []


async def _work(number: int, fail: bool) -> int:
    overlaps.append((frozenset(running), number))
    running.add(number)
    try:
        await gates.setdefault(number, asyncio.Event()).wait()
        if fail:
            raise Failure("PRECONDITION_FAILED", "as asked")
        return number
    finally:
        running.discard(number)


@tool(version="1.0.0", mutation_class="read_only", namespace="b", concurrency_safe=True, external_io=False)
async def safe(number: Number, fail: Annotated[bool, Field(description="fail as asked")] = False) -> int:
    """May overlap others."""
    return await _work(number, fail)


@tool(version="1.0.0", mutation_class="read_only", namespace="b")
async def alone(number: Number) -> int:
    """Reads, but says nothing about overlapping."""
    return await _work(number, False)


@tool(version="1.0.0", mutation_class="read_only", namespace="b", concurrency_safe=True, external_io=False)
async def depends(number: Number) -> int:
    """May overlap others for even numbers only."""
    return await _work(number, False)


@depends.concurrent
def _(number: int) -> Any:
    if number == 100:
        raise SystemExit
    return "yes" if number == 101 else number % 2 == 0


@depends.check
def _(number: int) -> list[str]:
    checked.append(number)
    return ["a number is not negative"] if number < 0 else []


@tool(version="1.0.0", mutation_class="read_only", namespace="b", concurrency_safe=True, external_io=False)
async def refuses(number: Number) -> int:
    """Decides by input, and never agrees."""
    return await _work(number, False)


@refuses.concurrent
async def _(number: int) -> bool:
    judged.append(number)
    return False


@tool(version="1.0.0", mutation_class="read_only", namespace="b", concurrency_safe=True, external_io=False)
async def modifies(ctx: Context, text: Text) -> str:
    """Asks for a change of context."""
    ctx.modify_context(topic=text)
    await asyncio.sleep(0)
    return text


@tool(version="1.0.0", mutation_class="read_only", namespace="b", concurrency_safe=True)
async def outside(number: Number) -> int:
    """Reads something outside."""
    return await _work(number, False)


@tool(version="1.0.0", mutation_class="read_only", namespace="b", concurrency_safe=True, isolated_calls=True)
async def outside_isolated(number: Number) -> int:
    """Reads something outside that no other call changes."""
    return await _work(number, False)


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="b", concurrency_safe=True, external_io=False,
    effects=[Effect("place:{number}", "UPDATE")],
)  # fmt: skip
async def write(number: Number) -> int:
    """Writes, and can be undone."""
    return await _work(number, False)


@write.compensate
async def _unwrite(number: int) -> None: ...


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="b", concurrency_safe=True, external_io=False,
    isolated_calls=True, effects=[Effect("place:{number}", "UPDATE")],
)  # fmt: skip
async def write_isolated(number: Number) -> int:
    """Writes a place of its own."""
    return await _work(number, False)


@write_isolated.compensate
async def _unwrite_isolated(number: int) -> None: ...


def _destroys(name: str, isolated: bool) -> Any:
    """A tool whose effect cannot be undone."""

    @tool(
        version="1.0.0", mutation_class="write_irreversible", namespace="b", name=name, concurrency_safe=True,
        external_io=False, isolated_calls=isolated, effects=[Effect("place:{number}", "DELETE")],
    )  # fmt: skip
    async def destroys(number: Number) -> int:
        """Destroys a place."""
        return await _work(number, False)

    @destroys.preview
    def _(number: int) -> Preview:
        return Preview(impact=f"{number} would be gone")

    return destroys


destroy, destroy_isolated = _destroys("destroy", False), _destroys("destroy_isolated", True)


@tool(version="1.0.0", mutation_class="read_only", namespace="b", concurrency_safe=True, external_io=False)
async def tells(ctx: Context, number: Number) -> int:
    """Says how far it is, and ends at once."""
    ctx.progress(f"{number} is half way", percent=50)
    return number


TOOLS = (
    safe, alone, depends, refuses, modifies, outside, outside_isolated, write, write_isolated, destroy,
    destroy_isolated, tells,
)  # fmt: skip
OVERLAPPING = ("safe", "outside_isolated", "write_isolated")


async def prepare(app: Interlock) -> None:
    running.clear()
    overlaps.clear()
    gates.clear()
    judged.clear()
    for one in TOOLS:
        await app.journal.commit(publish(one))
        app.catalog.attach(one)


async def release(numbers: list[int], until: Callable[[], bool]) -> None:
    """Let members end in a given order, turn by turn, for as long as the batch is not done."""
    async with asyncio.timeout(60):
        while not until():
            for number in numbers:
                if number in running:
                    gates[number].set()
                    break
            await asyncio.sleep(0)


async def others_would_have_begun() -> None:
    """Give calls that may begin the time for it: turns of the loop, and of the threads that hooks and checks run in."""
    for _ in range(50):
        await asyncio.to_thread(int)


def shift(app: Interlock, by: int) -> list[int]:
    """Have a hook add to every number. Returns the numbers that it was given."""
    seen: list[int] = []

    def add(one: Seen) -> HookResult:
        seen.append(one.input["number"])
        return HookResult(updated_input={"number": one.input["number"] + by})

    app.hook(Hook(id="adds", when="pre", tools="b.depends", run=add))
    return seen

"""Tools for the table of clients, in a file of their own: `interlock serve --stdio` loads it again."""

import asyncio
from pathlib import Path
from typing import Annotated

from interlock import Context, Failure, Field, tool

Number = Annotated[int, Field(description="a whole number", examples=[1])]


@tool(version="1.0.0", mutation_class="read_only", namespace="probe")
async def add(a: Number, b: Number) -> dict[str, int]:
    """Add two whole numbers."""
    return {"sum": a + b}


@tool(version="1.0.0", mutation_class="read_only", namespace="probe")
async def fail(a: Number) -> int:
    """Fail unless the number is one."""
    if a != 1:
        raise Failure("EXECUTION_FAILED", "it failed on purpose")
    return a


@tool(version="1.0.0", mutation_class="read_only", namespace="probe")
async def steps(ctx: Context, to: Number) -> int:
    """Count, and say how far it is."""
    for step in range(to):
        ctx.progress(f"step {step}", percent=100 * step / to)
    return to


@tool(version="1.0.0", mutation_class="read_only", namespace="probe", timeout_class="long_running")
async def hang(marker: Annotated[str, Field(description="a file to touch", examples=[""])]) -> str:
    """Touch a file, then wait until the caller gives up."""
    if marker:
        Path(marker).touch()  # noqa: ASYNC240 - an empty file
        await asyncio.Event().wait()
    return marker

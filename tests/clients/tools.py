"""Tools for the table of clients, in a file of their own: `interlock serve --stdio` loads it again."""

import asyncio
import base64
from pathlib import Path
from typing import Annotated

from interlock import Change, Context, Effect, Failure, Field, Preview, tool

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
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


@tool(version="1.0.0", mutation_class="read_only", namespace="probe")
async def picture(ctx: Context) -> int:
    """Show a picture of one pixel."""
    ctx.attach("image", mime_type="image/png", data=PNG)
    return 1


@tool(
    version="1.0.0",
    mutation_class="write_irreversible",
    namespace="probe",
    effects=[Effect("mail:{to}", "CREATE")],
)
async def send(ctx: Context, to: Annotated[str, Field(description="who gets it", examples=["ann"])]) -> str:
    """Send a mail, which nobody can take back."""
    ctx.effect(f"mail:{to}", "CREATE", after="a mail")
    return f"sent to {to}"


@send.preview
def _would_send(to: str) -> Preview:
    return Preview(effects=(Change(resource=f"mail:{to}", operation="CREATE", after="a mail"),))

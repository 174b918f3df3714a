"""A write tool whose effect can be seen from outside: one line in a file per run."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

from interlock import Context, Effect, Field, Preview, tool

Key = Annotated[str, Field(description="which effect", examples=["a"])]


def effects(path: str) -> list[str]:
    """The effects made so far."""
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return file.read().split()


@tool(version="1.0.0", mutation_class="write_reversible", namespace="demo", effects=[Effect("line:{name}", "CREATE")])
async def mark(ctx: Context, name: Key) -> str:
    """Write one line, durably."""
    crash_here("before the effect")
    descriptor = os.open(os.environ["EFFECTS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{name}\n".encode())
    os.fsync(descriptor)
    os.close(descriptor)
    ctx.effect(f"line:{name}", "CREATE", after=name)
    ctx.session["marked"] = name
    crash_here("after the effect")
    return name


@mark.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


@mark.compensate
async def _(result: str) -> None:
    return None


# The names of the calls that are held in this process.
entered: set[str] = set()


@tool(version="1.0.0", mutation_class="write_reversible", namespace="demo", effects=[Effect("line:{name}", "CREATE")])
async def stay(name: Key) -> str:
    """Write for a long time."""
    entered.add(name)
    await asyncio.sleep(500)
    return name


@stay.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


@stay.compensate
async def _(result: str) -> None:
    return None


@tool(version="1.0.0", mutation_class="read_only", namespace="demo", timeout_s=600)
async def wait(ctx: Context, name: Key) -> str:
    """Read for a long time."""
    ctx.progress("reading")
    entered.add(name)
    await asyncio.sleep(500)
    return name


def crash_here(label: str) -> None:
    """Die at a labelled point, if this is the one."""
    if os.environ.get("CRASH_AT") == label:
        os.kill(os.getpid(), 9)

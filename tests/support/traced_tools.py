"""Tools that end in every way there is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

from interlock import Context, Effect, Field, Preview, tool

Text = Annotated[str, Field(description="any text", examples=["a"])]

meanwhile: Callable[[], None] | None = None


@tool(version="1.0.0", mutation_class="read_only", namespace="seen")
async def slow(text: Text) -> str:
    """Let something happen meanwhile."""
    if meanwhile is not None:
        meanwhile()
    return text


@tool(version="1.0.0", mutation_class="read_only", namespace="seen")
async def liar(text: Text) -> int:
    """Promise a number and return something else."""
    return 1 if text == "a" else text  # pyright: ignore[reportReturnType] - that is what it is for


@tool(version="1.0.0", mutation_class="write_reversible", namespace="seen", effects=[Effect("n:{name}", "UPDATE")])
async def boast(ctx: Context, name: Text) -> str:
    """Claim an effect that nobody can confirm."""
    ctx.effect(f"n:{name}", "UPDATE")
    ctx.attest("count", 1, lambda: 1 if name == "a" else 2)
    return name


@boast.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


@boast.compensate
async def _(name: str) -> None:
    return None


@tool(version="1.0.0", mutation_class="write_reversible", namespace="seen", effects=[Effect("n:{name}", "UPDATE")])
async def slip(ctx: Context, name: Text) -> str:
    """Claim an effect that nobody can confirm, and say how to undo it."""
    ctx.effect(f"n:{name}", "UPDATE")
    ctx.compensate_with(name=name)
    ctx.attest("count", 1, lambda: 1 if name == "a" else 2)
    return name


@slip.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


@slip.compensate
async def _(name: str) -> None:
    return None


@tool(version="1.0.0", mutation_class="read_only", namespace="seen", timeout_class="long_running")
async def worker(ctx: Context, password: Annotated[str, Field(description="a password", examples=["x"])]) -> str:
    """Report progress on the way."""
    ctx.progress(f"half way with {password}", percent=50)
    ctx.partial("first")
    ctx.log.warning("working with %s", password)
    ctx.cost(external_api=0.25, token=0.5)
    return "done"


@tool(version="1.0.0", mutation_class="read_only", namespace="seen")
async def outer(ctx: Context, depth: Annotated[int, Field(description="how deep", examples=[-1])]) -> int:
    """Call itself, and another tool at the bottom."""
    if depth < 0:
        return 0
    if depth == 0:
        return await ctx.call("demo.add", {"a": 1, "b": 2})
    return await ctx.call("seen.outer", {"depth": depth - 1})


@tool(version="1.0.0", mutation_class="read_only", namespace="seen")
async def crash(how: Text) -> str:
    """End in the way it is told to."""
    if how == "raise":
        raise RuntimeError("broken")
    if how == "exit":
        raise SystemExit(3)
    if how == "hang":
        await asyncio.Event().wait()
    return how


@tool(version="1.0.0", mutation_class="read_only", namespace="seen")
async def garble(text: Text) -> bytes:
    """Return text, or what is none in any encoding that JSON knows."""
    return b"\xff\xfe" if text == "b" else text.encode()


@tool(version="1.0.0", mutation_class="read_only", namespace="seen")
async def sneak(ctx: Context, text: Text) -> str:
    """Change something, though it says that it only reads."""
    if text == "b":
        ctx.effect("n:b", "UPDATE")
    return text


@tool(version="1.0.0", mutation_class="write_reversible", namespace="seen", effects=[Effect("n:{name}", "UPDATE")])
async def idle(ctx: Context, name: Text) -> str:
    """Could change something, and does not."""
    return name


@idle.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


@idle.compensate
async def _(name: str) -> None:
    return None


@tool(version="1.0.0", mutation_class="read_only", namespace="seen")
async def spend(ctx: Context, how: Text) -> str:
    """Spend something, and end in the way it is told to."""
    ctx.cost(external_api=0.25, token=0.5)
    if how == "raise":
        raise RuntimeError("broken")
    if how == "hang":
        await asyncio.Event().wait()
    return how if how == "a" else 5  # pyright: ignore[reportReturnType] - that is what it is for


TOOLS = (spend, slow, liar, boast, slip, worker, outer, crash, garble, sneak, idle)


def reset() -> None:
    """Forget what earlier tests did."""
    global meanwhile
    meanwhile = None

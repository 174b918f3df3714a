"""Tools that save checkpoints as a script says: async and in a thread, in this process and in the sandbox."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any

from interlock import Context, Effect, Failure, Field, Preview, tool

Script = Annotated[
    list[Any], Field(description="what to do, step by step", examples=[[["checkpoint", "begun", {"at": 1}]]])
]
Secret = Annotated[str, Field(description="a credential", examples=["k"])]
MACRO = ["phase_complete", "milestone_reached", "approval_required"]

# What tools say that nobody listens to any more, and what is done between two steps of theirs.
late: list[str] = []
between: list[Callable[[], None]] = []


@tool(version="1.0.0", mutation_class="read_only", namespace="check", checkpoints=MACRO, redact_results=False)
async def awaits(ctx: Context, script: Script) -> list[Any]:
    """Follow a script on the event loop."""
    told: list[Any] = []
    for kind, *rest in script:
        if kind == "checkpoint":
            try:
                await ctx.checkpoint(*rest)
                told.append("saved")
            except Failure as failure:
                told.append(failure.code)
        elif kind == "insist":
            await ctx.checkpoint(*rest)
        elif kind == "leave":
            tasks = [asyncio.create_task(_later(ctx, turns)) for turns in range(rest[0])]
            told.append(len(tasks))
        elif kind == "between":
            between.pop(0)()
        elif kind == "fail":
            raise ValueError(kind)
        elif kind == "wait":
            await asyncio.Event().wait()
        else:
            getattr(ctx, kind)(*rest)
    return told


@tool(
    version="1.0.0", mutation_class="read_only", namespace="check", checkpoints=True, timeout_class="interactive",
    external_io=False,
)  # fmt: skip
async def hurries(ctx: Context, script: Script) -> list[Any]:
    """Follow a script in its caller's own task."""
    return await awaits(ctx, script)


async def _later(ctx: Context, turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    try:
        await ctx.checkpoint(f"after-{turns}", turns)
        late.append("saved")
    except Failure as failure:
        late.append(failure.code)


@tool(version="1.0.0", mutation_class="read_only", namespace="check", checkpoints=MACRO, redact_results=False)
def blocks(ctx: Context, script: Script) -> list[Any]:
    """Follow a script in a thread."""
    return _followed(ctx, script)


@tool(
    version="1.0.0", mutation_class="read_only", namespace="check", checkpoints=MACRO, redact_results=False,
    sandbox=True,
)  # fmt: skip
async def caged_awaits(ctx: Context, script: Script) -> list[Any]:
    """Follow a script on an event loop in the sandbox."""
    told: list[Any] = []
    for kind, *rest in script:
        if kind == "checkpoint":
            try:
                await ctx.checkpoint(*rest)
                told.append("saved")
            except Failure as failure:
                told.append(failure.code)
        elif kind == "insist":
            await ctx.checkpoint(*rest)
        elif kind == "wait":
            await asyncio.Event().wait()
        else:
            getattr(ctx, kind)(*rest)
    return told


@tool(
    version="1.0.0", mutation_class="read_only", namespace="check", checkpoints=MACRO, redact_results=False,
    sandbox=True,
)  # fmt: skip
def caged_blocks(ctx: Context, script: Script) -> list[Any]:
    """Follow a script in the sandbox, without an event loop."""
    return _followed(ctx, script)


@tool(
    version="1.0.0", mutation_class="read_only", namespace="check", checkpoints=MACRO, redact_results=False,
    sandbox=True, timeout_s=170,
)  # fmt: skip
def caged_for_long(ctx: Context, script: Script) -> list[Any]:
    """Follow a script in the sandbox, with time enough to begin on a busy machine."""
    return _followed(ctx, script)


def _followed(ctx: Context, script: list[Any]) -> list[Any]:
    told: list[Any] = []
    for kind, *rest in script:
        if kind == "checkpoint":
            try:
                ctx.checkpoint_blocking(*rest)
                told.append("saved")
            except Failure as failure:
                told.append(failure.code)
        elif kind == "insist":
            ctx.checkpoint_blocking(*rest)
        elif kind == "wait":
            while not ctx.cancelled:
                time.sleep(0.001)
            try:
                ctx.checkpoint_blocking("late", {})
            except Failure as failure:
                late.append(failure.code)
        elif kind == "die":
            os.abort()
        elif kind == "unserialisable":
            for state in ({1, 2}, threading.Lock(), float("nan"), {1: 2}, "\ud800", [0] * 3 + [object()]):
                try:
                    ctx.checkpoint_blocking("odd", state)
                except Failure as failure:
                    told.append(failure.code)
        else:
            getattr(ctx, kind)(*rest)
    return told


@tool(version="1.0.0", mutation_class="read_only", namespace="check")
async def unsaid(ctx: Context, script: Script) -> None:
    """Save checkpoints without having said so."""
    await ctx.checkpoint("begun", {})


@tool(version="1.0.0", mutation_class="read_only", namespace="check", checkpoints=True)
async def confused(ctx: Context, script: Script) -> None:
    """Wait on the loop for what only the loop can do."""
    ctx.checkpoint_blocking("begun", {})


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="check", checkpoints=True,
    effects=[Effect("thing:a", "UPDATE")], permissions=["credentials:check/token"],
)  # fmt: skip
async def keeps(ctx: Context, api_key: Secret, password: Secret) -> dict[str, str]:
    """Save all it was given."""
    lent = ctx.secret("check/token")
    state = {"api_key": api_key, "note": f"used {password} and {lent}", "mail": "ann@example.org"}
    await ctx.checkpoint("all", state)
    try:
        await ctx.checkpoint(password, state)
    except Failure as failure:
        return {"label": failure.code}
    return {}


@keeps.preview
def _(api_key: str, password: str) -> Preview:
    return Preview(impact="looked")


@keeps.compensate
async def _(api_key: str) -> None:
    return None


TOOLS = (awaits, hurries, blocks, caged_awaits, caged_blocks, caged_for_long, unsaid, confused, keeps)

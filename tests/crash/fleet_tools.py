"""Write tools whose effects are lines of files that all nodes of a chaos run share, and a clock that can be set wrong.

The files are the truth that a run is judged by. A line is added by one write, so it survives the end of the process.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import time
from functools import partial
from pathlib import Path
from typing import Annotated

from interlock import Context, Effect, Field, Preview, tool

PLACE = Path(os.environ.get("CHAOS_PLACE", "."))
# Eight bytes of a file: the nanoseconds by which the wall clock of this node is wrong. Durations are not changed, as on
# a machine whose clock was set.
CLOCK = os.environ.get("CHAOS_CLOCK")

Name = Annotated[str, Field(description="which effect", examples=["a"])]
Account = Annotated[str, Field(description="which account", examples=["a"])]
write = partial(tool, version="1.0.0", mutation_class="write_reversible", namespace="fleet", timeout_s=600)

if CLOCK is not None:
    with open(CLOCK, "r+b") as file:
        _shift = mmap.mmap(file.fileno(), 8)
    _right = time.time_ns

    def _wrong() -> int:
        return _right() + struct.unpack_from("q", _shift)[0]

    time.time_ns = _wrong
    time.time = lambda: _wrong() / 1e9


def note(file: str, line: str) -> None:
    descriptor = os.open(PLACE / file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, (line + "\n").encode())
    os.close(descriptor)


@write(effects=[Effect("entry:{name}", "CREATE")])
async def post(name: Name) -> str:
    """Make an entry."""
    note("effects", name)
    return name


@write(effects=[Effect("account:{account}", "UPDATE")])
async def move(name: Name, account: Account) -> str:
    """Be alone with an account for a moment."""
    began = time.monotonic_ns()
    note("effects", name)
    await asyncio.sleep(0.002)
    note("turns", f"{account} {name} {began} {time.monotonic_ns()}")
    return name


@write(effects=[Effect("bill:{name}", "CREATE")], estimated_cost=1.0)
async def pay(context: Context, name: Name) -> str:
    """Spend one unit."""
    context.cost(external_api=1.0)
    note("effects", name)
    return name


@post.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


@move.preview
def _(name: str, account: str) -> Preview:
    return Preview(impact=f"{name} {account}")


@pay.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


@post.compensate
@move.compensate
@pay.compensate
async def _(result: str) -> None:
    return None

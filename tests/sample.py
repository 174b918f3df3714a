"""Tools that the tests call: small, typed, and observable from outside."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from interlock import Context, Effect, Failure, Field, Preview, tool

Number = Annotated[int, Field(description="a whole number", examples=[1, 2])]
Text = Annotated[str, Field(description="any text", examples=["hello"])]
Name = Annotated[str, Field(description="name of a counter", examples=["a"], max_length=40)]


class World:
    """What the write tools change."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.runs = 0
        self.gate: asyncio.Event | None = None
        self.release = threading.Event()


world = World()


@tool(
    version="1.0.0", mutation_class="read_only", namespace="demo", timeout_class="interactive", external_io=False,
    concurrency_safe=True,
)  # fmt: skip
async def add(a: Number, b: Number = 5) -> int:
    """Add two whole numbers."""
    return a + b


@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
def shout(text: Text) -> str:
    """Text in capitals, made in a thread."""
    return text.upper()


@tool(version="1.0.0", mutation_class="read_only", namespace="demo", redact_results=False)
async def echo(value: Annotated[Any, Field(description="anything", examples=[{"a": 1}])]) -> Any:
    """Give back what was sent."""
    return value


@tool(
    version="1.0.0",
    mutation_class="write_reversible",
    namespace="demo",
    effects=[Effect("counter:{name}", "UPDATE")],
)
async def increment(ctx: Context, name: Name, by: Number = 1) -> int:
    """Count up, and say how far the counter is."""
    if world.gate is not None:
        await world.gate.wait()
    world.runs += 1
    before = world.counters.get(name, 0)
    world.counters[name] = before + by
    ctx.effect(f"counter:{name}", "UPDATE", before=before, after=before + by)
    ctx.compensate_with(name=name, by=by)
    return before + by


@increment.preview
def _(name: str, by: int) -> Preview:
    return Preview(impact=f"{name} would go up by {by}")


@increment.compensate
async def _(name: str, by: int) -> None:
    world.counters[name] -= by


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=[Effect("mail:{to}", "CREATE")])
async def send(to: Text) -> str:
    """Send something that cannot be taken back."""
    world.runs += 1
    return to


@send.preview
async def _(to: str) -> Preview:
    return Preview(impact=f"{to} would get a mail")


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0


class Flaky:
    """Fails as often as it is told to, then succeeds."""

    def __init__(self) -> None:
        self.failures: list[Failure | Exception] = []
        self.runs = 0


flaky = Flaky()


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="demo", effects=[Effect("thing:{name}", "UPDATE")],
)  # fmt: skip
async def unsteady(name: Name) -> str:
    """Fail in the way the test asked for, then succeed."""
    flaky.runs += 1
    if flaky.failures:
        raise flaky.failures.pop(0)
    return name


@unsteady.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


@unsteady.compensate
async def _(name: str) -> None:
    return None


TOOLS = (add, shout, echo, increment, send, unsteady)


def reset() -> None:
    """Forget what earlier tests did."""
    world.__init__()
    flaky.__init__()

"""The tools of the corpus: one for each way in which a call can go."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any, TypedDict

from interlock import Context, Effect, Failure, Field, Preview, Tool, tool

Number = Annotated[int, Field(description="a whole number", examples=[1])]
Text = Annotated[str, Field(description="any text", examples=["a"])]
Secret = Annotated[str, Field(description="a private text", examples=["a"], json_schema_extra={"x-sensitivity": "pii"})]
State: dict[str, int] = {}


class Stuck:
    """Tells the player that a tool has begun to wait without end."""

    def __init__(self) -> None:
        self.began = asyncio.Event()

    async def wait(self) -> None:
        self.began.set()
        await asyncio.Event().wait()


stuck = Stuck()


class Person(TypedDict):
    """A result with a private field."""

    name: str
    mail: Secret


@tool(
    version="1.0.0", mutation_class="read_only", namespace="gold", timeout_class="interactive", external_io=False,
    concurrency_safe=True,
)  # fmt: skip
async def add(a: Number, b: Number = 5) -> int:
    """Add two whole numbers."""
    return a + b


@tool(version="1.0.0", mutation_class="read_only", namespace="gold")
def shout(text: Text) -> str:
    """Give back a text in capitals, from a thread."""
    return text.upper()


@tool(version="1.0.0", mutation_class="read_only", namespace="gold", redact_results=False)
async def echo(value: Annotated[Any, Field(description="anything", examples=[1])]) -> Any:
    """Give back the argument."""
    return value


@tool(version="1.0.0", mutation_class="read_only", namespace="gold")
async def person(name: Text, mail: Secret = "a@example.org") -> Person:
    """Give back a person."""
    return {"name": name, "mail": mail}


@tool(version="1.0.0", mutation_class="read_only", namespace="gold")
async def climb(ctx: Context, steps: Number) -> int:
    """Report progress, then give back the number of steps."""
    for step in range(steps):
        ctx.progress(f"step {step}", percent=100 * (step + 1) / steps, current_step=step, total_steps=steps)
    return steps


@tool(version="1.0.0", mutation_class="read_only", namespace="gold", persist_output=True, max_inline_chars=100)
async def much(times: Number) -> str:
    """Give back a text that is kept and referred to."""
    return "a" * times


@tool(version="1.0.0", mutation_class="read_only", namespace="gold")
async def checked(text: Text) -> str:
    """Refuse one text by a check of its own."""
    return text


@checked.check
def _(text: str) -> None:
    if text == "bad":
        raise Failure("E3308", "`bad` is not accepted", resolution="send another text")


@tool(version="1.0.0", mutation_class="read_only", namespace="gold")
async def fail(code: Text, message: Text = "it did not work") -> str:
    """Fail with a code, or in an unforeseen way."""
    if code.startswith("E"):
        raise Failure(code, message, details={"why": "asked to"})
    raise RuntimeError(message)


@tool(version="1.0.0", mutation_class="read_only", namespace="gold")
async def misfit(text: Text) -> int:
    """Give back another type than the contract says."""
    return text  # pyright: ignore[reportReturnType] - on purpose


@tool(version="1.0.0", mutation_class="read_only", namespace="gold", timeout_s=1)
async def dawdle(text: Text) -> str:
    """Take longer than the contract allows."""
    await stuck.wait()
    return text


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="gold", effects=[Effect("counter:{name}", "UPDATE")]
)
async def count(ctx: Context, name: Text, by: Number = 1) -> int:
    """Count one counter up."""
    before = State.get(name, 0)
    State[name] = before + by
    ctx.effect(f"counter:{name}", "UPDATE", before=before, after=before + by)
    ctx.compensate_with(name=name, by=by)
    return before + by


@count.preview
def _(name: str, by: int) -> Preview:
    return Preview(impact=f"{name} would go up by {by}")


@count.compensate
async def _(name: str, by: int) -> None:
    State[name] -= by


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="gold", effects=[Effect("counter:{name}", "UPDATE")],
    timeout_s=1,
)  # fmt: skip
async def strand(name: Text) -> int:
    """Never come back from a write."""
    await stuck.wait()
    return 0


@strand.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


@strand.compensate
async def _(name: str) -> None:
    return None


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="gold", effects=[Effect("mail:{to}", "CREATE")])
async def send(to: Text) -> str:
    """Send a mail to somebody."""
    return to


@send.preview
def _(to: str) -> Preview:
    return Preview(impact=f"{to} would get a mail")


@tool(version="1.0.0", mutation_class="read_only", namespace="gold", sandbox=True, timeout_s=60)
def isolated(text: Text) -> str:
    """Run in a sandbox: give back a text, fail, or crash."""
    if text == "fail":
        raise ValueError("it did not work")
    if text == "crash":
        os._exit(3)
    return text[::-1]


TOOLS: tuple[Tool[..., Any], ...] = (
    add, shout, echo, person, climb, much, checked, fail, misfit, dawdle, count, strand, send, isolated,
)  # fmt: skip

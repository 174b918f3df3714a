"""Admit tools without a trial, and look at calls and their records."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from interlock import Effect, Interlock, Preview, Result, Tool, tool
from interlock.registry.admission import TrialEvidence
from interlock.registry.admission import publish as published
from interlock.registry.catalog import contract_digest
from tests.sample import world


def write(
    function: Callable[..., Any], *, restart_safe: bool = False, changes: str = "x", **options: Any
) -> Tool[..., Any]:
    """A tool that changes something, of a function; its preview and its undoing do nothing."""
    made: Tool[..., Any] = tool(
        version="1.0.0",
        mutation_class="write_reversible",
        namespace="demo",
        effects=[Effect(changes, "UPDATE")],
        restart_safe=restart_safe,
        **options,
    )(function)

    def preview(**_: Any) -> Preview:
        return Preview()

    async def undo(**_: Any) -> None:
        return None

    made.preview(preview)
    made.compensate(undo)
    return made


async def admit(app: Interlock, *tools: Tool[..., Any]) -> None:
    for one in tools:
        await app.journal.commit(publish(one))
        app.catalog.attach(one)
    await app.journal.changes.look()


async def prepare(home: Path, *tools: Tool[..., Any]) -> None:
    """Make a data directory in which tools are admitted."""
    async with Interlock.open(home) as app:
        for one in tools:
            await app.journal.commit(publish(one))


async def turn() -> None:
    """One turn of the loop."""
    await asyncio.sleep(0)


async def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds. It may be an async function.

    At first it is asked in every turn of the loop. What takes longer is done by threads and other processes, to which
    a loop that never rests would leave little of the processor.
    """
    asked = 0
    async with asyncio.timeout(60):
        while not (await held if inspect.isawaitable(held := condition()) else held):
            asked += 1
            await asyncio.sleep(0 if asked < 100 else 0.001)


async def use_policy(app: Interlock, text: str) -> None:
    """Write a policy, and wait until it is in force: the file is looked at every so often."""
    app.policy.path.write_text(text)
    await until(lambda: app.policy.rules.text == text)


def code(result: Result) -> str | None:
    return None if result.error is None else result.error.code


SIX = ["request", "validate", "authorize", "execute", "verify", "return"]


def records(app: Interlock, call: str | None = None, kind: str = "closed") -> list[dict[str, Any]]:
    rows = app.journal.reader.all("SELECT body FROM journal WHERE kind = ? ORDER BY seq", (kind,))
    found = [orjson.loads(row[0]) for row in rows]
    return [record for record in found if call is None or record["call"] == call]


def publish(tool: Tool[..., Any]) -> Any:
    """The unit that publishes a tool as admitted, without a trial."""
    digest = contract_digest(tool)
    return published(tool.manifest, digest, "library:", TrialEvidence(digest, True, "test", ""), "test")


FIELDS = {
    "timestamp", "traceId", "callerId", "agentId", "toolId", "version", "operation", "inputHash", "outputSummary",
    "mutationClass", "sideEffects", "authDecision", "approvalTicketId", "latencyMs", "status", "errorCode",
}  # fmt: skip


def slow_write(entered: threading.Event, *, restart_safe: bool, **options: Any) -> Tool[..., Any]:
    """A write in a thread that nothing can stop, until the world is released."""

    def pay() -> str:
        """Pay slowly, and heed nobody."""
        entered.set()
        world.release.wait(60)
        world.runs += 1
        return "paid"

    return write(pay, restart_safe=restart_safe, **options)


async def lateness(app: Interlock, result: Result) -> None:
    """Wait until the true outcome of a call that was cut off is on record."""
    async with asyncio.timeout(60):
        while not records(app, result.invocation_id, kind="late"):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)

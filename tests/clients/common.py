"""What the probes of all environments share. It imports nothing that one of them might not have."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

PATIENCE_S = 300
# A tool of the target that runs only as a task, with its arguments, and what clients hear who take no tasks.
AS_TASK: tuple[str, dict[str, Any]] = ("jobs-greet-later", {"name": "ann"})
ONLY_AS_TASK = "this tool runs only as a task"
# The directory that clients name as their root.
ROOT = "file:///home/ann"
# The features, in the order of the table's columns.
FEATURES = (
    "list", "call", "structured result", "images", "error", "progress", "cancel", "approvals", "elicitation",
    "sampling", "roots", "resources", "prompts", "tasks",
)  # fmt: skip


class Report:
    """Collects what worked."""

    def __init__(self) -> None:
        self.worked: set[str] = set()

    def __call__(self, feature: str, worked: Any) -> None:
        assert feature in FEATURES
        if worked:
            self.worked.add(feature)


async def task(call: Awaitable[Any]) -> bool:
    """Whether a client followed the task that a call became, to its result. It is refused if it takes no tasks."""
    try:
        answer = str(await call)
    except Exception as error:  # noqa: BLE001 - each client has its own type for what the server refuses
        answer = str(error)
    followed = "Hello, ann!" in answer
    assert followed != (ONLY_AS_TASK in answer), answer
    return followed


async def cancelled(marker: str, call: Callable[[str], Awaitable[Any]]) -> None:
    """Make a call that hangs, and cancel it once the tool has begun. The journal tells later how it ended."""
    begun = f"{marker}-{uuid.uuid4()}"
    asked = asyncio.ensure_future(call(begun))
    while not os.path.exists(begun) and not asked.done():  # noqa: ASYNC110, ASYNC240 - another process writes the file
        await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


async def approved(call: Callable[[dict[str, Any]], Awaitable[Any]]) -> bool:
    """Call a tool that a person must agree to until they have: first it waits, then it is done.

    `call` returns whatever the client makes of the result. The person is a task of the test.
    """
    arguments = {"to": f"{uuid.uuid4()}", "idempotency_key": f"{uuid.uuid4()}"}
    waits = "waits for a person" in str(said := await call(arguments)) or "pending" in str(said)
    while "sent to" not in str(said):
        await asyncio.sleep(0.05)
        said = await call(arguments)
    return waits


def run(probe: Callable[[dict[str, Any], str], Coroutine[Any, Any, set[str]]]) -> None:
    """Run a probe as a program: the target as JSON and the wire are its arguments, and it prints what worked."""
    print(json.dumps(sorted(asyncio.run(probe(json.loads(sys.argv[1]), sys.argv[2])))))

"""Measures selections over tasks: those of a file, or the tenant's own, as its journal has them.

A file has one JSON object a line: `query`, and `relevant`, the names of the tools that are right; or `groups` of
tools, of each of which one is enough. From the journal come the selections that were followed by a successful call.
Nothing is called and nothing recorded but that requests were read; the same journal and settings give the same figures.
Tasks are selected for anew, among the tools of today; `evaluate_recorded` measures what was selected when they came up.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack, cast

import orjson

from interlock.core.errors import Failure
from interlock.core.threads import DISK
from interlock.selection.evaluation import TaskOutcome, report

if TYPE_CHECKING:
    from interlock.api.selection import Selections
    from interlock.api.selection_results import SelectOptions
    from interlock.call.context import Caller
    from interlock.data.schema import Json

MOST_BYTES: Final = 64 << 20
MOST_TASKS: Final = 100_000
Task = tuple[str, Sequence[frozenset[str]]]


async def tasks_of(path: Path) -> list[Task]:
    """The tasks of a file, also of a compressed one; E3004 if it has another form."""
    return await DISK.run(_tasks, path)


def _tasks(path: Path) -> list[Task]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            body = file.read(MOST_BYTES + 1)
    except (OSError, EOFError) as error:
        raise Failure("E3004", f"`{path}` cannot be read: {error}") from None
    lines = body.splitlines()
    if len(body) > MOST_BYTES or len(lines) > MOST_TASKS:
        raise Failure("E3004", f"`{path}` is too large: {MOST_TASKS:,} tasks and {MOST_BYTES >> 20} MiB at most")
    return [_task(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _task(path: Path, number: int, line: bytes) -> Task:
    try:
        document: Any = orjson.loads(line)
        groups: Any = document.get("groups") or [[one] for one in document["relevant"]]
        needed = [frozenset(map(str, group)) for group in cast("list[list[Any]]", groups)]
        text = document["query"]
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        text, needed = None, []
    if not isinstance(text, str) or not text.strip() or not needed:
        raise Failure(
            "E3004",
            f"line {number} of `{path}` is not a task",
            resolution='write lines such as {"query": "weather in Rome", "relevant": ["office.forecast"]}',
        )
    return text, needed


async def evaluate(selections: Selections, tasks: Sequence[Task], by: Caller, **options: Unpack[SelectOptions]) -> Json:
    """Select a tool for each task, and compare it with the tools that are right."""
    outcomes: list[TaskOutcome] = []
    for text, needed in tasks:
        made, _ = await selections.choose(text, by, **options)
        picked = next((one for one in made.candidates if one.tool == made.chosen), None)
        cost, latency = (0.0, None) if picked is None else (picked.cost, picked.latency_ms)
        names = [one.tool for one in made.candidates]
        outcomes.append(TaskOutcome(needed, names, made.chosen, sum(made.tokens.values()), cost, latency))
    return report(outcomes, selections.token_price).document()


async def evaluate_journal(selections: Selections, by: Caller, **options: Unpack[SelectOptions]) -> Json:
    """The same for the tenant's own tasks. Where a router is used, by those alone that it was not trained on."""
    found = await selections.learning.followed(by)
    router = await selections.learning.router(by.tenant)
    tasks: list[Task] = [(one.request, [frozenset((one.tool,))]) for one in found]
    if router is not None:
        from interlock.selection.router import is_held_out

        tasks = [one for one in tasks if is_held_out(one[0])]
    return {**await evaluate(selections, tasks, by, **options), "router": router is not None}


async def evaluate_recorded(selections: Selections, by: Caller, up_to: int | None = None) -> Json:
    """The figures of the tenant's selections as they were made, by their records alone: tools that have changed or gone
    since, and routers trained since, change nothing.

    `up_to` in the answer is the place in the journal that it covers. With that, later calls change nothing either.
    """
    place, found = await selections.learning.recorded(by, up_to)
    outcomes: list[TaskOutcome] = []
    for record, tool in found:
        picked: Json = record.get("picked") or {"cost": 0.0, "latency_ms": None}
        tokens = sum(record["tokens"].values())
        needed = [frozenset((tool,))]
        outcomes.append(
            TaskOutcome(needed, record["candidates"], record["chosen"], tokens, picked["cost"], picked["latency_ms"])
        )
    price = selections.token_price
    return {**report(outcomes, price).document(), "token_price": price, "up_to": place}

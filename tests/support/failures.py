"""A tool that fails with errors that cannot be stored as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interlock import Effect, Preview, tool
from interlock.core.errors import Failure
from tests import sample

SURROGATE = "\ud800"


def looped() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


FAILURES: dict[str, Callable[[], Exception]] = {
    "a message that is no text": lambda: Failure("E3411", SURROGATE),
    "details that are no JSON": lambda: Failure("E3411", "no", details={"a": object()}),
    "details that are no text": lambda: Failure("E3411", "no", details={"a": SURROGATE, SURROGATE: 1}),
    "a text that is no text": lambda: ValueError(SURROGATE),
    "details that hold themselves": lambda: Failure("E3411", "no", details={"a": looped()}),
}


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="demo", effects=[Effect("x:a", "UPDATE")],
    concurrency_safe=True,
)  # fmt: skip
async def fall(name: sample.Name) -> str:
    """Fail with something odd."""
    raise FAILURES[name]()


@fall.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


@fall.compensate
async def _(name: str) -> None:
    return None

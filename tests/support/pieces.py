"""Tools with results that are stored in pieces."""

from __future__ import annotations

from typing import Annotated

from interlock import Caller, Field, tool
from interlock.store.payloads import PIECE_BYTES
from tests.support.calls import write

Size = Annotated[int, Field(description="how many characters", examples=[1])]
LARGE = 3 * PIECE_BYTES
ANN = Caller(id="user:ann", tenant="north")


def text(size: int) -> str:
    return ("0123456789" * (size // 10 + 1))[:size]


@tool(version="1.0.0", mutation_class="read_only", namespace="piece", max_inline_chars=100, persist_output=True)
async def produce(size: Size) -> str:
    """A text of so many characters."""
    return text(size)


async def change_much(size: Size) -> str:
    """Change something and tell much about it."""
    return text(size)


changing = write(change_much, max_inline_chars=100, persist_output=True)
CHANGE = "demo.change_much"

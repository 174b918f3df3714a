"""A tool whose result comes in pages."""

from __future__ import annotations

from typing import Annotated

from typing_extensions import TypedDict

from interlock import Field, tool
from tests.sample import Text


class Page(TypedDict):
    items: list[int]
    cursor: str | None
    totalCount: int


@tool(version="1.0.0", mutation_class="read_only", namespace="p", paged=True)
async def rows(
    prefix: Text,
    secret: Annotated[str, Field(description="part of the query", examples=["x"])],
    cursor: Annotated[str | None, Field(description="where to go on")] = None,
) -> Page:
    """Twenty-five rows, ten at a time."""
    assert (prefix, secret) == ("a", "hush")
    start = int(cursor or 0)
    page = list(range(25))[start : start + 10]
    after = start + 10
    return {"items": page, "cursor": str(after) if after < 25 else None, "totalCount": 25}

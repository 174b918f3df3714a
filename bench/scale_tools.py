"""The tools of `bench scale`: a read and a write that take no time of their own."""

from __future__ import annotations

from typing import Annotated

from interlock import Effect, Field, Preview, tool

Name = Annotated[str, Field(description="which entry", examples=["a"])]


@tool(version="1.0.0", mutation_class="read_only", namespace="scale", external_io=False)
async def look(name: Name) -> str:
    """Look at an entry."""
    return name


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="scale", effects=[Effect("entry:{name}", "CREATE")],
    external_io=False,
)  # fmt: skip
async def post(name: Name) -> str:
    """Make an entry."""
    return name


@post.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


@post.compensate
async def _(result: str) -> None:
    return None

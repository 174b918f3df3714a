"""A tool with a long result."""

from __future__ import annotations

from typing import Annotated, Any

from interlock import Context, Field, tool
from interlock.data.schema import Json

ORDERS: Json = {"orders": [{"id": n, "name": f"order {n}", "note": "x" * 50} for n in range(200)]}


@tool(namespace="shop", version="1.0.0", mutation_class="read_only", max_inline_chars=2000)
async def orders(ctx: Context, many: Annotated[int, Field(description="how many", examples=[2])]) -> Any:
    """List orders, newest first."""
    return {"orders": ORDERS["orders"][:many]}

# pyright: basic, reportMissingImports=false
"""A FastMCP server, as its author would write it."""

from fastmcp import FastMCP

mcp = FastMCP("shop")


@mcp.tool(annotations={"readOnlyHint": True})
def price(article: str) -> int:
    """Price of an article, in cents."""
    return len(article)

"""Bodies of the context window: token counts, and tools within a budget."""

from __future__ import annotations

from pydantic import Field

from interlock.doors.rest.models.common import Answer


class TokenCost(Answer):
    tool: str
    version: str
    mutation_class: str
    index_line: str = Field(description="the tool in an index, below its namespace")
    index_tokens: int
    full_tokens: int


class TokenCosts(Answer):
    """Tokens of the tools that you can use; `full_tokens` is their number times `full_mean`."""

    counter: str = Field(description="how tokens are counted: the setting `counter`")
    tools: int
    index_tokens: int
    index_mean: float
    full_tokens: int
    full_mean: float
    of: list[TokenCost]

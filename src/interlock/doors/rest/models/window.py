"""Bodies of the context window: token counts, and tools within a budget."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from interlock.doors.rest.models.common import Answer, Json, Query


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


class AffordancesQuery(Query):
    budget: int = Field(ge=0, le=100_000_000, description="the tokens that all of it may take")
    q: str = Field(
        "", max_length=1000, description="what the tools are for; else those that you called most come first"
    )


class Affordances(Answer):
    """Tools within a budget of tokens. `text` is for the model; `loaded` has the schemas in it as data."""

    text: str
    tokens: int
    budget: int
    remaining: int
    index: Literal["tools", "categories", "count", "none"] = Field(
        description="a line for each tool; where that is too much, one for each namespace, their number, or nothing"
    )
    loaded: list[Json] = Field(description="name, description and parameters")
    signatures: list[str] = Field(description="tools whose full schema did not fit")
    left_out: list[str] = Field(description="tools that were considered and are in the index alone")


class SchemaQuery(Query):
    at: str = Field("", max_length=1000, description="a JSON pointer, such as /properties/address; empty: all of it")


class SchemaPart(Answer):
    tool: str
    version: str
    at: str
    schema_: Json = Field(alias="schema")
    tokens: int


class PartQuery(Query):
    at: str = Field("", max_length=1000, description="a JSON pointer, such as /items/0; empty: all of it")
    q: str = Field("", max_length=1000, description="a JMESPath expression, such as items[].name; after `at`")
    start: int | None = Field(None, ge=-(2**40), le=2**40, description="the first item or character; after `q`")
    stop: int | None = Field(None, ge=-(2**40), le=2**40, description="the one after the last")
    tokens: int | None = Field(None, ge=1, le=100_000_000, description="cut to so many tokens; it stays JSON")


class PayloadPart(Answer):
    value: Any
    of: str = Field(description="what the part was taken from, before the range and the cut")
    tokens: int
    truncated: bool

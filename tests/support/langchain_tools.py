"""Tools as a LangChain user writes them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from langchain_core.runnables import RunnableConfig
from langchain_core.tools import InjectedToolArg, StructuredTool, ToolException, tool
from pydantic import BaseModel


class Place(BaseModel):
    city: str
    lat: float


@tool
def shout(text: str, times: int = 1) -> str:
    """Say a text in capitals, so that nobody misses it."""
    return text.upper() * times


@tool
async def locate(city: str, user: Annotated[str, InjectedToolArg] = "nobody") -> Place:
    """Say where a city is on the map."""
    return Place(city=city, lat=51.5)


@tool
def count(words: list[str]) -> dict[str, int]:
    """Count how often each of the words occurs."""
    return {word: words.count(word) for word in words}


@tool
async def forever() -> str:
    """Wait for something that does not come."""
    await asyncio.Event().wait()
    return "never"


def _refuse(text: str) -> str:
    raise ToolException(f"no such thing as {text}, said key-for-secret-17")


# It would have its errors passed for results.
refuse = StructuredTool.from_function(_refuse, name="refuse", description="Always says no", handle_tool_error=True)


@tool
def crash(text: str) -> str:
    """Fail in a way that nobody meant."""
    raise ValueError(f"secret in {text}")


@tool
def late(text: str) -> str:
    """Fail with an error of its own that is called like ours."""
    raise TimeoutError(text)


@tool
def borrow(config: RunnableConfig) -> list[Any]:
    """Say what was lent for this call."""
    known = config.get("configurable", {})
    return [known["credentials"], known["key"], known["invocation_id"]]


@tool
def strange() -> object:
    """Return what no JSON can hold."""
    return object()


tools = [shout, locate, count]

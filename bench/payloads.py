"""The payloads of the calls. One function per payload, declared to every contender with the same types."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from pydantic import Field

# pydantic, which every peer builds on, takes typing's own TypedDict only from Python 3.12 on.
from typing_extensions import TypedDict


class Item(TypedDict):
    id: Annotated[int, Field(description="the number of the item")]
    name: Annotated[str, Field(description="the name of the item")]
    tags: Annotated[list[str], Field(description="what it is filed under")]
    score: Annotated[float, Field(description="how good it is")]
    text: Annotated[str, Field(description="what it is")]


class Order(TypedDict):
    items: Annotated[list[Item], Field(description="the items, in their order")]


def _item(number: int) -> Item:
    text = "lorem ipsum dolor sit amet consectetur adipiscing elit " * 2
    score = round(number * 1.37 + 0.01, 2)
    return {"id": number, "name": f"name {number}", "tags": ["a", "b"], "score": score, "text": text[:75]}


ORDER: Order = {"items": [_item(number) for number in range(28)]}
TOTAL = sum(item["id"] for item in ORDER["items"])

Number = Annotated[int, Field(description="a whole number", examples=[1])]
AnOrder = Annotated[Order, Field(description="an order with its items", examples=[{"items": [_item(1)]}])]


async def add(a: Number, b: Number) -> int:
    """Add two whole numbers."""
    return a + b


async def total(order: AnOrder) -> int:
    """Add up the ids of an order's items."""
    return sum(item["id"] for item in order["items"])


async def echo(order: AnOrder) -> Order:
    """Give back the order that was sent."""
    return order


@dataclass(frozen=True, slots=True)
class Payload:
    """A function, what it is called with, and what it must answer."""

    name: str
    title: str
    function: Callable[..., Awaitable[Any]]
    arguments: dict[str, Any]
    expected: Any


_KB = f"{len(orjson.dumps(ORDER)) / 1024:.1f} KB"
PAYLOADS = (
    Payload("small", "small: add(a: int, b: int) -> int", add, {"a": 1, "b": 2}, 3),
    Payload("4 KB", f"4 KB: total(order: Order) -> int, {_KB} in", total, {"order": ORDER}, TOTAL),
    Payload("echo", f"echo: echo(order: Order) -> Order, {_KB} in and out", echo, {"order": ORDER}, ORDER),
)

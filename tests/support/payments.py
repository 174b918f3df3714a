"""Tools that cost something."""

from __future__ import annotations

import threading
from typing import Annotated

from interlock import Failure, Field, tool

Amount = Annotated[float, Field(description="what it costs", examples=[0.5], ge=0)]


class World:
    def __init__(self) -> None:
        self.runs = 0
        self.failure: Failure | Exception | None = None
        self.failures: dict[str, int] = {}
        self.began = threading.Event()
        self.go = threading.Event()


world = World()


@tool(version="1.0.0", mutation_class="read_only", namespace="pay", external_service="maps")
async def route(actual: Amount = 1.0) -> str:
    """A read that asks a service."""
    world.runs += 1
    if world.failure is not None:
        raise world.failure
    return "there"

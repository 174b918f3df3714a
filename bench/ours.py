"""Interlock as the benchmarks use it: homes in temporary directories, tools declared from the payloads."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Literal

from bench.measure import Contender
from bench.payloads import PAYLOADS, Payload
from interlock import Interlock, Tool, tool

MANY = 128


def declared(payload: Payload) -> Tool[..., Any]:
    """The payload's function as a tool."""
    declare = tool(
        version="1.0.0", mutation_class="read_only", namespace="bench", timeout_class="interactive", external_io=False
    )
    return declare(payload.function)


@asynccontextmanager
async def opened(audit: Literal["durable", "batched"]) -> AsyncGenerator[Interlock]:
    """A new home with every payload's tool in it, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="interlock-bench-") as home:
        async with Interlock.open(home, audit=audit) as app:
            await app.add(*map(declared, PAYLOADS))
            yield app


def contender(app: Interlock, payload: Payload, name: str, callers: int = 1, *, token: str | None = None) -> Contender:
    """Calls of a payload through all six phases, until their records are on disk."""
    address, arguments = f"bench.{payload.function.__name__}", payload.arguments
    return Contender(
        name=name,
        call=lambda: app.call(address, arguments, token=token),
        callers=callers,
        settle=app.journal.drain,
        answer=lambda result: result.unwrap(),
    )

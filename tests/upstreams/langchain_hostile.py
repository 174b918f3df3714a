"""LangChain tools that hang, that give far too much, and that try to end what they run in."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from typing import Any

from langchain_core.tools import BaseTool, StructuredTool, ToolException, tool
from pydantic import BaseModel


class Hung:
    """Holds the tools that hang until it is closed."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.begun: set[str] = set()

    def close(self) -> None:
        self.event.set()


HUNG = Hung()


@tool
def hang() -> str:
    """Wait for something that does not come."""
    HUNG.event.wait()
    return "at last"


@tool
def quick() -> str:
    """Say that it is done."""
    return "done"


@tool
def complain() -> str:
    """Fail with very many words."""
    raise ToolException("mail me: a.b@example.com 4111 1111 1111 1111 /etc/x " * 100_000)


@tool
def many() -> list[list[int]]:
    """Give far too many values."""
    return [[] for _ in range(300_000)]


@tool
def large() -> str:
    """Give far too long a text."""
    return "x" * 20_000_000


@tool
def leave() -> str:
    """Try to end the process."""
    sys.exit(3)


def _given(error: type[BaseException]) -> BaseTool:
    async def fail() -> str:
        raise error

    return StructuredTool.from_function(coroutine=fail, name=f"async_{error.__name__}", description="Ends it all.")


class Outburst(BaseException):
    """Not even an Exception."""


ending = [_given(error) for error in (SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, Outburst)]


@tool
async def insist() -> str:
    """Go on, whoever cancels it."""
    HUNG.begun.add("insist")
    while not HUNG.event.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)
    return "at last"


@tool
async def block() -> str:
    """Hold the event loop it runs in."""
    HUNG.begun.add("block")
    HUNG.event.wait()
    return "at last"


class Mute(ToolException):
    def __str__(self) -> str:
        raise RuntimeError("not a word")


class Leaving(ToolException):
    def __str__(self) -> str:
        raise SystemExit


@tool
async def mute() -> str:
    """Fail with an error that has no text."""
    raise Mute


@tool
def leaving() -> str:
    """Fail with an error whose text ends the process."""
    raise Leaving


class Part(BaseModel):
    name: str
    parts: list[Part] = []


class Broken(BaseModel):
    def model_dump(self, **_: Any) -> dict[str, Any]:
        raise KeyError("secret 17")


class Exiting(BaseModel):
    def model_dump(self, **_: Any) -> dict[str, Any]:
        raise SystemExit


@tool
async def heavy() -> Part:
    """Give five megabytes of objects."""
    return Part(name="all", parts=[Part(name="x" * 100) for _ in range(40_000)])


@tool
async def broken() -> Broken:
    """Give what cannot be dumped."""
    return Broken()


@tool
def exiting() -> Exiting:
    """Give what ends the process when it is dumped."""
    return Exiting()


@tool
async def rewrite(given: dict[str, Any]) -> int:
    """Change what it was given."""
    inner: list[Any] = given["list"]
    inner.append("more")
    given.clear()
    return len(inner)


@tool
def rewrite_plainly(given: dict[str, Any]) -> int:
    """Change what it was given."""
    inner: list[Any] = given["list"]
    inner.append("more")
    given.clear()
    return len(inner)


@tool
async def calm() -> str:
    """Say that it is done."""
    return "done"

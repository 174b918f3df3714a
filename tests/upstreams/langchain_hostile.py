"""LangChain tools that hang, and that give far too much."""

from __future__ import annotations

import sys
import threading

from langchain_core.tools import ToolException, tool


class Hung:
    """Holds the tools that hang until it is closed."""

    def __init__(self) -> None:
        self.event = threading.Event()

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

"""A sandboxed tool that uses what it is told to. A module of its own: its text is sent inside."""

from __future__ import annotations

import time
from typing import Annotated

from interlock import Field, tool


@tool(version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True, timeout_s=60)
def burn(
    milliseconds: Annotated[int, Field(description="CPU time to use", examples=[1])],
    mib: Annotated[int, Field(description="memory to hold meanwhile", examples=[1])],
) -> int:
    """Use CPU time and memory; how many nanoseconds of CPU it was."""
    held = b"x" * (mib << 20)
    began = time.process_time_ns()
    while (used := time.process_time_ns() - began) < milliseconds * 1_000_000:
        pass
    return used if held else 0

"""The source of a module with a tool."""

from __future__ import annotations

SOURCE = """
from interlock import tool

def helper():
    return "as admitted"

@tool(version="1.0.0", mutation_class="read_only", namespace="pinned", sandbox=True, timeout_s=20)
def say() -> str:
    "Say what the helper says."
    return helper()
"""

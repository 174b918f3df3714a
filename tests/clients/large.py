"""A catalog that is too large to list, and the steps of a model that works with it. Imports nothing of one client."""

from __future__ import annotations

from typing import Any

TOOLS = 5000
QUERY = "add two whole numbers"
WANTED = "probe-add"
ARGUMENTS = {"a": 20, "b": 22}
# What a scripted model asks for, one call after the other.
TURNS: list[tuple[str, dict[str, Any]]] = [
    ("search_tools", {"queries": [QUERY], "limit": 3}),
    ("load_tools", {"names": [WANTED]}),
    (WANTED, ARGUMENTS),
]
FEWEST, MOST = 3, 10

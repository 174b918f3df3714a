"""The encoder package that is installed beside Interlock, if there is one."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

GROUP: Final = "interlock.search_encoders"


def installed() -> Path | None:
    """The folder of the encoder package that is installed, if there is one: `interlock-search-encoder`."""
    for point in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        return Path(point.load()())
    return None

"""The encoder package that is installed beside Interlock, if there is one."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

GROUP: Final = "interlock.search_encoders"


def installed() -> Path | None:
    """The folder of the encoder package that is installed, if there is one: `interlock-search-encoder`."""
    if not _is_stated():
        return None
    from importlib.metadata import entry_points

    for point in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        return Path(point.load()())
    return None


def _is_stated() -> bool:
    """Whether the metadata of a package has the name of the group. Parsing all metadata takes five times as long."""
    finders = [one for one in sys.meta_path if hasattr(one, "find_distributions")]
    if finders != [PathFinder]:
        return True  # packages may be elsewhere
    return any(_has_group(place or ".") for place in sys.path)


def _has_group(place: str) -> bool:
    if os.path.isfile(place):
        return True  # an archive
    try:
        names = os.listdir(place)
    except OSError:
        return False
    name = GROUP.encode()
    for folder in names:
        if folder.endswith((".dist-info", ".egg-info", ".egg")):
            try:
                with open(os.path.join(place, folder, "entry_points.txt"), "rb") as file:
                    if name in file.read():
                        return True
            except NotADirectoryError:
                continue  # metadata of one file states no entry points
            except FileNotFoundError:
                if folder.endswith(".egg"):
                    return True  # its metadata is elsewhere in it
    return False

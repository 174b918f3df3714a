"""The ledger of the demonstration's tools, in the open data directory.

Tools are functions; what they keep and where is their own affair, and no home is theirs to know. Those of the
demonstration are tried in many homes, and what they did in one must not show in the next. So they are told a place, by
the environment, unless somebody has told them another. Of several homes in one process it is the one opened first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

PLACE = "INTERLOCK_DEMO_LEDGER"
# module state: the environment belongs to the whole process, and so do the places that take turns in it
_open: list[str] = []


def keep_in(home: Path) -> Callable[[], None]:
    """Let the demonstration keep its ledger in a home. Returns the way to end that."""
    place = str(home.absolute() / "demo-ledger.jsonl")
    told = os.environ.get(PLACE)
    if told is not None and told not in _open:
        return lambda: None
    _open.append(place)
    os.environ[PLACE] = _open[0]
    return lambda: _leave(place)


def _leave(place: str) -> None:
    if place in _open:
        _open.remove(place)
    told = os.environ.get(PLACE)
    if told == place and _open:
        os.environ[PLACE] = _open[0]
    elif told == place:
        del os.environ[PLACE]

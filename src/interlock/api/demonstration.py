"""The ledger of the demonstration's tools, in the open data directory.

Tools are functions and do not know the data directory. The demo tools are tried in many data directories, and their
effects in one must not show in the next. So a variable of the environment names the place of their ledger, unless it is
set already. If a process opens several data directories, the first one counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

PLACE = "INTERLOCK_DEMO_LEDGER"
# module state: the environment belongs to the whole process, and so do the places that take turns in it
_open: list[str] = []


def keep_in(home: Path) -> Callable[[], None]:
    """Put the ledger of the demo tools into a data directory. Returns a function that ends that."""
    place = str(home.absolute() / "demo-ledger.jsonl")
    place_given = os.environ.get(PLACE)
    if place_given is not None and place_given not in _open:
        return lambda: None
    _open.append(place)
    os.environ[PLACE] = _open[0]
    return lambda: _leave(place)


def _leave(place: str) -> None:
    if place in _open:
        _open.remove(place)
    place_given = os.environ.get(PLACE)
    if place_given == place and _open:
        os.environ[PLACE] = _open[0]
    elif place_given == place:
        del os.environ[PLACE]

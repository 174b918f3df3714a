"""Settings of Python's garbage collector in a server: how often it runs, and over which objects."""

from __future__ import annotations

import gc

# Requests leave next to no cycles behind, and the usual 700 objects are those of a few requests in flight: the
# collector would walk them all the time and find nothing. A write has about 110, and 128 writes may run at once.
_THRESHOLDS = (20_000, 50, 100)


def collect_seldom() -> None:
    """Make the collector run rarely."""
    gc.set_threshold(*_THRESHOLDS)


def exempt_loaded_modules() -> None:
    """Exempt every object that exists now from collection. To be called once, when a server has loaded its modules.

    A full collection walks all modules otherwise, which stops the process for 80 ms and longer.
    """
    gc.freeze()

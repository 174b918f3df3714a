"""Run `interlock demo` with commands that need not load the program anew (see tests/support/forked.py).

Those of the tour that are killed, wait or serve load it anew all the same. `TOUR_PYTHON` begins the commands of the
others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from interlock.cli import main

INTERLOCK = [sys.executable, "-m", "interlock.cli"]
_run: Any = subprocess.run


def run(arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a command of the tour."""
    if list(arguments[:3]) == INTERLOCK:
        arguments = [*os.environ["TOUR_PYTHON"].split("\n"), *arguments[1:]]
    return _run(arguments, **options)


def tour() -> None:
    subprocess.run = run  # pyright: ignore[reportAttributeAccessIssue] - as far as the tour uses it
    main()


if __name__ == "__main__":
    tour()

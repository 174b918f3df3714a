"""Run `interlock demo` with commands that need not load the program anew (see tests/support/forked.py).

The one that the tour kills loads it anew all the same. `TOUR_PYTHON` begins the commands of the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from interlock.cli import main

INTERLOCK = [sys.executable, "-m", "interlock.cli"]
_start: Any = subprocess.Popen


def start(arguments: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a command of the tour. The one that is killed has a descriptor to say when."""
    if list(arguments[:3]) == INTERLOCK and "pass_fds" not in options:
        arguments = [*os.environ["TOUR_PYTHON"].split("\n"), *arguments[1:]]
    return _start(arguments, **options)


def tour() -> None:
    subprocess.Popen = start  # pyright: ignore[reportAttributeAccessIssue] - as far as the tour uses it
    main()


if __name__ == "__main__":
    tour()

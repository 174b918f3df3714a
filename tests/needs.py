"""Programs that tests need and no wheel brings. Where CI=true, which installs them, a missing one fails the run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


def need(program: str, package: str, *, below: str = "") -> Path:
    """Where a program is, on the PATH or in a directory that matches `below`."""
    found = shutil.which(program)
    places = [Path(found)] if found else sorted(Path("/").glob(f"{below.lstrip('/')}/{program}") if below else ())
    if places:
        return places[-1]
    if os.environ.get("CI") == "true":
        pytest.fail(f"{program} is not installed: apt-get install {package}")
    pytest.skip(f"{program} is not installed: apt-get install {package}")

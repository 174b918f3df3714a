"""Programs that tests need and no wheel brings. Where CI=true, which installs them, a missing one fails the run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NoReturn


def need(program: str, package: str, *, below: str = "") -> Path:
    """Where a program is, on the PATH or in a directory that matches `below`."""
    found = shutil.which(program)
    places = [Path(found)] if found else sorted(Path("/").glob(f"{below.lstrip('/')}/{program}") if below else ())
    if places:
        return places[-1]
    return missing(f"{program} is not installed: apt-get install {package}")


def missing(words: str) -> NoReturn:
    """Skip the test because the machine lacks something; fail it where CI=true."""
    import pytest  # which benchmarks do without

    if os.environ.get("CI") == "true":
        pytest.fail(words)
    pytest.skip(words)

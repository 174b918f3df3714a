"""Run `interlock demo` with commands that need not load the program anew (see tests/warm.py).

Those of the tour that are killed, wait or serve load it anew all the same.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from interlock.cli import main
from tests import warm

INTERLOCK = [sys.executable, "-m", "interlock.cli"]
_run: Any = subprocess.run


def run(
    arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path, stderr: int, **options: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run a command of the tour."""
    if list(arguments[:3]) != INTERLOCK:
        return _run(arguments, env=env, cwd=cwd, stderr=stderr, **options)
    code, out, err = warm.run(arguments[3:], env, cwd, merged=stderr == subprocess.STDOUT)
    if options["stdout"] is None:
        sys.stdout.write(out.decode())
        sys.stdout.flush()
    return subprocess.CompletedProcess(arguments, code, out, err)


if __name__ == "__main__":
    subprocess.run = run  # pyright: ignore[reportAttributeAccessIssue] - as far as the tour uses it
    main()
